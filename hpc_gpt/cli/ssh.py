"""Commands on another host, by the user's own ssh and its configuration.

One connection serves all commands for ten minutes, by a socket in the state folder, unless the configuration of the
host names a socket of its own. ssh gives the command to the login shell there, which may be any: so it is one word in
base64, which sh reads. What the shell prints before that is cut off stdout; with a terminal it is shown.
"""

import base64
import hashlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from types import FrameType

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.files import state_dir
from hpc_gpt.core.output import reader_left
from hpc_gpt.core.process import die_with_parent

# The first line of ours on stdout, with the number of the process there.
_BEGIN = 'echo "hpc-gpt-begins $$"\n'
_BEGINS = re.compile(rb"hpc-gpt-begins (\d+)\n")
_LOST = 255  # ssh's own exit code
# A socket's path has at most 107 bytes, of which ssh needs 17 for a moment.
_LONGEST_SOCKET = 90


class Unreachable(UserError):
    """The connection to a host failed, or was lost."""

    exit_code = 4


class Host:
    """A host of the user's ssh configuration."""

    def __init__(self, name: str) -> None:
        """Raises Unreachable if ssh is not installed."""
        self.name = name
        self._ssh = ["ssh"]
        if shutil.which("ssh") is None:
            raise Unreachable(f"ssh is not installed, so {name} cannot be reached", "install OpenSSH's client")
        known = subprocess.run(["ssh", "-G", "--", name], stdin=subprocess.DEVNULL, capture_output=True, check=False)
        socket = state_dir() / "ssh" / hashlib.sha256(name.encode()).hexdigest()[:12]
        if not re.search(rb"^controlpath (?!none$)", known.stdout, re.MULTILINE) and len(str(socket)) < _LONGEST_SOCKET:
            socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            percent = str(socket).replace("%", "%%")
            options = ("ControlMaster=auto", "ControlPersist=10m", f'ControlPath="{percent}"')
            self._ssh += [word for option in options for word in ("-o", option)]

    def command(self, script: str, *options: str) -> list[str]:
        """ssh's words for a script of sh."""
        word = base64.b64encode(script.encode("utf-8", "surrogateescape")).decode()
        there = f"exec sh -c 'eval \"$(echo {word} | base64 -d)\"'"
        return [*self._ssh, *options, "--", self.name, there]

    def ask(self, script: str, *options: str, given: bytes = b"") -> bytes:
        """What a script prints there after its line `begins`. Raises Unreachable if it cannot be asked, or fails."""
        command = self.command(f"{_BEGIN}{script}", "-T", *options)
        done = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=False)
        begin = _BEGINS.search(done.stdout)
        if done.returncode or begin is None:
            raise self._silent(done.returncode)
        return done.stdout[begin.end() :]

    def run(self, script: str, follows: bool = False) -> int:
        """The exit code of a script on this process's terminal, or with its stdin, stdout and stderr. Ctrl-C goes to
        the process there, which decides what it means. If the reader of stdout leaves, it goes on there, unless it only
        `follows` a log. Raises Unreachable without a connection, and if that is lost."""
        if os.isatty(0) and os.isatty(1):
            check = [*self._ssh, "-O", "check", "--", self.name]
            if subprocess.run(check, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode:
                self.ask(":")  # connects: from here on ssh's exit code means a lost connection
            quiet = "-oLogLevel=ERROR"  # else it says at the end that the connection is closed
            return self._code_of(subprocess.run(self.command(script, "-t", quiet), check=False).returncode)
        command, stdin = self.command(f"{_BEGIN}{script}", "-T"), subprocess.DEVNULL if os.isatty(0) else None
        process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, preexec_fn=_without_interrupts)
        pid: list[str] = []

        def interrupt(number: int, frame: FrameType | None) -> None:
            if not pid:
                process.terminate()
                raise KeyboardInterrupt
            subprocess.Popen(self.command(f"kill -INT {pid[0]}", "-T"), stdin=subprocess.DEVNULL)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            self._copy(process, pid, follows)
        finally:
            process.stdout.close()  # type: ignore[union-attr]
            code = process.wait()
            signal.signal(signal.SIGINT, before)
        return 0 if follows and reader_left() else self._code_of(code, bool(pid))

    def _silent(self, code: int) -> Unreachable:
        return Unreachable(f"{self.name} did not answer (exit code {code})", f"try: ssh {self.name} true")

    def _code_of(self, code: int, begun: bool = True) -> int:
        if 0 <= code < _LOST:
            return code
        if not begun:
            raise self._silent(code)
        what = f"the connection to {self.name} ended: what it has submitted there goes on"
        raise Unreachable(what, f"hpc-gpt --host {self.name} status shows it")

    @staticmethod
    def _copy(process: subprocess.Popen[bytes], pid: list[str], follows: bool) -> None:
        """Copies stdout from the line that begins it, and notes the process's number in `pid`."""
        assert process.stdout is not None
        seen = b""
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            if not pid:
                seen += chunk
                if (begin := _BEGINS.search(seen)) is None:
                    continue
                pid.append(begin[1].decode())
                chunk = seen[begin.end() :]
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            if follows and reader_left():
                return


def _without_interrupts() -> None:
    """In ssh, which would end at a Ctrl-C and leave the process there as it is."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def watch_connection() -> None:
    """Ends this process, which such a script has started without a terminal, once the connection is lost: as the loss
    of a terminal would."""
    if os.isatty(1):
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(1, 0)
        poll.poll()
        os.kill(os.getpid(), signal.SIGHUP)

    threading.Thread(target=wait, daemon=True).start()
