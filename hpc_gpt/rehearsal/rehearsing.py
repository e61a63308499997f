"""A rehearsal from beginning to end: data, script, and the run's life. Only a run that is kept is left of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.errors import DataError, JobRefused, SlurmUnreachable, UserError
from hpc_gpt.launch.prepare import Prepared
from hpc_gpt.launch.slurm import check_reachable, has_sbatch, submission_environment, test_only
from hpc_gpt.rehearsal.life import Life, RehearsalFailed, Stage
from hpc_gpt.rehearsal.local_slurm import LocalSlurm
from hpc_gpt.rehearsal.preparation import Missing, SmallRun
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.tokens.run_data import ensure_data, located

# More nodes than a run asks for: one that is excluded has a substitute.
_MORE_NODES = 2
_CHECK_S = 120


@dataclass
class Outcome:
    """The result of a rehearsal. `cause` is None if all of it holds; else `log` has the run's last lines."""

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
    report: Callable[[Stage], None],
    wait: Callable[[str], None],
) -> Outcome:
    """Rehearses `small`, whose script is in `prepared`; `real` is what would be submitted: checked, but not run.

    Runs are written to `keep`, or to a folder that is removed. `report` gets each stage as it happens, `wait` what is
    waited for. Whatever ends the rehearsal, nothing is left running.
    """
    outcome = Outcome(missing=list(small.missing))

    def note(stage: Stage) -> None:
        outcome.stages.append(stage)
        report(stage)

    began = time.monotonic()
    data = look_at_data(located(real.resolved, real.data_beside))
    if isinstance(data, Missing):
        outcome.missing.append(data)
    else:
        note(Stage("data", data, time.monotonic() - began))
    taken, words = _ask_slurm(real.script)
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
            life.say("script", *_check_script(real.script))
            life.rehearse(quick)
        except RehearsalFailed as fault:
            outcome.cause, outcome.log = f"{fault.stage}: {fault}", fault.log
        except UserError as fault:
            note(Stage("submitted", str(fault), life.age_s, ok=False))
            outcome.cause, outcome.log = f"submitted: {fault}", [f"hint: {fault.hint}"] if fault.hint else []
    return outcome


def look_at_data(resolved: Resolved) -> str | Missing:
    """Checks what the real run would read, as submit does. The rehearsed run reads the standard library's sources."""
    try:
        path = ensure_data(resolved)
    except DataError as fault:
        return Missing("the data", f"{fault}; submit refuses the run until they are there")
    return f"{path} is fit for the run" if path is not None else "random tokens"


def _check_script(script: str) -> tuple[str, bool]:
    """(what `bash -n` says of a script, and shellcheck if it is installed; whether they find nothing)."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        checks = [["bash", "-n", file.name]]
        if shutil.which("shellcheck"):
            checks.append(["shellcheck", "--severity=warning", file.name])
        for check in checks:
            done = subprocess.run(check, capture_output=True, text=True, timeout=_CHECK_S, check=False)
            if done.returncode:
                words = (done.stderr or done.stdout).replace(file.name, "job.sh").strip()
                return f"{check[0]}: {words}", False
    names = "bash -n and shellcheck find" if len(checks) > 1 else "bash -n finds"
    return f"{names} nothing in its {script.count(chr(10))} lines", True


def _ask_slurm(script: str) -> tuple[bool | None, str]:
    """(whether a real `sbatch --test-only` takes the script, its text); None if there is no Slurm that answers."""
    if not has_sbatch():
        return None, "there is no sbatch here"
    try:
        check_reachable()
        return True, test_only(script, submission_environment(os.environ, {}))
    except SlurmUnreachable as fault:
        return None, str(fault).partition(";")[0]
    except JobRefused as fault:
        return False, str(fault)


def _own_variables(ranks: int, gpus: int) -> dict[str, str]:
    """What every job of the rehearsal has: this machine takes the place of a cluster's nodes."""
    cores = len(os.sched_getaffinity(0))
    return {
        "HPC_GPT_MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        # If there are too few GPUs for all ranks, none has one.
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }
