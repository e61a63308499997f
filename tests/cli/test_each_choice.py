"""Both sides of a choice that a verb makes in its answer, and of each option: a flag, or one with a value."""

from pathlib import Path
from typing import Any

import click
import pytest

from hpc_gpt import cli
from hpc_gpt.cli.rehearse import _tables
from hpc_gpt.core.files import config_dir
from hpc_gpt.launcher.launch.prepared import PreparedRun
from hpc_gpt.launcher.rehearsal.small_run import NotRehearsed, RehearsalOutcome, SmallRun
from hpc_gpt.launcher.rehearsal.stages import Stage
from tests.cli.command import in_process, without_slurm
from tests.launch.test_render import resolved_demo


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
    "--here --json --machine --max-model --max-seq --no-color --now --open --path --predictions --probe --quick --race "
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


def test_the_object_of_a_rehearsal() -> None:
    run: Any = resolved_demo()
    small = SmallRun(resolved_demo({"layout.gpus": 8}), (), (), 0)
    outcome = RehearsalOutcome([Stage("data", "fit", 1.236, False)], [NotRehearsed("a", "b")], "slurm: no")
    assert _tables(PreparedRun(run, "", ""), small, outcome, "/kept", 7.126) == {
        "schema": 1, "experiment": "demo", "cluster": "generic-slurm", "layout": str(small.resolved.layout),
        "ok": False, "cause": "slurm: no", "not_rehearsed": [{"what": "a", "why": "b"}], "folder": "/kept",
        "stages": [{"name": "data", "ok": False, "evidence": "fit", "at_s": 1.24}], "took_s": 7.13,
    }  # fmt: skip
