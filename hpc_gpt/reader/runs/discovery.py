"""Finds runs, benches, logs and Slurm scripts under the paths that a user names, and splits the name of a log.

Folders are walked without following circular links, and only plain files are opened. `read_log` decides by the first
bytes whether a file is a log; this module leaves out only names that no log has (source, pages, weights).
"""

import contextlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_gpt.core import output
from hpc_gpt.core.files import kernel_devices
from hpc_gpt.core.format import and_more
from hpc_gpt.core.runs.rounds import BENCH_FILE, is_bench
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.reader.lines.read_log import READER_FAILED
from hpc_gpt.reader.lines.source import STDIN

EMPTY = "empty file"
OF_KERNEL = "devices and files of the kernel, not entered"
# Reasons without a note: `report`'s own outputs, and copies of a run's output in addition to the run.
WRITTEN_BY_US, OUTPUT_FILE = "written by hpc-gpt itself", "the output file of a run that is listed"
_QUIET = (WRITTEN_BY_US, OUTPUT_FILE)
_HEAD = 4096  # bytes that are searched for #SBATCH
_SCRIPT_HEAD = 65536  # further bytes that are searched if name or first line is a script's
_LARGEST_SCRIPT = 1 << 20
_LEAST_ALIKE = 256  # logs with fewer bytes may be equal by chance
_BLOCK = 1 << 20
_NAMED = 8  # paths that are named per reason
_REASONS = 3  # reasons that are named in a note
_UNREAD = "cannot be read"
_BY_NAME = "not a log by its name"
# Pages of `report` and `plan` have these first lines, exports these names (`report/exports.py`).
_OUR_PAGE = re.compile(rb'<meta name="generator" content="hpc-gpt ')
_OUR_NOTE = b"Runs land here, one folder each:"  # logs/README.md
_OUR_EVENTS = re.compile(r"^events\.out\.tfevents\.\d+\.hpc-gpt$")
_OUR_WANDB = "hpc-gpt.json"
# Names of texts that may quote a log, and of files that are not text.
_NO_LOG = re.compile(
    r"\.(?:py|pyi|ipynb|md|rst|tex|html?|css|js|ts|c|cc|cpp|cu|cuh|h|hpp|rs|go|java|toml|ya?ml|ini|cfg|patch|diff"
    r"|svg|bib|lock|pyc|pt|pth|ckpt|safetensors|npy|npz|bin|idx|distcp|tfevents[^/]*)$"
    r"|^(?:(?:generation_|tokenizer_)?config|tokenizer|model\.safetensors\.index)\.json$",
    re.IGNORECASE,
)
_SCRIPT_NAME = re.compile(r"\.(?:sh|bash|slurm|sbatch|sub|job|batch)$", re.IGNORECASE)
_SBATCH = re.compile(rb"^\s*#SBATCH\s", re.MULTILINE)


@dataclass
class DiscoveredFiles:
    """The files found, in the order of the walk. `skipped`: reason -> the first paths; `counts`: reason -> how many.

    `benches`: files of a bench's rows. The runs and logs of their rounds, in the same folder, are not listed.
    """

    own: list[RunFolder] = field(default_factory=list)
    benches: list[Path] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    scripts: list[Path] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def skip(self, why: str, path: str | os.PathLike[str]) -> None:
        """Counts a path that is left out; names the first few per reason, but all of our own outputs."""
        self.counts[why] = self.counts.get(why, 0) + 1
        named = self.skipped.setdefault(why, [])
        if len(named) < _NAMED or why == WRITTEN_BY_US:
            named.append(str(path))


def discover(paths: Sequence[str | os.PathLike[str]]) -> DiscoveredFiles:
    """Finds the files under the paths, each once. A path that does not exist is skipped with that reason."""
    files = DiscoveredFiles()
    seen: set[tuple[int, int]] = set()
    for path in paths:
        if str(path) == STDIN:
            if Path(STDIN) not in files.logs:
                files.logs.append(Path(STDIN))
            continue
        _take_path(Path(path), files, seen, named=True)
    if files.own and files.logs:
        _leave_out_output_files(files)
    return files


def _leave_out_output_files(files: DiscoveredFiles) -> None:
    """Leaves out the files of `--output` and `--error` of our runs: a link to the log of an attempt, a file that the
    attempt has recorded, or a copy that was moved. A copy may be shorter while the run lasts, or continue with the next
    attempt's log."""
    by_head: dict[bytes, list[Path]] = {}
    attempts = [attempt for run in files.own for attempt in run.attempts()]
    for log in (log for attempt in attempts for log in attempt.logs):
        by_head.setdefault(_head(log), []).append(log)
    recorded = {os.path.realpath(name) for one in attempts for name in read_stored(one.outputs).get("files", ())}
    for path in files.logs.copy():
        logs = by_head.get(_head(path), ()) if str(path) != STDIN else ()
        with contextlib.suppress(OSError):  # one of the two files is gone: its reader reports that
            if os.path.realpath(path) in recorded or any(_same_log(path, log) for log in logs):
                is_link = any(path.samefile(log) for log in logs)
                files.logs.remove(path)
                if not is_link:  # a copy, not a link of ours
                    files.skip(OUTPUT_FILE, path)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_LEAST_ALIKE)
    except OSError:
        return b""


