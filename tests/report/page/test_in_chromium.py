"""The page in a real browser: what it shows, what it lets run, and how it is used by hand, by keyboard and by ear."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.page import SOURCED_RUNS, write_page
from tests.report.page.page_runs import HOSTILE, curve, hostile_runs, many_runs, megatron, swept_runs, usual_runs
from tests.report.step_tables import step_table
from tests.waiting import patient

# Contrast of every text and every stroke against what lies behind it, by WCAG 2.1's formula.
CONTRASTS = """
(() => {
  const parsed = (words) => {
    const found = words.match(/[\\d.]+/g);
    return found && !(found.length > 3 && Number(found[3]) === 0) ? found.slice(0, 3).map(Number) : null;
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const colour = parsed(getComputedStyle(one).backgroundColor);
      if (colour) return colour;
    }
  };
  document.querySelectorAll("details").forEach((one) => (one.open = true));
  const worst = { text: [99, ""], stroke: [99, ""], texts: 0, strokes: 0 };
  const note = (kind, value, one) => {
    worst[kind + "s"] += 1;
    const name = `${one.tagName}.${one.getAttribute("class")} ${one.textContent.slice(0, 40)}`;
    if (value < worst[kind][0]) worst[kind] = [value, name];
  };
  for (const one of document.querySelectorAll("body *")) {
    const style = getComputedStyle(one);
    const drawn = one instanceof SVGElement;
    const says = [...one.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (["SCRIPT", "title", "desc"].includes(one.tagName)) continue;
    if (says) note("text", ratio(parsed(drawn ? style.fill : style.color), behind(one)), one);
    const marks = drawn && one.getAttribute("class") !== "grid";
    if (marks && ["path", "line"].includes(one.tagName)) note("stroke", ratio(parsed(style.stroke), behind(one)), one);
  }
  return worst;
})()
"""
pytestmark = pytest.mark.xdist_group("chromium")

OVERFLOW = "[document.scrollingElement.scrollWidth, innerWidth]"
NAMES = "[...document.querySelectorAll('table.runs tbody th')].map((cell) => cell.textContent)"
SORTS = "[...document.querySelectorAll('table.runs thead th')].map((cell) => cell.getAttribute('aria-sort'))"
STEP = "table.runs thead th:nth-child(8) button"


@dataclass(frozen=True)
class Pages:
    usual: Path
    hostile: Path
    long: Path  # of so many runs that their cells have no sources


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    made = Pages(folder / "usual.html", folder / "hostile.html", folder / "long.html")
    write_page(made.usual, usual_runs(), ["out.bin is binary"])
    write_page(made.hostile, hostile_runs(), HOSTILE)
    write_page(made.long, many_runs(SOURCED_RUNS + 10))
    return made


def names(browser):
    return [name.partition("/")[0] for name in browser.run(NAMES)]


READ = ["meg_gpt2_perf_n16", "meg_ds_3d_restarts", "meg_oom", "meg_nan", "hf_ds_gpt2_base_n4", "gpt2-124m-fsdp",
        "gpt2-124m-ddp"]  # fmt: skip
FASTEST_FIRST = ["gpt2-124m-ddp", "gpt2-124m-fsdp", "hf_ds_gpt2_base_n4", "meg_gpt2_perf_n16", "meg_nan",
                 "meg_ds_3d_restarts", "meg_oom"]  # fmt: skip
SLOWEST_FIRST = ["meg_ds_3d_restarts", "meg_gpt2_perf_n16", "meg_nan", "hf_ds_gpt2_base_n4", "gpt2-124m-fsdp",
                 "gpt2-124m-ddp", "meg_oom"]  # fmt: skip


def test_it_is_quiet_and_asks_for_nothing_but_itself(browser, pages):
    for page in (pages.usual, pages.hostile):
        browser.open(page)
        assert (browser.console, browser.requests) == ([], [page.as_uri()])


def test_nothing_of_a_log_runs(browser, pages):
    for dark in (False, True):
        browser.open(pages.hostile, dark=dark)
        browser.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        browser.click(STEP)
        browser.click("table.runs tbody a")
        assert (browser.run("typeof window.hacked"), browser.dialogs) == ("undefined", [])
        assert browser.console == []
    text = browser.run("document.body.textContent")
    assert all(words in text for words in HOSTILE)
    assert browser.run(CHOICES) == [f" {words}" for words in HOSTILE], "the rows of a sweep"
    assert browser.run("document.title").endswith("hpc-gpt report")


def test_the_policy_stops_a_script_that_got_in_all_the_same(browser, pages, tmp_path):
    bad = tmp_path / "bad.html"
    inside = "<script>window.hacked=1</script><img src=http://127.0.0.1:9/ onerror='window.hacked=2'>"
    bad.write_text(pages.usual.read_text().replace("<main>", f"<main>{inside}"))
    browser.open(bad)
    assert browser.run("typeof window.hacked") == "undefined"
    assert browser.run("document.querySelectorAll('main > script, main > img').length") == 2
    assert any("Content Security Policy" in words for words in browser.console)
    told = [event["params"] for event in browser.events if event["method"] == "Network.loadingFailed"]
    assert len(told) == len(browser.requests) - 1, "all but the page itself was stopped"
    assert all(one.get("blockedReason") == "csp" for one in told)


def test_a_click_sorts_and_says_so(browser, pages):
    browser.open(pages.usual)
    assert names(browser) == READ
    assert set(browser.run(SORTS)) == {"none"}
    browser.click(STEP)
    assert names(browser) == FASTEST_FIRST, "the run without a step time stands last"
    assert browser.run(SORTS)[7] == "ascending"
    assert browser.run("document.querySelector('[role=status]').textContent") == "Sorted by Step s, ascending"
    browser.click(STEP)
    assert names(browser) == SLOWEST_FIRST, "and last again"
    assert browser.run(SORTS)[7] == "descending"
    browser.click("table.runs thead th:nth-child(1) button")
    assert names(browser) == sorted(READ, key=str.lower)
    assert [at for at, way in enumerate(browser.run(SORTS)) if way != "none"] == [0]


def test_the_keyboard_sorts_filters_and_opens(browser, pages):
    browser.open(pages.usual)
    browser.run(f"document.querySelector({STEP!r}).focus()")
    browser.press("Enter", 13, "\r")
    assert names(browser) == FASTEST_FIRST
    browser.press(" ", 32, " ")
    assert browser.run(SORTS)[7] == "descending"
    browser.press(" ", 32, " ")
    assert names(browser) == READ, "the third time gives the order that was read"
    browser.run("document.querySelector('#tools input').focus()")
    browser.call("Input.insertText", text="ds done")
    assert browser.run("document.querySelector('[role=status]').textContent") == "2 of 7 runs"
    browser.run("document.querySelector('table.runs tbody a[href=\"#run-2\"]').focus()")
    browser.press("Enter", 13, "\r")
    browser.until("document.activeElement.tagName === 'SUMMARY'")
    assert browser.run("document.getElementById('run-2').closest('details').open")
    assert browser.run("[...document.querySelectorAll('details.run')].filter((one) => one.open).length") == 1


def test_all_that_can_be_used_is_reached_by_tab_in_focus(browser, pages):
    browser.open(pages.usual)
    seen = set()
    for _ in range(300):
        browser.press("Tab", 9)
        where = browser.run(
            "(one => one === document.body ? '' : [one.tagName, one.textContent.slice(0, 30), "
            "getComputedStyle(one).outlineStyle].join('|'))(document.activeElement)"
        )
        if not where:
            break
        tag, _, outline = where.split("|")
        seen.add(tag)
        assert outline != "none", where
    else:
        pytest.fail("tab does not come to an end")
    assert seen >= {"A", "BUTTON", "INPUT", "SUMMARY", "DIV"}


@pytest.mark.parametrize("name", ["usual", "hostile"])
def test_a_phone_scrolls_the_tables_and_never_the_page(browser, pages, name):
    browser.open(getattr(pages, name), width=390, height=844)
    browser.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert browser.run(OVERFLOW) == [390, 390]
    wide, box = browser.run("(one => [one.scrollWidth, one.clientWidth])(document.querySelector('.scroll'))")
    assert wide > box
    sizes = browser.run(
        "[...document.querySelectorAll('thead button, #choice button, #choices label')].filter((one) => "
        "one.checkVisibility()).map((one) => one.getBoundingClientRect().height)"
    )
    assert min(sizes) >= 24


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_lines_stand_out(browser, pages, dark):
    browser.open(pages.usual, dark=dark)
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(15, 19, 24)" if dark else "rgb(255, 255, 255)")
    browser.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    browser.until("document.querySelectorAll('.run .plot').length > 6")
    worst = browser.run(CONTRASTS)
    assert worst["texts"] > 500
    assert worst["strokes"] > 50
    assert worst["text"][0] >= 4.5, worst
    assert worst["stroke"][0] >= 3, worst


def test_a_screen_reader_meets_names_and_places(browser, pages):
    browser.open(pages.usual)
    browser.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    met = browser.roles()
    roles = {role for role, _, _ in met}
    assert roles >= {"banner", "main", "navigation", "contentinfo", "region", "table", "columnheader", "rowheader"}
    assert [name for role, name, _ in met if role == "heading"][:2] == ["n16 7 runs · newest 2021-05-27", "Summary"]
    tables = [name for role, name, _ in met if role == "table"]
    assert len(tables) == 1
    assert all(tables)
    sliders = {name for role, name, _ in met if role == "slider"}
    assert {"Loss over steps of 3 runs", "Step time over steps, meg_ds_3d_restarts/1587042"} <= sliders
    assert not [name for role, name, _ in met if role == "image" and not name], "no drawing without a name"
    assert all(name for role, name, _ in met if role in ("button", "link", "searchbox", "DisclosureTriangle"))
    assert {name for role, name, _ in met if role == "columnheader"} >= {"Run", "Step s", "TFLOP/s (model)", "Layout"}


def test_without_javascript_all_is_there(browser, pages):
    browser.open(pages.usual, script=False)
    tree = browser.call("DOMSnapshot.captureSnapshot", computedStyles=[])
    strings = set(tree["strings"])
    assert {"7 runs · newest 2021-05-27", "meg_oom/1587011", "TFLOP/s (model)"} <= strings
    met = browser.roles()
    assert not [name for role, name, _ in met if role in ("button", "searchbox", "slider")], "nothing that does nothing"
    curves = {name: words for role, name, words in met if role == "image"}
    assert list(curves)[:2] == ["Loss of 52.0B parameters, sequence 1,024", "Loss of 124M parameters, sequence 1,024"]
    assert "meg_nan/1587100: from 11.77 at step 1 to" in curves["Loss of 52.0B parameters, sequence 1,024"]
    assert sum(role == "DisclosureTriangle" for role, _, _ in met) >= 8


def test_print_is_black_on_white_and_unfolded(browser, pages):
    browser.open(pages.usual, dark=True)
    assert not browser.run("document.querySelector('.run pre').checkVisibility()")
    browser.media(dark=True, medium="print")
    assert browser.run("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("document.querySelector('.run pre').checkVisibility()"), "unfolded, by the style alone"
    assert browser.run("getComputedStyle(document.getElementById('tools')).display") == "none"
    browser.media()
    paper = [
        (round(float(width)), round(float(height)))
        for width, height in re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", browser.pdf())
    ]
    assert 8 <= len(paper) <= 25
    assert set(paper) == {(595, 842), (842, 595)}, "A4, the wide tables across"


def test_no_motion_where_none_is_wanted(browser, pages):
    browser.open(pages.usual)
    for wanted, scrolls in (("no-preference", "smooth"), ("reduce", "auto")):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": wanted}])
        assert browser.run("getComputedStyle(document.documentElement).scrollBehavior") == scrolls
    assert browser.run("document.getAnimations().length") == 0


HOVER = """
((share) => {
  const plot = document.querySelector('.plot'), box = plot.getBoundingClientRect();
  plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.x + box.width * share, clientY: box.y + 9}));
})
"""
CHOICES = "[...document.querySelectorAll('#choices li')].map((one) => one.textContent)"
LINES = "document.querySelector('.plot').querySelectorAll('path.line:not(.raw)').length"
VALUE = "document.querySelector('.plot').getAttribute('aria-valuetext')"
LABEL = "document.querySelector('.plot').getAttribute('aria-label')"
READ_OUT = "document.querySelector('.read').textContent"
GROUP, KIND, OVER = (
    f"document.querySelector('#choice select[aria-label={name}]')" for name in ("Runs", "Figure", "over")
)


def await_value(browser, begin: str) -> None:
    """Waits until the read-out of the first chart begins so: a key has its effect a moment after it was pressed."""
    browser.until(f"{VALUE}.startsWith({json.dumps(begin)})")


def choose(browser, select: str, text: str) -> None:
    """Chooses an option of a select by its text, as a keyboard does: the value changes, then the page is told."""
    browser.run(f"""(() => {{
      const one = {select};
      one.value = [...one.options].find((option) => option.textContent === {json.dumps(text)}).value;
      one.dispatchEvent(new Event('change'));
    }})()""")


def read_end(browser, key: str, code: int) -> None:
    browser.run("document.querySelector('.plot').focus({preventScroll: true})")
    browser.press(key, code)


def test_curves_are_chosen_and_read_by_pointer_and_keyboard(browser, pages):
    browser.open(pages.usual)
    assert browser.run(LABEL) == "Loss over steps of 3 runs", "one model's"
    choose(browser, GROUP, "124M parameters, sequence 1,024")
    assert browser.run(LABEL) == "Loss over steps of 2 runs"
    choose(browser, GROUP, "52.0B parameters, sequence 1,024")
    assert browser.run(LINES) == 3
    browser.click("#choices li:nth-child(1) input")
    assert browser.run(LINES) == 2
    browser.click(".below button:nth-of-type(2)")
    assert browser.run(LINES) == 0
    browser.click("#choices li:nth-child(1) input")
    assert browser.run(LINES) == 1
    # The run's own loss at its first step, its last, and half way on the axis.
    read_end(browser, "Home", 36)
    await_value(browser, "step 1: meg_gpt2_perf_n16/1587010 11.77")
    browser.press("End", 35)
    await_value(browser, "step 100: meg_gpt2_perf_n16/1587010 6.")
    browser.press("ArrowLeft", 37)
    await_value(browser, "step 99: ")
    choose(browser, OVER, "tokens")
    assert browser.run(LABEL) == "Loss over tokens, meg_gpt2_perf_n16/1587010"
    read_end(browser, "End", 35)
    await_value(browser, "tokens 104.9M: ")  # 100 steps x 1024 samples x 1024 tokens
    choose(browser, OVER, "hours of steps")
    read_end(browser, "End", 35)
    await_value(browser, "hours 3.3")  # 100 steps of 120 s
    browser.run(f"{HOVER}(0.5)")
    assert 1 < float(re.match(r"hours ([\d.]+)", browser.run(READ_OUT))[1]) < 2.2
    choose(browser, KIND, "Tokens/s per GPU")
    read_end(browser, "End", 35)
    rate = float(re.search(r"1587010 ([\d.]+)", browser.run(VALUE))[1])
    assert 110 < rate < 160  # 1024 x 1024 tokens in 120 s on 64 GPUs
    assert browser.console == []


def test_attempts_are_marked_with_their_causes(browser, pages):
    browser.open(pages.usual)
    choose(browser, GROUP, "52.0B parameters, sequence 1,024")
    marks = "[...document.querySelectorAll('.plot .restart title')].map((one) => one.textContent)"
    assert browser.run(marks) == [
        "meg_ds_3d_restarts/1587042: attempt 2 after node failure: node r7i6n2 did not answer",
        "meg_ds_3d_restarts/1587042: attempt 3 after requeued",
    ]
    browser.run("document.querySelector('.plot').focus({preventScroll: true})")
    browser.press("Home", 36)
    for _ in range(28):
        browser.press("ArrowRight", 39)
    browser.until(f"{VALUE}.startsWith('step 29')")
    assert "attempt 2 after node failure: node r7i6n2 did not answer" in browser.run(READ_OUT)


def test_a_sweep_is_drawn_over_the_key_that_it_varies(browser, tmp_path):
    write_page(tmp_path / "swept.html", swept_runs())
    browser.open(tmp_path / "swept.html")
    assert browser.run(LABEL) == "Loss over steps of 4 runs"
    choose(browser, OVER, "train.lr")
    assert browser.run(LABEL) == "Loss over train.lr of 4 runs"
    assert browser.run("document.querySelector('.plot').querySelectorAll('.spot').length") == 4
    read_end(browser, "End", 35)
    await_value(browser, "train.lr 0.003: lr-0.003 2.7")
    assert not browser.run(SIDE), "the chart has the key already"
    assert browser.run("document.querySelector('#choice input').checked"), "rates 30 times apart: a logarithmic axis"
    texts = "document.querySelector('.plot').querySelectorAll('text[text-anchor=middle]')"
    ticks = browser.run(f"[...{texts}].map((one) => one.textContent)")
    assert ticks == ["0.0001", "0.0002", "0.0005", "0.001", "0.002"]


SIDE = "document.querySelector('.side').checkVisibility()"


def test_a_sweep_goes_by_its_rows_and_has_its_last_figure_beside(browser, tmp_path):
    write_page(tmp_path / "swept.html", swept_runs())
    browser.open(tmp_path / "swept.html")
    rows = ["lr-0.0001", "lr-0.0003", "lr-0.001", "lr-0.003"]
    names = "[...document.querySelector('.plot').querySelectorAll('.name')].map((one) => one.textContent)"
    assert sorted(browser.run(names)) == rows
    assert browser.run(CHOICES) == [f" {row}" for row in rows]
    assert browser.run("document.querySelector('#choices label').title") == "lr-demo/00a0"
    side = "document.querySelector('.side .plot')"
    assert browser.run(f"{side}.getAttribute('aria-label')") == "Last loss over train.lr of 4 runs"
    assert browser.run(f"{side}.querySelectorAll('.spot').length") == 4
    browser.run(f"{side}.focus({{preventScroll: true}})")
    browser.press("End", 35)
    browser.until(f"{READ_OUT} === 'train.lr 0.003: lr-0.003 2.7'")
    choose(browser, GROUP, "52.0B parameters, sequence 1,024")
    assert not browser.run(SIDE)
    assert browser.run(CHOICES) == [" meg_gpt2_perf_n16/1587010"]


def test_beside_a_long_sweep_are_all_of_its_runs(browser, tmp_path):
    runs = []
    for place in range(20):
        settings = {"sweep": {"name": "long", "row": f"r{place}"}, "train": {"lr": 0.001 * (place + 1)}}
        runs.append(RunRead(megatron(run=f"a{place}", name="long", settings=settings), curve(20)))
    write_page(tmp_path / "long.html", runs)
    browser.open(tmp_path / "long.html")
    spots = "document.querySelectorAll('.side .spot').length"
    assert (browser.run(LINES), browser.run(spots)) == (8, 20)


def test_a_sweep_without_curves_is_points_with_their_names(browser, tmp_path):
    write_page(tmp_path / "bare.html", [RunRead(run.record) for run in swept_runs()])
    browser.open(tmp_path / "bare.html")
    assert browser.console == []
    assert browser.run(LABEL) == "Tokens/s per device over train.lr of 4 runs"
    assert browser.run("document.querySelectorAll('.plot .spot').length") == 4
    names = set(browser.run("[...document.querySelectorAll('.plot .name')].map((one) => one.textContent)"))
    assert names == {"lr-0.0001", "lr-0.0003", "lr-0.001", "lr-0.003"}
    choose(browser, KIND, "Memory")
    assert browser.run(LABEL) == "Memory over train.lr of 4 runs"
    assert not browser.run(SIDE)


def test_a_sweep_that_waits_has_no_chart(browser, tmp_path):
    nothing = {"step_s": None, "tokens_per_s": None, "loss_last": None, "memory_allocated_gib": None}
    write_page(tmp_path / "bare.html", [RunRead(replace(run.record, **nothing)) for run in swept_runs()])
    browser.open(tmp_path / "bare.html")
    assert (browser.console, browser.run("document.querySelectorAll('.plot').length")) == ([], 0)


def test_rates_are_of_one_model(browser, pages):
    browser.open(pages.usual)
    kinds = f"[...{KIND}.options].map((one) => one.textContent)"
    assert "Tokens/s per GPU" in browser.run(kinds)
    choose(browser, GROUP, "all runs")
    assert browser.run(kinds) == ["Loss", "Step time"]


def test_the_run_under_the_pointer_stands_out(browser, pages):
    browser.open(pages.usual)
    faded = "new Set([...document.querySelectorAll('.plot .faded')].map((one) => one.dataset.run)).size"
    second = "document.querySelector('#choices li:nth-child(2) input')"
    # Charts are drawn once more as the page gets its size, in which case the focus comes again.
    browser.until(f"({second}.blur(), {second}.focus(), {faded} === 2)")
    browser.run("document.activeElement.blur()")
    assert browser.run(faded) == 0


def test_the_first_runs_are_above_the_fold(browser, tmp_path):
    write_page(tmp_path / "swept.html", swept_runs())
    browser.open(tmp_path / "swept.html", width=1280, height=800)
    bottom = "(one => one.getBoundingClientRect().bottom)(document.querySelector('table.runs tbody tr:nth-child(3)'))"
    assert browser.run(bottom) < 800


def test_memory_has_a_curve_and_a_chosen_run_its_own_charts(browser, tmp_path):
    steps = step_table(step=np.arange(1.0, 51), loss=np.ones(50), step_s=np.full(50, 2.0),
                       memory_gib=np.linspace(10, 12, 50))  # fmt: skip
    write_page(tmp_path / "one.html", [RunRead(megatron(), steps)])
    browser.open(tmp_path / "one.html")
    options = f"[...{KIND}.options].map((one) => one.textContent)"
    assert browser.run(options) == ["Loss", "Step time", "Tokens/s per GPU", "Memory"]
    choose(browser, KIND, "Memory")
    read_end(browser, "End", 35)
    await_value(browser, "step 50: meg_gpt2_perf_n16/1587010 12")
    plots = (
        "[...document.querySelectorAll('.run .plot')].map((one) => one.getAttribute('aria-label').split(' over')[0])"
    )
    assert browser.run(plots) == ["Loss", "Step time", "Memory"], "drawn, as the details of the one run are open"


def test_a_chosen_run_of_three_steps_has_whole_steps_on_its_axis(browser, tmp_path):
    page = tmp_path / "short.html"
    write_page(page, [RunRead(megatron(), curve(3))])
    browser.open(page)
    ticks = "[...document.querySelectorAll('.plot')[0].querySelectorAll('text[text-anchor=middle]')]"
    assert browser.run(f"{ticks}.map((one) => one.textContent)") == ["1", "2", "3"]


def test_the_table_fits_1280_and_all_columns_are_a_click_away(browser, pages):
    width = "(one => [one.scrollWidth, one.clientWidth])(document.querySelector('#runs .scroll'))"
    for page in (pages.usual, pages.long):
        browser.open(page, width=1280)
        assert len(set(browser.run(width))) == 1
        heads = "[...document.querySelectorAll('table.runs thead th')].filter((one) => one.checkVisibility()).length"
        few = browser.run(heads)
        browser.click("#all-columns")
        assert browser.run(heads) >= few + 8


@pytest.mark.long
def test_a_thousand_runs_open_in_two_seconds(browser, tmp_path):
    """Of CPU of the page's thread, from the file to a picture of it; what a screen reader is given is not in it."""
    write_page(tmp_path / "many.html", many_runs(1000))
    browser.call("Accessibility.disable")
    browser.call("Performance.enable", timeDomain="threadTicks")
    took = []
    for _ in range(3):
        browser.open(tmp_path / "many.html", height=800)
        browser.call("Page.captureScreenshot")
        told = browser.call("Performance.getMetrics")["metrics"]
        took.append(next(each["value"] for each in told if each["name"] == "TaskDuration"))
    browser.call("Accessibility.enable")
    assert browser.console == []
    assert 0.1 < min(took) < patient(2.0), took


