"""Shows what ranks are doing, for the report of a hang: the stacks of processes, and the collectives in torch's flight
recorder.

The flight recorder works with NCCL or gloo. torch's own dump after a timeout, `flight/rank-<n>`, is a pickle and is not
opened here.
"""

import contextlib
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.core.files import read_json
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.trainer.supervision.heartbeat import name_ranks

_STACK_S = 20.0
# Flight records are read of this many late ranks, and of as many others: each has up to 100 kB.
_RECORDS = 64


def stack_of(pid: int) -> str:
    """Shows what a process does: its Python stacks if py-spy is installed, else its threads in /proc."""
    head = f"process {pid}: {_proc(pid, 'cmdline').replace(chr(0), ' ').strip()[:200]}"
    if (spy := shutil.which("py-spy")) is not None:
        try:
            done = subprocess.run(
                [spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_STACK_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0:
            return hide_secrets(f"{head}\n{done.stdout}")
    threads = [f"  {task.name}: {_of_thread(pid, task.name)}" for task in _threads(pid)]
    return hide_secrets("\n".join([head, *threads])) + "\n"


def _of_thread(pid: int, thread: str) -> str:
    name, state = _proc(pid, f"task/{thread}/comm"), _proc(pid, f"task/{thread}/stat").rpartition(")")[2].split()[:1]
    waits = _proc(pid, f"task/{thread}/wchan")
    kernel = " < ".join(
        line.split()[-1] for line in _proc(pid, f"task/{thread}/stack").splitlines()[:6] if line.split()
    )
    return f"{name}, state {''.join(state) or '?'}, in {kernel or waits or '?'}"


def _threads(pid: int) -> list[Path]:
    try:
        return sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))[:64]
    except OSError:
        return []


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


_FRAME = re.compile(r'File "(?P<file>[^"\n]{1,400})", line (?P<line>\d+) in (?P<function>\S{1,100})')


