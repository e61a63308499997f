"""Writes the generated parts of docs/, each between two marks: keys, and how a run can end.

python -m tests.cli.document                    every page
python -m tests.cli.document docs/keys.md       one
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from hpc_gpt.core.ends.failures import CLASSES, RETRY_WORDS
from hpc_gpt.core.keys import Key, keys_of
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.tables import toml_value

WIDTH = 100
END = "<!-- end -->"


def mark_of(name: str) -> str:
    """The line above the generated part of a page."""
    return f"<!-- written by python -m tests.cli.document docs/{name} -->"


def document(page: str, name: str) -> str:
    """The page with new text between its marks; ValueError if a mark is missing."""
    before, begin, rest = page.partition(mark_of(name))
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {mark_of(name)!r} followed by {END!r}")
    return f"{before}{begin}\n\n{PAGES[name]()}\n{end}{after}"


def experiment_keys() -> str:
    """A heading and a table for each table of an experiment."""
    tables: dict[str, list[Key]] = {}
    for key in keys_of(Experiment):
        table, dot, _ = key.name.partition(".")
        tables.setdefault(table if dot else "", []).append(key)
    return "\n".join(f"### {table or 'At the top'}\n\n{_table(keys)}" for table, keys in tables.items())


def ends() -> str:
    """A row for each class of ends that is one."""
    rows = ["| class | means | a retry can help | the job chain | what to do |", "|---|---|---|---|---|"]
    for name, row in CLASSES.items():
        retry, chain = ("-", "-") if name == "done" else (RETRY_WORDS[row.can_succeed], row.chain)
        cells = (row.means, retry, chain, row.to_do)
        if name not in ("pending", "running"):
            rows.append("| " + " | ".join((f"`{name}`", *map(_cell, cells))) + " |")
    return "\n".join(rows) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "keys.md": experiment_keys,
    "long-runs.md": ends,
}


def _table(keys: list[Key]) -> str:
    rows = ["| key | default | values | means |", "|---|---|---|---|"]
    for key in keys:
        default = "-" if key.default is None else f"`{toml_value(key.default)}`"
        rows.append("| " + " | ".join((f"`{key.name}`", default, _cell(key.type), _cell(key.means))) + " |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    """A text as it is in a cell of a Markdown table."""
    return text.replace("|", r"\|").replace("<", r"\<").replace("*", r"\*")


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
    """Updates the pages named as arguments, or all."""
    for path in map(Path, sys.argv[1:] or [f"docs/{name}" for name in PAGES]):
        path.write_text(document(path.read_text(encoding="utf-8"), path.name), encoding="utf-8")


if __name__ == "__main__":
    main()
