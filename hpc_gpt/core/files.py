"""Folders of the package and of the user, and reading and writing of small text and JSON files.

Templates, cluster profiles and experiments are inside the package in a wheel. In a checkout or an editable install they
are next to it, at the top of the tree. Small files are read even if damaged; they are written once, replaced as a
whole, or appended to line by line.
"""

import contextlib
import errno
import json
import os
import pwd
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, TypeVar

from hpc_gpt.core.errors import ConfigError, OsErrorAs, RunFolderError

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")
# Larger than any small file of a run. No more is read of a larger file: a sparse one of 20 GB would take all memory.
MOST_BYTES = 64 << 20
# Time limit for reading files of a run that another host serves.
ANSWER_S = 10.0
# File systems of the kernel, without files of users; the other kernel file systems are mounted below these.
_OF_KERNEL = frozenset(("proc", "sysfs", "devtmpfs", "cgroup", "cgroup2"))


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file to read bytes. OSError for anything else: a pipe would block, a device would never end."""
    return os.fdopen(_number_of(path), "rb")


def _number_of(path: Path | str) -> int:
    # Another may have replaced it since a check: opening a pipe so does not wait for a writer.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return number


def read_start(path: Path | str, most: int) -> bytes:
    """The first bytes of a small file, at half the cost of a file object. OSError as `open_regular`."""
    number = _number_of(path)
    try:
        size = os.fstat(number).st_size  # os.read allocates all that it may read; files in /proc have size 0
        return os.read(number, min(most, size) if size else most)
    finally:
        os.close(number)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file. OSError if it is not a regular file, or is larger than `most`."""
    with open_regular(path) as file:
        # `read` with a size would allocate that much first, which is three times as slow.
        content = b"" if os.fstat(file.fileno()).st_size > most else file.read()
        if len(content) > most or os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB; hpc-gpt writes no such file", str(path))
    return content


def read_text(path: Path, errors: str = "replace", most: int = MOST_BYTES) -> str:
    """The text of a file; `errors`: how bytes that are not UTF-8 are decoded. OSError as `read_bytes`."""
    return read_bytes(path, most).decode("utf-8", errors).replace("\r\n", "\n")


def within_time(work: Callable[[_Item], _Found], items: Sequence[_Item]) -> list[_Found | None]:
    """Calls `work` with each item on a thread; the result is None for a call that takes longer than ANSWER_S, as it may
    wait forever for a file on a host that no longer answers. That thread is left to wait. Raises what `work` raises."""
    results: list[_Found | None] = []
    limit_s = ANSWER_S
    while len(results) < len(items):
        done: list[_Found] = []
        faults: list[BaseException] = []
        thread = threading.Thread(target=_do, args=(work, items[len(results) :], done, faults), daemon=True)
        thread.start()
        before = -1
        while thread.is_alive() and len(done) > before:
            before = len(done)
            thread.join(limit_s)
        is_stuck, count = thread.is_alive(), len(done)
        if faults:
            raise faults[0]
        results += [*done[:count], *([None] if is_stuck else [])]
        limit_s = min(limit_s, 1.0) if is_stuck else limit_s  # it is the same host, most likely
    return results


def _do(work: Callable[[_Item], _Found], items: Sequence[_Item], done: list[_Found], faults: list[Any]) -> None:
    try:
        for item in items:
            done.append(work(item))
    except BaseException as fault:
        faults.append(fault)


def kernel_devices() -> frozenset[int]:
    """The device numbers (`st_dev`) of /dev and of file systems whose contents the kernel generates, such as /proc,
    /sys and control groups."""
    numbers = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if after.split(" ", 1)[0] in _OF_KERNEL:
                numbers.add(os.makedev(*map(int, before.split()[2].split(":"))))
        if (devices := os.stat("/dev").st_dev) != os.stat("/").st_dev:
            numbers.add(devices)
    return frozenset(numbers)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing, damaged, or not an object."""
    try:
        value = json_in(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_json_lines(path: Path, last_bytes: int | None = None, first_bytes: int = -1) -> list[dict[str, Any]]:
    """The JSON objects in a file with one per line, or in its last or first bytes. Damaged lines are skipped. A file
    above MOST_BYTES gives its last objects, because its end tells how something ended."""
    return [parsed for line in _lines(path, last_bytes, first_bytes) if (parsed := json_object(line)) is not None]


def read_text_end(path: Path, most: int = MOST_BYTES) -> str:
    """The text of a file; if it is larger than `most`, its end after a line that says what is cut. OSError as
    `open_regular`."""
    with open_regular(path) as file:
        cut = max(0, os.fstat(file.fileno()).st_size - most)
        file.seek(cut)
        text = file.read(most).decode("utf-8", "replace").replace("\r\n", "\n")
    return f"[the first {cut:,} bytes are left out: {path}]\n{text}" if cut else text


def json_lines_from_end(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects in a file of any size with one per line, the last one first. Damaged lines are skipped."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        for line in _lines_from_end(file):
            if (parsed := json_object(line.decode(errors="replace"))) is not None:
                yield parsed


def last_json_line(path: Path) -> dict[str, Any]:
    """The last JSON object in a file with one per line; empty if there is none. Only the end of the file is read, in
    blocks."""
    return next(json_lines_from_end(path), {})


def blocks_from_end(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, content) of a file's blocks, the last one first: 8 KiB, then up to 64."""
    end, size = file.seek(0, os.SEEK_END), 1 << 13
    while end > 0:
        begin = max(0, end - size)
        file.seek(begin)
        yield begin, file.read(end - begin)
        end, size = begin, min(2 * size, 1 << 16)


