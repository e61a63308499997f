"""The printed rows: a table, a block if the terminal is narrow, marks for what did not fit."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.core.runs.record import Record
from hpc_gpt.launcher.bench.bench_run import bench_text
from hpc_gpt.launcher.bench.measurement import BenchRow, measurement_row
from tests import examples
from tests.bench.test_measurement import bad, good
from tests.report.any_run import any_run


def rows():
    figures = {
        "memory_allocated_gib": [10.0],
        "memory_reserved_gib": [12.0],
        "predicted_memory_gib": [9.5],
        "gpu_util_mean": 98.4,
        "gpu_util_spread": 1.2,
        "compile_s": 12.0,
        "attention_used": "cudnn",
        "matmul_tflops_before": 770.0,
        "matmul_tflops_after": 765.0,
        "sm_clock_mhz": 1700.0,
        "power_w": 690.0,
        "versions": {"torch": "2.11.0"},
    }
    return [
        measurement_row(
            "ddp", "id#1", [good(0.030, allocator_retries=0, **figures), good(0.032, allocator_retries=0, **figures)]
        ),
        measurement_row("fsdp", "id#2", [good(0.060, allocator_retries=3, **figures)]),
        measurement_row("ddp mbs 64", "id#3", [bad()]),
    ]


def test_a_line_for_each_row_with_its_ratio_and_marks():
    heading, first, second, third, *_ = bench_text(rows()).splitlines()
    for column in ("Ratio", "Spread", "Tokens/s", "TFLOPs P s B", "TFLOPs hardware", "TFLOPs model", "MFU", "Plan GiB"):
        assert column in heading
    assert first.split()[1] == "1.000"
    assert "98.4 +/- 1.2" in first
    assert second.split()[1] == "0.516"
    assert "slowed down by allocator retries" in second
    assert "OOM" in third
    assert "gpu_memory" in third


def test_one_row_in_full_with_every_figure_and_its_formula():
    text = bench_text(rows()[:1])
    for words in ("tokens/s", "tflops_seed", "PaLM", "mfu", "12.0 GiB", "9.50 GiB", "cudnn", "770 -> 765", "690 W",
                  "1700 MHz", "0123", "versions: torch 2.11.0", "device: h200", "spread"):  # fmt: skip
        assert words in text, words


def test_little_room_takes_a_block_a_row_and_cuts_nothing():
    wide, narrow = bench_text(rows()), bench_text(rows(), 60)
    assert wide.splitlines()[0].startswith("Cell")
    assert narrow.splitlines()[0] == "ddp"
    assert "Plan GiB" in narrow
    assert bench_text(rows(), 1000) == wide


def test_a_run_on_a_cpu_says_why_it_has_no_peak():
    on_cpu = measurement_row("ddp", "id#1", [good(0.03, device=None, dialect="hpc-gpt", predicted_memory_gib=[9.5])])
    peer = BenchRow("peer", Record(tokens_per_s=5.0, ended="done"), (5.0,), (Path("log"),))
    heading, first, second, *_ = bench_text([on_cpu, peer]).splitlines()
    column = heading.index("Allocated GiB")
    assert first[column : column + len("Allocated GiB")].strip() == "no GPU"
    assert "9.50" in first
    assert second[column : column + len("Allocated GiB")].strip() == "-"
    alone = bench_text([on_cpu])
    assert "memory allocated  no GPU  (peak)" in alone
    assert "9.50 GiB" in alone


def test_of_the_shape_what_all_rows_share_is_said_once():
    small, large = (
        replace(row, record=replace(row.record, global_batch=batch))
        for row, batch in zip(rows()[:2], (8, 16), strict=True)
    )
    shape = f"{small.record.params:,} parameters, sequence {small.record.seq}"
    assert f"\ntrained: {shape}, global batch 8, bf16, 1 rank\n" in bench_text([small, small])
    assert f"\ntrained: {shape}, bf16, 1 rank\n" in bench_text([small, large])


def test_without_rows_there_is_nothing():
    assert bench_text([]) == ""


@settings(max_examples=examples(100))
@given(st.lists(any_run(), min_size=1, max_size=4), st.one_of(st.none(), st.integers(1, 400)))
def test_whatever_the_record_it_is_printed_line_by_line(runs, width):
    some = [
        BenchRow(f"cell {place}", replace(run.record, ended="done"), (1.0,), (Path("x"),))
        for place, run in enumerate(runs)
    ]
    text = bench_text(some, width)
    assert all(row.cell in text for row in some)
    assert all(line.isprintable() for line in text.splitlines())
