"""Every `next: ` that a verb prints is a command that a test runs."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from hpc_gpt.launcher import submission
from tests.cli.command import in_process, without_slurm
from tests.conftest import REPOSITORY
from tests.made_runs import add_attempt, add_checkpoint, metrics_line
from tests.waiting import LIMIT_S

# {(module, what it prints after `next: `, with {} for what varies, in two words): the test that runs it}
RUN_BY = {
    ("cli/plan.py", "{}"): "cli/test_plan.py::test_the_next_command_runs_what_was_planned",
    ("cli/init.py", "{}"): "cli/test_next.py::test_what_init_names_renders_what_it_wrote",
    ("cli/data.py", "{}"): "cli/test_data.py::test_the_next_command_takes_the_data",
    ("cli/status.py", "{}"): "cli/test_next.py::test_what_an_empty_logs_folder_names_would_run",
    (
        "cli/status.py",
        "hpc-gpt clean",
    ): "launcher/watch/test_clean.py::test_the_sizes_of_a_run_by_kind",
    ("cli/requests.py", "hpc-gpt submit"): "cli/test_next.py::test_what_cancel_names_would_resume_the_run",
    ("cli/requests.py", "hpc-gpt status"): "cli/test_next.py::test_what_stop_and_save_name_shows_the_run",
    ("cli/submit_answer.py", "hpc-gpt status"): "cli/test_next.py::test_what_submit_names_shows_the_run",
    (
        "cli/sweeping.py",
        "hpc-gpt status",
    ): "slurm/test_sweeps.py::test_equal_directives_are_one_array_and_status_is_one_line",
    ("cli/sweeping.py", "hpc-gpt report"): "cli/test_grid.py::test_its_runs_are_a_sweep_whose_table_has_what_varies",
    (
        "launcher/watch/control.py",
        "hpc-gpt report",
    ): "cli/test_sweep.py::test_a_sweep_runs_here_row_after_row_whatever_becomes_of_one",
    ("report/bench_table.py", "{}"): "launcher/local/test_race.py::test_its_end_names_what_trains_with_the_winner",
    ("cli/profile.py", "{}"): "slurm/test_doctor.py::test_a_detected_profile_is_one_that_submits",
    ("cli/report.py", "tensorboard --logdir"): "report/test_report_verb.py::test_the_commands_after_an_export_read_it",
    ("cli/report.py", "wandb sync"): "report/test_report_verb.py::test_the_commands_after_an_export_read_it",
}


def printed(path: Path) -> set[str]:
    """What a module prints after `next: `."""
    found, program = set(), path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(program)) if "next: " in program else ():
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in parts)
        whole = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        found |= {" ".join(match[1].split()[:2]) for match in re.finditer(r"(?m)(?:^|\n)next: (.+)", text) if whole}
    return found


def test_every_next_command_has_a_test_that_runs_it():
    package = REPOSITORY / "hpc_gpt"
    found = {(str(path.relative_to(package)), text) for path in sorted(package.rglob("*.py")) for text in printed(path)}
    assert found == set(RUN_BY)
    for place in RUN_BY.values():
        file, _, name = place.partition("::")
        assert f"\ndef {name}(" in (REPOSITORY / "tests" / file).read_text(encoding="utf-8"), place


def next_of(done) -> list[str]:
    """The words of the one next command, without `hpc-gpt`."""
    assert done.code == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("next: ")]
    words = shlex.split(line.removeprefix("next: "))
    assert words.pop(0) == "hpc-gpt"
    return words


def test_what_an_empty_logs_folder_names_would_run(tmp_path):
    bare = without_slurm(tmp_path)
    done = in_process("status", environment=bare)
    dry = in_process(*next_of(done), "--dry-run", "--script", environment=bare, code=0)
    assert "would start 4 ranks on this machine" in dry.stderr


@pytest.mark.parametrize("saved", [False, True])
def test_what_cancel_names_would_resume_the_run(made_run, waiting_process, saved):
    add_attempt(made_run, [metrics_line(1)], ended=None, job_id=str(waiting_process.pid))
    if saved:
        add_checkpoint(made_run, 1)
    words = next_of(in_process("cancel", made_run.run_id, "--yes"))
    waiting_process.wait(LIMIT_S)
    dry = in_process(*words, "--dry-run", "--script", code=0)
    assert made_run.run_id in words
    assert ("after step 1" in dry.stderr) is saved


@pytest.mark.parametrize("verb", ["stop", "save"])
def test_what_stop_and_save_name_shows_the_run(made_run, waiting_process, verb):
    add_attempt(made_run, [metrics_line(1)], ended=None, job_id=str(waiting_process.pid))
    assert made_run.run_id in in_process(*next_of(in_process(verb, made_run.run_id)), code=0).stdout


def test_what_submit_names_shows_the_run(monkeypatch):
    def write(prepared, logs, parent, now):
        (run := submission.write_run(prepared, logs, {})).add_submission({"scheduler": "local", "job_id": None})
        return submission.SubmittedRun(run, run.resolved(), "7")

    monkeypatch.setattr("hpc_gpt.cli.submitting.submit_run", write)
    done = in_process("submit", "demo", "--cluster", "local")
    run_id = re.search(r"started (\S+) as process", done.stdout)[1]
    assert run_id in in_process(*next_of(done), code=0).stdout


def test_what_init_names_renders_what_it_wrote(tmp_path):
    asked = ("big", "--model", "gpt2", "--gpus", "8", "--cluster", "a100-80g-8")
    rendered = in_process(*next_of(in_process("init", *asked, cwd=tmp_path)), cwd=tmp_path, code=0)
    assert rendered.stdout.startswith("#!/bin/bash\n")
