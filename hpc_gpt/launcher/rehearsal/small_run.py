"""A rehearsal from beginning to end: make the run small enough for this machine, check it, run it, report the outcome.

What this machine cannot show of the real run is listed. Nothing is left of a rehearsal but a run that is to be kept.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, DataError, JobRefused, SlurmUnreachable, UserError
from hpc_gpt.core.settings.cluster import FALLBACK, ClusterProfile
from hpc_gpt.core.settings.experiment import with_keys
from hpc_gpt.core.settings.resolve import experiment_of, resolve
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.smoke import shrink, small_layout
from hpc_gpt.core.slurm.clients import check_reachable
from hpc_gpt.core.slurm.sbatch_words import array_variables
from hpc_gpt.core.slurm.start_check import ask_start
from hpc_gpt.core.words import counted
from hpc_gpt.launcher.launch.prepared import PreparedRun
from hpc_gpt.launcher.launch.request import Request, choose_profile
from hpc_gpt.launcher.rehearsal.local_slurm import LocalSlurm
from hpc_gpt.launcher.rehearsal.stages import SAVE_EVERY, STEPS, RehearsalFailed, RunRehearsal, Stage
from hpc_gpt.trainer.tokens.run_data import ensure_data, located

# Jobs of a singleton chain: the first one, and one for each interruption.
CHAIN_JOBS = 3
# Nodes in addition to those that a run asks for, as substitutes for excluded ones.
_MORE_NODES = 2
_CHECK_S = 120
# The variables of every job of the rehearsal, by which this machine takes the place of a cluster's nodes. Steps this
# small gain little from more threads, which on a busy machine wait for each other.
_VARIABLES = {"HPC_GPT_MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
_MODULE_INITS = ("/etc/profile.d/modules.sh", "/etc/profile.d/lmod.sh", "/etc/profile.d/z00_lmod.sh")
# Variables that the rehearsal sets for this machine, and that a profile's must not override.
_OURS = ("PATH", "OMP_NUM_THREADS", "SLURM_CONF", "TMPDIR", "HPC_GPT_STATE", "HPC_GPT_LOGS", "HPC_GPT_MASTER_ADDR",
         "HPC_GPT_REHEARSAL", "CUDA_VISIBLE_DEVICES")  # fmt: skip


@dataclass(frozen=True)
class NotRehearsed:
    """A part of the real run that is not rehearsed, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class SmallRun:
    """The run to rehearse, the parts of the real one that are missing, notes for the user, and the GPUs it uses."""

    resolved: Resolved
    missing: tuple[NotRehearsed, ...]
    notes: tuple[str, ...]
    gpus: int


def with_slurm_profile(request: Request) -> tuple[Request, str]:
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
    engine_named(real.engine.name).refuse_program(
        "a rehearsal trains a small model of ours", "hpc-gpt submit --cluster local tries it"
    )
    profile, missing = _profile_here(real.cluster)
    ranks = small_layout(real.layout).gpus
    gpus = gpus_here if gpus_here >= ranks else 0
    notes: tuple[str, ...] = ()
    if not gpus and profile.device not in (None, "cpu"):
        # On a cluster a rank without its GPU is a fault.
        profile = replace(profile, device=None)
        notes = (f"{_gpus_for(ranks, gpus_here)} here: the ranks run on the CPU",)

    whole = experiment_of(real)
    smoke = shrink(whole, real, bool(gpus))
    keys = {
        "train.steps": STEPS,
        "train.save_every": SAVE_EVERY,
        "train.save_last": True,
        "train.eval_every": STEPS if real.train.eval_every else 0,
        "train.until_loss": None,
    }
    half = ranks // 2
    on_two_nodes = real.nodes > 1 and ranks % 2 == 0 and half % (smoke.experiment.layout.tp or 1) == 0
    if on_two_nodes and half <= profile.gpus_per_node:
        keys["layout.nodes"] = 2
    job = replace(whole.job, max_gpu_hours=None, nodelist=None, exclude=None, dependency=None)
    small = replace(with_keys(smoke.experiment, keys), name=f"{real.name}-rehearsal", job=job)
    missing += [*of_the_job(real), _of_the_gpus(real, ranks, gpus_here, gpus)]
    return SmallRun(resolve(small, profile), tuple(missing), (*notes, *smoke.notes), gpus)


