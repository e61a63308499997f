"""The command of a verb: its place among the verbs, its options, and its help in groups."""

import os
from collections.abc import Callable
from typing import Any, TypeVar, overload

import click

from hpc_gpt.cli.options import GROUPS, OTHER, OUTPUT, TABLE, Option, check_together

C = TypeVar("C", bound=click.Command)


class VerbCommand(click.Command):
    """A command that refuses options which do not go together, as their rows of the table say, and names variables
    HPC_GPT_… that nothing reads."""

    def invoke(self, ctx: click.Context) -> Any:
        check_together(ctx)
        takes_request = any(parameter.name == "settings" for parameter in self.params)  # names them itself
        if not takes_request and any(name.startswith("HPC_GPT_") for name in os.environ):
            from hpc_gpt.cli.variables import print_unread_variables

            print_unread_variables(ctx, near_only=True)
        return super().invoke(ctx)


class GroupedCommand(VerbCommand):
    """A command whose help has a section per group of options, as nobody reads one list of 40."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in GROUPS}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if row is not None:
                usual = OUTPUT if "--help" in parameter.opts else OTHER
                rows[parameter.group if isinstance(parameter, Option) else usual].append(row)
        for title, of_group in rows.items():
            if of_group:
                with formatter.section(title):
                    formatter.write_dl(of_group, col_max=24)


class UncutGroup(click.Group):
    """A group whose help shows the whole first sentence of each command, which click would cut at 80 columns."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(limit=999))
                    for name, command in commands.items()
                    if command is not None
                ]
            )


@overload
def verb(place: int) -> Callable[[Callable[..., Any]], VerbCommand]: ...
@overload
def verb(place: int, kind: type[C]) -> Callable[[Callable[..., Any]], C]: ...
def verb(place: int, kind: type[click.Command] = VerbCommand) -> Callable[[Callable[..., Any]], click.Command]:
    """Makes a function the verb of its name, without a final `_command`. `place` is its place among the verbs, for
    which the package reads this line."""

    def command(function: Callable[..., Any]) -> click.Command:
        name = function.__name__.removesuffix("_command")
        return click.command(name, kind, params=[*options_of(name)])(function)

    return command


def options_of(verb: str) -> list[Option]:
    """The options of a verb, in the order of its help."""
    return [option for option in TABLE if verb in option.verbs]
