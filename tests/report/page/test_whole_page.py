"""A page of four runs, whole: each figure of a run is another, so that each line can only be its own."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from hpc_gpt import __version__
from hpc_gpt.core.runs.record import ON_CPU, Flag, Record
from hpc_gpt.reader.lines.part import Failure, Place
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.page import build_page, details_of, printable
from hpc_gpt.report.page.run_table import ended_sign
from hpc_gpt.report.tables import as_block
from tests.report.step_tables import step_table
from tests.report.test_notes import FAILURES
from tests.report.test_whole_texts import RUN

# Changed by hand: `<…>` is a link, a title, a sort key or the value of a bar, `|` a cell, `=` the JSON of the curves.
WHOLE = Path(__file__).with_name("whole_page.txt")
_LINES = {"p", "li", "h1", "h2", "h3", "h4", "tr", "div", "summary", "caption", "figcaption", "title", "desc"}
# What the columns mean is in their headings.
_APART = re.compile(r'<dl class="means">.*?</dl>', re.DOTALL)


class Text(HTMLParser):
    """The lines of a page with what is shown of its attributes; of the drawings, where their parts are."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.lines, self.inside = [""], ""
        self.feed(_APART.sub("", page))

    def handle_starttag(self, tag, attrs):
        self.inside = dict(attrs).get("id", tag)
        if tag in _LINES:
            self.lines.append("")
        shown = ("href", "title", "data-v", "value", "points", "d", "x", "y", "width", "start")
        self.lines[-1] += " | " * (tag in ("td", "th")) + "".join(f"<{value}>" for key, value in attrs if key in shown)

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "data":
            self.lines += [f"= {key}: {json.dumps(value)}" for key, value in self.parts(json.loads(data))]
        elif self.inside not in ("style", "script"):
            self.lines[-1] += data

    def parts(self, data):
        yield "per", data["per"]
        yield from (("group", group) for group in data["groups"])
        yield from ((f"run {run['place']} {key}", value) for run in data["runs"] for key, value in run.items())


def runs() -> list[RunRead]:
    step, attempt = np.array([1.0, 2, 3, 4, 3, 4, 5, 6]), np.array([1, 1, 1, 1, 2, 2, 2, 2])
    steps = step_table(
        step=step, attempt=attempt, step_s=[9.0, 2, 2.5, 2, 8, 2, 2.25, 2], loss=[8, 7, 6.5, 6, 6.25, 5.5, np.nan, 4.5],
        grad_norm=step / 4, balance_loss=1 + step / 8, expert_load=np.where(step > 2, 1.5, np.nan),
        experts_dead=step % 3, memory_gib=[20, 21, 22, 23, 24, 25, 25.25, 25.5],
        counts=(attempt == 2) | (step < 3),
        steady=step > 1, skipped=step == 2, eval_step=step[[2, 7]], eval_loss=np.array([6.75, 4.75]),
    )  # fmt: skip
    attempts = [
        {"attempt": 1, "job_id": "71", "started": "2026-11-02T08:00:00Z", "ended": "node_failure", "first_step": 1,
         "last_step": 4, "cause": "node n3 is gone"},
        {"attempt": 2, "job_id": "72", "started": "2026-11-02T09:00:00Z", "ended": "done", "first_step": 3,
         "last_step": 6},
    ]  # fmt: skip
    whole = replace(
        RUN, run="20261102-080000-00a1", engine="megatron-lm", ended="done", cause=None, attempts=attempts,
        started="2026-11-02T08:00:00Z", start_s=42.0, start_parts={"script": 2.0, "first_step": 40.0}, skipped_steps=1,
        nan_steps=1, flags=[Flag("few steps", "steps")], versions={"torch": "2.9"}, step_s=2.0, step_s_p10=1.5,
        step_s_p90=3.0, zero_stage=1, sources={"step_s": "/data/lab/a/x.out:7", "versions": "x.out:2", "tp": "x.out:1",
                                               "pp": "x.out:1", "tokens_per_s": "by hand"},
    )  # fmt: skip
    oom = "RuntimeError: CUDA out of memory. Tried to allocate 2.50 GiB"
    failures = [
        Failure("gpu_memory", f"{oom} (b.out:12)", Place("b.out", 12), 3, "n7"),
        Failure("hang", "gone", Place("b.out", 14), echo=True),
    ]
    failed = Record(
        run="b-2", name="b", engine="fsdp", gpus=16, params=2_500_000_000, seq=100, global_batch=24, tp=1, dp=16,
        device="H100", ended="gpu_memory", cause=oom, failed_node="n7", gpu_hours=2.5, started="2026-11-01T07:00:00Z",
        memory_reserved_gib=[70.0], tokens_per_s=8000.0, mfu=0.4,
    )  # fmt: skip
    swept = [
        Record(
            run=f"s-{row}", name="lr", dialect="nanotron", gpus=2, params=1_000_000, seq=64, tp=1, dp=2, global_batch=8,
            step_s=step_s, tokens_per_s=512 / step_s, loss_last=loss, ended=ended, started=f"2026-11-03T0{row}:00:00Z",
            settings={"sweep": {"name": "lr", "row": f"r{row}", "varied": {"train.lr": row / 100}},
                      "train": {"lr": row / 100}}, micro_batch=row,
            memory_allocated_gib=[float(row)], sources={"device": ON_CPU} if row == 2 else {},
        )
        for row, step_s, loss, ended in ((1, 0.5, 3.5, "running"), (2, 1.0, 3.25, None))
    ]  # fmt: skip
    return [
        RunRead(whole, steps, files=[Path("/data/lab/a/x.out"), Path("/data/lab/a/x.err")]),
        RunRead(failed, failures=failures, files=[Path("/data/lab/b.out")]),
        *map(RunRead, swept),
    ]


