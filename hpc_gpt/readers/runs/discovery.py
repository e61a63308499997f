"""The files under the paths that a user names: runs, benches, logs, Slurm scripts; and what a log's name says.

A folder is walked without following a link in a circle, and only plain files are opened. `read_log` decides by its
first bytes what a file is; here it is judged by its name, and only if no program writes a log under such a name
(source, pages, weights).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_gpt.readers.logs.source import STDIN
from hpc_gpt.readers.runs.run_read import BENCH_FILE, is_bench
from hpc_gpt.runs.run_folder import RunFolder

_HEAD = 4096  # bytes in which a script is looked for
_SCRIPT_HEAD = 65536  # and as many more of what is one by its name
_LARGEST_SCRIPT = 1 << 20
_NAMED = 8  # paths of a kind that are named
# Names of text that may quote a log, and of what is no text.
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
        """Count what is left out, and name the first few."""
        self.counts[why] = self.counts.get(why, 0) + 1
        named = self.skipped.setdefault(why, [])
        if len(named) < _NAMED:
            named.append(str(path))


def discover(paths: Sequence[str | os.PathLike[str]]) -> Discovered:
    """What is under the paths, each thing once. A path that does not exist is skipped with that reason."""
    found = Discovered()
    seen: set[tuple[int, int]] = set()
    for path in paths:
        if str(path) == STDIN:
            if Path(STDIN) not in found.logs:
                found.logs.append(Path(STDIN))
            continue
        _take_path(Path(path), found, seen, named=True)
    return found


def notes(found: Discovered) -> list[str]:
    """What was skipped, a line for each reason: `skipped a.png and 2 more: binary`."""
    lines = []
    for why, count in sorted(found.counts.items()):
        others = f" and {count - 1:,} more" if count > 1 else ""
        lines.append(f"skipped {shown(found.skipped[why][0])}{others}: {why}")
    return lines


def shown(path: str) -> str:
    """A path as a user reads it."""
    return "standard input" if path == STDIN else path


def _take_path(path: Path, found: Discovered, seen: set[tuple[int, int]], named: bool = False) -> None:
    """Take a file, or what is under a folder. `named`: by the user, and not found in a folder."""
    try:
        about = path.stat()
    except OSError as fault:
        return found.skip("a link to nothing" if path.is_symlink() else _why(fault), path)
    key = (about.st_dev, about.st_ino)
    if stat.S_ISDIR(about.st_mode):
        return _walk(path, found, seen)
    if key in seen:
        return None if named else found.skip("file met before, as through a link", path)
    seen.add(key)
    if not stat.S_ISREG(about.st_mode):
        return found.skip("not a plain file", path)
    return _take_file(path, about.st_size, found, named)


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
        folders = []
        for entry in entries:
            path = folder / entry.name
            if not _is_folder(entry):
                _take_path(path, found, seen)
            elif entry.name.startswith("."):
                found.skip("hidden folder", path)
            else:
                folders.append(path)
        waiting += reversed(folders)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # taking it tells why
        return False


def _take_file(path: Path, size: int, found: Discovered, named: bool) -> None:
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


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Orders `rank_10` after `rank_9`."""
    pieces = re.split(r"(\d{1,18})", name)
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces if piece]


