"""Output of a job script's programs that goes past its own: said at submit, followed and read where it goes."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hpc_gpt.core.process import name_of
from hpc_gpt.core.slurm.script_lines import globs_of, redirected
from hpc_gpt.trainer.program.signs_of_life import patterns_of_sruns
from tests.cli.command import in_process
from tests.launcher.local.conftest import ended, newest, status_of
from tests.waiting import wait_for

FIT = "python3 -u -c 'for n in range(1, 4): print(f\"step {n}/3 loss {4 - n}.5\")'"
SLOW = "python3 -uc 'import time\nfor n in range(1, 4):\n print(f\"step {n}/9 loss {4 - n}.5\"); time.sleep(1)\n1 / 0'"
FAILS = "python3 -c 'import no_such_module'"


@pytest.mark.parametrize(
    ("line", "targets"),
    [
        ("srun -n2 --output=o/%j-%t.txt python fit.py", ["o/%j-%t.txt"]),
        ("srun -o o-%t.txt \\\n  python fit.py --output=w", ["o-%t.txt"]),
        ('exec >"own dir/fit.out" 2>&1', ["own dir/fit.out"]),
        ("python fit.py > fit.out 2>&1", ["fit.out"]),
        ('python fit.py >"$PWD"/fit.out', ["$PWD/fit.out"]),
        ("python fit.py > slurm-\"$SLURM_JOB_ID\"-'d'.out", ["slurm-$SLURM_JOB_ID-d.out"]),
        ("srun --output=a-%t.out -n 2 --error='b c'.err python fit.py", ["a-%t.out", "b c.err"]),
        ("srun -o /dev/null -e b.err python fit.py", ["b.err"]),
        ("python fit.py 2>> fit.err", ["fit.err"]),
        ("torchrun --redirects 3 --log-dir=w fit.py", ["w/**/std*.log"]),
        ("torchrun -r 3 fit.py", [""]),
        ("exec > >(tee fit.out)", []),
        ("python fit.py 2>&1 | tee fit.out", []),
        ("hostname > hosts", []),
        ("python fit.py >/dev/null 2>&1", []),
        ("# python fit.py > fit.out", []),
        ("torchrun --redirects 3 --tee 3 fit.py", []),
    ],
)
def test_lines_that_send_output_past_the_script(line: str, targets: list[str]) -> None:
    assert [each.target for each in redirected(f"#!/bin/bash\n{line}\n")] == targets


def test_a_file_is_known_if_all_but_the_number_of_a_rank_is() -> None:
    text = (
        'OUT="o/$SLURM_JOB_ID"\npython a >$OUT.txt\npython b >$WHERE/x\npython c >${WHERE:-w}/y\npython d >"$1.txt"\n'
    )
    text += 'srun -o s-%t-%j.txt python e\nsrun bash -c "python f >r-$SLURM_PROCID.txt"\npython g > $(date).txt\n'
    found = globs_of(text, {"SLURM_JOB_ID": "7"}, ["z"])
    assert found == ["o/7.txt", "w/y", "z.txt", "s-*-7.txt", "r-*.txt"]


# How a script may name a file that no reader of its text knows.
UNREADABLE = (
    'exec >"${F[1]}" 2>&1',
    "exec >fit-$(date +%s).out 2>&1",
)


@pytest.mark.parametrize(
    "line", [UNREADABLE[0], *(pytest.param(each, marks=pytest.mark.long) for each in UNREADABLE[1:])]
)
def test_the_processes_say_where_their_output_goes(tmp_path: Path, line: str) -> None:
    text = f"#!/bin/bash\n#SBATCH -t 7\nF=(a fit.out)\n{line}\n{SLOW}\n"
    (tmp_path / "fit.slurm").write_text(text)
    done = in_process("submit", "--cluster", "local", "--wait", "fit.slurm", cwd=tmp_path)
    run = newest()
    assert (ended(run).state, ended(run).step) == ("error", 3), done
    why = json.loads(in_process("why", str(run.path), "--json").stdout)
    assert "ZeroDivisionError" in why["cause"]
    assert Path(why["file"]).parent == tmp_path


@pytest.mark.long
def test_why_names_a_file_that_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "fit.slurm").write_text(
        f"#!/bin/bash\n#SBATCH -t 7\n{FAILS} > $(date +%s).txt 2>&1\n{FAILS} >$(pwd)/x 2>&1\n"
    )
    in_process("submit", "--cluster", "local", "--wait", "fit.slurm", cwd=tmp_path, code=3)
    said = in_process("why", str(newest().path)).stdout
    assert "read the files that the script's programs write to" in said
    assert "$(pwd)/x (line 4)" in said


@pytest.mark.parametrize(
    ("body", "state", "file"),
    [
        pytest.param(f"exec >own.out 2>&1\n{FIT}\n", "done", "own.out", marks=pytest.mark.long),
        pytest.param(f"{FIT} > fit.out 2>&1\n", "done", "fit.out", marks=pytest.mark.long),
        pytest.param(f"{FAILS} > fit.out 2>&1\n", "user_error", "fit.out", marks=pytest.mark.long),
        (f"{FAILS} > fit.out 2>&1\ntrue\n", "user_error", "fit.out"),
    ],
)
def test_steps_and_causes_are_read_where_they_are(tmp_path: Path, body: str, state: str, file: str) -> None:
    (tmp_path / "fit.slurm").write_text(f"#!/bin/bash\n#SBATCH -t 7\n{body}")
    done = in_process("submit", "--cluster", "local", "--wait", "fit.slurm", cwd=tmp_path)
    line = f"line 3: {body.splitlines()[0]:.60}"
    assert f"note: fit.slurm: {line}: its output goes to {file}, not to the run's" in done.stderr
    run = newest()
    assert ended(run).state == state, done
    if state == "done":
        assert ended(run).step == 3
        return
    assert done.code == 3
    why = json.loads(in_process("why", str(run.path), "--json").stdout)
    assert "No module named 'no_such_module'" in why["cause"]
    assert why["file"] == str(tmp_path / file)


def test_the_output_of_an_srun_is_where_its_command_line_says(tmp_path: Path, monkeypatch) -> None:
    """A shell under the name of srun, whose -c is another option."""
    shutil.copy(shutil.which("bash"), tmp_path / "srun")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    words = ("srun", "-c", "read x", "--output=res/[a]-%j-%t.out", "--error", "/logs/%N.err", "python", "--output=no")
    with subprocess.Popen(words, executable=tmp_path / "srun", cwd=tmp_path, stdin=subprocess.PIPE) as process:
        wait_for("its name", lambda: name_of(process.pid) == "srun")
        found = patterns_of_sruns([process.pid, os.getpid()])
        process.stdin.close()
    assert found == [f"{tmp_path}/res/[[]a]-7-*.out", "/logs/*.err"]


def test_a_file_with_the_jobs_id_is_known_in_any_folder() -> None:
    text = "srun --output=${resdir}/%j.out --error=$resdir/%t.err python3 fit.py\n"
    known = {"SLURM_JOB_ID": "4711"}
    assert globs_of(text, known, ()) == []
    assert globs_of(text, known, (), in_any_folder=True) == ["*/4711.out", "*/*/4711.out", "*/*/*/4711.out"]


LOST = """\
#!/bin/bash
#SBATCH -t 7
step() { for n; do echo "step $n/9 loss 2.0"; done; }
step 1 2
printf 'Traceback (most recent call last):\\n  File "fit.py", line 3\\nRuntimeError: no such device\\n'
step 3
echo 'srun: error: n2: task 1: Exited with exit code 1'
until [ -e go ]; do sleep 0.1; done
step 4 5 6
until [ -e end ]; do sleep 0.1; done
"""


def test_a_task_that_failed_is_told_until_steps_follow(tmp_path: Path) -> None:
    (tmp_path / "fit.slurm").write_text(LOST)
    in_process("submit", "--cluster", "local", "fit.slurm", cwd=tmp_path, code=0)
    run = newest()
    told = (
        "srun says: task 1 on n2: Exited with exit code 1; if others wait for it, srun --kill-on-bad-exit=1 ends them"
    )
    wait_for("the note", lambda: told in str(status_of(run).cause))
    assert told in in_process("why", str(run.path)).stdout.replace("\n", " ")
    (tmp_path / "go").touch()
    wait_for("further steps", lambda: told not in str(status_of(run).cause))
    (tmp_path / "end").touch()
    ended(run)
