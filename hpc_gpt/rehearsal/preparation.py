"""The experiment made small enough to rehearse here, and what of it this machine cannot show."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.engines import can_resume
from hpc_gpt.settings.resolve import Resolved, experiment_of, resolve
from hpc_gpt.settings.smoke import shrink

# Enough steps for two interruptions and a few undisturbed ones after each.
STEPS = 24
SAVE_EVERY = 4
# An attempt that is to be interrupted waits for it then: a save that is due has the one before completed.
HOLD_AFTER_STEPS = 2 * SAVE_EVERY
# Jobs of a singleton chain: the first, and one for each interruption.
LINKS = 3
_MODULE_INITS = ("/etc/profile.d/modules.sh", "/etc/profile.d/lmod.sh", "/etc/profile.d/z00_lmod.sh")
# What the rehearsal settles itself, for its own machine; a profile's would undo that.
_OURS = ("PATH", "OMP_NUM_THREADS", "SLURM_CONF", "TMPDIR", "HPC_GPT_STATE", "HPC_GPT_LOGS", "HPC_GPT_MASTER_ADDR",
         "HPC_GPT_REHEARSAL", "CUDA_VISIBLE_DEVICES")  # fmt: skip


@dataclass(frozen=True)
class Missing:
    """Something of the real run that is not rehearsed, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class SmallRun:
    """The run to rehearse; what it is not; and whether it can be interrupted and go on."""

    resolved: Resolved
    missing: tuple[Missing, ...]
    notes: tuple[str, ...]
    gpus: int

    @property
    def resumes(self) -> bool:
        return can_resume(self.resolved.engine)


def make_small(real: Resolved, gpus_here: int) -> SmallRun:
    """The run of `real` at --smoke size, with the user's own directives and as much of the profile as works here.

    It has two nodes where the real one has several. GPUs are used where there is one for every rank.
    Raises LayoutError or ConfigError where it cannot be made so small.
    """
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
    smoke = shrink(experiment_of(real), real, has_gpu=bool(gpus))
    train = replace(
        smoke.experiment.train,
        steps=STEPS,
        save_every=SAVE_EVERY,
        save_last=True,
        eval_every=STEPS if real.train.eval_every else 0,
        until_loss=None,
    )
    layout = smoke.experiment.layout
    tp = layout.tp or 1
    if real.nodes > 1 and ranks % 2 == 0 and ranks // 2 % tp == 0:
        layout = replace(layout, nodes=2)
    small = resolve(replace(smoke.experiment, name=f"{real.name}-rehearsal", train=train, layout=layout), profile)
    job = replace(real.job, name=small.job.name, max_gpu_hours=None, nodelist=None, exclude=None, dependency=None)
    small = replace(small, job=job)
    missing += _of_the_job(real)
    missing.append(_of_the_gpus(real, ranks, gpus_here, gpus))
    return SmallRun(small, tuple(missing), (*notes, *smoke.notes), gpus)


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
    """Whether the script would find a `module` command: as a function it inherits, or by a file that defines it."""
    inits = [os.environ.get("MODULESHOME", "/nowhere") + "/init/bash", os.environ.get("LMOD_PKG", "/nowhere") +
             "/init/bash", *_MODULE_INITS]  # fmt: skip
    return "BASH_FUNC_module%%" in os.environ or any(os.access(init, os.R_OK) for init in inits)


def _no_container(profile: ClusterProfile) -> str:
    """Why the profile's container cannot be used here, or nothing."""
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
    """Whether an interface that the value names, by the start of its name, is here; `^` and `=` are NCCL's marks."""
    names = os.listdir("/sys/class/net") if Path("/sys/class/net").is_dir() else []
    return value.startswith("^") or any(
        name.startswith(part.lstrip("=")) for part in value.split(",") if part for name in names
    )


def _of_the_job(real: Resolved) -> list[Missing]:
    """What only the site's own Slurm can say."""
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
