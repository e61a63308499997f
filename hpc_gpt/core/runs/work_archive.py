"""The copy of `command.workdir` in a run: `work.tar.gz`, which is unpacked to `work/`, where every attempt runs.

It has the files that git does not ignore, each with its time, and as closed to others as in workdir. What the program
writes in `work/` stays there for the next attempt. Only two kinds of files are linked instead of copied, as a program
writes through a link: the paths in `command.link`, and what looks like a credential and is not tracked by git.

The archive's SHA-256 covers the files' names, bytes and executable bits, but not their times and other modes, which
differ between checkouts.
"""

import contextlib
import errno
import functools
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpc_gpt.core.errors import ConfigError, OsErrorAs, RunFolderError
from hpc_gpt.core.files import aside, logs_folder, read_bytes, read_start
from hpc_gpt.core.format import and_more, counted, show_bytes
from hpc_gpt.core.runs.run_folder import WORK, SharedFile
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.secrets import is_credential_file
from hpc_gpt.core.settings.experiment import Command
from hpc_gpt.core.settings.resolved import Resolved

WORK_ARCHIVE = "work.tar.gz"
# In provenance.json: the SHA-256 of the uncompressed archive, without times and modes (`_identity`).
WORK_KEY = "work_sha256"
_MOST_BYTES = 64 << 20
# This includes the headers of many small files.
_MOST_UNPACKED = 8 * _MOST_BYTES
_NEVER = frozenset((".git", "__pycache__"))
# Seconds to count the sizes of the files that are not copied.
_COUNTS_S = 2.0
_MOST_NAMED = 5
# Bytes of a file that are searched for a credential.
_START = 1 << 14
# Names of files that a program writes, or that were installed: a run seldom has to read them.
_WRITTEN = re.compile(
    r"\.|outs?$|outputs?$|checkpoints?$|ckpts?$|logs?$|runs$|wandb$|mlruns$|v?env$|build$|.*\.egg-info$"
)


class WorkArchive(SharedFile):
    """The archive of a folder, as closed to others as its most closed file.

    `sizes`: bytes by name; `credentials`: files that it only links; `left_out`: bytes of the files that it lacks, by
    the first part of the name; `whole` is false if these were not all counted.
    """

    def __init__(
        self, tar: bytes, sizes: Mapping[str, int], credentials: Sequence[str], left_out: Mapping[str, int], whole: bool
    ) -> None:
        with tarfile.open(fileobj=io.BytesIO(tar)) as entries:
            open_to = functools.reduce(int.__and__, (entry.mode for entry in entries if entry.isfile()), 0o666)
        super().__init__(WORK_ARCHIVE, gzip.compress(tar, compresslevel=3, mtime=0), 0o600 | open_to & 0o066)
        self.sha256 = _identity(tar)
        self.sizes, self.credentials, self.left_out, self.whole = sizes, credentials, left_out, whole


def describe_copy(resolved: Resolved, archive: WorkArchive | None) -> list[str]:
    """The lines for the user about the copy of the program's folder: what it has, and what it lacks; empty if the run
    has no copy."""
    if archive is None:
        return []
    command = resolved.program
    size = show_bytes(sum(archive.sizes.values()))
    lines = [f"{counted(len(archive.sizes), 'file')} of {command.workdir}, {size}; the program runs in the copy"]
    lines += [f"linked to {command.workdir}: {', '.join(command.link)}"] if command.link else []
    if archive.credentials:
        lines.append(
            f"linked to {command.workdir}, not copied, as it looks like a credential and git does not track it: "
            f"{', '.join(archive.credentials[:_MOST_NAMED])}{and_more(len(archive.credentials), _MOST_NAMED)}"
        )
    linked = {name.partition("/")[0] for name in command.link}
    left = sorted((name for name in archive.left_out if name not in linked), key=lambda name: -archive.left_out[name])
    if left:
        at_least = "" if archive.whole else "at least "
        named = [f"{name} {at_least}{show_bytes(archive.left_out[name])}" for name in left[:_MOST_NAMED]]
        named += [f"{len(left) - _MOST_NAMED} more"] if len(left) > _MOST_NAMED else []
        lines.append(f"not in the copy, as git ignores it: {', '.join(named)}")
        read = [name for name in left if is_credential_file(name) or not _WRITTEN.match(name.lower())]
        read = read[:_MOST_NAMED] or left[:1]
        lines.append(f"if the program reads some of it, link that: {link_line([*command.link, *read])}")
    return lines


