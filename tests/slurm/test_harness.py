"""The harness: nothing that it starts outlives it, even if it is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import name_of
from tests.slurm.daemons import processes_of, sweep
from tests.slurm.launcher import REPOSITORY
from tests.slurm.services import Services
from tests.waiting import wait_for


@pytest.mark.long
def test_nothing_outlives_a_killed_owner(services: Services) -> None:
    command = [sys.executable, "-m", "tests.slurm.cluster", "bare"]
    owner = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    conf = Path(owner.stdout.readline().strip().removeprefix("export SLURM_CONF="))
    folder = conf.parent
    job = ["srun", "--output=/dev/null", "bash", "-c", 'trap "" TERM INT; while :; do sleep 1; done']
    subprocess.Popen(
        job, env={**os.environ, "SLURM_CONF": str(conf)}, start_new_session=True, stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for("a step", lambda: "slurmstepd" in map(name_of, processes_of(folder)))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert folder.parent in sweep()
    assert processes_of(folder.parent) == []
    assert not folder.parent.exists()
