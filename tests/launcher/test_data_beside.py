"""A relative data.path: beside the file that states it, then here, then in the data folder; and it stays so for the
run."""

import os
from pathlib import Path

import pytest

from hpc_gpt.core.runs.find_runs import find_run
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher import submission
from hpc_gpt.launcher.resumption import check_resumption
from hpc_gpt.launcher.submission import SubmittedRun
from hpc_gpt.trainer.tokens.build import build_tokens
from hpc_gpt.trainer.tokens.run_data import data_path, ensure_data, located
from tests.cli.command import error_of, in_process

TEXT = "some words to make tokens of, and some more of them; " * 400


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`ex/base.toml` names c.tokens, `below/child.toml` extends it; the current folder is another one."""
    for name in ("ex", "below", "here", "elsewhere", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "ex/base.toml").write_text(
        'extends = "demo"\n[data]\nsource = "tokens"\npath = "c.tokens"\n[train]\nsteps = 30\n'
    )
    (tmp_path / "below/child.toml").write_text('extends = "../ex/base"\n[train]\nsteps = 40\n')
    monkeypatch.setenv("HPC_GPT_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path / "here")
    # Nothing is started.
    for module in (submission, submission):
        monkeypatch.setattr(module, "start_run", lambda run, *_: SubmittedRun(run, run.resolved(), "1"))
    return tmp_path


def make(folder: Path, text: str = TEXT) -> Path:
    (folder / "c.txt").write_text(text)
    return build_tokens(folder / "c.txt", folder / "c.tokens").path


def submitted(*arguments: object) -> RunFolder:
    done = in_process("submit", *arguments, "--cluster", "local", code=0)
    return find_run(done.stdout.split()[1], Path(os.environ["HPC_GPT_LOGS"]))


def read_by(run: RunFolder) -> Path | None:
    return ensure_data(located(run.resolved(), run.data_beside))


@pytest.mark.parametrize("experiment", ["../ex/base.toml", "../below/child.toml"])
def test_the_file_beside_the_one_that_states_it_is_read(folders, experiment):
    wanted = make(folders / "ex")
    run = submitted(experiment)
    assert read_by(run).samefile(wanted)
    assert run.resolved().data.path == "c.tokens", "as it was written"
    assert str(folders) not in run.job_script.read_text()


def test_a_later_copy_or_another_folder_changes_nothing(folders, monkeypatch):
    wanted = make(folders / "ex")
    run = submitted("../ex/base.toml")
    monkeypatch.chdir(folders / "elsewhere")
    make(folders / "elsewhere", TEXT + "another")
    assert check_resumption(run) == (run.resolved(), None)
    assert read_by(run).samefile(wanted)
    wanted.unlink()
    assert read_by(run) == Path("c.tokens"), "and without it the current folder's"


def test_two_files_of_the_name_are_a_fault_that_names_both(folders):
    make(folders / "ex")
    make(folders / "here")
    for verb in ("render", "submit"):
        message, hint = error_of(in_process(verb, "../ex/base.toml", "--cluster", "local", code=2))
        assert "data.path c.tokens is ambiguous: " in message
        assert "/ex/c.tokens" in message
        assert str(folders / "here/c.tokens") in message
        assert "absolute path" in hint
    assert not (folders / "logs").exists()
    (folders / "here/c.tokens").unlink()
    (folders / "here/c.tokens").hardlink_to(folders / "ex/c.tokens")
    in_process("render", "../ex/base.toml", "--cluster", "local", code=0)


def test_where_the_file_has_none_beside_it_the_other_places_stay(folders):
    wanted = make(folders / "data")
    assert read_by(submitted("../ex/base.toml")).samefile(wanted)
    wanted = make(folders / "here")
    assert read_by(submitted("../ex/base.toml")).samefile(wanted)


def test_a_command_lines_path_is_not_looked_for_beside_a_file(folders):
    make(folders / "ex")
    wanted = make(folders / "here")
    run = submitted("../ex/base.toml", "--set", "data.path=c.tokens")
    assert run.data_beside is None
    assert read_by(run).samefile(wanted)


def test_a_row_states_its_own(folders):
    wanted = make(folders / "below")
    make(folders / "ex")
    rows = '[rows]\n"own" = { data.path = "c.tokens" }\n"inherits" = { train.steps = 3 }\n'
    (folders / "below/table.toml").write_text(f'extends = "../ex/base"\n{rows}')
    assert read_by(submitted("../below/table.toml", "--row", "own")).samefile(wanted)
    assert read_by(submitted("../below/table.toml", "--row", "inherits")).samefile(folders / "ex/c.tokens")


@pytest.mark.parametrize("data", ['source = "stdlib"', 'source = "stream"\npath = "stdlib"', 'source = "random"'])
def test_the_standard_library_is_no_path(folders, data):
    (folders / "ex/stdlib").write_text("")
    (folders / "ex/base.toml").write_text(f'extends = "demo"\n[data]\n{data}\n')
    run = submitted("../ex/base.toml")
    assert run.data_beside is None
    assert data_path(located(run.resolved(), folders / "ex")) == data_path(run.resolved())


def test_a_prefix_and_an_absolute_path(folders):
    make(folders / "ex")
    (folders / "ex/c.txt").write_text(TEXT)
    in_process("data", folders / "ex/c.txt", "-o", folders / "ex/pair", "--format", "megatron", code=0)
    (folders / "ex/base.toml").write_text('extends = "demo"\n[data]\nsource = "megatron"\npath = "pair"\n')
    assert read_by(submitted("../ex/base.toml")) == folders.resolve() / "ex/pair"
    absolute = folders / "ex/c.tokens"
    (folders / "ex/base.toml").write_text(f'extends = "demo"\n[data]\nsource = "tokens"\npath = "{absolute}"\n')
    run = submitted("../ex/base.toml")
    assert run.data_beside is None
    assert read_by(run) == absolute


def test_every_verb_that_looks_at_the_data_finds_them(folders):
    make(folders / "ex")
    in_process("submit", "../ex/base.toml", "--cluster", "local", "--dry-run", "--script", code=0)
