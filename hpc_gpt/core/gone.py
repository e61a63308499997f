"""`GONE`: each verb, option and key that a version removed, and what is in its place."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from hpc_gpt.core.errors import ConfigError


class Gone(NamedTuple):
    """The first version without it, what is in its place, and for a key its default, with which a file may still name
    it. `stops`: a run that has it is not continued."""

    version: str
    instead: str
    default: Any = None
    stops: bool = True


_DRY_RUN = "hpc-gpt submit --dry-run checks the run itself"
# {a verb, "VERB --option", a key, "key = value" for a value of a key that stays, or "[table]"}
GONE: dict[str, Gone] = {
    "[after]": Gone(
        "0.5", 'notify.on = ["saved"] names each checkpoint to notify.command, which calls sbatch itself', stops=False
    ),
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
    "engine.fused_bias_gradients": Gone(
        "0.5", "leave it out: the gradients of biases are always computed by themselves", default=False, stops=False
    ),
    "engine.offload_path": Gone("0.4", "engine.offload keeps what it moves in the memory of the host"),
    "engine.offload_ratio": Gone("0.4", "engine.offload moves all states, 16 bytes a parameter", 1.0),
    "help causes --json": Gone("0.5", "hpc-gpt help causes lists them as text; help keys --json lists keys"),
    "help engines --json": Gone("0.5", "hpc-gpt help engines lists them as text; help keys --json lists keys"),
    "help plan-traits": Gone("0.4", "hpc-gpt help keys plan lists the keys of [plan]"),
    "help record --json": Gone("0.5", "hpc-gpt help record lists them as text; help keys --json lists keys"),
    "help sweeps": Gone("0.4", '[rows] of an experiment has lines such as "tp2" = { layout.tp = 2 }'),
    "help word --json": Gone("0.5", "hpc-gpt help keys TABLE --json lists the keys of a table"),
    "init --from": Gone("0.4", "hpc-gpt submit train.slurm runs the script as it is"),
    "job.restart_min_s": Gone("0.4", "a restart in the job leaves ten minutes of training, or the queue follows", 600),
    "job.restart_pauses_s": Gone("0.4", "a job idles at most five minutes before restarts in it", 300),
    "job.retry_after_exit_0": Gone("0.4", "a program that exits with 0 is over; let command.run loop", default=False),
    "job.slow_ranks": Gone("0.4", "hpc-gpt status names a slow rank; requeue the run without its node", "note"),
    "model.window_every": Gone("0.4", 'model.window_layers has a letter a layer, in turn: "SL" for window_every = 2'),
    "plan --html": Gone("0.4", "plan --json has every figure of a plan"),
    "race": Gone("0.5", "hpc-gpt submit --race makes a sweep; report RACE shows what this race has measured", 0),
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
    """The name in GONE of a dotted key, of its value or of a table; None if it is known, or has its former default."""
    for name in (f"{key} = {value}", f"[{key}]"):
        if name in GONE:
            return name
    return key if key in GONE and value != GONE[key].default else None


def split_gone(tables: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns (the stored tables without keys, values and tables that are in GONE; each as in GONE, a key that did not
    have its default as `key = value`)."""
    left, found = copy.deepcopy(dict(tables)), []
    for name in GONE:
        if name.startswith("["):
            found += [name] if left.pop(name.strip("[]"), None) else []
            continue
        key, _, gone_value = name.partition(" = ")
        *parents, last = key.split(".")
        table: Any = left
        for part in parents:
            table = table.get(part) if isinstance(table, dict) else None
        if not isinstance(table, dict) or last not in table or (gone_value not in ("", table[last])):
            continue
        value = table.pop(last)
        if gone_of_key(key, value) is not None:
            found.append(f"{key} = {value}")
    return left, tuple(found)


def refuse_gone(settings: tuple[str, ...], what: str) -> None:
    """Raises ConfigError if `what`, such as a run, has settings (`key = value`) that are gone."""
    refused = [(setting, gone) for setting, gone in _gone_of(settings) if gone.stops]
    if refused:
        raise ConfigError(
            f"{what} has {', '.join(setting for setting, _ in refused)}, gone since {refused[0][1].version}",
            "; ".join(dict.fromkeys(gone.instead for _, gone in refused)),
        )


def gone_notes(settings: tuple[str, ...], own_code: bool = False) -> list[str]:
    """A note on each of the settings with which a run continues. `own_code`: its job has the code of the version
    before, which still knows them."""
    effect = "takes effect as long as the run keeps its own code" if own_code else "has no effect any more"
    return [
        f"note: {setting} is gone since {gone.version}, and {effect}: {gone.instead}"
        for setting, gone in _gone_of(settings)
        if not gone.stops
    ]


def _gone_of(settings: tuple[str, ...]) -> list[tuple[str, Gone]]:
    return [(setting, GONE.get(setting) or GONE[setting.partition(" = ")[0]]) for setting in settings]
