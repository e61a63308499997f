"""A rehearsal from beginning to end: make the run small enough for this machine, check it, run it, report the outcome.

What this machine cannot show of the real run is listed. Nothing is left of a rehearsal but a run that is to be kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_gpt.errors import ConfigError, DataError, JobRefused, SlurmUnreachable, UserError
from hpc_gpt.launch.prepare import Prepared, shrunken
from hpc_gpt.launch.request import Request, choose_profile
from hpc_gpt.launch.slurm import check_reachable, has_sbatch
from hpc_gpt.launch.slurm_start import ask_start
from hpc_gpt.rehearsal.life import SAVE_EVERY, STEPS, Life, RehearsalFailed, Stage
from hpc_gpt.rehearsal.local_slurm import LocalSlurm
from hpc_gpt.settings.cluster import FALLBACK, ClusterProfile
from hpc_gpt.settings.command import refuse_command
from hpc_gpt.settings.experiment import Experiment
from hpc_gpt.settings.resolve import experiment_of
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.tokens.run_data import ensure_data, located

# Jobs of a singleton chain: the first one, and one for each interruption.
CHAIN_JOBS = 3
# Nodes in addition to those that a run asks for, as substitutes for excluded ones.
_MORE_NODES = 2
_CHECK_S = 120
_MODULE_INITS = ("/etc/profile.d/modules.sh", "/etc/profile.d/lmod.sh", "/etc/profile.d/z00_lmod.sh")
# Variables that the rehearsal sets for this machine, and that a profile's must not override.
_OURS = ("PATH", "OMP_NUM_THREADS", "SLURM_CONF", "TMPDIR", "HPC_GPT_STATE", "HPC_GPT_LOGS", "HPC_GPT_MASTER_ADDR",
         "HPC_GPT_REHEARSAL", "CUDA_VISIBLE_DEVICES")  # fmt: skip


@dataclass(frozen=True)
class Missing:
    """A part of the real run that is not rehearsed, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class SmallRun:
    """The run to rehearse, the parts of the real one that are missing, notes for the user, and the GPUs it uses."""

    resolved: Resolved
    missing: tuple[Missing, ...]
    notes: tuple[str, ...]
    gpus: int


def with_slurm(request: Request) -> tuple[Request, str]:
    """The request with a profile that has Slurm, and a note if it is not the user's own; ConfigError if the profile
    that --cluster names has none."""
    if choose_profile(request, queueing=False).scheduler == "slurm":
        return request, ""
    if request.cluster is not None:
        raise ConfigError(
            f"profile {request.cluster} has no Slurm to rehearse",
            f"hpc-gpt submit --smoke runs it here; or use --cluster {FALLBACK}",
        )
    return replace(request, cluster=FALLBACK), f"your own profile has no Slurm to rehearse: using {FALLBACK}"


def make_small(real: Resolved, gpus_here: int) -> SmallRun:
    """The run `real` at --smoke size, with the user's directives and as much of the profile as works here.

    It has two nodes if the real one has several, and uses GPUs if there is one for every rank. Raises LayoutError or
    ConfigError if it cannot be made so small.
    """
    refuse_command(
        real.engine.name, "a rehearsal trains a small model of ours", "hpc-gpt submit --cluster local tries it"
    )
    profile, missing = _profile_here(real.cluster)
    ranks = 1
    for size in (real.layout.tp, real.layout.pp, real.layout.dp):
        ranks *= min(2, size)
    gpus = gpus_here if gpus_here >= ranks else 0
    notes: tuple[str, ...] = ()
    if not gpus and profile.device not in (None, "cpu"):
        # On a cluster a rank without its GPU is a fault.
        profile = replace(profile, device=None)
        notes = (f"{_gpus_for(ranks, gpus_here)} here: the ranks run on the CPU",)

    def change(small: Experiment) -> Experiment:
        train = replace(
            small.train,
            steps=STEPS,
            save_every=SAVE_EVERY,
            save_last=True,
            eval_every=STEPS if real.train.eval_every else 0,
            until_loss=None,
        )
        half = ranks // 2
        on_two_nodes = real.nodes > 1 and ranks % 2 == 0 and half % (small.layout.tp or 1) == 0
        layout = replace(small.layout, nodes=2) if on_two_nodes and half <= profile.gpus_per_node else small.layout
        return replace(small, name=f"{real.name}-rehearsal", train=train, layout=layout)

    small, lines = shrunken(experiment_of(real), real, profile, bool(gpus), change)
    job = replace(real.job, name=small.job.name, max_gpu_hours=None, nodelist=None, exclude=None, dependency=None)
    missing += [*of_the_job(real), _of_the_gpus(real, ranks, gpus_here, gpus)]
    return SmallRun(replace(small, job=job), tuple(missing), (*notes, *lines), gpus)