def _lines_from_end(file: IO[bytes]) -> Iterator[bytes]:
    unfinished: list[bytes] = []  # parts of the line whose start is not read yet, the last part first
    for _, block in blocks_from_end(file):
        if len(unfinished) > MOST_BYTES >> 16:
            return  # hpc-gpt writes no line of this length
        first, *others = block.split(b"\n")
        for part in reversed(others):
            yield b"".join(reversed([*unfinished, part]))
            unfinished = []
        unfinished.append(first)
    yield b"".join(reversed(unfinished))


def _lines(path: Path, last_bytes: int | None = None, first_bytes: int = -1) -> list[str]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if last_bytes is not None:
                file.seek(max(0, size - last_bytes))
            elif first_bytes < 0 and size > MOST_BYTES:
                file.seek(size - MOST_BYTES)
                file.readline(MOST_BYTES)  # cut
            return file.read(first_bytes).decode(errors="replace").splitlines()
    except OSError:
        return []


def json_object(line: str | bytes) -> dict[str, Any] | None:
    """The JSON object in a text; None if it has none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def json_in(path: Path) -> Any:
    """The JSON in a file. OSError if it cannot be read, ValueError if it is not JSON or nested too deep."""
    try:
        return json.loads(read_bytes(path).decode("utf-8-sig"))
    except RecursionError as fault:
        raise ValueError(str(fault)) from None


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Gives a temporary path beside `path`, for a file or a folder; removes whatever is there at the end."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        yield temporary
    finally:
        if temporary.is_dir() and not temporary.is_symlink():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_once(path: Path, text: str, mode: int = 0o666) -> None:
    """Writes a file completely or not at all, never over an existing one. RunFolderError if the disk refuses.

    Makes its folder, but no folder above it, so that a run folder that was moved away is not made again. `mode` is
    subject to the umask.
    """
    with OsErrorAs(RunFolderError, f"cannot write {path}", hint_on):
        path.parent.mkdir(exist_ok=True)
        with aside(path) as temporary, contextlib.suppress(FileExistsError):
            temporary.touch(mode)
            temporary.write_text(text, encoding="utf-8")
            give_name(temporary, path)


def check_new(paths: Iterable[Path]) -> None:
    """Raises ConfigError if a file that is to be written exists."""
    for path in paths:
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path} exists, and nothing is overwritten", "give another name, or move it away")


def write_new(texts: Mapping[Path, str]) -> None:
    """Writes files for the user, all or none of them. ConfigError if one exists; RunFolderError if the disk
    refuses."""
    check_new(texts)
    written: list[Path] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as fault:
        for begun in written:
            begun.unlink(missing_ok=True)
        if isinstance(fault, FileExistsError):
            raise ConfigError(f"{fault.filename} exists, and nothing is overwritten", "give another name") from None
        raise RunFolderError(f"cannot write {path}: {fault.strerror}", "is the disk full or read-only?") from None


def give_name(written: Path, path: Path) -> None:
    """Gives a finished file its name. FileExistsError if the name is taken. `written` may remain as a second name."""
    try:
        os.link(written, path)
    except FileExistsError:
        raise
    except OSError as fault:
        # Some file systems have no hard links. A rename would replace the file, so look first.
        if fault.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, "there already", str(path)) from None
        written.rename(path)


def replace_whole(path: Path, text: str) -> None:
    """Replaces a file atomically: a reader sees the old text or the new one. RunFolderError if the disk refuses."""
    with OsErrorAs(RunFolderError, f"cannot write {path}", hint_on), aside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def try_folder(folder: Path) -> None:
    """Raises OSError unless files can be made in `folder`, which may not exist yet.

    Makes and removes a folder in the nearest parent that exists: /proc, a full quota and a read-only disk refuse that
    whatever the permissions say.
    """
    place = next(place for place in (folder, *folder.parents) if place.exists())
    trial = place / f".hpc-gpt-{os.urandom(4).hex()}"
    trial.mkdir()
    trial.rmdir()


def append_line(path: Path, line: str) -> None:
    """Appends a line in one write, after ending a line that was cut off. RunFolderError if the disk refuses."""
    with OsErrorAs(RunFolderError, f"cannot write {path}", hint_on), open(path, "ab+") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END) or True) and file.read(1) != b"\n":
            line = "\n" + line
        file.write(line.encode() + b"\n")


def hint_on(fault: OSError) -> str:
    """The hint for a file of an existing run that cannot be written."""
    if isinstance(fault, FileNotFoundError):
        return "its folder is gone: do not move a run folder before its run has ended"
    if isinstance(fault, PermissionError):
        return (
            f"{whose(Path(fault.filename))}: its owner can do it, or let you"
            if fault.filename
            else "it belongs to another user"
        )
    return "is the disk full or read-only?"


def whose(path: Path) -> str:
    """A text with the owner of a file, or of the nearest visible folder above it, and the current user."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f"{place} is {user_name(place.stat().st_uid)}'s, and you are {user_name(os.geteuid())}"
    return f"you are {user_name(os.geteuid())}"


