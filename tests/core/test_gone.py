"""A verb, option or key of `GONE` is refused in one line that says what is in its place; what it left is still read."""

import json

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.gone import GONE, split_gone
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.resolved import Resolved, config_hash
from hpc_gpt.core.typed_tables import check_tables, key_in
from tests.cli.command import error_of, in_process
from tests.made_runs import a_run
from tests.programs import put

TABLES = [name for name in GONE if name.startswith("[")]
KEYS = [name for name in GONE if "." in name.split(" ")[0]]
WORDS = [name for name in GONE if name not in (*KEYS, *TABLES)]
EXAMPLE = "job.retry_after_exit_0"


def other_value(name: str) -> object:
    """A value of a gone key that is not its default; for `key = value` that value."""
    _, _, value = name.partition(" = ")
    default = GONE[name].default
    if value:
        return value
    return not default if isinstance(default, bool) else default + 1 if isinstance(default, int | float) else "x"


def tables_of(name: str, value: object) -> dict:
    table, _, key = name.partition(" = ")[0].rpartition(".")
    return {table: {key: value}}


@pytest.mark.parametrize("name", WORDS)
def test_a_verb_or_option_is_refused(name: str) -> None:
    done = in_process(*name.split(), code=2)
    assert error_of(done) == (f"{name} is gone since {GONE[name].version}", GONE[name].instead)


@pytest.mark.parametrize("name", KEYS)
def test_a_key_is_refused_and_its_default_is_taken(name: str) -> None:
    key, _, value = name.partition(" = ")
    assert (key_in(Experiment, key)[0] is None) is (not value), "a key that is gone is not there"
    with pytest.raises(ConfigError) as fault:
        check_tables(tables_of(name, other_value(name)), Experiment, "x.toml")
    assert str(fault.value) == f"x.toml: {name} is gone since {GONE[name].version}"
    assert fault.value.hint == GONE[name].instead
    if not value:
        assert check_tables(tables_of(name, GONE[name].default), Experiment, "x.toml") == Experiment()


@pytest.mark.parametrize("name", KEYS)
def test_stored_settings_lose_it_and_say_so(name: str) -> None:
    value = other_value(name)
    said = name if " = " in name else f"{name} = {value}"
    assert split_gone(tables_of(name, value)) == ({name.partition(".")[0]: {}}, (said,))
    if " = " not in name:
        assert split_gone(tables_of(name, GONE[name].default)) == ({name.partition(".")[0]: {}}, ())


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_refused_and_stored_settings_lose_it(name: str) -> None:
    tables = {name.strip("[]"): {"key": 1}}
    with pytest.raises(ConfigError) as fault:
        check_tables(tables, Experiment, "x.toml")
    assert (str(fault.value), fault.value.hint) == (f"x.toml: {name} is gone since {GONE[name].version}",
                                                    GONE[name].instead)  # fmt: skip
    assert split_gone(tables) == ({}, (name,))
    assert split_gone({name.strip("[]"): {}}) == ({}, ())


def test_an_older_run_is_read_and_not_continued() -> None:
    run = a_run(5, ended=None, saved=[5])
    stored = json.loads((run.path / "resolved.json").read_text())
    before = config_hash(run.resolved())
    stored["job"]["retry_after_exit_0"] = True
    (run.path / "resolved.json").write_text(json.dumps(stored))
    resolved = Resolved.from_json(json.dumps(stored))
    assert (resolved.gone, config_hash(resolved)) == ((f"{EXAMPLE} = True",), before)
    for verb in ("status", "report", "why"):
        assert in_process(verb, run.path).code == 0
    for words in (("submit", "--resume", run.path), ("submit", "--branch", f"{run.path}@5"), ("requeue", run.path)):
        done = in_process(*words, "--yes", code=None)
        assert f"has {EXAMPLE} = True, gone since 0.4" in done.stdout + done.stderr, words
        assert done.code != 0


@pytest.mark.parametrize("name", [name for name in KEYS if not GONE[name].stops])
def test_an_older_run_goes_on_without_a_key_that_stops_none(name: str) -> None:
    run = a_run(5, ended="stopped", saved=[5])
    stored = json.loads((run.path / "resolved.json").read_text())
    table, _, key = name.partition(".")
    before = config_hash(run.resolved())
    stored[table][key] = other_value(name)
    stored["version"] = "0.4.0"
    (run.path / "resolved.json").write_text(json.dumps(stored))
    assert config_hash(Resolved.from_json(json.dumps(stored))) == before
    for verb in ("status", "report", "why"):
        assert in_process(verb, run.path).code == 0
    for words in (("--resume", run.path), ("--branch", f"{run.path}@5")):
        done = in_process("submit", *words, "--dry-run", code=0)
        said = f"note: {name} = {other_value(name)} is gone since {GONE[name].version}, and has no effect any more: "
        assert said + GONE[name].instead in done.stderr


AFTER = f"[after] is gone since 0.5, and {{}}: {GONE['[after]'].instead}\n"


@pytest.mark.parametrize(
    ("words", "effect"),
    [
        (("--resume", "{run}"), "takes effect as long as the run keeps its own code"),
        (("--resume", "{run}", "--set", "train.log_every=2"), "has no effect any more"),
        (("--branch", "{run}@5"), "has no effect any more"),
    ],
    ids=["as it is", "anew", "a branch"],
)
def test_a_run_with_jobs_after_checkpoints_is_continued(tmp_path, monkeypatch, words, effect) -> None:
    """A run of 0.4 with [after], with the folder of one of its jobs; Slurm knows no job any more."""
    for client in ("sbatch", "squeue", "sacct", "scontrol"):
        put(tmp_path / "clients" / client, "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path / "clients"), prepend=":")
    run = a_run(5, ended="stopped", saved=[5], cluster="generic-slurm")
    stored = json.loads((run.path / "resolved.json").read_text())
    stored |= {"version": "0.4.0", "after": {"run": "python evaluate.py {checkpoint}", "every": 2}}
    (run.path / "resolved.json").write_text(json.dumps(stored))
    (run.path / "code.zip").touch()
    (job := run.path / "after" / "step-5").mkdir(parents=True)
    (job / "job.json").write_text('{"job_id": "4712", "time": 1.0}\n')
    (run.path / "after" / "seen.json").write_text('{"step": 5, "count": 1}\n')
    for verb in ("status", "report", "why", "clean"):
        assert in_process(verb, run.path).code == 0
    done = in_process("submit", *(word.format(run=run.path) for word in words), "--dry-run", code=0)
    assert f"note: {AFTER.format(effect)}" in done.stderr
