"""The lines of a job script: they are read, never run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.slurm.script_lines import arithmetic, assignment, expand, logical_lines


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("A=; b", ("A", "", True)),
        ("A= b", ("A", "", True)),
        ("A=b#c d", ("A", "b", True)),
        ('export A="b \\"c\\" $D" e', ("A", 'b \\"c\\" $D', True)),
        ("local A='$b c'", ("A", "$b c", False)),
        ("declare -r A=''", ("A", "", False)),
        ("A=$((1 + (B * 2))) c", ("A", "$((1 + (B * 2)))", True)),
        ("A=$((1", None),
        ("A+=b", None),
        ("1A=b", None),
        ("a b=c", None),
    ],
)
def test_assignments(line, found):
    assert assignment(line) == found


def test_lines_that_go_on():
    text = 'a \\\nb\n# c \\\nd "e\nf" g\n\nh \\'
    assert [*logical_lines(text)] == [(1, "a  b"), (3, "# c \\"), (4, 'd "e f" g'), (6, ""), (7, "h  ")]


@given(st.text(alphabet="$(){}+-*/%A1b \"'`\\\n=#;", max_size=300))
def test_no_text_is_too_odd(text):
    for _, line in logical_lines(text):
        found = assignment(line)
        if found:
            expand(found[1], {"A": "$A$A", "b": "1"})
    arithmetic(text, {"A": "7"})


NUMBERS = st.integers(0, 10**6)


@given(NUMBERS, NUMBERS, st.integers(1, 10**6), st.sampled_from("+-*"))
def test_arithmetic_is_a_shells(one, two, three, sign):
    worked = {"+": one + two, "-": one - two, "*": one * two}[sign]
    towards_zero = abs(worked) // three * (1 if worked >= 0 else -1)
    assert arithmetic(f"(X {sign} {two}) / {three}", {"X": str(one)}) == towards_zero
    assert expand(f"$(( (X {sign} {two}) % {three} ))", {"X": str(one)}) == str(worked - towards_zero * three)


def test_what_is_no_arithmetic_is_unknown():
    for text in ("", "1 +", "1 / 0", "X", "(1", "1 2", "9" * 400, "(" * 99 + "1" + ")" * 99, "1 * " * 99 + "1"):
        assert arithmetic(text, {}) in (None, 1)
    assert arithmetic("999999999999999 * 999999999999999", {}) is None
    assert (expand("$(ls) ${X} `y`", {}), expand("$X-${Y:-3}", {"X": "1"})) == ("$(ls) ${X} `y`", "1-3")
