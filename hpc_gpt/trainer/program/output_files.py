"""Makes the files that a job script's `--output` and `--error` name, before its first line runs, as sbatch does; reads
files of output that grow.

Such a file is a hard link to the attempt's log, a second name of it, if the folder allows that. Otherwise, on another
file system or if `--open-mode=append` keeps the file's content, it is a file of its own, and the watch copies the log
to it. A name that is not a regular file, such as /dev/null, stays. Loads only the standard library, as a script's start
waits for it.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from hpc_gpt.core.slurm.sbatch_words import expand_pattern

# In the attempt's folder: [[name of the log, file to which it is copied], …].
_COPIED = "copied.json"
_MADE = "outputs.json"  # {"files": […]}: a report knows by it which files are copies
_MOST_BYTES = 16 << 20  # at most this much of a file is read at a time
# If output comes faster than it can be read, all but its last bytes are skipped: the training must not wait for it.
_KEPT_BYTES = 1 << 20
_COMPARED = 256  # so many bytes show whether a file is the one that was read before
_ENDS_LINE = re.compile(rb"[\r\n]")


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
    (attempt / _MADE).write_text(json.dumps({"files": [*map(str, made)]}), encoding="utf-8")
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
    """Appends the new part of a log to a file; the attempt's folder notes how much was copied. If a full disk takes
    only a part of a block, or not the note, the block is cut off again, and comes with the next call."""
    mark = log.with_name(f".copied-{log.name}")
    aside = mark.with_name(f"{mark.name}.new")
    with contextlib.suppress(OSError, ValueError):
        done = int(mark.read_text(encoding="utf-8")) if mark.exists() else 0
        with log.open("rb") as text, file.open("ab", buffering=0) as out:
            text.seek(done)
            while block := text.read(_MOST_BYTES):
                size = os.fstat(out.fileno()).st_size
                try:
                    _write_all(out, block)
                    done += len(block)
                    aside.write_text(f"{done}", encoding="utf-8")
                    aside.replace(mark)
                except OSError:
                    os.ftruncate(out.fileno(), size)
                    raise


def _write_all(file: IO[bytes], block: bytes) -> None:
    """Writes a block to an unbuffered file, which may take it in parts."""
    rest = memoryview(block)
    while rest:
        rest = rest[file.write(rest) :]


class Follower:
    """Reads the whole lines of a file that grows.

    It begins anew if another file has the name, if the file is shorter than what was read of it, or if the bytes before
    the current position have changed: then it was rotated, cut, or overwritten by `>`. The file stays open, so that
    lines written just before it got another name are read, too.
    """

    def __init__(self, path: Path, place: int = 0) -> None:
        self._path, self._place, self._left = path, place, b""
        self._file: IO[bytes] | None = None
        self._before: bytes | None = None  # the bytes before the position
        self.grew = False  # since the previous call, by whole lines or not

    def lines(self, size: int | None = None) -> Iterator[str]:
        """Yields the lines since the previous call; those that were whole when the file had `size` bytes, if given."""
        self.grew = False
        file: IO[bytes] | None = None
        with contextlib.suppress(OSError):
            file = self._path.open("rb")  # opened every time: over NFS it then has what another node wrote
        if self._file is not None:
            if file is None or not os.path.samestat(os.fstat(self._file.fileno()), os.fstat(file.fileno())):
                yield from self._read(self._file, size)  # lines from before it got another name
                self._place, self._left, self._before = 0, b"", b""
            self._file.close()
        self._file = file
        if file is not None:
            yield from self._read(file, size)

    def last_line(self) -> list[str]:
        """The line at the end of the file that nothing has ended, such as a program's last bar; [] without one. Only
        for a file that grows no more."""
        text, self._left = self._left, b""
        return [text.decode(errors="replace")] if text.strip() else []

    def _read(self, file: IO[bytes], most: int | None) -> Iterator[str]:
        number, text = file.fileno(), b""
        with contextlib.suppress(OSError):
            size = os.fstat(number).st_size
            begin = max(0, self._place - _COMPARED)
            before = os.pread(number, self._place - begin, begin)
            if size < self._place or (self._before is not None and before != self._before):
                self._place, self._left = 0, b""
            if size - self._place > _MOST_BYTES:
                self._place, self._left = size - _KEPT_BYTES, b""
            room = _MOST_BYTES if most is None else max(0, min(_MOST_BYTES, most - self._place))
            text = os.pread(number, room, self._place)
            self._place += len(text)
            self._before = os.pread(number, min(_COMPARED, self._place), max(0, self._place - _COMPARED))
        self.grew = self.grew or bool(text)
        *whole, self._left = _ENDS_LINE.split(self._left + text)
        self._left = self._left[-_KEPT_BYTES:]
        for line in whole:
            if line:
                yield line.decode(errors="replace")
