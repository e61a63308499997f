"""HPC_GPT_*: the variables of an option, those that contradict each other, and those that nothing reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import click

PREFIX = "HPC_GPT_"
# The verbs that read settings, and with them the variables of their options.
_VERBS = ("plan", "render", "submit", "rehearse", "bench")


def variables_of(names: Iterable[str]) -> list[str]:
    """The variables of an option with these names, one for each long name.

    >>> variables_of(("--nodes", "-N")), variables_of(("--micro-batch-size", "--mbs"))
    (['HPC_GPT_NODES'], ['HPC_GPT_MICRO_BATCH_SIZE', 'HPC_GPT_MBS'])
    """
    return [PREFIX + name[2:].replace("-", "_").upper() for name in names if name.startswith("--")]


def check_variables(ctx: click.Context) -> None:
    """ConfigError for an option with two variables that differ; a line on stderr for each variable nothing reads."""
    for parameter in ctx.command.params:
        _check_one(parameter, ctx)
    for line in _unread(ctx.command):
        click.echo(line, err=True)


def _check_one(parameter: click.Parameter, ctx: click.Context) -> None:
    given = {name: _value(parameter, ctx, os.environ[name]) for name in _names(parameter) if os.environ.get(name)}
    first, *others = given or [""]
    differ = [name for name in others if given[name] != given[first]]
    if differ:
        from hpc_gpt.errors import ConfigError

        pair = (first, differ[0])
        raise ConfigError(
            f"{pair[0]}={os.environ[pair[0]]} and {pair[1]}={os.environ[pair[1]]} both set {parameter.opts[-1]}, and "
            "differ",
            f"unset {pair[0]}, or {pair[1]}",
        )


def _names(parameter: click.Parameter) -> Sequence[str]:
    return [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []


def _value(parameter: click.Parameter, ctx: click.Context, text: str) -> Any:
    """The value that a variable's text means; the text where it means none."""
    try:
        return parameter.type.convert(text, parameter, ctx)
    except click.BadParameter:
        return text


def _unread(command: click.Command) -> list[str]:
    from hpc_gpt.launch.slurm import OWN_VARIABLES

    known = OWN_VARIABLES | _of_options(command)
    unread = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    if not unread:
        return []
    import difflib

    from hpc_gpt.cli import group

    for verb in _VERBS:
        other = group.get_command(click.Context(group), verb)
        assert other is not None
        known |= _of_options(other)
    ends = sorted(name.removeprefix(PREFIX) for name in known)  # what all of them begin with makes nothing alike
    lines = []
    for name in unread:
        if name not in known:
            nearest = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1)
            hint = f"did you mean {PREFIX}{nearest[0]}?" if nearest else "hpc-gpt submit --help lists the options"
            lines.append(f"nothing reads the variable {ascii(name)[1:-1]}; {hint}")
    return lines


def _of_options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in _names(parameter)}
