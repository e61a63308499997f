"""Hangs of programs that are not ours, and what only looks like one: of job scripts and of engine command, for real,
with a floor of some seconds for the 300."""

import sys
import time
from pathlib import Path

import pytest

from tests import LONG_ALONE
from tests.cli.command import hpc_gpt
from tests.launcher.local.conftest import newest, status_of, wait_until

FLOOR_S = 4.0
LONG_S = 12 * FLOOR_S
HANG, DONE, RUNS = "hang", "done", "running"
TRAIN = """\
import os, sys, threading, time

def steps(count, total=0, begin=1):
    for number in range(begin, begin + count):
        print(f"step {number}{f'/{total}' if total else ''} loss {9 - number / 9:.3f}", flush=True)
        time.sleep(0.4)

def show(seconds, every=1.0):
    until = time.time() + seconds
    while time.time() < until:
        print("evaluating, at", time.time(), flush=True)
        time.sleep(every)

def spin():
    while True:
        pass

"""
PY = f"{sys.executable} train.py"
# (what the Python program does, the lines of the job script, how it ends, after how many seconds at least and at most)
SCRIPTS = {
    "asleep": ("steps(12); time.sleep(900)", PY, HANG, FLOOR_S, LONG_S),
    "spin": ("steps(12); spin()", PY, HANG, LONG_S, 2 * LONG_S),
    "printing thread": (
        "threading.Thread(target=show, args=(900,), daemon=True).start(); steps(12); threading.Event().wait()",
        PY, HANG, LONG_S, 2 * LONG_S,
    ),
    "something prints beside": (
        "steps(12); time.sleep(900)",
        f"while sleep 1; do echo 'Tesla, 98 %'; done &\n{PY}\nkill %1", HANG, LONG_S, 2 * LONG_S,
    ),
    "second stage": ("steps(12, 12); time.sleep(1); steps(9, 12); time.sleep(900)", PY, HANG, FLOOR_S, LONG_S),
    "second program": (
        "steps(12, 12) if len(sys.argv) < 2 else (steps(9), spin())", f"{PY}\n{PY} again", HANG, LONG_S, 2 * LONG_S,
    ),
    "srun in the background": (
        "steps(12); time.sleep(900)", f"srun {PY} &\nfor n in $(seq 600); do echo waiting; sleep 1; done\nwait",
        HANG, LONG_S, 2 * LONG_S,
    ),
    "a save that stands still": (
        "steps(12); print('saving', flush=True); time.sleep(900)", PY, HANG, LONG_S, 2 * LONG_S
    ),
    "log written over": (
        "steps(12) if len(sys.argv) < 2 else (steps(9), time.sleep(900))", f"{PY} > fit.log\n{PY} again > fit.log",
        HANG, FLOOR_S, LONG_S,
    ),
    "at exit": ("steps(12, 12); time.sleep(900)", PY, RUNS, 1.5 * LONG_S, 0),
    "before the first step": ("time.sleep(900)", PY, RUNS, 1.5 * LONG_S, 0),
    "evaluates after": ("steps(12, 12); show(1.4 * 48)", PY, DONE, LONG_S, 3 * LONG_S),
    "another evaluates": (
        "steps(12) if len(sys.argv) < 2 else show(1.4 * 48)", f"{PY}\n{PY} evaluate", DONE, LONG_S, 3 * LONG_S,
    ),
    "uploads": ("steps(12)", f"{PY}\nsleep 20", DONE, 20, LONG_S),
    "evaluates within": ("steps(12, 20); show(20); steps(8, 20, 13)", PY, DONE, 20, LONG_S),
    "saves within": (
        "steps(12, 20)\nos.makedirs('ckpt', exist_ok=True)\nfor n in range(20):\n"
        "    open('ckpt/step-12', 'ab').write(b'0' * 99); time.sleep(1)\nsteps(8, 20, 13)",
        PY, DONE, 20, LONG_S,
    ),
    "stages of one log": (
        "steps(12, 12) if len(sys.argv) < 2 else steps(60, 60)", f"{PY} > fit.log\n{PY} again > fit.log", DONE, 20, 99,
    ),
}  # fmt: skip
PROGRAMS = {
    "asleep": ("steps(12); time.sleep(900)", 1, HANG, FLOOR_S, LONG_S),
    "spin": ("steps(12); spin()", 1, HANG, LONG_S, 2 * LONG_S),
    "one of two spins": (
        "steps(12, 90); spin() if os.environ['RANK'] == '1' else time.sleep(900)", 2, HANG, LONG_S, 2 * LONG_S,
    ),
    "one of two is over": (
        "steps(12, 90) if os.environ['RANK'] == '0' else (steps(15, 90), time.sleep(900))", 2, HANG, FLOOR_S, LONG_S,
    ),
    "one leaves early": (
        "steps(60, 60) if os.environ['RANK'] == '1' else time.sleep(3)", 2, DONE, 20, 2 * LONG_S
    ),
    "evaluates after": ("steps(12, 12); show(1.4 * 48)", 1, DONE, LONG_S, 3 * LONG_S),
    "silent after": ("steps(12, 12); show(3); time.sleep(900)", 1, HANG, 9, LONG_S),  # by command.hang_s
}  # fmt: skip
# A minute each, so `make test-long` has one of each kind, and `make test-all` has all.
OF_EACH_KIND = ("printing thread", "second stage", "srun in the background", "at exit", "another evaluates",
                "evaluates within", "saves within", "log written over")  # fmt: skip
