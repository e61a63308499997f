"""Functions of a rendered job script, in bash with stand-ins of Slurm's clients: what each prints, leaves and asks. How
a job starts and is put back, and what it does on a full disk."""

import json
import os
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.launcher.render import render_script
from tests.launcher.test_shell_functions import program
from tests.trainer.filling import fill

ASKS = "--noheader --states=PENDING -o %i %E"
NEW = ("sbatch --parsable --job-name=demo --dependency=afterany:7 --begin=now+{} --chdir={here} "
       "--output={here}/run/slurm-%j.out --export=ALL {here}/run/job.sh")  # fmt: skip
NOW = NEW.replace("{}", "0")
TELL = 'echo "$? ${next:-} ${pause:-} ${nodes:-}"'
LISTED = "squeue --noheader --states=PENDING --array --user={uid} --format=%i|%o"


@cache
def functions(chain: str, end: str = "# --- settings", tells: bool = False) -> str:
    """Of the script of a job of 2 nodes, all but the settings and the call of main; of one that `tells` of events."""
    profile = replace(load_profile("generic-slurm"), chain=chain)
    asked = {"layout.gpus": 8, "data.source": "random", **({"notify.command": ["true"]} if tells else {})}
    script = render_script(resolve(load_experiment("demo", asked), profile))
    return script[script.index("# === ") : script.rindex(end)]


def ran(
    folder: Path, chain: str, end: str, disk: Path | None = None, text: str = "", **clients: str
) -> tuple[int, list[str], list[str]]:
    """(exit code, what it printed, what the clients were asked) of `end` in job 7 of two nodes; `disk` has its run."""
    for name in ("squeue", "sacct", "sbatch", "scontrol", "scancel", "sleep", "the-python"):
        said = clients.get(name.replace("-", "_"), "")
        program(folder, name, f'echo "${{0##*/}} $*" >>{folder}/calls\n{said}')
    run = (disk or folder) / "run"
    (run / "attempts").mkdir(parents=True, exist_ok=True)
    environment = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}", "HPC_GPT_RUN": str(run), "SLURM_JOB_ID": "7",
        "HPC_GPT_JOB": "7", "SLURM_JOB_NAME": "demo", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2",
        "HPC_GPT_PYTHON": "the-python", "HOSTNAME": "n1", "SLURM_RESTART_COUNT": "3",
        # As each bash before 5.1 it writes here-documents to files.
        **({"TMPDIR": str(disk), "BASH_COMPAT": "50"} if disk else {}),
    }  # fmt: skip
    (folder / "bin/slurm_script").write_text(f"set -o pipefail\n{text or functions(chain)}\n{end}\n")
    line = ["bash", folder / "bin/slurm_script"]
    own = {"env": environment, "cwd": folder, "start_new_session": True}  # a signal to its group is for it alone
    done = subprocess.run(line, capture_output=True, text=True, check=False, **own)
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return done.returncode, (done.stdout + done.stderr).splitlines(), calls


