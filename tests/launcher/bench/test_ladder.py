"""A ladder: what each rung runs on a machine or why it cannot, what it saves and costs, and the table."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.experiment_file import find_sweep
from hpc_gpt.core.settings.resolved import config_hash
from hpc_gpt.launcher.bench.ladder import ladder_json, ladder_text, outcome
from hpc_gpt.launcher.bench.measurement import BenchRow
from hpc_gpt.launcher.bench_rows import BenchRequest
from hpc_gpt.launcher.ladder import LADDERS, prepare_rungs
from hpc_gpt.launcher.this_machine import profile_here, with_predicted_memory

TEXT = Path(__file__).with_name("ladder.txt").read_text(encoding="utf-8")
H200 = {"name": "NVIDIA H200", "memory_gib": 139.8}


@functools.cache
def on_one(ladder):
    """A ladder's rungs on one H200."""
    return rungs_of(ladder)


def rungs_of(ladder, gpus=1, rows=(), overrides=None, **asked):
    """The rungs on a machine with so many H200."""
    profile = profile_here(None, [H200] * gpus)
    asked = BenchRequest("", profile, overrides or {}, has_gpu=gpus > 0, is_ladder=True, **asked)
    return prepare_rungs(asked, LADDERS[ladder], gpus, rows)


@pytest.mark.parametrize("name", LADDERS)
def test_every_sweep_row_is_a_rung_and_cells_have_names(name):
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
    assert {(run.train.minutes, run.train.save_last) for run in runs.values()} == {(5, False)}
    assert (runs["tied"].sweep, runs["tied"].row) == ("colab-ladder", "tied")


def test_steps_take_the_place_of_the_source_minutes():
    assert {
        (rung.cell.prepared.resolved.train.steps, rung.cell.prepared.resolved.train.minutes)
        for rung in rungs_of("colab", steps=7)
    } == {(7, None)}


def test_a_text_that_is_the_users_own_is_not_needed():
    runs = [rung.cell.prepared.resolved for rung in rungs_of("mingpt", gpus=4)]
    assert {(run.data.source, run.data.path) for run in runs} == {("random", None)}
    own = rungs_of("mingpt", gpus=4, rows=["b1"], overrides={"data.source": "tokens", "data.path": "no-such.tokens"})
    assert "no-such.tokens" in own[0].cell.record.cause


def test_a_rung_that_needs_more_gpus_is_a_record_others_run():
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
    chosen = rungs_of("memory", rows=["loss-chunks", "for-loop"])
    assert [rung.row.name for rung in chosen] == ["for-loop", "loss-chunks"]


def measured(rungs, **figures):
    """A row for each rung that `figures` has by name with `-` as `_`, as measured; `figures` over a plain record's."""
    rows = []
    for rung in rungs:
        given = figures.get(rung.row.name.replace("-", "_"))
        if rung.cell.record is not None:
            rows.append(BenchRow(rung.cell.name, rung.cell.record))
        elif given is not None:
            run = rung.cell.prepared.resolved
            record = Record(
                run=f"bench#{len(rows) + 1}",
                name=run.name,
                dialect="hpc-gpt",
                ended="done",
                engine=run.engine.name,
                params=run.model.params,
                seq=run.model.seq,
                vocab=run.model.vocab,
                global_batch=run.batch.global_batch,
                micro_batch=run.batch.micro_batch,
                settings={"sweep": {"name": rung.sweep, "row": rung.row.name}},
            )
            record = with_predicted_memory(replace(record, **given), run)
            rows.append(BenchRow(rung.cell.name, record, places=(Path("run"),)))
    return rows


def speed(rung, step_s, **more):
    run = next(each.cell.prepared.resolved for each in on_one("memory") if each.row.name == rung)
    return {"step_s": step_s, "tokens_per_s": run.batch.global_batch * run.model.seq / step_s, **more}


def cells(text, row):
    """The words of the line that a row begins."""
    return next(line.split() for line in text.splitlines() if line.startswith(f"{row} "))


def test_the_colab_ladder_has_its_columns_and_last_ratio():
    rows = measured(
        on_one("colab"),
        baseline={"tokens_per_s": 40_000.0, "memory_reserved_gib": [30.0]},
        workers={"tokens_per_s": 410_000.0, "memory_reserved_gib": [28.5]},
    )
    text = ladder_text(LADDERS["colab"], on_one("colab"), rows)
    assert cells(text, "baseline")[1:6] == ["28", "30.0", "37", "40,000", "16939.79"]
    assert cells(text, "workers")[1:6] == ["64", "28.5", "38.7", "410,000", "146766.49"]
    # A rung that was not measured keeps the source's figure.
    assert cells(text, "tied")[-4:] == ["148637.53", "-", "-", "-"]
    assert text.splitlines()[-1] == "tokens/s of workers over baseline: 10.2 (published: 8.66)"
    end = "peak memory of for-loop over batch128: not measured (published: 0.516 at 1.54 x)"
    assert ladder_text(LADDERS["memory"], on_one("memory"), []).splitlines()[-1] == end


