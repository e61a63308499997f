"""How an attempt left its run standing: over, or about to go on by itself, when and without which nodes; in words."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_gpt.runs.run_folder import Attempt


@dataclass(frozen=True)
class Standing:
    """`ended` is how the run stands by an attempt that is over, `cause` says it in words; `goes_on`: another follows.

    `attempt_ended` and `attempt_cause` are the attempt's own: a run ends as `no_progress` by an attempt that ended as
    `hang`.
    """

    ended: str
    cause: str | None
    goes_on: bool
    attempt_ended: str
    attempt_cause: str | None


def standing_of(attempt: Attempt) -> Standing | None:
    """What the judge, else the trainer or the script, says of an attempt; None while nobody has said how it ended."""
    verdict, end = attempt.verdict(), attempt.ended()
    if not verdict and not end:
        return None
    own = str(verdict.get("attempt_ended") or end.get("ended") or "unknown")
    cause = _text(verdict.get("cause")) or _text(end.get("cause"))
    goes_on = attempt.goes_on
    if goes_on or not verdict:
        return Standing(own, cause, goes_on, own, cause)
    return Standing(str(verdict.get("ended") or own), _text(verdict.get("why")) or cause, False, own, cause)


def deciding(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts that tell how their run stands: without those that stepped aside for another one, unless there is
    no other."""
    counted = list(attempts)
    while len(counted) > 1 and str(counted[-1].ended().get("ended")) == "refused":
        counted.pop()
    return counted


def done_by(attempts: Sequence[Attempt]) -> Attempt | None:
    """The attempt that has trained its run to the end; None where the run does not stand so."""
    last = next(reversed(deciding(attempts)), None)
    standing = standing_of(last) if last is not None else None
    return last if standing is not None and standing.ended == "done" else None


def words_between(attempt: Attempt, now: float | None = None) -> str | None:
    """What a run waits for behind an attempt that it goes on from; None where it does not, or nobody has judged it."""
    verdict = attempt.verdict()
    if verdict.get("go_on") is not True:
        return None
    words = [f"goes on after {verdict.get('attempt_ended')}"]
    begin = verdict.get("begin")
    current = time.time() if now is None else now
    if isinstance(begin, int | float) and verdict.get("pause_s") and begin > current:
        words.append(f"at {clock(begin, current)}")
    left_out = [str(node) for node in verdict.get("exclude") or []]
    if left_out:
        words.append(f"without {', '.join(left_out[:8])}" + (", …" if len(left_out) > 8 else ""))
    row = verdict.get("retries")
    tail = f"; {ordinal(row)} failure in a row" if isinstance(row, int) and row > 1 else ""
    return ", ".join(words) + tail


def clock(moment: float, now: float) -> str:
    """`12:03` here today, else with the date."""
    then, today = time.localtime(moment), time.localtime(now)
    return time.strftime("%H:%M" if then[:3] == today[:3] else "%Y-%m-%d %H:%M", then)


def ordinal(number: int) -> str:
    """
    >>> [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 21, 112)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '21st', '112th']
    """
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def time_of(table: Mapping[str, Any]) -> float:
    """Epoch seconds of a line of submissions.jsonl or a small file; 0 where it has none."""
    moment = table.get("time")
    return float(moment) if isinstance(moment, int | float) and not isinstance(moment, bool) else 0.0
