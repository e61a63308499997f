"""The exceptions for mistakes that a user can make.

UserError (ValueError)          a message and a hint; exit 2
 +- LayoutError                 a layout or batch that cannot run
 +- ConfigError                 a fault in an experiment, profile or flag; may carry several
 +- DataError                   data are missing, damaged, too few, or have another vocabulary
 +- CheckpointError             the checkpoint belongs to another model, or none is complete
 +- RenderError                 a template that cannot be rendered
 +- RunFolderError              a run folder that cannot be written; exit 1
 +- NoSuchRun                   no run has that name; exit 5
 +- JobRefused                  sbatch refused the job; exit 1
 +- SlurmUnreachable            no sbatch, or slurmctld does not answer; exit 4
 +- JobFailed                   the job that was waited for failed; exit 3
"""

import contextlib
import errno
import importlib.util
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """A setting that cannot run, and the nearest one that can."""

    message: str
    hint: str = ""
    of_layout: bool = False
    "Whether another layout, or another batch, is what it needs: it is raised as LayoutError."
    keys: tuple[str, ...] = ()
    "The dotted keys that it is about, or tables of them; by default those that the message names."
    summary: str = ""
    "The message in a few words, for a list of layouts."


class UserError(ValueError):
    """A mistake that the user can correct, or several of them.

    `str(error)`: what is wrong, a line for each; `hint`: what to do; `faults`: each message with its own hint.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "", faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.hint = hint
        self._faults = tuple(faults)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Each fault apart; one with the whole texts if somebody has changed the hint."""
        if self._faults and self.hint == joined_hints(self._faults):
            return self._faults
        of_layout = isinstance(self, LayoutError)
        return (Fault(str(self), self.hint, of_layout, ("layout",) if of_layout else ()),)

    def add_hint(self, more: str) -> None:
        """Adds to the hint of the last fault."""
        *others, last = self.faults
        self._faults = (*others, last._replace(hint=f"{last.hint}; {more}" if last.hint else more))
        self.hint = joined_hints(self._faults)


class LayoutError(UserError):
    """A tensor x pipeline x data layout, or a batch, that cannot run."""


class ConfigError(UserError):
    """Faults in an experiment, a cluster profile or an option; one line each."""


class DataError(UserError):
    """Data are missing, empty, damaged, too few for the number of ranks, or have another vocabulary."""


class CheckpointError(UserError):
    """The checkpoint belongs to another model, or none is complete."""


class RenderError(UserError):
    """A template that is missing, broken or lacks a variable."""


class RunFolderError(UserError):
    """A run folder that cannot be made, read or written."""

    exit_code = 1


class NoSuchRun(UserError):
    """No run has that id, prefix, job id or folder."""

    exit_code = 5


class JobRefused(UserError):
    """The scheduler refused the job; the message quotes it."""

    exit_code = 1


class SlurmUnreachable(UserError):
    """There is no sbatch here, or the controller does not answer."""

    exit_code = 4


class JobFailed(UserError):
    """A job that was waited for ended in failure."""

    exit_code = 3


class OsErrorAs:
    """`with OsErrorAs(ConfigError, "cannot read X", hint):` raises that error, with the system's reason, for an OSError
    in the block. `hint`: the text, or a function that makes it from the OSError."""

    def __init__(self, kind: type[UserError], message: str, hint: str | Callable[[OSError], str]) -> None:
        self._kind, self._message, self._hint = kind, message, hint

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        if isinstance(fault, OSError):
            hint = self._hint if isinstance(self._hint, str) else self._hint(fault)
            raise self._kind(f"{self._message}: {fault.strerror or fault}", hint) from None


def tells_of_contents(fault: OSError) -> bool:
    """Whether an OSError of a read says something of the file: that it is missing, or no file. All others say only that
    this process, on this host, could not read it now."""
    return fault.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


def read_hint(fault: OSError, of_contents: str) -> str:
    """The hint for a file that could not be read: `of_contents` if the fault tells of it, else what this host lacks."""
    if tells_of_contents(fault):
        return of_contents
    hints = {
        errno.EMFILE: "this process may open no more files: ask for a higher hard limit (ulimit -Hn)",
        errno.ENFILE: "this host has no more open files to give (fs.file-max): try again, or on another host",
        errno.ENOMEM: "this host has no memory for it, or the process has all the maps it may have "
        "(vm.max_map_count): use a host with more",
    }
    hints |= dict.fromkeys((errno.EACCES, errno.EPERM), "get the permission to read it")
    return hints.get(fault.errno or 0, "nothing is known of its contents: try again, or on another host")


def fault_words(fault: Exception) -> str:
    """One line about a fault in our own code: its class, its message, and where it was raised."""
    frames = traceback.extract_tb(fault.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return " ".join(f"{type(fault).__name__}: {fault}".split())[:400] + where


def check_sizes(sizes: Mapping[str, int | None], table: str = "") -> None:
    """Raises LayoutError for a size below 1; None is allowed. `table`: prefix of the names."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise LayoutError(f"{table}{name} is {size}, but must be at least 1", f"give a positive {name}")


def check_package(package: str, user: str, extra: str = "train") -> None:
    """Raises ConfigError, with the command that installs it, if an optional package is missing."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{user} needs {package}, which is not installed", f"pip install 'hpc-gpt[{extra}]'")


def raise_faults(faults: Iterable[Fault]) -> None:
    """Raises one error with all faults, a LayoutError if the first is of the layout, else a ConfigError; does nothing
    if there are none."""
    if found := list({fault.message: fault for fault in faults}.values()):
        kind = LayoutError if found[0].of_layout else ConfigError
        raise kind("\n".join(fault.message for fault in found), joined_hints(found), found)


def joined_hints(faults: Iterable[Fault]) -> str:
    """The hints of several faults, equal ones once."""
    return "; ".join(dict.fromkeys(fault.hint for fault in faults if fault.hint))


@contextlib.contextmanager
def gathered(faults: list[Fault] | None) -> Iterator[None]:
    """In the block, an error of the settings is added to the list instead of being raised, if there is a list."""
    try:
        yield
    except (ConfigError, LayoutError) as error:
        if faults is None:
            raise
        faults += error.faults
