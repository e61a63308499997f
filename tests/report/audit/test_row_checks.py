"""Layouts, batches, rates and named formulas of rows; and what is not checked, and why."""

from __future__ import annotations

import json

import pytest

from hpc_gpt.report.audit import as_json, as_text
from tests.report.audit.documents import FORMULA, audited, cell, findings, table

LAYOUT = ["GPUs", "TP", "PP", "DP"]


@pytest.mark.parametrize(
    ("row", "needs"),
    [
        ((16, 4, 4, 1), None),
        ((16, 4, 8, 1), "32"),
        ((32, 4, 4, 1), "16"),
        ((16, 3, 5, 1), "15"),
        ((64, 4, 1, 16), None),
    ],
)
def test_a_layout_is_its_product(tmp_path, row, needs):
    found = audited(tmp_path, table(LAYOUT, row))
    assert findings(found) == ([(3, "layout", str(row[0]), needs)] if needs else [])
    assert found.exit_code == (1 if needs else 0)
    assert cell(found, "GPUs")[0] == ("breaks" if needs else "holds")


@pytest.mark.parametrize(
    ("headings", "row", "outcome"),
    [
        (["GPUs", "TP", "DP"], (64, 4, 16), "holds"),
        (["GPUs", "TP", "DP"], (64, 4, 8), "not checked"),  # pp may be 2
        (["GPUs", "TP", "DP"], (64, 3, 8), "breaks"),
        (["GPUs", "TP"], (64, 128), "breaks"),
        (["GPUs", "TP", "PP", "DP", "CP"], (64, 4, 2, 4, 2), "holds"),
        (["GPUs", "TP", "PP", "DP", "SP"], (64, 4, 2, 4, 2), "not checked"),
        (["GPUs", "TP", "PP", "DP", "SP"], (64, 4, 2, 4, 1), "breaks"),
        (["GPUs", "TP", "PP", "DP", "SP"], (16, 4, 2, 4, 2), "breaks"),
        (["GPUs", "TP/PP/DP"], (64, "4/16/1"), "holds"),
        (["GPUs", "TP x PP x DP"], (64, "4x8x1"), "breaks"),
        (["GPUs", "Layout"], (64, "tp4-pp16-dp1"), "holds"),
        (["GPUs", "Layout"], (64, "tp4-pp16-dp2"), "breaks"),
        (["GPUs", "Layout"], (64, "TP=4, PP=32"), "breaks"),
        (["GPUs", "Layout"], (64, "FSDP"), "not checked"),
        (["GPUs", "TP", "PP", "DP"], ("8 to 16", 4, 4, 1), "not checked"),
        (["GPUs", "TP", "PP", "DP"], ("~16", 4, 8, 1), "not checked"),
        (["GPUs", "TP", "PP", "DP"], (16, 4.5, 8, 1), "not checked"),
        (["GPUs", "TP", "PP", "DP"], (16, 0, 8, 1), "not checked"),
    ],
)
def test_layouts_of_which_a_part_is_known(tmp_path, headings, row, outcome):
    found = audited(tmp_path, table(headings, row))
    assert cell(found, "GPUs")[0] == outcome
    assert len(found.findings) == (outcome == "breaks")


@pytest.mark.parametrize(
    ("headings", "row", "found"),
    [
        (["DP", "MBS", "GAS", "GBS"], (4, 1, 4, 16), None),
        (["DP", "MBS", "GAS", "GBS"], (4, 1, 4, 4), "16"),
        (["DP", "MBS", "GBS"], (4, 3, 24), None),
        (["DP", "MBS", "GBS"], (4, 3, 16), "a multiple of 12"),
        (["MBS", "GAS", "GBS"], (1, 4, 5), None),  # dp is not known
        (["GPUs", "TP", "PP", "MBS", "GAS", "GBS"], (64, 4, 4, 2, 8, 64), None),
        (["GPUs", "TP", "PP", "MBS", "GAS", "GBS"], (64, 4, 4, 2, 8, 32), "64"),
    ],
)
def test_a_global_batch_without_a_formula(tmp_path, headings, row, found):
    audit = audited(tmp_path, table(headings, row))
    assert [(kind, out) for _, kind, _, out in findings(audit)] == ([("global_batch", found)] if found else [])


