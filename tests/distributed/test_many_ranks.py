"""Many ranks: what each of them, and rank 0 for all, has open. The ranks are real, but train nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.network import files_of_first
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.made_runs import add_attempt, unsubmitted_run

ROOT = Path(__file__).resolve().parents[2]


def python_with(limit: str, module: str, *words: object) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE WORDS` after `ulimit LIMIT`."""
    shell = ["bash", "-c", f'ulimit {limit} && exec "$@"', "ulimit", sys.executable, "-m", module, *map(str, words)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("TORCH_GLOO_LAZY_INIT", None)
    return subprocess.run(
        shell, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def light_ranks(limit: str, ranks: int) -> subprocess.CompletedProcess[str]:
    return python_with(limit, "tests.distributed.light_ranks", ranks)


def found(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@pytest.mark.parametrize(
    ("ranks", "soft"),
    [(24, 64), pytest.param(240, 700, marks=pytest.mark.long), pytest.param(240, 1024, marks=pytest.mark.long)],
)
def test_they_meet_and_leave_under_a_low_soft_limit(ranks: int, soft: int) -> None:
    figures = found(light_ranks(f"-Sn {soft}", ranks))
    assert figures["codes"] == {"0": ranks}
    assert 3 * ranks <= figures["files_of_rank_0"] <= files_of_first(ranks) - 100, "as the limit is reckoned"
    assert figures["files_of_others"] < 45, "no rank is connected with every other"


@pytest.mark.parametrize(("ranks", "hard"), [(240, 512), (1000, 1024)])
def test_a_hard_limit_too_low_is_refused_before_a_rank_begins(ranks: int, hard: int) -> None:
    done = light_ranks(f"-n {hard}", ranks)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"rank 0 of {ranks:,} ranks has up to {files_of_first(ranks):,} files open" in done.stderr
    assert f"allows a process {hard:,} (ulimit -Hn)" in done.stderr
    assert f"hard limit of at least {files_of_first(ranks):,} open files" in done.stderr


# Two ranks need 206.
TOO_FEW, REFUSED = "-n 205", "rank 0 of 2 ranks has up to 206 files open, and node "
TWO = ("demo", "--gpus", "2", "--tp", "2", "--pp", "1")


def test_submit_refuses_such_a_local_run_before_it_has_a_folder(tmp_path: Path) -> None:
    done = python_with(TOO_FEW, "hpc_gpt", "submit", *TWO, "--cluster", "local")
    assert (done.returncode, done.stdout) == (2, "")
    assert REFUSED in done.stderr
    assert "hint: ask the site for a hard limit of at least 206 open files" in done.stderr
    assert not list((tmp_path / "logs").rglob("resolved.json"))


@pytest.mark.parametrize(
    ("cluster", "level", "words"),
    [
        ("local", "fail", REFUSED),
        ("generic-slurm", "warn", REFUSED),
    ],
    ids=["this machine", "a cluster"],
)
def test_doctor_says_so_of_this_machine_and_doubts_a_clusters(cluster: str, level: str, words: str) -> None:
    done = python_with(TOO_FEW, "hpc_gpt", "doctor", *TWO, "--cluster", cluster, "--json")
    (files,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "files"]
    assert files["level"] == level
    assert words in files["words"]


def chain_before(run: RunFolder, limit: str) -> str:
    attempt = add_attempt(run, [], None, job_id="7")
    done = python_with(limit, "hpc_gpt.launcher.attempts.may_start", run.path, attempt.number, 1, "")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_ends_before_its_ranks_begin_and_its_chain_with_it() -> None:
    assert chain_before(unsubmitted_run("generic-slurm"), "-n 212").startswith("hpc-gpt-next go ")
    run = unsubmitted_run("generic-slurm")
    assert chain_before(run, "-n 211") == "hpc-gpt-next stop 1 -\n"
    end = run.attempts()[-1].ended()
    assert end["ended"] == "user_error"
    assert "rank 0 of 4 ranks has up to 212 files open" in end["cause"]
    assert "LimitNOFILE of slurmd" in end["cause"]


def test_a_program_of_ones_own_gets_the_hard_limit_and_gloo(tmp_path: Path) -> None:
    """What it opens is not known, so its supervisor refuses nothing."""
    (tmp_path / "own.toml").write_text(
        'name = "own"\n[engine]\nname = "command"\n[layout]\ngpus = 1\n[command]\nsnapshot = false\n'
        f'workdir = "{tmp_path}"\nrun = "echo soft=$(ulimit -Sn) gloo=${{TORCH_GLOO_LAZY_INIT:-as it is}}"\n'
    )
    done = python_with(
        "-n 180 && ulimit -Sn 90", "hpc_gpt", "submit", tmp_path / "own.toml", "--cluster", "local", "--wait"
    )
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "logs").rglob("attempts/1/log")
    assert "soft=180 gloo=as it is" in log.read_text()
