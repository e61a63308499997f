"""A Slurm of stand-ins, whose waits are short."""

from collections.abc import Iterator

import pytest

from hpc_gpt.launcher.rehearsal.local_slurm import LocalSlurm
from tests.rehearsal.commands import Commands


@pytest.fixture
def slurm() -> Iterator[LocalSlurm]:
    """Four virtual nodes; SIGKILL comes 2 s after SIGTERM, a preemption's end after 3 s."""
    with LocalSlurm(4, kill_wait_s=2, grace_s=3, requeue_s=1) as running:
        yield running


@pytest.fixture
def commands(slurm: LocalSlurm, tmp_path) -> Commands:
    """Slurm's commands, as the stand-ins are."""
    return Commands(slurm.environment, tmp_path)
