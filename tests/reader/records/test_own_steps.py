"""The curve of our own runs: what was trained again is there, and does not count."""

import math

from hpc_gpt.reader.records.own_run import read_own
from tests.made_runs import add_attempt, metrics_line


def test_every_attempts_steps_are_there_and_the_last_count(run):
    add_attempt(run, 10, "walltime", requeue=True)
    again = [metrics_line(step, loss=1.0, loss_eval=2.5 if step == 12 else None) for step in range(8, 13)]
    add_attempt(run, again, resumed_step=7)
    read = read_own(run)
    curve = read.steps
    assert curve["step"].tolist() == [*range(1, 11), *range(8, 13)]
    assert curve.attempt.tolist() == [1] * 10 + [2] * 5
    assert curve.counts.tolist() == [True] * 7 + [False] * 3 + [True] * 5
    assert curve.steady.sum() == read.record.steps_used
    assert not curve.steady[curve["step"] == 1].any()
    assert not (curve.steady & ~curve.counts).any()
    assert (curve.eval_step.tolist(), curve.eval_loss.tolist()) == ([12], [2.5])
    assert [path.name for path in read.files] == ["metrics.jsonl", "metrics.jsonl"]
    assert read.folder == run.path


def test_what_a_line_lacks_is_nan_and_a_skip_is_marked(run):
    add_attempt(run, [metrics_line(1), metrics_line(2, loss=None, grad_norm=None, skipped=True)])
    curve = read_own(run).steps
    assert math.isnan(curve["loss"][1])
    assert math.isnan(curve["grad_norm"][1])
    assert curve.is_skipped.tolist() == [False, True]


def test_a_run_without_steps_has_an_empty_curve(run):
    curve = read_own(run).steps
    assert len(curve["step"]) == len(curve.steady) == len(curve.eval_step) == 0


def test_a_record_alone_takes_fewer_columns_and_is_the_same(run):
    lines = [metrics_line(1), metrics_line(2, loss=None, grad_norm=math.nan), metrics_line(3, loss=math.nan)]
    add_attempt(run, lines, "walltime", requeue=True)
    add_attempt(run, [metrics_line(step, lr=step / 3) for step in range(3, 30)], resumed_step=2)
    whole, alone = read_own(run), read_own(run, record_only=True)
    assert alone.record.to_tables() == whole.record.to_tables()
    assert alone.record.nan_steps == 1
    assert set(whole.steps.columns) - set(alone.steps.columns) == {"grad_norm", "lr", "tokens_per_s"}
