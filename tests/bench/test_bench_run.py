"""A bench from its first cell to its last, its runs made up if they need not train, and its bench.json."""

import json
from dataclasses import replace

import pytest

from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.settings.cluster import MachineFigures
from hpc_gpt.launcher.bench import bench_run
from hpc_gpt.launcher.bench.bench_run import Bench, make_folder
from hpc_gpt.launcher.bench.measurement import measurement_row
from hpc_gpt.launcher.launch.bench_rows import BenchCell, BenchRequest, prepare_cells
from hpc_gpt.launcher.launch.this_machine import profile_here
from hpc_gpt.reader.readers.runs import is_bench, read_records
from tests.bench.test_measurement import bad, good

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
    assert bench.advice[cell.name] in capsys.readouterr().err


def test_an_unknown_device_has_a_hint_what_would_fill_its_mfu(tmp_path, measured):
    _, answers = measured
    answers["a"] = good(0.03, device="tpu-9")
    bench = new_bench(tmp_path, ["a"], 1)
    bench.run()
    (hint,) = bench.hints
    assert "device tpu-9" in hint
    assert "peak_tflops" in hint
    assert bench.rows[0].record.tflops_model
    benched = new_bench(tmp_path, ["a"], 1, replace(H200, machine=MachineFigures(peak_tflops={"bf16": 900.0})))
    benched.run()
    assert benched.hints == []
    assert benched.rows[0].record.mfu == pytest.approx(benched.rows[0].record.tflops_model / 900)
    known = new_bench(tmp_path, ["b"], 1)
    known.run()
    assert known.hints == []
    assert known.rows[0].record.mfu


def test_a_cpu_has_no_mfu_and_that_is_said(tmp_path, measured):
    _, answers = measured
    answers["a"] = good(0.03, device=None, dialect="hpc-gpt")
    bench = new_bench(tmp_path, ["a"], 1)
    bench.run()
    assert bench.rows[0].record.mfu is None
    assert "no GPU" in bench.hints[0]
    assert "no peak of memory is measured" in bench.hints[1]


def test_the_rows_come_back_as_they_were(tmp_path):
    folder = make_folder(tmp_path, "gpt 2")
    assert folder.path.parent.name == "gpt_2-bench"
    rows = [
        measurement_row("ddp", folder.name_of(0), [good(0.03), good(0.06)]),
        measurement_row("big", folder.name_of(1), [bad()]),
    ]
    folder.write(rows[:1])
    folder.write(rows)
    assert is_bench(folder.file)
    assert read_records(folder.file) == [row.record for row in rows]
    page = json.loads(folder.file.read_text())
    assert [row["ratio"] for row in page["rows"]] == [1.0, None]
    assert [len(row["tokens_per_s"]) for row in page["rows"]] == [2, 0]
    assert [path.name for path in folder.path.iterdir()] == ["bench.json"]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "logs").write_text("a file\n")
    with pytest.raises(RunFolderError):
        make_folder(tmp_path / "logs", "gpt2")
    folder = make_folder(tmp_path / "other", "gpt2")
    folder.file.mkdir()
    with pytest.raises(RunFolderError):
        folder.write([])