def user_name(uid: int) -> str:
    """The name of a user, else the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def refused_access(path: Path, how: int) -> str:
    """The system's reason why this process may not read (os.R_OK) or write (os.W_OK) an existing file or folder; empty
    if it may."""
    if not os.path.lexists(path) or os.access(path, how | (os.X_OK if path.is_dir() else 0)):
        return ""
    read_only = how == os.W_OK and os.statvfs(path).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if read_only else errno.EACCES)


_PACKAGE = Path(__file__).resolve().parents[1]


def _beside_or_inside(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() or _PACKAGE.parent.is_file() else _PACKAGE.parent / name


def package_text(path: Path) -> str:
    """The text of a file, which may be one of the package in the archive of a run's code. Raises OSError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except NotADirectoryError:
        import pkgutil

        return (pkgutil.get_data("hpc_gpt", str(path.relative_to(_PACKAGE))) or b"").decode()


def templates_dir() -> Path:
    """The folder of the Jinja templates."""
    return _beside_or_inside("templates")


def clusters_dir() -> Path:
    """The folder of the shipped cluster profiles."""
    return templates_dir() / "clusters"


def experiments_dir() -> Path:
    """The folder of the shipped experiments."""
    return _beside_or_inside("experiments")


def schemas_dir() -> Path:
    """The folder of the JSON schemas of what the verbs print with --json."""
    inside = _PACKAGE / "schemas"
    return inside if inside.is_dir() else _PACKAGE.parent / "docs" / "schemas"


def config_dir() -> Path:
    """The user's own folder: `$HPC_GPT_CONFIG`, else `hpc-gpt` under `$XDG_CONFIG_HOME` or `~/.config`."""
    return _user_folder("HPC_GPT_CONFIG", "XDG_CONFIG_HOME", ".config")


def site_dir() -> Path:
    """The folder of a site's profiles and config.toml for all its users: `$HPC_GPT_SITE`, else /etc/hpc-gpt."""
    return Path(os.environ.get("HPC_GPT_SITE") or "/etc/hpc-gpt")


def data_dir() -> Path:
    """The folder for token files: `$HPC_GPT_DATA`, else `hpc-gpt/data` under `$XDG_CACHE_HOME` or `~/.cache`."""
    return _user_folder("HPC_GPT_DATA", "XDG_CACHE_HOME", ".cache", "hpc-gpt/data")


def state_dir() -> Path:
    """The folder for notes on clusters, such as bad nodes: `$HPC_GPT_STATE`, else `hpc-gpt` under `$XDG_STATE_HOME` or
    `~/.local/state`."""
    return _user_folder("HPC_GPT_STATE", "XDG_STATE_HOME", ".local/state")


def _user_folder(variable: str, xdg: str, below_home: str, name: str = "hpc-gpt") -> Path:
    if chosen := os.environ.get(variable):
        return Path(chosen)
    return Path(os.environ.get(xdg) or Path.home() / below_home) / name


def from_here(path: Path | str) -> str:
    """A path, or a `path:line`, relative to the current folder; unchanged if it is not below it."""
    with contextlib.suppress(OSError):  # the current folder was removed
        below = str(path).removeprefix(f"{os.getcwd().rstrip('/')}/")
        return f"./{below}" if below.startswith("-") else below
    return str(path)


def logs_dir() -> Path:
    """The folder of the runs: `$HPC_GPT_LOGS`, else `logs` in the current folder."""
    return Path(os.environ.get("HPC_GPT_LOGS") or "logs")


def logs_folder() -> Path:
    """The absolute path of `logs_dir`."""
    return Path(os.path.abspath(logs_dir()))
