"""The files that a job script's `--output` and `--error` name: made before its first line, as sbatch makes its own.

Such a file is a second name of the attempt's log, a hard link, where the folder takes one. Else, on another file system
or if `--open-mode=append` keeps what is there, it is a file of its own, to which the watch copies what the log gets.
What is no regular file, as /dev/null, stays. Loads the standard library alone: a script's start waits for it.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_gpt.core.slurm.sbatch_words import expand_pattern

# In the attempt's folder: [[name of the log, file to which it is copied], …].
_COPIED = "copied.json"
_MOST_LINKS = 40  # from one to the next; Linux follows as many
_MOST_BYTES = 16 << 20  # of a log that are copied at a time


def make_outputs(
    attempt: Path, output: str | None, error: str | None, appends: bool, job: Mapping[str, str], user: str
) -> list[Path]:
    """Makes the files in the current folder, which is the job's, and returns them. `output`, `error`: sbatch's
    patterns, of the variables of a `job`. Prints a note for one that cannot be made: by sbatch the job would have no
    output, and end."""
    copied, made = list[list[str]](), list[Path]()
    logs = {output: "log", error: "err"} if error != output else {output: "log"}
    for pattern, log in logs.items():
        if pattern is None:
            continue
        name = Path(expand_pattern(pattern, job, user))
        try:
            copied += [[log, str(name.absolute())]] if _make(name, attempt / log, appends) else []
            made.append(name.absolute())
        except OSError as fault:
            print(f"note: {name}: {fault.strerror}: the output is in {attempt / log} alone", flush=True)
    if copied:
        (attempt / _COPIED).write_text(json.dumps(copied), encoding="utf-8")
    return made


def _make(name: Path, log: Path, appends: bool) -> bool:
    """Makes one file; whether the log is to be copied to it. A link of the user's is written through, as by sbatch."""
    for _ in range(_MOST_LINKS):
        if name.is_symlink():
            name = name.parent / os.readlink(name)
    if name.exists() and not name.is_file():
        return False
    aside = name.with_name(f".{name.name}.{os.getpid()}")
    if appends and name.exists() and name.stat().st_size:
        if name.stat().st_nlink > 1:  # the log of another attempt, which gets nothing more
            shutil.copyfile(name, aside)
            aside.replace(name)
        return True
    try:
        aside.hardlink_to(log)
        aside.replace(name)
    except OSError:
        aside.unlink(missing_ok=True)
        with name.open("wb"):
            return True
    return False


def copied_files(attempt: Path) -> list[tuple[Path, Path]]:
    """(log, file) of the files of an attempt to which the log is to be copied."""
    try:
        found: Sequence[tuple[str, str]] = json.loads((attempt / _COPIED).read_text(encoding="utf-8"))
        return [(attempt / log, Path(name)) for log, name in found]
    except (OSError, ValueError, TypeError):
        return []


def copy_more(log: Path, file: Path) -> None:
    """Appends to a file what a log has more than was copied; how much that is stays in the attempt's folder."""
    mark = log.with_name(f".copied-{log.name}")
    with contextlib.suppress(OSError, ValueError):
        done = int(mark.read_text(encoding="utf-8")) if mark.exists() else 0
        with log.open("rb") as text, file.open("ab") as out:
            text.seek(done)
            while more := text.read(_MOST_BYTES):
                out.write(more)
                done += len(more)
        aside = mark.with_name(f"{mark.name}.new")
        aside.write_text(f"{done}", encoding="utf-8")
        aside.replace(mark)
