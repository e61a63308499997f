"""With CI=true a skipped or expected-to-fail test fails the session, but for those marked `shared`.

A machine that continuous integration runs on has everything; a skip there would hide a test that never runs.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parent
_not_run = pytest.StashKey[list[str]]()


def strict() -> bool:
    """Whether this is a run of continuous integration."""
    return os.environ.get("CI") == "true"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_not_run] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.shared)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and call.excinfo is not None:
        # A skip by a fixture counts where the fixture says it, so that a hundred tests make one line.
        own = [entry for entry in call.excinfo.traceback if Path(str(entry.path)).is_relative_to(_TESTS)]
        if own:
            report.longrepr = (str(own[-1].path), own[-1].lineno + 1, report.longrepr[2])
    if (report.skipped or hasattr(report, "wasxfail")) and item.get_closest_marker("shared") is None:
        item.config.stash[_not_run].append(item.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        collector.config.stash[_not_run].append(collector.nodeid)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if strict() and session.config.stash[_not_run] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if strict() and config.stash[_not_run]:
        terminalreporter.section("CI=true: these must run, but were skipped or expected to fail", red=True, bold=True)
        for nodeid in config.stash[_not_run]:
            terminalreporter.line(nodeid)
