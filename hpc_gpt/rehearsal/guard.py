"""Ends what a rehearsal leaves when it is killed itself: `python -I -S guard.py FOLDER`, its stdin held open by it.

It waits for the end of stdin, kills every process with the rehearsal's mark, takes the folder away and is gone.
Imports nothing of hpc-gpt.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

_PATIENCE_S = 20.0


def marked(folder: str) -> list[int]:
    """Pids of processes with the mark of the rehearsal in `folder`."""
    mark = f"HPC_GPT_REHEARSAL={folder}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    environment = file.read().split(b"\0")
            except OSError:
                continue
            if mark in environment:
                found.append(int(name))
    return found


def main() -> None:
    folder = sys.argv[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    end = time.monotonic() + _PATIENCE_S
    while (left := marked(folder)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
