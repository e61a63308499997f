"""Ranks of tests as processes forked from one that has imported torch and DeepSpeed: the seconds of that are shared.

Each is a process of its own, with its own environment, log and signals.
"""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.preload"])


def start_module(module: str, argument: str, environment: Mapping[str, str], log: Path) -> ForkServerProcess:
    """Runs `python -m MODULE ARGUMENT` with this environment and no other; what it prints is appended to `log`."""
    process = FORKED.Process(target=_run_module, args=(module, argument, dict(environment), str(log)), daemon=True)
    process.start()
    return process


def _run_module(module: str, argument: str, environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGQUIT)  # where it stands, for one that stands still
    sys.argv = [module, argument]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
