"""The code of a run: an archive in its folder, made at the submission; every attempt runs from it.

`code.zip` has the package of the submitting interpreter with its templates; provenance.json has its SHA-256. So an edit
after the submission changes nothing.

    python -m hpc_gpt.core.runs.snapshot RUN

makes the archive of a run that plain sbatch has started. It is the first program that such a script starts, so it
refuses settings that this version does not read.
"""

import copy
import functools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hpc_gpt.core.errors import OsErrorAs, RunFolderError, UserError
from hpc_gpt.core.files import templates_dir, write_once
from hpc_gpt.core.runs.code_archive import (
    CODE_ARCHIVE,
    CODE_KEY,
    TOO_LATE,
    check_code,
    code_sha256,
    pack,
    submitted_sha256,
)
from hpc_gpt.core.runs.run_folder import RunFolder, SharedFile
from hpc_gpt.core.settings.resolved import OtherVersion

_PACKAGE = Path(__file__).resolve().parents[2]


class CodeArchive(SharedFile):
    """The archive of `files`, {name: content}, for the folders of runs; `sha256`: the hash of the files."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.sha256 = code_sha256(files)
        super().__init__(CODE_ARCHIVE, pack(files))


def take_snapshot() -> CodeArchive:
    """The archive of the code that this process runs, as its files are now. Cached while the files do not change."""
    states = ((name, path, path.stat()) for name, path in code_files().items())
    files = tuple((name, path, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, path, at in states)
    return copy.copy(_archive_of_files(files))  # a placed file may change before the next submission


@functools.lru_cache(maxsize=1)
def _archive_of_files(files: tuple[tuple[str, Path, int, int, int, int], ...]) -> CodeArchive:
    return CodeArchive({name: path.read_bytes() for name, path, *_ in files})


def code_files() -> dict[str, Path]:
    """{name in the archive: path} of the package's files and templates, sorted; no caches, no hidden files."""
    paths = {f"hpc_gpt/{name}": path for name, path in _files_below(_PACKAGE).items()}
    paths |= {f"hpc_gpt/templates/{name}": path for name, path in _files_below(templates_dir()).items()}
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


def ready_code(run: RunFolder) -> Path:
    """The archive from which an attempt of the run imports; it is made first if the run has none. Raises RunFolderError
    if it is not the submitted one, or if the disk refuses."""
    check_path(run.path)
    if not (run.path / CODE_ARCHIVE).exists():
        begin(run)
    return check_code(run.path)


def begin(run: RunFolder) -> None:
    """Makes the archive of a run that plain sbatch has started. RunFolderError if the run had one."""
    from hpc_gpt.core.runs.provenance import STAGE_KEY, collect

    snapshot = take_snapshot()
    if submitted_sha256(run.path) not in (None, snapshot.sha256):
        raise RunFolderError(
            f"{run.path / CODE_ARCHIVE} is gone, and this machine's code is not the submitted code", TOO_LATE
        )
    with OsErrorAs(RunFolderError, f"cannot write {run.path / CODE_ARCHIVE}", "is the disk full?"):
        snapshot.place(run.path)
    if submitted_sha256(run.path) is None:
        unpacked = os.environ.get("HPC_GPT_STAGE_SUM")  # of job.sh, which runs this
        provenance = {**collect(), CODE_KEY: snapshot.sha256, **({STAGE_KEY: unpacked} if unpacked else {})}
        write_once(run.path / "provenance.json", json.dumps(provenance, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    run = RunFolder(Path(arguments[0]))
    try:
        run.resolved()
        begin(run)
    except UserError as fault:
        again = "render it again with this version, or " if isinstance(fault, OtherVersion) else ""
        print(f"Error: {fault}\n\nhint: {again}{fault.hint}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
