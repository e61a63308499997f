"""Unpacks a run's archive: `code.tar.gz` to `code/`, completely or not at all, and never over an existing folder.

    python hpc_gpt/core/runs/unpack.py RUN

An attempt runs this first, from the archive itself: job.sh passes this file to Python's stdin. So it imports nothing
from hpc_gpt. A refusal is printed on stdout, for the script, with exit code 1.
"""

import contextlib
import errno
import gzip
import hashlib
import io
import json
import os
import secrets
import shutil
import stat
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

CODE_ARCHIVE = "code.tar.gz"
FOLDER = "code"
# In provenance.json: the SHA-256 of the uncompressed archive.
CODE_KEY = "code_sha256"
# The first file of the archive: one line per other file, in the format of sha256sum.
SUMS = "SHA256SUMS"
_MOST_BYTES = 64 << 20


class UnpackFault(Exception):
    """The archive cannot be read, is not the submitted one, or the disk refuses."""


def read_code_archive(run: Path) -> tuple[str, dict[str, bytes]]:
    """(SHA-256, {name: content}) of a run's archive. UnpackFault if it is missing or damaged."""
    try:
        tar = _read_archive(run / CODE_ARCHIVE)
        with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
            members = [entry for entry in opened if entry.isfile() and _is_inside(entry.name)]
            files = {entry.name: file.read() for entry in members if (file := opened.extractfile(entry))}
    except (OSError, EOFError, tarfile.TarError, ValueError) as fault:
        cause = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault)
        raise UnpackFault(f"cannot read {run / CODE_ARCHIVE}: {cause}") from None
    return hashlib.sha256(tar).hexdigest(), files


def _read_archive(path: Path) -> bytes:
    """The uncompressed bytes. OSError for a pipe or a device, which has no end, and for a size that is too large."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(number, "rb") as raw:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        with gzip.GzipFile(fileobj=raw) as file:
            content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {_MOST_BYTES >> 20} MiB")
    return content


def _is_inside(name: str) -> bool:
    return not name.startswith("/") and ".." not in name.split("/")


def sums_text(files: Mapping[str, bytes]) -> str:
    """The output of `sha256sum` for the files."""
    return "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items())


def unpacked_files(run: Path) -> dict[str, bytes]:
    """{name: content} of the files in a run's code/, without the sums.

    Links and Python's caches count as files: they would run instead of the submitted code.
    """
    files = {}
    for path in (run / FOLDER).rglob("*"):
        name = path.relative_to(run / FOLDER)
        if (path.is_symlink() or not path.is_dir()) and not name.name.startswith(".nfs"):
            files[name.as_posix()] = path.read_bytes() if path.is_file() else b""
    files.pop(SUMS, None)
    return files


def unpack(run: Path, submitted: str | None) -> Path:
    """Unpacks a run's archive, whose SHA-256 must be `submitted` unless that is None; returns the folder.

    An existing folder that differs is renamed; several starts may run at once. Raises UnpackFault.
    """
    sha256, files = read_code_archive(run)
    if submitted not in (None, sha256):
        raise UnpackFault(f"{run / CODE_ARCHIVE} is not what was submitted: its SHA-256 differs")
    files.pop(SUMS, None)
    folder, aside = run / FOLDER, run / f".{FOLDER}.{os.getpid()}.{secrets.token_hex(2)}"
    try:
        if folder.exists():
            if unpacked_files(run) == files:
                return folder
            folder.rename(run / f"{FOLDER}.changed-{int(time.time())}")
        for name, content in {SUMS: sums_text(files).encode(), **files}.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).write_bytes(content)
        aside.rename(folder)
    except OSError as fault:
        if not folder.is_dir():  # unless another start was faster
            raise UnpackFault(f"cannot unpack {folder}: {fault.strerror}; is the disk full or read-only?") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def main(arguments: list[str]) -> int:
    run = Path(arguments[0])
    submitted = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        submitted = json.loads((run / "provenance.json").read_text(encoding="utf-8")).get(CODE_KEY)
    try:
        unpack(run, submitted)
    except UnpackFault as fault:
        print(fault)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
