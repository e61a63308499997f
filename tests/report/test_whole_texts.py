"""What is printed of runs, whole: each figure of a made run is another, so that each line can only be its own."""

from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.compare import compare_runs
from hpc_gpt.report.compare_text import comparison_text
from hpc_gpt.report.tables import as_block, choose_columns, full_key, predictions_of, predictions_text
from tests.report.step_tables import step_table

RUN = Record(
    run="r-12", name="made", engine="ddp", dtype="bf16", gpus=8, nodes=2, params=2_500_000_000, tp=2, pp=2, cp=1, dp=2,
    micro_batch=3, micro_batches=4, global_batch=24, seq=100, hidden=96, layers=7, heads=6, vocab=500, device="H100",
    step_s=0.5, step_s_p10=0.45, step_s_p90=0.625, steps_used=18, warmup_steps=2, tokens_per_s=4800.0,
    tokens_total=48000, tflops_seed=30.0, tflops_hardware=40.0, tflops_model=30.5, tflops_printed=31.25, mfu=0.345,
    mfu_printed=0.333, memory_allocated_gib=[12.5, 25.5], predicted_step_s=0.55, predicted_memory_gib=[20.0, 24.0],
    loss_first=10.0, loss_last=2.5, loss_eval=2.75, loss_eval_by={"web": 2.5, "code": None, "books": 3.0},
    gpu_hours=1.5, ended="error", cause="boom", attempts=[{}, {}], flags=["few steps"],
    settings={"resumed_from": {"step": 7, "run": "r-11", "branch": True}},
)  # fmt: skip
BLOCK = """\
    made/r-12
      ended            error: boom
      model            2.5B parameters
      begins from      step 7 of run r-11, as a branch
      layout           tp2-pp2-dp2 on 8 ranks, ddp, bf16
      batch            24 = 3 x 4 x dp 2
      loss             10.000 -> 2.500
      loss_eval        2.750
      by source        web 2.500, books 3.000
      step time        0.500 s  (median of 18; 10th to 90th percentile 0.450..0.625; 2 warm-up)
      tokens/s         4,800
      tokens           48,000
      tflops_seed      30.0 TFLOP/s per rank  (6 P s B)
      tflops_hardware  40.0 TFLOP/s per rank  (Narayanan et al. 2021, eq. 3)
      tflops_model     30.5 TFLOP/s per rank  (6 N + 12 L h s a token, PaLM)
      tflops_printed   31.2 TFLOP/s per rank  (as the program prints it)
      mfu              34.5% of H100, bf16
      mfu_printed      33.3%, as the program prints it
      memory           25.5 GiB allocated, on the stage with most
      predicted        0.550 s a step (+10.0%), 24.0 GiB allocated (-5.9%)
      attempts         2
      GPU hours        1.50
      note: few steps
"""
# Of a run that states less, the lines that differ.
OTHER = replace(
    RUN, recompute="full", step_s_p10=None, mfu=None, tokens_per_s=None, tokens_per_s_gpu=600.0, dp=None, gpus=None,
    settings={"train": {"init": "gpt2/"}}, memory_allocated_gib=None, memory_reserved_gib=[5.0, 6.5], flags=[],
    loss_eval_by=None, mfu_printed=None, loss_last=None, predicted_step_s=None, cause=None, attempts=[],
)  # fmt: skip
OTHER_LINES = """\
      ended             error
      begins from       gpt2/
      layout            tp2-pp2, ddp, bf16
      batch             24
      loss              2.750 (eval)
      step time         0.500 s  (single steps were not timed)
      tokens/s per GPU  600
      tflops_seed       30.0 TFLOP/s per rank  (8 P s B)
      memory            6.50 GiB reserved, on the stage with most
      predicted         24.0 GiB allocated
"""


def test_a_block_is_a_line_for_each_figure() -> None:
    assert as_block(RUN) == dedent(BLOCK)
    same = {" ".join(line.split()) for line in BLOCK.splitlines()}
    other = [line for line in as_block(OTHER).splitlines() if " ".join(line.split()) not in same]
    assert other == [line[4:] for line in OTHER_LINES.splitlines()]


def test_predictions_stand_beside_what_was_measured() -> None:
    """Steps on a CPU measure nothing of a GPU; the mean is over the runs that have an error."""
    on_cpu = replace(RUN, run="r-13", device=None, predicted_memory_gib=None, step_s=1.0, memory_allocated_gib=None)
    slower = replace(RUN, run="r-14", step_s=1.1, memory_allocated_gib=[48.0])
    lines = predictions_of([RUN, on_cpu, Record(run="x"), slower])
    assert predictions_text(lines, "md") == dedent("""\
    | run                            | layout      | device | s/step | predicted |  error |  GiB | predicted |  error |
    | ------------------------------ | ----------- | ------ | -----: | --------: | -----: | ---: | --------: | -----: |
    | made/r-12                      | tp2-pp2-dp2 | H100   |  0.500 |     0.550 | +10.0% | 25.5 |      24.0 |  -5.9% |
    | made/r-13                      | tp2-pp2-dp2 | -      |   1.00 |     0.550 |      - |    - |         - |      - |
    | made/r-14                      | tp2-pp2-dp2 | H100   |   1.10 |     0.550 | -50.0% | 48.0 |      24.0 | -50.0% |
    | mean of 2 and 2 runs, absolute |             |        |        |           |  30.0% |      |           |  27.9% |
    """)
    assert predictions_text(lines[2:], "csv") == (
        "name,run,layout,device,step_s,predicted_step_s,step_error,memory_gib,predicted_memory_gib,memory_error\n"
        "made,r-14,tp2-pp2-dp2,H100,1.1,0.55,-0.5,48.0,24.0,-0.5\n"
    )