@pytest.mark.parametrize(
    ("words", "clients", "printed", "asked"),
    [
        # One that waits goes on: the first of those that Python names, or that waits for this job or its turn.
        ("8,9 30 =n3", {"squeue": "echo 'Authorized use only'; echo '9 (null)'; echo '8 (null)'"},
         ["continues as job 8, which waits for its turn", "0 8 30 x"], [f"squeue {ASKS} --jobs=8,9"]),
        ("- 0 -", {"squeue": "printf '%s\\n' 'see singleton' '6 afterany:5' '12 singleton(x)' '11 afterany:7(no)'"},
         ["continues as job 11, which waits for its turn", "0 11 30 x"], [f"squeue {ASKS} --user={{uid}} --name=demo"]),
        # Else one is submitted, once, with what it is to leave out; an answer may have other lines before it.
        ("- 30 =n3,n4", {"sbatch": "echo 'sbatch: a note'; echo '15;far'"},
         ["continues as job 15, submitted after job 7", "0 15 0 -"],
         [f"squeue {ASKS} --user={{uid}} --name=demo",
          NEW.replace("{}", "30").replace(" --chdir", " --exclude=n3,n4 --chdir")]),
        ("- 0 -", {"sbatch": "echo 'sbatch: error: Invalid account'; exit 1"},
         ["sbatch: error: Invalid account", "1  30 x"],
         [f"squeue {ASKS} --user={{uid}} --name=demo", NOW]),
        # No answer: the controller may have taken the job, so its list is looked at before another try.
        ("- 0 -", {"sbatch": "[ -e asked ] && echo 16 && exit; touch asked; echo 'sbatch: Connection refused'; exit 1"},
         ["sbatch: Connection refused", "continues as job 16, submitted after job 7", "0 16 0 -"],
         [f"squeue {ASKS} --user={{uid}} --name=demo", *(NOW, "sleep 3", LISTED, NOW)]),
        ("- 0 -", {"sbatch": "touch asked; exit 1",
                   "squeue": '[ ! -e asked ] || printf "17|/other/job.sh\\n18|%s/job.sh\\n" "$HPC_GPT_RUN"'},
         ["", "continues as job 18, submitted after job 7", "0 18 0 -"],
         [f"squeue {ASKS} --user={{uid}} --name=demo", NOW, "sleep 3", LISTED]),
    ],
)  # fmt: skip
def test_the_chain_goes_on_by_one_job(tmp_path: Path, words: str, clients: dict, printed: list, asked: list) -> None:
    _, found, calls = ran(tmp_path, "singleton", f"pause=30 nodes=x; next_in_chain {words}; {TELL}", **clients)
    assert found == printed
    assert calls == [line.format(here=tmp_path, uid=os.getuid()) for line in asked]
    note = tmp_path / "run/submissions.jsonl"
    noted = [json.loads(line) for line in note.read_text().splitlines()] if note.exists() else []
    assert [each.pop("time") > 1e9 for each in noted] == [True] * any("submitted after" in line for line in printed)
    job = {"scheduler": "slurm", "job_id": found[-1].split()[1], "refused": None, "chained_to": "7"}
    assert noted in ([], [job])


def test_an_attempt_has_the_next_number_and_says_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "run/attempts/1").mkdir(parents=True)
    code, printed, _ = ran(
        tmp_path, "requeue", "start_attempt; echo of the ranks; trap -p TERM; [ $rc = 1 ] && env | grep ^TORCH"
    )
    assert (code, printed) == (0, [f"run folder {tmp_path}/run, attempt 2, output in attempts/2/log"])
    attempt = tmp_path / "run/attempts/2"
    dumps = f"TORCH_FR_DUMP_TEMP_FILE={attempt}/flight/rank-"
    assert (attempt / "log").read_text() == f"of the ranks\ntrap -- ':' SIGTERM\n{dumps}\n"
    assert (attempt / "flight").is_dir()
    noted = json.loads((attempt / "attempt.json").read_text())
    assert noted.pop("started") > 1e9
    assert noted.pop("uptime") == pytest.approx(float(Path("/proc/uptime").read_text().split()[0]), abs=300)
    assert noted.pop("boot") == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert noted == {"attempt": 2, "job_id": "7", "restart": 3, "in_job": 0, "node_list": "n[1-2]", "gpus": 8}


def test_a_waiting_link_is_cancelled_only_if_there_is_one(tmp_path: Path) -> None:
    asked = ran(tmp_path, "singleton", "cancel_waiting -; cancel_waiting 8,9")[2]
    assert asked == ["scancel --quiet --state=PENDING 8 9"]


def test_an_attempt_ends_once_and_by_its_last_step(tmp_path: Path) -> None:
    odd = r"""$'no "C:\\x"\thost'"""
    end = f'attempt=run/attempts; die() {{ echo "$1; $2"; exit 9; }}; fail {odd} "set it"'
    ended = tmp_path / "run/attempts/ended.json"
    cause = 'no "C:\\x" host'
    for lines, step in (("", 0), ('{"step": 3}\n{"step": 12, "loss": 2}\n', 12)):
        ended.parent.mkdir(parents=True, exist_ok=True)
        (ended.parent / "metrics.jsonl").write_text(lines)
        assert ran(tmp_path, "none", end)[:2] == (9, ['no "C:\\x"\thost; set it'])
        noted = json.loads(ended.read_text())
        assert noted.pop("time") > 1e9
        assert noted == {"ended": "user_error", "cause": cause, "step": step, "requeue": False}
        ended.write_text("of the trainer")
        ran(tmp_path, "none", end)
        assert ended.read_text() == "of the trainer"
        assert not (ended.parent / ".ended.json").exists()
        ended.unlink()


AGAIN, PAUSE, SHOWS = "scontrol requeue 7", "sleep 3", "scontrol --oneliner --local show job 7"


