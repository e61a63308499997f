"""Faults of the ranks' processes."""

import signal

from bench.torture.faults.kind import HANG, kind
from bench.torture.scene import Scene
from tests.processes import send


@kind()
def kill_a_rank(scene: Scene) -> None:
    scene.wait_moment()
    rank = scene.chance.randrange(scene.world)
    scene.remember()
    pid = scene.rank_pids().get(rank)
    scene.detail = f"rank {rank}"
    if pid is not None:
        send(pid, signal.SIGKILL)


@kind()
def kill_all_ranks(scene: Scene) -> None:
    scene.wait_moment()
    scene.remember()
    scene.signal_ranks(signal.SIGKILL)


@kind(settings=(HANG,), earliest=3)
def stop_a_rank(scene: Scene) -> None:
    """SIGSTOP: the rank is there and says nothing more."""
    scene.wait_moment()
    rank = scene.chance.randrange(scene.world)
    scene.detail = f"rank {rank}"
    scene.remember()
    pid = scene.rank_pids().get(rank)
    if pid is not None:
        send(pid, signal.SIGSTOP)


@kind(earliest=1)
def kill_during_a_save(scene: Scene) -> None:
    """As soon as a checkpoint is being written: one rank, or all of them."""
    scene.wait_moment()
    all_of_them = scene.chance.random() < 0.5
    ranks = scene.rank_pids()
    victims = list(ranks.values()) if all_of_them else [scene.chance.choice(list(ranks.values()))]
    scene.wait("save", lambda: any(scene.run.checkpoints.glob(".writing-*")))
    for pid in victims:
        send(pid, signal.SIGKILL)
    scene.remember()
    scene.detail = "all ranks" if all_of_them else "one rank"
