"""Both sides of a choice that a verb makes in its answer, and of each option: a flag, or one with a value."""

from pathlib import Path

import click
import pytest

from hpc_gpt import cli
from hpc_gpt.core.files import config_dir
from tests.cli.command import in_process, without_slurm


def options_of(command: click.Command, name: str = "hpc-gpt") -> list[tuple[str, click.Option]]:
    found = [(f"{name} {each.opts[0]}", each) for each in command.params if isinstance(each, click.Option)]
    for word in command.list_commands(click.Context(command)) if isinstance(command, click.Group) else ():
        inner = command.get_command(click.Context(command), word)
        assert inner is not None
        found += options_of(inner, f"{name} {word}")
    return found


# All options that take no value, of whatever verb.
FLAGS = (
    "--all --allow-tp-across-nodes --begin-token --debug --dry-run --exclusive --failed --follow --force --from-start "
    "--json --machine --max-model --max-seq --no-color --now --open --path --predictions --probe --quick --race "
    "--script --sizes --skip-unfit --smoke --sweep --version --wait --watch --yes"
)


def test_these_options_are_flags_and_no_other() -> None:
    for name, option in options_of(cli.group):
        assert (option.is_flag or option.count) == (option.opts[0] in FLAGS.split()), name


def test_the_default_profile_alone_is_starred() -> None:
    config_dir().mkdir(parents=True, exist_ok=True)
    for text, starred in (("", "generic-slurm"), ('cluster = "a100-80g-8"', "a100-80g-8")):
        (config_dir() / "config.toml").write_text(text)
        done = in_process("profile", "list", code=0)
        assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("*")] == [starred]


def test_the_script_of_a_race_is_printed_alone(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text('extends = "demo"\n[rows]\n"quick" = {}\n"slow" = {}\n')
    asked = ["submit", "two.toml", "--race", "--dry-run", "--script", "--cluster", "a100-80g-8"]
    done = in_process(*asked, cwd=tmp_path, environment=without_slurm(tmp_path), code=0)
    assert done.stdout.startswith("#!/bin/bash\n")


@pytest.mark.parametrize("experiment", [[], ["demo"]])
def test_the_plan_of_the_largest_gives_what_no_experiment_has(experiment: list[str]) -> None:
    done = in_process("plan", *experiment, "--gpus", "8", "--max-model", "--cluster", "a100-80g-8", code=0)
    command = done.stderr.splitlines()[-1]
    assert command.startswith(" ".join(["next: hpc-gpt plan", *experiment, "--cluster a100-80g-8"]))
    keys = ("hidden", "layers", "heads", "vocab", "seq")
    given = [key for key in keys if f"model.{key}=" in command or f"--{key} " in command]
    assert given == ["hidden", "layers", "heads", *([] if experiment else ["vocab", "seq"])]
