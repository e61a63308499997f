"""What job.sh does around a script of the user's own, its functions in bash with stand-ins: the script's start and end,
its watch, whom a signal is passed on to, and the next job of its chain."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.golden.test_scripts import SCRIPTS, _as_it_is
from tests.programs import put, ran
from tests.waiting import LIMIT_S

# program.start, and the watch, which something ends at first.
PYTHON = """case "$*" in
*script_watch*) echo "watch ${*: -3} $(trap -p TERM)" >>"$HPC_GPT_RUN/watched"
  [ -e "$HPC_GPT_RUN/died" ] || { touch "$HPC_GPT_RUN/died"; kill -KILL $$; }
  until [ -e .code ]; do sleep 0.05; done; [ -e body ] && [ -d .signals ] && touch .followed ;;
*) echo "start $*"; readlink "/proc/$$/fd/0"; [ ! -e "/proc/$$/fd/3" ] || echo 3; echo bad >&2; trap -p; exit "$CODE" ;;
esac
"""
CONFIG = 'echo "KillWait                = 61 sec"; echo "JobFileAppend           = 1"'


def in_bash(folder: Path, name: str, end: str, script: str = "", **variables: str) -> str:
    """All that `end` prints, with the functions of a script, in attempt 2 of a run; of numbers of processes PID."""
    script = script or SCRIPTS[f"job-script-{name}"]()
    functions = script[script.index("# === do not edit below") : script.index("# --- settings")]
    (folder / "end.sh").write_text(f"set -o pipefail\nexec 3</dev/zero\n{functions}\n{end}\n")
    (folder / "job.sh").write_text(script)
    environment = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}", "HPC_GPT_RUN": str(folder), "attempt": str(folder / "a"),
        "n": "2", "HPC_GPT_PYTHON": "the-python", "HPC_GPT_JOB": "7", **variables,
    }  # fmt: skip
    done = ran("env", "--default-signal", "bash", "end.sh", cwd=folder, env=environment)
    return re.sub(r"program.start \d+", "program.start PID", (done.stdout + done.stderr).replace(str(folder), ""))


@pytest.mark.parametrize(
    ("name", "config", "code", "said"),
    [("slurm", CONFIG, 7, "7 61 20 1"), ("slurm", "echo KillWait = 9", 0, "0 9 3 0"), ("local", "", 7, "7 0 0 0")],
    ids=["slurm", "its logs", "local"],
)  # fmt: skip
def test_a_script_is_started_followed_and_cleared_up_after(
    tmp_path: Path, name: str, config: str, code: int, said: str
) -> None:
    put(tmp_path / "bin/the-python", f"#!/bin/bash\n{PYTHON}")
    put(tmp_path / "bin/scontrol", f'#!/bin/bash\n[ "$*" = "show config" ] && {{ {config}; }}\n')
    (tmp_path / "a/flight").mkdir(parents=True)
    for file in ("log", "err", "trainer.json"):
        (tmp_path / "a" / file).touch()
    (tmp_path / "out").hardlink_to(tmp_path / "a/log")
    end = 'run_script; echo "$rc ${kill_wait:-0} ${last_s:-0} ${JOB_FILE_APPEND:-0}"; wait'
    found = in_bash(tmp_path, name, end, CODE=str(code))
    own = (tmp_path / "a/log").read_text()
    start = "start -ISs /code.zip hpc_gpt.trainer.program.start PID  2 - /slurm_script it's\n/dev/zero\n"
    assert (found + own, (tmp_path / "a/err").read_text()) == (f"{start}{said}\n", "bad\n")
    assert (tmp_path / "watched").read_text().replace(str(tmp_path), "") == "watch  2  trap -- '' SIGTERM\n" * 2
    assert sorted(os.listdir(tmp_path / "a")) == ["err", "exit.json", "log", "trainer.json"]
    assert json.loads((tmp_path / "a/exit.json").read_text()) == {
        "code": code,
        "seconds": pytest.approx(0, abs=LIMIT_S),
        "signals": [],
    }
    assert not (tmp_path / "out").samefile(tmp_path / "a/log"), "of the user alone"
    body = (tmp_path / "slurm_script").read_text()
    assert body == '#!/bin/bash\n#SBATCH -N 1\nsrun python3 train.py "$@"\n'
    assert (tmp_path / "slurm_script").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "checkpoints").is_dir()


@pytest.mark.parametrize(
    ("number", "group", "all_", "before", "limit", "kills"),
    [
        (12, 0, 0, "", 1, "kill -s 12 40"),  # this shell alone has heard it: so does the script's
        (12, 0, 0, "", 0, "limit"),
        (10, 0, 0, "", 0, "kill -s 10 40"),
        (12, 1, 0, "", 0, "kill -s 12 -- -40"),  # the first process group has
        (12, 1, 1, "", 0, ""),  # every process has
        (12, 1, 1, "1 1", 1, "kill -s 12 40"),  # that was the one before
        (12, 2, 1, "1 1", 1, "kill -s 12 -- -40"),
        (12, 2, 2, "1 1", 1, ""),
    ],
)
def test_a_signal_goes_to_whom_it_did_not_reach(tmp_path: Path, number, group, all_, before, limit, kills) -> None:
    (tmp_path / "a/.signals").mkdir(parents=True)
    (tmp_path / "a/body").write_text("40\n")
    for name, count in (("group", group), ("all", all_)):
        (tmp_path / "a/.signals" / name).write_text(f"{number}\n" * count + "1\n11\n")
    if before:
        (tmp_path / f"a/.signals/before.{number}").write_text(before + "\n")
    stand_ins = (
        f'kill() {{ echo "kill $*"; }}; sleep() {{ [ "$1" = 0.3 ]; }}; is_near_the_limit() {{ return {limit}; }}'
    )
    said = in_bash(tmp_path, "slurm", f"{stand_ins}; forward_signal {number}")
    assert said == ("" if kills in ("", "limit") else f"{kills}\n")
    assert (tmp_path / "a/.limit").exists() == (kills == "limit")
    assert (tmp_path / f"a/.signals/before.{number}").read_text() == f"{group} {all_}\n"


def test_here_a_signal_is_a_wish_or_goes_to_all_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    end = 'kill() { echo "kill $*"; }; for each in 12 2 15 1; do pass_on $each; done; ls -A a; rm -f a/.[il]*'
    assert in_bash(tmp_path, "local", end) == ""
    (tmp_path / "a/body").write_text("40\n")
    assert in_bash(tmp_path, "local", end) == "kill -s 15 -- -40\nkill -s 1 -- -40\n.interrupt\n.limit\nbody\n"


def test_each_signal_is_noted_and_a_term_is_in_time(tmp_path: Path) -> None:
    (tmp_path / "a/.signals").mkdir(parents=True)
    stand_ins = "be_in_time() { echo in time; trap : 15; }; forward_signal() { echo hands $1 on; }"
    end = (
        "pass_on 15; wait; pass_on 12; wait; trap -p 15; cd a; hear x; kill -USR1 $$; kill -RTMAX $$; cd ..; heard x 10"
    )
    said = in_bash(tmp_path, "slurm", f"{stand_ins}; {end}; heard x 64; heard x 1; trap -p | wc -l")
    assert said == "in time\nhands 15 on\nhands 12 on\ntrap -- 'pass_on 15' SIGTERM\n1\n1\n0\n58\n"


def test_ctrl_c_in_an_allocation_lets_no_attempt_follow(tmp_path: Path) -> None:
    (tmp_path / "a/.signals").mkdir(parents=True)
    end = "forward_signal() { echo hands $1 on; }; pass_on 2; wait; ls -d stop.*"
    assert in_bash(tmp_path, "slurm", f"{end} 2>/dev/null || echo none") == "hands 2 on\nnone\n"
    assert in_bash(tmp_path, "slurm", end, HPC_GPT_ALLOCATION="5") == "hands 2 on\nstop.7\n"


# Slurm's clients, which note what they are asked, sbatch also where and with which variables.
CLIENTS = {
    "squeue": 'echo "squeue $*" >>CALLS; [[ $* != *%o* ]] || cat LOST',
    "sbatch": """echo "sbatch $*" >>CALLS; echo "$PWD" $(env | grep "^SLURM\\|^SBATCH\\|^SRUN\\|^A=" | sort) >>CALLS
