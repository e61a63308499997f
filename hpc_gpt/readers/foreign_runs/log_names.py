"""What a log's name says: which rank, stream, job or rotation it is of, and what is left as the run's own name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

# Endings that say how a file is kept or which stream it is, not what ran.
_PACKED = re.compile(r"\.(?:gz|zst|zstd)$", re.IGNORECASE)
_ENDING = re.compile(r"\.(?:log|out|err|txt|stdout|stderr|output|json|jsonl|csv)$", re.IGNORECASE)
_PBS = re.compile(r"\.[oe](\d{2,12})$")
_ROTATED = re.compile(r"\.(\d{1,3})$")
_STREAM = re.compile(r"(?:^|(?<=[._-]))(?:stdout|stderr)(?=$|[._-])", re.IGNORECASE)
# `rank_0`, `node3`, `local_rank-1`, `[worker]7`: the number is a rank's or a node's.
_RANK = re.compile(
    r"(?:^|(?<=[._-]))(?:(?:local|global|node)[_-]?)?(?:rank|ranks|node|worker|proc|process|task|host|gpu)[_-]?(\d{1,7})"
    r"(?=$|[._-])",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d{1,18}")
_DATE = re.compile(r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])")
_JOB = re.compile(r"(?:slurm[-_.]?|job[-_.]?(?:id)?[-_.]?|jobid[-_.]?)(\d{1,12})(?:[_.-]|$)", re.IGNORECASE)
_LONG_NUMBER = re.compile(r"(?:^|(?<=[._-]))(\d{5,12})(?=$|[._-])")
# Names that every run gives its log, so that the folder tells the runs apart.
_GENERAL = {
    *("log", "logs", "main", "main_log", "job", "run", "slurm", "nohup", "screen", "console", "console_output", "rank"),
    *("train", "training", "trainer", "train_log", "training_log", "output", "out", "stdout", "stderr", "std", "debug"),
    *("info", "err", "error"),
}
_ATTEMPT_FOLDER = re.compile(r"attempt_\d{1,6}$")
# A number behind these words counts runs, never ranks.
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
    """Takes a name apart.

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
    ranks = _RANK.findall(bare)
    stem = _tidy(_RANK.sub("", bare))
    folders = list(path.parent.parts)
    labelled = bool(ranks)
    rank = int(ranks[-1]) if ranks else None
    for index, folder in enumerate(folders):
        if (found := _RANK.fullmatch(folder)) is not None:
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
    """The job id in a name: behind `slurm-` or `job`, else the last number of five digits and more that is no date.

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
    """The folders a log lies in that may name a run: not a rank's, a node's or torchrun's."""
    found: list[str] = []
    before = ""
    for folder in path.absolute().parent.parts[1:]:
        of_torchrun = _ATTEMPT_FOLDER.fullmatch(folder) or (folder.isdecimal() and _ATTEMPT_FOLDER.fullmatch(before))
        if folder != ".." and not of_torchrun and not _RANK.fullmatch(folder):
            found.append(folder)
        before = folder
    return found


def without_number(name: LogName, position: int) -> LogName:
    """The name without the number at a position, which turned out to be a rank's."""
    found = list(_NUMBER.finditer(name.stem))[position]
    return replace(name, stem=_tidy(f"{name.stem[: found.start()].rstrip('._-')}{name.stem[found.end() :]}"))


def is_general(stem: str) -> bool:
    """Whether a name says nothing of a run, so that its folder's has to: `train`, `stdout`, nothing at all."""
    return not stem or stem.lower() in _GENERAL


def _tidy(stem: str) -> str:
    return re.sub(r"[._-]{2,}", "-", stem).strip("._- ")
