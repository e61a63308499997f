"""One launch of ranks for each world size, shared by all tests of this folder; the table at the end of the session."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
TABLE: list[str] = []


@dataclass
class Launch:
    """What the ranks of one world size left: figures and weights by the case's name, results of the scenarios."""

    figures: dict[str, Any]
    scenarios: dict[str, Any]
    weights: dict[str, dict[str, Tensor]]
    seconds: float
    output: str


def launch_ranks(module: str, world: int, folder: Path, timeout_s: float = 300.0) -> str:
    """Runs `module` in `world` processes with `folder` as argument; gives their output, and fails with it unless all
    end with 0."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(HERE.parent.parent),
        "PATH": "/nonexistent",  # no compiler is to be found, nor needed
    }
    logs = [folder / f"rank-{rank}.log" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as output:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, str(folder)], env=own, stdout=output, stderr=subprocess.STDOUT
                )
            )
    deadline = time.monotonic() + timeout_s
    try:
        while any(rank.poll() is None for rank in ranks):
            failed = any(rank.poll() for rank in ranks)
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
            rank.wait()
    if any(rank.returncode for rank in ranks):
        tails = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
        pytest.fail(f"ranks ended with {[rank.returncode for rank in ranks]}\n{tails}", pytrace=False)
    return "".join(log.read_text() for log in logs)


@pytest.fixture(scope="session")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Launch]:
    """The launch of a world size: started when first asked for, kept for the session."""
    kept: dict[int, Launch] = {}
    tried: set[int] = set()

    def launch(world: int) -> Launch:
        if world not in kept:
            if world in tried:
                pytest.fail(f"the launch of {world} ranks failed before", pytrace=False)
            tried.add(world)
            folder = tmp_path_factory.mktemp(f"equality-{world}")
            started = time.monotonic()
            output = launch_ranks("tests.distributed.equality_worker", world, folder)
            figures = json.loads((folder / "figures.json").read_text())
            scenarios = json.loads((folder / "scenarios.json").read_text())
            kept[world] = Launch(
                figures, scenarios, torch.load(folder / "weights.pt"), time.monotonic() - started, output
            )
            TABLE.append(f"{world} ranks: {len(figures)} cases in {kept[world].seconds:.1f} s")
        return kept[world]

    return launch


@pytest.fixture(scope="session")
def table() -> list[str]:
    """Lines printed at the end of the session."""
    return TABLE


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the equality table, so that a run shows by how much it passed."""
    if TABLE:
        terminalreporter.section("equality table: largest deviation from one plain PyTorch process")
        for line in TABLE:
            terminalreporter.write_line(line)
