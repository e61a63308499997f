"""Writes every verb's `--help` and the tree of modules into a page, between marks, so that it cannot say otherwise.

python -m hpc_gpt.cli.document README.md
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import click

WIDTH = 100
_BY = "written by python -m hpc_gpt.cli.document README.md"
VERBS = (f"<!-- verbs: {_BY} -->", "<!-- end of verbs -->")
TREE = (f"<!-- tree: {_BY} -->", "<!-- end of tree -->")


def document(page: str) -> str:
    """The page with the parts between its marks written anew; ValueError where a pair of marks is missing."""
    from hpc_gpt.cli import group

    verbs = [f"### `{words}`\n\n```text\n{text}\n```\n" for words, text in help_texts(group)]
    page = _between(page, VERBS, "\n".join(verbs))
    return _between(page, TREE, "```text\n" + "".join(f"{line}\n" for line in tree_lines()) + "```\n")


def _between(page: str, marks: tuple[str, str], text: str) -> str:
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"the page has no {marks[0]!r} followed by {marks[1]!r}")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def help_texts(
    group: click.Group, path: str = "hpc-gpt", parent: click.Context | None = None
) -> Iterator[tuple[str, str]]:
    """(words of the command, its `--help` at WIDTH columns) of a group and of every verb under it."""
    settings = {**group.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    ctx = click.Context(group, parent, path.split()[-1], **settings)
    yield path, _help(group, ctx)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from help_texts(command, f"{path} {name}", ctx)
        else:
            yield f"{path} {name}", _help(command, click.Context(command, ctx, name))


def _help(command: click.Command, ctx: click.Context) -> str:
    return "\n".join(line.rstrip() for line in command.get_help(ctx).splitlines())


def tree_lines() -> list[str]:
    """A line for each package and module of hpc_gpt: its name and the first sentence of its docstring."""
    top = Path(__file__).resolve().parents[1]
    rows = [(f"{top.name}/", _first_sentence(top / "__init__.py")), *_rows(top, "  ")]
    width = max(len(name) for name, _ in rows)
    return [f"{name.ljust(width)}  {sentence}".rstrip() for name, sentence in rows]


def _rows(folder: Path, indent: str) -> Iterator[tuple[str, str]]:
    """Modules first, then the packages with theirs."""
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield f"{indent}{path.name}", _first_sentence(path)
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield f"{indent}{package.name}/", _first_sentence(package / "__init__.py")
        yield from _rows(package, indent + "  ")


def _first_sentence(path: Path) -> str:
    paragraph = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
    sentence, stop, _ = " ".join(paragraph.split()).partition(". ")
    return sentence.rstrip(".:") if not stop else sentence


def main() -> None:
    """Brings the named pages up to date."""
    for name in sys.argv[1:] or ["README.md"]:
        path = Path(name)
        path.write_text(document(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
