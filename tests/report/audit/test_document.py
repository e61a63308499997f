"""Documents: tables among prose, sections, csv, and all that is no table."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.errors import DataError, UserError
from hpc_gpt.report.audit import as_json, as_text, audit
from hpc_gpt.report.audit.document import read_document
from tests.report.audit.documents import EXCERPT, FORMULA, audited, cell, findings, run, table


@pytest.fixture
def read(tmp_path):
    def of(text, name="paper.md"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_document(path)

    return of


def test_tables_know_their_line_section_and_title(read):
    document = read(
        "# A\n\n## B\n\n**Fast**\n\n16GB nodes:\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n## C\n\nx | y\n--|:-:\n3 | 4\n"
    )
    first, second = document.tables
    assert (first.line, first.title) == (9, "A > B > Fast > 16GB nodes")
    assert (second.line, second.title) == (15, "A > C")
    assert [row.cells for row in second.rows] == [("3", "4")]
    assert [row.line for row in first.rows] == [11]
    assert (first.section, second.section) == ((0, 1, 2), (0, 1, 3))


def test_bars_in_cells(read):
    document = read("| a | b |\n|---|---|\n| x \\| y | 2 |\n| `p|q` | 3 |\n| `p|q |\n")
    assert [row.cells for row in document.tables[0].rows] == [("x | y", "2"), ("`p|q`", "3"), ("`p", "q")]


def test_a_row_that_lacks_cells_ends_early_and_one_with_more_is_not_checked(tmp_path):
    found = audited(
        tmp_path, f"{FORMULA}\n\n| GPUs | TP | PP | DP |\n|-|-|-|-|\n| 16 | 4 | 8 |\n| 16 | 4 | 8 | 1 | 7 |\n"
    )
    assert [finding.line for finding in found.findings] == [5]
    assert cell(found, "GPUs", 6) == ("not checked", "the row has 5 cells, the heading 4")


@pytest.mark.parametrize(
    "text",
    [
        "```\n| a | b |\n|---|---|\n| 1 | 2 |\n```\n",
        "<!--\n| a | b |\n|---|---|\n| 1 | 2 |\n-->\n",
        "| a | b |\nno dashes\n| 1 | 2 |\n",
        "| a | b |\n|---|---|---|\n| 1 | 2 |\n",
        "| a | b |\n|---|---|\n",
        "a, b and c, as they are,\nin plain words\n",
        "",
        "\n\n\n",
        "batches:11 | loss: 8.8 | time: 24.71\n",
        "<table><tr><td>1</td></tr></table>",
    ],
)
def test_what_holds_no_table_is_refused(read, text):
    with pytest.raises(DataError, match="has no table") as caught:
        read(text)
    assert caught.value.hint


def test_an_html_table_is_said(read):
    with pytest.raises(DataError, match="line 2: an HTML table"):
        read("\n<table>\n<tr><td>1</td></tr></table>\n")
    assert read("<TABLE>\n\n|a|b|\n|-|-|\n|1|2|\n").left_out == ["line 1: an HTML table"]


def test_binary_missing_and_huge_files_are_refused(read, tmp_path):
    with pytest.raises(DataError, match="NUL"):
        read(b"| a | b |\n|---|---|\n| \0 | 2 |\n")
    with pytest.raises(DataError, match="cannot be read"):
        read_document(tmp_path / "none.md")
    with pytest.raises(DataError, match="cannot be read"):
        read_document(tmp_path)
    with pytest.raises(DataError, match="larger than 2 MiB"):
        read(b"x" * (2**21 + 1))


def test_bytes_that_are_no_utf_8_are_no_reason_to_stop(tmp_path):
    found = audited(tmp_path, b"\xff\xfe caf\xe9\n| GPUs | TP | PP | DP |\n|-|-|-|-|\n| 16 | 4 | 8 | 1 |\n")
    assert findings(found) == [(4, "layout", "16", "32")]


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_csv_of_any_delimiter(tmp_path, mark):
    text = "GPUs,TP,PP,DP\n16,4,4,1\n16,4,8,1\n".replace(",", mark)
    assert findings(audited(tmp_path, text, "table.csv")) == [(3, "layout", "16", "32")]


def test_csv_with_prose_in_comments_and_a_quoted_cell(tmp_path):
    text = '# TP=4 in all rows\nGPUs,PP,DP,Notes\n16,4,1,"a, b\nc"\n16,8,1,\n'
    assert findings(audited(tmp_path, text, "table.csv")) == [(5, "layout", "16", "32")]


def test_csv_whose_heading_begins_with_a_hash(tmp_path):
    assert findings(audited(tmp_path, "#GPUs,TP,PP,DP\n16,4,8,1\n", "t.csv")) == [(2, "layout", "16", "32")]


def test_csv_under_another_name_is_known_by_its_headings(tmp_path):
    assert findings(audited(tmp_path, "GPUs,TP,PP,DP\n16,4,8,1\n", "t.txt")) == [(2, "layout", "16", "32")]


pieces = st.sampled_from(
    ["|", "\n", "---", "|---|---|\n", "| 16 | 4 |\n", "GPUs", "TP", "TFLOPs", "`", "```", "**", "#", " is ", "=", ":",
     "TP=4", "seq length is 0", "TFLOPs: `1/0`", "TFLOPs: `size**64**64`", "1e999", "9" * 50, "48B", "1.5s", "-", "~5",
     "<!--", "-->", "<table>", "\\|", "$ms", "print ", "'", ";", ",", "\t", "\r", "\x1b[2J", "\u00a0", "–", "\ufeff"]
)  # fmt: skip


@given(
    st.lists(pieces, max_size=60),
    st.sampled_from(["a.md", "a.csv"]),
    st.sampled_from([None, "seed", "hardware", "model"]),
)
def test_any_text_is_audited_or_refused(tmp_path_factory, parts, name, formula):
    _audit_or_refuse(tmp_path_factory.mktemp("any"), "".join(parts).encode(), name, formula)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 3200), st.integers(0, 30), pieces), min_size=1, max_size=12))
def test_a_damaged_document_is_audited_or_refused(tmp_path_factory, damages):
    text = EXCERPT.read_text()
    for at, length, piece in damages:
        text = text[:at] + piece + text[at + length :]
    _audit_or_refuse(tmp_path_factory.mktemp("damaged"), text.encode(), "a.md", None)


@settings(max_examples=30)
@given(st.binary(max_size=300))
def test_any_bytes_are_audited_or_refused(tmp_path_factory, data):
    _audit_or_refuse(tmp_path_factory.mktemp("bytes"), b"|GPUs|TP|\n|-|-|\n|16|3|\n" + data, "a.md", None)


def _audit_or_refuse(folder, data, name, formula):
    path = folder / name
    path.write_bytes(data)
    behind = run((3.0, 2.0, 2.1), gpus=16, tp=4, dp=1, micro_batch=4, global_batch=512, params=18_000_000_000)
    try:
        found = audit(path, [behind], formula)
    except UserError as fault:
        assert str(fault)
        return
    assert as_json(found)
    assert "\x1b" not in as_text(found)
    assert sum(found.counts[name] for name in ("holds", "breaks", "blank", "not_checked")) == found.counts["cells"]
    assert all(each.why for each in found.cells if each.outcome == "not checked")


def test_a_cell_of_an_absurd_size_is_no_figure(tmp_path):
    text = f"{FORMULA}\nseq=1024\n\n" + table(
        ["GPUs", "Size", "Glob-BS", "Step time", "TFLOPs"],
        ["9" * 100_000, "48B", 1024, "129s", 48.7],
        [64, "1e999B", 1024, "129s", 48.7],
        [64, "48B", 1024, "0.0s", 48.7],
        [64, "48B", 1024, "129s", "9" * 3000],
    )
    found = audited(tmp_path, text)
    assert findings(found) == []
    assert found.counts["holds"] == 0


def test_headings_underlined_and_front_matter(read):
    document = read(
        "---\ntitle: x\n---\nA\n===\n\nB\n---\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\nC\n===\n\nx | y\n--|--\n3 | 4\n"
    )
    assert [table.title for table in document.tables] == ["A > B", "C"]
    assert document.tables[0].line == 10


@pytest.mark.parametrize("name", ["a.md", "a.csv"])
def test_rows_beyond_any_table_are_counted(tmp_path, name):
    text = "GPUs|TP\n" + ("--|--\n" if name == "a.md" else "") + "8|4\n" * 10_003
    found = audited(tmp_path, text, name)
    assert found.counts["cells"] == 20_000
    assert any("3 rows after the first 10000" in words for words in found.left_out)
    assert "  not read: " in as_text(found)


HOSTILE = {
    "quotes": ">" * 4000,
    "lists": "- " * 2000,
    "references": "[a]: b\n" * 50_000,
    "both": "> - " * 900 + "|a|b|",
    "comments": "<!--\n" * 50_000,
    "columns": "|" * 4000 + "\n" + "|-" * 2000,
    "indents": "".join(" " * (depth % 80) + "- a\n" for depth in range(20_000)),
    "bars": "a | b\n" * 50_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_markdown_that_is_nested_or_long_beyond_reason_is_read_in_time(read, kind):
    began = time.process_time()
    document = read(f"| a | b |\n|---|---|\n| 1 | 2 |\n\n{HOSTILE[kind]}\n")
    assert document.tables[0].rows[0].cells == ("1", "2")
    assert time.process_time() - began < 20


def test_what_github_reads_as_code_is_code(read):
    document = read("| x |\n|---|\n| 1 |\n\n- a\n\n  ```\n  b = 1\n  ```\n\ntext\n\n    c = 2\n")
    assert [passage.text.strip() for passage in document.passages if "=" in passage.text and passage.is_code] == [
        "b = 1",
        "c = 2",
    ]


def test_a_line_beyond_any_row_is_said(tmp_path):
    found = audited(tmp_path, table(["GPUs", "Notes"], (8, "x" * 5000)))
    assert found.left_out == ["the ends of 1 lines, after 4000 characters"]