# Endings that say how a file is kept or which stream it is, not what ran.
_PACKED = re.compile(r"\.(?:gz|zst|zstd)$", re.IGNORECASE)
_ENDING = re.compile(r"\.(?:log|out|err|txt|stdout|stderr|output|json|jsonl|csv)$", re.IGNORECASE)
_PBS = re.compile(r"\.[oe](\d{2,12})$")
_ROTATED = re.compile(r"\.(\d{1,3})$")
_STREAM = re.compile(r"(?:^|(?<=[._-]))(?:stdout|stderr)(?=$|[._-])", re.IGNORECASE)
# `rank_0`, `node3`, `local_rank-1`, `[worker]7`: the number is a rank's or a node's.
_RANK_WORD = re.compile(
    r"(?:^|(?<=[._-]))(?:(?:local|global|node)[_-]?)?(?:rank|ranks|node|worker|proc|process|task|host|gpu)[_-]?(\d{1,7})"
    r"(?=$|[._-])",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d{1,18}")
_DATE = re.compile(r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])")
_JOB = re.compile(r"(?:slurm[-_.]?|job[-_.]?(?:id)?[-_.]?|jobid[-_.]?)(\d{1,12})(?:[_.-]|$)", re.IGNORECASE)
_LONG_NUMBER = re.compile(r"(?:^|(?<=[._-]))(\d{5,12})(?=$|[._-])")
# Names that any run gives its log: the folder tells the runs apart.
_GENERAL = {
    *("log", "logs", "main", "main_log", "job", "run", "slurm", "nohup", "screen", "console", "console_output", "rank"),
    *("train", "training", "trainer", "train_log", "training_log", "output", "out", "stdout", "stderr", "std", "debug"),
    *("info", "err", "error"),
}
_ATTEMPT_FOLDER = re.compile(r"attempt_\d{1,6}$")
# A number after these words counts runs, never ranks.
_RUN_WORD = re.compile(
    r"(?:^|[._-])(?:run|exp|experiment|trial|seed|test|bench|config|cfg|rep|try|v|lr|bs|n|tp|pp|dp|mbs|gbs)[_-]?$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class LogName:
    """A log's name taken apart.

    `family`: the same for all ranks and streams of one job that say so by a word (`rank_3`, `stderr`), with the
    folder. `labelled`: such a word, or torchrun's folders, gave it a rank. `shape`: the family with each number in the
    file's own name a `#`, and torchrun's attempts one; `numbers`: those numbers. `stem`: what is left as a name.
    `rotation`: of `train.log.2`, 2.
    """

    path: Path
    family: str
    shape: str
    numbers: tuple[str, ...]
    labelled: bool
    rank: int | None
    stem: str
    job_id: str | None
    rotation: int | None

    @property
    def is_errors(self) -> bool:
        """Whether it is what a job wrote to standard error."""
        return bool(re.search(r"(?:\.err|stderr|\.e\d+)", self.path.name, re.IGNORECASE))


def log_name(path: Path) -> LogName:
    """Take a name apart.

    >>> name = log_name(Path("logs/gpt-4711-rank_3.err"))
    >>> name.stem, name.rank, name.job_id, name.is_errors
    ('gpt-4711', 3, None, True)
    """
    name = _PACKED.sub("", path.name)
    rotation = None
    job_id = None
    if pbs := _PBS.search(name):
        job_id, name = pbs[1], name[: pbs.start()]
    elif (rotated := _ROTATED.search(name)) and _ENDING.search(name[: rotated.start()]):
        rotation, name = int(rotated[1]), name[: rotated.start()]
    name = _ENDING.sub("", name)
    bare = _STREAM.sub("", name)
    ranks = _RANK_WORD.findall(bare)
    stem = _tidy(_RANK_WORD.sub("", bare))
    folders = list(path.parent.parts)
    labelled = bool(ranks)
    rank = int(ranks[-1]) if ranks else None
    for index, folder in enumerate(folders):
        if (found := _RANK_WORD.fullmatch(folder)) is not None:
            folders[index], labelled = "#rank", True
            rank = int(found[1]) if rank is None else rank
        elif index and folder.isdecimal() and _ATTEMPT_FOLDER.fullmatch(folders[index - 1]):
            folders[index], labelled = "#rank", True
            rank = int(folder) if rank is None else rank
    family = "/".join([*folders, stem])
    numbers = tuple(_NUMBER.findall(stem))
    folders = ["#attempt" if _ATTEMPT_FOLDER.fullmatch(folder) else folder for folder in folders]
    shape = "/".join([*folders, _NUMBER.sub("#", stem)])
    return LogName(path, family, shape, numbers, labelled, rank, stem, job_id or job_id_of(stem), rotation)


def job_id_of(stem: str) -> str | None:
    """The job id in a name: after `slurm-` or `job`, else the last number of five digits or more that is no date.

    >>> [job_id_of(stem) for stem in ("slurm-4711_3", "gpt2_base_n4-1832555", "run-20240131", "gpt2")]
    ['4711', '1832555', None, None]
    """
    if found := _JOB.search(stem):
        return found[1]
    numbers = [number for number in _LONG_NUMBER.findall(stem) if not _DATE.fullmatch(number)]
    return numbers[-1] if numbers else None


def is_rank_number(names: list[LogName], position: int) -> bool:
    """Whether the number at a position of names alike may be a rank: 0 or 1 to n without a gap, no run's count.

    An array's tasks (`slurm-4711_3`) are runs.
    """
    texts = [name.numbers[position] for name in names]
    numbers = sorted(int(text) for text in texts)
    if (
        len(numbers) < 2
        or numbers[0] > 1
        or numbers[-1] - numbers[0] != len(numbers) - 1
        or len(set(numbers)) < len(numbers)
    ):
        return False
    stem = names[0].stem
    begin = list(_NUMBER.finditer(stem))[position].start()
    before = stem[:begin]
    return not _RUN_WORD.search(before) and not re.search(r"\d{3,12}_$", before)


def telling_folders(path: Path) -> list[str]:
    """The folders above a log that may name a run: not a rank's, a node's or torchrun's."""
    found: list[str] = []
    before = ""
    for folder in path.absolute().parent.parts[1:]:
        of_torchrun = _ATTEMPT_FOLDER.fullmatch(folder) or (folder.isdecimal() and _ATTEMPT_FOLDER.fullmatch(before))
        if folder != ".." and not of_torchrun and not _RANK_WORD.fullmatch(folder):
            found.append(folder)
        before = folder
    return found


def without_number(name: LogName, position: int) -> LogName:
    """The name without the number at a position, which is a rank's."""
    found = list(_NUMBER.finditer(name.stem))[position]
    return replace(name, stem=_tidy(f"{name.stem[: found.start()].rstrip('._-')}{name.stem[found.end() :]}"))


def is_general(stem: str) -> bool:
    """Whether a name says nothing about a run, and its folder names it: `train`, `stdout`, nothing at all."""
    return not stem or stem.lower() in _GENERAL


def _tidy(stem: str) -> str:
    return re.sub(r"[._-]{2,}", "-", stem).strip("._- ")