@pytest.mark.parametrize(
    ("heading", "printed", "outcome"),
    [
        ("Tokens/s", "96023", "holds"),
        ("Tokens/s", "96,110", "holds"),  # 5.46 may be 5.455
        ("Tokens/s", "96.0K", "holds"),
        ("Tokens/s", "98,500", "breaks"),
        ("Tokens/s", "1500", "not checked"),  # of one GPU
        ("Tokens/s/GPU", "1500", "holds"),
        ("Tokens/s/GPU", "1600", "breaks"),
        ("Samples/s", "46.9", "holds"),
        ("Samples/s", "49.9", "breaks"),
        ("Samples/s", ">46", "not checked"),
        ("Throughput (tokens/s)", "96023", "holds"),
    ],
)
def test_rates_follow_from_batch_and_time_whatever_was_rounded(tmp_path, heading, printed, outcome):
    text = "All runs use a sequence length of 2048.\n\n"
    text += table(["GPUs", "GBS", "Step time (s)", heading], (64, 256, "5.46", printed))
    found = audited(tmp_path, text)
    assert cell(found, heading)[0] == outcome
    assert [finding.kind for finding in found.findings] == (["definition"] if outcome == "breaks" else [])


@pytest.mark.parametrize(
    ("heading", "printed", "outcome"),
    [
        ("Batch size (tokens)", "524288", "holds"),
        ("Batch size (tokens)", "524,288", "holds"),
        ("Batch size (tokens)", "512K", "holds"),  # of 1024
        ("Batch size (tokens)", "0.5M", "holds"),
        ("Batch size (tokens)", "524288 tokens", "holds"),
        ("GBS (M tokens)", "0.52", "holds"),
        ("Tokens per batch", "0.46M", "breaks"),
        ("Tokens per step", "262144", "breaks"),
    ],
)
@pytest.mark.parametrize(
    "batch",
    [({"Global batch": 256}), ({"Micro-batch": 4, "Grad accum": 8, "DP": 8})],
    ids=["global batch", "micro-batch x accumulation x data-parallel"],
)
def test_a_batch_in_tokens_is_batch_x_sequence(tmp_path, heading, printed, outcome, batch):
    if heading.startswith("GBS") and "Global batch" in batch:
        heading = "Batch (M tokens)"
    found = audited(tmp_path, table([*batch, "Context", heading], (*batch.values(), 2048, printed)))
    assert cell(found, heading)[0] == outcome
    assert [finding.kind for finding in found.findings] == (["definition"] if outcome == "breaks" else [])


def test_a_batch_in_tokens_gives_the_rate(tmp_path):
    heads = ["Batch size (tokens)", "Step time (s)", "Tokens/s", "GPUs", "Tokens/s/GPU"]
    found = audited(tmp_path, table(heads, ("0.5M", "2.00", "262144", 8, "32768"), ("0.5M", "2.00", "99999", 8, "9")))
    assert {finding.column for finding in found.findings} == {"Tokens/s", "Tokens/s/GPU"}
    assert {finding.line for finding in found.findings} == {4}
    assert cell(found, "Batch size (tokens)", 3)[0] == "holds"


def test_samples_a_second_that_tokens_a_second_agree_with_hold(tmp_path):
    rows = ((25.0, 2048, 51200), (25.0, 2048, 61200))
    found = audited(tmp_path, table(["Samples/s", "Seq", "Tokens/s"], *rows))
    assert cell(found, "Samples/s", 3)[0] == cell(found, "Tokens/s", 3)[0] == "holds"
    assert [(finding.line, finding.column) for finding in found.findings] == [(4, "Tokens/s")]


@pytest.mark.parametrize(
    ("stated", "recompute", "hfu", "outcome"),
    [
        ("HFU = MFU * 4/3", "full", "60.0%", "holds"),
        ("HFU = MFU * 4/3", "full", "60.3%", "holds"),  # MFU may be 45.2 %
        ("HFU = MFU * 4/3", "full", "57.8%", "breaks"),
        ("HFU = MFU * 4/3", "none", "45%", "not checked"),
        ("HFU counts recomputation (Narayanan et al. 2021).", "full", "57.8%", "not checked"),
    ],
)
def test_hfu_over_mfu_only_where_the_source_counts_it_so(tmp_path, stated, recompute, hfu, outcome):
    text = f"{stated}\n\n" + table(["Activation checkpointing", "MFU", "HFU"], (recompute, "45%", hfu))
    assert cell(audited(tmp_path, text), "HFU")[0] == outcome


