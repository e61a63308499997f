"""Published rows become trainings; what cannot be used is left out with the field named.

A line `> ` of test_rows.txt has the fields in which a row is not the plain one (row_examples.py; None takes one out).
Below it is what its training, machine and figures have other than the plain row's, or why it is left out.

pytest tests/plan/test_rows.py --force-regen       after a change that is meant
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.errors import ConfigError
from tests.plan.published.programs import PROGRAMS
from tests.plan.published.rows import LeftOut, PublishedRow, read_rows, row_of
from tests.plan.row_examples import row

MADE = Path(__file__).with_suffix(".txt")


def test_what_becomes_of_a_row(request: pytest.FixtureRequest) -> None:
    found = []
    for line in MADE.read_text(encoding="utf-8").splitlines():
        if line.startswith((">", "#")) or not line:
            found.append(line)
        if line.startswith(">"):
            found.append(said(row_of(row(**eval(f"dict({line[2:]})")), 1, None)))
    text = "\n".join(found) + "\n"
    if request.config.getoption("force_regen"):
        MADE.write_text(text, encoding="utf-8")
    assert text.splitlines() == MADE.read_text(encoding="utf-8").splitlines()


def said(entry: PublishedRow | LeftOut) -> str:
    if isinstance(entry, LeftOut):
        return f"left out: {entry.reason}"
    plain = row_of(row(), 1, None)
    assert isinstance(plain, PublishedRow)
    before = dict(facts(plain))
    return (
        ", ".join(f"{name} {value}" for name, value in facts(entry) if before.get(name) != value) or "as the plain row"
    )


def facts(entry: PublishedRow) -> Iterator[tuple[str, Any]]:
    training = entry.training
    yield from (pair for pair in vars(training).items() if pair[0] not in ("shape", "program_states"))
    yield "program", next(name for name, states in PROGRAMS.items() if states is training.program_states)
    yield from (asdict(training.shape) | {"ffn": training.shape.mlp_width}).items()
    yield "padded_vocab", training.shape.padded_vocab
    yield from (("device", entry.machine.device), ("network", f"{entry.machine.network_gb_s:g} GB/s"))
    seconds, published = entry.published.step_s, entry.published
    yield "published", "no time" if seconds is None else f"{seconds:.6g} s"
    yield "memory", (published.memory_gib, published.memory_kind, *published.by_stage)
    yield from (("fits", published.fits), ("noisy", published.noisy), ("assumed", entry.assumed))


def test_both_shapes_of_file(tmp_path):
    (path := tmp_path / "rows.json").write_text(json.dumps({"note": "x", "rows": [row(), row(hidden=None), 5]}))
    rows = read_rows(path)
    assert [type(entry) for entry in rows.entries] == [PublishedRow, LeftOut, LeftOut]
    path.write_text(json.dumps({"clusters": {"a": [row()], "b": [row(), row(id=None, source=None)]}}))
    rows = read_rows(path)
    assert [(entry.cluster, entry.id, entry.source) for entry in rows.rows] == [
        ("a", "made-1", "made"), ("b", "made-1", "made"), ("b", "row 2", "b"),
    ]  # fmt: skip
    assert rows.rows[0].machine is rows.rows[1].machine


def test_a_file_of_neither_shape_or_none_is_refused_in_words(tmp_path):
    path = tmp_path / "rows.json"
    for text in ("", "{", "[]", '{"rows": 3}', '{"clusters": []}', '{"clusters": {"a": 3}}', "{}"):
        path.write_text(text)
        with pytest.raises(ConfigError) as raised:
            read_rows(path)
        assert '"rows"' in raised.value.hint
    with pytest.raises(ConfigError):
        read_rows(tmp_path / "none.json")
