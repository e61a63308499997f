"""Commands whose help has their options in groups, as nobody reads one list of 40; and groups that show each command's
help uncut."""

import click

_EXPERIMENT, _LAYOUT, _SLURM, _LENGTH, _OTHER, _OUTPUT = (
    "Experiment", "Model and layout", "Slurm", "How far", "Other options", "Output",
)  # fmt: skip
_GROUP_BY_TABLE = {"model": _LAYOUT, "layout": _LAYOUT, "engine": _LAYOUT, "job": _SLURM}
_GROUP_BY_NAME = {
    **dict.fromkeys(("row", "sweep", "smoke", "settings", "cluster", "template", "force"), _EXPERIMENT),
    **dict.fromkeys(("grid", "max_rows", "max_parallel", "skip_unfit"), _EXPERIMENT),
    **dict.fromkeys(("until", "job__max_gpu_hours", "resume", "from_start", "steps", "tokens"), _LENGTH),
    **dict.fromkeys(("dry_run", "script", "wait", "here", "yes", "as_json", "html", "keep", "help"), _OUTPUT),
}


class GroupedCommand(click.Command):
    """A command whose help has a section per group of options. The table of its key decides the group of an option that
    sets a key of the experiment; its name decides that of any other."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {
            title: [] for title in (_EXPERIMENT, _LAYOUT, _SLURM, _LENGTH, _OTHER, _OUTPUT)
        }
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if row is not None:
                name = "help" if "--help" in parameter.opts else str(parameter.name)
                groups[_GROUP_BY_NAME.get(name) or _GROUP_BY_TABLE.get(name.partition("__")[0], _OTHER)].append(row)
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=24)


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
