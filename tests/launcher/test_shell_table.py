"""Functions of a rendered job script, in bash, with stand-ins of Slurm's clients: what each prints, leaves and asks."""

import json
import os
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.launcher.render import render_script
from tests.launcher.test_shell_functions import program

ASKS = "--noheader --states=PENDING -o %i %E"
NEW = ("sbatch --parsable --job-name=demo --dependency=afterany:7 --begin=now+{} --chdir={here} "
       "--output={here}/run/slurm-%j.out --export=ALL {here}/run/job.sh")  # fmt: skip
NOW = NEW.replace("{}", "0")
TELL = 'echo "$? ${next:-} ${pause:-} ${nodes:-}"'
LISTED = "squeue --noheader --states=PENDING --array --user={uid} --format=%i|%o"


@cache
def functions(chain: str) -> str:
    """Of the script of a job of 2 nodes, all but its settings and the call of main."""
    profile = replace(load_profile("generic-slurm"), chain=chain)
    script = render_script(resolve(load_experiment("demo", {"layout.gpus": 8, "data.source": "random"}), profile))
    return script[script.index("# === ") : script.index("# --- settings")]


def ran(folder: Path, chain: str, end: str, **clients: str) -> tuple[int, list[str], list[str]]:
    """(exit code, what it printed, what the clients were asked) of `end` in a job 7 on two nodes."""
    for name in ("squeue", "sacct", "sbatch", "scontrol", "scancel", "sleep", "the-python"):
        said = clients.get(name.replace("-", "_"), "")
        program(folder, name, f'echo "${{0##*/}} $*" >>calls\n{said}')
    (folder / "run/attempts").mkdir(parents=True, exist_ok=True)
    environment = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}", "HPC_GPT_RUN": f"{folder}/run", "SLURM_JOB_ID": "7",
        "HPC_GPT_JOB": "7", "SLURM_JOB_NAME": "demo", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2",
        "HPC_GPT_PYTHON": "the-python", "HOSTNAME": "n1", "SLURM_RESTART_COUNT": "3",
    }  # fmt: skip
    done = subprocess.run(["bash", "-c", f"set -o pipefail\n{functions(chain)}\n{end}"], env=environment, cwd=folder,
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return done.returncode, (done.stdout + done.stderr).splitlines(), calls


@pytest.mark.parametrize(
    ("words", "clients", "printed", "asked"),
    [
        # One that waits goes on: the first of those that Python names, or that waits for this job or its turn.
        ("8,9 30 =n3", {"squeue": "echo '9 (null)'; echo '8 (null)'"},
         ["continues as job 8, which waits for its turn", "0 8 30 x"], [f"squeue {ASKS} --jobs=8,9"]),
        ("- 0 -", {"squeue": "echo '6 afterany:5'; echo '12 singleton(x)'; echo '11 afterany:7(unfulfilled)'"},
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
    end = 'attempt=run/attempts; die() { echo "$1; $2"; exit 9; }; fail "no host" "set it"'
    ended = tmp_path / "run/attempts/ended.json"
    for lines, step in (("", 0), ('{"step": 3}\n{"step": 12, "loss": 2}\n', 12)):
        ended.parent.mkdir(parents=True, exist_ok=True)
        (ended.parent / "metrics.jsonl").write_text(lines)
        assert ran(tmp_path, "none", end)[:2] == (9, ["no host; set it"])
        noted = json.loads(ended.read_text())
        assert noted.pop("time") > 1e9
        assert noted == {"ended": "user_error", "cause": "no host", "step": step, "requeue": False}
        ended.write_text("of the trainer")
        ran(tmp_path, "none", end)
        assert ended.read_text() == "of the trainer"
        assert not (ended.parent / ".ended.json").exists()
        ended.unlink()
