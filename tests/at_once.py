"""Prints each failure when its test ends, with CI=true: continuous integration may end a session before its summary.

CI_ENDS, in seconds since 1970, is when the session ends itself. Then, and at a SIGTERM, it prints which tests run and
which were not reached.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest


class SaidAtOnce:
    """The plugin that prints them. The process that starts the workers has it, no worker does."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.running: dict[str, float] = {}
        self.waiting: dict[str, None] | None = None
        signal.signal(signal.SIGTERM, self.say_what_is_left)
        if ends := os.environ.get("CI_ENDS"):
            timer = threading.Timer(max(0.0, float(ends) - time.time()), os.kill, (os.getpid(), signal.SIGTERM))
            timer.daemon = True
            timer.start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self.waiting = dict.fromkeys(ids) if self.waiting is None else self.waiting

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running[nodeid] = time.monotonic()
        (self.waiting or {}).pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            what = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)[-1500:]
            self.config.pluginmanager.get_plugin("terminalreporter").write_line(f"\nfailed: {report.nodeid} {what}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.pop(nodeid, None)

    def say_what_is_left(self, number: int, frame: object) -> None:
        # Not by Python's buffer, which the signal may have come into; pytest's own end waits for its workers first.
        said = [f"still running after {time.monotonic() - begun:.0f} s: {name}" for name, begun in self.running.items()]
        said += [f"not reached: {name}" for name in self.waiting or ()]
        said += ["not reached: any test, as none was collected"] * (self.waiting is None)
        said += [f"ended by the limit of CI_MINUTES or a signal: {len(said)} tests have not run to their end"]
        os.write(2, "\n".join(["", *said, ""]).encode())
        raise KeyboardInterrupt
