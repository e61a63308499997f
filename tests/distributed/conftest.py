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


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups, and before the day's tests are chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a launch run in one worker; the first of them waits for all its tasks. Long tests of one task
    run on one day."""
    from tests.distributed.equality_table import too_long

    for item in items:
        if not str(item.path).startswith(_HERE) or not (tasks := _tasks(item)):
            continue
        item.add_marker(pytest.mark.xdist_group(tasks[0].launch))
        item.add_marker(pytest.mark.timeout(1500))
        long = item.get_closest_marker("long")
        values = _values(item)
        if long is not None or too_long(values.get("case", values.get("recomputed"))):
            kwargs = {} if long is None else long.kwargs
            item.add_marker(pytest.mark.long(**kwargs | {"launch": tasks[0].name}))


def _tasks(item: pytest.Item) -> list[Task]:
    """The tasks that a test reads: its `task`, that of its `case`, or those of a `recomputed` case with and without."""
    from tests.distributed.equality_table import table_task

    values = _values(item)
    cases = [values["case"]] if isinstance(values.get("case"), Case) else []
    if isinstance(case := values.get("recomputed"), Case):
        cases = [case, plainer(case)]
    return [*map(table_task, cases), *([task] if isinstance(task := values.get("task"), Task) else [])]


def _values(item: pytest.Item) -> dict[str, Any]:
    """The values of a test's parameters."""
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


@pytest.fixture(scope="session")
def launch_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, table: Callable[[str], None]
) -> Callable[[Task], Launch]:
    """The launch that ran a task: started when first asked for, kept for the session. It runs what this session's tests
    look at, and nothing else."""
    tasks = dict.fromkeys(task for item in request.session.items for task in _tasks(item))
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
