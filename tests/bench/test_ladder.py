"""A ladder's rungs on a machine: what each of them runs there, and why one cannot."""

from __future__ import annotations

import pytest

from hpc_gpt.bench.here import profile_here
from hpc_gpt.bench.ladder import LADDERS, prepare_ladder
from hpc_gpt.bench.preparation import Asked
from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.experiment_file import find_sweep

H200 = {"name": "NVIDIA H200", "memory_gib": 139.8}


def rungs_of(ladder, gpus=1, rows=(), overrides=None, **asked):
    """The rungs on a machine with so many H200."""
    profile = profile_here(None, [H200] * gpus)
    asked = Asked("", profile, overrides or {}, has_gpu=gpus > 0, is_ladder=True, **asked)
    return prepare_ladder(asked, LADDERS[ladder], gpus, rows)


@pytest.mark.parametrize("name", LADDERS)
def test_every_row_of_its_sweeps_is_a_rung_and_cells_have_names_of_their_own(name):
    rungs = rungs_of(name, gpus=8)
    groups = LADDERS[name].groups
    assert [(rung.sweep, rung.row.name) for rung in rungs] == [
        (group.sweep, row.name) for group in groups for row in find_sweep(group.sweep).rows
    ]
    assert len({rung.cell.name for rung in rungs}) == len(rungs)
    assert all(rung.cell.prepared for rung in rungs)
    for group in groups:
        assert {group.base, group.last} <= {rung.row.name for rung in rungs if rung.sweep == group.sweep}


def test_a_rung_keeps_what_it_is_about_and_a_bench_keeps_nothing():
    runs = {rung.row.name: rung.cell.prepared.resolved for rung in rungs_of("colab")}
    assert {run.data.source for run in runs.values()} == {"stream"}
    assert (runs["baseline"].train.log_every, runs["no-sync"].train.log_every) == (10, 200)
    assert (runs["baseline"].train.eval_every, runs["workers"].data.workers) == (10, 2)
    assert {(run.train.minutes, run.train.save_last, run.train.matmul_rate) for run in runs.values()} == {
        (5, False, True)
    }
    assert (runs["tied"].sweep, runs["tied"].row) == ("colab-ladder", "tied")


def test_steps_take_the_place_of_the_seeds_minutes():
    assert {
        (rung.cell.prepared.resolved.train.steps, rung.cell.prepared.resolved.train.minutes)
        for rung in rungs_of("colab", steps=7)
    } == {(7, None)}


def test_a_text_that_is_the_users_own_is_not_needed():
    runs = [rung.cell.prepared.resolved for rung in rungs_of("mingpt", gpus=4)]
    assert {(run.data.source, run.data.path) for run in runs} == {("random", None)}
    own = rungs_of("mingpt", gpus=4, rows=["b1"], overrides={"data.source": "tokens", "data.path": "no-such.tokens"})
    assert "no-such.tokens" in own[0].cell.record.cause


def test_a_rung_that_needs_more_gpus_is_a_record_and_the_others_run():
    rungs = rungs_of("memory")
    refused = [rung for rung in rungs if rung.cell.record]
    assert [rung.row.name for rung in refused] == ["fsdp"]
    record = refused[0].cell.record
    assert (record.ended, record.cause) == ("refused", "needs 2 GPUs, this machine has 1")
    assert (record.gpus, record.dp, record.global_batch, record.params) == (2, 2, 128, 708_412_160)
    assert record.settings["sweep"] == {"name": "memory-ladder", "row": "fsdp"}
    assert all(rung.cell.record for rung in rungs_of("mingpt"))
    assert not any(rung.cell.record for rung in rungs_of("mingpt", overrides={"layout.gpus": 1}))


def test_without_a_gpu_the_ranks_run_on_the_cpu():
    assert not any(rung.cell.record for rung in rungs_of("memory", gpus=0, smoke=True))
    (zero,) = rungs_of("memory", gpus=0, rows=["zero-1"], overrides={"train.dtype": "fp16"})
    assert "DeepSpeed does not train in fp16 on a CPU" in zero.cell.record.cause


def test_rows_by_name_in_the_order_of_the_ladder():
    assert [rung.row.name for rung in rungs_of("memory", rows=["loss-chunks", "for-loop"])] == [
        "for-loop",
        "loss-chunks",
    ]
    with pytest.raises(ConfigError, match="no row 'los-chunks'") as refusal:
        rungs_of("memory", rows=["los-chunks"])
    assert "loss-chunks" in refusal.value.hint


def test_a_setting_that_no_experiment_has_is_refused_before_any_rung():
    with pytest.raises(ConfigError, match=r"train\.stepss"):
        rungs_of("colab", overrides={"train.stepss": 3})
