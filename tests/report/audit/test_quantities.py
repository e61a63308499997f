"""Numbers as printed: digits, units, rounding and cutting off, and what is no number."""

from __future__ import annotations

from decimal import ROUND_DOWN, ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.report.audit.quantities import Printed, read_printed, show

figures = st.decimals(min_value=-1_000_000, max_value=1_000_000, places=9, allow_nan=False)
digits = st.integers(0, 6)


@pytest.mark.parametrize(
    ("text", "value", "quantum", "unit"),
    [
        ("0.661s", "0.661", "0.001", "s"),
        ("48B", "48", "1", "B"),
        ("118.38", "118.38", "0.01", None),
        ("8.50", "8.5", "0.01", None),
        ("43", "43", "1", None),
        ("1,024", "1024", "1", None),
        ("482,427.5", "482427.5", "0.1", None),
        ("1 024", "1024", "1", None),
        ("1_024", "1024", "1", None),
        ("1.2e3", "1200", "100", None),
        ("−3.5", "-3.5", "0.1", None),
        ("45.2%", "45.2", "0.1", "%"),
        ("80.6 s", "80.6", "0.1", "s"),
        ("1.4 B", "1.4", "0.1", "B"),
        ("96.0K tokens/s", "96", "0.1", "K tokens/s"),
        ("1.4 B parameters", "1.4", "0.1", "B parameters"),
        ("22.8 tokens/s", "22.8", "0.1", "tokens/s"),
        ("**36.79**", "36.79", "0.01", None),
        ("`43`", "43", "1", None),
        ("[43](#log)", "43", "1", None),
        ("43[^2]", "43", "1", None),
        ("43†", "43", "1", None),
        ("<b>43</b>", "43", "1", None),
        ("16 (peak)", "16", "1", None),
        (".5", "0.5", "0.1", None),
        ("5.", "5", "1", None),
    ],
)
def test_a_cell(text, value, quantum, unit):
    found = read_printed(text)
    assert isinstance(found, Printed), found
    assert (found.value, found.quantum, found.unit) == (Fraction(value), Fraction(quantum), unit)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "blank"),
        ("  ", "blank"),
        ("-", "blank"),
        ("—", "blank"),
        ("n/a", "blank"),
        ("~5", "approximate"),
        ("≈ 5", "approximate"),
        (">120K", "approximate"),
        ("<5", "approximate"),
        ("about 5", "approximate"),
        ("71.9 +/- 22.0", "spread"),
        ("5 ± 1", "spread"),
        ("12-14", "range"),
        ("12–14", "range"),
        ("12 to 14", "range"),
        ("12,83", "comma"),
        ("OOM", "no number"),
        ("gpt2-xl", "no number"),
        ("16 (4x4)", "more than a number"),
        ("12:30", "more than a number"),
        ("1/2", "more than a number"),
        ("1.2.3", "more than a number"),
        ("3 4 5", "more than a number"),
        ("~~43~~", "struck out"),
        ("9" * 41, "beyond any"),
        ("9" * 1_000_000, "too long"),
        ("1e999", "beyond any"),
        ("1e99999999", "beyond any"),
        ("0x10", "more than a number"),
        ("\x1b[31m5", "no number"),
    ],
)
def test_what_is_no_number_says_why(text, why):
    found = read_printed(text)
    assert isinstance(found, str)
    assert why in found


@given(figures, digits)
def test_a_figure_rounded_or_cut_off_is_what_it_was(figure, places):
    quantum = Decimal(1).scaleb(-places)
    for way in (ROUND_HALF_UP, ROUND_HALF_EVEN, ROUND_DOWN):
        text = format(figure.quantize(quantum, way), "f")
        found = read_printed(text)
        assert isinstance(found, Printed)
        assert found.says(Fraction(figure)), (text, figure)


@given(figures, digits, st.integers(2, 1000))
def test_a_last_digit_that_is_off_by_two_is_another_figure(figure, places, off):
    quantum = Decimal(1).scaleb(-places)
    for sign in (1, -1):
        found = read_printed(format(figure.quantize(quantum, ROUND_DOWN) + sign * off * quantum, "f"))
        assert isinstance(found, Printed)
        assert not found.says(Fraction(figure))


@given(figures, digits)
def test_a_range_holds_what_the_number_says(figure, places):
    found = read_printed(format(abs(figure).quantize(Decimal(1).scaleb(-places), ROUND_DOWN), "f"))
    assert isinstance(found, Printed)
    low, high = found.range
    assert low <= abs(Fraction(figure)) <= high


def test_the_seeds_own_cases():
    assert read_printed("26.5").says(Fraction("26.459"))  # rounded
    assert read_printed("43").says(Fraction("43.9"))  # cut off
    assert not read_printed("26.5").says(Fraction("26.6587"))  # 26.7 or 26.6
    assert not read_printed("43").says(Fraction("44"))


@given(figures, digits)
def test_show_is_half_up(figure, places):
    expected = format(figure.quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP), "f")
    assert Decimal(show(Fraction(figure), places)) == Decimal(expected)
    assert show(Fraction(figure), places).lstrip("-") == expected.lstrip("-")


@given(st.text(max_size=60))
def test_any_text_is_a_number_or_says_why(text):
    found = read_printed(text)
    assert isinstance(found, Printed) or found
