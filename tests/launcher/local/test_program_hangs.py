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
FLOOR_S = patient(4)
# What the program does after its steps, and for how long it is left alone at least.
SAVING = "time.sleep(1)\nprint('Saving', flush=True)\nprint('the model', flush=True)\ntime.sleep(9000)"
HANGS = {
    "asleep": ("time.sleep(9000)", FLOOR_S),
    "asleep after a line": (SAVING, FLOOR_S),
    "spin": ("while True: pass", 12 * FLOOR_S),
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", HANGS)
def test_a_program_that_stands_still_is_ended_as_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A job script's program that sleeps, and one of engine command that computes on."""
    body, least_s = HANGS[kind]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(f"{TRAIN}{body}\n")
    run, floor = f"{sys.executable} train.py", ("--set", f"train.hang_floor_s={FLOOR_S:g}")
    if kind != "spin":
        (tmp_path / "fit.slurm").write_text(f"#!/bin/bash\n#SBATCH -t 20\n{run}\n")
        made = submit("--cluster", "local", *floor, tmp_path / "fit.slurm")
    else:
        (tmp_path / "mine.toml").write_text(
            f'[engine]\nname = "command"\n[command]\nrun = "{run}"\nsnapshot = false\nworkdir = "{tmp_path}"\n'
        )
        made = submit("--cluster", "local", "--gpus", "1", *floor, tmp_path / "mine.toml")
    wait_for("it has ended", made.attempt(1).ended)
    in_process("cancel", made.run_id)  # a hang is started again
    end, last = made.attempt(1).ended(), made.attempt(1).last_metrics()
    assert (end["ended"], last["step"], end["time"] - last["time"] >= least_s) == ("hang", 11, True), end
    assert kind == "spin" or end["time"] - last["time"] < 6 * FLOOR_S, "a line is a sign of life while it is young"


@pytest.mark.long
def test_a_silent_evaluation_after_the_last_line_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = TRAIN.replace("range(12)", "range(9, 99, 10)").replace("{number} loss", "{number + 1}/99 loss")
    (tmp_path / "train.py").write_text(f"{text}time.sleep({3 * FLOOR_S})\n")
    (tmp_path / "fit.slurm").write_text(f"#!/bin/bash\n#SBATCH -t 20\n{sys.executable} train.py\n")
    made = submit("--cluster", "local", "--set", f"train.hang_floor_s={FLOOR_S:g}", tmp_path / "fit.slurm")
    wait_for("it has ended", made.attempt(1).ended)
    end = made.attempt(1).ended()
    assert (end["ended"], end["cause"], end["step"]) == ("done", "99 of 99 steps", 90), end
