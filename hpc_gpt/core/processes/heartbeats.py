"""The heartbeats of an attempt's ranks: a rank lives, what it does, how fast it computes.

With the attempt's other files they also say how long it had its GPUs: one answer for status, report and the budget.

The heartbeats of a node's ranks are lines of `attempts/<n>/beats/<its first rank>.json`. That rank overwrites the file
in place, with one small write that also succeeds on a full disk. A rank writes its own file if the first rank of its
node does not run. If Python itself cannot run, the rank's watch in C writes the stacks of its threads to `<rank>.txt`.
When an attempt is over, the next one packs its heartbeats into one file, `all.jsonl`, as sites limit the number of
files.
"""

import contextlib
import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import MOST_BYTES, read_bytes, write_once
from hpc_gpt.core.machine.gpu_figures import GpuFigures
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.runs.stored import read_lines_as
from hpc_gpt.core.settings.sized import Sized

_PACKED = "all.jsonl"
# Bytes of a line, with blanks and newline.
LINE_BYTES = 1024
# Seconds between two heartbeats of a rank that makes steps, least and most; seconds that a reader allows on top.
_PERIOD_S = 1.0, 15.0
_LATE_S = 3.0
# A node is slow if its rate is below this share of its peers' median rate.
SLOW = 0.85


def period_s(hang_floor_s: float) -> float:
    """Seconds between two heartbeats of a rank that makes steps."""
    return min(max(hang_floor_s / 20, _PERIOD_S[0]), _PERIOD_S[1])


def silent_after_s(hang_floor_s: float) -> float:
    """Seconds after which a rank without a new heartbeat counts as silent, for any reader."""
    return 2 * period_s(hang_floor_s) + _LATE_S


@dataclass(frozen=True)
class RankHeartbeat:
    """One heartbeat of a rank."""

    rank: int
    host: str
    pid: int
    beat: int
    """Counts up while the rank lives."""
    step: int
    phase: str
    quiet_s: float
    """Seconds since its main thread began its step or phase."""
    limit_s: float
    """Seconds that the step or phase may last; 0: for ever."""
    time: float
    """Epoch seconds by the node's clock."""
    dumped: bool = False
    """Its stacks are written."""
    collective: str = ""
    """The collective in which the main thread was when it passed the limit."""
    place: str = ""
    """The line of code at which the main thread was then."""
    probe_s: float | None = None
    """Median seconds of a matrix product of fixed size on its device in the last window (`core.processes.slow_ranks`);
    None if not measured yet."""
    elapsed_s: float | None = None
    """How long the attempt has had its job, without the time in which it was suspended; by the first rank on the
    host of its script."""
    gpus: tuple[tuple[float | None, ...], ...] | None = None
    """The fields of GpuFigures of each GPU of the node, in the heartbeat of one rank per node; None in the others,
    and without a GPU."""
    still_s: float | None = None
    """Seconds since a program that is not ours made a step; None if its steps come as usual."""
    still: str = ""
    """Its other signs of life, and after how long it counts as a hang."""
    probe_first_s: float | None = None
    """`probe_s` in the rank's first hour."""
    clock_mhz: float | None = None
    """The clock of its GPU when it last timed that product."""
    throttle: str = ""
    """What held the GPU's clock down, as the driver says."""
    heard: str = ""
    """The signal that asked it to end."""
    device: str = ""
    """The name of its GPU; empty on a CPU."""
    lost: str = ""
    """A task of a script that failed while others live, as srun says."""

    @property
    def gpu_figures(self) -> list[GpuFigures]:
        return [GpuFigures(*figures) for figures in self.gpus or () if len(figures) == len(GpuFigures._fields)]

    def path(self, folder: Path) -> Path:
        return folder / f"{self.rank}.json"


_LEFT_OUT = frozenset({"probe_first_s", "clock_mhz", "throttle", "heard", "device", "lost"})  # without a value


