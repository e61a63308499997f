"""`GONE`: each verb, option and key that a version removed, and what is in its place."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from hpc_gpt.core.errors import ConfigError


class Gone(NamedTuple):
    """The first version without it, what is in its place, and for a key its default, with which a file may still name
    it."""

    version: str
    instead: str
    default: Any = None


_DRY_RUN = "hpc-gpt submit --dry-run checks the run itself"
# {a verb, "VERB --option", a key, or "key = value" for a value of a key that stays}
GONE: dict[str, Gone] = {
    "bench": Gone("0.4", "submit --race measures rows in turns, submit --sweep the published ladders"),
    "doctor --checkpoints": Gone("0.4", _DRY_RUN),
    "doctor --force": Gone("0.4", _DRY_RUN),
    "doctor --gas": Gone("0.4", _DRY_RUN),
    "doctor --gbs": Gone("0.4", _DRY_RUN),
    "doctor --global-batch-size": Gone("0.4", _DRY_RUN),
    "doctor --max-gpu-hours": Gone("0.4", _DRY_RUN),
    "doctor --mbs": Gone("0.4", _DRY_RUN),
    "doctor --micro-batch-size": Gone("0.4", _DRY_RUN),
    "doctor --smoke": Gone("0.4", _DRY_RUN),
    "doctor --zero-stage": Gone("0.4", _DRY_RUN),
    "engine.offload_path": Gone("0.4", "engine.offload keeps what it moves in the memory of the host"),
    "engine.offload_ratio": Gone("0.4", "engine.offload moves all states, 16 bytes a parameter", 1.0),
    "help plan-traits": Gone("0.4", "hpc-gpt help keys plan lists the keys of [plan]"),
    "help sweeps": Gone("0.4", '[rows] of an experiment has lines such as "tp2" = { layout.tp = 2 }'),
    "init --from": Gone("0.4", "hpc-gpt submit train.slurm runs the script as it is"),
    "job.restart_min_s": Gone("0.4", "a restart in the job leaves ten minutes of training, or the queue follows", 600),
    "job.restart_pauses_s": Gone("0.4", "a job idles at most five minutes before restarts in it", 300),
    "job.retry_after_exit_0": Gone("0.4", "a program that exits with 0 is over; let command.run loop", default=False),
    "job.slow_ranks": Gone("0.4", "hpc-gpt status names a slow rank; requeue the run without its node", "note"),
    "model.window_every": Gone("0.4", 'model.window_layers has a letter a layer, in turn: "SL" for window_every = 2'),
    "plan --html": Gone("0.4", "plan --json has every figure of a plan"),
    "plan.edges_as_layers": Gone("0.4", "leave it out: a plan splits layers evenly over stages"),
    "plan.offloaded_layers": Gone("0.4", "give --cpu-offloading-num-layers in engine.megatron_args"),
    "plan.whole_gradients": Gone("0.4", "leave it out: no plan of a program takes it"),
    "plan.whole_logits": Gone("0.4", "leave it out: no plan of a program takes it"),
    "shell": Gone("0.4", "status RUN and why RUN print the srun line that opens a shell in its job"),
    "submit --here": Gone("0.4", "hpc-gpt render X >x.sh && bash x.sh runs in the allocation"),
    "submit --winner": Gone("0.4", "report RACE prints the command that trains with the row that won"),
    "train.matmul_rate": Gone("0.4", "the preflight measures each device's rate before the start", default=False),
    "train.max_failed_saves": Gone("0.4", "leave it out: three refused saves in a row end the attempt", 3),
    "train.optimizer_mode = compiled": Gone("0.4", "leave it out: torch's fused kernel updates, at gpt2 2 % slower"),
}


def gone_fault(name: str) -> tuple[str, str] | None:
    """Returns (message, hint) for the name of a removed verb or option; None for any other name."""
    return (f"{name} is gone since {GONE[name].version}", GONE[name].instead) if name in GONE else None


def gone_of_key(key: str, value: Any) -> str | None:
    """The name in GONE of a dotted key, or of its value; None if both are known, or if it has its former default."""
    name = f"{key} = {value}"
    if name in GONE:
        return name
    return key if key in GONE and value != GONE[key].default else None


def split_gone(tables: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns (the stored tables without keys and values that are in GONE, `key = value` of each that did not have
    its default)."""
    left, found = copy.deepcopy(dict(tables)), []
    for name in GONE:
        key, _, gone_value = name.partition(" = ")
        *parents, last = key.split(".")
        table: Any = left
        for part in parents:
            table = table.get(part) if isinstance(table, dict) else None
        if not parents or not isinstance(table, dict) or last not in table or (gone_value not in ("", table[last])):
            continue
        value = table.pop(last)
        if gone_of_key(key, value) is not None:
            found.append(f"{key} = {value}")
    return left, tuple(found)


def refuse_gone(settings: tuple[str, ...], what: str) -> None:
    """Raises ConfigError if `what`, such as a run, has settings (`key = value`) that are gone."""
    if settings:
        names = [setting if setting in GONE else setting.partition(" = ")[0] for setting in settings]
        version = GONE[names[0]].version
        raise ConfigError(
            f"{what} has {', '.join(settings)}, gone since {version}",
            "; ".join(dict.fromkeys(GONE[name].instead for name in names)),
        )
