"""The README's verbs are the commands' own help."""

import subprocess
import sys

import click
import pytest

from hpc_gpt import cli
from hpc_gpt.cli.document import TREE, VERBS, document, help_texts, tree_lines
from tests.cli.command import in_process, without_slurm
from tests.conftest import REPOSITORY

README = REPOSITORY / "README.md"


def test_the_readme_is_current(tmp_path):
    # In a Python of its own: click keeps a command's help option as the first context of the process spelled it.
    page = tmp_path / "README.md"
    page.write_bytes(README.read_bytes())
    subprocess.run([sys.executable, "-m", "hpc_gpt.cli.document", str(page)], check=True, cwd=REPOSITORY)
    assert page.read_text() == README.read_text(), "run: python -m hpc_gpt.cli.document README.md"


def test_every_verb_is_in_it():
    page = README.read_text(encoding="utf-8").partition(VERBS[0])[2].partition(VERBS[1])[0]
    for verb in cli.VERBS:
        assert f"### `hpc-gpt {verb}`" in page


def test_every_verb_and_option_says_what_it_is_for():
    def check(command, path):
        assert command.help, path
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.help, f"{path} {parameter.opts}"
        for name in getattr(command, "commands", {}):
            check(command.commands[name], f"{path} {name}")

    ctx = click.Context(cli.group)
    for verb in cli.VERBS:
        check(cli.group.get_command(ctx, verb), verb)


def test_no_line_is_wider_than_a_page():
    for words, text in help_texts(cli.group):
        assert max(len(line) for line in text.splitlines()) <= 110, words


@pytest.mark.parametrize("verb", [(), ("submit",)], ids=" ".join)
def test_the_first_example_works_in_an_empty_folder_without_slurm(tmp_path, verb):
    page = dict(help_texts(cli.group))[" ".join(("hpc-gpt", *verb))]
    example = next(line for line in page.splitlines() if line.startswith("  hpc-gpt ")).strip().partition("   ")[0]
    shorter = ["--dry-run"] if verb else []  # the whole of it is `make demo`
    empty = tmp_path / "empty"
    empty.mkdir()
    done = in_process(*example.split()[1:], *shorter, cwd=empty, environment=without_slurm(tmp_path))
    assert done.code == 0, done.stderr
    assert not list(empty.iterdir())


def test_every_module_says_in_a_line_what_is_in_it():
    for line in tree_lines():
        name, _, sentence = line.strip().partition(" ")
        assert sentence.strip(), f"{name} has no docstring"


MARKS = "\n".join((*TREE, "between", *VERBS))


def test_only_the_parts_between_the_marks_are_written():
    page = document(f"above\n{MARKS}\nbelow\n".replace(TREE[1], f"stale line\n{TREE[1]}"))
    assert page.startswith(f"above\n{TREE[0]}\n")
    assert f"{TREE[1]}\nbetween\n{VERBS[0]}" in page
    assert page.endswith(f"\n{VERBS[1]}\nbelow\n")
    assert "stale line\n" not in page
    assert document(page) == page


@pytest.mark.parametrize("page", ["", "\n".join(TREE), "\n".join(VERBS), "\n".join((*TREE, *reversed(VERBS)))])
def test_a_page_without_its_marks_is_refused(page):
    with pytest.raises(ValueError, match="the page has no"):
        document(page)