def write_heartbeat(folder: Path, heartbeat: RankHeartbeat, others: Iterable[bytes] = ()) -> None:
    """Overwrites the rank's line, and after it the lines of `others`. OSError if the disk refuses."""
    number = os.open(heartbeat.path(folder), os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(number, b"".join([line_of(heartbeat), *others]), 0)
    finally:  # over NFS other nodes see a file only after it is closed
        os.close(number)


def line_of(heartbeat: RankHeartbeat) -> bytes:
    """The heartbeat as a line of LINE_BYTES."""
    every = asdict(heartbeat).items()
    values = {key: value for key, value in every if key not in _LEFT_OUT or value not in (None, "")}
    text = {key: _short(value) if isinstance(value, str) else value for key, value in values.items()}
    line = json.dumps(text, separators=(",", ":")).encode()
    if len(line) >= LINE_BYTES:  # the sign of life is more important than the GPU figures
        line = json.dumps({**text, "gpus": None}, separators=(",", ":")).encode()
    return line[: LINE_BYTES - 1].ljust(LINE_BYTES - 1) + b"\n"


def _short(text: str) -> str:
    """The text, cut to 120 characters of ASCII, so that all texts fit in the line."""
    return "".join(letter if " " <= letter <= "~" and letter not in '"\\' else "?" for letter in text[:120])


def read_heartbeats(folder: Path) -> dict[int, RankHeartbeat]:
    """{rank: its last heartbeat} of a folder, without heartbeats that are damaged or just being written."""
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    newest: dict[int, RankHeartbeat] = {}
    for name in names:
        if name == _PACKED or name.removesuffix(".json").isdigit():
            first_bytes = -1 if name == _PACKED else MOST_BYTES  # one line per rank of the node
            for heartbeat in read_lines_as(RankHeartbeat, f"{folder}/{name}", first_bytes):
                if heartbeat.rank not in newest or newest[heartbeat.rank].beat < heartbeat.beat:
                    newest[heartbeat.rank] = heartbeat
    return newest


def pack_heartbeats(run: RunFolder) -> None:
    """Packs the heartbeats of each attempt that is over into one file; files of stacks stay.

    Errors of the disk are ignored.
    """
    for attempt in run.attempts():
        with contextlib.suppress(OSError, RunFolderError):
            if attempt.ended() and attempt.heartbeats.is_dir() and not (attempt.heartbeats / _PACKED).exists():
                lines = [json.dumps(asdict(last)) + "\n" for last in read_heartbeats(attempt.heartbeats).values()]
                write_once(attempt.heartbeats / _PACKED, "".join(lines))
                for path in attempt.heartbeats.glob("[0-9]*"):
                    if path.suffix == ".json" or not path.stat().st_size:
                        path.unlink()


def c_dump(folder: Path, rank: int) -> Path:
    """The file in which a rank's watch in C writes its stacks."""
    return folder / f"{rank}.txt"


def read_c_dump(folder: Path, rank: int) -> str:
    """The stacks that the rank's watch in C wrote; empty if there are none."""
    with contextlib.suppress(OSError):
        return read_bytes(c_dump(folder, rank)).decode(errors="replace")
    return ""


def median_of_others(ordered: Sequence[float], own: float) -> float | None:
    """The median of a sorted sequence without `own`, one of its values; None if it has no other value.

    >>> median_of_others([1.0, 2.0, 4.0], 2.0)
    2.5
    """
    middle, odd = divmod(len(ordered) - 1, 2)
    if len(ordered) < 2:
        return None
    place = bisect_left(ordered, own)  # without it, later values move one place to the front
    low, high = (ordered[at + (at >= place)] for at in (middle - (not odd), middle))
    return (low + high) / 2


def gpus_of(resolved: Sized) -> int:
    """The number of GPUs of a job of the run, spare nodes included."""
    return resolved.gpus + (resolved.job.spare_nodes or 0) * resolved.ranks_per_node


def end_time_of(attempt: Attempt) -> float | None:
    """Epoch seconds of an attempt's end, as its judge or a rank wrote it. Else the last sign of life of its ranks: a
    heartbeat or a step, else a line of the log or the start of a rank. None without any."""
    if written := attempt.verdict().get("time") or attempt.ended().get("time"):
        return float(written)
    signs = [heartbeat.time for heartbeat in read_heartbeats(attempt.heartbeats).values()]
    signs.append(attempt.last_metrics().get("time") or 0.0)
    if not any(signs):
        for path in (*attempt.logs, *attempt.ranks.glob("*.json")):
            with contextlib.suppress(OSError):
                signs.append(path.stat().st_mtime)
    return max(signs) or None


def ran_on_cpu(attempt: Attempt) -> bool:
    """Whether the ranks of an attempt found no GPU, so that it has no GPU hours, in any figure or budget. If it ended
    before they looked, another attempt of the run says it."""
    device = attempt.trainer().get("device")
    with contextlib.suppress(OSError):
        others = {*os.listdir(attempt.folder.parent)} - {attempt.folder.name} if device is None else ()
        by_others = (Attempt(attempt.folder.with_name(name)).trainer().get("device") for name in sorted(others))
        device = device or next(filter(None, by_others), None)
    return device == "cpu"


def gpu_seconds(
    attempt: Attempt, gpus: int, over: float | None, elapsed_s: float | None = None, following: Attempt | None = None
) -> float:
    """The GPU-seconds of an attempt, by `gpu_time`, and of the pause until its job goes on as attempt `following`.
    Ranks on CPUs cost nothing."""
    if ran_on_cpu(attempt):
        return 0.0
    count, span_s = gpu_time(attempt, gpus, over, elapsed_s)
    return count * (span_s + idle_s(attempt, span_s, following))


def idle_s(attempt: Attempt, span_s: float, following: Attempt | None) -> float:
    """Seconds in which the job of an attempt that took `span_s` seconds idles after it: as next.json says after the
    pause, else until a restart in it begins the attempt `following`."""
    if (idle := attempt.verdict().get("idle_s")) is not None:
        return float(idle)
    began, begins = attempt.started().get("started"), following.started().get("started") if following else None
    in_job = following is not None and following.restarts_in_job
    return max(0.0, begins - began - span_s) if in_job and began and begins else 0.0


def gpu_time(attempt: Attempt, gpus: int, over: float | None, elapsed_s: float | None = None) -> tuple[int, float]:
    """Returns (number of GPUs, seconds) of an attempt that ended at `over`, on `gpus` GPUs unless it states its own
    number. 0 s if its start or its end is not known.

    Its time is `elapsed_s`, or what its judge, a rank or the heartbeats measured. Only without these it is the
    difference of two clocks, which may belong to two hosts and may have been set meanwhile.
    """
    start = attempt.started()
    began, count = start.get("started"), start.get("gpus") or gpus
    if not began or not over:
        return count, 0.0
    span_s = _measured_s(attempt) if elapsed_s is None else elapsed_s
    return count, max(0.0, over - began if span_s is None else span_s)


def _measured_s(attempt: Attempt) -> float | None:
    elapsed_s = attempt.verdict().get("elapsed_s", attempt.ended().get("elapsed_s"))
    if elapsed_s is None:
        measured = [
            heartbeat.elapsed_s
            for heartbeat in read_heartbeats(attempt.heartbeats).values()
            if heartbeat.elapsed_s is not None
        ]
        elapsed_s = max(measured, default=None)
    return None if elapsed_s is None else float(elapsed_s)
