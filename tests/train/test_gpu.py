"""On a GPU, with train.deterministic: interrupted and resumed gives the same figures, to the last digit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_gpt.runs.run_folder import Attempt, RunFolder
from tests.train.launch import PATIENCE_S, figures, lines, new_run, settings

pytestmark = pytest.mark.gpu
STEPS = 200


def start(run: RunFolder) -> tuple[subprocess.Popen[bytes], Attempt]:
    """One rank on the first GPU, started as job.sh starts it."""
    attempt = run.new_attempt()
    own = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "HPC_GPT_RUN": str(run.path),
        "HPC_GPT_ATTEMPT": str(attempt.number),
    }
    with open(attempt.log, "ab") as log:
        rank = subprocess.Popen(
            [sys.executable, "-m", "hpc_gpt.train"], env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT
        )
    return rank, attempt


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_resumed_on_a_gpu_to_the_last_digit(tmp_path: Path, tokens: Path, dtype: str) -> None:
    one = {"tp": 1, "pp": 1, "dp": 1}
    resolved = settings(tokens, one, dtype=dtype, steps=STEPS, deterministic=True, eval_every=70, save_every=50)
    unbroken, run = new_run(tmp_path / "unbroken", resolved), new_run(tmp_path / "broken", resolved)
    rank, attempt = start(unbroken)
    assert rank.wait(PATIENCE_S) == 0, attempt.log.read_text()
    rank, attempt = start(run)
    until = time.monotonic() + PATIENCE_S
    while "step 20/" not in attempt.log.read_text():
        assert rank.poll() is None, attempt.log.read_text()
        assert time.monotonic() < until, attempt.log.read_text()
        time.sleep(0.01)
    rank.send_signal(signal.SIGUSR2)
    assert rank.wait(PATIENCE_S) == 0
    assert attempt.ended()["ended"] == "walltime", attempt.log.read_text()
    rank, attempt = start(run)
    assert rank.wait(PATIENCE_S) == 0, attempt.log.read_text()
    assert figures(run) == figures(unbroken)
    # A peak is known one step after it was looked up.
    assert all(line["memory_allocated_gib"] for line in lines(unbroken)[3:])
