"""Faults of a run whose program is not ours."""

from __future__ import annotations

import signal

from tests.command.mine import kill
from tests.slurm.cluster import send
from tests.torture.faults.kind import kind
from tests.torture.scene import Scene


@kind(program=True, earliest=3)
def break_a_program(scene: Scene) -> None:
    """It is killed, or what watches it, or its job goes back to the queue by hand, or a node of it dies."""
    scene.wait_moment()
    how = scene.chance.choice(("the program", "its supervisor", "a requeue", "a node"))
    scene.detail = how
    node = scene.job.nodes()[0]
    scene.remember()
    if how == "the program":
        kill(scene.run, "loop.sh")
    elif how == "its supervisor":
        for pid in scene.job.ranks():
            send(pid, signal.SIGKILL)
    elif how == "a requeue":
        scene.slurm("scontrol", "requeue", scene.job.id)
    else:
        frozen = scene.cluster.cut_power(node)

        def power_up() -> None:
            for pid in frozen:
                send(pid, signal.SIGKILL)
            scene.cluster.start_slurmd(node)

        scene.mending.append(power_up)
