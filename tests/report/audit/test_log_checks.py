"""Which row a log belongs to, and what it says of the row's size, time and figures."""

from __future__ import annotations

import pytest

from hpc_gpt.report.audit import as_text
from tests.report.audit.documents import FORMULA, audited, cell, findings, run, table

HEADINGS = ["GPUs", "Size", "TP", "PP", "DP", "MBS", "GBS", "Step time", "TFLOPs", "Notes"]
SIZES = {"gpus": 64, "tp": 4, "pp": 1, "dp": 16, "micro_batch": 48, "global_batch": 768, "seq": 1024}
BILLION = {**SIZES, "params": 48_000_000_000}
TIMES = (150.0, 100.0, 101.0, 99.0, 100.0)


def row(time="100s", notes="", size="48B", tflops="", **sizes):
    values = {**SIZES, **sizes}
    layout = (values[name] for name in ("tp", "pp", "dp", "micro_batch", "global_batch"))
    return (values["gpus"], size, *layout, time, tflops, notes)


def audited_rows(tmp_path, *rows, runs, title="", formula=""):
    return audited(tmp_path, f"# {title}\n\n{formula}\n\n{table(HEADINGS, *rows)}", runs=runs)


def kinds(found):
    return [finding.kind for finding in found.findings]


@pytest.mark.parametrize(
    ("printed", "kind"),
    [
        ("100s", None),
        ("100.0s", None),
        ("99.6s", None),  # between the fastest and the slowest steady step
        ("150s", "first_iteration"),
        ("110s", "warm_up_in_mean"),
        ("105s", "step_time"),
        ("95s", "step_time"),
        ("0.1 min", None),
    ],
)
def test_the_time_of_a_step(tmp_path, printed, kind):
    found = audited_rows(tmp_path, row(printed), runs=[run(TIMES, **BILLION)])
    if printed == "0.1 min":
        # 6 s are no time of this log, so it is another run's row.
        assert found.matches[0].line is None
        return
    assert kinds(found) == ([kind] if kind else [])
    assert cell(found, "Step time")[0] == ("breaks" if kind else "holds")
    assert cell(found, "TP")[0] == cell(found, "MBS")[0] == "holds"


def test_a_first_iteration_faster_than_the_rest(tmp_path):
    (finding,) = audited_rows(tmp_path, row("122s"), runs=[run((121.8998, 125.9124, 123.9078), **BILLION)]).findings
    assert finding.arithmetic == (
        "122s is the first iteration alone (121.90 s); the 2 steady iterations after it take 124.91 s on average, "
        "124.91 s at the median"
    )


@pytest.mark.parametrize(
    ("size", "params", "kind", "right"),
    [
        ("48B", 48_000_000_000, None, ""),
        ("48B", 48_900_000_000, None, ""),  # cut off
        ("48B", 51_970_064_384, "size_2_30", "51.97B"),
        ("1.5B", 1_557_611_200, None, ""),
        ("124M", 124_439_808, None, ""),
        ("118M", 124_439_808, "size_2_30", "124.44M"),  # 2^20
        ("50B", 48_000_000_000, "size", "48.00B"),
    ],
)
def test_the_size(tmp_path, size, params, kind, right):
    found = audited_rows(tmp_path, row(size=size), runs=[run(TIMES, **{**BILLION, "params": params})])
    assert [(each.kind, each.found) for each in found.findings] == ([(kind, right)] if kind else [])
    assert cell(found, "Size")[0] == ("breaks" if kind else "holds")


def test_a_model_of_another_size_is_another_run(tmp_path):
    found = audited_rows(tmp_path, row(size="24B"), runs=[run(TIMES, **BILLION)])
    assert findings(found) == []
    assert found.matches[0].line is None


def test_the_formula_on_the_logs_own_size_and_time(tmp_path):
    log = run((121.8998, 125.9124, 123.9078), **{**SIZES, "params": 51_970_064_384}, tflops_printed=40.93)
    formula = f"{FORMULA}\n\nseq=1024"
    found = audited_rows(tmp_path, row("122s", tflops="38.67"), runs=[log], formula=formula)
    assert kinds(found) == ["size_2_30", "first_iteration", "tflops_of_log"]
    assert "8 * 51.97 * 1024 * 768 / (124.91 * 64 * 1e3) = 40.90, the table says 38.67" in as_text(found)
    assert "the program itself prints 40.93" in as_text(found)


def test_a_figure_of_the_log_with_the_tables_rounding_is_no_finding(tmp_path):
    formula = f"{FORMULA}\n\nseq=1024"
    found = audited_rows(tmp_path, row(tflops="47.2"), runs=[run(TIMES, **BILLION)], formula=formula)
    assert findings(found) == []


@pytest.mark.parametrize("name", ["gpus", "tp", "dp", "micro_batch", "global_batch"])
def test_a_row_of_another_layout_or_batch_is_not_compared(tmp_path, name):
    log = run(TIMES, **{**BILLION, name: BILLION[name] * 2})
    found = audited_rows(tmp_path, row("150s"), runs=[log])
    assert findings(found) == []
    assert found.matches[0].line is None
    assert cell(found, "Step time") == ("not checked", "an input: no log belongs to the row")


