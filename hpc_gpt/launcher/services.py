"""The lines of a dry run on the surroundings of a training: the Python of its ranks, and the commands of [notify],
[after] and [track]."""

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from hpc_gpt.core.format import Line, counted, show_short
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.sbatch_words import read_options, sizes_of


def python_lines(profile: ClusterProfile) -> Iterator[Line]:
    """The lines on the Python that jobs use, and on its parts that this machine lacks, which a node may have."""
    chosen, image = os.environ.get("HPC_GPT_PYTHON"), profile.container.image if profile.container is not None else None
    if image is not None:
        yield Line("python", f"{chosen or profile.python or 'python3'} of the image {image}")
    elif profile.archive is not None:
        yield Line("python", f"the Python in {profile.archive}, unpacked on each node")
    else:
        of_profile = f"{profile.venv}/bin/python" if profile.venv else profile.python
        yield Line("python", chosen or of_profile or sys.executable)
    for key, path in (("venv", profile.venv), ("python", profile.python), ("container.image", image)):
        if path is not None and Path(path).is_absolute() and not Path(path).exists():
            yield Line("note", f"{key} {path} is not on this machine; without it on the nodes no rank starts")


def service_lines(resolved: Resolved) -> Iterator[Line]:
    """The lines on the commands at a run's events and after its checkpoints, with their jobs and GPU-hours at most."""
    notify, after, track = resolved.notify, resolved.after, resolved.track
    if notify.is_asked:
        yield Line("notify", f"{_shown(notify.command)}, when {' or '.join(notify.on)}")
    if after.is_asked:
        yield Line("after", f"{_shown(after.run)}, {_jobs_after(resolved)}")
    where = [
        *(["tensorboard/ in the run folder"] if track.tensorboard else []),
        *([f"wandb {track.wandb}"] * bool(track.wandb)),
    ]
    if where:
        yield Line("track", " and ".join(where))


def _shown(command: str | tuple[str, ...] | None) -> str:
    return hide_secrets(command if isinstance(command, str) else shlex.join(command or ()))


def _jobs_after(resolved: Resolved) -> str:
    after, train = resolved.after, resolved.train
    if after.every == 0:
        count, when = 1, "after the last checkpoint"
    else:
        when = "after each checkpoint" if after.every == 1 else f"after one checkpoint in {after.every}"
        count = 0
        if train.save_every and not train.save_minutes:
            count = -(-train.steps // train.save_every) // after.every
    options = {option.name: option.value for option in read_options(after.sbatch)}
    sizes, seconds = sizes_of(options), limit_s(options.get("time"))
    jobs = f"{when}: {counted(count, 'job')}" if count else f"{when}: as many jobs as checkpoints"
    if not count or seconds is None:
        return f"{jobs}, with {counted(sizes.nodes * sizes.gpus, 'GPU')} each"
    hours = count * sizes.nodes * sizes.gpus * seconds / 3600
    return f"{jobs}, {show_short(hours)} GPU-hours at most"
