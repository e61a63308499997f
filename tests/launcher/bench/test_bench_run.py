"""A bench from its first cell to its last, its runs made up if they need not train, and its bench.json."""

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.errors import JobFailed, RunFolderError
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.cluster import MachineFigures
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.launcher.bench import bench_run
from hpc_gpt.launcher.bench.bench_run import Bench, make_folder
from hpc_gpt.launcher.bench.measurement import Measurement, measurement_row
from hpc_gpt.launcher.bench_rows import BenchCell, BenchRequest, prepare_cells
from hpc_gpt.launcher.this_machine import profile_here
from hpc_gpt.reader.records import is_bench, read_records
from tests.launcher.bench.test_measurement import bad, good

H200 = profile_here(None, [{"name": "NVIDIA H200"}])


@pytest.fixture
def measured(monkeypatch):
    """What was measured, (cell, round); `answer` says what comes of it."""
    calls = []

    def measure(cell, folder, provenance, label):
        number = int(label.partition("/")[0].removeprefix("round ")) if "/" in label else 1
        calls.append((cell.name, number))
        return calls_answer(cell.name, number)

    def calls_answer(name, number):
        found = answers.get((name, number), answers.get(name, good(0.03)))
        if isinstance(found, BaseException):
            raise found
        return found

    answers = {}
    monkeypatch.setattr(bench_run, "measure", measure)
    return calls, answers


def new_bench(tmp_path, cells=("a", "b", "c"), rounds=2, profile=H200):
    cells = [BenchCell(each) if isinstance(each, str) else each for each in cells]
    return Bench(cells, rounds, make_folder(tmp_path, "gpt2"), {}, profile)


def test_cells_take_turns_and_each_leaves_its_row_at_once(tmp_path, measured):
    calls, _ = measured
    bench = new_bench(tmp_path)
    bench.run()
    assert calls == [("a", 1), ("b", 1), ("c", 1), ("b", 2), ("c", 2), ("a", 2)]
    assert [record.rounds for record in read_records(bench.folder.file)] == [2, 2, 2]
    assert [row.record.run for row in bench.rows] == [f"{bench.folder.id}#{number}" for number in (1, 2, 3)]


@pytest.mark.parametrize("ended", ["gpu_memory", "host_memory", "error", "disk_full"])
def test_a_failed_cell_is_not_started_again_the_others_go_on(tmp_path, measured, ended):
    calls, answers = measured
    answers["b"] = bad(ended)
    bench = new_bench(tmp_path)
    bench.run()
    assert calls == [("a", 1), ("b", 1), ("c", 1), ("c", 2), ("a", 2)]
    assert [row.record.ended for row in bench.rows] == ["done", ended, "done"]
    assert [row.is_out_of_memory for row in bench.rows] == [False, "memory" in ended, False]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupt_keeps_the_rows_that_are_done(tmp_path, measured, end):
    _, answers = measured
    answers[("c", 1)] = end
    bench = new_bench(tmp_path)
    with pytest.raises(type(end)):
        bench.run()
    assert [record.rounds for record in read_records(bench.folder.file)] == [1, 1]
    assert [row.cell for row in bench.rows] == ["a", "b"]


def test_of_a_gpu_without_memory_the_nearest_micro_batch_is_said(tmp_path, measured, capsys):
    _, answers = measured
    v100 = profile_here(None, [{"name": "Tesla V100-SXM2-16GB"}])
    (cell,) = prepare_cells(BenchRequest("bench", v100, micro_batches=[64], has_gpu=True)).cells
    answers[cell.name] = bad("gpu_memory")
    bench = new_bench(tmp_path, [cell], 1, v100)
    bench.run()
    assert "is --mbs" in bench.advice[cell.name]
    assert f"{cell.name}: {bench.advice[cell.name]}\n" in capsys.readouterr().err
    with pytest.raises(JobFailed) as failed:
        bench.check_rows(is_ladder=False)
    assert failed.value.hint == bench.advice[cell.name]