def _same_log(path: Path, log: Path) -> bool:
    """Whether two files are the same, or the longer one begins with the whole other."""
    if path.samefile(log):
        return True
    common = min(path.stat().st_size, log.stat().st_size)
    with path.open("rb") as mine, log.open("rb") as theirs:
        for start in range(0, common, _BLOCK):
            size = min(_BLOCK, common - start)
            if mine.read(size) != theirs.read(size):
                return False
    return common >= _LEAST_ALIKE


def notes(files: DiscoveredFiles, paths: Sequence[str] = ()) -> list[str]:
    """The notes on skipped paths: `skipped a.png and 2 more: binary`, several reasons on one line.

    Files that `paths` name, and logs that a reader failed on, are named themselves, up to eight per reason, each
    reason on its own line."""
    lines, walked = [], dict[str, dict[str, int]]()
    for why, count in sorted(files.counts.items()):
        if why in _QUIET:
            continue
        named = [path for path in files.skipped[why] if path in paths or why.startswith(READER_FAILED)]
        if named:
            lines.append(f"skipped {', '.join(map(shown_path, named))}{and_more(count, len(named))}: {why}")
        else:
            walked.setdefault(_BY_NAME if why.startswith(_BY_NAME) else why, {})[why] = count
    # First the files that might have been logs.
    ranked = sorted(walked, key=lambda kind: (not kind.startswith(_UNREAD), -sum(walked[kind].values())))
    parts = []
    for kind in ranked[:_REASONS]:
        first, *others = walked[kind]
        shown = f"{shown_path(files.skipped[first][0])}{and_more(sum(walked[kind].values()), 1)}"
        parts.append((shown, kind if others else first))
    if len(ranked) == 1:
        lines.append("skipped " + ": ".join(parts[0]))
    elif ranked:
        total, unnamed = (sum(sum(walked[kind].values()) for kind in kinds) for kinds in (ranked, ranked[_REASONS:]))
        text = ", ".join(f"{shown} ({why})" for shown, why in parts)
        lines.append(f"skipped {total:,} paths: {text}{f' and {unnamed:,} others' if unnamed else ''}")
    return lines


def shown_path(path: str) -> str:
    """The path as users see it."""
    return "standard input" if path == STDIN else path


def _take_path(path: Path, files: DiscoveredFiles, seen: set[tuple[int, int]], named: bool = False) -> None:
    """Takes a file, or all files under a folder. `named`: the user named it."""
    try:
        about = path.stat()
    except OSError as fault:
        return files.skip("a link to nothing" if path.is_symlink() else _why(fault), path)
    key = (about.st_dev, about.st_ino)
    if stat.S_ISDIR(about.st_mode):
        return _walk(path, files, seen)
    if key in seen:
        return None if named else files.skip("file seen before, for example through a link", path)
    seen.add(key)
    if not stat.S_ISREG(about.st_mode):
        return files.skip("not a plain file", path)
    return _take_file(path, about.st_size, files, named)


def _walk(top: Path, files: DiscoveredFiles, seen: set[tuple[int, int]]) -> None:
    """Takes all folders below, each once, sorted by name. Folders of the kernel are not entered."""
    waiting, kernel, parents = [top], kernel_devices(), dict[Path, Path]()
    while waiting:
        folder = waiting.pop()
        output.working_on = str(folder)
        try:
            about = folder.stat()
            key = (about.st_dev, about.st_ino)
            if about.st_dev in kernel:
                files.skip(OF_KERNEL, folder)
                continue
            if key in seen:
                if folder != top and not (folder / "resolved.json").is_file():  # a sweep's link to one of its runs
                    files.skip("folder seen before, for example through a link", folder)
                continue
            seen.add(key)
            with os.scandir(folder) as listing:
                entries = list(listing)
        except OSError as fault:
            files.skip(_why(fault), folder)
            continue
        if any(entry.name == "resolved.json" and entry.is_file() for entry in entries):
            files.own.append(RunFolder(_resolved(folder, parents)))
            continue
        if is_bench(folder / BENCH_FILE):
            files.benches.append((folder / BENCH_FILE).resolve())
            continue
        if folder.name.startswith("offline-run-") and any(entry.name == _OUR_WANDB for entry in entries):
            files.skip(WRITTEN_BY_US, folder)
            continue
        folders = []
        for entry in sorted(entries, key=lambda entry: _natural(entry.name)):
            path = folder / entry.name
            if not _is_folder(entry):
                _take_path(path, files, seen)
            elif entry.name.startswith("."):
                files.skip("hidden folder", path)
            else:
                folders.append(path)
        waiting += reversed(folders)


