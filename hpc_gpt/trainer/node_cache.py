"""A node's cache of the code that Triton and Inductor compile, and on AMD's GPUs MIOpen and AITER, for later attempts,
in a folder of the user's own.

    $TMPDIR/hpc-gpt-cache-<uid>/{triton,inductor,miopen,aiter}

Everybody knows the names of their default folders in /tmp, and the files in them are loaded as objects and pickles. A
folder that another user has made first, or can write, is not used; the cache is then in the run. Extensions are built
below the user's home.
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
# MIOpen's default is below the home, where its database fails with "locking protocol" on a network file system.
_FOLDERS_OF_AMD = {"MIOPEN_USER_DB_PATH": "miopen", "MIOPEN_CUSTOM_CACHE_DIR": "miopen", "AITER_JIT_DIR": "aiter"}


def set_caches(run: Path, environment: MutableMapping[str, str], amd: bool) -> str:
    """Sets those variables of the caches that are not set yet. Call it before torch is imported.

    `amd`: the ranks use AMD's GPUs. Returns an empty text, or why the caches are in the run folder.
    Raises OSError if neither folder can be made.
    """
    folders = _FOLDERS | (_FOLDERS_OF_AMD if amd else {})
    missing = [name for name in folders if not environment.get(name)]
    if not missing:
        return ""
    # Not in the home: on a network file system DeepSpeed can hang there at its end.
    folder = Path(environment.get("TMPDIR") or "/tmp", f"hpc-gpt-cache-{os.getuid()}")
    why = _make_or_refuse(folder)
    if why:
        folder = run / "cache" / platform.node()
        folder.mkdir(parents=True, exist_ok=True)
    for name in missing:
        environment[name] = str(folder / folders[name])
        if name in _FOLDERS_OF_AMD:
            (folder / folders[name]).mkdir(exist_ok=True)
    return f"{why}: compiled code is cached in {folder}" if why else ""


def drop_cut_libraries(inductor: Path) -> None:
    """Removes libraries that a killed compiler has left incomplete: Inductor would load them, and each later start
    would end with "file too short". A library that another rank still writes, under Inductor's own lock, stays."""
    for library in inductor.glob("??/*.so"):
        lock = inductor / "locks" / f"{library.name.partition('.')[0]}.lock"
        with contextlib.suppress(OSError):
            if _is_cut(library):
                lock.parent.mkdir(exist_ok=True)
                with lock.open("a") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_cut(library):
                        library.unlink()


def _is_cut(library: Path) -> bool:
    """Whether a 64-bit ELF file ends before the end of its section table, which linkers write last."""
    with library.open("rb") as file:
        header, size = file.read(64), os.fstat(file.fileno()).st_size
    if len(header) < 64:
        return True
    table, entry, count = struct.unpack_from("<40xQ10xHH", header)
    return header.startswith(b"\x7fELF\x02\x01") and size < table + entry * count


def _make_or_refuse(folder: Path) -> str:
    """The reason why a folder in a place shared by all users is not trusted; empty if it belongs to this user.

    Makes the folder if it is missing.
    """
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as fault:
        return f"{folder} cannot be made ({fault.strerror})"
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a folder"
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return f"{folder} is on a disk that is mounted noexec, from which no compiled code can be loaded"
    if status.st_uid != os.getuid():
        return f"{folder} belongs to user {status.st_uid}"
    return f"others can write in {folder}" if status.st_mode & 0o022 else ""
