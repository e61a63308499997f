"""--row, --sweep and --smoke as commands."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from hpc_gpt.cli.submit_answer import AnsweredRun
from hpc_gpt.core.errors import JobFailed
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.settings.experiment_file import find_sweep
from hpc_gpt.launcher.render import array_script
from tests.cli.command import error_of, hpc_gpt, in_process
from tests.cli.schemas import TINY
from tests.cli.test_completion import offered
from tests.docs.pages import blocks

TABLE = f"""{TINY}[rows]
"no" = {{ impossible = "it needs 2 GPUs, the row has 1" }}
"bad" = {{ train.lr = 1e30, train.clip = 0.0, train.max_bad_steps = 1, train.steps = 50 }}
"two" = {{ layout.gpus = 2 }}
"good" = {{}}
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (path := tmp_path / "table.toml").write_text(TABLE)
    return path


def row_of(script: str) -> str:
    """The row that a script says it is."""
    return json.loads(script.split("<<'HPC_GPT_RESOLVED'", 1)[1].split("\n", 1)[1].split("\nHPC_GPT_RESOLVED\n", 1)[0])[
        "row"
    ]


def test_render_takes_a_row_or_the_first_possible_one(table):
    assert row_of(in_process("render", table).stdout) == "bad"
    assert row_of(in_process("render", table, "--row", "good").stdout) == "good"
    message, hint = error_of(in_process("render", table, "--row", "god"))
    assert ("no row 'god'" in message, "good" in hint) == (True, True)


def test_render_sweep_writes_the_script_of_each_row(table, tmp_path):
    in_process("render", table, "--sweep", "-o", tmp_path / "scripts", code=0)
    assert (tmp_path / "scripts" / "two.sh").read_text() == in_process("render", table, "--row", "two").stdout


def test_refused_rows_are_named_with_what_leaves_them_out(table):
    table.write_text(TABLE + '"odd" = { layout.gpus = 3, layout.tp = 2 }\n')
    message, hint = error_of(in_process("submit", table, "--sweep", "--cluster", "local"))
    assert message.startswith("row 'odd': ")
    assert "--skip-unfit submits the other 3" in hint
    message, _ = error_of(in_process("submit", table, "--sweep", "--skip-unfit", "--cluster", "local", "--tp", "3"))
    assert all(repr(row) in message for row in ("bad", "two", "good"))


def test_a_row_without_its_data_is_left_out_like_others(table, tmp_path, monkeypatch):
    table.write_text(TABLE + '"lost" = { data.source = "tokens", data.path = "no.tokens" }\n')
    command = ("submit", table, "--sweep", "--cluster", "local")
    for more in ((), ("--dry-run",)):
        message, hint = error_of(in_process(*command, *more))
        assert message == "row 'lost': no token file no.tokens"
        assert "; --skip-unfit submits the other 3" in hint
    done = in_process(*command, "--skip-unfit", "--dry-run")
    assert (done.code, [line.split(": ")[1] for line in done.stdout.splitlines()]) == (0, ["bad", "two", "good"])
    assert "\nnot lost: no token file no.tokens\n" in f"\n{done.stderr}"
    message, _ = error_of(in_process(*command, "--skip-unfit", "--set", "data.source=tokens", "--set", "data.path=no"))
    assert message == "no token file no"
    assert not Path(os.environ["HPC_GPT_LOGS"]).exists()
    started: list[str] = []
    monkeypatch.setattr(
        "hpc_gpt.cli.sweeping.run_here", lambda _, rows, *names: started.extend(r.resolved.row for r in rows) or ()
    )
    done = in_process(*command, "--skip-unfit")
    assert (done.code, started) == (0, ["bad", "two", "good"])
    assert "\nnot lost: no token file no.tokens\n" in f"\n{done.stderr}"


def test_the_answer_has_what_was_started_before_a_fault(table, monkeypatch):
    def fails_in_the_second(sweep, rows):
        yield AnsweredRun(rows[0].resolved, sweep.runs[0], "7", sweep=sweep.id, followed=True)
        raise JobFailed("it failed")

    monkeypatch.setattr("hpc_gpt.cli.sweeping.run_here", fails_in_the_second)
    answer = json.loads(in_process("submit", table, "--sweep", "--cluster", "local", "--json", code=3).stdout)
    assert [(run["row"], run["job"], run["state"]) for run in answer["runs"]] == [("bad", "7", "unknown")]
    assert answer["left_out"] == {"no": "it needs 2 GPUs, the row has 1"}
    assert [*Path(os.environ["HPC_GPT_LOGS"]).rglob(answer["sweep"])]


def test_an_arrays_script_is_bash_and_wants_its_folder(table, tmp_path):
    scripts = [in_process("render", table, "--row", row).stdout for row in ("bad", "good")]
    (path := tmp_path / "array.sh").write_text(array_script("table", scripts))
    environment = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": "3"}
    done = subprocess.run(["bash", str(path)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Error: element 3 of the array has no run\n\nhint: " in done.stderr


def test_a_sweep_runs_here_row_after_row_whatever_becomes_of_one(table):
    text = "".join(line for line in TABLE.splitlines(keepends=True) if not line.startswith('"two"'))
    table.write_text(text)
    done = hpc_gpt("submit", table, "--sweep", "--cluster", "local", code=3)
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["bad,", "good,"]
    assert "Error: 1 of 2 runs failed: bad\n" in done.stderr
    (command,) = re.findall("^next: hpc-gpt (.*)", done.stderr, re.MULTILINE)
    assert "good" in in_process(*shlex.split(command), code=0).stdout
    runs = json.loads(in_process("status", "--json").stdout)["runs"]
    assert [(run["row"], run["state"], run["sweep"]) for run in runs] == [
        ("bad", "nan", "table"), ("good", "done", "table"),
    ]  # fmt: skip
    lines = in_process("status").stdout.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith(f"{runs[0]['sweep_id']}  table       2 runs  1 done, 1 nan  ")
    assert len(in_process("status", "--open").stdout.splitlines()) == 4
    assert len(in_process("status", runs[0]["sweep_id"]).stdout.splitlines()) == 4
    assert runs[0]["sweep_id"] in offered("status", "")
    files = [run.path / "experiment.toml" for run in list_runs(Path(os.environ["HPC_GPT_LOGS"]))]
    assert [file.read_text() for file in files] == [text, text]
    assert len({file.stat().st_ino for file in files}) == 1, "on the disk once: it has every row"


def test_the_sweep_that_the_page_shows_is_one(tmp_path):
    (path := tmp_path / "shown.toml").write_text(blocks("docs/experiments.md", "toml")[0])
    assert [(row.name, row.impossible is None) for row in find_sweep(str(path)).rows] == [
        ("b1", True),
        ("b8", True),
        ("pp8", False),
    ]
    assert in_process("render", path, "--sweep", "-o", tmp_path).stdout.count(".sh\n") == 2


def test_spare_nodes_of_an_array_serve_the_preflight_alone() -> None:
    spares = ("--set", "job.preflight=true", "--set", "job.spare_nodes=1")
    note = "note: spare nodes serve the preflight alone: an array's element without a node is queued again"
    for more, said in ((spares, True), ((), False)):
        done = in_process(
            "submit", "demo", "--cluster", "generic-slurm", "--grid", "train.lr=1e-3,2e-3", "--dry-run", *more
        )
        assert (note in done.stderr) is said, done.stderr
