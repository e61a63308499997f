"""What lies under the paths a user names: our own runs and benches, logs, Slurm scripts; what is none, and why.

A folder is walked without following a link in a circle, and only plain files are opened. What a file is, `read_log`
says by its first bytes; here it is judged by its name, and only where no program writes a log under such a name
(source, pages, weights).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.readers.own_runs.kept_records import BENCH_FILE, is_bench
from hpc_gpt.runs.run_folder import RunFolder

STDIN = "-"
_HEAD = 4096  # bytes in which a script is looked for
_SCRIPT_HEAD = 65536  # and as many more of what is one by its name
_LARGEST_SCRIPT = 1 << 20
# Names under which text is written that may quote a log, or none at all.
_NO_LOG = re.compile(
    r"\.(?:py|pyi|ipynb|md|rst|tex|html?|css|js|ts|c|cc|cpp|cu|cuh|h|hpp|rs|go|java|toml|ya?ml|ini|cfg|patch|diff"
    r"|svg|bib|lock|pyc|pt|pth|ckpt|safetensors|npy|npz|bin|idx|distcp|tfevents[^/]*)$",
    re.IGNORECASE,
)
_SCRIPT_NAME = re.compile(r"\.(?:sh|bash|slurm|sbatch|sub|job|batch)$", re.IGNORECASE)
_SBATCH = re.compile(rb"^\s*#SBATCH\s", re.MULTILINE)


@dataclass
class Discovered:
    """What was found, in the order of the walk. `skipped`: why -> the first paths of that kind; `counts`: how many.

    `benches` are files of a bench's rows: the runs and logs of their rounds, which lie beside them, are not found.
    """

    own: list[RunFolder] = field(default_factory=list)
    benches: list[Path] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    scripts: list[Path] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def skip(self, why: str, path: str | os.PathLike[str]) -> None:
        """Counts what is left out, and names the first few."""
        self.counts[why] = self.counts.get(why, 0) + 1
        named = self.skipped.setdefault(why, [])
        if len(named) < _NAMED:
            named.append(str(path))


_NAMED = 8


def discover(paths: Sequence[str | os.PathLike[str]]) -> Discovered:
    """What lies under the paths, each thing once. A path that does not exist is skipped with that reason."""
    found = Discovered()
    seen: set[tuple[int, int]] = set()
    for path in paths:
        if str(path) == STDIN:
            if Path(STDIN) not in found.logs:
                found.logs.append(Path(STDIN))
            continue
        _take_named(Path(path), found, seen)
    return found


def notes(found: Discovered) -> list[str]:
    """What was skipped, a line for each reason: `skipped a.png and 2 more: binary`."""
    lines = []
    for why, count in sorted(found.counts.items()):
        others = f" and {count - 1:,} more" if count > 1 else ""
        lines.append(f"skipped {shown(found.skipped[why][0])}{others}: {why}")
    return lines


def shown(path: str) -> str:
    """What a user is told of a path."""
    return "standard input" if path == STDIN else path


def _take_named(path: Path, found: Discovered, seen: set[tuple[int, int]]) -> None:
    try:
        about = path.stat()
    except OSError as fault:
        return found.skip("a link to nothing" if path.is_symlink() else _why(fault), path)
    key = (about.st_dev, about.st_ino)
    if stat.S_ISDIR(about.st_mode):
        return _walk(path, found, seen)
    if key in seen:
        return None
    seen.add(key)
    if not stat.S_ISREG(about.st_mode):
        return found.skip("not a plain file", path)
    return _take_file(path, about.st_size, found, named=True)


def _walk(top: Path, found: Discovered, seen: set[tuple[int, int]]) -> None:
    """Every folder below, each once, names in order."""
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            about = folder.stat()
            key = (about.st_dev, about.st_ino)
            if key in seen:
                if folder != top:
                    found.skip("folder met before, as through a link", folder)
                continue
            seen.add(key)
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: _natural(entry.name))
        except OSError as fault:
            found.skip(_why(fault), folder)
            continue
        if any(entry.name == "resolved.json" and entry.is_file() for entry in entries):
            found.own.append(RunFolder(folder.resolve()))
            continue
        if is_bench(folder / BENCH_FILE):
            found.benches.append((folder / BENCH_FILE).resolve())
            continue
        folders = list(_take_entries(folder, entries, found, seen))
        waiting += reversed(folders)


def _take_entries(
    folder: Path, entries: Sequence[os.DirEntry[str]], found: Discovered, seen: set[tuple[int, int]]
) -> Iterator[Path]:
    """Takes the files of a folder, and gives its folders."""
    for entry in entries:
        path = folder / entry.name
        try:
            if entry.is_dir():
                if entry.name.startswith("."):
                    found.skip("hidden folder", path)
                else:
                    yield path
                continue
            about = entry.stat()
        except OSError as fault:
            found.skip("a link to nothing" if entry.is_symlink() else _why(fault), path)
            continue
        key = (about.st_dev, about.st_ino)
        if key in seen:
            found.skip("file met before, as through a link", path)
            continue
        seen.add(key)
        if not stat.S_ISREG(about.st_mode):
            found.skip("not a plain file", path)
            continue
        _take_file(path, about.st_size, found)


def _take_file(path: Path, size: int, found: Discovered, named: bool = False) -> None:
    if size == 0:
        return found.skip("empty file", path)
    if not named and path.name.startswith("."):
        return found.skip("hidden file", path)
    if not named and (no_log := _NO_LOG.search(path.name)):
        return found.skip(f"no log by its name (*{no_log[0].lower()})", path)
    if is_bench(path):
        if path.resolve() not in found.benches:
            found.benches.append(path.resolve())
        return None
    try:
        if _is_script(path, size):
            found.scripts.append(path)
            return None
    except OSError as fault:
        return found.skip(_why(fault), path)
    if not named and _SCRIPT_NAME.search(path.name):
        return found.skip("a shell script without #SBATCH", path)
    found.logs.append(path)
    return None


def _is_script(path: Path, size: int) -> bool:
    """Whether it is a script for sbatch: `#SBATCH` at the start of a line, in a script by its name or first line."""
    if size > _LARGEST_SCRIPT:
        return False
    with open(path, "rb", buffering=0) as file:
        head = file.read(_HEAD)
        if not (head.startswith(b"#!") or _SCRIPT_NAME.search(path.name)):
            return False
        return bool(_SBATCH.search(head) or (len(head) == _HEAD and _SBATCH.search(file.read(_SCRIPT_HEAD))))


def _why(fault: OSError) -> str:
    if isinstance(fault, PermissionError):
        return "cannot be read: permission denied"
    if isinstance(fault, FileNotFoundError):
        return "does not exist"
    return f"cannot be read: {fault.strerror or fault}"


_DIGITS = re.compile(r"(\d{1,18})")


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Orders `rank_10` after `rank_9`."""
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in _DIGITS.split(name) if piece]
