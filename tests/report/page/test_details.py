"""What the details of a run have in tables: its steps, and how long the parts of its start took."""

from hpc_gpt.reader.readers.runs import RunRead
from hpc_gpt.reader.readers.steps import StepTable
from hpc_gpt.reader.report.page import build_page, details_of, samples
from hpc_gpt.reader.report.page.anomalies import trained_again
from tests.report.page.page_runs import curve, megatron


def test_ten_steps_of_the_curve_are_a_table():
    told = samples(curve(attempts=2, skipped=(1,)))
    assert told["headings"] == ("Step", "Attempt", "Loss", "Step s", "Gradient norm", "Skipped")
    assert (len(told["lines"]), told["lines"][0][0], told["lines"][-1][0]) == (10, "1", "100")
    assert samples(StepTable())["lines"] == []


def test_the_parts_of_a_start_are_bars():
    run = RunRead(megatron(start_s=42.0, start_parts={"script": 2.0, "imports": 30.0, "first_step": 10.0}))
    parts = details_of(run, "a", 0, "")["start"]
    assert [(name, seconds) for name, seconds, _ in parts] == [
        ("script", "2.00"), ("imports", "30.0"), ("first_step", "10.0")]  # fmt: skip
    page = build_page([run])
    assert "Start of the last attempt, 42.0 s to the end of its first step" in page
    assert '<span>imports</span> <meter value="1" aria-hidden="true"></meter> <span>30.0 s</span>' in page
    assert "<span>first step</span>" in page


def test_steps_trained_again_are_counted():
    assert trained_again(curve(attempts=3)) == 10
