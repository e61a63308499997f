"""One launch of ranks serves all tests that look at its tasks; the equality table at the end of the session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import session
from tests.distributed.equality_cases import Case, plainer
from tests.distributed.ranks import Launch, Task

_HERE = f"{Path(__file__).parent}/"
_TITLE = "equality table: largest deviation from one plain PyTorch process"


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a launch run in one worker; what is too long for every change is marked."""
    from tests.distributed.equality_table import too_long

    for item in items:
        if str(item.path).startswith(_HERE) and (task := _task(item)) is not None:
            if isinstance(case := _values(item).get("case"), Case) and too_long(case):
                item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.xdist_group(task.launch))


def _task(item: pytest.Item) -> Task | None:
    """The task that a test looks at: its parameter `task`, or that of its `case` of the table."""
    from tests.distributed.equality_table import table_task

    values = _values(item)
    task = table_task(case) if isinstance(case := values.get("case"), Case) else values.get("task")
    return task if isinstance(task, Task) else None


def _values(item: pytest.Item) -> dict[str, Any]:
    """The values of a test's parameters."""
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


@pytest.fixture(scope="session")
def launch_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, table: Callable[[str], None]
) -> Callable[[Task], Launch]:
    """The launch that ran a task: started when first asked for, kept for the session.

    It runs what this session's tests look at: a whole table, or one case alone.
    """
    from tests.distributed.equality_table import table_task

    cases = [case for item in request.session.items if isinstance(case := _values(item).get("case"), Case)]
    tasks = dict.fromkeys(task for item in request.session.items if (task := _task(item)) is not None)
    tasks |= dict.fromkeys(map(table_task, map(plainer, cases)))
    kept: dict[str, Launch] = {}

    def launch(asked: Task) -> Launch:
        name = asked.launch
        if name not in kept:
            chosen = [task for task in tasks if task.launch == name]
            one = kept[name] = Launch(asked.world, chosen, tmp_path_factory.mktemp(name))
            table(f"{name}: {len(chosen)} tasks in {one.seconds:.1f} s")
        return kept[name]

    return launch


@pytest.fixture(scope="session")
def found(launch_of: Callable[[Task], Launch]) -> Callable[[Task], Any]:
    """What a task gave."""
    return lambda task: launch_of(task).figures(task)


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Takes a line of the equality table, printed at the end of the session: a run shows by how much it passed."""
    return lambda line: session.leave(pytestconfig, _TITLE, line)
