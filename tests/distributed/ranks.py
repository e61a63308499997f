"""Starts the ranks of a test: one process each on this machine, over gloo."""

import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import start_module

HERE = Path(__file__).resolve().parent


def launch_ranks(module: str, world: int, folder: Path, timeout_s: float = 600.0) -> str:
    """Runs `module` in `world` processes with `folder` as argument; gives their output, and fails with it unless all
    end with 0.

    Ranks that stand still for `timeout_s` are started once more, with a warning that shows where they stood: that was
    seen once in some hundred whole runs, on a busy machine, and never alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    for may_repeat in (True, False):
        codes = run_ranks(module, world, folder, _after(timeout_s))
        if not any(codes):
            break
        said = f"ranks ended with {codes}\n{output_of(world, folder, 3000)}"
        if not may_repeat or set(codes) != {-signal.SIGKILL}:
            pytest.fail(said, pytrace=False)
        warnings.warn(said, stacklevel=1)
        for path in set(folder.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return "".join(log.read_text() for log in _logs(world, folder))


def _after(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


def output_of(world: int, folder: Path, characters: int) -> str:
    """The last lines of every rank, each under its file's name."""
    return "\n".join(f"--- {log.name}\n{log.read_text()[-characters:]}" for log in _logs(world, folder))


def run_ranks(module: str, world: int, folder: Path, late: Callable[[], bool]) -> list[int]:
    """The exit codes of `world` processes that run `module`. One that fails ends all, and so does `late`."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(HERE.parent.parent),
        "PATH": "/nonexistent",  # no compiler is to be found, nor needed
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # nothing compiled before is found either
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    ranks = [
        start_module(module, str(folder), {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log)
        for rank, log in enumerate(_logs(world, folder))
    ]
    try:
        while any(rank.exitcode is None for rank in ranks):
            if any(rank.exitcode for rank in ranks):
                break
            if late():
                for rank in ranks:
                    if rank.pid is not None and rank.exitcode is None:
                        os.kill(rank.pid, signal.SIGQUIT)
                time.sleep(2)  # for the stacks to be written
                break
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return [rank.exitcode for rank in ranks]


def _logs(world: int, folder: Path) -> list[Path]:
    return [folder / f"rank-{rank}.log" for rank in range(world)]