def _profile_here(profile: ClusterProfile) -> tuple[ClusterProfile, list[Missing]]:
    """The profile without what this machine lacks."""
    missing: list[Missing] = []
    if profile.modules and not _has_modules():
        missing.append(Missing(f"modules {', '.join(profile.modules)}", "there is no module command here"))
        profile = replace(profile, modules=())
    if profile.venv is not None and not (Path(profile.venv) / "bin" / "activate").is_file():
        missing.append(Missing(f"venv {profile.venv}", "there is no such folder here"))
        profile = replace(profile, venv=None)
    if profile.python is not None and shutil.which(profile.python) is None:
        missing.append(Missing(f"python {profile.python}", "there is no such command here"))
        profile = replace(profile, python=None)
    if profile.container is not None:
        why = _no_container(profile)
        if why:
            missing.append(Missing(f"container {profile.container.image}", why))
            profile = replace(profile, container=None)
    environment = dict(profile.environment)
    for name, value in profile.environment.items():
        if name in _OURS:
            del environment[name]
            if name == "PATH":
                missing.append(Missing("the profile's PATH", "the stand-ins must come first in it"))
        elif name.endswith("_SOCKET_IFNAME") and not _has_interface(value):
            del environment[name]
            missing.append(Missing(f"{name}={value}", "there is no such network interface here"))
    if profile.node_suffix:
        missing.append(Missing(f"node names with {profile.node_suffix}", "the nodes are names of this one machine"))
    return replace(profile, environment=environment), missing


def _has_modules() -> bool:
    """Whether the script would find a `module` command: an inherited function, or a file that defines it."""
    inits = [os.environ.get("MODULESHOME", "/nowhere") + "/init/bash", os.environ.get("LMOD_PKG", "/nowhere") +
             "/init/bash", *_MODULE_INITS]  # fmt: skip
    return "BASH_FUNC_module%%" in os.environ or any(os.access(init, os.R_OK) for init in inits)


def _no_container(profile: ClusterProfile) -> str:
    """Why the profile's container cannot be used here; empty if it can."""
    container = profile.container
    assert container is not None
    if container.kind == "pyxis":
        return "srun's own plug-in (pyxis) starts it, which a stand-in lacks: the ranks run without it"
    if shutil.which("apptainer") is None:
        return "there is no apptainer here: the ranks run without it"
    if not Path(container.image).exists():
        return "there is no such image here: the ranks run without it"
    return ""


def _has_interface(value: str) -> bool:
    """Whether this machine has an interface whose name begins with one in `value`, where NCCL allows `^` and `=`."""
    names = os.listdir("/sys/class/net") if Path("/sys/class/net").is_dir() else []
    return value.startswith("^") or any(
        name.startswith(part.lstrip("=")) for part in value.split(",") if part for name in names
    )


def of_the_job(real: Resolved) -> list[Missing]:
    """The parts of the job that only the site's own Slurm can check."""
    job, missing = real.job, []
    asked = [f"{key} {value}" for key in ("account", "partition", "qos", "constraint", "reservation", "nodelist",
             "exclude", "dependency") if (value := getattr(job, key))]  # fmt: skip
    if asked:
        missing.append(Missing(", ".join(asked), "the stand-ins grant whatever is asked for"))
    if job.max_gpu_hours is not None:
        missing.append(Missing(f"the budget of {job.max_gpu_hours:g} GPU-hours", "a rehearsal uses next to none"))
    return missing


def _of_the_gpus(real: Resolved, ranks: int, here: int, used: int) -> Missing:
    size = f"{real.gpus} {real.cluster.device or 'GPU'}{'s' if real.gpus > 1 else ''} on {real.nodes} node"
    size += "s" if real.nodes > 1 else ""
    if used:
        return Missing(size, f"{ranks} rank{'s' if ranks > 1 else ''} on this machine's GPUs: memory, speed, network")
    have = _gpus_for(ranks, here)
    cores = len(os.sched_getaffinity(0))
    why = f"{have} here: {ranks} rank{'s' if ranks > 1 else ''} on {cores} cores of a CPU; no memory, speed or network"
    return Missing(size, why)


