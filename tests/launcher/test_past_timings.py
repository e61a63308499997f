"""What earlier runs tell of seconds: of which runs, and which of their seconds."""

import json
from dataclasses import replace

import pytest

from hpc_gpt.core.checkpoints.disk_space import checkpoint_bytes, space_needed_gib
from hpc_gpt.core.settings.resolved import speed_hash
from hpc_gpt.launcher.past_timings import PastTimings
from hpc_gpt.reader.runs.timings import measure_run
from tests.made_runs import STARTED, add_attempt, make_run, metrics_line, with_attempt


def lines(first, last, at=STARTED + 60, evaluated=(), saved=(), step_s=0.5):
    """Steps of half a second from `at` on, an evaluation of 3 s behind some, a save of 7 s behind others."""
    found = []
    for step in range(first, last + 1):
        at += step_s
        line = metrics_line(step, step_s=step_s, time=at)
        if step in evaluated:
            line["loss_eval"], at = 3.0, at + 3
        if step in saved:
            line["save_s"], at = 7.0, at + 7
        found.append(line)
    return found


def test_seconds_of_steps_saves_evaluations_and_starts(tmp_path):
    run = with_attempt(make_run(tmp_path, "generic-slurm"), lines(1, 40, evaluated=(10, 20, 30), saved=(20, 40)))
    found = measure_run(run)
    assert found is not None
    assert found.run == run.run_id
    assert (found.step_s, found.save_s) == (0.5, 7.0)
    assert (found.eval_s, found.start_s) == (pytest.approx(3.0), pytest.approx(60.0))
    assert found.hold_s is None, "no save was due by itself"


def test_a_save_in_the_background_holds_up_less_than_it_takes(tmp_path):
    """Every tenth step one begins, holds up for a second, and is told of behind the next step but one."""
    run = make_run(tmp_path, "generic-slurm", train__save_every=10)
    written, at = [], STARTED
    for step in range(1, 41):
        at += 0.5
        told = 7.0 if step > 10 and step % 10 == 2 else None
        written.append(metrics_line(step, step_s=0.5, time=at, save_s=told, loss_eval=3.0 if step % 20 == 0 else None))
        at += 1.0 * (step % 10 == 0) + 4.0 * (step % 20 == 0)
    add_attempt(run, written)
    found = measure_run(run)
    assert found is not None
    assert (found.save_s, found.hold_s) == (7.0, pytest.approx(1.0))


def test_a_start_that_loads_a_checkpoint_is_the_later_links(tmp_path):
    run = with_attempt(make_run(tmp_path, "generic-slurm"), lines(1, 20, saved=(20,)))
    add_attempt(run, lines(21, 40, at=STARTED + 300 + 90), started=STARTED + 300, resumed_step=20)
    found = measure_run(run)
    assert found is not None
    assert found.start_s == pytest.approx(90.0)


def test_steps_that_were_warm_up_or_skipped_do_not_count(tmp_path):
    run = make_run(tmp_path, "generic-slurm")
    slow = [metrics_line(1, step_s=30.0, time=STARTED + 90), metrics_line(2, step_s=0.1, skipped=True)]
    add_attempt(run, [*slow, *lines(3, 30)])
    found = measure_run(run)
    assert found is not None
    assert found.step_s == 0.5


def test_alike_is_what_is_as_fast(tmp_path):
    base = make_run(tmp_path, "generic-slurm").resolved()
    train = base.train
    longer = replace(base, train=replace(train, steps=10**6, lr=1e-5, seed=9, save_every=7, until_loss=2.0))
    renamed = replace(base, name="another", job=replace(base.job, time="9:00:00"))
    assert speed_hash(base) == speed_hash(longer) == speed_hash(renamed)
    for other in (
        replace(base, train=replace(train, dtype="bf16")),
        replace(base, layout=replace(base.layout, tp=base.layout.tp * 2)),
        replace(base, nodes=base.nodes + 1),
        replace(base, cluster=replace(base.cluster, name="elsewhere")),
    ):
        assert speed_hash(other) != speed_hash(base)


def test_of_several_runs_the_newest_with_figures_is_taken(tmp_path):
    runs = [make_run(tmp_path, "generic-slurm") for _ in range(4)]
    add_attempt(runs[0], lines(1, 20, step_s=9.0))
    add_attempt(runs[1], lines(1, 20, step_s=0.5))
    add_attempt(runs[2], [])
    (runs[3].path / "resolved.json").write_text("{damaged")
    asked = []
    earlier = PastTimings(lambda: asked.append(1) or runs)
    wanted = runs[0].resolved()
    found = earlier.newest_alike(wanted)
    assert found is not None
    assert (found.run, found.step_s) == (runs[1].run_id, 0.5)
    assert earlier.newest_alike(replace(wanted, nodes=99)) is None
    assert asked == [1], "the folder is looked through once"


def test_a_checkpoints_size_is_the_last_ones_else_the_engines(tmp_path):
    run = make_run(tmp_path, "generic-slurm")
    resolved = run.resolved()
    half = replace(resolved, train=replace(resolved.train, dtype="bf16", steps=1000))
    assert checkpoint_bytes(half) == 12 * resolved.model.params, "fp32 weights, two moments"
    assert space_needed_gib(half, run)[0] * 2**30 == checkpoint_bytes(half)
    for step, size in ((10, 5), (20, 7)):
        (folder := run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
        files = {"a": {"bytes": size, "crc32": 0}, "b": {"bytes": 100, "crc32": 0}}
        (folder / "complete.json").write_text(json.dumps({"schema": 1, "step": step, "files": files}))
    assert space_needed_gib(half, run)[0] * 2**30 == 107
