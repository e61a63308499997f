"""What job.sh does when its ranks have left: bash runs that part of it; Slurm's clients and python are stand-ins."""

import json
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hpc_gpt.core.ends.end_policy import end_by_script
from hpc_gpt.core.ends.exit_status import explain_srun
from hpc_gpt.core.ends.run_state import read_run_state, retry_note
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.launcher.render import render_script
from tests.programs import put, ran

SCONTROL = """#!/bin/bash
echo "scontrol $*" >>"$CALLS"
case "$*" in
*'show job'*) echo "JobId=7 JobName=demo $SHOWN" ;;
requeue*) [[ $SHOWN != *Requeue=0* ]] || { echo "Requested operation is disabled for job 7" && exit 1; } ;;
*'show hostnames'*) echo "$3" | tr , '\\n' ;;
esac
"""
OTHER = '#!/bin/bash\necho "${0##*/} $*" >>"$CALLS"\n'
# Pythons that do not answer: none, one that lacks the package, one that dies.
BROKEN = {
    "missing": "#!/nowhere/python\n",
    "without the package": f'#!/bin/bash\nexec {sys.executable} -I -S "$@"\n',
    "killed": "#!/bin/bash\nkill -KILL $$\n",
}
PYTHON = '#!/bin/bash\nprintf "%s\\n" "$@" >"$CALLS.python"\n[ -z "$ANSWER" ] || echo "hpc-gpt-next $ANSWER"\n'
REAL = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
RUNNING = "JobState=RUNNING Reason=None Restarts=0 ExcNodeList=(null)"


@dataclass(frozen=True)
class Left:
    """What the epilogue left: its exit code, what it asked Slurm to change, what python was asked."""

    code: int
    changes: list[str]
    asked: list[str]
    attempt: Path

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.attempt.parents[1])


def part_of(script: str) -> str:
    """The epilogue of a script, with its functions."""
    functions = script[script.index("# === ") : script.index("# --- settings")]
    python = re.search(r"^  python=\(.*?\)$", script, re.MULTILINE)
    assert python
    return "\n".join(["set -o pipefail", functions, python[0], 'continue_or_end\nexit "$rc"'])


@pytest.fixture
def end(tmp_path: Path):
    """Ends an attempt of job 7 whose log says `log`, by python's `answer` and Slurm's word on the job."""

    def end(
        answer: str,
        shown: str = RUNNING,
        log: str = "",
        chain: str = "requeue",
        python: str = PYTHON,
        disk: Path = tmp_path,
        number: int = 1,
        **files: str,
    ) -> Left:
        run, clients, calls = disk / "a run", tmp_path / "clients", tmp_path / "calls"
        (attempt := run / "attempts" / str(number)).mkdir(parents=True)
        commands = {"scontrol": SCONTROL, "python": python} | dict.fromkeys(("sbatch", "scancel", "squeue"), OTHER)
        for name, text in (*commands.items(), ("sleep", "#!/bin/bash\n")):
            put(clients / name, text)
        (attempt / "log").write_text(log)
        (attempt / "attempt.json").write_text('{"job_id": "7"}')
        for name, text in files.items():
            (run if name in ("cancelled", "stop") else attempt).joinpath(FILES[name]).write_text(text)
        resolved = resolve(load_experiment("demo"), replace(load_profile("generic-slurm"), chain=chain))
        environment = {
            "PATH": f"{clients}:{os.environ['PATH']}", "CALLS": str(calls), "SHOWN": shown, "ANSWER": answer,
            "HPC_GPT_RUN": str(run), "HPC_GPT_PYTHON": str(clients / "python"), "SLURM_JOB_ID": "7",
            "HPC_GPT_STATE": str(tmp_path / "state"),
            "SLURM_JOB_NAME": "demo", "last_s": "360", "HPC_GPT_JOB": "7", "n": str(number), "rc": "1",
            "attempt": str(attempt),
        }  # fmt: skip
        (run / "resolved.json").write_text(resolved.to_json())
        calls.unlink(missing_ok=True)
        done = ran("bash", "-c", part_of(render_script(resolved)), cwd=tmp_path, env=environment)
        said = calls.read_text().splitlines() if calls.exists() else []
        changes = [line for line in said if " show " not in line and "--test-only" not in line]
        told = Path(f"{calls}.python")
        asked = told.read_text().splitlines() if told.exists() else []
        return Left(done.returncode, changes, asked, attempt)

    return end


AT_THE_LIMIT = "JobState=TIMEOUT Reason=TimeLimit Restarts=0 ExcNodeList=(null)"
PUT_BACK = "JobState=PENDING Reason=BeginTime Restarts=1 ExcNodeList=(null)"
# What a test puts into the run folder, and into the attempt's.
FILES = {"cancelled": "cancelled.7", "stop": "stop.7", "ended": "ended.json", "verdict": "next.json"}
WISH = json.dumps({"ended": "walltime", "cause": "SIGUSR2", "step": 5, "time": 7.0, "requeue": True})
FAILED = "srun: error: n3: task 1: Exited with exit code 7\n"


def test_a_job_goes_on_or_stops_as_python_says(end) -> None:
    left = end("again 30 =n4 - 7", log=FAILED)
    assert left.changes == [
        "scontrol requeue 7",
        "scontrol update jobid=7 StartTime=now+30",
        "scontrol update jobid=7 ExcNodeList=n4",
    ]
    assert left.code == 7, "as Python says"
    assert left.asked[-3:] == ["1", "1", f"JobId=7 JobName=demo {RUNNING}"]
    left = end("stop 0 - - 7", log=FAILED, number=2)
    assert (left.changes, left.code) == ([], 7)


