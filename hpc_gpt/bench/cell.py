"""What a bench measures: cells, in rounds, each an experiment of ours that trains here or a program of the user's.

A machine's speed drifts with its heat. So every round measures each cell once and begins with another one, and a ratio
is one of medians over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_gpt.launch.prepare import Prepared
from hpc_gpt.runs.record import Record
from hpc_gpt.settings.resolve import folder_name


@dataclass(frozen=True)
class Cell:
    """One thing that is measured, a row of the table. No other cell of the bench has its `name`.

    An experiment of ours has `prepared`. A peer has `command`, a line for a shell, and `pattern`, a regular expression
    that finds its tokens/s in what it prints; None if the log readers find them. What cannot run here has the `record`
    that says why.
    """

    name: str
    prepared: Prepared | None = None
    command: str | None = None
    pattern: str | None = None
    record: Record | None = None

    @property
    def slug(self) -> str:
        """Its name as that of a folder or a file.

        >>> Cell("deepspeed-zero:3 mbs 4").slug
        'deepspeed-zero_3_mbs_4'
        """
        return folder_name(self.name)


def order_of(cells: int, rounds: int) -> list[list[int]]:
    """The cells of each round, by their index, in the order in which they are measured.

    >>> order_of(3, 2)
    [[0, 1, 2], [1, 2, 0]]
    """
    return [[(number + place) % cells for place in range(cells)] for number in range(rounds)]


def spread_of(figures: Sequence[float]) -> float | None:
    """(largest - smallest) / median, as a share; None of fewer than two figures.

    >>> spread_of([98.0, 100.0, 104.0])
    0.06
    """
    if len(figures) < 2:
        return None
    middle = statistics.median(figures)
    return (max(figures) - min(figures)) / middle if middle else None


def ratios_to_first(figures: Sequence[float | None]) -> list[float | None]:
    """Each figure over the first that is known; None for one that is not known.

    >>> ratios_to_first([None, 200.0, 100.0])
    [None, 1.0, 0.5]
    """
    first = next((figure for figure in figures if figure), None)
    return [figure / first if figure is not None and first else None for figure in figures]
