"""Programs that are not ours and hang, for real, with a floor of some seconds for the 300: one that sleeps is told from
one that computes. trainer/program/test_signs_of_life.py has the table of all that only looks like a hang."""

import sys
from pathlib import Path

import pytest

from tests.cli.command import in_process
from tests.launcher.local.conftest import submit
from tests.waiting import patient, wait_for

TRAIN = """\
import time

for number in range(12):
    print(f"step {number} loss {9 - number / 9:.3f}", flush=True)
    time.sleep(0.4)
"""
HANGS = {
    "asleep": ("time.sleep(9000)", "does nothing"),
    "spin": ("while True: pass", "makes no step"),
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", HANGS)
def test_a_program_that_stands_still_is_ended_as_a_hang(tmp_path: Path, kind: str) -> None:
    """A job script's program that sleeps, and one of engine command that computes on."""
    body, words = HANGS[kind]
    (tmp_path / "train.py").write_text(f"{TRAIN}{body}\n")
    run, floor = f"{sys.executable} train.py", ("--set", f"train.hang_floor_s={patient(4):g}")
    if kind == "asleep":
        (tmp_path / "fit.slurm").write_text(f"#!/bin/bash\n#SBATCH -t 20\n{run}\n")
        made = submit("--cluster", "local", *floor, tmp_path / "fit.slurm")
    else:
        (tmp_path / "mine.toml").write_text(
            f'[engine]\nname = "command"\n[command]\nrun = "{run}"\nsnapshot = false\nworkdir = "{tmp_path}"\n'
        )
        made = submit("--cluster", "local", "--gpus", "1", *floor, tmp_path / "mine.toml")
    wait_for("it has ended", made.attempt(1).ended)
    in_process("cancel", made.run_id)  # a hang is started again
    end = made.attempt(1).ended()
    assert (end["ended"], words in end["cause"]) == ("hang", True), end
    assert made.attempt(1).last_metrics()["step"] == 11
