"""An attempt that begins its training again, in place of resuming it: who has, who has not, and what the judge says."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.ends.began_again import describe_begin_again
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.attempts.judge import EndedAttempt, Rules, judge
from hpc_gpt.launcher.attempts.notify import event_keys
from hpc_gpt.launcher.decide import prepare
from hpc_gpt.launcher.request import Request, ScriptRequest
from hpc_gpt.launcher.submission import write_run
from tests.made_runs import STARTED, add_attempt, metrics_line


def script_run(folder: Path, keys: dict) -> RunFolder:
    (script := folder / "fit.slurm").write_text("#!/bin/bash\n#SBATCH -t 7\npython fit.py\n")
    prepared = prepare(Request(str(script), "generic-slurm", None, keys, script=ScriptRequest(script, (), ())))
    return write_run(prepared, folder / "logs", {})


def lines(first: int, last: int) -> list[dict]:
    return [metrics_line(step) for step in range(first, last + 1)]


# what the second attempt prints before its steps, its steps, whether it began again
SECOND = {
    "nothing": ("reading data\n", (1, 70), True),
    "no further than before": ("", (1, 20), True),
    "a dump of arguments": ("resume: False\nresume_from_checkpoint ..... None\n", (1, 70), True),
    "a search without success": ("no checkpoint found in out, training from scratch\n", (1, 70), True),
    "weights to begin from": ("Loading checkpoint shards: 100%|####| 2/2\n", (1, 70), True),
    "an older checkpoint": ("", (31, 90), False),
    "a load, and a count from 1": ("Resuming from checkpoint out/step-60\n", (1, 30), False),
    "a load in other words": ("=> loaded checkpoint 'out/last.pt' (epoch 3)\n", (1, 30), False),
    "a restored state": ("restored state at iteration 60\n", (1, 30), False),
    "a later epoch": ("epoch 3/10\n", (1, 30), False),
}


@pytest.mark.parametrize("second", SECOND)
def test_an_attempt_began_again_if_it_loaded_nothing(tmp_path: Path, second: str) -> None:
    text, (first, last), has_begun_again = SECOND[second]
    run = script_run(tmp_path, {})
    add_attempt(run, lines(1, 60), "walltime").log.write_text("epoch 1/10\n")
    attempt = add_attempt(run, lines(first, last), "walltime")
    attempt.log.write_text(text)
    sentence = describe_begin_again(run, attempt)
    expected = "attempt 2 began at step 1 again, after 60: the script loaded no checkpoint"
    assert sentence == (expected if has_begun_again else None)
    assert describe_begin_again(run, run.attempts()[0]) is None
    told = event_keys(run, run.resolved(), attempt, "first_step")
    assert (told["cause"], told["next"]) == (sentence, "it trains"), "while it runs"


def test_without_a_saved_checkpoint_that_is_the_reason(tmp_path: Path) -> None:
    run = script_run(tmp_path, {"command.checkpoints": f"{tmp_path}/out/step-*"})
    for _ in range(2):
        attempt = add_attempt(run, lines(1, 60), "walltime")
    assert str(describe_begin_again(run, attempt)).endswith("after 60: no checkpoint had been saved")
    # One was there at its start, although it has written the same name since.
    attempt.resume.write_text(json.dumps({"path": "out/step-60", "step": 60}))
    (saved := tmp_path / "out/step-60").mkdir(parents=True)
    (saved / "model.bin").write_text("weights")
    assert str(describe_begin_again(run, attempt)).endswith("after 60: the script loaded no checkpoint")


def test_checkpoints_above_its_steps_show_a_resumption(tmp_path: Path) -> None:
    run = script_run(tmp_path, {"command.checkpoints": f"{tmp_path}/out/step-*"})
    for _ in range(2):
        attempt = add_attempt(run, lines(1, 60), "walltime")
    (saved := tmp_path / "out/step-120").mkdir(parents=True)
    (saved / "model.bin").write_text("weights")
    os.utime(saved, (STARTED + 500, STARTED + 500))
    os.utime(run.attempts()[0].folder / "attempt.json", (STARTED, STARTED))
    assert describe_begin_again(run, attempt) is None


def past(*ends: str, again: str | None = "attempt 2 began at step 1 again") -> list[EndedAttempt]:
    """Attempts that each come further, of which all but the first began again."""
    rows = [
        EndedAttempt(number, ended, "some cause", saved=60 + number, resumed=59 + number, logged=True)
        for number, ended in enumerate(ends, 1)
    ]
    return [rows[0], *(replace(row, began_again=again) for row in rows[1:])]


@pytest.mark.parametrize(
    ("ends", "goes_on"),
    [
        (("walltime", "walltime"), True),
        (("walltime", "walltime", "walltime"), False),
        (("preempted", "preempted", "preempted", "preempted"), True),
        (("walltime", "preempted", "walltime"), True),
        (("error", "error", "error"), False),
    ],
)
def test_each_class_keeps_its_limit_in_a_row(ends: tuple[str, ...], goes_on: bool) -> None:
    verdict = judge(past(*ends), Rules())
    assert verdict.go_on is goes_on
    if not goes_on:
        assert verdict.ended == "no_progress"
        assert "began at step 1 again" in verdict.why
    assert judge(past(*ends, again=None), Rules()).go_on  # each came further


def test_restarts_in_one_job_are_counted_one_by_one() -> None:
    rows = [replace(row, start=("4711", 0)) for row in past("error", "error", "error")]
    assert judge(rows, Rules()).ended == "no_progress"
