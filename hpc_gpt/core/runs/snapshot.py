"""The code of a run: an archive in its folder, made at the submission; every attempt runs from it.

`code.zip` has the package of the submitting interpreter with its templates; provenance.json has its SHA-256. So an edit
after the submission changes nothing.

    python -m hpc_gpt.core.runs.snapshot RUN

makes the archive of a run that plain sbatch has started. It is the first program that such a script starts, so it
refuses settings that this version does not read.
"""

import copy
import functools
import io
import json
import os
import subprocess
import sys
import tarfile
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
from hpc_gpt.core.settings.resolved import OtherSchema, Resolved

_PACKAGE = Path(__file__).resolve().parents[2]
# The archive and the folder of a run of 0.3, and the file in the archive that its job.sh runs to unpack it.
_OF_0_3, _FOLDER_0_3, _UNPACK_0_3 = "code.tar.gz", "code", "hpc_gpt/core/runs/unpack.py"
_UNPACKS = b"""import os, shutil, sys, tarfile
run = sys.argv[1]
aside = f"{run}/.code.{os.getpid()}"
with tarfile.open(f"{run}/code.tar.gz") as archive:
    archive.extractall(aside)
try:
    os.rename(aside, f"{run}/code")
except OSError:  # it is there
    shutil.rmtree(aside)
"""


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
    """The path from which an attempt of the run imports: its archive, which is made first if it has none; for a run of
    0.3 its folder code/. Raises RunFolderError if the archive is not the submitted one, or if the disk refuses."""
    check_path(run.path)
    is_of_0_3 = _is_of_0_3(run.resolved())
    if not (run.path / (_OF_0_3 if is_of_0_3 else CODE_ARCHIVE)).exists():
        begin(run)
    if not is_of_0_3:
        return check_code(run.path)
    with OsErrorAs(RunFolderError, f"cannot unpack {run.path / _OF_0_3}", TOO_LATE):
        try:
            with tarfile.open(run.path / _OF_0_3) as tar:
                unpacks = tar.extractfile(_UNPACK_0_3)
                program = unpacks.read() if unpacks else b""
        except (tarfile.TarError, EOFError, KeyError) as fault:
            raise OSError(None, str(fault)) from None
        done = subprocess.run([sys.executable, "-I", "-", run.path], input=program, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise RunFolderError(done.stdout.decode(errors="replace").strip(), TOO_LATE)
    return run.path / _FOLDER_0_3


def _is_of_0_3(resolved: Resolved) -> bool:
    return resolved.version.startswith("0.3.")


def begin(run: RunFolder) -> None:
    """Makes the archive of a run that plain sbatch has started. RunFolderError if the run had one."""
    from hpc_gpt.core.runs.provenance import STAGE_KEY, collect

    snapshot = take_snapshot()
    if submitted_sha256(run.path) not in (None, snapshot.sha256):
        raise RunFolderError(
            f"{run.path / CODE_ARCHIVE} is gone, and this machine's code is not the submitted code", TOO_LATE
        )
    with OsErrorAs(RunFolderError, f"cannot write {run.path / CODE_ARCHIVE}", "is the disk full?"):
        (_archive_for_0_3() if _is_of_0_3(run.resolved()) else snapshot).place(run.path)
    if submitted_sha256(run.path) is None:
        unpacked = os.environ.get("HPC_GPT_STAGE_SUM")  # of job.sh, which runs this
        provenance = {**collect(), CODE_KEY: snapshot.sha256, **({STAGE_KEY: unpacked} if unpacked else {})}
        write_once(run.path / "provenance.json", json.dumps(provenance, indent=1) + "\n")


def _archive_for_0_3() -> SharedFile:
    """This version's code as a script of 0.3 expects it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        files = {name: path.read_bytes() for name, path in code_files().items()}
        for name, content in {_UNPACK_0_3: _UNPACKS, **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return SharedFile(_OF_0_3, buffer.getvalue())


def main(arguments: list[str]) -> int:
    run = RunFolder(Path(arguments[0]))
    try:
        run.resolved()
        begin(run)
    except UserError as fault:
        again = "render it again with this version, or " if isinstance(fault, OtherSchema) else ""
        print(f"Error: {fault}\n\nhint: {again}{fault.hint}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