@pytest.mark.long
def test_a_thousand_runs_are_sorted_and_filtered(browser, tmp_path):
    page = tmp_path / "many.html"
    write_page(page, many_runs(1000))
    browser.open(page)
    assert browser.console == []
    browser.click(STEP)
    texts = browser.run(
        "[...document.querySelectorAll('table.runs tbody tr')].map((line) => Number(line.cells[7].textContent))"
    )
    assert (len(texts), texts) == (1000, sorted(texts))
    browser.click("table.runs tbody a[href='#run-901']")
    browser.until("document.getElementById('run-901').checkVisibility()")
    browser.run("document.querySelector('#tools input').focus()")
    browser.call("Input.insertText", text="node failure")
    assert browser.run("document.querySelector('[role=status]').textContent") == "100 of 1000 runs"


def test_a_line_that_ends_early_has_its_name_at_its_end(browser, tmp_path):
    runs = [
        RunRead(megatron(run=f"n{count}", name="a"), curve(count, seed=count)) for count in (300, 299, 100, 101, 240)
    ]
    write_page(tmp_path / "early.html", runs)
    browser.open(tmp_path / "early.html", width=1440)
    texts = "[...document.querySelector('.plot').querySelectorAll('.name')]"
    browser.until(f"{texts}.length == 5")
    places = browser.run(f"{texts}.map((each) => [each.textContent, +each.getAttribute('x'), +each.getAttribute('y'), "
                         "each.classList.contains('early')])")  # fmt: skip
    early = {name: (x, y) for name, x, y, is_early in places if is_early}
    late = {x for _, x, _, is_early in places if not is_early}
    assert (len(early), len(late)) == (3, 1)
    assert all(x < max(late) for x, _ in early.values())
    (_, first), (_, second) = sorted(early.values())[:2]
    assert abs(first - second) >= 11, "names of two lines that end at one place are apart"
