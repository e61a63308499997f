"""Bars of letters and blocks, which say the same without colour."""

from __future__ import annotations

import sys

from hpc_gpt.plan.prediction import StepTime
from hpc_gpt.report.plans.words import PARTS


def can_draw_blocks() -> bool:
    """Whether stdout takes the block characters."""
    try:
        "█░".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def memory_bar(need_gib: float, card_gib: float, length: int, blocks: bool) -> str:
    """The card as a bar, filled as far as it is needed; a `>` at its end where that is farther.

    >>> memory_bar(24, 32, 8, False), memory_bar(40, 32, 8, False)
    ('######..', '#######>')
    """
    full, empty = ("█", "░") if blocks else ("#", ".")
    if need_gib > card_gib:
        return full * (length - 1) + ">"
    filled = max(1, round(length * need_gib / card_gib))
    return full * filled + empty * (length - filled)


def time_bar(step: StepTime, length: int) -> str:
    """A step as a bar of the parts' letters; what is less than half a letter has none.

    >>> time_bar(StepTime(6, 2, 1, 1, 0, 0, 0, 0, 0.1), 10)
    'ccccccrrtb'
    """
    bar, done = "", 0.0
    for part in PARTS:
        done += getattr(step, part.field)
        bar += part.letter * (round(length * done / step.step_s) - len(bar))
    return bar
