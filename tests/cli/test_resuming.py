"""What --resume takes of a run that is done, and of the model that its checkpoint has."""

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.cli.command import in_process
from tests.made_runs import a_run


@pytest.mark.parametrize("asked", [("--until", "steps=12"), ("--set", "train.steps=12")])
def test_more_steps_are_the_way_on(asked):
    run = a_run(6, saved=[6], train__steps=6, train__warmup_steps=0, data__source="random")
    done = in_process("submit", "--resume", run.run_id, *asked, "--dry-run", "--script", code=0)
    assert '"steps": 12,' in done.stdout
    assert "cosine of the learning rate was over 6 steps and is over 12 from step 6 on" in done.stderr


def stopped(*steps: int, damaged: tuple[int, ...] = ()) -> RunFolder:
    """A run of ten steps that was stopped, with checkpoints."""
    small = {"train__steps": 10, "train__warmup_steps": 0, "data__source": "random"}
    return a_run(6, "stopped", saved=steps, damaged=damaged, **small)


def test_from_start_is_the_way_out():
    run = stopped(damaged=(6,))
    done = in_process("submit", "--resume", run.run_id, "--from-start", "--dry-run", "--script", code=0)
    assert f"Trains run {run.run_id} again from step 0" in done.stdout or '"steps": 10,' in done.stdout
    assert "resumes after" not in done.stderr


def test_resuming_says_where_and_a_dry_run_shows_the_script():
    run = stopped(4, damaged=(6,))
    done = in_process("submit", "--resume", run.run_id, "--dry-run", "--script", code=0)
    assert done.stdout == run.job_script.read_text()
    assert "note: checkpoint step-00000006 is not sound, and is passed over: weights has 300 bytes" in done.stderr
    assert f"resumes {run.run_id} after step 4\n" in done.stderr
    assert done.stderr.endswith("dry run: nothing was written or submitted\n")
    assert (len(run.attempts()), run.submissions()) == (1, [])
    done = in_process("submit", "--resume", run.run_id, "--set", "train.steps=20", "--dry-run")
    assert f"resumes {run.run_id} after step 4, as " in done.stderr
    run = stopped()
    done = in_process("submit", "--resume", run.run_id, "--dry-run")
    assert f"resumes {run.run_id} at step 0: it has no checkpoint\n" in done.stderr
