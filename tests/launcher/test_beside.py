"""A process beside the ranks that dies or hangs ends nothing else; and the libraries of [track] at the submission."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import Container, load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.launcher.local.beside import BesideRanks, end_beside
from hpc_gpt.launcher.render import render_script
from hpc_gpt.launcher.services import check_track
from tests.cli.command import in_process
from tests.made_runs import add_attempt, make_run, metrics_line
from tests.programs import put, ran
from tests.waiting import patient, wait_for


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Starts a process of [after] that does `what`; gives it and the attempt once it runs."""

    def start(what: str):
        (tmp_path / "own.py").write_text(
            f"import os, pathlib, time\npathlib.Path(os.environ['RUNS']).touch()\n{what}\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
        run = make_run(tmp_path / "logs")
        attempt = add_attempt(run, [metrics_line(1)], ended=None)
        process = BesideRanks("after", "own", run, attempt)
        wait_for("it runs", (tmp_path / "runs").exists)
        return process, attempt

    return start


def test_a_process_that_dies_is_a_line(beside):
    process, attempt = beside("os._exit(7)")
    end_beside([process], attempt, patient(60))
    end_beside([process], attempt, patient(60))
    assert attempt.log.read_text() == "after: its process ended with exit code 7; the run goes on without it\n"
    assert not attempt.ranks_ended.exists()


def test_a_process_that_hangs_is_killed(beside):
    process, attempt = beside("time.sleep(600)")
    assert not process.look()
    end_beside([process], attempt, 0.1)
    assert attempt.log.read_text() == "after: its process has not ended 0.1 s after the ranks, so it is killed\n"
    assert process._process.wait() == -signal.SIGKILL


SAYS = "after: its process "


@pytest.mark.parametrize(
    ("what", "answer", "said"),
    [
        ("exec sleep 600", "again 0 - - 0", f"{SAYS}has not ended 5 s after the ranks, so it is killed\n"),
        ("exec sleep 600", "stop 0 - - 0", f"{SAYS}has not ended 30 s after the ranks, so it is killed\n"),
        ("exit 7", "stop 0 - - 0", f"{SAYS}ended with exit code 7; the run continues without it\n"),
        ('until [ -e "$attempt/.ranks-ended" ]; do sleep 0.01; done', "stop 0 - - 0", ""),
    ],
)
def test_the_script_waits_for_it_no_longer_than_it_may(tmp_path, what, answer, said):
    script = render_script(resolve(load_experiment("demo", {"after.run": "true"}), load_profile("generic-slurm")))
    functions = re.findall(
        r"^(?:start_follower|say_ranks_ended|end_beside)\(\) \{.*?^\}$", script, re.MULTILINE | re.DOTALL
    )
    assert len(functions) == 3
    # The script's sleeps are a second of its clock each, and hear the TERM that a requeue sends.
    sleep = 'sleep() { SECONDS=$((SECONDS + 1)); command sleep 300 & kill "$!"; }' if "600" in what else ""
    python = put(tmp_path / "python", f"#!/bin/bash\n{what}\n")
    steps = [
        "start_follower",
        "say_ranks_ended",
        "end_beside 30",
        "while kill -0 ${beside[0]#* } 2>/dev/null; do command sleep 0.02; done",
    ]
    # As a file: `bash -c` sometimes prints a line when a background process ends.
    (whole := tmp_path / "script.sh").write_text("\n".join([*functions, sleep, f"python=({python})", *steps]))
    done = ran(
        "bash", whole, env={**os.environ, "attempt": str(tmp_path), "HPC_GPT_RUN": "/run", "n": "1", "answer": answer}
    )
    assert (done.stderr, done.stdout) == ("", said)
    assert not (tmp_path / ".ranks-ended").exists()


# slurmstepd starts a task with the default of each signal, whatever srun ignores.
SRUN = """#!/bin/bash
while [[ $1 = --* ]]; do shift; done
exec env --default-signal=TERM,INT,USR2 "$@"
"""
PROGRAM = """#!/bin/bash
echo "$$" >"$attempt/pid"
until [ -e "$attempt/go" ]; do sleep 0.01; done
echo sent >"$attempt/sent"
"""


@pytest.mark.parametrize("what", ["start_follower", "start_notifier"])
def test_in_a_container_the_jobs_signals_are_for_the_ranks(tmp_path, what):
    keys = {"after.run": "true", "notify.command": ["true"]}
    profile = replace(load_profile("h100-80g-8"), container=Container("pyxis", "image.sqsh"))
    script = render_script(resolve(load_experiment("demo", keys), profile))
    functions = re.findall(rf"^(?:{what}|within)\(\) \{{.*?^\}}$", script, re.MULTILINE | re.DOTALL)
    for name, text in (("srun", SRUN), ("program", PROGRAM)):
        put(tmp_path / name, text)
    lines = [
        *functions,
        "container=(--container-image=image.sqsh)",
        f"python=(env {tmp_path / 'program'})",
        what,
        "wait",
    ]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "attempt": str(tmp_path), "n": "1"}
    with subprocess.Popen(["bash", "-c", "\n".join(lines)], env={**environment, "HPC_GPT_RUN": "/run"}) as job:
        wait_for("its pid", lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        for number in (signal.SIGUSR2, signal.SIGTERM):
            os.kill(int((tmp_path / "pid").read_text()), number)
        (tmp_path / "go").touch()
        assert job.wait() == 0
    assert (tmp_path / "sent").exists()


@pytest.fixture
def lacking(tmp_path) -> Path:
    """A Python without any package."""
    return put(tmp_path / "python", f'#!/bin/bash\nexec {sys.executable} -I -S "$@"\n')


@pytest.mark.parametrize(("package", "value"), [("tensorboard", True), ("wandb", "gpt"), ("mlflow", "gpt")])
def test_a_missing_package_is_refused_at_the_submission(lacking, monkeypatch, package, value):
    resolved = resolve(load_experiment("demo", {f"track.{package}": value}), load_profile("generic-slurm"))
    monkeypatch.setattr("hpc_gpt.launcher.services.find_spec", lambda name: name)
    check_track(resolved)
    other = replace(resolved, cluster=replace(resolved.cluster, python=str(lacking)))
    with pytest.raises(ConfigError, match=f"track.{package} needs {package}, which {lacking} lacks") as refused:
        check_track(other)
    assert refused.value.hint == f"{lacking} -m pip install {package}"
    monkeypatch.setattr("hpc_gpt.launcher.services.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"track.{package} needs {package}") as refused:
        check_track(resolved)
    assert refused.value.hint == f"pip install 'hpc-gpt[{package}]'"


def test_the_refusal_writes_nothing(lacking, monkeypatch, own_folders):
    monkeypatch.setenv("HPC_GPT_PYTHON", str(lacking))
    done = in_process("submit", "demo", "--cluster", "generic-slurm", "--set", "track.wandb=gpt", "--dry-run")
    assert (done.code, "pip install wandb" in done.stderr) == (2, True), done.stderr
    assert not list(Path(os.environ["HPC_GPT_LOGS"]).rglob("*"))
