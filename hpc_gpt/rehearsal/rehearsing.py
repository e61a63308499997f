"""A rehearsal from its beginning to its end: nothing of it is left but what it says, and the run where that is kept."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.errors import DataError, UserError
from hpc_gpt.launch.prepare import Prepared
from hpc_gpt.rehearsal.life import Life, RehearsalFailed, Stage
from hpc_gpt.rehearsal.local_slurm import LocalSlurm
from hpc_gpt.rehearsal.preparation import Missing, SmallRun
from hpc_gpt.rehearsal.reading_back import read_back
from hpc_gpt.rehearsal.script_check import ask_slurm, check_script
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.tokens.run_data import ensure_data, located

# Nodes beside those of a run: what is excluded has a substitute.
_MORE_NODES = 2


@dataclass
class Outcome:
    """What a rehearsal came to. `cause` is None where all of it holds; `log` are the run's last lines where not."""

    stages: list[Stage] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    cause: str | None = None
    log: list[str] = field(default_factory=list)


def rehearse(
    real: Prepared,
    small: SmallRun,
    prepared: Prepared,
    quick: bool,
    keep: Path | None,
    tell: Callable[[Stage], None],
    wait: Callable[[str], None],
) -> Outcome:
    """Rehearses `small`, whose script `prepared` has; `real` is what would be submitted, and is checked, not run.

    Runs land in `keep`, or in a folder that is taken away again. `tell` gets each stage as it happens, `wait`
    what is waited for. Whatever ends it, nothing is left running.
    """
    outcome = Outcome(missing=list(small.missing))

    def note(stage: Stage) -> None:
        outcome.stages.append(stage)
        tell(stage)

    began = time.monotonic()
    data = look_at_data(located(real.resolved, real.data_beside))
    if isinstance(data, Missing):
        outcome.missing.append(data)
    else:
        note(Stage("data", data, time.monotonic() - began))
    taken, words = ask_slurm(real.script)
    if taken is None:
        outcome.missing.append(Missing("whether Slurm takes the job", words))
    else:
        note(Stage("slurm", f"sbatch --test-only: {words}", time.monotonic() - began, taken))
        if not taken:
            outcome.cause = f"slurm: {words}"
            return outcome
    resolved = small.resolved
    nodes = resolved.nodes + (resolved.job.spare_nodes or 0) + _MORE_NODES
    with LocalSlurm(nodes, small.gpus, also=_own_variables(resolved.gpus, small.gpus)) as slurm:
        logs = keep.resolve() if keep is not None else slurm.folder / "logs"
        life = Life(small, prepared, slurm, logs, note, wait, began)
        try:
            sound, words = check_script(real.script)
            life.say("script", words, sound)
            run = life.rehearse(quick)
            life.say("record", *read_back(run, slurm.environment))
            life.end()
        except RehearsalFailed as fault:
            outcome.cause, outcome.log = f"{fault.stage}: {fault}", fault.log
        except UserError as fault:
            note(Stage("submitted", str(fault), life.age_s, ok=False))
            outcome.cause, outcome.log = f"submitted: {fault}", [f"hint: {fault.hint}"] if fault.hint else []
    return outcome


def look_at_data(resolved: Resolved) -> str | Missing:
    """What the real run would read, looked at as submit does; the rehearsed one reads the standard library's bytes."""
    try:
        path = ensure_data(resolved)
    except DataError as fault:
        return Missing("the data", f"{fault}; submit refuses the run until they are there")
    return f"{path} is fit for the run" if path is not None else "random tokens"


def _own_variables(ranks: int, gpus: int) -> dict[str, str]:
    """What every job of the rehearsal has: this machine in the place of a cluster's nodes."""
    cores = len(os.sched_getaffinity(0))
    return {
        "HPC_GPT_MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        # Ranks that do not all have a GPU have none.
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }
