"""With CI=true a skipped or expected-to-fail test fails the session, but for those marked `shared`.

A machine that continuous integration runs on has everything; a skip there would hide a test that never runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

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
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if (report.skipped or hasattr(report, "wasxfail")) and item.get_closest_marker("shared") is None:
        item.config.stash[_not_run].append(item.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
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