def test_the_mingpt_ladder_compares_flops():
    rungs = rungs_of("mingpt", gpus=4)
    rows = measured(rungs, b1={"tflops_hardware": 3.0}, ckpt_prefetch_b64={"tflops_hardware": 120.0})
    found = outcome(LADDERS["mingpt"], rungs, rows)
    assert found.line() == "TFLOP/s hardware of ckpt-prefetch-b64 over b1: 40.0 (published: 23.1)"


def test_a_shrunken_run_is_no_measure_of_its_rung():
    smoke = {"tokens_per_s": 1000.0, "name": "colab-ladder-baseline-smoke"}
    rows = measured(on_one("colab"), baseline=smoke, workers={**smoke, "name": "colab-ladder-workers-smoke"})
    assert outcome(LADDERS["colab"], on_one("colab"), rows).ratio is None
    text = ladder_text(LADDERS["colab"], on_one("colab"), rows)
    published, small = (line for line in text.split("\n\n")[0].splitlines() if line.startswith("baseline "))
    assert ("16939.79" in published, "16939.79" in small, "smoke run" in small) == (True, False, True)


def test_a_measured_ladder_as_written():
    """Against the plain run, the base of each group: a quarter of the batch in half the time is twice the time."""
    figures = {
        "batch128": speed("batch128", 0.2, memory_allocated_gib=[14.0, 15.0], memory_reserved_gib=[20.0]),
        "accumulation": speed("accumulation", 0.25, memory_allocated_gib=[11.0], allocator_retries=2),
        "batch32": speed("batch32", 0.1, memory_allocated_gib=[11.5], predicted_memory_gib=[8.0, 9.0]),
        "batch64": {"ended": "error", "cause": "RuntimeError: " + "x" * 300},
        "recompute": {"ended": "gpu_memory", "cause": "torch.OutOfMemoryError: CUDA out of memory."},
        "for_loop": speed("for-loop", 0.18, memory_reserved_gib=[9.0]),
        "base": speed("base", 0.04, memory_allocated_gib=[14.0]),
        "loss_chunks": speed("loss-chunks", 0.042, memory_allocated_gib=[8.0]),
        "full_recompute": speed("full-recompute", 0.05, memory_allocated_gib=[7.0], name="full-recompute-smoke"),
        "zero_3_offload": {"ended": "host_memory"},
    }
    given = {name: {"predicted_memory_gib": [7.5], **each} for name, each in figures.items()}
    rows = [row for row in measured(on_one("memory"), **given) if row.record.ended != "refused"]
    assert ladder_text(LADDERS["memory"], on_one("memory"), rows) == TEXT
    page = json.loads(json.dumps(ladder_json(LADDERS["memory"], on_one("memory"), rows), allow_nan=False))
    savings = page.pop("savings")
    assert page == {
        "sweep": "memory-ladder", "seed": "004", "what": "peak memory", "first": "batch128", "last": "for-loop",
        "ratio": 0.45, "seed_ratio": pytest.approx(0.5162, abs=1e-4), "time": pytest.approx(0.9),
        "seed_time": pytest.approx(1.5429, abs=1e-4),
    }  # fmt: skip
    assert savings[0] == {
        "sweep": "memory-ladder", "row": "batch32", "switched_on": "", "shape": "708M s11 v3", "step_s": 0.1,
        "time_ratio": pytest.approx(2.0), "memory_allocated_gib": 11.5, "saved_gib": 3.5, "predicted_memory_gib": 9.0,
        "ended": "done",
    }  # fmt: skip


def test_a_narrow_terminal_gets_a_block_a_row():
    rows = measured(on_one("memory"), base=speed("base", 0.04))
    text = ladder_text(LADDERS["memory"], on_one("memory"), rows, width=60)
    assert max(map(len, text.splitlines())) <= 130
    assert "\nbase\n  Switched on  nothing\n" in text


@pytest.mark.parametrize("name", LADDERS)
def test_the_published_rungs_are_these(name, file_regression):
    """Each rung with what it runs on eight H200, and the table before anything is measured."""
    rungs = rungs_of(name, gpus=8)
    runs = [(rung.row.name, config_hash(rung.cell.prepared.resolved), rung.cell.prepared.resolved) for rung in rungs]
    lines = [f"{row} {what} {run.layout} {run.batch.micro_batch} {run.train.steps}" for row, what, run in runs]
    text = ladder_text(LADDERS[name], rungs, [])
    file_regression.check("\n".join([*lines, "", *(line.rstrip() for line in text.splitlines())]) + "\n")