OF_EACH_PROGRAM = ("spin", "one of two is over", "one leaves early", "silent after")


def start(folder: Path, body: str, script: str | None, tasks: int = 1, **keys: object):
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN + body + "\n")
    (folder / "srun").write_text('#!/bin/sh\n"$@" &\nwait\n')
    (folder / "srun").chmod(0o755)
    sets = [word for key, value in keys.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
    sets += ["--set", f"train.hang_floor_s={FLOOR_S}"]
    if script is not None:
        (folder / "fit.slurm").write_text(f"#!/bin/bash\n#SBATCH -t 20\nPATH=$PWD:$PATH\n{script}\n")
        options = ["--checkpoints", "ckpt/step-*"] if "ckpt" in body else []
        hpc_gpt("submit", "--cluster", "local", *options, *sets, "fit.slurm", cwd=folder, code=0)
    else:
        text = f'[engine]\nname = "command"\n[command]\nrun = "{PY}"\nsnapshot = false\n'
        (folder / "mine.toml").write_text(text)
        hpc_gpt("submit", "--cluster", "local", "--gpus", str(tasks), *sets, "mine.toml", cwd=folder, code=0)
    return newest()


def watched(run, how: str, least_s: float, most_s: float) -> tuple[str, float, str]:
    """(its end, seconds from the last step to it, its cause); of one that is to run on, after `least_s`."""
    attempt = run.attempt(1)
    if how == RUNS:
        wait_until(lambda: (attempt.folder / "trainer.json").exists())
        until = time.time() + least_s + 10
        wait_until(lambda: attempt.ended() or time.time() > until, 900)
        if attempt.ended():
            return attempt.ended()["ended"], 0.0, attempt.ended()["cause"]
        still = status_of(run).still or ""
        hpc_gpt("cancel", run.run_id)
        return RUNS, least_s, still
    wait_until(lambda: attempt.ended(), 900)
    end, lines = attempt.ended(), attempt.metrics.read_text().splitlines()
    assert lines
    hpc_gpt("cancel", run.run_id)  # a hang is started again
    return end["ended"], end["time"] - attempt.last_metrics()["time"], str(end.get("cause"))


@pytest.mark.long
@pytest.mark.parametrize("name", OF_EACH_KIND if LONG_ALONE else SCRIPTS)
def test_a_job_script(tmp_path: Path, name: str) -> None:
    body, script, how, least_s, most_s = SCRIPTS[name]
    ended, after_s, cause = watched(start(tmp_path / "fit", body, script), how, least_s, most_s)
    assert ended == how, cause
    assert how != HANG or least_s <= after_s <= most_s, cause


@pytest.mark.long
@pytest.mark.parametrize("name", OF_EACH_PROGRAM if LONG_ALONE else PROGRAMS)
def test_a_program(tmp_path: Path, name: str) -> None:
    body, tasks, how, least_s, most_s = PROGRAMS[name]
    more = {"command__hang_s": 8.0} if name == "silent after" else {}
    ended, after_s, cause = watched(start(tmp_path / "fit", body, None, tasks, **more), how, least_s, most_s)
    assert ended == how, cause
    assert how != HANG or least_s <= after_s <= most_s, cause
