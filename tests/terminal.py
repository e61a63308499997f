"""A command on a pseudo-terminal, as a user at a keyboard has it."""

import os
import pty
import signal
import sys
import threading

import pytest


def on_a_terminal(
    *words: str, type_in: str | None = None, after: str = "", times: int = 1, seconds: float = 240, **variables: str
) -> tuple[int, str]:
    """(exit code, all output) of `python WORDS`; types `type_in` once `after` was shown so often.

    Fails with what was shown where `after` never was, or the command has not ended after so many seconds.
    """
    child, terminal = pty.fork()
    if child == 0:
        try:
            os.execve(sys.executable, [sys.executable, *words], {**os.environ, "TERM": "xterm", **variables})
        finally:
            os._exit(127)
    killer = threading.Timer(seconds, os.kill, (child, signal.SIGKILL))
    killer.start()
    shown, typed = b"", type_in is None
    try:
        while piece := _read(terminal):
            shown += piece
            if not typed and shown.count(after.encode()) >= times:
                os.write(terminal, type_in.encode())
                typed = True
        _, wait_status = os.waitpid(child, 0)
    finally:
        killer.cancel()
        os.close(terminal)
    code, text = os.waitstatus_to_exitcode(wait_status), shown.decode().replace("\r\n", "\n")
    if code == -signal.SIGKILL:
        pytest.fail(f"{words} did not end in {seconds} s; it showed:\n{text}")
    if not typed:
        pytest.fail(f"{words} ended with {code} and had not shown {after!r} {times} times, but:\n{text}")
    return code, text


def _read(terminal: int) -> bytes:
    """What is there next; nothing once the other end is closed."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
