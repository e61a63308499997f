"""What --resume takes of a run that is done, and of the model that its checkpoint has."""

import pytest

from tests.cli.command import in_process
from tests.made_runs import a_run


@pytest.mark.parametrize("asked", [("--until", "steps=12"), ("--set", "train.steps=12")])
def test_more_steps_are_the_way_on(asked):
    run = a_run(6, saved=[6], train__steps=6, train__warmup_steps=0, data__source="random")
    done = in_process("submit", "--resume", run.run_id, *asked, "--dry-run", "--script", code=0)
    assert '"steps": 12,' in done.stdout
    assert "rate falls (cosine) to the end of 6 steps until step 6, and of 12 steps after it: no" in done.stderr