@pytest.mark.parametrize(
    ("said", "code", "printed", "asked", "refused"),
    [
        ("exit 0", 0, [], [AGAIN], False),
        ("echo Job execution still pending execution; exit 1", 0, ["Job execution still pending execution"], [AGAIN],
         False),
        ("echo Access denied; exit 1", 1, ["Access denied"], [AGAIN], True),
        # The controller restarts: its list is looked at, and a job that it has put back is not asked for again.
        ("[ -e t ] && exit; touch t; echo Unable to contact; exit 1", 0, ["Unable to contact"],
         [AGAIN, PAUSE, SHOWS, AGAIN], False),
        ("touch t; exit 1", 0, [""], [AGAIN, PAUSE, SHOWS], False),
        ("exit 1", 1, [""] * 20, [AGAIN, PAUSE, SHOWS] * 20, False),
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
WORDS = ("squeue --sibling --noheader --array --states=all --jobs=8,9,7 -o squeue %i %T",
         "scontrol show config",
         "sacct --federation -D -X -n -P -o JobID,State -j 8,9")  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "code", "said", "asked"),
    [
        ("go 1700 12", 0, ["goes on, 1700 12"], [BEFORE.replace("{}", "40 ")]),
        ("go - 12", 0, ["goes on, - 12"], [BEFORE.replace("{}", "40 ")]),
        ("other", 0, ["goes on,  "], [BEFORE.replace("{}", "40 ")]),
        ("wait\nask 8,9\nstop 3 8,9", 3, [],
         [BEFORE.replace("{}", "40 "), "sleep 3", BEFORE.replace("{}", "39 "), *WORDS, BEFORE.replace("{}", "38 8,9")]),
        ("-\ngo 1 2", 0, ["goes on, 1 2"],
         [BEFORE.replace("{}", "40 ")] * 2),
        ("-\n-", 0, [f"{MAY_START} gave no answer", "goes on,  "],
         [BEFORE.replace("{}", "40 ")] * 2),
    ],
)  # fmt: skip
def test_a_start_asks_python_until_it_knows(tmp_path: Path, answers: str, code: int, said: list, asked: list) -> None:
    (tmp_path / "answers").write_text(answers + "\n")
    end = 'n=4 python=(the-python); ask_to_start; echo "goes on, ${HPC_GPT_STOP_AT:-} ${MASTER_PORT:-}"'
    clients = {"the_python": f"cat >>stdin\n{ANSWERS}", "squeue": "echo squeue 8 PENDING", "sacct": "echo '9|DONE'"}
    found = ran(tmp_path, "requeue", end, **clients)
    assert found == (code, said, [line.format(run=tmp_path / "run") for line in asked])
    assert (tmp_path / "stdin").read_text() == ("squeue 8 PENDING\nanswered\nsacct 9 DONE" if "ask" in answers else "")


def test_a_signal_to_all_of_the_job_loses_no_answer(tmp_path: Path) -> None:
    """As Slurm's at the time limit, while Python is asked: it went to sed, which ended."""
    to_all = 'kill -TERM -- "-$(ps -o pgid= -p "$SHELL" | tr -d " ")"'
    end = 'export SHELL=$$; trap : TERM; n=4 python=(the-python); ask_chain what_next 1; echo "$? $answer"'
    python = f'{to_all}; echo "hpc-gpt-next stop 0 - - 1"'
    assert ran(tmp_path, "requeue", end, the_python=python)[:2] == (0, ["0 stop 0 - - 1"])


TRIED = ["sbatch --quiet --test-only --exclude=n3 {run}/job.sh", "sbatch --quiet --test-only {run}/job.sh"]
TOLD = "back to the queue: scontrol requeue 7"
LATER, WITHOUT = "scontrol update jobid=7 StartTime=now+30", "scontrol update jobid=7 ExcNodeList=n3"


