"""What the text of an argument is: a whole number, the first that is given, a quotient."""

from pathlib import Path

import pytest

from hpc_gpt.reader.dialects import dialects
from hpc_gpt.reader.pattern import Arguments, quotient

ARGUMENTS = Path(__file__).with_name("arguments.txt")


def test_what_a_dump_says() -> None:
    """arguments.txt: below a dialect's name a dump a line, and all the fields that it gives."""
    interpret = {dialect.name: dialect.interpret for dialect in dialects() if dialect.interpret}
    for line in ARGUMENTS.read_text(encoding="utf-8").splitlines()[1:]:
        if line.startswith("["):
            says = interpret.pop(line.strip("[]"))
            continue
        halves = [[pair.rpartition("=") for pair in half.split()] for half in line.split("->")]
        given, said = ({name: text.replace("~", " ") for name, _, text in half} for half in halves)
        assert {name: str(value) for name, value in says(given).items()} == said, line
    assert not interpret


@pytest.mark.parametrize("text", ["", "None", "many", "1.5", "1e400", "nan", "9" * 5000, "inf"])
def test_what_is_no_whole_number_is_none(text: str) -> None:
    assert Arguments({"n": text}).whole("n") is None


def test_the_first_name_that_is_there_counts() -> None:
    given = Arguments({"a": "None", "b": " 2.0 ", "c": "True", "d": "False"})
    assert (given.whole("a", "b"), given.text("a"), given.text("b")) == (2, None, "2.0")
    assert (given.true("c", "d"), given.true("d"), given.true("e")) == (True, False, None)


def test_a_quotient_that_does_not_divide_is_none() -> None:
    assert (quotient(64, 4, 16), quotient(64, 5), quotient(64, None), quotient(None, 2), quotient(64, 0)) == (
        1,
        None,
        None,
        None,
        None,
    )
