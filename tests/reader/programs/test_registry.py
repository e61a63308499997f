"""A dialect is read as soon as its module is in the folder, and no other file names it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_gpt.reader import failures, programs
from hpc_gpt.reader.lines import dialects, matches
from tests.reader.reading import read_lines

MODULE = """
from hpc_gpt.reader.lines.pattern import Dialect, Pattern

DIALECT = Dialect(
    name="made_up",
    patterns=(
        Pattern("step", r"lap (?P<step>[0-9]+): (?P<step_ms>[0-9.]+) ms, furlongs (?P<loss>[0-9.]+);"),
    ),
)
"""


def _forget() -> None:
    for cached in (dialects.dialects, matches.all_patterns, matches.patterns_by_literal, dialects.dialects_by_name):
        cached.cache_clear()


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "made_up.py").write_text(MODULE)
    monkeypatch.setattr(programs, "__path__", [*programs.__path__, str(tmp_path)])
    _forget()
    yield
    monkeypatch.undo()
    sys.modules.pop(f"{programs.__name__}.made_up", None)
    _forget()


@pytest.mark.usefixtures("made_up")
def test_a_module_put_beside_the_others_is_read() -> None:
    assert "made_up" in [dialect.name for dialect in dialects.dialects()]
    [part] = read_lines("log", ["12: lap 3: 250.0 ms, furlongs 1.5;"])
    assert part.steps["made_up"]["step_s"].tolist() == [0.25]
    assert part.steps["made_up"]["loss"].tolist() == [1.5]


def test_a_dialect_has_a_name_of_its_own() -> None:
    """A dialect that is alone in its module has the module's name."""
    names = [dialect.name for dialect in dialects.dialects()]
    assert names == sorted(set(names))
    for name, module in sys.modules.items():
        if name.startswith((f"{programs.__name__}.", f"{failures.__name__}.")) and hasattr(module, "DIALECT"):
            assert module.DIALECT.name == name.rpartition(".")[2]
