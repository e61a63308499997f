"""What job.sh does when its ranks have left: bash runs that part of it; Slurm's clients and python are stand-ins."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hpc_gpt.launch.render import render_script
from hpc_gpt.settings.cluster import load_profile
from hpc_gpt.settings.experiment_file import load_experiment
from hpc_gpt.settings.resolve import resolve

SCONTROL = """#!/bin/bash
echo "scontrol $*" >>"$CALLS"
case "$*" in
*'show job'*) echo "JobId=7 JobName=demo $SHOWN" ;;
*'show hostnames'*) echo "$3" | tr , '\\n' ;;
esac
"""
OTHER = '#!/bin/bash\necho "${0##*/} $*" >>"$CALLS"\n'
PYTHON = '#!/bin/bash\nprintf "%s\\n" "$@" >"$CALLS.python"\n[ -z "$ANSWER" ] || echo "hpc-gpt-next $ANSWER"\n'
RUNNING = "JobState=RUNNING Reason=None Restarts=0 ExcNodeList=(null)"
SECTION = "# --- epilogue "


@dataclass(frozen=True)
class Left:
    """What the epilogue left: its exit code, what it asked Slurm to change, what python was asked."""

    code: int
    changes: list[str]
    asked: list[str]
    attempt: Path


def part_of(script: str) -> str:
    """The epilogue of a script, with the functions that it has from the parts before it."""
    before, epilogue = script.split(SECTION)
    functions = re.findall(r"^\w+\(\) \{.*?^\}$", before, re.MULTILINE | re.DOTALL)
    chain = re.search(r"^chain=\(.*?\)$", before, re.MULTILINE)
    assert chain
    return "\n".join(["set -o pipefail", *functions, chain[0], SECTION + epilogue])


@pytest.fixture
def end(tmp_path: Path):
    """Ends an attempt of job 7 whose log says `log`, by python's `answer` and Slurm's word on the job."""

    def end(answer: str, shown: str = RUNNING, log: str = "", chain: str = "requeue", **marks: str) -> Left:
        run, clients, calls = tmp_path / "a run", tmp_path / "clients", tmp_path / "calls"
        attempt = run / "attempts" / "1"
        attempt.mkdir(parents=True)
        clients.mkdir()
        commands = {"scontrol": SCONTROL, "python": PYTHON} | dict.fromkeys(("sbatch", "scancel", "squeue"), OTHER)
        for name, text in (*commands.items(), ("sleep", "#!/bin/bash\n")):
            (clients / name).write_text(text)
            (clients / name).chmod(0o755)
        (attempt / "log").write_text(log)
        for mark in marks.values():
            (run / mark).touch()
        resolved = resolve(load_experiment("demo"), replace(load_profile("generic-slurm"), chain=chain))
        environment = {
            "PATH": f"{clients}:{os.environ['PATH']}", "CALLS": str(calls), "SHOWN": shown, "ANSWER": answer,
            "HPC_GPT_RUN": str(run), "HPC_GPT_PYTHON": str(clients / "python"), "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "demo", "job": "7", "n": "1", "attempt": str(attempt), "rc": "1",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", part_of(render_script(resolved))],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        said = calls.read_text().splitlines() if calls.exists() else []
        changes = [line for line in said if " show " not in line and "--test-only" not in line]
        asked = Path(f"{calls}.python").read_text().splitlines()
        return Left(done.returncode, changes, asked, attempt)

    return end


FAILED = "srun: error: n3: task 1: Exited with exit code 7\n"


def test_a_job_that_goes_on_is_requeued_then_told_when_and_without_which_nodes(end) -> None:
    left = end("again 30 =n4 -", log=FAILED)
    assert left.changes == [
        "scontrol requeue 7",
        "scontrol update jobid=7 StartTime=now+30",
        "scontrol update jobid=7 ExcNodeList=n4",
    ]
    assert left.code == 7, "the first rank's own"
    assert left.asked[-4:] == ["1", "error", "task 1: Exited with exit code 7", "-"]


def test_a_job_that_stops_asks_slurm_for_nothing(end) -> None:
    left = end("stop 0 - -", log=FAILED)
    assert (left.changes, left.code) == ([], 7)


def test_the_nodes_that_a_job_excludes_are_told_and_so_is_its_end_by_the_limit(end) -> None:
    left = end("again 0 - -", "JobState=RUNNING Reason=None Restarts=0 ExcNodeList=n8,n9", "Node failure on n4\n")
    assert left.asked[-3:] == ["node_failure", "a node of the job died, exit code 1", "n8,n9,"]
    assert left.changes == ["scontrol requeue 7"]


def test_at_the_time_limit_it_still_goes_on(end) -> None:
    left = end("again 0 - -", "JobState=TIMEOUT Reason=TimeLimit Restarts=0 ExcNodeList=(null)")
    assert (left.asked[-3], left.changes) == ("walltime", ["scontrol requeue 7"])


@pytest.mark.parametrize("state", ["CANCELLED", "FAILED"])
def test_what_somebody_has_ended_meanwhile_is_not_revived(end, state) -> None:
    left = end("again 30 - -", f"JobState={state} Reason=None Restarts=0 ExcNodeList=(null)")
    assert left.changes == []


def test_what_slurm_has_put_back_is_not_requeued_again(end) -> None:
    left = end("again 30 - -", "JobState=PENDING Reason=BeginTime Restarts=1 ExcNodeList=(null)")
    assert left.changes == ["scontrol update jobid=7 StartTime=now+30"]
    assert left.asked[-1] == "put-back"


def test_without_python_the_trainers_wish_counts_but_not_against_a_cancel(end, tmp_path) -> None:
    assert end("", wish="attempts/1/requeue").changes == ["scontrol requeue 7"]


def test_without_python_a_cancel_holds(end) -> None:
    assert end("", wish="attempts/1/requeue", mark="cancelled.7").changes == []


def test_without_python_nothing_is_wished(end) -> None:
    assert end("").changes == []


def test_a_link_of_a_chain_that_waits_goes_on_and_a_stop_ends_it(end) -> None:
    assert end("stop 0 - 8,9", chain="singleton").changes == ["scancel --quiet --state=PENDING 8 9"]


def test_the_word_on_its_end_is_json_whatever_a_rank_said(end) -> None:
    left = end("stop 0 - -", log='task 1: Killed by "C:\\x"\tnow\n')
    assert json.loads((left.attempt / "ended.json").read_text())["cause"] == 'task 1: Killed by "C:\\x" now'
