"""What sentences and code around a table fix, and what only sounds as if it did."""

from __future__ import annotations

import pytest

from hpc_gpt.report.audit.document import read_document
from hpc_gpt.report.audit.statements import Statements
from tests.report.audit.documents import FORMULA, audited, cell, findings, table

TABLE = table(["GPUs", "Size"], [64, "48B"])
ROW = table(["GPUs", "Size", "Glob-BS", "Step time", "TFLOPs"], [64, "48B", 1024, "129s", "48.7"])


@pytest.fixture
def stated(tmp_path):
    def of(text):
        path = tmp_path / "paper.md"
        path.write_text(text)
        document = read_document(path)
        return Statements(document), document.tables

    return of


@pytest.mark.parametrize(
    ("text", "quantity", "value"),
    [
        ("- `TP=4` in all of entries", "tp", 4),
        ("- `TP_SIZE=4` (size of the node)", "tp", 4),
        ("Seq length is 1024", "seq", 1024),
        ("We use a sequence length of 2,048 tokens.", "seq", 2048),
        ("All runs are with TP=8 and PP=2.", "tp", 8),
        ("All runs are with TP=8 and PP=2.", "pp", 2),
        ("This one uses only TP from Megatron (no PP)", "pp", 1),
        ("without pipeline parallelism", "pp", 1),
        ("**micro batch size**: 4", "micro_batch", 4),
        ("global-batch-size = 1536", "global_batch", 1536),
    ],
)
def test_a_sentence_fixes_a_constant(stated, text, quantity, value):
    statements, (only,) = stated(f"{TABLE}\n{text}\n")
    assert statements.constant(quantity, only).value == value


@pytest.mark.parametrize(
    "text",
    [
        "So max `TP_SIZE=4`.",
        "at most TP=4 fits",
        "the highest degree of TP we can use is 4",
        "We tried TP=2 and TP=8 once.",
        "It runs out of memory with TP=2.",
        "TP=2 or 4",
        "TP=2/4/8",
        "TP=2-8",
        "TP=2, 4",
        "if TP=2 it hangs",
        "HTTP=4",
        "TP: tensor parallelism",
        "TP=0.5",
        "TP=0",
        "```\nTP=4\n```",
        "<!-- TP=4 -->",
    ],
)
def test_a_sentence_that_fixes_nothing(stated, text):
    statements, (only,) = stated(f"{TABLE}\n{text}\n")
    assert statements.constant("tp", only) is None


def test_a_layout_is_not_taken_from_another_section_but_a_length_is(stated):
    statements, (first, second) = stated(f"# A\n{TABLE}\nTP=4, seq length is 512\n\n# B\n{TABLE}")
    assert statements.constant("tp", first).value == 4
    assert statements.constant("tp", second) is None
    assert statements.constant("seq", second).value == 512


def test_the_section_around_counts_and_the_nearer_one_before_it(stated):
    statements, (first, second) = stated(f"# A\nTP=4\n\n## B\n{TABLE}\n## C\nTP=2\n\n{TABLE}")
    assert statements.constant("tp", first).value == 4
    assert statements.constant("tp", second).value == 2


def test_a_line_that_ends_in_a_colon_is_of_the_table_after_it_alone(stated):
    statements, (first, second) = stated(f"TP=4:\n\n{TABLE}\nTP=8:\n\n{TABLE}")
    assert statements.constant("tp", first).value == 4
    assert statements.constant("tp", second).value == 8


def test_what_contradicts_itself_fixes_nothing_and_says_so(tmp_path):
    found = audited(tmp_path, f"{FORMULA}\n\nseq=1024\n\n{ROW}\nseq=2048\n")
    assert findings(found) == []
    assert "1024 (line 3) and 2048 (line 9)" in cell(found, "TFLOPs")[1]


