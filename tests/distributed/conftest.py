"""One launch of ranks for each world size, shared by all tests of this folder; the table at the end of the session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import session
from tests.distributed.equality_cases import Case, plainer
from tests.distributed.equality_launch import Launch, run_launch
from tests.distributed.ranks import HERE, launch_ranks

__all__ = ["HERE", "launch_ranks"]
_HERE = f"{Path(__file__).parent}/"
_TITLE = "equality table: largest deviation from one plain PyTorch process"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "scenario(NAME, world): the test looks at that of scenarios.py, on so many")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a launch run in one worker; what is too long for every change is marked."""
    from tests.distributed.equality_table import launch_of, too_long

    for item in items:
        if str(item.path).startswith(_HERE) and item.get_closest_marker("xdist_group") is None:
            values = _values(item)
            if isinstance(case := values.get("case"), Case) and too_long(case):
                item.add_marker(pytest.mark.long)
            asked = values.get("case", _scenario(item)[0])
            if asked:
                item.add_marker(pytest.mark.xdist_group(f"equality-{launch_of(asked)}"))


def _scenario(item: pytest.Item) -> tuple[int, str]:
    """(world size, name) of the scenario that a test looks at; 0 and nothing for one that looks at none."""
    mark, values = item.get_closest_marker("scenario"), _values(item)
    return (mark.kwargs.get("world") or values["world"], mark.args[0].format(**values)) if mark else (0, "")


def _values(item: pytest.Item) -> dict[str, Any]:
    """The values of a test's parameters."""
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


@pytest.fixture(scope="session")
def launches(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, table: Callable[[str], None]
) -> Callable[[Case | int], Launch]:
    """The launch that ran a case, or that of a world size: started when first asked for, kept for the session.

    It runs what this session's tests ask for: the whole table in a few launches, or one case alone.
    """
    from tests.distributed.equality_table import launch_of, plan_of

    items = request.session.items
    cases = {case for item in items if isinstance(case := _values(item).get("case"), Case)}
    cases |= {plainer(case) for case in cases}
    asked_scenarios = {_scenario(item) for item in items}
    kept: dict[str, Launch] = {}

    def launch(asked: Case | int) -> Launch:
        name = launch_of(asked)
        if name not in kept:
            world, planned, scenarios = plan_of(name)
            chosen = [case for case in planned if case in cases]
            folder = tmp_path_factory.mktemp(name)
            also = [scenario for scenario in scenarios if (world, scenario) in asked_scenarios]
            one = kept[name] = run_launch(world, chosen, also, folder)
            table(f"{name}: {len(chosen)} cases in {one.seconds:.1f} s")
        return kept[name]

    return launch


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Takes a line of the equality table, printed at the end of the session: a run shows by how much it passed."""
    return lambda line: session.leave(pytestconfig, _TITLE, line)
