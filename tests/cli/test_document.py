"""The README's verbs are the commands' own help."""

import click
import pytest

from hpc_gpt.cli import VERBS, group
from hpc_gpt.cli.document import BEGIN, END, document, help_texts
from tests.conftest import REPOSITORY

README = REPOSITORY / "README.md"


def test_the_readme_is_current():
    page = README.read_text(encoding="utf-8")
    assert document(page) == page, "run: python -m hpc_gpt.cli.document README.md"


def test_every_verb_is_in_it():
    page = README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    for verb in VERBS:
        assert f"### `hpc-gpt {verb}`" in page


def test_every_verb_and_option_says_what_it_is_for():
    def check(command, path):
        assert command.help, path
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.help, f"{path} {parameter.opts}"
        for name in getattr(command, "commands", {}):
            check(command.commands[name], f"{path} {name}")

    ctx = click.Context(group)
    for verb in group.list_commands(ctx):
        check(group.get_command(ctx, verb), verb)


def test_no_line_is_wider_than_a_page():
    for words, text in help_texts(group):
        assert max(len(line) for line in text.splitlines()) <= 110, words


def test_only_the_part_between_the_marks_is_written():
    page = document(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    assert page.startswith(f"above\n{BEGIN}\n")
    assert page.endswith(f"\n{END}\nbelow\n")
    assert "old" not in page
    assert document(page) == page


@pytest.mark.parametrize("page", ["", BEGIN, END, f"{END}{BEGIN}"])
def test_a_page_without_marks_is_refused(page):
    with pytest.raises(ValueError, match="the page has no"):
        document(page)
