"""The harness: nothing it starts outlives it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import name_of
from tests.slurm.cluster import Cluster
from tests.slurm.daemons import processes_of, sweep
from tests.slurm.launcher import REPOSITORY
from tests.slurm.services import Services


def start_by_hand() -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-m", "tests.slurm.cluster", "bare"]
    owner = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    conf = Path(owner.stdout.readline().strip().removeprefix("export SLURM_CONF="))
    return owner, conf


def start_job(conf: Path) -> None:
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    command = ["srun", "--output=/dev/null", "bash", "-c", 'trap "" TERM INT; while :; do sleep 1; done']
    subprocess.Popen(
        command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    folder = conf.parent
    end = time.monotonic() + 240
    while not any(name_of(pid) == "slurmstepd" for pid in processes_of(folder)):
        assert time.monotonic() < end, "no step came up"
        time.sleep(0.05)


@pytest.mark.long(but="first")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_owner(services: Services, number: signal.Signals) -> None:
    owner, conf = start_by_hand()
    top = conf.parent.parent
    start_job(conf)
    owner.send_signal(number)
    owner.wait(240)
    if number == signal.SIGKILL:
        assert top in sweep()
    assert processes_of(top) == []
    assert not top.exists()


def test_a_step_sees_its_pretend_gpus(small: Cluster) -> None:
    done = small.run(
        "srun", "-N2", "--ntasks-per-node=2", "--gres=gpu:2", "printenv", "CUDA_VISIBLE_DEVICES", check=True
    )
    assert done.stdout.split() == ["0,1"] * 4
