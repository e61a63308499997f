"""The failures of one part of a log: one per line, without those that ended nothing, and what came after them."""

import math
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from hpc_gpt.core.ends.failures import meaning
from hpc_gpt.reader.failures.blame import FIRST_OBSERVED
from hpc_gpt.reader.lines.fields import MARKS
from hpc_gpt.reader.lines.matches import OF_NO_YEAR
from hpc_gpt.reader.lines.part import Failure, Part

# torchelastic's report of a failed group: lines of the host, number and exit code of one rank.
_ROOT = re.compile(r"^Root Cause ")
_HOST = re.compile(r"^host +: ")
_RANK = re.compile(r"^rank +: \d+ \(local_rank: ")
_EXIT = re.compile(r"^exitcode +: (-?\d+)")
_LONGEST_BLOCK = 8  # lines
IGNORED = "Exception ignored "
# Messages of an interpreter, its threads and exit functions as it ends.
_BEGINS_TRACEBACK = re.compile(rf"{IGNORED}|Exception in thread |Error in atexit")
_AT_EXIT = re.compile(r"Fatal Python error: (?!Segm|Bus|Ill|Float)")
_LONGEST_TRACEBACK = 40  # lines
# Exceptions whose text is the traceback of another: torch's and Ray's of a worker, and of a callback.
_QUOTES = re.compile(
    r"\bCaught \w{1,80} in (?:DataLoader worker process|pin memory thread|replica) \d{1,7}|\bRayTaskError\("
    r"|Traceback \(most recent call last\)"
)
_LONGEST_QUOTE = 150  # lines
SKEW_S = 2.0  # clocks may differ by this much


def one_a_line(failures: Iterable[Failure]) -> list[Failure]:
    """The failures in the order of their lines, only the most specific one per line."""
    best: dict[tuple[str, int], Failure] = {}
    for failure in failures:
        place = (failure.place.file, failure.place.line)
        if place not in best or plainness(failure) < plainness(best[place]):
            best[place] = failure
    return sorted(best.values(), key=lambda failure: failure.place.line)


def found_in(part: Part) -> list[Failure]:
    """The failures of a part, one per line, and the ends that its log states."""
    ends = [(ended, f"the log says that it ended: {ended}", place) for ended, place in part.ends if ended != "done"]
    done = min((place.line for ended, place in part.ends if ended == "done"), default=math.inf)
    return without_quotes(without_ignored(one_a_line([*part.failures, *(Failure(*end) for end in ends)]), done))


def with_years(parts: Sequence[Part], failed: Sequence[list[Failure]]) -> list[list[Failure]]:
    """The failures of the parts; times without a year get the year of the parts' other times, if there are any."""
    timed = next((at for part in parts for at in (part.last_at, part.first_at) if at is not None), None)
    if timed is None:
        return list(failed)
    return [
        [
            failure
            if failure.at is None or failure.at >= OF_NO_YEAR
            else replace(failure, at=_in_year_of(timed, failure.at))
            for failure in of_part
        ]
        for of_part in failed
    ]


def _in_year_of(timed: float, at: float) -> float:
    """A time without a year, which was read as of 1970, in the year that brings it nearest to `timed`."""
    year, moment = datetime.fromtimestamp(timed, UTC).year, datetime.fromtimestamp(at, UTC)
    return min(
        (moment.replace(year=year + of).timestamp() for of in (-1, 0, 1)), key=lambda candidate: abs(candidate - timed)
    )


def without_quotes(failures: Sequence[Failure]) -> list[Failure]:
    """Drops exceptions that only quote the traceback of another, which stands below them. The quoted one takes over
    their class, advice and time if its own say less."""
    left = list(failures)
    for outer in failures:
        if not _QUOTES.search(outer.message):
            continue
        below = (each for each in left if 0 < each.place.line - outer.place.line <= _LONGEST_QUOTE)
        if (inner := next((each for each in below if each.rank == outer.rank), None)) is not None:
            vague = inner.ended == "error" and not (inner.to_do or inner.echo)
            cause = replace(inner, ended=outer.ended, to_do=outer.to_do) if vague else inner
            left[left.index(inner)] = replace(cause, at=outer.at if inner.at is None else inner.at)
            left.remove(outer)
    return left


def is_specific(failure: Failure) -> bool:
    """Whether the failure says more of what failed than an exception that no class covers."""
    row, plain_request = meaning(failure.ended), failure.ended == "user_error" and not failure.to_do
    return row.in_log and not (plain_request or failure.echo)


def by_clock(chain: Sequence[Failure]) -> Sequence[Failure]:
    """The failures of a file, given by line, in the order of their clocks if a later line has an earlier time, as the
    lines of several ranks are not in order. A failure without a clock has the time of the one before it, and so has
    Slurm's, whose clock is another one."""
    times: list[float] = []
    for failure in chain:
        timed = failure.at is not None and not meaning(failure.ended).by_scheduler
        times.append(failure.at if timed and failure.at is not None else times[-1] if times else -math.inf)
    if not times or min(times) >= times[0] - SKEW_S:
        return chain
    return [failure for _, failure in sorted(zip(times, chain, strict=True), key=lambda pair: pair[0])]


def plainness(failure: Failure) -> tuple[bool, bool, bool]:
    """A sort key of the failures of one line: the first one by it is the most specific."""
    # An echo has a pattern of its own, which is more specific than just the name of the exception.
    plain = failure.ended == "error" and not failure.to_do
    return plain and not failure.echo, plain, not failure.to_do