def _resolved(folder: Path, parents: dict[Path, Path]) -> Path:
    """The folder without links. `parents`: the parents that were resolved before."""
    if folder.is_symlink() or folder.name in ("", ".."):
        return folder.resolve()
    parent = folder.parent
    if parent not in parents:
        parents[parent] = parent.resolve()
    return parents[parent] / folder.name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # `_take_path` reports why
        return False


def _take_file(path: Path, size: int, files: DiscoveredFiles, named: bool) -> None:
    if size == 0:
        return files.skip(EMPTY, path)
    if not named and path.name.startswith("."):
        return files.skip("hidden file", path)
    if _is_ours(path):
        return files.skip(WRITTEN_BY_US, path)
    if not named and (no_log := _NO_LOG.search(path.name)):
        return files.skip(f"{_BY_NAME} (*{no_log[0].lower()})", path)
    if is_bench(path):
        if path.resolve() not in files.benches:
            files.benches.append(path.resolve())
        return None
    try:
        if _is_script(path, size):
            files.scripts.append(path)
            return None
    except OSError as fault:
        return files.skip(_why(fault), path)
    if not named and _SCRIPT_NAME.search(path.name):
        return files.skip("a shell script without #SBATCH", path)
    files.logs.append(path)
    return None


def _is_ours(path: Path) -> bool:
    """Whether hpc-gpt has the file: a page of `report`, an event file of TensorBoard, or the note in its logs/."""
    if path.name == "README.md" and path.parent.name == "logs":
        return path.read_bytes().startswith(_OUR_NOTE)
    if path.suffix != ".html":
        return bool(_OUR_EVENTS.match(path.name))
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        return bool(_OUR_PAGE.search(file.read(_HEAD)))
    return False


def _is_script(path: Path, size: int) -> bool:
    """Whether the file is a script for sbatch: by its name or first line, and a line that starts with `#SBATCH`."""
    if size > _LARGEST_SCRIPT:
        return False
    with open(path, "rb", buffering=0) as file:
        head = file.read(_HEAD)
        if not (head.startswith(b"#!") or _SCRIPT_NAME.search(path.name)):
            return False
        return bool(_SBATCH.search(head) or (len(head) == _HEAD and _SBATCH.search(file.read(_SCRIPT_HEAD))))


def _why(fault: OSError) -> str:
    if isinstance(fault, PermissionError):
        return f"{_UNREAD}: permission denied"
    if isinstance(fault, FileNotFoundError):
        return "does not exist"
    return f"{_UNREAD}: {fault.strerror or fault}"


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key that puts `rank_10` after `rank_9`."""
    pieces = re.split(r"(\d{1,18})", name)
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces if piece]


# Suffixes that name a format or a stream, not a run.
_PACKED = re.compile(r"\.gz$", re.IGNORECASE)
_ENDING = re.compile(r"\.(?:log|out|err|txt|stdout|stderr|output|json|jsonl|csv)$", re.IGNORECASE)
_PBS = re.compile(r"\.[oe](\d{2,12})$")
_ROTATED = re.compile(r"\.(\d{1,3})$")
_STREAM = re.compile(r"(?:^|(?<=[._-]))(?:stdout|stderr)(?=$|[._-])", re.IGNORECASE)
# `rank_0`, `node3`, `local_rank-1`, `[worker]7`: the number of a rank or a node.
_RANK_WORD = re.compile(
    r"(?:^|(?<=[._-]))(?:(?:local|global|node)[_-]?)?(?:rank|ranks|node|worker|proc|process|task|host|gpu)[_-]?(\d{1,7})"
    r"(?=$|[._-])",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d{1,18}")
_DATE = re.compile(r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])")
_TIME_OF_DATE = re.compile(_DATE.pattern + r"[-_T](?:[01]\d|2[0-3])[0-5]\d[0-5]\d$")
_JOB = re.compile(r"(?:slurm[-_.]?|job[-_.]?(?:id)?[-_.]?|jobid[-_.]?)(\d{1,12})(?:[_.-]|$)", re.IGNORECASE)
_LONG_NUMBER = re.compile(r"(?:^|(?<=[._-]))(\d{5,12})(?=$|[._-])")
# Names that any run may give its log: only the folder tells the runs apart.
_GENERAL = {
    *("log", "logs", "main", "main_log", "job", "run", "slurm", "nohup", "screen", "console", "console_output", "rank"),
    *("train", "training", "trainer", "train_log", "training_log", "output", "out", "stdout", "stderr", "std", "debug"),
    *("info", "err", "error", "trainer_state", "progress"),
}
_ATTEMPT_FOLDER = re.compile(r"attempt_\d{1,6}$")
# The folder of a W&B run, whose log is `files/output.log`.
WANDB_RUN = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-[\w-]{1,64}$")
# A number after these words belongs to a run, never to a rank.
_RUN_WORD = re.compile(
    r"(?:^|[._-])(?:run|job|exp|experiment|trial|seed|test|bench|config|cfg|rep|try|v|lr|bs|n|tp|pp|dp|mbs|gbs)[_-]?$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class LogName:
    """The parts of a log's name.

    `family`: the folder and name without words for ranks and streams (`rank_3`, `stderr`), equal for all logs of a job.
    `labelled`: such a word, or a folder of torchrun's, gave the rank. `shape`: the family with `#` for each number in
    the file name and for torchrun's attempts; `numbers`: the numbers replaced. `stem`: the remaining name. `rotation`:
    2 for `train.log.2`.
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
        """Whether the log is the standard error of a job."""
        return bool(re.search(r"(?:\.err|stderr|\.e\d+)", self.path.name, re.IGNORECASE))