[ ! -e LOST ] || { echo Unable to contact; exit 1; }; echo '30;far'""",
    "sleep": 'echo "sleep $*" >>CALLS',
}  # fmt: skip
GIVEN = {"A": "it's", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "mine", "SBATCH_X": "1", "SRUN_X": "1", "SLURMD_X": "1",
         "SLURM_CONF": "/etc/c", "SLURM_CLUSTER_NAME": "far"}  # fmt: skip
ASKED = "squeue --noheader --states=PENDING -o %i %E --user={uid} --name=mine\n"
SENT = (
    "sbatch --parsable --job-name=mine --dependency=afterany:7 --mem=2G --begin=now+5 {}--error=/slurm-%j.out {}"
    "--chdir= --output=/slurm-%j.out /job.sh {} the-python --mem=2G\n/sub A=it's SLURM_CONF=/etc/c\n"
)
LISTED = "sleep 3\nsqueue --noheader --states=PENDING --array --user={uid} --format=%i|%o\n"


@pytest.mark.parametrize(
    ("cluster", "element", "lost", "calls", "job"),
    [
        ("", "", "", ASKED + SENT.format("", "", ""), "30"),
        ("far", "4", "", ASKED + SENT.format("--clusters=far ", "--array=4 ", "/a"), "30_4"),
        ("", "", "29|{0}/job.sh {0} the-python\n28|{0}/job.sh {0} the-python --mem=2G\n",
         ASKED + SENT.format("", "", "") + LISTED, "28"),
        ("", "4", "28_4|{0}/job.sh {0}/a the-python --mem=2G\n29_3|{0}/job.sh {0}/a the-python --mem=2G\n",
         ASKED + SENT.format("", "--array=4 ", "/a") + LISTED, "28_4"),
    ],
    ids=["one", "an element", "an answer lost", "an element's answer lost"],
)  # fmt: skip
def test_the_next_job_of_a_script_is_as_the_first(tmp_path: Path, cluster, element: str, lost, calls, job) -> None:
    """With its own arguments and those of a resumption, in the environment and the folder of its submission."""
    for name, text in CLIENTS.items():
        text = text.replace("CALLS", str(tmp_path / "calls")).replace("LOST", str(tmp_path / "lost"))
        put(tmp_path / "bin" / name, f"#!/bin/bash\n{text}\n")
    (tmp_path / "sub").mkdir()
    if lost:
        (tmp_path / "lost").write_text(lost.format(tmp_path))
    end = 'arguments=("$HPC_GPT_RUN$ROW" the-python --mem=2G); next_in_chain - 5 -; echo "$next $pause $nodes"'
    own = {"SLURM_SUBMIT_DIR": str(tmp_path / "sub"), "ROW": "/a" if element else ""}
    own |= {"SLURM_ARRAY_TASK_ID": element} if element else {}
    said = in_bash(tmp_path, "", end, _as_it_is("generic-slurm", "singleton", cluster), **GIVEN, **own)
    assert (tmp_path / "calls").read_text().replace(str(tmp_path), "") == calls.format(uid=os.getuid())
    assert said == "Unable to contact\n" * bool(lost) + f"continues as job {job}, submitted after job 7\n{job} 0 -\n"
    noted = json.loads((tmp_path / "submissions.jsonl").read_text())
    assert noted.pop("time") > 1e9
    assert noted == {"scheduler": "slurm", "job_id": job, "refused": None, "chained_to": "7"}
