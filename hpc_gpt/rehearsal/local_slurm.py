"""A Slurm that is none: the scheduler, its stand-ins and the environment in which a command finds them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from hpc_gpt.rehearsal import guard
from hpc_gpt.rehearsal.processes import MARK
from hpc_gpt.rehearsal.scheduler import Scheduler, Timing
from hpc_gpt.rehearsal.stand_ins import StandIns


class LocalSlurm:
    """A folder, a scheduler and the stand-ins, until `close`; then no process and no folder is left.

    `environment` is what a command needs to find them. Should this process be killed, its guard ends the rest.
    """

    def __init__(self, nodes: int, gpus: int = 0, timing: Timing | None = None, also: Mapping[str, str] | None = None):
        self.folder = Path(tempfile.mkdtemp(prefix="hpc-gpt-rehearsal-")).resolve()
        (self.folder / "tmp").mkdir()
        commands = self.folder / "bin"
        own = {
            MARK: str(self.folder),
            "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "TMPDIR": str(self.folder / "tmp"),
            # Should one of Slurm's own commands be called after all, it finds no cluster.
            "SLURM_CONF": str(self.folder / "no-slurm.conf"),
            "HPC_GPT_STATE": str(self.folder / "state"),
            **(also or {}),
        }
        self.environment = {**os.environ, **own}
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.scheduler = Scheduler(self.folder, nodes, own, gpus, timing)
        self._stand_ins = StandIns(self.folder, self.scheduler)

    def close(self) -> list[int]:
        """Ends all jobs and takes the folder away; gives the pids of processes that would not end."""
        self._stand_ins.close()
        left = self.scheduler.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
        return left

    def __enter__(self) -> LocalSlurm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
