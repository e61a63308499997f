"""The `--help` of every verb: whole, in groups, no wider than a page."""

import click
import pytest

from hpc_gpt import cli
from tests.cli.command import in_process, without_slurm
from tests.cli.document import help_texts


def test_every_verb_and_option_says_what_it_is_for():
    def check(command, path):
        assert command.help, path
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.help, f"{path} {parameter.opts}"
        for name in getattr(command, "commands", {}):
            check(command.commands[name], f"{path} {name}")

    ctx = click.Context(cli.group)
    for verb in cli.verbs():
        check(cli.group.get_command(ctx, verb), verb)


def test_no_line_is_wider_than_a_page():
    for words, text in help_texts(cli.group):
        assert max(len(line) for line in text.splitlines()) <= 110, words


def test_help_is_in_groups_and_cuts_no_sentence():
    ctx = click.Context(cli.group, info_name="hpc-gpt", terminal_width=80)
    shown = " ".join(cli.group.get_help(ctx).split())
    for verb in cli.verbs().values():
        assert verb.short_help in shown
    places = [shown.index(title) for title in ("Before a run:", "A run:", "After a run:", "Set-up:")]
    assert places == sorted(places)
    submit = cli.group.get_command(ctx, "submit")
    sections = {part.partition(":")[0]: part for part in submit.get_help(click.Context(submit, ctx)).split("\n\n")}
    for title, option in (("Experiment", "--sweep"), ("Model and layout", "--pp"), ("Slurm", "--qos"),
                          ("How far", "--until"), ("Output", "--dry-run")):  # fmt: skip
        assert option in sections[title]


@pytest.mark.parametrize("verb", [(), ("submit",)], ids=" ".join)
def test_the_first_example_works_in_a_folder_with_a_job_script(tmp_path, verb):
    page = dict(help_texts(cli.group))[" ".join(("hpc-gpt", *verb))]
    example = next(line for line in page.splitlines() if line.startswith("  hpc-gpt ")).strip().partition("   ")[0]
    shorter = ["--dry-run"] if verb else []  # the whole of it is `make demo`
    (script := tmp_path / "own" / "train.slurm").parent.mkdir()
    script.write_text("#!/bin/bash\n#SBATCH --nodes=1\n")
    in_process(*example.split()[1:], *shorter, cwd=script.parent, environment=without_slurm(tmp_path), code=0)
    assert list(script.parent.iterdir()) == [script]


def test_stored_short_helps_are_first_sentences_of_the_helps():
    ctx = click.Context(cli.group)
    verbs = {name: cli.group.get_command(ctx, name) for name in cli.verbs()}
    assert {name: verb.short_help for name, verb in cli.verbs().items()} == {
        name: verb.get_short_help_str(limit=10_000) for name, verb in verbs.items()
    }
    # As click itself would complete them.
    shown = {item.value: item.help for item in cli.group.shell_complete(ctx, "")}
    assert shown == {name: verb.get_short_help_str() for name, verb in verbs.items()}
