"""stdout and stderr, whose reader may leave, as `| head` does: the command continues and does all of its work."""

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator

OUTPUT = "the output"  # the name of the file in a fault of stdout or stderr
_left: set[int] = set()
# The file or the run that the command is working on, to be shown meanwhile.
working_on = ""


class _IgnoresClosedPipe(io.FileIO):
    """A descriptor that becomes /dev/null after the first write that fails. Processes started later inherit it.

    A missing reader raises nothing. Any other fault, such as a full disk, raises OSError once.
    """

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as fault:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if not isinstance(fault, BrokenPipeError):
                raise OSError(fault.errno, fault.strerror, OUTPUT) from None
            _left.add(self.fileno())
            return len(memoryview(data).cast("B"))  # type: ignore[arg-type]


def outlive_readers() -> None:
    """Lets writes to stdout and stderr of this process succeed after their reader has left.

    A terminal stays as it is: it has its reader, and input() forgets a Ctrl-C that comes in a flush written in Python.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):  # closed by the shell, or a test's own
            continue
        if stream.isatty():
            continue
        stream.flush()
        raw = _IgnoresClosedPipe(stream.fileno(), "w", closefd=False)
        lines = stream.line_buffering or stream.write_through  # the latter under python -u
        lasting = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=lines)
        setattr(sys, name, lasting)


def reader_left() -> bool:
    """Whether nobody reads stdout any more, so that a command that only prints can end."""
    if 1 in _left:
        return True
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


@contextlib.contextmanager
def prints_on_stderr(wanted: bool) -> Iterator[None]:
    """In the block, all prints go to stderr if that is `wanted`: stdout is for the one object of `--json`."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield
