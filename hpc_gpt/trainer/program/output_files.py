"""Makes the files that a job script's `--output` and `--error` name, before its first line runs, as sbatch does.

Such a file is a hard link to the attempt's log, a second name of it, if the folder allows that. Otherwise, on another
file system or if `--open-mode=append` keeps the file's content, it is a file of its own, and the watch copies the log
to it. A name that is not a regular file, such as /dev/null, stays. Loads only the standard library, as a script's start
waits for it.
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
_MOST_BYTES = 16 << 20  # at most this much of a log is copied at a time


def make_outputs(
    attempt: Path, output: str | None, error: str | None, appends: bool, job: Mapping[str, str], user: str
) -> list[Path]:
    """Makes the files in the current folder, which is the job's, and returns them. `output`, `error`: patterns of
    sbatch; the variables of `job` fill them in. Prints a note for a file that cannot be made; under sbatch the job
    would have no output, and end."""
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
            print(f"note: {name}: {fault.strerror}: the output is only in {attempt / log}", flush=True)
    if copied:
        (attempt / _COPIED).write_text(json.dumps(copied), encoding="utf-8")
    return made


def _make(name: Path, log: Path, appends: bool) -> bool:
    """Makes one file, and returns whether the log has to be copied to it. As with sbatch, a symbolic link of the user
    stays, and its target is written if the system lets a program open the link."""
    if name.exists() and not name.is_file():
        return False
    aside = name.with_name(f".{name.name}.{os.getpid()}")
    if name.is_symlink():
        with name.open("ab" if appends else "wb"):
            return True
    if appends and name.exists() and name.stat().st_size:
        if name.stat().st_nlink > 1:  # a hard link to the log of another attempt, which must not grow
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
    """Lists (log, file) for the files to which an attempt's logs are copied."""
    try:
        pairs: Sequence[tuple[str, str]] = json.loads((attempt / _COPIED).read_text(encoding="utf-8"))
        return [(attempt / log, Path(name)) for log, name in pairs]
    except (OSError, ValueError, TypeError):
        return []


def copy_more(log: Path, file: Path) -> None:
    """Appends the new part of a log to a file; the attempt's folder notes how much was copied."""
    mark = log.with_name(f".copied-{log.name}")
    with contextlib.suppress(OSError, ValueError):
        done = int(mark.read_text(encoding="utf-8")) if mark.exists() else 0
        with log.open("rb") as text, file.open("ab") as out:
            text.seek(done)
            while block := text.read(_MOST_BYTES):
                out.write(block)
                done += len(block)
        aside = mark.with_name(f"{mark.name}.new")
        aside.write_text(f"{done}", encoding="utf-8")
        aside.replace(mark)
