"""How a job starts and how it asks to be put back, in bash with stand-ins: each word and code."""

import os
from pathlib import Path

import pytest

from tests.launcher.test_shell_table import ran

AGAIN, PAUSE, ASKS = "scontrol requeue 7", "sleep 3", "scontrol --oneliner --local show job 7"


@pytest.mark.parametrize(
    ("said", "code", "printed", "asked", "refused"),
    [
        ("exit 0", 0, [], [AGAIN], False),
        ("echo Job execution still pending execution; exit 1", 0, ["Job execution still pending execution"], [AGAIN],
         False),
        ("echo Access denied; exit 1", 1, ["Access denied"], [AGAIN], True),
        # The controller restarts: its list is looked at, and a job that it has put back is not asked for again.
        ("[ -e t ] && exit; touch t; echo Unable to contact; exit 1", 0, ["Unable to contact"],
         [AGAIN, PAUSE, ASKS, AGAIN], False),
        ("touch t; exit 1", 0, [""], [AGAIN, PAUSE, ASKS], False),
        ("exit 1", 1, [""] * 20, [AGAIN, PAUSE, ASKS] * 20, False),
    ],
)  # fmt: skip
def test_a_job_is_put_back_once(
    tmp_path: Path, said: str, code: int, printed: list, asked: list, refused: bool
) -> None:
    restarts = "4" if said == "touch t; exit 1" else "3"
    scontrol = f'case "$*" in *show*) echo "JobState=RUNNING Restarts={restarts}" ;; *) {said} ;; esac'
    end = 'attempt=run/attempts; requeue_job; code=$?; echo "$code"; requeue_job >/dev/null; exit "$?"'
    last, found, calls = ran(tmp_path, "requeue", end.replace("; requeue_job >/dev/null", "") if not refused else end,
                             scontrol=scontrol)  # fmt: skip
    assert (found, calls) == ([*printed, str(code)], asked)
    assert (tmp_path / "run/attempts/requeue-refused").exists() is refused
    assert last == (1 if refused else 0)  # what is refused is asked once


# Python's answers, a line each; `-` is none.
ANSWERS = 'read -r line <answers; sed -i 1d answers; [ "$line" = - ] || echo "hpc-gpt-next $line"'
MAY_START = "hpc_gpt.launcher.attempts.may_start"
BEFORE = f"the-python -m {MAY_START} {{run}} 4 {{}}"
WORDS = ("squeue --sibling --noheader --array --states=all --user={uid} -o squeue %i %T",
         "sacct --federation -D -X -n -P -o JobID,State -j 8,9")  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "code", "said", "asked"),
    [
        ("go 1700 12", 0, ["goes on, 1700 12"], [BEFORE.replace("{}", "40 ")]),
        ("go - 12", 0, ["goes on, - 12"], [BEFORE.replace("{}", "40 ")]),
        ("other", 0, ["goes on,  "], [BEFORE.replace("{}", "40 ")]),
        ("wait\nask 8,9\nstop 3 8,9", 3, [],
         [BEFORE.replace("{}", "40 "), "sleep 3", BEFORE.replace("{}", "39 "), *WORDS, BEFORE.replace("{}", "38 8,9")]),
        ("-\ngo 1 2", 0, [f"{MAY_START} gave no answer, try 1", "goes on, 1 2"],
         [BEFORE.replace("{}", "40 ")] * 2),
        ("-\n-", 0, [f"{MAY_START} gave no answer, try {place}" for place in (1, 2)] + ["goes on,  "],
         [BEFORE.replace("{}", "40 ")] * 2),
    ],
)  # fmt: skip
def test_a_start_asks_python_until_it_knows(tmp_path: Path, answers: str, code: int, said: list, asked: list) -> None:
    (tmp_path / "answers").write_text(answers + "\n")
    end = 'n=4 python=(the-python); ask_to_start; echo "goes on, ${HPC_GPT_STOP_AT:-} ${MASTER_PORT:-}"'
    clients = {"the_python": f"cat >>stdin\n{ANSWERS}", "squeue": "echo squeue 8 PENDING", "sacct": "echo '9|DONE'"}
    found = ran(tmp_path, "requeue", end, **clients)
    assert found == (code, said, [line.format(run=tmp_path / "run", uid=os.getuid()) for line in asked])
    assert (tmp_path / "stdin").read_text() == ("squeue 8 PENDING\nsacct 9 DONE" if "ask" in answers else "")


TRIED = ["sbatch --quiet --test-only --exclude=n3 {run}/job.sh", "sbatch --quiet --test-only {run}/job.sh"]
TOLD = "back to the queue: scontrol requeue 7"
LATER, WITHOUT = "scontrol update jobid=7 StartTime=now+30", "scontrol update jobid=7 ExcNodeList=n3"


@pytest.mark.parametrize(
    ("words", "sbatch", "shown", "said", "asked"),
    [
        ("0 - -", "", "JobState=RUNNING", [TOLD], [ASKS, AGAIN]),
        ("30 - -", "", "JobState=SIGNALING", [TOLD], [ASKS, AGAIN, LATER]),
        ("0 =n3 -", "", "JobState=RUNNING", [TOLD], [TRIED[0], ASKS, AGAIN, WITHOUT]),
        # With too few nodes left none is left out, unless Slurm takes the job in no way.
        ("30 =n3 -", '[[ "$*" != *exclude* ]]', "JobState=RUNNING",
         ["warning: without n3 Slurm has too few nodes for the job, so it may get them again", TOLD],
         [*TRIED, ASKS, AGAIN, LATER]),
        ("0 =n3 -", "exit 1", "JobState=RUNNING", [TOLD], [*TRIED, ASKS, AGAIN, WITHOUT]),
        ("0 - -", "", "JobState=FAILED", ["job 7 is FAILED, so the run does not continue by itself"], [ASKS]),
        ("0 - -", "", "JobState=TIMEOUT Reason=TimeLimit", [TOLD], [ASKS, AGAIN]),
        ("30 - -", "", "JobState=PENDING Restarts=4", [], [ASKS, LATER]),  # put back by somebody
        ("0 - -", "", "Nothing", ["Error: Slurm does not answer, so job 7 is not continued"],
         [*[ASKS, "sleep 3"] * 19, ASKS]),
    ],
)  # fmt: skip
def test_a_run_continues_in_what_slurm_takes(
    tmp_path: Path, words: str, sbatch: str, shown: str, said: list, asked: list
):
    scontrol = f'case "$*" in *show*) echo "{shown}" ;; esac'
    end = f'attempt=run/attempts; die() {{ echo "Error: $1"; exit 1; }}; continue_run {words}'
    code, found, calls = ran(tmp_path, "requeue", end, scontrol=scontrol, sbatch=sbatch)
    assert (code, found) == (1 if "Nothing" in shown else 0, said)
    assert calls == [line.format(run=tmp_path / "run") for line in asked]
