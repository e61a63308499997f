"""What a session of tests says at its end, whether one process ran it or several workers of pytest-xdist.

- Lines that tests left under a title, such as the equality table; the dearest tests (tests/seconds.py).
- As the very last line how many tests ran and what did not: the long ones left to another day, and the skips.
- With CI=true, tests that were skipped or expected to fail: these fail the session, but for those marked `shared`. A
  machine of continuous integration has everything; a skip there would hide a test that never runs.
- With CI=true each failure at once, and at a limit what was not reached (tests/at_once.py).
- In the file that FAILED_TESTS names, the tests that failed, one on a line, for a second run of these.
"""

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests import chosen
from tests.at_once import SaidAtOnce
from tests.seconds import Seconds

NOT_RUN = "CI=true: these must run, but were skipped or expected to fail"
_lines = pytest.StashKey[dict[str, list[str]]]()
_left = pytest.StashKey[tuple[int, int, int]]()  # tests, long ones, those of both that are left out


def leave(config: pytest.Config, title: str, line: str) -> None:
    """Prints `line` under `title` at the end of the session."""
    config.stash[_lines][title].append(line)


def strict() -> bool:
    """Whether this is a run of continuous integration."""
    return os.environ.get("CI") == "true"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_lines] = defaultdict(list)
    config.stash[_left] = (0, 0, 0)
    config.pluginmanager.register(Seconds(config), "seconds")
    if strict() and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SaidAtOnce(config), "said at once")


@pytest.hookimpl(trylast=True)  # after those that mark tests as long
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.shared)
        # One worker makes a module's fixture, for all tests of it.
        used = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
        if item.get_closest_marker("xdist_group") is None and any(each[-1].scope == "module" for each in used):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}-{item.path.stem}"))
    long = chosen.long_tests(items)
    left = {item for item, how in long.items() if not chosen.runs_today(how)}
    config.stash[_left] = (len(items), len(long), len(left))
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]
    # A long test that begins last would run alone. A module stays together, as its tests share fixtures.
    with_long = {item.path for item in items if item in long}
    items.sort(key=lambda item: item.path not in with_long)
    gc.freeze()  # a million objects of modules and tests, in which nobody looks for garbage any more


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if (report.skipped or hasattr(report, "wasxfail")) and item.get_closest_marker("shared") is None:
        leave(item.config, NOT_RUN, item.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped:
        leave(collector.config, NOT_RUN, collector.nodeid)
    return report


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
    node.config.stash[_left] = tuple(output.get("left", node.config.stash[_left]))
    for title, lines in output.get("lines", {}).items():
        kept = node.config.stash[_lines][title]
        kept += [line for line in lines if title != NOT_RUN or line not in kept]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if file := os.environ.get("FAILED_TESTS"):
        reports = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
        found = [*(report.nodeid for report in reports), *(config.stash[_lines][NOT_RUN] if strict() else ())]
        names = dict.fromkeys(chosen.GROUP.sub("", name) for name in found)
        Path(file).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    for title, lines in config.stash[_lines].items():
        if lines and (title != NOT_RUN or strict()):
            terminalreporter.section(title, red=title == NOT_RUN, bold=True)
            for line in lines:
                terminalreporter.line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput") or config.getoption("collectonly"):
        return
    tests, long, left = config.stash[_left]
    skips = reporter.stats.get("skipped", [])
    reasons = Counter(str(skip.longrepr[2]).removeprefix("Skipped: ").partition("\n")[0] for skip in skips)
    said = [f"{count:,} skipped: {reason}" for reason, count in reasons.most_common()]
    ran = len(config.pluginmanager.get_plugin("seconds").tests)
    if left:
        turn = f"turn {chosen.turn_of_day(chosen.DAY)} of {chosen.DAY}" if chosen.DAY else "make test-all has all"
        said.insert(0, f"ran {ran:,} of {tests:,} tests, at most {long - left:,} of {long:,} long ones ({turn})")
    if said:
        reporter.write_line("; ".join(said))
