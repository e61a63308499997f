"""Options of earlier versions: given, they are refused with what to use in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from hpc_gpt.errors import ConfigError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def removed_option(name: str, instead: str, *, is_flag: bool = False) -> Decorator:
    """An option that help does not show and that is refused, with `instead` as the hint."""

    def refuse(ctx: click.Context, parameter: click.Parameter, value: object) -> None:
        if value:
            raise ConfigError(f"{name} is no longer an option of {ctx.command_path}", instead)

    return click.option(name, hidden=True, is_flag=is_flag, callback=refuse, expose_value=False)
