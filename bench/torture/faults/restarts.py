"""A rank dies and the run restarts in its job; something else happens in between, or again."""

import signal
import subprocess
import time
from collections.abc import Callable

from bench.torture.faults.daemons import CONTROLLER
from bench.torture.faults.kind import HANG, kind
from bench.torture.order import SAVE_EVERY
from bench.torture.scene import Scene
from tests.processes import environment_of, send
from tests.waiting import wait_for

# The pause is long enough for a second fault.
_IN_JOB = ("job.restart_in_job=true", "job.retry_pause_s=6")


def _kill_a_rank(scene: Scene) -> None:
    """At the planned moment; returns in the pause after it."""
    scene.wait_moment()
    scene.remember()
    ranks = scene.rank_pids()
    if ranks:
        rank = scene.chance.choice(sorted(ranks))
        scene.detail = f"rank {rank}"
        send(ranks[rank], signal.SIGKILL)
    _wait_verdict(scene, 1)


def _wait_verdict(scene: Scene, attempt: int) -> None:
    scene.wait_at_most(scene.run.attempt(attempt).verdict)


def _near_limit(scene: Scene, left_s: int) -> None:
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + left_s))
    scene.slurm("scontrol", "update", f"jobid={scene.job.id}", f"EndTime={end}", check=False)


def _far_limit(scene: Scene, job_restarts: int = 1) -> None:
    """The next start of the job has its time again."""
    scene.wait_at_most(lambda: scene.job.restarts >= job_restarts)
    scene.slurm("scontrol", "update", f"jobid={scene.job.id}", "TimeLimit=60", check=False)


def _kill_again(scene: Scene, attempt: int, ready: Callable[[], bool], wait_s: float = 0.0) -> None:
    """All ranks of a later attempt, so many seconds after it is `ready`."""
    wait_for(f"attempt {attempt}", ready)
    time.sleep(wait_s)
    for pid in scene.rank_pids().values():
        send(pid, signal.SIGKILL)
    _wait_verdict(scene, attempt)


@kind(settings=_IN_JOB, earliest=SAVE_EVERY + 1)
def three_crashes_in_a_row(scene: Scene) -> None:
    """Each of the next attempts dies after a few steps."""
    _kill_a_rank(scene)
    for attempt in (2, 3):
        _kill_again(scene, attempt, lambda number=attempt: bool(scene.job.metrics(number)))  # type: ignore[misc]


@kind(settings=_IN_JOB)
def crash_in_the_start_of_a_restart(scene: Scene) -> None:
    """The first attempt may have died in its own start, too."""
    _kill_a_rank(scene)
    _kill_again(scene, 2, lambda: len(scene.rank_pids()) == scene.world, scene.chance.uniform(0, 6))
    scene.detail += f", then {f'after step {step}' if (step := scene.job.last_step(2)) else 'before a step'}"


@kind(settings=_IN_JOB, earliest=1)
def crash_a_minute_before_the_limit(scene: Scene) -> None:
    """The rest of the job is too short for a restart, so it goes to the queue."""
    scene.wait_moment()
    _near_limit(scene, 60)
    _kill_a_rank(scene)
    _far_limit(scene)


@kind(settings=_IN_JOB, earliest=1)
def limit_in_a_pause(scene: Scene) -> None:
    """Slurm ends the job, whose script gets the last signal, and no rank is there."""
    _kill_a_rank(scene)
    _near_limit(scene, 1)
    _far_limit(scene)


@kind(settings=_IN_JOB, earliest=1, by_hand=("cancelled",))
def cancel_between_two_attempts(scene: Scene) -> None:
    _kill_a_rank(scene)
    scene.hpc_gpt("cancel", str(scene.run.path))


@kind(settings=_IN_JOB, earliest=1, by_hand=("stopped",))
def stop_between_two_attempts(scene: Scene) -> None:
    _kill_a_rank(scene)
    scene.hpc_gpt("stop", str(scene.run.path))


@kind(settings=_IN_JOB, earliest=1)
def preempt_in_a_restart(scene: Scene) -> None:
    _kill_a_rank(scene)
    scene.job.preempt()


@kind(settings=_IN_JOB, earliest=1, shared=True)
def controller_away_in_a_restart(scene: Scene) -> None:
    """The fault comes as the pause ends and the script looks at its job anew."""
    with CONTROLLER:
        _kill_a_rank(scene)
        scene.cluster.stop_controller()
        time.sleep(scene.chance.choice((3, 8, 15)))
        scene.cluster.start_controller()


@kind(settings=_IN_JOB, earliest=1)
def process_left_behind(scene: Scene) -> None:
    """A process with the variables of a rank that Slurm has lost sight of."""
    scene.wait_moment()
    ranks = scene.rank_pids()
    if ranks:
        left = subprocess.Popen(["sleep", "3000"], env=environment_of(ranks[0]), start_new_session=True)
        scene.mending.callback(left.wait)
        scene.mending.callback(left.kill)
    _kill_a_rank(scene)
    scene.wait_at_most(lambda: scene.job.metrics(2) or not scene.run.attempt(1).verdict().get("in_job"))
    assert not ranks or scene.job.restarts or left.poll() == -signal.SIGKILL, f"process {left.pid} is left"


_SPARE = (*_IN_JOB, "job.preflight=true", "job.spare_nodes=1")


def _ranks_nodes(scene: Scene) -> list[str]:
    """The nodes with ranks; the preflight may have made any other the spare one."""
    return sorted({environment_of(pid)["SLURMD_NODENAME"] for pid in scene.rank_pids().values()})


@kind(settings=_SPARE, earliest=1, shared=True)
def dead_node_with_a_spare(scene: Scene) -> None:
    """One with ranks, but not the script's."""
    scene.wait_moment()
    script = scene.job.nodes()[0]
    scene.detail = scene.chance.choice([node for node in _ranks_nodes(scene) if node != script])
    scene.remember()
    scene.cut_power(scene.detail)


@kind(settings=_SPARE, earliest=1, shared=True)
def dead_node_of_the_script_with_a_spare(scene: Scene) -> None:
    """Slurm leaves the job running without a script."""
    scene.wait_moment()
    scene.detail = scene.job.nodes()[0]
    scene.remember()
    scene.cut_power(scene.detail)


@kind(settings=(*_SPARE, HANG), earliest=3)
def silent_rank_with_a_spare(scene: Scene) -> None:
    """Its node is at fault, so without a spare the job goes to the queue; see stop_a_rank."""
    scene.wait_moment()
    rank = scene.chance.randrange(scene.world)
    scene.detail = f"rank {rank}"
    scene.remember()
    send(scene.rank_pids()[rank], signal.SIGSTOP)
