"""The request that EXPERIMENT and the options of an experiment make.

Precedence: option, experiment, cluster profile, default. `submit --help` must load in 0.15 s, so the modules that make
the request are imported in the function that uses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from hpc_gpt.cli import completers
from hpc_gpt.cli.script_words import SCRIPT_LINE
from hpc_gpt.cli.variables import check_variables
from hpc_gpt.core.terminal import say

if TYPE_CHECKING:
    from hpc_gpt.launcher.request import Request

F = TypeVar("F", bound=Callable[..., Any])


# The options that set the size of a run.
_SIZES = {"model.preset", "model.hf", *(f"layout.{name}" for name in ("gpus", "nodes", "tp", "pp", "cp", "ep", "dp"))}

experiment_argument = click.argument(
    "experiment", required=False, envvar="HPC_GPT_EXPERIMENT", shell_complete=completers.experiments
)


def with_request(function: F) -> F:
    """Gives a verb one keyword, `request`, for EXPERIMENT and the options that belong to it."""

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        return function(request=_request(values), **values)

    return cast(F, call)


def _request(values: dict[str, Any]) -> Request:
    from hpc_gpt.core.settings.experiment_file import DEFAULT_EXPERIMENT
    from hpc_gpt.core.settings.grid import parse_override
    from hpc_gpt.launcher.request import Request, ScriptRequest, completed, with_model_file

    ctx = click.get_current_context()
    check_variables(ctx)
    keys = {name.replace("__", "."): values.pop(name) for name in list(values) if "__" in name}
    by_option = with_model_file({key: value for key, value in keys.items() if value is not None})
    named = values.setdefault("experiment", None) is not None
    texts = values.pop("settings")
    settings = dict(parse_override(text) for text in texts)
    for key in settings:
        if (repeated := [text for text in texts if parse_override(text)[0] == key])[1:]:
            say(f"note: --set {key} is given {len(repeated)} times: {repeated[-1]} counts", err=True)
    on_line = settings | by_option  # a key's own option wins over --set
    overrides = completed(on_line, named)
    sized = bool(
        _SIZES & {*by_option}
        or any(key.startswith(("layout.", "model.", "train.init")) for key in settings)
        or any(values.get(name) for name in ("row", "sweep", "smoke"))
    )
    script, name = None, values.pop("experiment")
    if script_line := ctx.meta.get(SCRIPT_LINE):
        script = ScriptRequest(*script_line)
        name, named = str(script.path), True
    return Request(
        DEFAULT_EXPERIMENT if name is None else name,
        values.pop("cluster"),
        values.pop("template", None),
        overrides,
        given=on_line,
        names_experiment=named,
        sized=sized,
        script=script,
        **{name: values.pop(name) for name in ("row", "sweep", "smoke", "force") if name in values},
    )


def small_options(overrides: Mapping[str, Any]) -> list[str]:
    """The words of a command line that mean the same as the `overrides` that `request.with_small` made.

    >>> small_options({"layout.gpus": 2, "layout.tp": 1, "layout.pp": 2, "train.steps": 5})
    ['demo', '--gpus', '2', '--tp', '1', '--pp', '2']
    """
    from hpc_gpt.core.settings.experiment_file import SMALL_EXPERIMENT

    sizes = ((name, overrides.get(f"layout.{name}")) for name in ("gpus", "tp", "pp"))
    return [SMALL_EXPERIMENT, *(word for name, size in sizes if size for word in (f"--{name}", str(size)))]
