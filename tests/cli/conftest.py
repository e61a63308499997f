"""A run in the test's own logs folder, written by the code that writes real ones."""

import platform
import subprocess
import sys

import pytest

from hpc_gpt.core.process import process_identity
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.made_runs import unsubmitted_run


@pytest.fixture
def made_run(own_folders) -> RunFolder:
    return unsubmitted_run()


@pytest.fixture
def waiting_process(made_run: RunFolder):
    """A run whose process is one of ours that does nothing, so that there is something to cancel."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    line = {"scheduler": "local", "job_id": str(process.pid), **process_identity(process.pid)}
    made_run.add_submission({**line, "host": platform.node(), "refused": None})
    yield process
    process.kill()
    process.wait()
