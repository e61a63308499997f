"""One launch of ranks for each world size, shared by all tests of this folder; the table at the end of the session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.equality_cases import Case
from tests.distributed.equality_launch import Launch, run_launch
from tests.distributed.ranks import HERE, launch_ranks

__all__ = ["HERE", "launch_ranks"]
TABLE: list[str] = []


@pytest.fixture(scope="session")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case | int], Launch]:
    """The launch that ran a case, or that of a world size: started when first asked for, kept for the session."""
    from tests.distributed.equality_table import launch_of, plan_of

    kept: dict[str, Launch] = {}

    def launch(asked: Case | int) -> Launch:
        name = launch_of(asked)
        if name not in kept:
            world, cases, scenarios = plan_of(name)
            kept[name] = run_launch(world, cases, scenarios, tmp_path_factory.mktemp(name))
            one = kept[name]
            TABLE.append(f"{name}: {len(cases)} cases in {one.seconds:.1f} s, {one.cpu_seconds:.1f} s of CPU")
        return kept[name]

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
