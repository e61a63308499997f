"""The step time of a program that prints none: of stretches of the moments at which its lines came."""

import json
import time
from pathlib import Path

import pytest

from hpc_gpt.core.files import logs_dir
from hpc_gpt.launcher.watch.status import read_status
from hpc_gpt.reader.failures.live_lines import LiveLines
from hpc_gpt.trainer.program.process import ForeignLog
from hpc_gpt.trainer.program.step_numbers import StepClock
from tests.made_runs import make_run, unsubmitted_run

TURN_S = 0.2  # seconds between two looks at the files of a job script


def times(step_s: float, turns: int) -> list[float]:
    """The step times of a program of this step time, over so many looks."""
    clock, made, found = StepClock(10, 50), 0, []
    for turn in range(turns):
        now = turn * TURN_S
        came = int(now / step_s + 1e-9)
        took = clock.pass_moment(now, came if came > made else None)
        made = max(made, came)
        found += [] if took is None else [took]
    return found


@pytest.mark.parametrize("step_s", [0.01, 0.07, 0.3, 1.9])
def test_a_time_is_that_of_a_stretch_of_ten_turns(step_s: float) -> None:
    found = times(step_s, 600)
    assert found
    # Each end of a stretch is off by less than a turn, and a stretch has ten.
    assert found == [pytest.approx(step_s, rel=0.101)] * len(found)
    assert sorted(found)[len(found) // 2] == pytest.approx(step_s, rel=0.021)


def test_there_is_none_before_the_first_stretch() -> None:
    assert (times(0.3, 11), len(times(0.3, 14))) == ([], 1)


def test_each_line_of_a_pipe_has_its_own_time() -> None:
    clock = StepClock()
    assert [clock.pass_moment(now, step) for now, step in ((1.0, 1), (1.5, 2), (2.5, 4))] == [None, 0.5, 0.5]


def rows(*moments: list[str]) -> list[dict]:
    run = unsubmitted_run()
    attempt = run.new_attempt()
    log = ForeignLog(attempt, run.resolved(), 0, LiveLines().take)
    for lines in moments:
        log.take(*lines)
        time.sleep(0.01)
    return [json.loads(line) for line in attempt.metrics.read_text().splitlines()]


def test_lines_that_came_together_share_their_time() -> None:
    found = rows(["step 1 loss 3.0"], [f"step {step} loss 2.5" for step in range(2, 22)], ["step 22 loss 2.0"])
    assert found[0]["step_s"] is None
    assert len({row["step_s"] for row in found[1:21]}) == 1
    assert 20 * found[1]["step_s"] >= 0.0099  # all 20 since the moment before


def test_times_of_the_programs_own_are_not_mixed_with_others() -> None:
    found = rows(["iter 1: loss 3.0, time 250.00ms, mfu 12.00%"], ["iter 2: los"], ["step 3 loss 2.0"])
    assert [(row["step"], row["step_s"]) for row in found] == [(1, 0.25), (3, None)]


def test_how_many_steps_there_are_is_in_its_lines(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('engine.name = "command"\ncommand.run = "true"\n')
    run = make_run(logs_dir(), experiment=str(tmp_path / "mine.toml"), submit=False)
    lines = LiveLines()
    log = ForeignLog(run.new_attempt(), run.resolved(), 0, lines.take, planned=lambda: lines.planned)
    log.take("step 35/60 loss 2.5", "step 36/60 loss 2.4")
    (status,) = read_status([run])
    assert (status.step, status.steps) == (36, 60)
