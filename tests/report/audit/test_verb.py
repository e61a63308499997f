"""`hpc-gpt report --audit`, as it is typed."""

from __future__ import annotations

import json

import pytest

from tests.cli.command import error_of, in_process
from tests.report.audit.documents import EXCERPT, table

RIGHT = table(["GPUs", "TP", "PP", "DP"], (16, 4, 4, 1))


def call(*words):
    return in_process("report", "--audit", *words)


@pytest.fixture
def right(tmp_path):
    path = tmp_path / "right.md"
    path.write_text(RIGHT)
    return path


def test_a_table_that_breaks_is_exit_1_and_the_contradictions_are_on_stdout():
    done = call(EXCERPT)
    assert done.code == 1
    assert (
        "excerpt.md:59: TFlops: 48 * 4 * 2 * 1024 * 1024 / (171 * 64 * 1e3) = 36.79, the table says 39.71\n"
        in done.stdout
    )
    assert "7 contradictions in 6 tables" in done.stdout
    assert done.stderr == ""


def test_a_right_table_is_exit_0(right):
    done = call(right)
    assert done.code == 0
    assert done.stdout.startswith("0 contradictions in 1 table: of 4 cells 4 hold, 0 break")


def test_json_is_all_of_stdout():
    done = call(EXCERPT, "--json")
    assert done.code == 1
    told = json.loads(done.stdout)
    assert (told["schema"], told["counts"]["findings"], len(told["findings"])) == (1, 7, 7)


def test_a_formula_is_asked_for(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("GPUs,Params,Seq,GBS,Step time (s),TFLOPs\n64,52B,1024,1024,129,52.84\n64,52B,1024,1024,129,60.0\n")
    assert call(path).code == 0
    done = call(path, "--formula", "seed")
    assert done.code == 1
    assert "table.csv:3: TFLOPs: tflops_seed(params=52000000000," in done.stdout


BANNER = "using world size: 64, data-parallel-size: 1, tensor-model-parallel size: 4, pipeline-model-parallel size: 16 "
STEP = (
    " iteration {step:8}/    1000 | consumed samples: {seen:12} | elapsed time per iteration (ms): {ms:.1f} | learning "
    "rate: 1.500E-04 | global batch size:  1024 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.000 | number of "
    "skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_logs_are_read_from_a_folder(tmp_path):
    lines = [
        STEP.format(step=at, seen=1024 * at, ms=ms, loss=12 - at / 10)
        for at, ms in enumerate((155_000, 100_000, 101_000, 99_000, 100_000), 1)
    ]
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "megatron.out").write_text("\n".join([BANNER, *lines, ""]))
    paper = tmp_path / "paper.md"
    paper.write_text(table(["GPUs", "TP", "PP", "DP", "GBS", "Step time"], (64, 4, 16, 1, 1024, "155s")))
    assert call(paper).code == 0
    done = call(paper, logs)
    assert done.code == 1, done.stderr
    assert "155s is the first iteration alone (155.00 s); the 4 steady iterations after it take 100.00 s" in done.stdout
    assert "log megatron.out: line 3: " in done.stdout


@pytest.mark.parametrize("words", [["none.md"], [EXCERPT, "--formula", "none"], [EXCERPT, "--format", "csv"]])
def test_what_cannot_be_is_exit_2_and_no_traceback(words):
    done = call(*words)
    assert done.code == 2
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("data", [b"", b"plain words\n", b"\0\1\2", b"| a | b |\n|---|---|\n"])
def test_a_file_without_a_table_is_exit_2_with_a_hint(tmp_path, data):
    path = tmp_path / "no.md"
    path.write_bytes(data)
    done = call(path)
    assert done.code == 2
    assert "no.md" in error_of(done)[0]


def test_logs_that_are_not_there_are_told(right, tmp_path):
    done = call(right, tmp_path / "no such folder")
    assert done.code in (2, 5)
    assert "no such folder" in error_of(done)[0]
