"""How a session of several workers begins: what they import is imported once, what they compile is compiled once.

Four workers that each import torch, DeepSpeed and every test, and the first three once more for the ranks of their
tests, keep two cores busy for 40 s before the first test runs.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests import warm

ROOT = Path(__file__).resolve().parent.parent
# In a worker. Not for a pytest that a test starts, perhaps in another tree.
if python := os.environ.pop(warm.VARIABLE, None):
    multiprocessing.set_executable(python)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers are forked from one process, and so are the fork servers of their ranks (tests/forked.py).

    Not on a machine with a GPU: DeepSpeed's import looks for one, and CUDA then works in no forked process.
    """
    if Path("/dev/nvidiactl").exists():
        return
    import execnet

    folder = Path(tempfile.mkdtemp())  # of this user alone
    config.add_cleanup(lambda: shutil.rmtree(folder))
    address, program = folder / "socket", folder / "python"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        file = listener.fileno()
        words = [sys.executable, "-m", "tests.warm", "serve", str(file)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[file], cwd=ROOT)
    config.add_cleanup(process.communicate)
    # Isolated and without site-packages it starts in 20 ms.
    words = [sys.executable, "-I", "-S", warm.__file__, str(address)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    program.chmod(0o700)
    os.environ[warm.VARIABLE] = str(program)
    specs[:] = [execnet.XSpec(f"{spec}//id={spec.id}//python={shlex.quote(str(program))}") for spec in specs]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Each worker imports other tests first: in a fresh clone it compiles them for all.

    Nothing collected is garbage, so none is looked for, then or later.
    """
    gc.disable()
    if worker := getattr(session.config, "workerinput", None):
        folders = [session.config.invocation_params.dir / name for name in session.config.args]
        files = sorted(path for folder in folders for path in folder.rglob("test_*.py"))
        first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        for path in files[first:] + files[:first]:
            # Some need their folder's conftest; what is wrong is said when they are collected.
            with contextlib.suppress(Exception, pytest.skip.Exception, pytest.fail.Exception):
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    collected = yield
    gc.enable()
    gc.freeze()
    return collected
