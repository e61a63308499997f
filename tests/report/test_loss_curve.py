"""The static curve of a group: what is drawn, what it says of itself, and that it is whole."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.report.loss_curve import MOST_CURVES, _spread, _ticks, loss_curve
from tests.report.page.page_runs import HOSTILE


def drawn(*curves, title="Loss"):
    return ElementTree.fromstring(loss_curve(curves, title, "loss").markup)


def lines(root):
    return [one.get("d") for one in root.iter("path") if "line" in one.get("class", "")]


def texts(root):
    return [one.text for one in root.iter("text")]


STEPS = np.arange(1.0, 101)


def test_a_long_name_is_cut_to_its_end():
    assert "…1120-080000-00a1" in texts(drawn(("a-run-with-a-long-name/20261120-080000-00a1", STEPS, 20 / STEPS)))


def test_it_is_broken_at_nan_and_where_the_steps_go_back():
    losses = np.full(100, 2.0)
    losses[40:45] = np.nan
    (line,) = lines(drawn(("a", np.where(STEPS > 70, STEPS - 10, STEPS), losses)))
    assert line.count("M") == 3


def test_a_long_line_is_thin_and_keeps_its_spike():
    losses = np.ones(100_000)
    losses[77_777] = 50.0
    root = drawn(("a", np.arange(1e5), losses))
    (line,) = lines(root)
    assert line.count("L") <= 300
    assert min(float(up) for up in re.findall(r" ([\d.]+)", line)) < 30


def test_runs_beyond_the_colours_are_left_out():
    root = drawn(*((str(at), STEPS, STEPS) for at in range(20)))
    assert (len(lines(root)), lines(drawn())) == (MOST_CURVES, [])
    assert lines(drawn(("a", STEPS, np.full(100, np.nan)))) == []


def test_hostile_words_stay_words_and_it_needs_no_style():
    for text in HOSTILE:
        root = drawn((text, STEPS, STEPS), title=text)
        assert root.find("title").text == text
        assert {one.tag for one in root.iter()} == {"svg", "title", "desc", "g", "path", "text"}
        assert not [name for one in root.iter() for name in one.keys() if name == "style" or name.startswith("on")]  # noqa: SIM118


@pytest.mark.parametrize("figures", [[1e300, -1e300], [5e-324, 5e-324], [0.0, 5e-324], [1e308, 1e308], [-1.0, -2.0]])
def test_absurd_figures_are_drawn_somewhere(figures):
    root = drawn(("a", np.array([1.0, 1e14]), np.array(figures)))
    assert "nan" not in "".join(lines(root))
    assert len(texts(root)) < 40


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_multiples_of_one_two_or_five(low, wide):
    found = _ticks(low, low + wide)
    assert 2 <= len(found) <= 7
    step = found[1] - found[0]
    assert f"{step:.1e}"[0] in "125" or f"{step:.3g}"[0] in "125"


def test_labels_are_apart_and_inside():
    places = _spread([290, 291, 292, 293], 10, 294)
    assert np.diff(places).min() >= 13
    assert places[-1] == 294
    assert _spread([12, 13, 200], 10, 294) == [12, 25, 200]
