"""The options of an experiment, which several verbs share, and the request that they make.

Precedence: option, experiment, cluster profile, default. `submit --help` must load in 0.15 s, so the modules that make
the request are imported in the function that uses them.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from hpc_gpt.cli import completers
from hpc_gpt.cli.script_words import META
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.gone import gone_fault
from hpc_gpt.core.terminal import say

if TYPE_CHECKING:
    from hpc_gpt.launcher.request import Request

F = TypeVar("F", bound=Callable[..., Any])
PREFIX = "HPC_GPT_"


class CountType(click.types.IntParamType):
    """The value of an option as a whole number, which may end in k, M, B or T: `15T`, `1.5M`, `30e9`."""

    def __init__(self, thousand: int = 1000, least: int | None = None) -> None:
        self._thousand, self._least = thousand, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from hpc_gpt.core.typed_tables import read_count

        try:
            count = read_count(value, self._thousand) if isinstance(value, str) else int(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a whole number, as 4, 8k or 15T.", param, ctx)
        if self._least is not None and count < self._least:
            self.fail(f"{count} is not in the range x>={self._least}.", param, ctx)
        return count


_COUNT = CountType()

# (names, key, type, help).
_OPTIONS: tuple[tuple[tuple[str, ...], str, Any, str], ...] = (
    (("--model",), "model.preset", str,
     "Model preset: gpt2, 48b, llama3.1-8b, …; or transformers' config.json or its folder."),
    (("--gpus", "-G"), "layout.gpus", _COUNT, "GPUs in total."),
    (("--nodes", "-N"), "layout.nodes", _COUNT, "Nodes."),
    (("--tensor-model-parallel-size", "--tp"), "layout.tp", _COUNT, "Tensor parallel size."),
    (("--pipeline-model-parallel-size", "--pp"), "layout.pp", _COUNT, "Pipeline stages."),
    (("--context-parallel-size", "--cp"), "layout.cp", _COUNT, "Context parallel size: GPUs that share a sample."),
    (("--expert-model-parallel-size", "--ep"), "layout.ep", _COUNT,
     "Expert parallel size: ranks of cp x dp that divide the experts."),
    (("--data-parallel-size", "--dp"), "layout.dp", _COUNT,
     "Data parallel size; follows from the others unless given."),
    (("--micro-batch-size", "--mbs"), "layout.micro_batch", _COUNT, "Samples in one pass of one replica."),
    (("--global-batch-size", "--gbs"), "layout.global_batch", _COUNT, "Samples in one step."),
    (("--gas",), "layout.micro_batches", _COUNT, "Micro-batches of a step (gradient accumulation steps)."),
    (("--engine",), "engine.name", str, "Engine: deepspeed-3d, deepspeed-zero, fsdp, ddp, … (hpc-gpt help engines)."),
    (("--zero-stage",), "engine.zero_stage", int, "ZeRO stage."),
    (("--seq-length", "--seq"), "model.seq", CountType(1024), "Tokens in a sample; 8k is 8192."),
    (("--account", "-A"), "job.account", str, "Account to charge."),
    (("--partition", "-p"), "job.partition", str, "Partition."),
    (("--qos", "-q"), "job.qos", str, "Quality of service."),
    (("--constraint", "-C"), "job.constraint", str, "Required node features."),
    (("--time", "-t"), "job.time", str, "Time limit, as for sbatch."),
    (("--cpus-per-task", "-c"), "job.cpus_per_task", _COUNT, "CPUs for each rank."),
    (("--exclude", "-x"), "job.exclude", str, "Nodes to exclude."),
    (("--nodelist", "-w"), "job.nodelist", str, "Nodes to use."),
    (("--dependency", "-d"), "job.dependency", str, "Jobs to wait for, as for sbatch; runs, if there is no Slurm."),
    (("--job-name", "-J"), "job.name", str, "Name of the job."),
    (("--reservation",), "job.reservation", str, "Reservation."),
    (("--mem",), "job.mem", str, "Memory of a node, as for sbatch."),
    (("--comment",), "job.comment", str, "A comment for Slurm to keep."),
    (("--max-gpu-hours",), "job.max_gpu_hours", float, "Budget of the run: its job chain ends before it uses more."),
)  # fmt: skip


# The options that set the size of a run.
_SIZES = {"model.preset", "model.hf", *(f"layout.{name}" for name in ("gpus", "nodes", "tp", "pp", "cp", "ep", "dp"))}

# The options on which a plan depends; other verbs set the last ones with `--set`.
PLANNING_OPTIONS = (
    *(option for option in _OPTIONS if not option[1].startswith("job.")),
    (("--hidden",), "model.hidden", _COUNT, "Hidden size."),
    (("--layers",), "model.layers", _COUNT, "Layers."),
    (("--heads",), "model.heads", _COUNT, "Attention heads."),
    (("--vocab",), "model.vocab", _COUNT, "Vocabulary, before padding."),
    (("--recompute",), "engine.recompute", str, "Recomputation: none, selective or full."),
    (("--offload",), "engine.offload", str, "Offload to the host: none, optimizer or full."),
)


def experiment_options(function: F) -> F:
    """Adds EXPERIMENT and every option above to a verb, which gets them as one keyword, `request`."""
    others = (
        click.option("--exclusive", "job__exclusive", is_flag=True, default=None, help="Take whole nodes."),
        _ACROSS_NODES,
        click.option("-n", "--ntasks", "ntasks", hidden=True, callback=_refuse_ntasks, expose_value=False),
        _SET,
        click.option("--checkpoints", "command__checkpoints", metavar="PATTERN",
                     help="Checkpoint files of your own program; a new one counts as progress of the job chain."),
        click.option("--template", type=click.Path(path_type=Path),
                     help="A template of your own that extends base.sh.j2."),
        _CLUSTER,
        click.option("--smoke", is_flag=True,
                     help="A tiny model on at most 8 ranks, 5 steps or --set train.steps; here without --cluster."),
        click.option("--force", is_flag=True, help="Accept a run that is predicted not to fit in memory."),
        click.option("--sweep", is_flag=True,
                     help="Every row of EXPERIMENT that can run, each as a job."),
        click.option("--row", metavar="NAME", shell_complete=completers.rows,
                     help="A row of EXPERIMENT; the first that can run unless --row or --sweep is given."),
        _EXPERIMENT,
    )  # fmt: skip
    return _with_options(function, _OPTIONS, *others)


def planning_options(function: F) -> F:
    """Adds EXPERIMENT and the options on which a plan depends, as `experiment_options` does."""
    return _with_options(function, PLANNING_OPTIONS, _ACROSS_NODES, *_SHARED)


def init_options(function: F) -> F:
    """Adds the options of `planning_options`, with NAME for a new file in place of EXPERIMENT."""
    name = click.argument("name", required=False)
    return _with_options(function, PLANNING_OPTIONS, _ACROSS_NODES, _SET, _CLUSTER, name)


def _with_options(function: F, options: Sequence[Any], *others: Callable[[Any], Any]) -> F:
    @functools.wraps(function)
    def call(**values: Any) -> Any:
        return function(request=_request(values), **values)

    command: Any = call
    for names, key, kind, text in reversed(options):
        decorate = click.option(*names, key.replace(".", "__"), type=kind, shell_complete=completers.values, help=text)
        command = decorate(command)
    for decorate in others:
        command = decorate(command)
    return cast(F, command)


_ACROSS_NODES = click.option(
    "--allow-tp-across-nodes", "layout__allow_tp_across_nodes", is_flag=True, default=None,
    help="Let tensor parallelism span nodes.",
)  # fmt: skip
_SET = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
                    shell_complete=completers.keys_and_values,
                    help="Any value of the experiment (hpc-gpt help keys). May be repeated.")  # fmt: skip
_EXPERIMENT = click.argument(
    "experiment", required=False, envvar="HPC_GPT_EXPERIMENT", shell_complete=completers.experiments
)
_CLUSTER = click.option(
    "--cluster", envvar="HPC_GPT_CLUSTER", metavar="PROFILE", shell_complete=completers.profiles_and_files,
    help="Cluster profile, by name or file.",
)  # fmt: skip
_SHARED = (
    _SET,
    _CLUSTER,
    click.option("--row", metavar="NAME", shell_complete=completers.rows,
                 help="A row of EXPERIMENT; the first that can run unless given."),
    _EXPERIMENT,
)  # fmt: skip


def _refuse_ntasks(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise ConfigError(
            "-n, --ntasks is sbatch's number of tasks; hpc-gpt starts one task per GPU",
            f"use -G {value} for {value} GPUs",
        )


def _request(values: dict[str, Any]) -> Request:
    from hpc_gpt.core.settings.experiment_file import DEFAULT_EXPERIMENT, parse_override
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
    if script_line := ctx.meta.get(META):
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


def option_name(parameter: click.Parameter) -> str:
    """The usual name of an option: its last long name."""
    return [*parameter.opts, *(name for name in parameter.opts if name.startswith("--"))][-1]


def on_command_line(*but: str) -> list[click.Parameter]:
    """The parameters that the command line itself gives, not a variable, without those named in `but`."""
    ctx, on_line = click.get_current_context(), click.core.ParameterSource.COMMANDLINE
    named = [(str(parameter.name), parameter) for parameter in ctx.command.params]
    return [parameter for name, parameter in named if name not in but and ctx.get_parameter_source(name) is on_line]


def check_variables(ctx: click.Context) -> None:
    """Prints each HPC_GPT_* variable that nothing reads. Prints also `NAME=value` of HPC_GPT_YES, and of a variable
    that names an unknown profile or experiment, since it may explain an error."""
    from hpc_gpt.core.slurm.environment import OWN_VARIABLES

    known_names = {name.removeprefix(PREFIX) for name in OWN_VARIABLES}  # the common prefix would make all alike
    left = {name.removeprefix(PREFIX): text for name, text in sorted(os.environ.items()) if name.startswith(PREFIX)}
    options = [parameter for parameter in ctx.command.params if isinstance(parameter, click.Option)]
    meant = {name: option_name(option) for option in options for name in variables_of(option)}
    for name in [name for name, text in left.items() if text and name not in known_names]:
        if gone := gone_fault(f"{ctx.command.name} --{name.lower().replace('_', '-')}"):
            raise ConfigError(f"{PREFIX}{name}: {gone[0]}", gone[1])
        nearest = difflib.get_close_matches(name, sorted(known_names), n=1)
        hint = f"did you mean {PREFIX}{nearest[0]}?" if nearest else "hpc-gpt submit --help lists the options"
        hint = f"use {meant[name]}" if name in meant else hint
        say(f"nothing reads the variable {PREFIX}{ascii(name)[1:-1]}; {hint}", err=True)
    for parameter in ctx.command.params:
        name, by = str(parameter.name), ctx.get_parameter_source(str(parameter.name))
        if by is click.core.ParameterSource.ENVIRONMENT and not _is_found(name, ctx.params[name]):
            say(f"from the environment: {parameter.envvar}={os.environ[str(parameter.envvar)]}", err=True)


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
