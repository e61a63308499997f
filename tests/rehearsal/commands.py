"""Call Slurm's commands, real ones or stand-ins, and wait for their effect."""

import re
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.processes import pause

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


class Commands:
    """Commands in one environment; scripts and their output lie in `folder`."""

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self.environment = dict(environment)
        self.folder = folder

    def run(self, *command: object, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command],
            env={**self.environment, **more},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def submit(self, name: str, text: str, *flags: object) -> str:
        """Submits a script, whose output is NAME.out; gives the job id."""
        (self.folder / f"{name}.sh").write_text(f"#!/bin/bash\n{text}\n")
        done = self.run("sbatch", "--parsable", f"--output={self.folder}/{name}.out", *flags, f"{name}.sh")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def output(self, name: str) -> str:
        path = self.folder / f"{name}.out"
        return path.read_text() if path.exists() else ""

    def shown(self, job: str) -> dict[str, str]:
        """`scontrol --oneliner show job`, the first of each key."""
        fields: dict[str, str] = {}
        for key, value in re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "--oneliner", "show", "job", job).stdout):
            fields.setdefault(key, value)
        return fields

    def state(self, job: str) -> str:
        return self.shown(job).get("JobState", "unknown")

    def wait(self, what: str, ready: Callable[[], object], limit_s: float = 240) -> None:
        """Polls `ready`; fails with what is known."""
        end = (looked := time.monotonic()) + limit_s
        while not ready():
            if time.monotonic() > end:
                queue = self.run("squeue", "--noheader", "--states=all", "--format=%i %T %r").stdout
                said = "\n".join(path.read_text(errors="replace") for path in self.folder.glob("*.out"))
                raise AssertionError(f"{what} not within {limit_s:.0f} s\n{queue}\n{said}")
            pause(looked)
            looked = time.monotonic()

    def wait_end(self, job: str) -> dict[str, str]:
        """Waits until the job is over and gives its fields."""
        self.wait(f"the end of job {job}", lambda: self.state(job) in ENDED)
        return self.shown(job)