def test_real_python_reads_the_logs_message_and_excluded_nodes(end) -> None:
    shown = "JobState=RUNNING Reason=None Restarts=0 ExcNodeList=n[8-9]"
    left = end("", shown, FAILED + "srun: error: Node failure on n4\n", python=REAL)
    assert left.code == 7, "the first rank's own"
    assert left.changes[0] == "scontrol requeue 7"
    assert left.changes[-1] == "scontrol update jobid=7 ExcNodeList=n4,n8,n9"


def test_a_refused_requeue_is_no_wait_and_names_the_chain(end) -> None:
    left = end("", f"{AT_THE_LIMIT} Requeue=0", python=REAL)
    assert (left.code, left.changes) == (1, ["scontrol requeue 7"])
    state = read_run_state(left.run, 1)
    assert (state.state.ended, state.facts.retried) == ("walltime", False)
    assert state.end is not None
    assert state.end.why == (
        "the time limit ended it, exit code 1; Slurm refuses the requeue (Requested operation is disabled for "
        'job 7): chain = "singleton" in the profile needs none'
    )
    assert retry_note(left.run.attempt(1)) is None


@pytest.mark.parametrize("python", BROKEN.values(), ids=BROKEN)
def test_without_python_a_failure_goes_to_the_queue(end, python) -> None:
    left = end("", log=FAILED, python=python)
    assert (left.changes, left.code) == (["scontrol requeue 7"], 1)
    said = json.loads((left.attempt / "ended.json").read_text())
    assert (said["ended"], said["cause"], said["requeue"]) == ("error", "exit code 1", False)


@pytest.mark.parametrize(("judged", "changes"), [(True, ["scontrol requeue 7"]), (False, [])])
def test_two_failures_in_a_row_that_nobody_judges_are_the_last(end, tmp_path, judged, changes) -> None:
    (before := tmp_path / "a run" / "attempts" / "1").mkdir(parents=True)
    if judged:
        (before / "next.json").write_text("{}")
    assert end("", log=FAILED, python=BROKEN["killed"], number=2).changes == changes


@pytest.mark.parametrize(
    ("files", "shown", "chain", "ended", "changes"),
    [
        ({"ended": WISH}, RUNNING, "requeue", "walltime", ["scontrol requeue 7"]),
        ({"verdict": '{"go_on": false}'}, RUNNING, "requeue", "error", []),
        ({}, RUNNING, "none", "error", []),
        ({"cancelled": ""}, RUNNING, "requeue", "cancelled", []),
        ({"stop": ""}, RUNNING, "requeue", "error", []),
        ({"ended": WISH, "cancelled": ""}, RUNNING, "requeue", "walltime", []),
        ({}, AT_THE_LIMIT, "requeue", "walltime", ["scontrol requeue 7"]),
        ({}, PUT_BACK, "requeue", "error", []),
    ],
)
def test_without_python_a_cancel_comes_before_every_wish(end, files, shown, chain, ended, changes) -> None:
    left = end("", shown, chain=chain, python=BROKEN["without the package"], **files)
    assert left.changes == changes
    assert json.loads((left.attempt / "ended.json").read_text())["ended"] == ended


def test_on_a_full_disk_python_still_answers(end, small_disk) -> None:
    full = f'#!/bin/bash\nhead -c 16M /dev/zero >"$HPC_GPT_RUN/filler" 2>/dev/null\nexec {sys.executable} "$@"\n'
    left = end("", log=FAILED, python=full, disk=small_disk)
    assert left.changes == ["scontrol requeue 7", "scontrol update jobid=7 StartTime=now+30"], "a retry, as judged"
    assert not left.run.attempt(1).verdict()


def test_on_a_full_disk_without_python_it_goes_to_the_queue(end, small_disk) -> None:
    full = '#!/bin/bash\nhead -c 16M /dev/zero >"$HPC_GPT_RUN/filler" 2>/dev/null\n'
    assert end("", AT_THE_LIMIT, FAILED, python=full, disk=small_disk).changes == ["scontrol requeue 7"]


@pytest.mark.parametrize(
    ("shown", "log", "cancelled", "ended", "cause"),
    [
        (RUNNING, FAILED, None, "error", "rank 1 on n3 ended with exit code 7"),
        (RUNNING, "", "", "cancelled", "hpc-gpt cancel, exit code 1"),
        (RUNNING, "srun: error: Node failure on n4\n", None, "node_failure", "a node of the job died"),
        (AT_THE_LIMIT, "", None, "walltime", "the time limit ended it, exit code 1"),
        (AT_THE_LIMIT.replace("TimeLimit", "None"), "", None, "cancelled", "TIMEOUT, exit code 1"),
        (
            AT_THE_LIMIT, "slurmstepd: error: *** JOB 7 ON n3 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***\n",
            None, "preempted", "preempted before it had ended, exit code 1",
        ),
        (PUT_BACK, "", None, "requeued", "put back to the queue by Slurm or by hand"),
    ],
)  # fmt: skip
def test_the_script_states_facts_and_python_classifies(tmp_path, shown, log, cancelled, ended, cause) -> None:
    run = RunFolder(tmp_path)
    attempt = run.new_attempt()
    (attempt.folder / "attempt.json").write_text('{"job_id": "7"}')
    attempt.log.write_text(log)
    if cancelled is not None:
        run.mark_cancelled("7")
    message = "n3: task 1: Exited with exit code 7" if log == FAILED else ""
    found = end_by_script(run, attempt, 1, message, shown, "Restarts=1" in shown)
    assert (found[0], explain_srun(found[1])) == (ended, cause)
