"""resolved.json and its neighbours as anyone may have left them: refused or left out in words, never a fault."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.cluster import ClusterProfile, list_profiles
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.experiment_file import list_experiments, read_experiment
from hpc_gpt.core.tables import merge_tables, read_toml
from hpc_gpt.core.typed_tables import check_tables
from hpc_gpt.reader.runs.own_run import read_own
from tests.cli.command import error_of, in_process
from tests.conftest import REPOSITORY
from tests.made_runs import add_attempt, make_run, metrics_line

VALUES = (None, -1, 0, 10**400, 10**30, "x", "", [], {}, [[]], 1e308, float("nan"), float("inf"), True, "\ud800")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = make_run(tmp_path)
    attempt = add_attempt(made, 5, device="cpu", cause="x")
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


def test_a_byte_order_mark_is_no_part_of_a_toml_file(tmp_path):
    (file := tmp_path / "a.toml").write_text('name = "é"\n', encoding="utf-8-sig")
    assert file.read_bytes().startswith(b"\xef\xbb\xbf")
    assert read_toml(file) == {"name": "é"}


DEEP, LONG = "[" * 3000 + "]" * 3000, "1" * 5000


@pytest.mark.parametrize(
    "text", [f"a = {DEEP}", f"a = {'{b = ' * 3000}1{'}' * 3000}", f"{'a.' * 5000}a = 1", f"a = {LONG}"],
    ids=["lists", "tables", "a key", "a number"],
)  # fmt: skip
def test_a_toml_that_python_itself_cannot_take_is_a_line(tmp_path, text: str) -> None:
    (file := tmp_path / "a.toml").write_text(text)
    for words in (("submit", file, "--dry-run"), ("submit", "demo", "--cluster", file, "--dry-run")):
        error, hint = error_of(in_process(*words, code=2))
        assert re.fullmatch(r".*a\.toml: .{20,120}", error)
        assert hint


@pytest.mark.parametrize("words", [f"train.lr={DEEP}", f"train.seed={LONG}", f"{'a.' * 5000}a=1"], ids=len)
def test_a_set_that_python_itself_cannot_take_is_a_line(words: str) -> None:
    error, hint = error_of(in_process("submit", "demo", "--dry-run", "--set", words, code=2))
    assert len(error) < 1000
    assert hint


def test_every_shipped_file_reads_as_pydantic_reads_it() -> None:
    listed: list[tuple[Any, Any]] = []
    for name in list_experiments():
        file = read_experiment(name)
        listed += [(Experiment, merge_tables(file.tables, row.overrides)) for row in file.possible or ()]
        listed += [(Experiment, file.tables)] if file.rows is None else []
    listed += [(ClusterProfile, {"name": name, **read_toml(path)}) for name, path in list_profiles().items()]
    adapters = {kind: TypeAdapter(kind) for kind in (Experiment, ClusterProfile)}
    for kind, tables in listed:
        with contextlib.suppress(KeyError):
            tables.pop("extends")
        assert repr(check_tables(tables, kind, "")) == repr(adapters[kind].validate_python(tables))


@pytest.mark.parametrize(
    ("kind", "path"),
    [(Experiment, "experiments/demo.toml"), (ClusterProfile, "templates/clusters/jean-zay-v100-32g.toml")],
)
def test_a_value_is_read_as_pydantic_reads_it_or_refused(kind: Any, path: str) -> None:
    adapter = TypeAdapter(kind)
    tables = {"name": "x", **read_toml(REPOSITORY / path)}
    taken = refused = 0
    for at in places(tables)[1:]:
        for value in (*VALUES, 1, 0.5, "cosine", "auto", [1, 2], [0.5], ["a"], {"a": 1}, {"bf16": 312}):
            given = put(json.dumps(tables), at, value)
            try:
                found = check_tables(given, kind, "")
            except UserError:
                refused += 1
            else:
                taken += 1
                assert repr(found) == repr(adapter.validate_python(given)), f"{at} {value!r}"
    assert taken > 20 < refused
