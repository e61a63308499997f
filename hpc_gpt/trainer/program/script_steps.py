"""The steps that a job script starts by srun, as its text shows them: their GPUs, and steps whose ranks share a core.

Nothing is executed. Values that only a shell could evaluate are unknown.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpc_gpt.core.slurm.directives import options_of
from hpc_gpt.core.slurm.sbatch_words import Sizes, read_call, sizes_of
from hpc_gpt.core.slurm.script_lines import assignment, expand, logical_lines

# {variable of a job: the option of sbatch that gives its value}.
_OF_OPTIONS = {
    **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "nodes"),
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), "ntasks"),
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_GPUS_PER_TASK": "gpus-per-task",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
}
_SRUN = re.compile(r"(?:^|[\s;&|({`])(?:/\S{1,200}/)?srun\s")
_ECHOES = re.compile(r"^\s*(?:echo|printf|#)")
_ENDS = re.compile(r"\s(?:\|\|?|&&?|;|\d?>>?)(?=\s|$)|[;&|]\s*$")
# Programs that start a rank for each GPU.
_STARTS_RANKS = re.compile(
    r"(?<![\w./-])(?:\S{0,200}/)?(?:torchrun|deepspeed|colossalai run)(?=[\s\"']|$)"
    r"|\btorch\.distributed\.(?:run|launch)\b|\baccelerate launch\b"
)
# Bindings that give a task more than one core.
_WIDE = r"(?:none|no|mask|map|sockets|ldoms|boards|rank_ldom)"
_BOUND_WIDE = re.compile(rf"(?:^|,){_WIDE}")
_CPUS_PER_STEP = re.compile(rf"\bSRUN_CPUS_PER_TASK=|\bSLURM_CPU_BIND=[\"']?(?:\w{{1,9}},)?{_WIDE}")


@dataclass(frozen=True)
class Step:
    """A call of srun: its line's number, its options {long name: value}, the command that it starts, and the sizes that
    it has as a part of the job."""

    line: int
    options: Mapping[str, str]
    command: str
    sizes: Sizes

    @property
    def shares_a_core(self) -> bool:
        """Whether one task starts all ranks of a node, and no option gives it more than one CPU.

        From 22.05 on srun does not take over the job's --cpus-per-task.
        """
        cpus, bind = self.options.get("cpus-per-task", "1"), self.options.get("cpu-bind", "")
        one = (self.sizes.tasks or self.sizes.nodes) <= self.sizes.nodes
        return one and cpus == "1" and not _BOUND_WIDE.search(bind) and bool(_STARTS_RANKS.search(self.command))


def steps_of(text: str, job: Mapping[str, str | None]) -> Iterator[Step]:
    """Yields the steps of a job script; `job`: the options of the job, {long name: value}."""
    sizes = sizes_of(job)
    stated = {name: job.get(option) for name, option in _OF_OPTIONS.items()}
    tasks = str(sizes.tasks or sizes.nodes)
    variables = {name: value for name, value in stated.items() if value} | {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(sizes.nodes)),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), tasks),
    }
    cpus_for_steps = False
    for number, line in logical_lines(text):
        if _ECHOES.match(line):
            continue
        cpus_for_steps = cpus_for_steps or bool(_CPUS_PER_STEP.search(line))
        if (assigned := assignment(line)) is not None and not _SRUN.search(line):
            name, written, plain = assigned
            variables[name] = expand(written, variables) if plain else written
            continue
        for call in list(_SRUN.finditer(line))[:9]:
            arguments = expand(line[call.end() :], variables)
            ends = _ENDS.search(arguments)
            try:
                words = shlex.split(arguments[: ends.start()] if ends else arguments)
            except ValueError:
                words = arguments.split()
            options, command = read_call(words, options_of("srun"))
            values = {name.replace("_", "-"): value for name, value in options.items()}  # --cpu_bind, of old
            if cpus_for_steps:
                values.setdefault("cpus-per-task", "?")
            yield Step(number, values, " ".join(command), _sizes(job, values))


def _sizes(job: Mapping[str, str | None], values: Mapping[str, str]) -> Sizes:
    """The sizes of a step: its own options, then the job's."""
    own = {name: value for name, value in values.items() if not set(value) & set("$`")}
    taken = dict(job)
    if "ntasks" in own or "ntasks-per-node" in own:
        taken = {name: value for name, value in job.items() if name not in ("ntasks", "ntasks-per-node")}
    return sizes_of({**taken, **own})


def gpus_of_steps(text: str, job: Mapping[str, str | None]) -> tuple[int, int]:
    """Returns (the most GPUs that a step of the script has on a node, the line of that step); (0, 0) if no step names
    GPUs."""
    steps = [(step.sizes.gpus, step.line) for step in steps_of(text, job)]
    return max(steps, key=lambda step: step[0], default=(0, 0)) if any(gpus for gpus, _ in steps) else (0, 0)