def test_the_gpus_alone_are_no_match(tmp_path):
    found = audited_rows(tmp_path, row("150s"), runs=[run(TIMES, gpus=64)])
    assert found.matches[0].line is None


def test_two_rows_that_fit_equally_are_compared_with_neither_and_said(tmp_path):
    found = audited_rows(tmp_path, row("105s"), row("104s"), runs=[run(TIMES, **BILLION)])
    assert findings(found) == []
    assert "lines 7, 8 fit it equally well" in found.matches[0].why
    assert "log run.out: no row: lines 7, 8 fit it equally well: compared with none" in as_text(found)


def test_the_row_whose_time_is_a_time_of_the_log_is_its_row(tmp_path):
    found = audited_rows(tmp_path, row("105s"), row("150s"), runs=[run(TIMES, **BILLION)])
    assert found.matches[0].line == 8
    assert kinds(found) == ["first_iteration"]


def test_the_date_in_the_notes_tells_rows_apart(tmp_path):
    log = run(TIMES, **BILLION, started="2021-05-25T22:29:53Z")
    found = audited_rows(tmp_path, row("105s", "05-27"), row("105s", "05-25"), runs=[log])
    assert found.matches[0].line == 8
    found = audited_rows(tmp_path, row("100s", "05-27"), runs=[log])
    assert found.matches[0].line is None


@pytest.mark.parametrize(("engine", "line"), [("megatron-lm", 7), ("deepspeed-zero", 14), ("hf-deepspeed", 21)])
def test_the_program_in_the_heading_tells_tables_apart(tmp_path, engine, line):
    one = table(HEADINGS, row("105s"))
    text = f"# Tests\n\n## Megatron\n\n{one}\n## DeepSpeed ZeRO\n\n\n{one}\n## HF + DeepSpeed ZeRO-3\n\n\n{one}"
    found = audited(tmp_path, text, runs=[run(TIMES, **BILLION, engine=engine)])
    assert found.matches[0].line == line
    assert kinds(found) == ["step_time"]


def test_two_runs_of_one_row_are_both_compared(tmp_path):
    runs = [run(TIMES, "a.out", **BILLION), run((90.0, 95.0, 95.0), "b.out", **BILLION)]
    found = audited_rows(tmp_path, row("100s"), runs=runs)
    assert [match.line for match in found.matches] == [7, 7]
    assert kinds(found) == ["step_time"]
    assert "b.out" in found.findings[0].source


def test_a_total_over_the_steps_counts_and_the_bars_do_not(tmp_path):
    log = run((58.0, 62.0, 60.0), **BILLION, step_s=100.0, flags=["the program counts 1000 samples of 1024"])
    found = audited_rows(tmp_path, row("102s"), runs=[log])
    assert kinds(found) == ["step_time"]
    assert found.findings[0].arithmetic == (
        "the log's steps take 100.00 s, the table says 102s: +2.0%; the program counts 1000 samples of 1024"
    )


def test_rates_and_named_tflops_of_the_record(tmp_path):
    log = run(TIMES, **BILLION, tokens_per_s=7864.32, tflops_model=55.0, tflops_seed=47.18)
    headings = ["GPUs", "TP", "DP", "GBS", "Tokens/s", "TFLOPs seed", "TFLOPs model"]
    right = audited(tmp_path, table(headings, (64, 4, 16, 768, "7864", "47.2", "55.0")), runs=[log])
    assert findings(right) == []
    wrong = audited(tmp_path, table(headings, (64, 4, 16, 768, "9864", "47.2", "59.0")), runs=[log])
    assert [(kind, said) for _, kind, said, _ in findings(wrong)] == [("figure", "9864"), ("figure", "59.0")]


@pytest.mark.parametrize("step_s", [None, 0.0, float("nan"), float("inf")])
def test_a_log_without_a_time_says_nothing_of_it(tmp_path, step_s):
    found = audited_rows(tmp_path, row("150s"), runs=[run((), **BILLION, step_s=step_s)])
    assert findings(found) == []
    assert found.matches[0].line == 7
    assert cell(found, "Size")[0] == "holds"


def test_a_run_of_which_nothing_is_known_is_said(tmp_path):
    found = audited_rows(tmp_path, row(), runs=[run(())])
    assert found.matches[0].line is None
    assert "no layout" in found.matches[0].why


def test_a_figure_that_was_inferred_says_so_once_and_plainly(tmp_path):
    log = run(TIMES, **{**SIZES, "params": 51_970_064_384})
    log.record.sources["params"] = "inferred: from the shape"
    found = audited_rows(tmp_path, row(), runs=[log])
    text = as_text(found)
    assert ": params from the shape (inferred)\n" in text
    assert "from inferred" not in text
