"""resolved.json and its neighbours as anyone may have left them: refused or left out in words, never a fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.errors import UserError
from hpc_gpt.readers.runs.own_run import read_own
from hpc_gpt.runs.run_folder import RunFolder
from tests.made_runs import add_attempt, make_run, metrics_line

VALUES = (None, -1, 0, 10**400, 10**30, "x", "", [], {}, [[]], 1e308, float("nan"), float("inf"), True, "\ud800")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = make_run(tmp_path)
    attempt = add_attempt(made, [metrics_line(step) for step in range(1, 6)], device="cpu", cause="x")
    add_attempt(made, [metrics_line(step) for step in range(3, 8)], ended=None)
    (attempt.folder / "measured.json").write_text(json.dumps({"gpu_util_mean": 1.0, "skipped_shards": 2}))
    return made


def places(tables: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value stands in nested tables."""
    inner = tables.items() if isinstance(tables, dict) else ()
    return [at, *(found for key, value in inner for found in places(value, (*at, key)))]


def put(text: str, at: tuple[Any, ...], value: Any) -> Any:
    """The tables with another value in one place."""
    tables = json.loads(text)
    if not at:
        return value
    inner = tables
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return tables


NAMES = ("resolved.json", "submissions.jsonl", *(f"attempts/1/{name}.json" for name in ("attempt", "trainer", "ended")))


@pytest.mark.parametrize("name", [*NAMES, "attempts/1/measured.json"])
def test_any_value_in_any_place_is_read_or_refused_in_words(run: RunFolder, name: str) -> None:
    path = run.path / name
    whole = path.read_text()
    read = refused = 0
    for at in places(json.loads(whole)):
        for value in VALUES:
            path.write_text(json.dumps(put(whole, at, value)) + "\n")
            try:
                read_own(run).record.to_json()
                read += 1
            except UserError:
                refused += 1
    assert read
    assert bool(refused) == (name == "resolved.json")


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b"\xff\xfe", b"9" * 5000, b"null"])
def test_what_is_no_json_is_told(run: RunFolder, text: bytes) -> None:
    for name in NAMES[1:]:
        (run.path / name).write_bytes(text)
    read_own(run)
    (run.path / "resolved.json").write_bytes(text)
    with pytest.raises(UserError, match=r"resolved\.json cannot be read"):
        read_own(run)


def test_what_a_run_wrote_is_read_as_it_was(run: RunFolder) -> None:
    assert run.resolved().to_json() == (run.path / "resolved.json").read_text()
