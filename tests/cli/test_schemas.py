"""What the verbs print with --json is as docs/schemas has it, and is all that is on stdout."""

import json
import re

import click
import pytest

from hpc_gpt.cli import group, verbs
from tests.cli.command import error_of, hpc_gpt, in_process
from tests.cli.schemas import FOLDER, TINY, faults, of_values, printed, with_kept


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_is_printed_is_as_the_schemas_have_it(tmp_path, long):
    seen = set()
    for verb, found in printed(tmp_path / "logs", long):
        seen.add(verb)
        assert list(faults(found, json.loads((FOLDER / f"{verb}.json").read_text()), verb)) == []
    assert seen >= {path.stem for path in FOLDER.iterdir()}


def test_every_verb_with_json_has_a_schema_that_help_prints():
    with click.Context(group) as ctx:
        commands = {name: group.get_command(ctx, name) for name in verbs()}
    having = {name for name, each in commands.items() if any("--json" in parameter.opts for parameter in each.params)}
    assert having >= {"submit", "stop", "save", "requeue", "cancel", "clean", "status", "report", "plan"}
    listed = in_process("help", "json").stdout.split()
    assert listed == sorted(having | {"help-keys"})
    for name in listed:
        assert json.loads(in_process("help", "json", name).stdout)["title"] == f"hpc-gpt {name} --json"
    done = in_process("help", "json", "stat")
    assert (done.code, error_of(done)[1]) == (2, "did you mean status?")


def test_a_key_that_goes_or_comes_unnoticed_is_found():
    schema = of_values([{"a": 1, "b": [{"c": "x"}]}, {"a": None, "b": []}])
    assert list(faults({"a": 2.5, "b": [{"c": None}]}, schema)) == []
    assert list(faults({"b": [{"c": "x", "d": 1}]}, schema)) == [".a is missing", ".b[0].d is not in the schema"]
    assert list(faults({"a": "x", "b": None}, schema)) == [".a is 'x', not of ['number', 'null']"]
    assert with_kept(of_values([{"a": 1}]), schema)["properties"].keys() == {"a", "b"}, "no key of a schema goes"


def test_stdout_is_one_object_and_stderr_has_the_rest(tmp_path):
    (tiny := tmp_path / "tiny.toml").write_text(TINY)
    done = hpc_gpt(
        "submit", tiny, "--cluster", "local", "--wait", "--json", environment={"OMP_NUM_THREADS": "1"}, code=0
    )
    answer = json.loads(done.stdout)
    assert list(faults(answer, json.loads((FOLDER / "submit.json").read_text()))) == []
    [run] = answer["runs"]
    assert (run["state"], run["layout"]) == ("done", "tp1-pp1-dp1")
    assert re.search(r"^started ", done.stderr, re.MULTILINE)
    for words in (["--resume", run["run"], "--until", "steps=9"], ["--branch", run["run"], "--until", "steps=9"]):
        [again] = json.loads(in_process("submit", *words, "--dry-run", "--json").stdout)["runs"]
        assert (again["run"], again["layout"]) == (None, "tp1-pp1-dp1")
    failed = in_process("submit", tiny, "--set", "train.lrr=1", "--json")
    assert (failed.code, failed.stdout) == (2, "")
