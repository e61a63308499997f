"""What a job or a step is asked to be.

sbatch and srun accept every option of Slurm 22.05, as a profile or a script may give any; `ignored_options` names those
that a rehearsal does not act on. The other commands have the options that hpc-gpt and its scripts use.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_gpt.settings.experiment import limit_s
from hpc_gpt.slurm.directives import script_directives
from hpc_gpt.slurm.options import options_of, options_table
from hpc_gpt.slurm.sbatch_words import LimitSignal, read_call, signal_of, sizes_of, split_directive

_OPTIONS = {
    "sbatch": options_of("sbatch"),
    "srun": options_of("srun"),
    "scontrol": options_table("", "", "local oneliner/o"),
    "squeue": options_table("format/o jobs/j states/t user/u", "", "array/r noheader/h sibling"),
    "scancel": options_table("signal/s state/t", "", "quiet/Q"),
    "sacct": options_table("format/o jobs/j", "", "allocations/X duplicates/D federation noheader/n parsable2/P"),
}
# Options that start anything but a job's script and its ranks.
_NOT_REHEARSED = {"sbatch": {"array", "wrap"}, "srun": {"het-group", "jobid", "multi-prog", "no-allocate"}}
# Options that would change the place of output or ranks, or the time. All others without an effect here ask for what
# only a site has, and are granted.
_IGNORED = {
    "sbatch": {"batch", "error", "export-file", "get-user-env", "hold", "input", "nodefile", "wait"},
    "srun": {"bcast", "error", "exclude", "input", "nodefile", "output", "pty", "relative"},
}


class RequestFault(ValueError):
    """A refusal with the command's own message."""


def not_rehearsed(what: str) -> RequestFault:
    """The refusal of what only a real Slurm can do."""
    return RequestFault(
        f"{what} is not known to a rehearsal, which answers what hpc-gpt and its scripts ask; a real Slurm knows it"
    )


def parse_options(command: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(long name -> value or "", the arguments after the options) of a command line. Raises RequestFault."""
    options, arguments = read_call(words, _OPTIONS[command])
    for name in options:
        if name in _NOT_REHEARSED.get(command, ()) or name not in _OPTIONS[command].kinds:
            raise not_rehearsed(f"{command} --{name}")
    return options, arguments


def ignored_options(command: str, options: Mapping[str, str]) -> list[str]:
    """The options of a sbatch or srun that a rehearsal does not act on, as on the command line.

    >>> ignored_options("srun", {"output": "x.log", "nodes": "2", "export": "ALL"})
    ['srun --output=x.log']
    """
    return [
        f"{command} --{name}{f'={value}' if value else ''}"
        for name, value in options.items()
        if (name in _IGNORED[command] and (name != "error" or value != options.get("output")))
        or (name == "export" and value != "ALL")
    ]


@dataclass(frozen=True)
class JobRequest:
    """One job's request. `limit_s` None: no limit. `options`: all of them, by long name."""

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
    options: Mapping[str, str]


def read_request(script: str, line: Mapping[str, str], name: str) -> JobRequest:
    """The request of a script whose file is `name`. Options of sbatch's command `line` override its directives."""
    words = [word for directive in script_directives(script) for word in split_directive(directive)]
    options = {**parse_options("sbatch", words)[0], **line}
    sizes, limit = sizes_of(options), limit_s(options.get("time"))
    per_node, cpus = options.get("ntasks-per-node"), options.get("cpus-per-task")
    return JobRequest(
        name=options.get("job-name", name),
        nodes=sizes.nodes,
        ntasks=sizes.tasks or sizes.nodes,
        ntasks_per_node=int(per_node) if per_node else None,
        gpus_per_node=sizes.gpus,
        cpus_per_task=int(cpus) if cpus else None,
        limit_s=None if limit is None else -(-limit // 60) * 60,  # Slurm rounds up to minutes
        requeue="requeue" in options or "no-requeue" not in options,
        append=options.get("open-mode") in ("append", "a"),
        signal=signal_of(options["signal"]) if "signal" in options else None,
        options=options,
    )


def signal_number(name: str) -> int:
    """The number of a signal by its name, with or without SIG, or by its number. ValueError for an unknown one."""
    return int(name) if name.isdigit() else signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"].value


def read_time(text: str, now: float) -> float:
    """Seconds since 1970 of a --begin or a StartTime: `now` or `now+SECONDS`, the forms that hpc-gpt's scripts use."""
    found = re.fullmatch(r"now(?:\+(\d+))?", text)
    if found is None:
        raise not_rehearsed(f"the time {text}")
    return now + int(found[1] or 0)