@dataclass(frozen=True)
class Frame:
    """One call of a stack: `file` is its path, `function` its name."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


def main_frames(dump: str) -> list[Frame]:
    """The main thread's calls, innermost first: the last block of a dump that faulthandler wrote."""
    block = re.split(r"^(?:Current thread|Thread) 0x", dump, flags=re.MULTILINE)[-1]
    return [Frame(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(block)]


# The functions in which a rank waits for another, in addition to those of torch.distributed.
_WAITS = {
    ("hpc_gpt/trainer/ranks.py", "finish"): "the all_reduce of a step's reports",
    ("hpc_gpt/trainer/model/dispatch.py", "route"): "the all_to_all of rows for experts",
    ("torch/autograd/graph.py", "_engine_run_backward"): "backward, with its collectives",
    ("torch/cuda/streams.py", "synchronize"): "the device",
    ("torch/cuda/__init__.py", "synchronize"): "the device",
}
_C10D = "torch/distributed/distributed_c10d.py"


def find_wait(frames: list[Frame]) -> tuple[str, str]:
    """Returns (the collective in which the main thread waits, empty for none; our call, else the innermost one)."""
    collective = next((name for frame in frames if (name := _collective(frame))), "")
    ours = next((frame for frame in frames if "hpc_gpt/" in frame.file), None)
    place = ours if collective else frames[0] if frames else None
    return collective, str(place or ours or "")


def _collective(frame: Frame) -> str:
    if frame.file.endswith(_C10D) and not frame.function.startswith("_"):
        return frame.function
    candidates = ((file, name) for (file, function), name in _WAITS.items() if function == frame.function)
    return next((name for file, name in candidates if frame.file.endswith(file)), "")


def read_flight_records(attempt: Attempt, late: Sequence[int]) -> str:
    """Reads the flight records of an attempt, in a large run those of the `late` ranks and of some others, and finds
    the open collective; empty if there are none, or they show none."""
    files = {int(path.stem): path for path in (attempt.folder / "flight").glob("*.json") if path.stem.isdigit()}
    ranks = sorted(files.keys() & set(late))[:_RECORDS] + sorted(files.keys() - set(late))[:_RECORDS]
    return find_open_collective({rank: read_json(files[rank]) for rank in ranks}, not files.keys() >= set(late))


@dataclass(frozen=True)
class _Group:
    """A rank's place in one process group: the number of the last collective that it began, and the open one."""

    begun: int
    open: str


def find_open_collective(records: Mapping[int, Mapping[str, Any]], some_silent: bool = False) -> str:
    """Describes the collective that is still open, with its number and group, and the ranks that have not begun it.
    `some_silent`: a rank that the others wait for has no record.

    >>> entry = {"pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 12, "retired": False,
    ...          "profiling_name": "nccl:all_reduce", "input_sizes": [[1024]], "state": "started"}
    >>> status = {"0": {"last_enqueued_collective": "12"}}
    >>> ahead = {"entries": [entry], "pg_status": status}
    >>> behind = {"entries": [{**entry, "collective_seq_id": 11, "retired": True}],
    ...           "pg_status": {"0": {"last_enqueued_collective": "11"}}}
    >>> find_open_collective({0: ahead, 1: ahead, 2: behind})
    'flight recorder: nccl:all_reduce 12 of group default_pg, sizes [[1024]], is open on ranks 0, 1; rank 2 is at 11'
    """
    groups: dict[str, dict[int, _Group]] = defaultdict(dict)
    for rank, record in records.items():
        for name, place in _groups_of(record).items():
            groups[name][rank] = place
    waiting = {rank for places in groups.values() for rank, place in places.items() if place.open}

    def explains(places: Mapping[int, _Group]) -> int:
        """The lowest first: ranks that are late and wait for nobody; a rank that is silent; ranks that wait, too."""
        most = max(place.begun for place in places.values())
        late = {rank for rank, place in places.items() if place.begun < most}
        return 0 if late - waiting else 2 if late else 1 if some_silent else 3

    for places in sorted(groups.values(), key=explains):
        most = max(place.begun for place in places.values())
        ahead = sorted(rank for rank, place in places.items() if place.begun == most and place.open)
        if ahead:
            late = [(rank, place.begun) for rank, place in sorted(places.items()) if place.begun < most]
            text = f"flight recorder: {places[ahead[0]].open} is open on {name_ranks(ahead)}"
            return "; ".join([text, *(f"rank {rank} is at {begun}" for rank, begun in late[:4])])
    for rank, record in sorted(records.items()):
        for entry in _entries(record):
            if entry.get("is_p2p") and not entry.get("retired"):
                return f"flight recorder: {entry.get('profiling_name')} is open on rank {rank}"
    return ""


def _entries(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    entries = record.get("entries")
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _groups_of(record: Mapping[str, Any]) -> dict[str, _Group]:
    """Reads {group: the rank's place in it}; empty for a record of another shape than torch's."""
    places: dict[str, _Group] = {}
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        last: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for entry in _entries(record):
            if not entry.get("is_p2p"):
                last[str(entry["pg_id"])].append(entry)
        for number, entries in last.items():
            name, description = (str(part) for part in entries[-1]["process_group"])
            status = record.get("pg_status", {}).get(number, {})
            begun = int(status.get("last_enqueued_collective") or entries[-1]["collective_seq_id"])
            open_ = next((entry for entry in entries if not entry.get("retired")), None)
            places[name] = _Group(begun, _describe(open_, description) if open_ is not None else "")
    return places


def _describe(entry: Mapping[str, Any], group: str) -> str:
    sizes = str(entry.get("input_sizes"))[:60]
    group = group if group not in ("", "undefined") else str(entry["process_group"][0])
    return f"{entry['profiling_name']} {entry['collective_seq_id']} of group {group}, sizes {sizes},"
