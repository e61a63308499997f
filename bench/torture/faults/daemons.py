"""Faults of nodes and of Slurm's own daemons."""

import signal
import threading
import time

from bench.torture.faults.kind import kind
from bench.torture.scene import Scene
from tests.processes import send

# One controller for all concurrent runs: nobody stops it while it is away.
CONTROLLER = threading.Lock()
_ACCOUNTING = threading.Lock()


@kind(shared=True)
def cut_power_of_a_node(scene: Scene) -> None:
    """slurmd and job steps are gone; the node's ranks fall silent, and no connection of theirs is closed."""
    scene.wait_moment()
    node = scene.any_node()
    scene.remember()
    scene.cut_power(node)
    scene.detail = f"{node}, {'batch host' if node == scene.job.nodes()[0] else 'other node'}"


@kind(shared=True)
def kill_a_slurmd(scene: Scene) -> None:
    """The daemon alone; the node's ranks live on. It is back soon, later than Slurm waits, or after the run."""
    scene.wait_moment()
    node = scene.any_node()
    scene.remember()
    daemon = scene.cluster.slurmds.pop(node)
    daemon.kill()
    daemon.wait()
    back_s = scene.chance.choice((2, 25, None))
    where = "batch host" if node == scene.job.nodes()[0] else "other node"
    scene.detail = f"{node}, {where}, back {'after the run' if back_s is None else f'after {back_s} s'}"
    if back_s is None:
        scene.mending.callback(scene.cluster.start_slurmd, node)
    else:
        time.sleep(back_s)
        scene.cluster.start_slurmd(node)


@kind()
def down_and_up_a_node(scene: Scene) -> None:
    scene.wait_moment()
    node = scene.any_node()
    away_s = scene.chance.choice((0, 3, 10))
    scene.detail = f"{node}, {away_s} s"
    scene.remember()
    scene.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=torture")
    time.sleep(away_s)
    # Slurm refuses that of a node which is up by itself.
    scene.slurm("scontrol", "update", f"nodename={node}", "state=resume", check=False)


@kind(shared=True)
def restart_slurmctld(scene: Scene) -> None:
    """Away for a while: in the middle of the run, as a rank dies, or as the run asks to be requeued."""
    away_s = scene.chance.choice((0, 3, 8))
    then = scene.chance.choice(("", "a rank dies", "walltime"))
    scene.wait_moment()
    with CONTROLLER:
        scene.remember()
        pids = scene.job.ranks()
        if then == "walltime":
            # What Slurm would send ahead of the time limit.
            for pid in pids:
                send(pid, signal.SIGUSR2)
        elif then and pids:
            send(scene.chance.choice(sorted(pids)), signal.SIGKILL)
        scene.cluster.stop_controller()
        time.sleep(away_s)
        scene.cluster.start_controller()
    scene.detail = f"away {away_s} s{f', {then}' if then else ''}"


@kind(shared=True)
def restart_slurmdbd(scene: Scene) -> None:
    """Away for a while, in the middle of the run or as a rank dies."""
    away_s = scene.chance.choice((0, 5, 12))
    dies = scene.chance.random() < 0.5
    scene.wait_moment()
    with _ACCOUNTING:
        scene.remember()
        scene.cluster.services.stop_slurmdbd()
        pids = scene.job.ranks()
        if dies and pids:
            send(scene.chance.choice(sorted(pids)), signal.SIGKILL)
        time.sleep(away_s)
        scene.cluster.services.start_slurmdbd()
    scene.detail = f"away {away_s} s{', a rank dies' if dies else ''}"
