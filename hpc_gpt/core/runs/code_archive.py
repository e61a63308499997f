"""The archive of a run's code, `code.zip`: Python imports from it as it is, so a run has one file for all of its code.

    python -I RUN/code.zip hpc_gpt.core.runs.code_archive RUN

checks it before an attempt uses it: job.sh runs this from the archive itself. A refusal is printed on stdout, with exit
code 1. The SHA-256 belongs to the uncompressed files: equal code has an equal hash, whatever the version of zlib.
"""

import hashlib
import io
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import read_bytes
from hpc_gpt.core.runs.stored import read_stored

CODE_ARCHIVE = "code.zip"
# In provenance.json: the hash of the archive's files.
CODE_KEY = "code_sha256"
TOO_LATE = "submit the experiment again, or put the archive back"
_MAIN = "__main__.py"
# `python code.zip MODULE ARGUMENTS` is `python -m MODULE ARGUMENTS` with the archive in PYTHONPATH.
_RUN_MODULE = b"""import runpy, sys
sys.dont_write_bytecode = True  # -I does not read the variable
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
_FIRST_DATE = (1980, 1, 1, 0, 0, 0)  # the first that a zip can have


def code_sha256(files: Mapping[str, bytes]) -> str:
    """The hash of the output of `sha256sum` for the files, {name: content}."""
    lines = (f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def pack(files: Mapping[str, bytes]) -> bytes:
    """The archive of the files, without owner, time or mode of this machine."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {_MAIN: _RUN_MODULE, **files}.items():
            entry = zipfile.ZipInfo(name, _FIRST_DATE)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED, 3)
    return buffer.getvalue()


def read_code(run: Path) -> dict[str, bytes]:
    """{name: content} of the files in a run's archive. RunFolderError if it is missing or damaged."""
    path = run / CODE_ARCHIVE
    try:
        with zipfile.ZipFile(io.BytesIO(read_bytes(path))) as archive:
            names = archive.namelist()
            files = {name: archive.read(name) for name in names}
    except (OSError, zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError) as fault:
        cause = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault)
        raise RunFolderError(f"cannot read {path}: {cause}", TOO_LATE) from None
    if len(files) != len(names) or files.pop(_MAIN, None) != _RUN_MODULE:
        raise RunFolderError(f"{path} is not what was submitted: hpc-gpt writes no such archive", TOO_LATE)
    return files


def submitted_sha256(run: Path) -> str | None:
    """The hash of the code in provenance.json; None if plain sbatch started the run and it has no archive yet."""
    sha256 = read_stored(run / "provenance.json").get(CODE_KEY)
    return str(sha256) if sha256 else None


def check_code(run: Path) -> Path:
    """A run's archive, which is the submitted one. Raises RunFolderError."""
    if submitted_sha256(run) not in (None, code_sha256(read_code(run))):
        raise RunFolderError(f"{run / CODE_ARCHIVE} is not what was submitted: its SHA-256 differs", TOO_LATE)
    return run / CODE_ARCHIVE


def main(arguments: list[str]) -> int:
    try:
        check_code(Path(arguments[0]))
    except RunFolderError as fault:
        print(fault)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