@pytest.mark.parametrize(
    ("words", "sbatch", "shown", "said", "asked"),
    [
        ("0 - -", "", "JobState=RUNNING", [TOLD], [SHOWS, AGAIN]),
        ("30 - -", "", "JobState=SIGNALING", [TOLD], [SHOWS, AGAIN, LATER]),
        ("0 =n3 -", "", "JobState=RUNNING", [TOLD], [TRIED[0], SHOWS, AGAIN, WITHOUT]),
        # With too few nodes left none is left out, unless Slurm takes the job in no way.
        ("30 =n3 -", '[[ "$*" != *exclude* ]]', "JobState=RUNNING",
         ["warning: without n3 Slurm has too few nodes for the job, so it may get them again", TOLD],
         [*TRIED, SHOWS, AGAIN, LATER]),
        ("0 =n3 -", "exit 1", "JobState=RUNNING", [TOLD], [*TRIED, SHOWS, AGAIN, WITHOUT]),
        ("0 - -", "", "JobState=FAILED", ["job 7 is FAILED, so the run does not continue by itself"], [SHOWS]),
        ("0 - -", "", "JobState=TIMEOUT Reason=TimeLimit", [TOLD], [SHOWS, AGAIN]),
        ("30 - -", "", "JobState=PENDING Restarts=4", [], [SHOWS, LATER]),  # put back by somebody
        ("0 - -", "", "Nothing", ["Error: Slurm does not answer, so job 7 is not continued"],
         [*[SHOWS, "sleep 3"] * 19, SHOWS]),
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


@pytest.mark.parametrize("chain", ["requeue", "singleton", "none"])
@pytest.mark.parametrize("answers", ["again 30 =n3 8,9 5", "stop 0 - 8,9 5", "-\n-"])
def test_in_an_allocation_nothing_is_asked_of_slurm(tmp_path: Path, chain: str, answers: str) -> None:
    """Also at the allocation's limit, where a job is put back before it is judged."""
    (tmp_path / "run/attempts/1").mkdir(parents=True)
    (tmp_path / "answers").write_text(f"{answers}\n{answers}\n")
    end = "export HPC_GPT_ALLOCATION=5; n=1 rc=5 attempt=$HPC_GPT_RUN/attempts/1 python=(the-python); continue_or_end"
    scontrol = 'echo "JobState=RUNNING Reason=TimeLimit Restarts=0"'
    code, _, calls = ran(tmp_path, chain, f'{end}; exit "$rc"', scontrol=scontrol, the_python=ANSWERS)
    asked = [call for call in calls if not call.startswith("the-python")]
    assert (code, asked) == (5, [SHOWS])


def test_ctrl_c_in_an_allocation_requests_a_stop(tmp_path: Path) -> None:
    end = "use_allocation; attempt=$HPC_GPT_RUN/attempts; start_attempt; kill -INT $$; exit 4"
    code, said, calls = ran(tmp_path, "requeue", end)
    assert (code, calls, (tmp_path / "run/stop.7").exists()) == (4, [], True)
    assert said[1].startswith("attempt 1 has ended with exit code 4; unless the run is done, ")
    assert (tmp_path / "run/attempts/1/asked/stop-1.json").exists()
    assert json.loads((tmp_path / "run/attempts/1/attempt.json").read_text())["allocation"] is True


@pytest.mark.parametrize("chain", ["requeue", "singleton"])
def test_a_refused_start_ends_on_a_full_disk_whatever_fails(tmp_path: Path, small_disk: Path, chain: str) -> None:
    (small_disk / "run/attempts").mkdir(parents=True)
    fill(small_disk)
    python = 'case "$2" in *notify) exit 1 ;; *) echo "hpc-gpt-next {}" ;; esac'
    for answer, code, said in (
        ("stop 3 8,9", 3, ["notify: its process ended with exit code 1"]),
        ("go 1700000000 12345", 0, ["1700000000 12345"]),
        ("go -", 0, ["-"]),
    ):
        end = 'n=1 attempt=$HPC_GPT_RUN python=(the-python); ask_to_start; echo "$HPC_GPT_STOP_AT" $MASTER_PORT'
        text = functions(chain, tells=True)
        assert ran(tmp_path, chain, end, small_disk, text, the_python=python.format(answer))[:2] == (code, said)


def test_a_second_start_finds_the_script_and_settings_there(tmp_path: Path, small_disk: Path) -> None:
    text = functions("requeue", "\nmain\n")
    make = ("requeue", "make_run_folder; echo made", small_disk, text)
    assert ran(tmp_path, *make)[:2] == (0, ["made"])
    fill(small_disk)
    assert ran(tmp_path, *make)[:2] == (0, ["made"])
    (small_disk / "run" / "resolved.json").unlink()
    (small_disk / "run" / "job.sh").write_bytes(b"")
    assert ran(tmp_path, *make)[1][0].startswith("Error: HPC_GPT_RUN names the run of another script")


def test_no_part_of_a_script_needs_a_file_for_a_text() -> None:
    """A here-string is a file in bash before 5.1."""
    asked = load_experiment("demo", {"notify.command": ["true"]})
    for changes in ({"chain": "singleton"}, {"stage": "/env.tar"}, {"stage": "warm"}):
        assert "<<<" not in render_script(resolve(asked, replace(load_profile("generic-slurm"), **changes)))
