"""A plan's page in a real browser."""

import pytest

from hpc_gpt.planner.plan_page import build_plan_page, write_plan_page
from tests.report.page.test_in_chromium import CONTRASTS, OVERFLOW
from tests.report.plan_searches import searched_for

HOSTILE = "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'>"

pytestmark = pytest.mark.xdist_group("chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    file = tmp_path_factory.mktemp("plan") / "plan.html"
    searched, model = searched_for()
    write_plan_page(file, searched, 300e9, f"48b {HOSTILE}", model.params, "hpc-gpt submit")
    return file


def test_it_is_quiet_asks_for_nothing_and_runs_nothing(browser, page):
    for dark in (False, True):
        browser.open(page, dark=dark)
        assert (browser.console, browser.requests) == ([], [page.as_uri()])
        assert browser.run("typeof window.hacked") == "undefined"
    assert HOSTILE in browser.run("document.querySelector('h1').textContent")
    assert browser.run("document.scripts.length") == 0


def test_the_policy_stops_a_script_that_got_in_all_the_same(browser, page, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(page.read_text().replace("<main>", "<main><script>window.hacked=1</script>"))
    browser.open(bad)
    assert browser.run("typeof window.hacked") == "undefined"
    assert any("Content Security Policy" in words for words in browser.console)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_lines_stand_out(browser, page, dark):
    browser.open(page, dark=dark)
    # A hatch is of the ground's colour, on the colour of its part.
    worst = browser.run(CONTRASTS.replace('["grid", "frame"]', '["grid", "frame", "hatch"]'))
    assert worst["texts"] > 200
    assert worst["text"][0] >= 4.5, worst
    assert worst["stroke"][0] >= 3, worst


@pytest.mark.parametrize("width", [390, 1280])
def test_tables_scroll_and_the_page_does_not(browser, page, width):
    browser.open(page, width=width)
    browser.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert browser.run(OVERFLOW) == [width, width]


def test_the_best_and_its_command_stand_before_the_table(browser, page):
    for width in (390, 1440):
        browser.open(page, width=width)
        parts = "['#best-h', '#best .command', '.plans'].map((one) => document.querySelector(one))"
        best, command, table = browser.run(f"{parts}.map((one) => one.getBoundingClientRect().y)")
        assert best < command < table
        assert command < 844, "on the first screen of a phone"
    first = searched_for()[0].candidates[0]
    assert browser.run("document.querySelector('#best-h').textContent") == f"Best: {first.layout}"
    assert f"{first.need_gib:.1f} of " in browser.run("document.querySelector('#best').textContent")


def test_a_phone_shows_memory_and_step_without_scrolling(browser, page):
    browser.open(page, width=390)
    edge, rows = browser.run("""
    [document.querySelector('.scroll').getBoundingClientRect().right,
     [...document.querySelectorAll('.plans tr')].map((row) =>
       [...row.cells].slice(0, 3).map((cell) => [cell.textContent.trim(), cell.getBoundingClientRect().right]))]
    """)
    assert [text.replace("\u00a0", " ").split(" of ")[0] for text, _ in rows[0]] == ["Layout", "Memory GiB", "Step s"]
    assert max(right for row in rows for _, right in row) <= edge


def test_at_a_usual_width_the_layouts_are_seen_without_scrolling(browser, tmp_path):
    """With the longest of settings: those of an offload, with the memory of the host."""
    searched, model = searched_for("7.5b", gpus=8, cluster="jean-zay-v100-16g")
    write_plan_page(tmp_path / "p.html", searched, 300e9, "7.5b", model.params, "hpc-gpt submit")
    browser.open(tmp_path / "p.html", width=1280)
    wide, box = browser.run("(one => [one.scrollWidth, one.clientWidth])(document.querySelector('.scroll'))")
    assert " (host " in browser.run("document.querySelector('.plans').textContent")
    assert wide == box


def test_every_drawing_has_words_and_parts_marks_beside_colours(browser, page):
    browser.open(page)
    met = browser.roles()
    images = {name: words for role, name, words in met if role == "image"}
    assert "Time of a step by layout" in images
    assert sum(name.startswith("Memory of tp") for name in images) >= 5
    assert all(images)
    assert all("GiB" in words or " s: " in words for words in images.values())
    assert next(name for role, name, _ in met if role == "heading").startswith("Plan of 48b")
    assert {name for role, name, _ in met if role == "columnheader"} >= {"Layout", "Engine", "Tokens/s"}
    shares = "[...document.querySelectorAll('.share')].map((one) => one.getAttribute('class').slice(-1))"
    hatched = "[...document.querySelectorAll('rect[fill]')].map((one) => one.getAttribute('fill'))"
    places = browser.run(shares)
    assert set(browser.run(hatched)) == {f"url(#hatch-{place})" for place in set(places) - {"0"}}
    assert browser.run("[...document.querySelectorAll('pattern')].map((one) => one.id).length") == 9


def test_bars_are_as_long_as_what_they_stand_for(browser, page):
    browser.open(page)
    # The first memory chart: a stage's parts end where its figure says, against the card's line.
    got = browser.run("""
    (() => {
      const chart = document.querySelector('#memory svg[role=img]');
      const parts = [...chart.querySelectorAll('.share')].map((one) => one.getBBox());
      const first = parts.filter((box) => Math.abs(box.y - parts[0].y) < 1);
      const last = first[first.length - 1];
      const card = chart.querySelector('.card').getBBox().x;
      return (last.x + last.width - first[0].x) / (card - first[0].x);
    })()
    """)
    searched, _ = searched_for()
    best = searched.candidates[0]
    assert got == pytest.approx(best.memory.stages[0].nvidia_smi / best.card_gib, abs=0.01)


def test_a_bar_that_does_not_fit_ends_outside_its_frame(browser, page):
    browser.open(page)
    rows = browser.run("""
    [...document.querySelectorAll('.plans tbody tr')].map((row) => {
      const ends = [...row.querySelectorAll('svg .bar')].map((one) => one.getBoundingClientRect().right);
      const edge = row.querySelector('svg').getBoundingClientRect().right;
      const frame = row.querySelector('svg .frame').getBoundingClientRect().right;
      return [row.querySelector('.why').textContent, Math.max(...ends) - frame, edge - Math.max(...ends)];
    })
    """)
    assert {"does not fit: " in why for why, _, _ in rows} == {False, True}
    for why, beyond, inside in rows:
        assert (beyond > 3) is ("does not fit: " in why), (why, beyond)
        assert inside >= 0  # nothing is cut off
    lengths = [beyond for why, beyond, _ in rows if "does not fit: " in why]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 3


def test_rows_have_a_colour_and_the_words_for_it(browser, page):
    browser.open(page)
    looks = browser.run("""
    [...document.querySelectorAll('.plans tbody tr')].map((row) => {
      const [, why] = [row.cells[0], row.querySelector('.why')].map((cell) => getComputedStyle(cell).color);
      return [row.className, why, getComputedStyle(row.cells[1]).backgroundColor, row.textContent];
    })
    """)
    colours = {}
    for kind, why, ground, text in looks:
        assert colours.setdefault(kind, (why, ground)) == (why, ground)
        assert (kind == "best") is text.endswith("best")
        assert (kind == "tight") is (" tight" in text)
        assert (kind == "impossible") is ("does not fit: " in text)
    assert set(colours) == {"", "best", "tight", "impossible"}
    assert len(set(colours.values())) == 4


def test_what_is_above_the_card_is_red(browser, page):
    browser.open(page)
    red = "(one => { one.style.color = 'var(--bad)'; return getComputedStyle(one).color; })(document.body)"
    fills = browser.run("[...document.querySelectorAll('.over')].map((one) => getComputedStyle(one).fill)")
    assert set(fills) == {browser.run(red)}
    rows = browser.run("[...document.querySelectorAll('.plans tr')].map((row) => "
                       "[row.className === 'impossible', row.querySelectorAll('.over').length > 0])")  # fmt: skip
    assert {has for impossible, has in rows if impossible} == {True}
    assert {has for impossible, has in rows if not impossible} == {False}
    charts = browser.run("""
    [...document.querySelectorAll('#memory svg[role=img]')].map((chart) => {
      const card = chart.querySelector('line.card').getBoundingClientRect().x;
      return [...chart.querySelectorAll('.over')].map((one) => one.getBoundingClientRect().x - card);
    })
    """)
    assert sum(map(bool, charts)) == 1, "of the layout that does not fit"
    assert all(abs(away) < 1.5 for away in charts[-1]), "it begins at the card"


def test_no_layout_is_broken_over_two_lines(browser, page):
    for width in (390, 1280):
        browser.open(page, width=width)
        lines = "[...document.querySelectorAll('.plans tbody th')].map((one) => one.firstChild).map((text) => {"
        lines += (
            "const range = document.createRange(); range.selectNode(text); return range.getClientRects().length; })"
        )
        assert set(browser.run(lines)) == {1}


@pytest.mark.parametrize("width", [390, 1280])
def test_labels_of_charts_have_the_size_of_text(browser, page, width):
    browser.open(page, width=width)
    sizes = browser.run("""
    [...document.querySelectorAll('.charts text')].map((one) => {
      const box = one.getBoundingClientRect();
      return [box.height, box.right - one.closest('svg').getBoundingClientRect().right];
    })
    """)
    assert len(sizes) > 50
    assert min(height for height, _ in sizes) >= 12
    assert max(beyond for _, beyond in sizes) <= 0


@pytest.mark.long
def test_it_prints(browser, page):
    browser.open(page)
    assert browser.pdf().startswith(b"%PDF")


def test_a_plan_that_fits_nowhere_is_still_a_page():
    searched, model = searched_for("193b", 16, offload="none")
    assert not searched.candidates
    text = build_plan_page(searched, 300e9, "193b", model.params, "")
    assert "does not fit: " in text
    assert "Time of a step" not in text
