"""stdout and stderr, whose reader may leave, as `| head` does: the command continues and does all of its work."""

import contextlib
import io
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

# Seconds between two progress lines of a verb with `--json`.
PROGRESS_S = 5.0
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


class _Lines(io.TextIOBase):
    """A stream that writes each line as a JSON object with `time` and `progress` to another stream."""

    encoding, errors = "utf-8", "replace"  # without it click would make a stream of its own

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._rest = stream, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(None, map(str.strip, lines)):
            self._stream.write(json.dumps({"time": time.time(), "progress": line}) + "\n")
        self._stream.flush()
        return len(text)


@contextlib.contextmanager
def progress_as_json(wanted: bool) -> Iterator[None]:
    """In the block, all prints become lines of JSON on stderr if that is `wanted`: stdout is for the one object of
    `--json`."""
    with contextlib.ExitStack() as stack:
        if wanted:
            lines = _Lines(sys.stderr)
            stack.callback(lines.write, "\n")
            stack.enter_context(contextlib.redirect_stdout(lines))
            stack.enter_context(contextlib.redirect_stderr(lines))
        yield


@contextlib.contextmanager
def at_work(wanted: bool) -> Iterator[None]:
    """In the block, writes a line of JSON to stderr every PROGRESS_S seconds with the time since its start."""
    over, began, lines = threading.Event(), time.monotonic(), _Lines(sys.stderr)

    def report_progress() -> None:
        while not over.wait(PROGRESS_S):
            lines.write(f"at work for {time.monotonic() - began:.0f} s\n")

    if wanted:
        threading.Thread(target=report_progress, name="at work", daemon=True).start()
    try:
        yield
    finally:
        over.set()