def log_name(path: Path) -> LogName:
    """Splits a log's name into its parts.

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
        if (match := _RANK_WORD.fullmatch(folder)) is not None:
            folders[index], labelled = "#rank", True
            rank = int(match[1]) if rank is None else rank
        elif index and folder.isdecimal() and _ATTEMPT_FOLDER.fullmatch(folders[index - 1]):
            folders[index], labelled = "#rank", True
            rank = int(folder) if rank is None else rank
    family = "/".join([*folders, stem])
    numbers = tuple(_NUMBER.findall(stem))
    folders = ["#attempt" if _ATTEMPT_FOLDER.fullmatch(folder) else folder for folder in folders]
    shape = "/".join([*folders, _NUMBER.sub("#", stem)])
    return LogName(path, family, shape, numbers, labelled, rank, stem, job_id or job_id_of(stem), rotation)


def job_id_of(stem: str) -> str | None:
    """The job id in a name: after `slurm-` or `job`, else the last number of five or more digits.

    A date, and the time of day after it, are not job ids: W&B's folders have them in their names.

    >>> [job_id_of(stem) for stem in ("slurm-4711_3", "gpt2_base_n4-1832555", "run-20240131_101112-7bjj8vgu", "gpt2")]
    ['4711', '1832555', None, None]
    """
    if match := _JOB.search(stem):
        return match[1]
    numbers = [
        match[1]
        for match in _LONG_NUMBER.finditer(stem)
        if not _DATE.fullmatch(match[1]) and not _TIME_OF_DATE.search(stem, 0, match.end())
    ]
    return numbers[-1] if numbers else None


def is_rank_number(names: list[LogName], position: int) -> bool:
    """Whether the number at a position of similar names may be a rank: from 0 or 1 to n without a gap.

    The number of a run or of an array task (`slurm-4711_3`) is not a rank.
    """
    numbers = sorted(int(name.numbers[position]) for name in names)
    if len(numbers) < 2 or numbers[0] > 1 or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        return False
    stem = names[0].stem
    before = stem[: list(_NUMBER.finditer(stem))[position].start()]
    return not _RUN_WORD.search(before) and not re.search(r"\d{3,12}_$", before)


def distinguishing_folders(path: Path) -> list[str]:
    """The folders above a log that may name a run, without folders of ranks, nodes, torchrun and W&B's `files`."""
    folders: list[str] = []
    before = ""
    for folder in path.absolute().parent.parts[1:]:
        of_torchrun = _ATTEMPT_FOLDER.fullmatch(folder) or (folder.isdecimal() and _ATTEMPT_FOLDER.fullmatch(before))
        of_wandb = folder == "files" and WANDB_RUN.fullmatch(before)
        if folder != ".." and not of_torchrun and not of_wandb and not _RANK_WORD.fullmatch(folder):
            folders.append(folder)
        before = folder
    return folders


def without_number(name: LogName, position: int) -> LogName:
    """The name without its rank, the number at a position."""
    match = list(_NUMBER.finditer(name.stem))[position]
    return replace(name, stem=_tidy(f"{name.stem[: match.start()].rstrip('._-')}{name.stem[match.end() :]}"))


def is_general(stem: str) -> bool:
    """Whether a name says nothing about a run: `train`, `stdout`, or an empty name."""
    return not stem or stem.lower() in _GENERAL


def _tidy(stem: str) -> str:
    return re.sub(r"[._-]{2,}", "-", stem).strip("._- ")