def last_line(part: Part, steps_left: int, counts_words: bool = True) -> int:
    """The line before which failures were survived, since `steps_left` steps follow, or, if it `counts_words`, the
    program says that it is done; 0 without one."""
    lines = [0, *(where.line for ended, where in part.ends if ended == "done" and counts_words)]
    lines += [fact.place.line for fact in part.totals.values() if fact.place.file == part.file]
    for steps in part.steps.values():
        # Of very many lines only a sample is stored: each line stands for several.
        nth = steps_left if steps.stride == 1 else 1
        lines += [int(steps.line[-nth])] if len(steps) >= nth else []
    # tqdm draws its bar again when it is closed, after the traceback.
    bars = [
        bar
        for before, bar in zip([None, *part.progress], part.progress, strict=False)
        if not before or bar[0] != before[0]
    ]
    lines += [bars[-steps_left][2]] if len(bars) >= steps_left else []
    return max(lines)


def first_line(part: Part) -> float:
    """The first line of a step or a bar; infinite without one."""
    return min(
        [*(int(steps.line[0]) for steps in part.steps.values() if len(steps)), *(bar[2] for bar in part.progress[:1])],
        default=math.inf,
    )


def prints_steps(part: Part) -> bool:
    return bool(part.interleaved or part.progress or any(map(len, part.steps.values())))


def makes_steps(part: Part) -> bool:
    """Whether a part has a step that was made in it: a bar without elapsed time is drawn before the first one."""
    return (
        part.interleaved
        or any(map(len, part.steps.values()))
        or any(step and elapsed != 0 for step, elapsed, _ in part.progress)
    )


def last_setting(part: Part) -> int:
    """The last line in which a program says what it trains; 0 without one."""
    lines = [place.line for _, place in part.arguments.values()]
    lines += [fact.place.line for name in MARKS for fact in part.facts.get(name, ())]
    return max(lines, default=0)


def lines_of_program(part: Part) -> list[int]:
    """The first and the last lines of a part in which a program says what it trains, or makes steps."""
    lines = [place.line for _, place in part.arguments.values()]
    lines += [fact.place.line for name, facts in part.facts.items() if name not in ("job_id", "node") for fact in facts]
    lines += [int(steps.line[end]) for steps in part.steps.values() if len(steps) for end in (0, -1)]
    return lines + [line for _, _, line in (*part.progress[:1], *part.progress[-1:])]


def last_step_at(part: Part, nth: int = 1) -> float | None:
    """The time of day of a part's last step, or of the `nth` from the end, in epoch seconds; None without one."""
    ats = (steps["at"] for steps in part.steps.values() if len(steps) >= nth)
    last = [at[-nth] for at in ats if math.isfinite(at[-nth])]
    return float(max(last)) if last else None


def without_ignored(failures: Iterable[Failure], done: float = math.inf) -> list[Failure]:
    """The failures, sorted by line, without those that ended nothing: exceptions that Python ignored, each after its
    `IGNORED` line; and, after the line in which the program is `done`, those of its threads and exit functions."""
    ending: list[Failure] = []
    ignored: Failure | None = None
    for failure in failures:
        at_end = failure.place.line > done
        if failure.echo and _BEGINS_TRACEBACK.match(failure.message):
            ignored = failure if at_end or failure.message.startswith(IGNORED) else ignored
        elif ignored is not None and failure.place.line - ignored.place.line <= _LONGEST_TRACEBACK:
            if failure.rank is None or ignored.rank is None or failure.rank == ignored.rank:
                ignored = None  # the last line of its traceback
            else:
                ending.append(failure)
        elif not (at_end and _AT_EXIT.match(failure.message)):
            ending.append(failure)
    return ending


def join_blocks(failures: Sequence[Failure]) -> list[Failure]:
    """The failures, sorted by line, with every block of torchelastic as one failure with rank, node and exit code.

    The block below `Root Cause` was observed first. Lines of an incomplete block stay as they are.
    """
    joined: list[Failure] = []
    begun: list[Failure] = []
    for failure in failures:
        another = _HOST.match(failure.message) and any(_HOST.match(line.message) for line in begun)
        if begun and (another or not 0 < failure.place.line - begun[0].place.line <= _LONGEST_BLOCK):
            joined += begun
            begun = []
        if failure.echo and any(regex.match(failure.message) for regex in (_ROOT, _HOST, _RANK)):
            begun.append(failure)
        elif begun and _EXIT.match(failure.message) and (whole := _joined(begun, failure)):
            joined.append(whole)
            begun = []
        else:
            joined.append(failure)
    return sorted([*joined, *begun], key=lambda failure: failure.place.line)


def _joined(begun: Sequence[Failure], end: Failure) -> Failure | None:
    rank = next((failure.rank for failure in begun if _RANK.match(failure.message)), None)
    if rank is None:
        return None
    node = next((failure.node for failure in begun if _HOST.match(failure.message)), None)
    message = f"rank {rank} {_exit_text(end)}"
    if any(_ROOT.match(failure.message) for failure in begun):
        message = f"{message}, {FIRST_OBSERVED}"
    return replace(end, message=message, rank=rank, node=None if node == "localhost" else node)


def _exit_text(failure: Failure) -> str:
    match = _EXIT.match(failure.message)
    code = int(match[1]) if match else 0
    if code >= 0:
        return f"ended with exit code {code}"
    name = f" ({signal.Signals(-code).name})" if -code in set(signal.Signals) else ""
    return f"was ended by signal {-code}{name}"
