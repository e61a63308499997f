"""The same report on a terminal, wide and narrow, and in a pipe."""

import os
import pty
import subprocess
import sys

import pytest

from tests.made_runs import add_attempt, make_run, metrics_line

SHOW = (
    "from hpc_gpt.report.gather import *; from hpc_gpt.report.tables import *; "
    "from hpc_gpt.run_folder import find_runs; import sys; from pathlib import Path; "
)
SHOW += "print_record(gather_records(find_runs([], Path(sys.argv[1]))).records[0])"


@pytest.fixture
def logs(tmp_path):
    run = make_run(tmp_path / "logs")
    add_attempt(run, [metrics_line(step) for step in range(1, 21)])
    return tmp_path / "logs"


def on_a_terminal(columns, *words, **variables):
    """What `python WORDS` writes to a terminal of so many columns."""
    main, side = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", **variables}
    process = subprocess.Popen([sys.executable, *words], stdout=side, stderr=subprocess.DEVNULL, env=environment)
    os.close(side)
    written = b""
    while True:
        try:
            piece = os.read(main, 4096)
        except OSError:  # the other end was closed
            break
        if not piece:
            break
        written += piece
    os.close(main)
    assert process.wait() == 0
    return written.decode().replace("\r\n", "\n")


def test_wide_narrow_and_piped(logs):
    words = ("-m", "hpc_gpt", "report", str(logs))
    wide, narrow = on_a_terminal(250, *words), on_a_terminal(60, *words)
    piped = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout
    assert wide == piped
    assert len(piped.splitlines()) == 2
    assert "tflops_hardware" in narrow
    for text in (wide, narrow):
        assert "6.000 -> 2.200" in text
        assert "…" not in text


def test_bold_is_for_terminals_that_want_it(logs):
    words = ("-c", SHOW, str(logs))
    assert "\x1b[1m" in on_a_terminal(100, *words)
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in on_a_terminal(100, *words, **variables)
    assert b"\x1b" not in subprocess.run([sys.executable, *words], capture_output=True, check=True).stdout