def link_line(names: Sequence[str]) -> str:
    """The line of an experiment that links these paths."""
    return f"[command] link = {json.dumps(list(names), ensure_ascii=False)}"


def take_work(folder: str) -> WorkArchive:
    """The archive of a folder as it is now. Raises ConfigError."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"command.workdir is {folder}, which is not a folder here", "name the folder of the program")
    # The runs themselves may be below it.
    logs = logs_folder().absolute()
    tracked = {name: is_tracked for name, is_tracked in _names(root) if not _is_within(root / name, logs)}
    names = sorted(tracked)
    credentials = [name for name in names if not tracked[name] and _is_credential(root / name, name)]
    sizes = {name: os.lstat(root / name).st_size for name in names if name not in credentials}
    if sum(sizes.values()) > _MOST_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
        shown = ", ".join(f"{name} {sizes[name] / 2**20:.1f} MiB" for name in largest)
        raise ConfigError(
            f"command.workdir {folder} has {sum(sizes.values()) / 2**20:.0f} MiB, above the {_MOST_BYTES >> 20} MiB "
            f"that a run can copy; the largest: {shown}",
            "list in .gitignore what is not code, or set command.snapshot = false to run in the folder itself",
        )
    buffer = io.BytesIO()
    try:
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name in names:
                _add(tar, root, name, name in credentials)
    except OSError as fault:
        raise ConfigError(f"cannot read {fault.filename}: {fault.strerror}", "make it readable, or ignore it") from None
    return WorkArchive(buffer.getvalue(), sizes, credentials, *_left_out(root, frozenset(names), logs))


def _is_within(path: Path, folder: Path) -> bool:
    return path.absolute().is_relative_to(folder)


def _is_credential(path: Path, name: str) -> bool:
    """Whether a file looks like a credential. ConfigError, as in `take_work`, if it cannot be read."""
    if path.is_symlink():
        return False
    try:
        mode, start = os.stat(path).st_mode, read_start(path, _START)
    except OSError as fault:
        raise ConfigError(f"cannot read {path}: {fault.strerror}", "make it readable, or ignore it") from None
    return is_credential_file(name, start, is_closed=not mode & 0o077)


def _left_out(root: Path, names: frozenset[str], logs: Path) -> tuple[dict[str, int], bool]:
    """Returns ({first part of a name: bytes} of the files below a folder that are not in `names`, whether all were
    counted)."""
    until = time.monotonic() + _COUNTS_S
    sizes: dict[str, int] = {}
    for parent, folders, files in os.walk(root):
        if time.monotonic() > until:
            return sizes, False
        below = Path(parent).relative_to(root)
        folders[:] = [name for name in folders if name not in _NEVER and Path(parent, name).absolute() != logs]
        for name in (*files, *(name for name in folders if Path(parent, name).is_symlink())):
            path = below / name
            if path.as_posix() not in names and name not in _NEVER and not name.endswith(".pyc"):
                with contextlib.suppress(OSError):
                    sizes[path.parts[0]] = sizes.get(path.parts[0], 0) + os.lstat(root / path).st_size
    return sizes, True


def _add(tar: tarfile.TarFile, root: Path, name: str, only_link: bool) -> None:
    """Adds a file, with its mode and time, or a link. A relative link out of the folder becomes an absolute one.
    `only_link`: adds a link to the file instead."""
    path, entry = root / name, tarfile.TarInfo(name)
    if only_link:
        entry.type, entry.linkname = tarfile.SYMTYPE, str(path.absolute())
        tar.addfile(entry)
        return
    if path.is_symlink():
        target = os.readlink(path)
        if not os.path.isabs(target):
            leads = os.path.normpath(path.parent / target)
            target = target if Path(leads).is_relative_to(root) else leads
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        tar.addfile(entry)
        return
    content, about = path.read_bytes(), os.stat(path)
    entry.size, entry.mtime = len(content), about.st_mtime
    # In the copy this user, who could read the file and may be able to execute it, is the owner.
    entry.mode = about.st_mode & 0o777 & _open_to(root, path) | (0o500 if os.access(path, os.X_OK) else 0o400)
    tar.addfile(entry, io.BytesIO(content))


def _open_to(root: Path, path: Path) -> int:
    """The bits of a mode that have an effect: a folder that its group or others cannot enter closes everything below
    it."""
    bits = 0o777
    for folder in (path.parent, *path.parent.parents):
        mode = os.stat(folder).st_mode
        bits &= 0o700 | (0o070 if mode & 0o010 else 0) | (0o007 if mode & 0o001 else 0)
        if folder == root:
            break
    return bits


def _identity(tar: bytes) -> str:
    """The SHA-256 of an archive, without what differs between two checkouts of the same files: their times, and their
    modes except the executable bit."""
    plain = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(tar)) as entries,
        tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as written,
    ):
        for entry in entries:
            content = entries.extractfile(entry) if entry.isfile() else None
            entry.mtime, entry.pax_headers = 0, {}
            entry.mode = 0o755 if entry.isfile() and entry.mode & 0o100 else 0o644
            written.addfile(entry, content)
    return hashlib.sha256(plain.getvalue()).hexdigest()


def _names(root: Path) -> Iterator[tuple[str, bool]]:
    """Yields (name, whether git tracks it) of the files and links below a folder that git does not ignore; of all files
    if git is missing."""
    listed = _listed_by_git(root)
    if listed is None:
        for parent, folders, files in os.walk(root):
            links = [name for name in folders if Path(parent, name).is_symlink()]
            folders[:] = [name for name in folders if name not in _NEVER and name not in links]
            yield from ((Path(parent, name).relative_to(root).as_posix(), False) for name in (*files, *links))
        return
    for name, is_tracked in listed.items():
        path = root / name
        if set(Path(name).parts) & _NEVER:
            continue
        if path.is_symlink() or path.is_file():
            yield name, is_tracked
        elif path.is_dir():  # a repository in the repository
            yield from ((f"{name.rstrip('/')}/{below}", tracked) for below, tracked in _names(path))


def _listed_by_git(root: Path) -> dict[str, bool] | None:
    """{name: whether git tracks it} of the files that git would add by its rules for .gitignore, even if the folder is
    not in a repository; None if git is missing or fails."""
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
    of_repository = tracked.stdout if tracked.returncode == 0 else b""
    listed = dict.fromkeys(os.fsdecode(done.stdout).split("\0"), False)
    listed |= dict.fromkeys(os.fsdecode(of_repository).split("\0"), True)
    return {name: is_tracked for name, is_tracked in listed.items() if name}


def _content(run: Path) -> bytes:
    """The uncompressed archive of a run. OSError or EOFError if it cannot be read, or is larger than any we write."""
    with gzip.GzipFile(fileobj=io.BytesIO(read_bytes(run / WORK_ARCHIVE, _MOST_UNPACKED))) as file:
        content = file.read(_MOST_UNPACKED + 1)
    if len(content) > _MOST_UNPACKED:
        raise OSError(errno.EFBIG, f"it is larger than {_MOST_UNPACKED >> 20} MiB; hpc-gpt writes no such file")
    return content


def unpack_work(run: Path) -> Path:
    """Unpacks a run's archive to work/, completely or not at all; an existing work/ stays. RunFolderError if the
    archive cannot be read, or the folder written."""
    folder = run / WORK
    if folder.is_dir():
        return folder
    try:
        content = _content(run)
        if read_stored(run / "provenance.json").get(WORK_KEY) not in (None, _identity(content)):
            cause = f"{run / WORK_ARCHIVE} is not what was submitted: its SHA-256 differs"
            raise RunFolderError(cause, "submit the experiment again, or put the archive back")
        with aside(folder) as temporary, tarfile.open(fileobj=io.BytesIO(content)) as tar:
            temporary.mkdir()
            mode = temporary.stat().st_mode
            temporary.chmod(0o700)  # until every file has its own mode

            def within_umask(entry: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
                safe = tarfile.tar_filter(entry, path)
                return safe.replace(mode=entry.mode & mode & 0o777) if entry.isfile() else safe

            tar.extractall(temporary, filter=within_umask)
            temporary.chmod(mode)
            temporary.rename(folder)
    except (OSError, EOFError, tarfile.TarError) as fault:
        if not folder.is_dir():
            cause = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault)
            raise RunFolderError(f"cannot unpack {run / WORK_ARCHIVE}: {cause}", "is the disk full?") from None
    return folder


def link_work(run: Path, workdir: Path, names: Sequence[str]) -> None:
    """Links the paths `names` of workdir into the work/ of a run; if work/ has a part of such a folder, it links what
    is missing. ConfigError if a path does not exist, RunFolderError if the disk refuses."""
    for name in names:
        if not (workdir / name).exists():
            raise ConfigError(f"command.link has {name}, which is not in {workdir} on this node", "is it mounted here?")
        with OsErrorAs(RunFolderError, f"cannot link {run / WORK / name}", "is the disk full?"):
            _link(workdir / name, run / WORK / name)


def _link(source: Path, target: Path) -> None:
    if not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
    elif source.is_dir() and target.is_dir() and not target.is_symlink():
        for path in source.iterdir():
            if path.name not in _NEVER:
                _link(path, target / path.name)


def missing_in_copy(run: Path, command: Command, text: str) -> str:
    """The file or folder that a message names, if workdir has it but the work/ of a run has not; else empty."""
    if not command.snapshot:
        return ""
    for word in re.split(r"[\s'\"`:,;()\[\]=]+", text):
        name = word.removeprefix(f"{run / WORK}/").removeprefix("./").rstrip(".")
        if not name.strip("/") or name.startswith("/") or ".." in Path(name).parts or len(name) > 1000:
            continue
        with contextlib.suppress(OSError, ValueError):
            if not os.path.lexists(run / WORK / name) and Path(command.workdir, name).exists():
                return name
    return ""


def changed_since(run: Path) -> list[str]:
    """The files of work/ that differ from the submitted ones; a program may overwrite its own files."""
    changed = []
    with tarfile.open(fileobj=io.BytesIO(_content(run))) as tar:
        for entry in tar:
            path = run / WORK / entry.name
            if entry.isfile() and (file := tar.extractfile(entry)) is not None:
                try:
                    is_same = read_bytes(path, entry.size) == file.read()
                except OSError:
                    is_same = False
                changed += [] if is_same else [entry.name]
    return changed


def has_own_files(run: Path) -> bool:
    """Whether work/ of a run has what its program wrote: another file than the submitted ones, or one of these with
    other bytes; links and Python's caches do not count. Yes if the archive cannot be read."""
    folder = run / WORK
    if not folder.is_dir():
        return False
    try:
        with tarfile.open(fileobj=io.BytesIO(_content(run))) as tar:
            submitted = set(tar.getnames())
        for parent, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if name not in _NEVER]
            paths = (Path(parent, name) for name in files)
            if any(not path.is_symlink() and str(path.relative_to(folder)) not in submitted for path in paths):
                return True
        return bool(changed_since(run))
    except (OSError, EOFError, tarfile.TarError):
        return True