def test_each_line_of_a_page_is_what_its_runs_say() -> None:
    lines = [" ".join(line.split()) for line in Text(build_page(runs(), ["c.bin is binary"])).lines]
    found = [line.replace(__version__, "VERSION") for line in lines if line]
    assert found == WHOLE.read_text(encoding="utf-8").splitlines()


def test_what_a_page_has_no_room_for_is_counted() -> None:
    many = []
    for at in range(254):
        words = f"{chr(97 + at // 26)}{chr(97 + at % 26)}"
        record = Record(run=words, params=(at + 1) * 10**9, seq=8, tokens_per_s=100.0 + at, gpus=1,
                        flags=[f"{words} odd"],
                        ended=(*FAILURES, "done", "made", "up")[at % 15], cause=f"{words} broke")  # fmt: skip
        many.append(RunRead(record, step_table(step=np.array([1.0, 2]), loss=np.array([2.0, 1]))))
    page = build_page(many, [f"file {place} is binary" for place in range(103)])
    assert page.count('<span class="words">') == 200 + 200, "of failures and others"
    for words in ("<summary>180 more<", ">4 more are not listed here", ">87 more are not listed here",
                  ", 3 other ways to end. 287 ", ">3 more notes of this kind."):  # fmt: skip
        assert words in page, words
    assert page.count('role="img"') == 12


def test_what_the_details_of_a_run_leave_out_is_counted() -> None:
    attempts = [{"attempt": place, "ended": "hang", "cause": f"c{place}"} for place in range(43)]
    failures = [Failure("nan", f"m{place}", Place(f"f{place}", 1)) for place in range(14)]
    record = Record(attempts=attempts, ended="hang", gpus=8)
    run = RunRead(record, failures=failures)
    found = details_of(run, "a")
    assert (len(found["failures"]), found["more_failures"]) == (12, 2)
    done = replace(run, record=replace(record, ended="done"), failures=[])
    assert [each["where"] for each in details_of(done, "a")["failures"]] == [f"attempt {at}" for at in range(12)]
    one = details_of(replace(done, record=replace(done.record, attempts=attempts[:1])), "a")
    assert one["failures"] == []


def test_the_text_of_a_run_is_its_block() -> None:
    record = printable(Record(params=10**5000, gpus=8, step_s=float("nan"), flags=["f"], run="r"))
    assert details_of(RunRead(record), "a")["text"] == as_block(Record(gpus=8, flags=["f"])).splitlines()[1:]


def test_a_run_has_a_sign_for_how_it_ended() -> None:
    signs = {
        "done": "✓",
        "running": "▶",
        "pending": "○",
        "hang": "✗",
        "walltime": "■",
        "made up": "■",
        "unknown": "",
        None: "",
    }
    assert {ended: ended_sign(ended) for ended in signs} == signs
