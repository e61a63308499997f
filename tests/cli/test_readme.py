"""What the README shows is what the command takes and says."""

import re
import shlex
import tomllib

import click
import pytest

from hpc_gpt import cli
from hpc_gpt.cli.experiment_options import variables_of
from hpc_gpt.settings.cluster import load_profile
from hpc_gpt.settings.experiment_file import load_experiment
from hpc_gpt.settings.resolve import resolve
from tests.cli.test_variables import options_of
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def shown_commands():
    """The words after `hpc-gpt` of every command in a sh block, and of those inside the text."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    lines += re.findall(r"`(hpc-gpt [a-z][^`…]*)`", PAGE)
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == ["hpc-gpt"]:
            yield words[1 : words.index(">")] if ">" in words else words[1:]


@pytest.mark.parametrize("words", list(shown_commands()), ids=" ".join)
def test_every_shown_command_parses(words):
    ctx, command, bare = click.Context(cli.group, **cli.group.context_settings), cli.group, len(words) == 1
    while isinstance(command, click.Group) and words:
        name, *words = words
        command = command.get_command(ctx, name)
        assert command is not None, f"no verb {name}"
    if not bare:
        command.make_context("hpc-gpt", words, parent=ctx)


def test_there_are_commands_to_test():
    assert len(list(shown_commands())) > 15


def test_the_profile_it_shows_is_one(tmp_path):
    text = next(block for block in blocks("toml") if "gpus_per_node" in block)
    (tmp_path / "mysite.toml").write_text(text)
    profile = load_profile(str(tmp_path / "mysite.toml"))
    assert profile.gpus_per_node == 8
    assert profile.sbatch == ("--hint=nomultithread",)


def test_the_experiment_it_shows_runs_on_that_profile(tmp_path):
    text = next(block for block in blocks("toml") if "[train]" in block)
    assert "extends" not in tomllib.loads(text)  # no settings of another run leak into one's first
    (tmp_path / "myrun.toml").write_text(text)
    run = resolve(load_experiment(str(tmp_path / "myrun.toml")), load_profile("a100-80g-8"))
    assert (run.gpus, run.batch.global_batch, run.name) == (16, 512, "myrun")


@pytest.mark.parametrize("block", blocks("console"))
def test_the_refusals_it_shows_are_what_is_said(block, capsys):
    command, _, said = block.partition("\n")
    with pytest.raises(SystemExit) as end:
        cli.main(shlex.split(command)[2:])
    captured = capsys.readouterr()
    assert (captured.out, captured.err, end.value.code) == ("", said, 2)


def test_the_variables_it_names_are_read():
    source = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "hpc_gpt").rglob("*.py"))
    source += "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "templates").rglob("*.j2"))
    options = {
        name for verb in ("render", "submit") for option in options_of(verb) for name in variables_of(option.opts)
    }
    for name in set(re.findall(r"HPC_GPT_[A-Z_]+[A-Z]", PAGE)):
        assert name in source or name in options, f"{name} is read nowhere"


def test_the_warm_up_rule_is_the_one_in_force():
    from hpc_gpt.readers.steps import SLOW

    assert f"no more than {SLOW} times the median" in " ".join(PAGE.split())


def test_the_exit_codes_are_those_of_the_errors():
    from hpc_gpt import errors

    table = dict(re.findall(r"\| (\d+) \| ([^|]+)", PAGE))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UserError)]
    assert {str(kind.exit_code) for kind in kinds} | {"0", "130"} == set(table)