def script_as_it_is(real: PreparedRun, gpus_here: int) -> SmallRun:
    """The run of a script, which nothing makes small."""
    run = real.resolved
    what = f"{counted(run.nodes, 'node')} of {run.cluster.name}"
    missing = [NotRehearsed(what, "names of this one machine: no memory, speed or network"), *of_the_job(run)]
    notes = (f"it runs as it is, in {os.getcwd()}: what it writes there stays",)
    return SmallRun(run, tuple(missing), notes, gpus_here)


def _profile_here(profile: ClusterProfile) -> tuple[ClusterProfile, list[NotRehearsed]]:
    """The profile without what this machine lacks."""
    venv, container = profile.venv, profile.container
    image = container.image if container else None
    can_start = container is not None and container.kind == "apptainer" and shutil.which("apptainer") is not None
    checks: tuple[tuple[str, str | None, bool, Any], ...] = (
        ("modules", ", ".join(profile.modules), _has_modules(), ()),
        ("venv", venv, (Path(venv or "/nowhere") / "bin" / "activate").is_file(), None),
        ("python", profile.python, shutil.which(profile.python or "") is not None, None),
        ("container", image, can_start and Path(image or "/nowhere").exists(), None),
    )
    missing: list[NotRehearsed] = []
    environment = dict(profile.environment)
    for key, named, is_here, nothing in checks:
        if named and not is_here:
            missing.append(NotRehearsed(f"{key} {named}", "not on this machine: the ranks run without it"))
            profile = replace(profile, **{key: nothing})
    if profile.stage is not None:
        missing.append(NotRehearsed(f"stage {profile.stage}", "the environment is read where it is"))
        profile = replace(profile, stage=None)
    for name, value in profile.environment.items():
        if name in _OURS or name.endswith("_SOCKET_IFNAME"):
            del environment[name]
            missing.append(NotRehearsed(f"the profile's {name}={value}", "the stand-ins' own is used"))
    if profile.node_suffix:
        missing.append(
            NotRehearsed(f"node names with {profile.node_suffix}", "the nodes are names of this one machine")
        )
    return replace(profile, environment=environment), missing


def _has_modules() -> bool:
    """Whether the script would find a `module` command: an inherited function, or a file that defines it."""
    homes = (os.environ.get(name, "/nowhere") for name in ("MODULESHOME", "LMOD_PKG"))
    inits = (*(f"{home}/init/bash" for home in homes), *_MODULE_INITS)
    return "BASH_FUNC_module%%" in os.environ or any(os.access(init, os.R_OK) for init in inits)


def of_the_job(real: Resolved) -> list[NotRehearsed]:
    """The parts of the job that only the site's own Slurm can check."""
    asked = [f"{key} {value}" for key in ("account", "partition", "qos", "constraint", "reservation", "nodelist",
             "exclude", "dependency") if (value := getattr(real.job, key))]  # fmt: skip
    return [NotRehearsed(", ".join(asked), "the stand-ins grant whatever is asked for")] if asked else []


def _of_the_gpus(real: Resolved, ranks: int, here: int, used: int) -> NotRehearsed:
    size = f"{counted(real.gpus, real.cluster.device or 'GPU')} on {counted(real.nodes, 'node')}"
    if used:
        return NotRehearsed(size, f"{counted(ranks, 'rank')} on this machine's GPUs: memory, speed, network")
    on = f"{counted(ranks, 'rank')} on {len(os.sched_getaffinity(0))} cores of a CPU"
    return NotRehearsed(size, f"{_gpus_for(ranks, here)} here: {on}; no memory, speed or network")


def _gpus_for(ranks: int, here: int) -> str:
    return f"{counted(here, 'GPU')} for {ranks} ranks" if here else "no GPU"


def elements_of(prepared: PreparedRun) -> dict[str, PreparedRun]:
    """{words on it: the run} of each element of a script's array; without one the run alone."""
    script = prepared.job_script
    if script is None or not script.array:
        return {"": prepared}
    found = {}
    for number in script.array:
        one = replace(script, array=(number,), options=(*script.options, f"--array={number}"))
        found[f"element {number}: "] = replace(prepared, job_script=one)
    return found


# --- the rehearsal ----------------------------------------------------------------------------------------------------


@dataclass
class RehearsalOutcome:
    """The result of a rehearsal. `cause` is None if all stages succeeded; else `log` has the run's last lines."""

    stages: list[Stage] = field(default_factory=list)
    missing: list[NotRehearsed] = field(default_factory=list)
    cause: str | None = None
    log: list[str] = field(default_factory=list)


