"""stdout and stderr whose reader may leave, as `| head` does: the command continues and does all of its work."""

import io
import os
import select
import sys

_left: set[int] = set()


class _Lasting(io.FileIO):
    """A descriptor that is /dev/null after the first write that fails. Processes started later inherit that.

    No write fails for lack of a reader. For another reason, such as a full disk, the first fails and the rest do not.
    """

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as fault:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if not isinstance(fault, BrokenPipeError):
                raise OSError(fault.errno, fault.strerror, "the output") from None
            _left.add(self.fileno())
            return len(memoryview(data).cast("B"))  # type: ignore[arg-type]


def outlive_readers() -> None:
    """Makes writing to the process's own stdout and stderr never fail for a reader that has left.

    A terminal stays as it is: it has its reader, and input() forgets a Ctrl-C that comes in a flush written in Python.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):  # closed by the shell, or a test's own
            continue
        if stream.isatty():
            continue
        stream.flush()
        raw = _Lasting(stream.fileno(), "w", closefd=False)
        lines = stream.line_buffering or stream.write_through  # the latter under python -u
        lasting = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=lines)
        setattr(sys, name, lasting)


def reader_left() -> bool:
    """Whether nobody reads stdout any more, so that what only prints, for as long as it is read, can end."""
    if 1 in _left:
        return True
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
