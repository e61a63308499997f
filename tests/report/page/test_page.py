"""The page's text: nothing of a log is markup, nothing is fetched, nothing secret is told, and it stays small."""

import base64
import hashlib
import re
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.secrets import REMOVED
from hpc_gpt.reader.lines.part import Failure, Place
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.gather import gather_paths
from hpc_gpt.report.page import build_page
from hpc_gpt.report.svg import safe
from tests import examples
from tests.report.page.page_runs import HOSTILE, curve, hostile_runs, many_runs, megatron, usual_runs

VOID = {"meta", "link", "br", "wbr", "img", "input"}


class Tags(HTMLParser):
    """Every tag of a page with its attributes' names, the text of cells, and whether each tag that opens is closed."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.values: list[tuple[str, str, str]] = []
        self.stack: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.values += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, tuple(name for name, _ in attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_every_tag_is_closed_where_it_should_be():
    for runs in (usual_runs(), hostile_runs(), []):
        assert Tags(build_page(runs)).stack == []


def test_no_style_or_handler_is_in_a_tag_and_nothing_is_fetched():
    for runs in (usual_runs(), hostile_runs()):
        page = Tags(build_page(runs))
        names = {name for _, attributes in page.tags for name in attributes}
        assert not {name for name in names if name.startswith("on") or name in ("style", "src", "srcset", "action")}
        assert {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "form", "base"} == {
            "script"
        }
        links = {value for _, name, value in page.values if name in ("href", "xlink:href")}
        assert links
        assert all(re.fullmatch(r"#[a-z0-9-]+", link) for link in links)


def test_the_policy_allows_the_pages_own_script_and_style_alone():
    page = build_page(usual_runs())
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1]
    assert not set("<>&") & set(data)
    for kind, tag in (("style", "style"), ("script", "script")):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_hostile_words_are_on_the_page_as_words():
    page = Tags(build_page(hostile_runs()))
    text = "".join(page.text)
    for words in HOSTILE:
        assert words in text
    assert "49" not in re.findall(r"\{\{.*?\}\}", text)


@settings(max_examples=examples(25))
@given(st.text(max_size=80))
def test_no_words_of_a_log_add_a_tag(words):
    def page_of(text):
        texts = {entry.name: text for entry in fields(Record) if entry.type == "str | None"}
        record = replace(megatron(), **{**texts, "ended": "error"}, flags=[text], sources={"step_s": text, "tp": text})
        failures = [Failure("error", text, Place(text, 1))]
        return build_page([RunRead(record, curve(20), failures, [Path("a"), Path("b")])], [text])

    assert Tags(page_of(f"x{words}")).tags == Tags(page_of("xy")).tags
    page_of(words).encode("utf-8")


def test_what_cannot_be_shown_becomes_a_sign_in_utf8():
    record = megatron(run="a\x00b\x1b[31m\ud800\u202egnp.exe\x85", flags=["x" * 100_000])
    page = build_page([RunRead(record)])
    assert len(page.encode()) < 60_000
    assert not re.search("[\x00\x1b\u202e\x85]", page)
    assert "a\ufffdb\ufffd[31m\ufffd\ufffdgnp.exe\ufffd" in page


def test_no_secret_and_no_setting_is_on_the_page():
    secret = "hf_" + "Ab3" * 10
    record = megatron(
        settings={"environment": {"PLAIN_WORD": "swordfish"}},
        cause=f"401 for https://me:{secret}@hub/x with api_key={secret}", flags=[f"token {secret}"],
        attempts=[{"attempt": 1, "cause": secret}, {"attempt": 2}], sources={"tp": f"out:{secret}"},
    )  # fmt: skip
    page = build_page([RunRead(record, failures=[Failure("error", f"password={secret}", Place("a", 1))])])
    assert secret not in page
    assert "swordfish" not in page
    assert REMOVED in page


@pytest.mark.parametrize(
    "words", ["tokens: 4096", "token_per_s=128", "sk-learn", "https://host:8080/x", "me@host:/path", "secret sauce"]
)
def test_plain_words_are_not_taken_for_secrets(words):
    assert safe(words) == words


def test_absurd_figures_never_stop_the_page():
    record = megatron(
        params=10**5000, gpus=10**300, step_s=float("nan"), tokens_per_s=float("inf"), seq=-1, mfu=1e300,
        memory_allocated_gib=[float("nan")] * 3, loss_last=-1e-300, skipped_steps=10**5000, micro_batch=10**5000,
    )  # fmt: skip
    page = build_page([RunRead(record, curve(10)), RunRead(Record()), RunRead(megatron(ended="made_up"))])
    assert len(page) < 150_000
    assert "1e+300" in page
    assert "made_up" in page


def test_a_column_that_no_run_fills_is_left_out():
    page = build_page([RunRead(Record(run="a", gpus=4))])
    heads = re.findall(r'<th scope="col"[^>]*>(?:<span>)?([^<]+)(?:</span>)?</th>', page)
    assert heads == ["Run", "GPUs", "Ended", "Anomalies"]


@pytest.mark.long
def test_a_thousand_runs_stay_below_8_mb_and_say_what_is_out():
    page = build_page(many_runs(1000))
    assert len(page.encode()) < 6_000_000
    assert page.count('<tr><th scope="row"><a href="#run-') == 1000
    assert page.count('class="body" id="run-') == 1000
    assert page.count('"place":') == 1000, "every run can be chosen"
    assert "<code>hpc-gpt report RUN --json</code> has the source of each figure." in page
    assert "global_batch x seq / step_s" not in page


def test_a_page_of_120_runs_stays_below_two_megabytes():
    page = build_page(many_runs(120))
    assert len(page.encode()) < 2_000_000
    assert page.count('"place":') == 120, "every run can be chosen"


def test_the_title_has_the_folder_and_the_day():
    runs = [RunRead(megatron(run=run), files=[Path("/data/logs") / run / "x.out"]) for run in ("a", "b")]
    page = build_page(runs)
    assert '<h1>logs <span class="brief">2 runs · newest 2021-05-27</span></h1>' in page
    assert "<title>logs · 2 runs · newest 2021-05-27 · hpc-gpt report</title>" in page
    assert '<h1>a <span class="brief">2021-05-27</span></h1>' in build_page(runs[:1])
    assert "<h1>2 runs</h1>" in build_page([RunRead(Record()), RunRead(Record())])


def test_paths_in_words_are_told_from_the_same_folder():
    files = [Path("/data/logs/a/x.out"), Path("/data/logs/b/y.out")]
    record = megatron(flags=["counted twice (/data/logs/a/x.out:12)"], sources={"tp": "/data/logs/b/y.out:3"})
    page = build_page([RunRead(record, files=files)])
    assert "/data/logs" not in page
    assert "counted twice (a/x.out:12)" in page
    assert "b/y.out:3" in page
    relative = RunRead(megatron(flags=["counted twice (logs/x.out:12)"]), files=[Path("logs/x.out")])
    assert "logs/x.out:12" in build_page([relative]), "a relative one is the user's own"


def test_the_three_real_logs(shared, tmp_path):
    gathered = gather_paths([str(shared / "logs")], tmp_path)
    page = build_page(gathered.runs, gathered.notes)
    assert page.count('<tr><th scope="row"><a href="#run-') == 3
    assert "tp4-pp16-dp1" in page
    assert re.search(r'<span class="words">every step was skipped by an fp16 overflow', page)
    first = page.index("every step was skipped")
    assert first < page.index("step_s rests on 2 steps"), "what cannot be right stands before what is worth a look"
    assert page.count('role="img"') >= 1
    assert str(shared) not in page
    assert "meg_gpt2_perf_n16.out:" in page
