"""The request of a job or a step: options, times, signals and hosts, parsed and printed like Slurm's.

A profile or an experiment may give sbatch and srun any option of Slurm 22.05, so the stand-ins accept all of them;
`ignored_options` lists those that a rehearsal does not act on. The other commands have the options that hpc-gpt and its
scripts use.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from hpc_gpt.launch.render import script_directives
from hpc_gpt.runs.hosts import expand_hosts
from hpc_gpt.settings.experiment import limit_s
from hpc_gpt.slurm.options import options_of, options_table

_OPTIONS = {
    "sbatch": options_of("sbatch"),
    "srun": options_of("srun"),
    "scontrol": options_table("", "", "oneliner/o"),
    "squeue": options_table("format/o jobs/j states/t user/u", "", "array/r noheader/h"),
    "scancel": options_table("signal/s state/t", "", "quiet/Q"),
    "sacct": options_table("format/o jobs/j", "", "allocations/X duplicates/D noheader/n parsable2/P"),
}
# Options that start anything but a job's script and its ranks.
_NOT_REHEARSED = {"sbatch": ("array", "wrap"), "srun": ("het-group", "jobid", "multi-prog", "no-allocate")}
# Options that would change the place of output or ranks, or the time: a rehearsal continues without them and reports
# it. All other options without an effect here ask for what only a site has, and are granted.
_IGNORED = {
    "sbatch": ("batch", "error", "export-file", "get-user-env", "hold", "input", "nodefile", "wait"),
    "srun": ("bcast", "error", "exclude", "input", "nodefile", "output", "pty", "relative"),
}
_LEAD_S = 60


class RequestFault(ValueError):
    """A refusal with the command's own message."""


class OptionFault(RequestFault):
    """An unknown option, or an option without its value, with getopt's message."""


def not_rehearsed(what: str) -> RequestFault:
    """The refusal of what only a real Slurm can do."""
    return RequestFault(
        f"{what} is not known to a rehearsal, which answers what hpc-gpt and its scripts ask; a real Slurm knows it"
    )


@dataclass(frozen=True)
class LimitSignal:
    """`--signal=[B:]NUMBER@SECONDS`: sent `lead_s` before the time limit, to the ranks or only to the script."""

    number: int
    lead_s: int
    to_script: bool


@dataclass(frozen=True)
class JobRequest:
    """One job's request. `limit_s` None: no limit. `begin`: seconds since 1970. `options`: all of them, by long
    name."""

    name: str
    nodes: int
    ntasks: int
    ntasks_per_node: int | None
    gpus_per_node: int
    cpus_per_task: int | None
    limit_s: int | None
    requeue: bool
    append: bool
    signal: LimitSignal | None
    begin: float
    options: Mapping[str, str]


