"""The code of a run: an archive in its folder, made when it is submitted, from which every attempt of it runs.

`code.tar.gz` holds the package as the submitting interpreter has it, and its templates; provenance.json its SHA-256.
An attempt runs from `code/`, unpacked from it, so that an edit after the submission changes nothing. It is unpacked in
two places, which a test holds equal: here for a local run, whose controller runs from `code/` before any script does,
and in job.sh (templates/code.sh.j2), because a node may have Python in a container only.

    python -m hpc_gpt.runs.snapshot RUN

makes the archive of a run that plain sbatch has started. The SHA-256 is of what is compressed: equal code has an equal
one, whatever the zlib.
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
from hpc_gpt.paths import templates_dir
from hpc_gpt.small_files import give_name, read_json, write_once

ARCHIVE = "code.tar.gz"
FOLDER = "code"
# Of provenance.json.
KEY = "code_sha256"
# The first file of the archive: a line for each other one, as sha256sum writes it.
SUMS = "SHA256SUMS"
_PACKAGE = Path(__file__).resolve().parents[1]
_TOO_LATE = "submit the experiment again, or put back the archive: hpc-gpt verify says what differs"


class Snapshot:
    """The archive of the code as it was when this was made."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        tar = _tar({SUMS: sums_text(files).encode(), **files})
        self.sha256 = hashlib.sha256(tar).hexdigest()
        self._archive = gzip.compress(tar, compresslevel=6, mtime=0)
        self._last: Path | None = None

    def place(self, folder: Path) -> None:
        """Gives a run folder its archive: another name of the last one placed, a copy if the disk has no links.

        Raises OSError; an archive that is there stays.
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
    """The code that this process runs, read once."""
    return Snapshot({name: path.read_bytes() for name, path in code_files().items()})


def code_files() -> dict[str, Path]:
    """Every file of the package and its templates, by its name in the archive, sorted; no caches, nothing hidden."""
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
    """What `sha256sum` prints of the files."""
    return "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items())


def _tar(files: Mapping[str, bytes]) -> bytes:
    """The same bytes for the same files: no owner, time or mode of this machine."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def read_archive(run: Path) -> tuple[str, dict[str, bytes]]:
    """(SHA-256, content of each file by its name) of a run's archive. RunFolderError if it is missing or damaged."""
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
    """What lies in a run's code/, by name, the sums left out. A link counts as a file, and so does a cache of Python's:
    it would run in place of what was submitted."""
    found = {}
    for path in (run / FOLDER).rglob("*"):
        name = path.relative_to(run / FOLDER)
        if (path.is_symlink() or not path.is_dir()) and not name.name.startswith(".nfs"):
            found[name.as_posix()] = path.read_bytes() if path.is_file() else b""
    found.pop(SUMS, None)
    return found


def submitted_sha256(run: Path) -> str | None:
    """The SHA-256 that provenance.json has of the code; None for a run from before there was one."""
    found = read_json(run / "provenance.json").get(KEY)
    return str(found) if found else None


def unpack(run: Path) -> Path:
    """Gives a run its code/ from the archive, as job.sh does, and returns it; one that differs is set aside.

    Raises RunFolderError if the archive is not the one that was submitted, or the disk refuses.
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
        if not folder.is_dir():  # else another start was first
            raise RunFolderError(f"cannot unpack {folder}: {fault.strerror}", "is the disk full?") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def code_environment(code: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What a process needs to run from `code`, and from no folder that it happens to be started in; no caches."""
    more = environment.get("PYTHONPATH")
    path = f"{code}:{more}" if more else str(code)
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def check_path(folder: Path) -> None:
    """Refuses a folder that PYTHONPATH cannot carry, for the runs below it."""
    if ":" in str(folder.absolute()):
        words = f"PYTHONPATH cannot carry the colon of {folder.absolute()}"
        raise RunFolderError(words, "set HPC_GPT_LOGS to a path without a colon")


def ready_code(run: Path) -> Path:
    """The code/ of a run, made from its archive; if that is missing, from the code here. Raises as unpack."""
    check_path(run)
    if not (run / ARCHIVE).exists():
        begin(run)
    return unpack(run)


def begin(run: Path) -> None:
    """The snapshot of a run that has none, as plain sbatch starts it; RunFolderError for one that has lost it."""
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
