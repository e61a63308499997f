"""What a whole session of tests says at its end, whether one process ran it or several workers of pytest-xdist.

With CI=true each failure and each test of more than a minute is said at once, too, and what runs at a SIGTERM: such a
machine may end the session.

- Lines that tests left under a title, such as the equality table.
- As the very last line, what did not run and why: the tests marked `long`, which `make test-all` adds, and the skips.
- Seconds by folder, beside pytest's own list of the slowest tests (`--durations`, which `make test` gives).
- In the file that FAILED_TESTS names, the tests that failed, one on a line, for a second run of these.
- With CI=true, which tests did not run: a skip or an expected failure fails the session, but for tests marked
  `shared`. A machine of continuous integration has everything; a skip there would hide a test that never runs.
"""

import os
import re
import signal
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests import ALL_TESTS, LONG_ALONE

_TESTS = Path(__file__).resolve().parent
NOT_RUN = "CI=true: these must run, but were skipped or expected to fail"
# What pytest-xdist appends to the name of a test in a group.
_GROUP = re.compile(r"@[\w-]+$")
_lines = pytest.StashKey[dict[str, list[str]]]()
_left = pytest.StashKey[int]()  # how many tests were left to `make test-all`


def leave(config: pytest.Config, title: str, line: str) -> None:
    """Prints `line` under `title` at the end of the session."""
    config.stash[_lines][title].append(line)


def strict() -> bool:
    """Whether this is a run of continuous integration."""
    return os.environ.get("CI") == "true"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_lines] = defaultdict(list)
    config.stash[_left] = 0
    config.pluginmanager.register(_Seconds(), "seconds")
    if strict() and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_SaidAtOnce(config), "said at once")


@pytest.hookimpl(trylast=True)  # after those that mark tests as long
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.shared)
    long = left_to_test_all(items)
    if not ALL_TESTS:
        config.stash[_left] = len(long)
    if LONG_ALONE or not ALL_TESTS:
        config.hook.pytest_deselected(items=[item for item in items if (item in long) != LONG_ALONE])
        items[:] = [item for item in items if (item in long) == LONG_ALONE]
    if LONG_ALONE:
        # Those of some minutes first: the last one would run alone.
        items.sort(key=lambda item: item.path.parent.name != "trainer")


def left_to_test_all(items: Iterable[pytest.Item]) -> dict[pytest.Item, None]:
    """The tests marked `long`, less the cases that the mark's `but` keeps in `make test`."""
    long: dict[pytest.Item, None] = {}
    tables: dict[tuple[pytest.Item, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        marks = [mark.kwargs.get("but") for mark in item.iter_markers("long")]
        if marks and None not in marks and isinstance(item, pytest.Function):
            tables[item.parent, item.originalname].append(item)
        elif marks:
            long[item] = None
    for cases in tables.values():
        mark = cases[0].get_closest_marker("long")
        assert mark is not None
        kept = {"first": lambda cases: cases[:1], "each value": each_value_once}[mark.kwargs["but"]](cases)
        long |= dict.fromkeys(case for case in cases if case not in kept)
    return long


def each_value_once(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Few of the cases, which hold every value of each parameter that any of them holds."""
    # By identity: a value may have no hash.
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
    missing = set().union(*values.values())
    kept = []
    while missing:
        kept.append(max(cases, key=lambda case: len(values[case] & missing)))
        missing -= values[kept[-1]]
    return kept


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
        leave(item.config, NOT_RUN, item.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        leave(collector.config, NOT_RUN, collector.nodeid)
    return report


class _Seconds:
    """Adds up seconds by folder; a plugin of its own, as the hook is not given the session it is called in."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.tests: dict[str, int] = defaultdict(int)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = "/".join(report.nodeid.partition("::")[0].split("/")[:-1][:2])
        self.seconds[folder] += report.duration
        self.tests[folder] += report.when == "call"


class _SaidAtOnce:
    """Prints a test that failed or took long when it ends, and those that run when a signal ends the session."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.start = time.monotonic()
        self.begun: dict[str, float] = {}
        signal.signal(signal.SIGTERM, self.say_what_runs)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.begun[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.duration > 60:
            what = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr) if report.failed else ""
            minutes = (time.monotonic() - self.start) / 60
            self.say(f"[{minutes:.1f} min] {report.outcome} {report.duration:.0f} s {report.nodeid} {what}")

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, nodeid: str) -> None:
        self.say(f"a warning of {nodeid}: {warning_message.message}")

    def say(self, line: str) -> None:
        self.config.pluginmanager.get_plugin("terminalreporter").write_line(f"\n{line[:1500]}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.begun.pop(nodeid, None)

    def say_what_runs(self, number: int, frame: object) -> None:
        # Not by Python's buffer, which the signal may have come into; pytest's own end waits for its workers first.
        for nodeid, begun in self.begun.items():
            os.write(2, f"\nstill running after {time.monotonic() - begun:.0f} s: {nodeid}".encode())
        os.write(2, b"\n")
        raise KeyboardInterrupt


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):  # a worker's, which prints nothing itself
        config.workeroutput |= {"lines": dict(config.stash[_lines]), "left": config.stash[_left]}
    elif strict() and config.stash[_lines][NOT_RUN] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes over what a worker of pytest-xdist has left; one that died has left nothing."""
    output = getattr(node, "workeroutput", {})
    # Every worker collects every test.
    node.config.stash[_left] = max(node.config.stash[_left], output.get("left", 0))
    for title, lines in output.get("lines", {}).items():
        kept = node.config.stash[_lines][title]
        kept += [line for line in lines if title != NOT_RUN or line not in kept]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if file := os.environ.get("FAILED_TESTS"):
        reports = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
        names = dict.fromkeys(_GROUP.sub("", report.nodeid) for report in reports)
        Path(file).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    for title, lines in config.stash[_lines].items():
        if lines and (title != NOT_RUN or strict()):
            terminalreporter.section(title, red=title == NOT_RUN, bold=True)
            for line in lines:
                terminalreporter.line(line)
    if config.getoption("durations"):
        plugin = config.pluginmanager.get_plugin("seconds")
        terminalreporter.section("seconds by folder, all workers together")
        for folder, seconds in sorted(plugin.seconds.items(), key=lambda item: -item[1]):
            terminalreporter.line(f"{seconds:8.1f} s  {plugin.tests[folder]:5d} tests  {folder}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput") or config.getoption("collectonly"):
        return
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ").partition("\n")[0]
        for report in reporter.stats.get("skipped", [])
    )
    left_out = [f"{config.stash[_left]:,} long (make test-all)"] if config.stash[_left] else []
    left_out += [f"{count:,} skipped: {reason}" for reason, count in reasons.most_common()]
    if left_out:
        reporter.write_line("left out: " + "; ".join(left_out))
