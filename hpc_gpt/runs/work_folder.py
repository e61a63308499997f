"""The files of `command.workdir`, kept in a run: `work.tar.gz`, from which every attempt runs in `work/`.

Kept are the files that git does not ignore. What the program writes in `work/` stays there for the next attempt.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import os
import secrets
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hpc_gpt.errors import ConfigError, RunFolderError
from hpc_gpt.files import logs_folder
from hpc_gpt.runs.program_checkpoints import WORK
from hpc_gpt.runs.snapshot import Archive
from hpc_gpt.runs.stored import read_stored
from hpc_gpt.settings.resolved import Resolved

ARCHIVE = "work.tar.gz"
# In provenance.json: the SHA-256 of the uncompressed archive.
KEY = "work_sha256"
MOST_BYTES = 64 << 20
_NEVER = frozenset((".git", "__pycache__"))


def snapshot_of(resolved: Resolved) -> Archive | None:
    """The archive of the folder that a run's program runs in; None if it keeps none. ConfigError if it is too large."""
    command = resolved.command
    return take_work(command.workdir) if command is not None and command.snapshot else None


@functools.cache
def take_work(folder: str) -> Archive:
    """The archive of a folder as it is now. Cached, because a sweep asks for every row. Raises ConfigError."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"command.workdir is {folder}, which is no folder here", "name the folder of the program")
    # The runs themselves may be below it.
    logs = logs_folder().absolute()
    names = sorted(name for name in _names(root) if not (root / name).absolute().is_relative_to(logs))
    sizes = {name: os.lstat(root / name).st_size for name in names}
    if sum(sizes.values()) > MOST_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
        words = ", ".join(f"{name} {sizes[name] / 2**20:.1f} MiB" for name in largest)
        raise ConfigError(
            f"command.workdir {folder} has {sum(sizes.values()) / 2**20:.0f} MiB, above the {MOST_BYTES >> 20} MiB "
            f"that a run keeps of it; the largest: {words}",
            "name what is no code in .gitignore, or set command.snapshot = false to run in the folder itself",
        )
    buffer = io.BytesIO()
    try:
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name in names:
                _add(tar, root, name)
    except OSError as fault:
        raise ConfigError(f"cannot read {fault.filename}: {fault.strerror}", "make it readable, or ignore it") from None
    return Archive(ARCHIVE, buffer.getvalue())


def _add(tar: tarfile.TarFile, root: Path, name: str) -> None:
    """Adds a file, with its mode, or a link. A relative link out of the folder becomes an absolute one."""
    path, entry = root / name, tarfile.TarInfo(name)
    if path.is_symlink():
        target = os.readlink(path)
        if not os.path.isabs(target):
            leads = os.path.normpath(path.parent / target)
            target = target if Path(leads).is_relative_to(root) else leads
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        tar.addfile(entry)
        return
    content = path.read_bytes()
    entry.size, entry.mode = len(content), 0o755 if os.access(path, os.X_OK) else 0o644
    tar.addfile(entry, io.BytesIO(content))


def _names(root: Path) -> Iterator[str]:
    """The files and links below a folder that git does not ignore; all of them if there is no git here."""
    listed = _listed_by_git(root)
    if listed is None:
        for parent, folders, files in os.walk(root):
            links = [name for name in folders if Path(parent, name).is_symlink()]
            folders[:] = [name for name in folders if name not in _NEVER and name not in links]
            yield from (Path(parent, name).relative_to(root).as_posix() for name in (*files, *links))
        return
    for name in listed:
        path = root / name
        if set(Path(name).parts) & _NEVER:
            continue
        if path.is_symlink() or path.is_file():
            yield name
        elif path.is_dir():  # a repository in the repository
            yield from (f"{name.rstrip('/')}/{below}" for below in _names(path))


def _listed_by_git(root: Path) -> list[str] | None:
    """What git would add, by its own rules for .gitignore, whether the folder is in a repository or not."""
    with tempfile.TemporaryDirectory() as empty:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        git = ["git", f"--git-dir={empty}/git", f"--work-tree={root}"]
        try:
            subprocess.run(["git", "init", "-q", "--bare", f"{empty}/git"], check=True, capture_output=True, env=plain)
            done = subprocess.run(
                [*git, "ls-files", "-z", "--others", "--exclude-standard"],
                cwd=root, check=True, capture_output=True, env=plain,
            )  # fmt: skip
            tracked = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=False, capture_output=True, env=plain)
        except (OSError, subprocess.CalledProcessError):
            return None
    # A file may be tracked although a rule ignores it.
    found = done.stdout + (tracked.stdout if tracked.returncode == 0 else b"")
    return [name for name in dict.fromkeys(os.fsdecode(found).split("\0")) if name]


def unpack_work(run: Path) -> Path:
    """Unpacks a run's archive to work/, completely or not at all; an existing work/ stays. RunFolderError if it cannot
    be read or written."""
    folder, aside = run / WORK, run / f".{WORK}.{os.getpid()}.{secrets.token_hex(2)}"
    if folder.is_dir():
        return folder
    try:
        aside.mkdir()
        content = gzip.decompress((run / ARCHIVE).read_bytes())
        if read_stored(run / "provenance.json").get(KEY) not in (None, hashlib.sha256(content).hexdigest()):
            words = f"{run / ARCHIVE} is not what was submitted: its SHA-256 differs"
            raise RunFolderError(words, "submit the experiment again, or put the archive back")
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            tar.extractall(aside, filter="tar")
        aside.rename(folder)
    except (OSError, EOFError, tarfile.TarError) as fault:
        if not folder.is_dir():
            words = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault)
            raise RunFolderError(f"cannot unpack {run / ARCHIVE}: {words}", "is the disk full?") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def changed_since(run: Path) -> list[str]:
    """The files of work/ that are not as they were submitted; a program may write over its own files."""
    changed = []
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress((run / ARCHIVE).read_bytes()))) as tar:
        for entry in tar:
            path = run / WORK / entry.name
            if entry.isfile() and (file := tar.extractfile(entry)) is not None:
                try:
                    same = path.read_bytes() == file.read()
                except OSError:
                    same = False
                changed += [] if same else [entry.name]
    return changed
