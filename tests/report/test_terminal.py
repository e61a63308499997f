"""The same report on a terminal, wide and narrow, and in a pipe."""

import json
import subprocess
import sys

import pytest

from tests.cli.command import in_process
from tests.made_runs import make_run, with_attempt
from tests.terminal import on_a_terminal

SHOW = (
    "from hpc_gpt.report.gather import *; from hpc_gpt.report.tables import *; "
    "from hpc_gpt.core.runs.find_runs import find_runs; import sys; from pathlib import Path; "
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


def test_a_terminal_gets_a_table_with_the_run_first(logs):
    """All columns of a pipe are one option away."""
    words = ("-m", "hpc_gpt", "report", str(logs))
    piped = in_process(*words[2:], code=0).stdout
    assert piped.split()[:4] == ["Run", "Layout", "GPUs", "Size"]
    heading, row, *notes = written(60, *words, NO_COLOR="1").splitlines()
    assert heading.split() == ["Run", "Layout", "Loss", "Ended"]
    assert (row.startswith("2026"), max(map(len, (heading, row, *notes))) <= 60) == (True, True)
    every = written(400, *words, "--columns", "all", NO_COLOR="1").splitlines()[0]
    assert [each for each in piped.splitlines()[0].split("  ") if each.strip() not in every] == []
    assert {"Seq", "Skipped", "Config"} < {*every.split()}, "what else has a value"


def test_what_sweeps_vary_are_columns_by_themselves(tmp_path):
    """Of several sweeps, too, and on a narrow terminal before the figures."""
    for sweep, row, lr in (("a", "1", 1e-4), ("a", "2", 1e-3), ("b", "3", 3e-3)):
        run = with_attempt(make_run(tmp_path / "logs", train__lr=lr), 20)
        resolved = json.loads((run.path / "resolved.json").read_text()) | {"sweep": sweep, "row": row}
        (run.path / "resolved.json").write_text(json.dumps(resolved))
        varied = {"train.lr": lr} | ({"layout.micro_batch": 8} if sweep == "b" else {})
        (run.path / "sweep.json").write_text(json.dumps({"id": sweep, "name": sweep, "row": row, "varied": varied}))
    words = ("-m", "hpc_gpt", "report", str(tmp_path / "logs"))
    heading, *rows = written(80, *words, NO_COLOR="1").splitlines()
    assert heading.split()[:4] == ["Run", "lr", "micro_batch", "Layout"]
    assert [row.split()[1:3] for row in rows[:3]] == [["0.0001", "-"], ["0.001", "-"], ["0.003", "8"]]


def test_an_experiments_key_finds_its_column(logs):
    for keys in ("lr,engine.zero_stage,hidden", "train.lr,settings.engine.zero_stage,model.hidden"):
        done = in_process("report", logs, "--sort=-lr", "--columns", keys, "--format", "csv", code=0)
        assert done.stdout == "settings.train.lr,settings.engine.zero_stage,hidden\n0.001,1,128\n"


def test_bold_is_for_terminals_that_want_it(logs):
    """In a pipe, and with TERM=dumb: tests/cli/test_colours.py."""
    words = ("-c", SHOW, str(logs))
    assert "\x1b[1m" in written(100, *words)
    assert "\x1b" not in written(100, *words, NO_COLOR="1")


def test_a_closed_stdout_is_no_fault_of_the_program(logs):
    command = ["bash", "-c", '"$0" -m hpc_gpt report "$1" >&-', sys.executable, str(logs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "bug in hpc-gpt" not in done.stderr
    assert done.returncode == 0
