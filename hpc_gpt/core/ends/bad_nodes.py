"""The list of each cluster's nodes that failed or were slow, which the next jobs exclude for some time.

Every note is a file of its own in `state_dir()/nodes/<cluster>/`, and gets its name when it is complete. So two jobs
that note a node at the same time, on two hosts that share a home, write two files and lose none. A note expires, and
the next writer removes it. If the list cannot be read or written, a warning is printed, and the job continues as if the
list were empty.

The run in which a node failed excludes it. Every run excludes a node that failed twice, or that a measurement found bad
(`sure`).
"""

import contextlib
import json
import math
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from hpc_gpt.core.files import aside, state_dir
from hpc_gpt.core.runs.stored import NODE, read_as
from hpc_gpt.core.secrets import hide_secrets

# Limits on the notes, since each run of a sweep on a broken node notes the same failure.
_NOTES_A_NODE = 8
_NOTES = 512
_LONGEST_WHY = 500


@dataclass(frozen=True)
class BadNode:
    """A listed node: the cause and the run of its last note, and since and until when it is listed (epoch seconds).

    `times`: the number of its notes that have not expired; `runs`: their runs. `everyone`: every run excludes it, not
    only those runs.
    """

    node: str
    why: str
    run: str
    since: float
    until: float
    times: int
    runs: tuple[str, ...] = ()
    everyone: bool = False


@dataclass(frozen=True)
class _Note:
    """One note, as in its file."""

    node: str
    why: str
    run: str
    time: float
    until: float
    sure: bool = False


def note(cluster: str, node: str, why: str, run: str, hours: float, sure: bool = False) -> None:
    """Notes for `hours` that `node` of `cluster` failed in `run` (a run id).

    Nothing is noted if `hours` is not above 0, or `node` is not the name of a host. `sure`: a measurement found the
    node bad, so every run excludes it at once.
    """
    if not hours > 0 or not math.isfinite(hours) or not NODE.fullmatch(node):
        return
    now = time.time()
    entry = _Note(node, hide_secrets(why)[:_LONGEST_WHY], run, now, now + hours * 3600, sure)
    folder = _folder(cluster)
    name = f"{int(now * 1e6):018d}-{secrets.token_hex(4)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder, node, now)
        with aside(folder / name) as temporary:
            temporary.write_text(json.dumps(asdict(entry)) + "\n", encoding="utf-8")
            temporary.rename(folder / name)
    except OSError as fault:
        _warn(f"node {node} is not noted in {folder}: {fault.strerror}")


def listed(cluster: str, now: float | None = None) -> dict[str, BadNode]:
    """{name: node} of every node with a note that has not expired at `now`, sorted by name."""
    notes: dict[str, list[_Note]] = {}
    for _, entry in _notes(_folder(cluster)):
        if entry.until > (time.time() if now is None else now):
            notes.setdefault(entry.node, []).append(entry)
    return {node: _bad_node(entries) for node, entries in sorted(notes.items())}


def left_out(cluster: str, run: str, now: float | None = None) -> list[str]:
    """The nodes that `run` excludes: those that every run excludes, and those that failed in this run."""
    return [name for name, bad in listed(cluster, now).items() if bad.everyone or run in bad.runs]


def found(cluster: str, run: str, since: float) -> list[str]:
    """The listed nodes that `run` has noted since then, if a measurement or another run also says so."""
    notes = [entry for _, entry in _notes(_folder(cluster)) if entry.until > time.time()]
    new = {entry.node for entry in notes if entry.run == run and entry.time >= since}
    return sorted(new & {entry.node for entry in notes if entry.sure or entry.run != run})


def forgive(cluster: str, node: str) -> bool:
    """Removes a node from the list, and returns whether it was there. OSError if a note cannot be removed."""
    theirs = [path for path, entry in _notes(_folder(cluster)) if entry.node == node]
    for path in theirs:
        path.unlink(missing_ok=True)
    return bool(theirs)


def _bad_node(entries: list[_Note]) -> BadNode:
    last = max(entries, key=lambda entry: entry.time)
    return BadNode(
        node=last.node,
        why=last.why,
        run=last.run,
        since=min(entry.time for entry in entries),
        until=max(entry.until for entry in entries),
        times=len(entries),
        runs=tuple(dict.fromkeys(entry.run for entry in entries)),
        everyone=len(entries) > 1 or any(entry.sure for entry in entries),
    )


def _folder(cluster: str) -> Path:
    """The folder of a cluster's notes; special characters in its name are escaped."""
    name = quote(cluster, safe=" @+=,")
    return state_dir() / "nodes" / (name if not name.startswith(".") else f"%2E{name[1:]}")


def _notes(folder: Path) -> Iterator[tuple[Path, _Note]]:
    """Every readable note, oldest first."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json" and not path.name.startswith("."))
    except FileNotFoundError:
        return
    except OSError as fault:
        _warn(f"the list of bad nodes in {folder} cannot be read: {fault.strerror}")
        return
    for path in paths:
        entry = _read(path)
        if entry is not None:
            yield path, entry


def _read(path: Path) -> _Note | None:
    entry: _Note | None = read_as(_Note, path)
    return entry if entry is not None and NODE.fullmatch(entry.node) else None


def _prune(folder: Path, node: str, now: float) -> None:
    """Makes room for one more note of `node`: removes what has expired, is unreadable, or is above a limit."""
    valid = {path: entry for path, entry in _notes(folder) if entry.until > now}
    for path in set(folder.glob("*.json")) - valid.keys():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < now - 60:  # else it may be a note that is being written
                path.unlink()
    theirs = [path for path, entry in valid.items() if entry.node == node]
    surplus = theirs[: max(0, len(theirs) - _NOTES_A_NODE + 1)]
    others = [path for path in valid if path not in surplus]
    for path in (*surplus, *others[: max(0, len(others) - _NOTES + 1)]):
        path.unlink(missing_ok=True)


def _warn(message: str) -> None:
    sys.stderr.write(f"warning: {message}\n")
