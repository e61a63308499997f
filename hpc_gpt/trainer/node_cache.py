"""Where a node keeps what Triton and Inductor have compiled, from attempt to attempt: a folder of the user's own.

    $TMPDIR/hpc-gpt-cache-<uid>/{triton,inductor}

The names of theirs in /tmp are known to all, and what is in them is loaded: objects and pickles. One that another user
has made first, or can write, is not used; the cache is then in the run. Extensions are built below the user's home.
"""

import contextlib
import fcntl
import os
import platform
import stat
import struct
from collections.abc import MutableMapping
from pathlib import Path

_FOLDERS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def set_caches(run: Path, environment: MutableMapping[str, str]) -> str:
    """Sets the variables of the caches that are not given; returns why they are in the run, empty if they are not. To
    be called before torch is imported. Raises OSError if neither folder can be made."""
    missing = [name for name in _FOLDERS if not environment.get(name)]
    if not missing:
        return ""
    # Not in the home: on a network file system DeepSpeed can hang there at its end.
    folder = Path(environment.get("TMPDIR") or "/tmp", f"hpc-gpt-cache-{os.getuid()}")
    why = _why_not(folder)
    if why:
        folder = run / "cache" / platform.node()
        folder.mkdir(parents=True, exist_ok=True)
    for name in missing:
        environment[name] = str(folder / _FOLDERS[name])
    return f"{why}: what is compiled is kept in {folder}" if why else ""


def drop_cut_libraries(inductor: Path) -> None:
    """Removes what a killed compiler has left cut off: Inductor loads a library as it finds it, and each later start
    would end with "file too short". What another rank still writes, under Inductor's own lock, stays."""
    for library in inductor.glob("??/*.so"):
        lock = inductor / "locks" / f"{library.name.partition('.')[0]}.lock"
        with contextlib.suppress(OSError):
            if _is_cut(library):
                lock.parent.mkdir(exist_ok=True)
                with lock.open("a") as held:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_cut(library):
                        library.unlink()


def _is_cut(library: Path) -> bool:
    """Whether an ELF file of 64 bits ends before the table of its sections does, which linkers write last."""
    with library.open("rb") as file:
        header, size = file.read(64), os.fstat(file.fileno()).st_size
    if len(header) < 64:
        return True
    table, each, count = struct.unpack_from("<40xQ10xHH", header)
    return header.startswith(b"\x7fELF\x02\x01") and size < table + each * count


def _why_not(folder: Path) -> str:
    """Why a folder in a place of all users is not trusted; empty if it is the user's own. It is made if it is not
    there."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as fault:
        return f"{folder} cannot be made ({fault.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no folder"
    if found.st_uid != os.getuid():
        return f"{folder} is of user {found.st_uid}"
    return f"others can write in {folder}" if found.st_mode & 0o022 else ""
