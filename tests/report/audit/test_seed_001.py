"""Seed 001's tables: everything that is wrong in them, and nothing that is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_gpt.report.audit import as_text, audit
from hpc_gpt.report.gather import gather_paths
from tests.report.audit.documents import EXCERPT, cell, findings, run

# The seed's formula breaks, its layouts that cannot be, and the global batch of the 22B row.
FORMULA = [
    ("75", "26.5", "26.66"),
    ("190", "34.99", "34.19"),
    ("198", "39.71", "36.79"),
    ("217", "25.66", "12.83"),
]
IMPOSSIBLE = [(74, 16, 32), (75, 16, 32), (76, 16, 32), (80, 16, 32), (81, 16, 32), (96, 64, 128)]
OF_DOCUMENT = sorted(
    [
        *((int(line), "formula", said, found) for line, said, found in FORMULA),
        *((line, "layout", str(gpus), str(needs)) for line, gpus, needs in IMPOSSIBLE),
        (52, "global_batch", "4", "16"),
    ]
)
P = 51_970_064_384
MEGATRON = run(
    (155.4838, 129.0288, 128.8915),
    "megatron.out",
    engine="megatron-lm",
    gpus=64,
    tp=4,
    pp=16,
    dp=1,
    micro_batch=4,
    micro_batches=256,
    global_batch=1024,
    seq=1024,
    params=P,
)
ZERO = run(
    (121.8998, 125.9124, 123.9078),
    "zero.out",
    engine="deepspeed-zero",
    gpus=64,
    tp=4,
    pp=1,
    dp=16,
    micro_batch=48,
    global_batch=768,
    seq=1024,
    params=P,
    tflops_printed=40.93,
)


@pytest.fixture
def seed(shared):
    return next((shared / "seeds").glob("001_*"))


def test_the_document_alone(seed):
    found = audit(seed)
    assert sorted(findings(found)) == OF_DOCUMENT
    assert found.exit_code == 1
    assert "48 * 4 * 2 * 1024 * 1024 / (171 * 64 * 1e3) = 36.79, the table says 39.71" in as_text(found)
    assert "impossible layout: TP 4 x PP 32 x DP 1 needs 128 GPUs, the row has 64" in as_text(found)
    assert "1 * 4 * 4 = 16, the table says 4" in as_text(found)


def test_every_cell_of_the_document_ends_as_it_should(seed):
    found = audit(seed)
    outcome = {(each.line, each.column): each.outcome for each in found.cells}
    # What looks wrong and is not: 26.6 would be cut off, 43 is cut off from 43.09, 118.38 has no unit.
    for line, column in [(135, "TFlops"), (227, "TFlops"), (228, "TFlops"), (229, "TFlops"), (166, "GPUs")]:
        assert outcome[line, column] == "holds"
    assert outcome[48, "TFlops"] == outcome[53, "GPUs"] == "blank"
    printed = [each for each in found.cells if each.column == "TFlops" and each.text.strip()]
    assert len(printed) == 39
    assert sum(each.outcome == "holds" for each in printed) == 35
    batches = [each for each in found.cells if each.column == "Glob-BS" and each.text.strip()]
    assert [each.line for each in batches if each.outcome != "holds"] == [52]


def test_with_the_three_logs(seed, shared, tmp_path):
    found = audit(seed, gather_paths([str(shared / "logs")], tmp_path).runs)
    by_line = {match.line: match.run for match in found.matches}
    assert {line: name[:8] for line, name in by_line.items()} == {88: "meg_gpt2", 166: "meg_ds_z", 217: "hf_ds_gp"}
    of_logs = sorted(set(findings(found)) - set(OF_DOCUMENT))
    assert of_logs == [
        (88, "size_2_30", "48B", "51.97B"),
        (88, "tflops_of_log", "48.7", "52.82"),
        (166, "first_iteration", "122s", "124.91 s"),
        (166, "size_2_30", "48B", "51.97B"),
        (166, "tflops_of_log", "38.67", "40.90"),
        (217, "size_2_30", "23B", "25.03B"),
        (217, "step_time", "58.72s", "57.44 s"),
        (217, "tflops_of_log", "25.66", "14.28"),
    ]
    assert len(found.findings) == len(OF_DOCUMENT) + len(of_logs)
    assert cell(found, "Throughput", 88) == ("holds", "")  # 129 is 128.96 rounded
    text = as_text(found)
    assert "122s is the first iteration alone (121.90 s); the 2 steady iterations after it take 124.91 s" in text
    assert "51,970,064,384 parameters / 2^30 = 48.40, printed as 48B; in 10^9 they are 51.97B" in text
    assert "counts 1000 samples" in text


def test_the_excerpt_alone():
    assert sorted(findings(audit(EXCERPT))) == [
        (14, "global_batch", "4", "16"),
        (21, "formula", "26.5", "26.66"),
        (21, "layout", "16", "32"),
        (27, "layout", "64", "128"),
        (53, "formula", "34.99", "34.19"),
        (59, "formula", "39.71", "36.79"),
        (65, "formula", "25.66", "12.83"),
    ]


def test_the_excerpt_with_logs():
    found = audit(EXCERPT, [MEGATRON, ZERO])
    assert [finding for finding in findings(found) if finding[0] in (24, 41)] == [
        (24, "size_2_30", "48B", "51.97B"),
        (24, "tflops_of_log", "48.7", "52.82"),
        (41, "size_2_30", "48B", "51.97B"),
        (41, "first_iteration", "122s", "124.91 s"),
        (41, "tflops_of_log", "38.67", "40.90"),
    ]
    assert len(found.findings) == 7 + 5


def test_no_column_of_tp_is_taken_from_the_words_and_from_no_other_section():
    found = audit(EXCERPT)
    assert next(each.source for each in found.findings if each.kind == "layout") == "TP 4: line 29"
    # DP=GPUs there, and TP=4 of the sections before would make 16 GPUs an impossible 64.
    assert cell(found, "Glob-BS", 65) == ("holds", "")
    assert not [each for each in found.findings if each.line > 60 and each.kind == "layout"]


def test_the_excerpt_is_short():
    assert EXCERPT.stat().st_size < 4096
    assert Path(EXCERPT).read_text().isascii()