@pytest.mark.parametrize(
    ("key", "full"),
    [
        *(("lr", "settings.train.lr"), ("train.lr", "settings.train.lr"), ("engine.name", "settings.engine.name")),
        *(("data.source", "settings.data.source"), ("model.seq", "seq"), ("layout.gpus", "gpus"), ("dp", "dp")),
        *(("settings.own.x", "settings.own.x"), ("step_s", "step_s"), ("versions.torch", "versions.torch")),
        *(("step_s.x", None), ("notify.on", None), ("model.lr", None)),
    ],
)  # fmt: skip
def test_a_key_is_the_records_or_an_experiments(key: str, full: str | None) -> None:
    if full is None:
        unknown = key if key.startswith("step_s") else key.partition(".")[0]
        with pytest.raises(ConfigError, match=f"^a record has no key '{unknown}'$"):
            full_key(key)
    else:
        (column,) = choose_columns([key])
        assert (full_key(key), column.keys) == (full, (full,))


def read(losses: list[float], step_s: float, **more: object) -> RunRead:
    """Steps of `step_s` each, so that the interval is of a log's digits alone; the first is warm-up."""
    count = len(losses)
    ones = np.ones(count, np.bool_)
    columns = {"step": np.arange(1.0, count + 1), "step_s": np.full(count, step_s), "loss": losses}
    marks = {"steady": np.arange(count) > 0, "counts": ones, "skipped": ~ones}
    steps = step_table(**columns, **marks, attempt=ones.astype(np.int64))
    shape = {key: getattr(RUN, key) for key in ("global_batch", "seq", "params", "hidden", "layers", "heads", "vocab")}
    given = {**shape, "gpus": 8, "ended": "done", "step_s": step_s, **more}
    return RunRead(Record(**given), steps, files=[Path(str(more["run"]))])


LOSSES = np.linspace(6, 2, 41).tolist()
A = read(LOSSES, 2.0, run="a", memory_reserved_gib=[3.0, 4.0], memory_allocated_gib=[2.0], versions={"torch": "2.0"},
         settings={"lr": 1e-4, "dropout": "0", "x": [1, 2]}, job_id="5", config_hash="h1", node_list="n1")  # fmt: skip
B = read([*LOSSES[:20], *(loss + 0.5 for loss in LOSSES[20:])], 1.6, run="b", memory_reserved_gib=[5.5], job_id="5",
         settings={"lr": 2e-4, "dropout": False, "y": 1, "save": "/b"}, config_hash="h2", node_list="n2")  # fmt: skip
ENDED = replace(B, record=replace(B.record, ended="error", cause="boom"))
ROWS = [
    RunRead(Record(run=name, tokens_per_s=rate, ended="done"), rounds=tuple(rounds), files=[Path("bench.json")])
    for name, rate, rounds in (("p", 1e3, (990, 1000, 1010, 1000)), ("q", 1.2e3, (1190, 1200, 1212, 1201)))
]


def with_record(read_run: RunRead, **more: object) -> RunRead:
    return replace(read_run, record=replace(read_run.record, **more))


COMPARED = {
    "settings": (A, ENDED, """\
        B against A: faster by 25 % (18 to 32)
          step time         2.00 -> 1.60 s, medians of 40 and 40 steady steps
          loss              2 -> 2.5 at step 41, the last that both have; the same to the last digit at the
                            first 20 common steps
          loss              they diverge: the loss of B is higher by 0.5 (0.5 to 0.5) over the last 8 common
                            steps
          memory reserved   4.00 GiB -> 5.50 GiB, +1.50 GiB
          memory allocated  2.00 GiB -> unknown
          ended             done -> error (boom)
          settings that differ:
            lr         0.0001 -> 0.0002
            node_list  n1 -> n2
          note: both belong to job 5: two logs of one run, or two runs in one job
          note: only A states 2 settings: x, versions.torch
          note: only B states 2 settings: y, save
    """),
    "another model": (with_record(A, tflops_model=40.0, sources={"tflops_model": "x"}, settings={}),
                      read(LOSSES[:20], 1.0, run="c", vocab=400, params=2_550_000_000, tflops_model=30.0, gpus=4,
                           sources={"tflops_model": "y"}), """\
        B against A: faster by 100 % (86 to 115)
          tokens/s                       1,200 -> 2,400, medians of 40 and 19 steady steps
          tokens/s per GPU               150 -> 600, higher by 300 % (272 to 330)
          tflops_model, TFLOP/s per GPU  40.0 -> 30.0, lower by 25 % (19 to 30)
          loss                           the same to the last digit at all 20 common steps
          memory reserved                4.00 GiB -> unknown
          memory allocated               2.00 GiB -> unknown
          ended                          done -> done
          settings that differ:
            gpus    8 -> 4
            params  2500000000 -> 2550000000
            vocab   500 -> 400
          note: gpus, params are not the same, so a step is not the same work: tokens/s are compared
          note: a token is not the same work in both, so tflops_model per GPU is compared, too
          note: their tflops_model count different parameters: all, or the weights that multiply a token
          note: the vocabularies differ, 500 and 400, and so do the scales of the losses
          note: equal losses: two logs of one run, or a repeat of the same training
          note: only A states 2 settings: node_list, versions.torch
    """),
    "rounds": (*ROWS, """\
        B against A: faster by 20.0 % (19.86 to 20.14)
          tokens/s  1,000 -> 1,200, medians of 4 rounds each
          ended     done -> done
          note: the interval comes from the 4 ratios of rounds, which were measured in turns
          note: the interval is wide, as there are only 4 rounds: use --rounds 5 or more
    """),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_is_its_verdict_and_what_it_rests_on(name: str) -> None:
    a, b, text = COMPARED[name]
    assert comparison_text(compare_runs(a, b), "A", "B", 100) == dedent(text)
