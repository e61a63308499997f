"""CPU and wall seconds of tests and packages, with all processes that they start: printed where `--durations` asks.

Each process that runs tests is in a cgroup of its own, so that daemons and ranks count that are not its children. Where
it may make none, what its ended children took counts alone.
"""

import contextlib
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

from tests import ALL_TESTS
from tests.chosen import DAY

_ROOT = Path("/sys/fs/cgroup")
_BUDGET = re.compile(r"`(\w+)` (\d+)[,.]")
_PAGE = Path(__file__).resolve().parent.parent / "docs" / "testing.md"


class Seconds:
    """Counts in the process that runs a test; adds up in the one that prints."""

    def __init__(self, config: pytest.Config) -> None:
        self.dearest: int = config.getoption("durations") or 0
        config.option.durations = None  # pytest's own list is of wall seconds alone
        self.usage = _own_usage_file()
        self.counted = self.now()
        self.tests: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def now(self) -> float:
        """CPU seconds so far."""
        if self.usage is None:
            return sum(os.times()[:4])
        words = self.usage.read_text().split()
        return int(words[0]) / 1e9 if len(words) == 1 else int(words[words.index("usage_usec") + 1]) / 1e6

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self.counted = self.counted, self.now()
        report.cpu_s = self.counted - before
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        kept = self.tests[report.nodeid]
        kept[0] += getattr(report, "cpu_s", 0.0)  # of a worker that died nothing is known
        kept[1] += report.duration

    def pytest_unconfigure(self) -> None:
        if self.usage is not None:
            _leave_group(self.usage)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.dearest:
            return
        terminalreporter.section(f"the {self.dearest} dearest tests: CPU seconds with all processes, wall seconds")
        for name, (cpu_s, wall_s) in sorted(self.tests.items(), key=lambda item: -item[1][0])[: self.dearest]:
            terminalreporter.line(f"{cpu_s:8.1f} {wall_s:8.1f}  {name}")
        terminalreporter.section("packages: CPU seconds, wall seconds, tests")
        # Of what `make test` runs.
        page = "" if ALL_TESTS or DAY else _PAGE.read_text(encoding="utf-8")
        budgets = {name: int(text) for name, text in _BUDGET.findall(page)}
        packages: dict[str, list[list[float]]] = defaultdict(list)
        for name, seconds in self.tests.items():
            folders = name.partition("::")[0].split("/")[1:-1]
            packages[folders[0] if folders else "tests"].append(seconds)
        for package, found in sorted(packages.items(), key=lambda item: -sum(cpu for cpu, _ in item[1])):
            cpu_s, wall_s = map(sum, zip(*found, strict=True))
            over = f"  over its budget of {budgets[package]}" if cpu_s > budgets.get(package, cpu_s) else ""
            terminalreporter.line(f"{cpu_s:8.1f} {wall_s:8.1f} {len(found):6d}  {package}{over}")


def _own_usage_file() -> Path | None:
    """The file with the CPU time of a new cgroup of this process's, of version 1 or 2; None where it may make none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        hierarchy, file = ("cpuacct", "cpuacct.usage") if "cpuacct" in controllers else ("", "cpu.stat")
        own = _ROOT / hierarchy / path.strip("/")
        if controllers in ("", "cpuacct", "cpu,cpuacct", "cpuacct,cpu") and (own / file).is_file():
            with contextlib.suppress(OSError):
                # Not by the pid: a group of an earlier session may be there still.
                folder = Path(tempfile.mkdtemp(prefix="tests-", dir=own))
                (folder / "cgroup.procs").write_text(str(os.getpid()))
                return folder / file
    return None


def _leave_group(file: Path) -> None:
    """The process goes back to where it was; a group that a daemon is still in stays, and with it those around it."""
    with contextlib.suppress(OSError):
        (file.parent.parent / "cgroup.procs").write_text(str(os.getpid()))
    for group in (*file.parent.glob("tests-*"), file.parent):
        with contextlib.suppress(OSError):
            group.rmdir()
