"""The code of a run: an archive in its folder, made at the submission; every attempt runs from it.

`code.tar.gz` has the package of the submitting interpreter and its templates; provenance.json has its SHA-256. An
attempt runs from `code/`, unpacked from the archive by `core.runs.unpack`, so an edit after the submission changes
nothing.

    python -m hpc_gpt.core.runs.snapshot RUN

makes the archive of a run that plain sbatch has started. It is the first program that such a script starts, so it
refuses settings that this version does not read. The SHA-256 belongs to the uncompressed archive: equal code has an
equal hash, whatever the version of zlib.
"""

import copy
import functools
import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from hpc_gpt.core.errors import OsErrorAs, RunFolderError, UserError
from hpc_gpt.core.files import templates_dir, write_once
from hpc_gpt.core.runs import unpack as unpack_module
from hpc_gpt.core.runs.run_folder import RunFolder, SharedFile
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.runs.unpack import CODE_ARCHIVE, CODE_KEY, SUMS, UnpackFault, sums_text
from hpc_gpt.core.settings.resolved import OtherSchema

_PACKAGE = Path(__file__).resolve().parents[2]
_TOO_LATE = "submit the experiment again, or put the archive back"


class Archive(SharedFile):
    """A compressed tar archive for a run's folder, with its name there and a `mode` within the umask. `sha256`: the
    hash of the uncompressed archive."""

    def __init__(self, name: str, tar: bytes, mode: int = 0o666) -> None:
        self.sha256 = hashlib.sha256(tar).hexdigest()
        super().__init__(name, gzip.compress(tar, compresslevel=3, mtime=0), mode)


def archive_of(files: Mapping[str, bytes]) -> Archive:
    """The archive of `files`, {name: content}, as code of a run."""
    return Archive(CODE_ARCHIVE, _tar({SUMS: sums_text(files).encode(), **files}))


def take_snapshot() -> Archive:
    """The archive of the code that this process runs, as its files are now. Cached while the files do not change."""
    states = ((name, path, path.stat()) for name, path in code_files().items())
    files = tuple((name, path, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, path, at in states)
    return copy.copy(_archive_of_files(files))  # a placed file may change before the next submission


@functools.lru_cache(maxsize=1)
def _archive_of_files(files: tuple[tuple[str, Path, int, int, int, int], ...]) -> Archive:
    return archive_of({name: path.read_bytes() for name, path, *_ in files})


def code_files() -> dict[str, Path]:
    """{name in the archive: path} of the package's files and templates, sorted; no caches, no hidden files."""
    paths = {f"hpc_gpt/{name}": path for name, path in _files_below(_PACKAGE).items()}
    templates = templates_dir()
    if templates.parent != _PACKAGE:  # a wheel has the templates inside the package
        paths |= {f"templates/{name}": path for name, path in _files_below(templates).items()}
    return dict(sorted(paths.items()))


def _files_below(folder: Path) -> dict[str, Path]:
    paths = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and not name.endswith((".pyc", "~")) and path.is_file():
                paths[path.relative_to(folder).as_posix()] = path
    return paths


def _tar(files: Mapping[str, bytes]) -> bytes:
    """A tar archive: equal files give equal bytes, without owner, time or mode of this machine."""
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
        return unpack_module.read_code_archive(run)
    except UnpackFault as fault:
        raise RunFolderError(str(fault), _TOO_LATE) from None


def submitted_sha256(run: Path) -> str | None:
    """The SHA-256 of the code in provenance.json; None if plain sbatch started the run and it has no archive yet."""
    sha256 = read_stored(run / "provenance.json").get(CODE_KEY)
    return str(sha256) if sha256 else None


def unpack_code(run: Path) -> Path:
    """Unpacks a run's archive to code/, as job.sh does, and returns that folder. A code/ that differs is set aside.

    Raises RunFolderError if the archive is not the submitted one, or if the disk refuses.
    """
    try:
        return unpack_module.unpack(run, submitted_sha256(run))
    except UnpackFault as fault:
        raise RunFolderError(str(fault), _TOO_LATE) from None


def code_environment(code: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make a process import from `code`, not from its current folder, and write no caches."""
    inherited = environment.get("PYTHONPATH")
    path = f"{code}:{inherited}" if inherited else str(code)
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def check_path(folder: Path) -> None:
    """Raises RunFolderError if PYTHONPATH cannot hold the path of a folder."""
    if ":" in str(folder.absolute()):
        message = f"PYTHONPATH cannot carry the colon of {folder.absolute()}"
        raise RunFolderError(message, "set HPC_GPT_LOGS to a path without a colon")


def ready_code(run: Path) -> Path:
    """Unpacks the archive of a run to code/ and returns that; makes the archive first if it has none. Raises as
    `unpack_code`."""
    check_path(run)
    if not (run / CODE_ARCHIVE).exists():
        begin(run)
    return unpack_code(run)


def begin(run: Path) -> None:
    """Makes the archive of a run that plain sbatch has started. RunFolderError if the run had one."""
    from hpc_gpt.core.runs.provenance import STAGE_KEY, collect

    snapshot = take_snapshot()
    if submitted_sha256(run) not in (None, snapshot.sha256):
        raise RunFolderError(
            f"{run / CODE_ARCHIVE} is gone, and this machine's code is not the submitted code", _TOO_LATE
        )
    with OsErrorAs(RunFolderError, f"cannot write {run / CODE_ARCHIVE}", "is the disk full?"):
        snapshot.place(run)
    if submitted_sha256(run) is None:
        unpacked = os.environ.get("HPC_GPT_STAGE_SUM")  # of job.sh, which runs this
        provenance = {**collect(), CODE_KEY: snapshot.sha256, **({STAGE_KEY: unpacked} if unpacked else {})}
        write_once(run / "provenance.json", json.dumps(provenance, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    run = RunFolder(Path(arguments[0]))
    try:
        run.resolved()
        begin(run.path)
    except UserError as fault:
        again = "render it again with this version, or " if isinstance(fault, OtherSchema) else ""
        print(f"Error: {fault}\n\nhint: {again}{fault.hint}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
