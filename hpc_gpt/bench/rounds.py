"""Cells measured in rounds: in which order, and what their rounds give together.

A machine's speed drifts with its heat. So every round measures each cell once, and begins with another one; a ratio is
one of medians over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def order_of(cells: int, rounds: int) -> list[list[int]]:
    """The cells of each round, by their place, in the order in which they are measured.

    >>> order_of(3, 2)
    [[0, 1, 2], [1, 2, 0]]
    """
    return [[(number + place) % cells for place in range(cells)] for number in range(rounds)]


def median_of(figures: Sequence[float]) -> float | None:
    """The median; None of none."""
    return statistics.median(figures) if figures else None


def spread_of(figures: Sequence[float]) -> float | None:
    """(largest - smallest) / median, as a share; None of fewer than two.

    >>> spread_of([98.0, 100.0, 104.0])
    0.06
    """
    if len(figures) < 2:
        return None
    middle = statistics.median(figures)
    return (max(figures) - min(figures)) / middle if middle else None


def ratios_to_first(figures: Sequence[float | None]) -> list[float | None]:
    """Each figure over the first that is known; None for one that is not.

    >>> ratios_to_first([None, 200.0, 100.0])
    [None, 1.0, 0.5]
    """
    first = next((figure for figure in figures if figure), None)
    return [figure / first if figure is not None and first else None for figure in figures]
