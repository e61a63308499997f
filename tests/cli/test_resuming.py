"""What --resume takes of a run that is done, and of the model that its checkpoint has."""

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.cli.command import error_of, in_process
from tests.made_runs import add_attempt, add_checkpoint, metrics_line, unsubmitted_run, with_attempt, with_checkpoints


def trained(steps: int = 6, saved: int = 6, cause: str | None = None, **settings: object) -> RunFolder:
    run = unsubmitted_run(train__steps=steps, train__warmup_steps=0, data__source="random", **settings)
    add_attempt(run, [metrics_line(saved or steps)], "done", cause=cause)
    if saved:
        add_checkpoint(run, saved)
    return run


@pytest.mark.parametrize("asked", [(), ("--until", "steps=6"), ("--tp", "1"), ("--dry-run",)])
def test_a_run_that_is_done_does_not_start_again(asked):
    run = trained()
    done = in_process("submit", "--resume", run.run_id, *asked)
    message, hint = error_of(done)
    assert done.code == 2
    assert message == f"run {run.run_id} is done: it has trained its 6 steps; its job would end at once"
    assert "--until steps=12, or --set train.steps=12" in hint
    assert len(run.attempts()) == 1


@pytest.mark.parametrize("asked", [("--until", "steps=12"), ("--set", "train.steps=12")])
def test_more_steps_are_the_way_on(asked):
    done = in_process("submit", "--resume", trained().run_id, *asked, "--dry-run", "--script", code=0)
    assert '"steps": 12,' in done.stdout
    assert "cosine of the learning rate was over 6 steps and is over 12 from step 6 on" in done.stderr


@pytest.mark.parametrize("asked", [("--until", "steps=5"), ("--set", "train.steps=5")])
def test_fewer_steps_are_none(asked):
    message, hint = error_of(in_process("submit", "--resume", trained().run_id, *asked))
    assert "train.steps is 5, but the newest checkpoint is of step 6" in message
    assert "more than 6" in hint


@pytest.mark.parametrize(
    ("settings", "cause", "way"),
    [
        ({"saved": 4, "train__minutes": 5.0}, "train.minutes = 5 are over", "--set train.minutes=5"),
        ({"saved": 4, "train__until_loss": 3.0}, "mean loss of 20 steps 2.9, train.until_loss = 3", "--until loss=2.7"),
        ({"saved": 0}, "it has trained its 6 steps", "no checkpoint to resume from"),
    ],
)
def test_the_way_on_is_that_of_what_ended_it(settings, cause, way):
    run = trained(cause=None if cause.startswith("it has") else cause, **settings)
    message, hint = error_of(in_process("submit", "--resume", run.run_id))
    assert f"is done: {cause}; " in message
    assert way in hint


def test_another_model_than_the_checkpoints_is_refused():
    run = trained()
    for more in ((), ("--until", "steps=12")):
        done = in_process("submit", "--resume", run.run_id, "--model", "48b", *more, code=2)
        assert "model.preset 48b is another model than the checkpoint's: hidden 8192, not " in error_of(done)[0]


def stopped(*steps: int, damaged: tuple[int, ...] = ()) -> RunFolder:
    """A run of ten steps that was stopped, with checkpoints."""
    run = with_attempt(unsubmitted_run(train__steps=10, train__warmup_steps=0, data__source="random"), 6, "stopped")
    return with_checkpoints(run, *steps, damaged=damaged)


@pytest.mark.parametrize("asked", [(), ("--dry-run",), ("--tp", "1"), ("--until", "steps=20", "--dry-run")])
def test_a_run_with_only_damaged_checkpoints_is_refused_first(asked):
    run = stopped(damaged=(4, 6))
    done = in_process("submit", "--resume", run.run_id, *asked)
    message, hint = error_of(done)
    assert done.code == 2
    assert message.startswith(f"run {run.run_id} has no sound checkpoint to resume from:")
    assert "step-00000006: weights has 300 bytes, not 700" in message
    assert f"hpc-gpt submit --resume {run.run_id} --from-start" in hint
    assert (len(run.attempts()), run.submissions()) == (1, [])


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
