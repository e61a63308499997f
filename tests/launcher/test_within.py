"""`within` of job scripts: what they ask of Slurm and Python ends by itself, or at its limit, but not of the job's
signals, which Slurm sends to every process of the job."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.test_scripts import SCRIPTS

ASKS = 'echo $$ >.up && mv .up up; until [ -e go ]; do sleep 0.05; done; echo "an answer"'


def wait_until(ready: Callable[[], object]) -> None:
    until = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.05)


@pytest.fixture
def within(request: pytest.FixtureRequest) -> str:
    """The function of that script."""
    found = re.search(r"^within\(\) \{.*?^\}$", SCRIPTS[request.param](), re.MULTILINE | re.DOTALL)
    assert found
    return found[0]


BOTH = pytest.mark.parametrize("within", ["job-script-slurm", "job-script-local"], indirect=True)


@BOTH
def test_what_is_asked_hears_none_of_the_jobs_signals(within: str, tmp_path: Path) -> None:
    lines = [within, "trap : TERM INT", 'within 300 bash -c "$1"', 'echo "exit code $?"']
    job = subprocess.Popen(
        ["bash", "-c", "\n".join(lines), "job.sh", ASKS],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until((tmp_path / "up").exists)
    asked = int((tmp_path / "up").read_text())
    for number in (signal.SIGTERM, signal.SIGINT):
        for group in {job.pid, os.getpgid(asked)}:  # timeout makes one of its own
            os.killpg(group, number)
    (tmp_path / "go").touch()
    assert job.communicate(timeout=120)[0] == "an answer\nexit code 0\n"


@BOTH
def test_its_limit_ends_it(within: str, tmp_path: Path) -> None:
    lines = [within, 'within 0.5 bash -c "$1"', 'echo "exit code $?"']
    command = ["bash", "-c", "\n".join(lines), "job.sh", ASKS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == f"exit code {128 + signal.SIGKILL}\n"