def _gpus_for(ranks: int, here: int) -> str:
    return f"{here} GPU{'s' if here > 1 else ''} for {ranks} ranks" if here else "no GPU"


# --- the rehearsal ----------------------------------------------------------------------------------------------------


@dataclass
class RehearsalOutcome:
    """The result of a rehearsal. `cause` is None if all stages succeeded; else `log` has the run's last lines."""

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
    kind: type[Life] = Life,
) -> RehearsalOutcome:
    """Rehearses `small`, whose script is in `prepared`; `real` would be submitted, and is only checked. `kind` is how.

    Runs are written to `keep`, or to a folder that is removed. `report` is called with each stage as it happens, `wait`
    with what is waited for. However the rehearsal ends, nothing is left running.
    """
    outcome = RehearsalOutcome(missing=list(small.missing))

    def note(stage: Stage) -> None:
        outcome.stages.append(stage)
        report(stage)

    began = time.monotonic()
    is_script = real.job_script is not None
    data = "" if is_script else check_data(located(real.resolved, real.data_beside))
    if isinstance(data, Missing):
        outcome.missing.append(data)
    elif data:
        note(Stage("data", data, time.monotonic() - began))
    accepted, answer = _ask_slurm(real.resolved, real.script)
    if accepted is None:
        outcome.missing.append(Missing("whether Slurm accepts the job", answer))
    else:
        note(Stage("slurm", f"sbatch --test-only: {answer}", time.monotonic() - began, accepted))
        if not accepted:
            outcome.cause = f"slurm: {answer}"
            return outcome
    resolved = small.resolved
    nodes = resolved.nodes + (resolved.job.spare_nodes or 0) + _MORE_NODES
    with LocalSlurm(nodes, small.gpus, also=_own_variables(small.gpus)) as slurm:
        logs = keep.resolve() if keep is not None else slurm.folder / "logs"
        life = kind(prepared, small.gpus, slurm, logs, note, wait, began)
        try:
            if not is_script:
                life.say("script", *_check_script(real.script))
            life.rehearse(quick)
        except RehearsalFailed as fault:
            outcome.cause, outcome.log = f"{fault.stage}: {fault}", fault.log
        except UserError as fault:
            note(Stage("submitted", str(fault), life.age_s, ok=False))
            outcome.cause, outcome.log = f"submitted: {fault}", [f"hint: {fault.hint}"] if fault.hint else []
        outcome.missing += [Missing(option, "the stand-ins do not act on it") for option in slurm.ignored]
    return outcome


def check_data(resolved: Resolved) -> str | Missing:
    """Checks the data of the real run, as submit does. The rehearsed run reads the standard library's sources."""
    try:
        path = ensure_data(resolved)
    except DataError as fault:
        return Missing("the data", f"{fault}; submit refuses the run until they are there")
    return f"{path} is fit for the run" if path is not None else "random tokens"


def _check_script(script: str) -> tuple[str, bool]:
    """(findings of `bash -n`, and of shellcheck if it is installed; whether they find nothing)."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        checks = [["bash", "-n", file.name]]
        if shutil.which("shellcheck"):
            checks.append(["shellcheck", "--severity=warning", file.name])
        for check in checks:
            done = subprocess.run(check, capture_output=True, text=True, timeout=_CHECK_S, check=False)
            if done.returncode:
                return f"{check[0]}: {(done.stderr or done.stdout).replace(file.name, 'job.sh').strip()}", False
    names = "bash -n and shellcheck find" if len(checks) > 1 else "bash -n finds"
    return f"{names} nothing in its {script.count(chr(10))} lines", True


def _ask_slurm(resolved: Resolved, script: str) -> tuple[bool | None, str]:
    """(whether a real `sbatch --test-only` accepts the script, its text); None if no Slurm answers."""
    if not has_sbatch():
        return None, "there is no sbatch here"
    try:
        check_reachable()
        start = ask_start(resolved, script)
        return True, f"{start.answer}; it cannot start now: {start.waits}" if start.waits else start.answer
    except SlurmUnreachable as fault:
        return None, str(fault).partition(";")[0]
    except JobRefused as fault:
        return False, str(fault)


def _own_variables(gpus: int) -> dict[str, str]:
    """The variables of every job of the rehearsal, by which this machine takes the place of a cluster's nodes."""
    return {
        "HPC_GPT_MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Steps this small gain little from more threads, which on a busy machine wait for each other.
        "OMP_NUM_THREADS": "1",
        # If there are too few GPUs for all ranks, no rank gets one.
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }
