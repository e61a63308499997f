"""As a plugin of pytest, says to the recorder which test runs: `pytest -p tests.mutations.contexts`, by `make map`.

What a fixture does that several tests share is recorded under the fixture's name, and each of its tests is known by it.
"""

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.mutations.recorder import FOLDER

_folder = Path(os.environ[FOLDER])
_uses: dict[str, list[str]] = {}
_seconds: dict[str, float] = defaultdict(float)
_others: set[str] = set()  # failed or skipped: no verdict of these counts


def _turn_to(name: str) -> None:
    recording = coverage.Coverage.current()
    assert recording is not None, "this Python did not start the recorder"
    recording.switch_context(name)
    (_folder / "current").write_text(name, encoding="utf-8")


def _shared(fixture: Any) -> str:
    return f"shared by {fixture.baseid}: {fixture.argname}"


def pytest_runtest_logstart(nodeid: str) -> None:
    _turn_to(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration
    if report.outcome != "passed":
        _others.add(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Generator[None, Any, Any]:
    if fixturedef.scope == "function":
        return (yield)
    _turn_to(_shared(fixturedef))
    try:
        return (yield)
    finally:
        _turn_to(request._pyfuncitem.nodeid if hasattr(request, "_pyfuncitem") else "")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    # Those it asked for by name while it ran are among them.
    found = getattr(getattr(item, "_request", None), "_fixture_defs", {}).values()
    _uses[item.nodeid] = sorted({_shared(each) for each in found if each.scope != "function"})


def pytest_sessionfinish() -> None:
    seconds = {test: round(each, 2) for test, each in _seconds.items() if test not in _others}
    (_folder / "tests.json").write_text(json.dumps({"uses": _uses, "seconds": seconds}), encoding="utf-8")