def test_a_time_without_a_unit_gives_no_rate(tmp_path):
    text = "seq length is 2048\n\n" + table(["GBS", "Step time", "Tokens/s"], (256, "5.46", "1"))
    assert cell(audited(tmp_path, text), "Tokens/s") == ("not checked", "a unit of the row is not given")


NAMED = table(
    ["GPUs", "Params", "Layers", "Hidden", "Vocab", "Seq", "GBS", "Step time (s)", "TFLOPs"],
    (64, "52B", 64, 8192, 50304, 1024, 1024, 129, "{}"),
)


@pytest.mark.parametrize(("formula", "right"), [("seed", "52.84"), ("hardware", "53.77"), ("model", "40.44")])
def test_a_formula_that_is_asked_for(tmp_path, formula, right):
    assert findings(audited(tmp_path, NAMED.format(right), formula=formula)) == []
    (finding,) = audited(tmp_path, NAMED.format("60.0"), formula=formula).findings
    assert (finding.kind, finding.said, finding.source) == ("formula", "60.0", f"asked for: tflops_{formula}")
    assert finding.arithmetic.startswith(f"tflops_{formula}(")
    assert f"= {right}, the table says 60.0" in finding.arithmetic


def test_without_a_formula_nothing_is_guessed(tmp_path):
    found = audited(tmp_path, NAMED.format("60.0"))
    assert findings(found) == []
    assert cell(found, "TFLOPs") == ("not checked", "no formula: the document states none; --formula names one")


def test_the_documents_own_formula_is_not_set_aside(tmp_path):
    found = audited(tmp_path, f"{FORMULA}\n\n{NAMED.format('52.84')}", formula="hardware")
    assert findings(found) == []
    assert cell(found, "TFLOPs")[0] == "holds"


def test_an_input_that_a_named_formula_lacks_is_named(tmp_path):
    text = table(["GPUs", "Size", "GBS", "Step time (s)", "TFLOPs"], (64, "48B", 1024, 129, 48.7))
    why = cell(audited(tmp_path, text, formula="hardware"), "TFLOPs")[1]
    assert why == "tflops_hardware: no layers in the row or in the text around it"


def test_a_share_may_be_in_percent(tmp_path):
    rows = [(156, "50.0"), (156, "50.0%"), (156, "0.5"), (156, "0.6")]
    text = "MFU: `tflops / 312`\n\n" + table(["TFLOPs", "MFU"], *rows)
    assert findings(audited(tmp_path, text)) == [(8, "formula", "0.6", "50.00")]


def test_two_columns_of_one_quantity_are_not_mixed_up(tmp_path):
    text = f"{FORMULA}\n\nseq=1024\n\n" + table(
        ["GPUs", "Size", "GBS", "Step time", "TFLOPs", "TFLOP/s"], (64, "48B", 1024, "129s", 1, 2)
    )
    found = audited(tmp_path, text)
    assert findings(found) == []
    assert cell(found, "TFLOPs") == ("not checked", "more than one column holds TFLOPs")


def test_seed_000s_table_says_what_is_not_checked(tmp_path):
    text = table(
        ["Batch Size", "Memory (MB)", "GPU Usage %", "TFLOP/s", "Iteration Time (ms)"],
        (1, 9028, "71.9 +/- 22.0", 1.57, 823.47),
        (9, "OOM", "", "", ""),
    )
    found = audited(tmp_path, text)
    assert found.counts["not_checked"] == 7
    assert (found.counts["blank"], found.counts["holds"], found.counts["breaks"]) == (3, 0, 0)
    words = as_text(found)
    assert "1 not checked: GPU Usage %: what the column holds is not known" in words
    assert "1 not checked: Memory (MB): the cell has no number" in words


def test_seed_004s_table_says_what_is_not_checked(tmp_path):
    text = table(["Experiments Setting", "GPU Memory Peak", "Training Latency"], ("Benchmark", "11846 MB", "80.6 s"))
    found = audited(tmp_path, text)
    assert found.counts["not_checked"] == 3
    assert found.exit_code == 0


