"""The same report on a terminal, wide and narrow, and in a pipe."""

import subprocess
import sys

import pytest

from tests.made_runs import make_run, with_attempt
from tests.terminal import on_a_terminal

SHOW = (
    "from hpc_gpt.report.gather import *; from hpc_gpt.report.tables import *; "
    "from hpc_gpt.runs.find_runs import find_runs; import sys; from pathlib import Path; "
)
SHOW += "print_record(gather_records(find_runs([], Path(sys.argv[1]))).records[0])"


@pytest.fixture
def logs(tmp_path):
    with_attempt(make_run(tmp_path / "logs"), 20)
    return tmp_path / "logs"


def written(columns, *words, **variables):
    """What `python WORDS` writes to a terminal of so many columns."""
    code, shown = on_a_terminal(*words, COLUMNS=str(columns), **variables)
    assert code == 0, shown
    return shown


def test_wide_narrow_and_piped(logs):
    words = ("-m", "hpc_gpt", "report", str(logs))
    wide, narrow = written(250, *words), written(60, *words)
    piped = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout
    assert wide == piped
    assert len(piped.splitlines()) == 2
    assert "tflops_hardware" in narrow
    for text in (wide, narrow):
        assert "6.000 -> 2.200" in text
        assert "…" not in text


def test_bold_is_for_terminals_that_want_it(logs):
    words = ("-c", SHOW, str(logs))
    assert "\x1b[1m" in written(100, *words)
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in written(100, *words, **variables)
    assert b"\x1b" not in subprocess.run([sys.executable, *words], capture_output=True, check=True).stdout


def test_a_closed_stdout_is_no_fault_of_the_program(logs):
    command = ["bash", "-c", '"$0" -m hpc_gpt report "$1" >&-', sys.executable, str(logs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "bug in hpc-gpt" not in done.stderr
    assert done.returncode == 0