def parse_options(command: str, arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(long name -> value or "", the arguments after the options) of a command line.

    Raises OptionFault, or RequestFault for what only a real Slurm knows.
    """
    names, letters = _OPTIONS[command]
    found: dict[str, str] = {}
    left = list(arguments)
    while left and left[0].startswith("-") and left[0] != "-":
        argument = left.pop(0)
        if argument == "--":
            break
        is_long = argument.startswith("--")
        if is_long:
            name, equals, value = argument[2:].partition("=")
            fits = [known for known in names if known.startswith(name)]
            name = fits[0] if name not in names and len(fits) == 1 else name
        else:
            name, value = letters.get(argument[1], argument[1]), argument[2:]
            equals = value
        kind = names.get(name)
        if name in _NOT_REHEARSED.get(command, ()) or (kind is None and command not in _NOT_REHEARSED):
            raise not_rehearsed(f"{command} {argument}")
        if kind is None:
            raise OptionFault(f"unrecognized option '--{name}'" if is_long else f"invalid option -- '{name}'")
        if kind == "plain" and equals:
            if is_long:
                raise OptionFault(f"option '--{name}' doesn't allow an argument")
            left.insert(0, f"-{value}")  # several letters together: -lK1
            value = ""
        elif kind == "valued" and not equals:
            if not left:
                missing = f"option '--{name}' requires an argument"
                raise OptionFault(missing if is_long else f"option requires an argument -- '{argument[1]}'")
            value = left.pop(0)
        found[name] = value
    return found, left


def ignored_options(command: str, options: Mapping[str, str]) -> list[str]:
    """The options of a sbatch or srun that a rehearsal does not act on, as on the command line.

    >>> ignored_options("srun", {"output": "x.log", "nodes": "2", "export": "ALL"})
    ['srun --output=x.log']
    """
    return [
        f"{command} --{name}{f'={value}' if value else ''}"
        for name, value in options.items()
        if (name in _IGNORED[command] and value != options.get("output" if name == "error" else ""))
        or (name == "export" and value != "ALL")
    ]


def read_request(script: str, line: Mapping[str, str], name: str, now: float) -> JobRequest:
    """The request of a script whose file is `name`. Options of sbatch's command `line` override the script's
    directives.

    Raises RequestFault.
    """
    arguments = [argument for directive in script_directives(script) for argument in _split(directive)]
    options = {**parse_options("sbatch", arguments)[0], **line}
    nodes = _count(options, "nodes")
    per_node = _count(options, "ntasks-per-node")
    ntasks = _count(options, "ntasks")
    if nodes is None:
        nodes = -(-(ntasks or 1) // per_node) if per_node else 1
    return JobRequest(
        name=options.get("job-name", name),
        nodes=nodes,
        ntasks=ntasks or nodes * (per_node or 1),
        ntasks_per_node=per_node,
        gpus_per_node=_gpus(options),
        cpus_per_task=_count(options, "cpus-per-task"),
        limit_s=_limit(options.get("time")),
        requeue="requeue" in options or "no-requeue" not in options,
        append=options.get("open-mode") in ("append", "a"),
        signal=read_signal(options.get("signal")),
        begin=read_time(options.get("begin", "now"), now),
        options=options,
    )


def _split(directive: str) -> list[str]:
    try:
        return shlex.split(directive, comments=True)
    except ValueError:
        raise RequestFault(f"Unmatched quote in a directive: {directive}") from None


def _count(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"\d+(-\d+)?", text) or int(text.partition("-")[0]) < 1:
        raise RequestFault(f'invalid {name.replace("-", " ")} specification "{text}"')
    return int(text.partition("-")[0])


def _gpus(options: Mapping[str, str]) -> int:
    """GPUs on each node, by --gres=gpu[:TYPE][:N] or --gpus-per-node=[TYPE:]N."""
    asked = options.get("gres", "")
    if "gpus-per-node" in options:
        asked = f"gpu:{options['gpus-per-node']}"
    for kind, *rest in (resource.split(":") for resource in asked.split(",")):
        if kind == "gpu":
            return int(rest[-1]) if rest and rest[-1].isdigit() else 1
    return 0


def _limit(text: str | None) -> int | None:
    """Seconds of --time, rounded up to minutes as by Slurm."""
    try:
        limit = limit_s(text)
    except ValueError:
        raise RequestFault("Invalid --time specification") from None
    return None if limit is None else -(-limit // 60) * 60


def read_signal(text: str | None) -> LimitSignal | None:
    """The request of `--signal=USR2@120`. RequestFault if it names no signal.

    >>> read_signal("B:TERM")
    LimitSignal(number=15, lead_s=60, to_script=True)
    """
    if text is None:
        return None
    found = re.fullmatch(r"(?:(R?B?R?):)?([A-Za-z0-9]+)(?:@(\d+))?", text)
    number = signal_number(found[2]) if found else None
    if found is None or number is None:
        raise RequestFault(f"Invalid --signal specification: {text}")
    return LimitSignal(number, int(found[3] or _LEAD_S), "B" in (found[1] or ""))


def signal_number(text: str) -> int | None:
    """The number of a signal that is given by name, with or without SIG, or by number; None for an unknown one.

    >>> signal_number("SIGUSR2") == signal_number("usr2") == signal.SIGUSR2
    True
    """
    if text.isdigit():
        return int(text) if int(text) in {*signal.Signals} else None
    try:
        return signal.Signals["SIG" + text.upper().removeprefix("SIG")].value
    except KeyError:
        return None


def read_time(text: str, now: float) -> float:
    """Seconds since 1970 of a --begin or a StartTime: `now` or `now+SECONDS`, the forms that hpc-gpt's scripts use."""
    found = re.fullmatch(r"now(?:\+(\d+))?", text)
    if found is None:
        raise not_rehearsed(f"the time {text}")
    return now + int(found[1] or 0)


def output_path(pattern: str, fields: Mapping[str, str]) -> str:
    """The file name of a pattern like `%x-%j.out`. An unknown field stays as it is; `%%` gives one %."""

    def fill(found: re.Match[str]) -> str:
        if found[2] == "%":
            return "%"
        value = fields.get(found[2])
        return found[0] if value is None else value.zfill(int(found[1] or 0)) if value.isdigit() else value

    return re.sub(r"%(\d*)([a-zA-Z%])", fill, pattern)


def read_hosts(text: str) -> list[str]:
    """The hosts of a Slurm hostlist. RequestFault if it is none."""
    try:
        return expand_hosts(text)
    except ValueError as fault:
        raise RequestFault(str(fault)) from None


def compress_hosts(hosts: Sequence[str]) -> str:
    """The hosts as a Slurm hostlist.

    >>> compress_hosts(["n1", "n2", "n4"]), compress_hosts(["n1"])
    ('n[1-2,4]', 'n1')
    """
    groups: dict[str, list[int]] = {}
    for host in hosts:
        name = host.rstrip("0123456789")
        groups.setdefault(name, []).extend(map(int, filter(None, [host[len(name) :]])))
    return ",".join(
        name + (f"[{spans(numbers)}]" if len(numbers) > 1 else spans(numbers)) for name, numbers in groups.items()
    )


def spans(numbers: Sequence[int]) -> str:
    """The numbers as ranges, like `1-2,4`."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    lists = [[number for _, number in run] for _, run in runs]
    return ",".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in lists)


def compress_counts(counts: Sequence[int]) -> str:
    """A number for each node, in the form of Slurm's variables.

    >>> compress_counts([4, 4, 2])
    '4(x2),2'
    """
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