def test_what_throughput_is_must_be_said(tmp_path):
    rows = table(["GPUs", "Size", "GBS", "Throughput", "TFLOPs"], (64, "48B", 1024, 129, 48.7))
    unsaid = audited(tmp_path, f"{FORMULA}\n\nseq=1024\n\n{rows}")
    assert "the document does not say whether Throughput is a time or a rate" in cell(unsaid, "Throughput")[1]
    said = audited(tmp_path, f"{FORMULA}\n\nseq=1024. Throughput is time per iteration.\n\n{rows}")
    assert cell(said, "TFLOPs") == ("holds", "")


def test_json_is_one_object_with_every_finding_and_cell(tmp_path):
    found = audited(tmp_path, table(LAYOUT, (16, 4, 8, 1), ("", "", "", "")))
    told = json.loads(as_json(found))
    assert told["schema"] == 1
    assert set(told) == {"schema", "document", "findings", "counts", "logs", "cells", "left_out"}
    (finding,) = told["findings"]
    assert finding["kind"] == "layout"
    assert (finding["line"], finding["said"], finding["found"]) == (3, "16", "32")
    assert told["counts"] == {
        "tables": 1, "cells": 8, "holds": 0, "breaks": 1, "blank": 4, "not_checked": 3, "findings": 1
    }  # fmt: skip
    assert len(told["cells"]) == 4


def test_text_obeys_no_document(tmp_path):
    found = audited(tmp_path, "# \x1b[2J<b>\n\n" + table([*LAYOUT, "Notes"], (16, 4, 8, 1, "\x1b[31m\x07red")))
    text = as_text(found)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "paper.md:5: GPUs: impossible layout: TP 4 x PP 8 x DP 1 needs 32 GPUs, the row has 16\n" in text
    assert "1 contradiction in 1 table: of 5 cells 0 hold, 1 break, 0 are blank, 4 were not checked\n" in text


FOUNDRY = [
    "Model", "SeqLen (T)", "# GPUs", "GPU", "MicroBatchSize", "GradAccum", "GlobalBatchSize", "Throughput (S/s)",
    "Throughput (T/s)", "Throughput (T/s/GPU)", "GlobalBatchSize (T)", "NumParams",
]  # fmt: skip


@pytest.mark.parametrize(
    ("rates", "broken"),
    [
        ((32, 66523, 1039), []),
        ((0, 1023, 15), []),  # half a sample a second, rounded or cut off
        ((32, 66523, 2078), ["Throughput (T/s/GPU)"]),
        ((32, 133046, 2078), ["Throughput (T/s)", "Throughput (T/s/GPU)"]),
    ],
)
def test_rates_agree_with_each_other_where_no_time_is_printed(tmp_path, rates, broken):
    row = ("70b", 2048, 64, "h100_80gb", 8, 4, 2048, *rates, 4194304, 64862437376)
    found = audited(tmp_path, table(FOUNDRY, row))
    assert [finding.column for finding in found.findings] == broken
    assert cell(found, "GPU")[1] == cell(found, "GlobalBatchSize (T)")[1] == "what the column holds is not known"
    assert cell(found, "GlobalBatchSize")[1] == "no DP in the row or in the text around it"


def test_a_column_of_parameters_goes_before_the_models_names(tmp_path):
    headings = ["Model", "Params", "GPUs", "GBS", "Step time", "TFLOPs"]
    in_full = ("50B", "48,000,000,000", 64, 1024, "129s", "48.7")
    rows = table(headings, in_full, ("50B", "48B", 64, 1024, "129s", "50.8"))
    assert findings(audited(tmp_path, f"{FORMULA}\n\nseq=1024\n\n{rows}")) == [(8, "formula", "50.8", "48.77")]


def test_a_model_that_is_named_by_its_size_has_it(tmp_path):
    headings = ["Model", "GPUs", "GBS", "Step time", "TFLOPs"]
    rows = table(headings, ("48B", 64, 1024, "129s", "48.7"), ("48B", 64, 1024, "129s", "50.8"))
    assert findings(audited(tmp_path, f"{FORMULA}\n\nseq=1024\n\n{rows}")) == [(8, "formula", "50.8", "48.77")]
