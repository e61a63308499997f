"""The code of a run: an archive in its folder, made at the submission, from which every attempt runs.

`code.tar.gz` has the package of the submitting interpreter and its templates; provenance.json has its SHA-256. An
attempt runs from `code/`, unpacked from the archive, so an edit after the submission changes nothing. It is unpacked in
two places, which a test compares: here for a local run, whose controller runs from `code/` before any script does, and
in job.sh (templates/code.sh.j2), because a node may have Python only in a container.

    python -m hpc_gpt.runs.snapshot RUN

makes the archive of a run that plain sbatch has started. The SHA-256 is of the uncompressed archive: it is equal for
equal code, whatever the version of zlib.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import json
import os
import secrets
import shutil
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

from hpc_gpt.errors import RunFolderError, UserError
from hpc_gpt.files import give_name, read_json, templates_dir, write_once

ARCHIVE = "code.tar.gz"
FOLDER = "code"
# In provenance.json.
KEY = "code_sha256"
# The first file of the archive: a line for each other file, as sha256sum writes it.
SUMS = "SHA256SUMS"
_PACKAGE = Path(__file__).resolve().parents[1]
_TOO_LATE = "submit the experiment again, or put the archive back: hpc-gpt verify says what differs"


class Snapshot:
    """The archive of the code, as it is now."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        tar = _tar({SUMS: sums_text(files).encode(), **files})
        self.sha256 = hashlib.sha256(tar).hexdigest()
        self._archive = gzip.compress(tar, compresslevel=6, mtime=0)
        self._last: Path | None = None

    def place(self, folder: Path) -> None:
        """Put the archive into a run folder, as a hard link to the last one placed, or as a copy.

        An existing archive stays. Raises OSError.
        """
        target = folder / ARCHIVE
        if self._last is not None:
            with contextlib.suppress(OSError):
                os.link(self._last, target)
                return
        aside = folder / f".{ARCHIVE}.{os.getpid()}.{secrets.token_hex(2)}"
        try:
            aside.write_bytes(self._archive)
            with contextlib.suppress(FileExistsError):
                give_name(aside, target)
        finally:
            aside.unlink(missing_ok=True)
        self._last = target


@functools.cache
def take_snapshot() -> Snapshot:
    """The archive of the code that this process runs. Cached."""
    return Snapshot({name: path.read_bytes() for name, path in code_files().items()})


def code_files() -> dict[str, Path]:
    """{name in the archive: path} of the package's files and templates, sorted; no caches, no hidden files."""
    found = {f"hpc_gpt/{name}": path for name, path in _files_below(_PACKAGE).items()}
    templates = templates_dir()
    if templates.parent != _PACKAGE:  # a wheel has them inside
        found |= {f"templates/{name}": path for name, path in _files_below(templates).items()}
    return dict(sorted(found.items()))


def _files_below(folder: Path) -> dict[str, Path]:
    found = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and not name.endswith((".pyc", "~")) and path.is_file():
                found[path.relative_to(folder).as_posix()] = path
    return found


def sums_text(files: Mapping[str, bytes]) -> str:
    """The output of `sha256sum` for the files."""
    return "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items())


def _tar(files: Mapping[str, bytes]) -> bytes:
    """A tar archive: the same bytes for the same files, without owner, time or mode of this machine."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def read_archive(run: Path) -> tuple[str, dict[str, bytes]]:
    """(SHA-256, {name: content}) of a run's archive. RunFolderError if it is missing or damaged."""
    try:
        tar = gzip.decompress((run / ARCHIVE).read_bytes())
        with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
            members = [entry for entry in opened if entry.isfile() and _is_inside(entry.name)]
            files = {entry.name: file.read() for entry in members if (file := opened.extractfile(entry))}
    except (OSError, EOFError, tarfile.TarError, ValueError) as fault:
        words = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault)
        raise RunFolderError(f"cannot read {run / ARCHIVE}: {words}", _TOO_LATE) from None
    return hashlib.sha256(tar).hexdigest(), files


def _is_inside(name: str) -> bool:
    return not name.startswith("/") and ".." not in name.split("/")


def unpacked_files(run: Path) -> dict[str, bytes]:
    """{name: content} of the files in a run's code/, without the sums.

    Links and Python's caches count as files: they would run instead of the submitted code.
    """
    found = {}
    for path in (run / FOLDER).rglob("*"):
        name = path.relative_to(run / FOLDER)
        if (path.is_symlink() or not path.is_dir()) and not name.name.startswith(".nfs"):
            found[name.as_posix()] = path.read_bytes() if path.is_file() else b""
    found.pop(SUMS, None)
    return found


def submitted_sha256(run: Path) -> str | None:
    """The SHA-256 of the code in provenance.json; None in a run of an older version."""
    found = read_json(run / "provenance.json").get(KEY)
    return str(found) if found else None


def unpack(run: Path) -> Path:
    """Unpack a run's archive to code/, as job.sh does, and return that folder. A code/ that differs is set aside.

    Raises RunFolderError if the archive is not the submitted one, or if the disk refuses.
    """
    sha256, files = read_archive(run)
    if submitted_sha256(run) not in (None, sha256):
        raise RunFolderError(f"{run / ARCHIVE} is not what was submitted: its SHA-256 differs", _TOO_LATE)
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
            raise RunFolderError(f"cannot unpack {folder}: {fault.strerror}", "is the disk full?") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def code_environment(code: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a process runs from `code`, not from its current folder, and writes no caches."""
    more = environment.get("PYTHONPATH")
    path = f"{code}:{more}" if more else str(code)
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def check_path(folder: Path) -> None:
    """RunFolderError if PYTHONPATH cannot hold the path of a folder."""
    if ":" in str(folder.absolute()):
        words = f"PYTHONPATH cannot carry the colon of {folder.absolute()}"
        raise RunFolderError(words, "set HPC_GPT_LOGS to a path without a colon")


def ready_code(run: Path) -> Path:
    """The code/ of a run, unpacked from its archive; without an archive from the code here. Raises as unpack."""
    check_path(run)
    if not (run / ARCHIVE).exists():
        begin(run)
    return unpack(run)


def begin(run: Path) -> None:
    """Make the archive of a run that plain sbatch has started. RunFolderError if the run had one."""
    from hpc_gpt.runs.provenance import collect

    snapshot = take_snapshot()
    if submitted_sha256(run) not in (None, snapshot.sha256):
        raise RunFolderError(f"{run / ARCHIVE} is gone, and the code here is not what was submitted", _TOO_LATE)
    try:
        snapshot.place(run)
    except OSError as fault:
        raise RunFolderError(f"cannot write {run / ARCHIVE}: {fault.strerror}", "is the disk full?") from None
    if submitted_sha256(run) is None:
        write_once(run / "provenance.json", json.dumps({**collect(), KEY: snapshot.sha256}, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    try:
        begin(Path(arguments[0]))
    except UserError as fault:
        print(f"Error: {fault}\n\nhint: {fault.hint}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