def test_what_would_fill_an_empty_mfu_is_said(tmp_path, measured):
    _, answers = measured
    answers |= {"a": good(0.03, device="tpu-9"), "b": good(0.03, device=None, dialect="hpc-gpt")}
    bench = new_bench(tmp_path, ["a", "a2", "b"], 1)
    bench.run()
    unknown, *others = bench.hints
    words, _, known = unknown.partition(" Known devices: ")
    assert words == (
        "MFU is empty, as no dense bf16 peak of device tpu-9 is known: give it as peak_tflops in [machine] of a "
        "profile of your own, with --cluster FILE."
    )
    assert (
        {"h200", "a100-80g"} <= set(known.split(", ")) == {name for name, each in DEVICES.items() if not each.nominal}
    )
    assert others == [
        "MFU is empty, as no GPU was seen: it is a share of a GPU's peak",
        "peak memory is not measured without a GPU; Plan GiB is the prediction for these settings on a GPU",
    ]
    benched = new_bench(tmp_path, ["a", "a2"], 1, replace(H200, machine=MachineFigures(peak_tflops={"bf16": 900.0})))
    benched.run()
    assert benched.hints == []
    assert benched.rows[0].record.mfu == pytest.approx(benched.rows[0].record.tflops_model / 900)


# By a cell's name, what is measured and printed of it.
REPORTED = {
    "a": (good(0.03), "a: 546,133 tokens/s\n"),
    "oom": (bad(), "oom: gpu_memory: too large; see run\n"),
    "bad": (bad("error"), "bad: error: too large; see run\n"),
    "refused": (bad("refused"), "refused: refused: too large; see run\n"),
    "silent": (
        Measurement(Record(ended="done", flags=["slow", "no tokens/s"]), Path("run")),
        "silent: done: no tokens/s; see run\n",
    ),
    "still": (Measurement(Record(ended="done"), Path("run")), "still: done; see run\n"),
}
_WHY = "hpc-gpt why run"
_PATTERN = (
    "--peer-pattern finds it, for example --peer-pattern '([\\d,.]+) tok/s': its one group is the figure of a line"
)


@pytest.mark.parametrize(
    ("cells", "refusals"),
    [
        ("a", (None, None)),
        ("a oom refused", (None, None)),
        ("oom a", (("oom ended as gpu_memory", _WHY), None)),
        ("refused a", (("refused ended as refused", _WHY), None)),
        ("oom refused", (("oom ended as gpu_memory", _WHY),) * 2),
        ("a bad", (("bad ended as error", _WHY),) * 2),
        ("bad oom", (("bad ended as error", _WHY),) * 2),
        ("a silent bad", (("silent: no speed was found; bad ended as error", _PATTERN),) * 2),
        ("still", (("still: no speed was found", _WHY),) * 2),
    ],
)
def test_a_bench_reports_each_cell_and_fails_without_a_speed(cells, refusals, tmp_path, measured, capsys):
    """The first refusal is a bench's, the second a ladder's."""
    _, answers = measured
    answers |= {name: found for name, (found, _) in REPORTED.items()}
    bench = new_bench(tmp_path, [BenchCell(name, is_peer=name == "silent") for name in cells.split()], 1)
    bench.run()
    assert capsys.readouterr().err == "".join(REPORTED[name][1] for name in cells.split())
    for is_ladder, refusal in zip((False, True), refusals, strict=True):
        with contextlib.nullcontext() if refusal is None else pytest.raises(JobFailed) as failed:
            bench.check_rows(is_ladder)
        assert refusal is None or (str(failed.value), failed.value.hint) == refusal


def test_the_rows_come_back_as_they_were(tmp_path):
    folder = make_folder(tmp_path, "gpt 2")
    assert folder.path.parent.name == "gpt_2-bench"
    rows = [
        measurement_row(
            "ddp", folder.name_of(0), [replace(good(step_s), place=folder.path / "x") for step_s in (0.03, 0.06)]
        ),
        measurement_row("big", folder.name_of(1), [bad()]),
    ]
    folder.write(rows[:1])
    folder.write(rows)
    assert is_bench(folder.file)
    assert read_records(folder.file) == [row.record for row in rows]
    page = json.loads(folder.file.read_text())
    assert (page["schema"], page["bench"]) == (1, folder.id)
    speeds = pytest.approx([16 * 1024 / 0.03, 16 * 1024 / 0.06])
    measured = {"run": f"{folder.id}#1", "cell": "ddp", "tokens_per_s": speeds, "ratio": 1.0}
    failed = {"run": f"{folder.id}#2", "cell": "big", "tokens_per_s": [], "ratio": None}
    assert page["rows"] == [
        {**measured, "tenth_step_s": [], "rounds": ["x", "x"]},
        {**failed, "tenth_step_s": [], "rounds": [os.path.relpath("run", folder.path)]},
    ]
    assert [path.name for path in folder.path.iterdir()] == ["bench.json"]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "logs").write_text("a file\n")
    with pytest.raises(RunFolderError):
        make_folder(tmp_path / "logs", "gpt2")
    folder = make_folder(tmp_path / "other", "gpt2")
    folder.file.mkdir()
    with pytest.raises(RunFolderError):
        folder.write([])
