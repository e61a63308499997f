"""Writes every verb's `--help` into a page, between two marks.

python -m tests.cli.document docs/cli.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from hpc_gpt.cli import group as every_verb

WIDTH = 100
MARKS = ("<!-- written by python -m tests.cli.document docs/cli.md -->", "<!-- end of verbs -->")


def document(page: str) -> str:
    """The page with new text between its marks; ValueError if a mark is missing."""
    before, begin, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise ValueError(f"the page has no {MARKS[0]!r} followed by {MARKS[1]!r}")
    text = "\n".join(f"## `{words}`\n\n```text\n{shown}\n```\n" for words, shown in help_texts(every_verb))
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def help_texts(
    group: click.Group, path: str = "hpc-gpt", parent: click.Context | None = None
) -> Iterator[tuple[str, str]]:
    """(the command, its `--help` at WIDTH columns) of a group and of every verb in it."""
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


def main() -> None:
    """Updates the pages named as arguments."""
    for name in sys.argv[1:] or ["docs/cli.md"]:
        path = Path(name)
        path.write_text(document(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