@pytest.mark.parametrize(
    "formula",
    [
        "TFLOPs: `8 * model_size_in_B * seq * global_batch_size / (step_time * gpus * 1e3)`",
        "TFLOPs is `8 * model_size_in_B * seq * global_batch_size / (step_time * gpus * 1e3)`.",
        "`tflops = 8 * model_size * seq * gbs / (step_time * gpus * 1e12)`",
        "TFLOPs = 8 * params * seq len * global batch size / (time per step * number of GPUs * 1e12)",
        "```\nperl -le '$ng=64; $ms=48; $gbs=1024; $sp=129; print $ms*8*1024*$gbs / ($sp*$ng*1e3)'\n```",
        "```python\ntflops = 8 * n_params * seq_len * global_batch_size / (step_time * world_size * 10**12)\n```",
        "```\npython -c 'print(8*params*seq*gbs/(step_time*gpus*1e12))'\n```",
        "With P parameters, n GPUs, t seconds a step, TFLOPs are `8 * P * seq * B / (t * n * 1e12)`, B = global batch.",
    ],
)
def test_a_formula_however_it_is_written(tmp_path, formula):
    right = audited(tmp_path, f"{formula}\n\nseq=1024\n\n{ROW}")
    assert findings(right) == []
    assert cell(right, "TFLOPs") == ("holds", "")
    wrong = audited(tmp_path, f"{formula}\n\nseq=1024\n\n{ROW.replace('48.7', '49.9')}")
    assert [(kind, said, found) for _, kind, said, found in findings(wrong)] == [("formula", "49.9", "48.77")]


@pytest.mark.parametrize(
    "text",
    [
        "TFLOPs: see `perf.py`",
        "TFLOPs: `import os; os.abort()`",
        "TFLOPs: `size * unheard_of`",
        "TFLOPs of the table were 8 times what we saw before",
        "each pipeline handles `micro-batch-size * pp_chunks`",
        "TFLOPs: `tflops * 2`",
    ],
)
def test_what_is_no_formula_leaves_cells_unchecked(tmp_path, text):
    found = audited(tmp_path, f"{text}\n\nseq=1024\n\n{ROW}")
    assert findings(found) == []
    outcome, why = cell(found, "TFLOPs")
    assert outcome == "not checked"
    assert "no formula: the document states none" in why


def test_the_nearest_formula_counts(tmp_path):
    near = FORMULA.replace("8 *", "6 *")
    text = f"# A\n{FORMULA}\n\nseq=1024\n\n## B\n{near}\n\n{ROW}\n## C\n{ROW}"
    found = audited(tmp_path, text)
    assert [(line, kind, out) for line, kind, _, out in findings(found)] == [(11, "formula", "36.58")]


def test_a_cell_that_agrees_with_one_of_two_formulas_of_a_section_holds(tmp_path):
    found = audited(tmp_path, f"{FORMULA.replace('8 *', '6 *')}\n\n{FORMULA}\n\nseq=1024\n\n{ROW}")
    assert findings(found) == []


def test_a_formula_of_units_that_cannot_be_told_breaks_nothing(tmp_path):
    found = audited(tmp_path, f"{FORMULA.replace('1e3', '1e9')}\n\nseq=1024\n\n{ROW}")
    assert findings(found) == []
    assert "by factors of thousands" in cell(found, "TFLOPs")[1]


def test_dividing_by_zero_is_said(tmp_path):
    formula = "TFLOPs: `size * gbs / (step_time * (gpus - 64))`"
    found = audited(tmp_path, f"{formula}\n\n{ROW}")
    assert cell(found, "TFLOPs") == ("not checked", "the formula of line 1: it divides by zero")


def test_a_formula_of_a_section_without_tables_is_the_documents(tmp_path):
    text = f"# Method\n\n{FORMULA}\n\n# Setup\nseq=1024\n\n# Results\n\n{ROW.replace('48.7', '50.8')}"
    assert [(kind, out) for _, kind, _, out in findings(audited(tmp_path, text))] == [("formula", "48.77")]


def test_a_formula_of_a_section_with_tables_is_its_own(tmp_path):
    text = f"# A\n\n{FORMULA}\n\nseq=1024\n\n{ROW}\n# B\n\n{ROW.replace('48.7', '50.8')}"
    found = audited(tmp_path, text)
    assert findings(found) == []
    assert cell(found, "TFLOPs", 15)[0] == "not checked"


@pytest.mark.parametrize(
    "words", ["Each node has 8 GPUs per node.", "8 GPUs/node", "We use nodes of 8 GPUs.", "on 8-GPU per node machines"]
)
def test_nodes_are_gpus_where_a_nodes_gpus_are_said(tmp_path, words):
    rows = table(["Nodes", "TP", "PP", "DP"], (48, 8, 4, 12), (45, 8, 5, 12))
    assert findings(audited(tmp_path, f"{words}\n\n{rows}")) == [(6, "layout", "360", "480")]
    assert findings(audited(tmp_path, rows)) == []
