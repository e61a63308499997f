"""One fault from its fresh run to the verdict, and many of them side by side."""

import contextlib
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.torture.checks import lost_steps, problems, reference_of
from bench.torture.faults import KINDS
from bench.torture.order import SAVE_EVERY, STEPS, Planned
from bench.torture.scene import Missed, Scene
from bench.torture.site import make_launcher
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.runs.run_folder import job_ids
from tests.command.mine import PROGRAMS, experiment, loss_of_loop
from tests.slurm.cluster import Cluster
from tests.slurm.daemons import DaemonError
from tests.slurm.launcher import Job, Launcher
from tests.waiting import patient, wait_for

# A run that is left alone for so long and is not done is lost.
PATIENCE_S = patient(600)
Failed = pytest.fail.Exception
_LIVE = ("pending", "running")
_TMPFS_MIB = 192
_TRIES = 3
# The loop of tests/command as a job script, which continues from its newest checkpoint. A fault makes `deaf`, `requeue`
# or `evaluate`. It works in the run folder, which may be on a small disk.
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=loop --nodes={nodes} --ntasks-per-node=1
if [ -z "$SLURM_JOB_ID" ]; then sbatch "$0"; exit; fi
program=$PWD/work/loop.sh
export STEPS={steps} SAVE_EVERY={every} STEP_S=0.3
mkdir -p "$HPC_GPT_RUN/work" && cd "$HPC_GPT_RUN/work" || exit
last=$(ls -dv out/ckpt-*/.done 2>/dev/null | tail -n 1)
[ -n "$SLURM_RESTART_COUNT" ] || (until [ -e requeue ]; do sleep 0.1; done; scontrol requeue "$SLURM_JOB_ID") &
[ ! -e "${{program%/*}}/deaf" ] || trap '' TERM USR1
bash "$program" "${{last%/.done}}"
code=$?
[ -e evaluate ] || exit "$code"
rm evaluate
sbatch --partition="$SLURM_JOB_PARTITION" --output=evaluated.%j --wrap="ls -d $PWD/out/ckpt-*"
exit 0
"""


@dataclass
class Verdict:
    """How one fault went. `ended`: the class of each attempt; `by_hand`: ends after which the user resumed.

    `lost`: steps done before the fault that were done once more.
    """

    number: int
    what: str
    problems: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    by_hand: list[str] = field(default_factory=list)
    lost: int = 0
    missed: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems

    def line(self) -> str:
        """The verdict on one line, and its problems on lines of their own."""
        more = [f"attempts {', '.join(self.ended) or 'none'}", f"{self.lost} steps done again"]
        more += [f"the user resumed after {ended}" for ended in self.by_hand]
        more += [f"over before the fault {self.missed} times"] * bool(self.missed)
        head = f"{'ok  ' if self.ok else 'LOST'} {self.number:3d} {self.what}: {'; '.join(more)}; {self.seconds:.0f} s"
        return "\n".join([head, *(f"         {words}" for words in self.problems)])


def unbroken(
    cluster: Cluster, folder: Path, partition: str, nodes: int, ranks: int = 8, ep: int = 1
) -> dict[int, float]:
    """Step -> loss of a run that is left alone from the start, and had no trouble of its own either."""
    for _ in range(_TRIES):
        launcher = make_launcher(cluster, fresh(folder), partition, nodes, ranks, ep)
        scene = Scene(Planned(0, "none", 0, nodes, 0), launcher, launcher.submit())
        state, cause = _wait_over(scene, time.monotonic() + PATIENCE_S)
        assert state == "done", f"the unbroken run: {state}: {cause}"
        if len(scene.run.attempts()) == 1:
            break
    losses = reference_of(scene)
    shutil.rmtree(folder)
    return losses


def break_one(
    cluster: Cluster,
    folder: Path,
    partition: str,
    planned: Planned,
    reference: Callable[[], dict[int, float]],
    ranks: int = 8,
    ep: int = 1,
) -> Verdict:
    """A fresh run, broken as planned, left alone until it is done, and looked at.

    `reference` gives the losses of an unbroken run, once they are needed. A fault that came too late, after the run's
    end, is tried again. The folder of a run that is as it should be is taken away, that of another kept.
    """
    verdict = Verdict(planned.number, planned.words)
    began = time.monotonic()
    for _ in range(_TRIES):
        try:
            with _staged(cluster, fresh(folder), partition, planned, ranks, ep) as scene:
                KINDS[planned.kind].strike(scene)
                if scene.detail:
                    verdict.what = f"{planned.words} ({scene.detail})"
                _leave_alone(scene, verdict)
                scene.mending.close()
                if verdict.ok:
                    known = (
                        reference()
                        if not KINDS[planned.kind].program
                        else {step: loss_of_loop(step) for step in KINDS[planned.kind].steps}
                    )
                    verdict.problems += problems(scene, known)
                verdict.ended = scene.job.ended()
                verdict.lost = lost_steps(scene)
                if scene.said and not verdict.ok:
                    verdict.problems += scene.said
            break
        except Missed as fault:
            verdict.missed += 1
            words = str(fault)
        except (AssertionError, OSError, ValueError, UserError, DaemonError, subprocess.SubprocessError, Failed):
            verdict.problems.append(traceback.format_exc())
            break
    else:
        verdict.problems.append(f"never struck in {_TRIES} runs: {words}")
    verdict.seconds = time.monotonic() - began
    if verdict.ok:
        shutil.rmtree(folder, ignore_errors=True)
    return verdict


def fresh(folder: Path) -> Path:
    """The path, with nothing there."""
    if folder.exists():
        shutil.rmtree(folder)
    return folder


@contextlib.contextmanager
def _staged(cluster: Cluster, folder: Path, partition: str, planned: Planned, ranks: int, ep: int) -> Iterator[Scene]:
    """A submitted run; at the end whatever is left of it is ended and what the fault took away is there again."""
    kind = KINDS[planned.kind]
    launcher = make_launcher(cluster, folder, partition, planned.nodes, ranks, ep)
    with contextlib.ExitStack() as stack:
        if kind.small_disk:
            stack.enter_context(_small_disk(launcher.logs))
        # Every second run restarts in its job, the others from the queue.
        where = f"job.restart_in_job={'true' if planned.salt % 2 and kind.program != 'job script' else 'false'}"
        settings = [word for setting in (where, *kind.settings) for word in ("--set", setting)]
        scene = Scene(planned, launcher, _submit(launcher, planned, ranks, settings))
        stack.callback(_nodes_are_idle, scene)
        stack.callback(_end, scene)
        yield scene


def _submit(launcher: Launcher, planned: Planned, ranks: int, settings: list[str]) -> Job:
    """The experiment of the site, or for such a kind a program that is not ours, which saves as often."""
    program, lines = KINDS[planned.kind].program, KINDS[planned.kind].steps
    if not program:
        return launcher.submit(*settings)
    if program == "job script":
        shutil.copytree(PROGRAMS, launcher.folder / "work")
        (launcher.folder / "train.slurm").write_text(SCRIPT.format(nodes=planned.nodes, steps=STEPS, every=SAVE_EVERY))
        known = ("--checkpoints", "{run}/work/out/ckpt-*", "--set", f"train.steps={STEPS}")
        return launcher.submit(*known, *settings, "train.slurm", HPC_GPT_EXPERIMENT="")
    path = experiment(launcher.folder, program, tables={"layout": {"gpus": ranks, "nodes": planned.nodes}})
    own = {"STEPS": lines.stop - 1, "LOG_EVERY": lines.step, "STEP_S": 0.3 / lines.step, "SAVE_EVERY": SAVE_EVERY}
    return launcher.submit(str(path), *settings, **{name: str(value) for name, value in own.items()})


def _end(scene: Scene) -> None:
    scene.mending.close()
    scene.slurm("scancel", *job_ids(scene.run), check=False)


def _nodes_are_idle(scene: Scene) -> None:
    """Waits until the nodes that the run has had are all there for the next one."""
    lists = (str(attempt.started().get("node_list") or "") for attempt in scene.run.attempts())
    nodes = ",".join(filter(None, lists))
    if not nodes:
        return

    def are_idle() -> bool:
        states = scene.slurm("sinfo", "-h", "-N", "-n", nodes, "-o", "%N %T", check=False).split("\n")
        bad = [line for line in states if line and not line.endswith(" idle")]
        for line in bad:
            if line.rstrip("*").endswith((" down", " drained", " draining")):
                name = line.split()[0]
                scene.slurm("scontrol", "update", f"nodename={name}", "state=resume", check=False)
        return not bad and any(states)

    wait_for(f"idle nodes {nodes}", are_idle)


_SMALL_DISKS: list[Path] = []


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """A tmpfs at `folder`; what is on it is kept when it goes."""
    folder.mkdir()
    size = f"size={_TMPFS_MIB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "torture", str(folder)], check=True)
    _SMALL_DISKS.append(folder)
    try:
        yield
    finally:
        free_small_disks(folder)


def free_small_disks(*folders: Path) -> None:
    """Takes the tmpfs away, all of them if none is named; their files are then in the folders themselves."""
    for folder in folders or list(_SMALL_DISKS):
        kept = folder.with_name("kept")
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(folder, kept, symlinks=True, ignore=shutil.ignore_patterns("ballast"))
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()
        if kept.exists():
            kept.rename(folder)
        _SMALL_DISKS.remove(folder)


def _leave_alone(scene: Scene, verdict: Verdict) -> None:
    """Waits until `status` says done; if the run stops for its user, does `submit --resume` as the user would."""
    kind = KINDS[scene.planned.kind]
    end = time.monotonic() + PATIENCE_S
    while True:
        state, cause = _wait_over(scene, end)
        if state == "done":
            return
        words = f"{state}{f': {cause}' if cause else ''}"
        if state not in kind.by_hand or len(verdict.by_hand) == 2:
            verdict.problems.append(f"not done, status says {words}")
            return
        verdict.by_hand.append(state)
        scene.mending.close()
        done = scene.hpc_gpt("submit", "--resume", str(scene.run.path))
        if done.returncode:
            verdict.problems.append(f"{words}; submit --resume: exit {done.returncode}: {done.stderr.strip()}")
            return


def _wait_over(scene: Scene, end: float) -> tuple[str, str | None]:
    """What status says once the run is over, twice in a row, or when the patience is at its end."""
    over = 0
    while True:
        before = _signs(scene)
        state, cause = scene.state()
        over = over + 1 if state not in _LIVE and not (state == "unknown" and "does not answer" in (cause or "")) else 0
        if over == 2 or state == "done" or time.monotonic() > end:
            return state, cause
        _pause(scene, before, 1 if over else 5)


def _pause(scene: Scene, before: tuple[int, int], limit_s: float) -> None:
    """Until an attempt begins or ends: looking costs little, asking Slurm more."""
    end = time.monotonic() + limit_s
    while _signs(scene) == before and time.monotonic() < end:
        time.sleep(0.1)


def _signs(scene: Scene) -> tuple[int, int]:
    """What of the run folder changes when an attempt begins or ends."""
    attempts = scene.run.attempts()
    return len(attempts), sum((attempt.folder / "ended.json").exists() for attempt in attempts)