def rehearse(
    real: PreparedRun,
    small: SmallRun,
    prepared: PreparedRun,
    quick: bool,
    keep: Path | None,
    report: Callable[[Stage], None],
    wait: Callable[[str], None],
) -> RehearsalOutcome:
    """Rehearses `small`, whose script is in `prepared`; `real` would be submitted, and is only checked.

    Runs are written to `keep`, or to a folder that is removed. `report` is called with each stage as it happens, `wait`
    with what is waited for. However the rehearsal ends, nothing is left running.
    """
    outcome, element_text = RehearsalOutcome(missing=list(small.missing)), ""

    def note(stage: Stage) -> None:
        outcome.stages.append(replace(stage, evidence=element_text + stage.evidence))
        report(outcome.stages[-1])

    began = time.monotonic()
    is_script = real.job_script is not None
    data = "" if is_script else check_data(located(real.resolved, real.data_beside))
    if isinstance(data, NotRehearsed):
        outcome.missing.append(data)
    elif data:
        note(Stage("data", data, time.monotonic() - began))
    accepted, answer = _ask_slurm(real.resolved, real.script)
    if accepted is None:
        outcome.missing.append(NotRehearsed("whether Slurm accepts the job", answer))
    else:
        note(Stage("slurm", f"sbatch --test-only: {answer}", time.monotonic() - began, accepted))
        if not accepted:
            outcome.cause = f"slurm: {answer}"
            return outcome
    nodes = small.resolved.nodes + (small.resolved.job.spare_nodes or 0) + _MORE_NODES
    # If there are too few GPUs for all ranks, no rank gets one.
    also = _VARIABLES if small.gpus else {**_VARIABLES, "CUDA_VISIBLE_DEVICES": ""}
    if real.job_script is not None and real.job_script.array:
        also = {**also, **array_variables(real.job_script.array)}
    with LocalSlurm(nodes, small.gpus, also) as slurm:
        logs = keep.resolve() if keep is not None else slurm.folder / "logs"
        try:
            for element, one in elements_of(prepared).items():
                element_text = element
                life = RunRehearsal(one, small.gpus, slurm, logs, note, wait, began)
                if not is_script:
                    life.say("script", *_check_script(real.script))
                life.rehearse(quick)
        except RehearsalFailed as fault:
            outcome.cause, outcome.log = f"{element_text}{fault.stage}: {fault}", fault.log
        except UserError as fault:
            note(Stage("submitted", str(fault), time.monotonic() - began, ok=False))
            outcome.cause, outcome.log = f"submitted: {fault}", [f"hint: {fault.hint}"] if fault.hint else []
        with slurm.state() as state:
            outcome.missing += [NotRehearsed(option, "the stand-ins do not act on it") for option in state.ignored]
    return outcome


def check_data(resolved: Resolved) -> str | NotRehearsed:
    """Checks the data of the real run, as submit does. The rehearsed run reads the standard library's sources."""
    try:
        path = ensure_data(resolved)
    except DataError as fault:
        return NotRehearsed("the data", f"{fault}; submit refuses the run until they are there")
    if path is None:
        return "random tokens" if resolved.data.mix is None else "the files of the mixture are fit for the run"
    return f"{path} is fit for the run"


def _check_script(script: str) -> tuple[str, bool]:
    """(what `bash -n` finds, and shellcheck if it is installed; whether they find nothing)."""
    checks = [["bash", "-n"], *([["shellcheck", "--severity=warning", "-"]] if shutil.which("shellcheck") else [])]
    for check in checks:
        done = subprocess.run(check, input=script, capture_output=True, text=True, timeout=_CHECK_S, check=False)
        if done.returncode:
            return f"{check[0]}: {(done.stderr or done.stdout).strip()}", False
    names = "bash -n and shellcheck find" if len(checks) > 1 else "bash -n finds"
    return f"{names} nothing in its {script.count(chr(10))} lines", True


def _ask_slurm(resolved: Resolved, script: str) -> tuple[bool | None, str]:
    """(whether a real `sbatch --test-only` accepts the script, its text); None if no Slurm answers."""
    try:
        check_reachable()
        start = ask_start(resolved, script)
    except SlurmUnreachable as fault:
        return None, str(fault).partition(";")[0]
    except JobRefused as fault:
        return False, str(fault)
    return True, f"{start.answer}; it cannot start now: {start.waits}" if start.waits else start.answer
