"""A job script with --cluster local: its submitter's environment as it was given, and its arrays."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.core.process import start_time
from hpc_gpt.core.runs.find_runs import list_runs, removed_runs
from tests.cli.command import hpc_gpt, in_process
from tests.conftest import REPOSITORY
from tests.waiting import wait_for

ENVIRONMENT = '#!/bin/bash\n#SBATCH -N 1\ncat "/proc/$$/environ" >environ\n'
# What belongs to another job or to a run of ours, what Python reads, and what is no UTF-8.
GIVEN = {
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONSAFEPATH": "1",
    "SUBMITIT_EXECUTOR": "mine",
    "SUBMITIT_X": "mine",
    "HPC_GPT_STOP_AT": "mine",
    "HPC_GPT_JOB": "3",
    "HPC_GPT_PYTHON": "",
    "SLURM_JOB_ID": "77",
    "RANK": "3",
    "LINES_OF": "two\nlines\udcff",
}
OURS = ("HPC_GPT_RUN", "HPC_GPT_ATTEMPT", "HPC_GPT_CHECKPOINTS")


@pytest.mark.parametrize("by", ["submit", pytest.param("bash", marks=pytest.mark.long)])
def test_a_script_has_the_environment_as_it_was_given(tmp_path: Path, by: str) -> None:
    (tmp_path / "train.slurm").write_text(ENVIRONMENT)
    path = f":{REPOSITORY}::/nowhere:"
    own = {**GIVEN, "PYTHONPATH": path, "HPC_GPT_LOGS": str(tmp_path / "logs")}
    if by == "submit":
        line = [sys.executable, "-m", "hpc_gpt", "submit", "--cluster", "local", "--wait", "train.slurm"]
    else:
        rendered = in_process("render", "--cluster", "local", "train.slurm", cwd=tmp_path)
        (tmp_path / "job.sh").write_text(rendered.stdout)
        line, own = ["/bin/bash", "job.sh"], {**own, "HPC_GPT_PYTHON": sys.executable}
        del own["SUBMITIT_EXECUTOR"]
    given = {**os.environ, **own}
    done = subprocess.run(line, cwd=tmp_path, env=given, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0, done
    entries = (tmp_path / "environ").read_bytes().split(b"\0")[:-1]
    found = dict(os.fsdecode(entry).split("=", 1) for entry in entries)
    for name in OURS:
        assert name in found
        given[name] = found[name]
    assert found == given


@pytest.mark.parametrize("name", ["KILL", *(pytest.param(each, marks=pytest.mark.long) for each in ("TERM", "SEGV"))])
def test_bashs_words_on_a_killed_script_are_not_its_output(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.slurm").write_text(
        f"#!/bin/bash\n#SBATCH -N 1 -o out.txt\necho said\nulimit -c 0\nkill -{name} $$\n"
    )
    own = {"HPC_GPT_LOGS": str(tmp_path / "logs")}
    line = ("submit", "--cluster", "local", "--set", "chain=none", "--wait", "train.slurm")
    in_process(*line, cwd=tmp_path, environment=own)
    assert (tmp_path / "out.txt").read_text() == "said\n"


@pytest.mark.parametrize("line", ["#!/bin/bash", "#! /usr/bin/env -S bash -e", "#!/bin/bash -u"])
def test_a_script_whose_run_lies_on_a_noexec_disk_runs(tmp_path: Path, small_disk: Path, line: str) -> None:
    subprocess.run(["mount", "-o", "remount,noexec", small_disk], check=True)
    (tmp_path / "train.slurm").write_text(f'{line}\n#SBATCH -N 1 -o out.txt\necho "$1 ${{BASH_SOURCE[0]##*/}} $-"\n')
    own = {"HPC_GPT_LOGS": str(small_disk / "logs")}
    in_process("submit", "--cluster", "local", "--wait", "train.slurm", "a b", cwd=tmp_path, environment=own, code=0)
    flags = {"-e": "ehB", "-u": "huB"}.get(line.rpartition(" ")[2], "hB")
    assert (tmp_path / "out.txt").read_text() == f"a b slurm_script {flags}\n"


ORDER = "1 1 1 2 2 3 2 3 3 4 FAIL 4 5 4 6 5 5 6 6"


@pytest.mark.parametrize(
    ("order", "code", "state", "cause", "loss"),
    [
        (ORDER, 0, "done", "exit code 0; several trainings print their steps at once", None),
        (ORDER, 1, "error", "ValueError: bad batch in b; several trainings print", None),
        ("1 1 1 2 2 2 3 3 3 4 4 4 5 5 5 6 6 6", 0, "done", "6 of 6 steps", 2.6),  # ranks of one training
    ],
)
def test_of_several_trainings_at_once_no_loss_is_taken(tmp_path, order, code, state, cause, loss) -> None:
    (tmp_path / "three.sh").write_text(
        "#!/bin/bash\n#SBATCH -N 1\n"
        f"for step in {order}; do\n"
        "if [ $step = FAIL ]; then python3 -c \"raise ValueError('bad batch in b')\"; continue; fi\n"
        f'echo "step $step/6 loss 2.$step"; done; exit {code}\n'
    )
    own = {"HPC_GPT_LOGS": str(tmp_path / "logs")}
    words = ("--cluster", "local", "--set", "chain=none", "--wait", "three.sh")
    in_process("submit", *words, cwd=tmp_path, environment=own, code=3 if code else 0)
    (run,) = list_runs(tmp_path / "logs")
    (row,) = json.loads(in_process("status", run.run_id, "--json", environment=own).stdout)["runs"]
    assert (row["state"], row["step"], row["loss"]) == (state, 6, loss)
    assert str(row["cause"]).startswith(cause)
    answer = json.loads(in_process("why", run.run_id, "--json", environment=own).stdout)
    said = json.dumps([answer["cause"], answer["notes"], answer["attempts"]])
    assert ("several trainings print their steps at once" in said) == (loss is None)
    assert ("ValueError: bad batch in b" in said) == (loss is None)
    (record,) = json.loads(in_process("report", str(run.path), "--json", environment=own).stdout)["records"]
    assert (record["loss_first"] is None, record["loss_last"]) == (loss is None, loss)


FIT = "python3 -uc 'import time\nfor n in range(1, 900): print(f\"step {n} loss 2.0\"); time.sleep(0.2)'"
# After a stop: what a script does, the file that it still makes, and how often it has started its program.
LOOPS = {
    "loop": (f"for n in {{1..9}}; do echo >>starts; {FIT} $n; done", None, 2),
    "lines-after": (f"echo >>starts; {FIT}; sleep 1; echo saved >saved", "saved", 1),
    "trap": (
        f"trap 'sleep 2; echo >saved; exit' TERM; while :; do echo >>starts; {FIT} & wait; done",
        "saved",
        1,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", LOOPS)
def test_a_stop_ends_a_loop_that_starts_its_program_again(tmp_path: Path, kind: str) -> None:
    body, file, starts = LOOPS[kind]
    (tmp_path / "train.slurm").write_text(f"#!/bin/bash\n#SBATCH -t 20\n{body}\n")
    own = {"HPC_GPT_LOGS": str(tmp_path / "logs")}
    line = ("submit", "--cluster", "local", "--set", "job.signal_lead_s=600", "train.slurm")  # longer than any patience
    in_process(*line, cwd=tmp_path, environment=own, code=0)
    (run,) = list_runs(tmp_path / "logs")
    wait_for("steps", lambda: run.attempt(1).last_metrics())
    in_process("stop", run.run_id, "--wait", environment=own, code=0)
    assert run.attempt(1).ended()["ended"] == "stopped"
    assert (tmp_path / "starts").read_text().count("\n") == starts
    assert file is None or (tmp_path / file).exists()


@pytest.mark.long
def test_cancel_ends_a_script_whose_folder_was_removed(tmp_path: Path) -> None:
    (tmp_path / "train.slurm").write_text(
        "#!/bin/bash\n#SBATCH -N 1\necho $$ >pid\nwhile sleep 0.2; do echo more; done\n"
    )
    own = {"HPC_GPT_LOGS": str(tmp_path / "logs")}
    hpc_gpt("submit", "--cluster", "local", "train.slurm", cwd=tmp_path, environment=own, code=0)
    wait_for("its first line", lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    (run,) = list_runs(tmp_path / "logs")
    shutil.rmtree(run.path, ignore_errors=True)
    shutil.rmtree(run.path, ignore_errors=True)  # what was written meanwhile
    hpc_gpt("cancel", "--yes", run.run_id, environment=own, code=0)
    pids = [int((tmp_path / "pid").read_text()), *(pid for pid, _ in removed_runs(tmp_path / "logs").values())]
    wait_for("the end of all", lambda: not any(map(start_time, pids)))
    assert hpc_gpt("status", environment=own, code=0).stdout == ""


ARRAY = """\
#!/bin/bash
#SBATCH -N 1 --job-name=many --array=3-7:2%2 --output=out-%A_%a.txt
echo "step 1 loss 2.5"
echo "$SLURM_ARRAY_TASK_ID $SLURM_ARRAY_TASK_COUNT $SLURM_ARRAY_TASK_MIN $SLURM_ARRAY_TASK_MAX $SLURM_ARRAY_TASK_STEP"
ls out-*.txt | wc -l
[ "$SLURM_ARRAY_TASK_ID" != 5 ] || exit 4
"""


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        (("--array=7",), {"7": "done"}),
        pytest.param((), {"3": "done", "5": "error", "7": "done"}, marks=pytest.mark.long),
    ],
    ids=["one", "all"],
)
def test_an_array_runs_element_after_element_each_a_run(tmp_path: Path, words, ends) -> None:
    (tmp_path / "train.slurm").write_text(ARRAY)
    own = {"HPC_GPT_LOGS": str(tmp_path / "logs")}
    done = in_process("submit", "--cluster", "local", *words, "train.slurm", cwd=tmp_path, environment=own)
    assert done.code == (3 if "5" in ends else 0), done
    assert ("1 of 3 runs failed: 5" in done.stderr) is ("5" in ends)
    runs = {json.loads((run.path / "sweep.json").read_text())["row"]: run for run in list_runs(tmp_path / "logs")}
    assert {row: run.attempt(1).ended()["ended"] for row, run in runs.items()} == ends
    (array,) = {path.name[4:-6] for path in tmp_path.glob("out-*.txt")}
    first, *_, last = [*ends, *ends]
    for place, row in enumerate(ends, 1):
        said = f"step 1 loss 2.5\n{row} {len(ends)} {first} {last} {2 if len(ends) > 1 else 1}\n{place}\n"
        assert (tmp_path / f"out-{array}_{row}.txt").read_text() == said
        assert runs[row].attempt(1).log.read_text() == said
        (link,) = (tmp_path / "logs" / "many").glob(f"*/1/{row}")
        assert link.resolve() == runs[row].path.resolve()
    asked = ("submit", "--resume", "many", "--dry-run")
    resumed = in_process(*asked, cwd=tmp_path, environment=own)
    again = [row for row, end in ends.items() if end != "done"]
    assert re.findall(r"^starts the script of (\S+) again", resumed.stderr, re.M) == [runs[row].run_id for row in again]
    if again:
        refused = re.findall(r"^row (\d), (\S+), is not resumed: run \S+ is done: ", resumed.stderr, re.M)
        assert refused == [(row, runs[row].run_id) for row in ends if row not in again]
