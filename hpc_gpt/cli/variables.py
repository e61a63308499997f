"""The variables HPC_GPT_… of the environment: those that nothing reads are named, and those that explain an error."""

import contextlib
import difflib
import os

import click

from hpc_gpt.cli.options import option_name
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.gone import gone_fault
from hpc_gpt.core.terminal import say

PREFIX = "HPC_GPT_"


def print_unread_variables(ctx: click.Context, near_only: bool = False) -> None:
    """Prints each HPC_GPT_* variable that nothing reads; with `near_only` those whose name is nearly that of one that
    is read."""
    from hpc_gpt.core.slurm.environment import OWN_VARIABLES

    for name, text in sorted(os.environ.items()):
        if name.startswith(PREFIX) and text and name not in OWN_VARIABLES:
            _say_unread(ctx, name.removeprefix(PREFIX), near_only)


def check_variables(ctx: click.Context) -> None:
    """Prints each HPC_GPT_* variable that nothing reads; and `NAME=value` of HPC_GPT_YES, and of a variable that names
    an unknown profile or experiment, since it may explain an error."""
    print_unread_variables(ctx)
    for parameter in ctx.command.params:
        name, by = str(parameter.name), ctx.get_parameter_source(str(parameter.name))
        if by is click.core.ParameterSource.ENVIRONMENT and not _is_found(name, ctx.params[name]):
            say(f"from the environment: {parameter.envvar}={os.environ[str(parameter.envvar)]}", err=True)


def _say_unread(ctx: click.Context, name: str, near_only: bool) -> None:
    """Prints that nothing reads a variable, by its name without the prefix, and what may be meant."""
    from hpc_gpt.core.slurm.environment import OWN_VARIABLES

    if gone := gone_fault(f"{ctx.command.name} --{name.lower().replace('_', '-')}"):
        raise ConfigError(f"{PREFIX}{name}: {gone[0]}", gone[1])
    options = [parameter for parameter in ctx.command.params if isinstance(parameter, click.Option)]
    meant = {of_option: option_name(option) for option in options for of_option in variables_of(option)}
    # The common prefix would make all alike.
    nearest = difflib.get_close_matches(name, sorted(known.removeprefix(PREFIX) for known in OWN_VARIABLES), n=1)
    if near_only and not nearest:
        return
    hint = f"did you mean {PREFIX}{nearest[0]}?" if nearest else "hpc-gpt submit --help lists the options"
    hint = f"use {meant[name]}" if name in meant else hint
    say(f"nothing reads the variable {PREFIX}{ascii(name)[1:-1]}; {hint}", err=True)


def variables_of(option: click.Option) -> list[str]:
    """The variables, without their prefix, that may be meant for an option: one per long name."""
    return [name[2:].replace("-", "_").upper() for name in option.opts if name.startswith("--")]


def _is_found(kind: str, name: str) -> bool:
    """Whether a profile or an experiment of that name exists."""
    from hpc_gpt.core.settings.cluster import find_profile
    from hpc_gpt.core.settings.experiment_file import find_experiment

    find = {"cluster": find_profile, "experiment": find_experiment}
    with contextlib.suppress(ConfigError):
        return kind in find and bool(find[kind](name))
    return False
