"""HPC_GPT_RESUME_FROM: each start of a script gets the newest whole checkpoint, and plain bash runs the same line."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.cli.command import in_process
from tests.launcher.local.conftest import newest

REPOSITORY = Path(__file__).resolve().parents[3]
# Saves every ten steps of 30, a file after the other; the first start dies in the save of step 20.
TRAIN = """\
import os, sys
first = int(sys.argv[2].rpartition("-")[2]) if sys.argv[1:2] == ["--resume"] else 0
for step in range(first + 1, 31):
    print(f"step {step}/30 loss {5 - step / 10:.2f}", flush=True)
    if step % 10 == 0:
        os.makedirs(f"out/step-{step}", exist_ok=True)
        open(f"out/step-{step}/model.bin", "w").write("weights")
        if step == 20 and first == 0:
            os.kill(os.getpid(), 9)
        open(f"out/step-{step}/optimizer.bin", "w").write("moments")
"""


def readme_line() -> str:
    """The line of README by which a script finds its newest checkpoint."""
    return next(line for line in (REPOSITORY / "README.md").read_text().splitlines() if line.startswith("newest="))


def script(*lines: str, options: str = "") -> str:
    return "\n".join(["#!/bin/bash", f"#SBATCH --job-name=fit --time=9:00:00 {options}", *lines, ""])


GIVEN = 'echo "given ${HPC_GPT_RESUME_FROM-unset} ${HPC_GPT_RESUME_STEP-unset}"'
RUN = 'python3 train.py ${newest:+--resume "$newest"}'


def given(run: RunFolder) -> list[str]:
    """What each attempt of the run was given."""
    return [found for each in run.attempts() for found in re.findall("given (.*)", each.log.read_text())]


def test_a_start_gets_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "fit.sh").write_text(script(GIVEN, readme_line(), RUN))
    in_process(
        *("submit", "--cluster", "local", "--wait", "--checkpoints", "out/step-*"),
        *("--set", "job.restart_in_job=true", "--set", "job.retry_pause_s=0", "fit.sh"),
        cwd=tmp_path,
        code=0,
    )
    run = newest()
    assert given(run) == [" ", "out/step-10 10"]
    (record,) = json.loads(in_process("report", str(run.path), "--json", code=0).stdout)["records"]
    assert (record["ended"], [each["first_step"] for each in record["attempts"]]) == ("done", [1, 11])


def test_without_a_pattern_the_variables_are_unset(tmp_path: Path) -> None:
    (tmp_path / "fit.sh").write_text(script(GIVEN))
    in_process("submit", "--cluster", "local", "--wait", "fit.sh", cwd=tmp_path, code=0)
    assert given(newest()) == ["unset unset"]


def test_an_element_of_an_array_gets_its_own(tmp_path: Path) -> None:
    for element in (1, 2):
        (tmp_path / f"out/{element}/step-{element}0").mkdir(parents=True)
        (tmp_path / f"out/{element}/step-{element}0/model.bin").write_text("weights")
    (tmp_path / "fit.sh").write_text(script(GIVEN, options="--array=1-2"))
    submit = ("submit", "--cluster", "local", "--wait", "--checkpoints")
    in_process(*submit, "out/%a/step-*", "fit.sh", cwd=tmp_path, code=0)
    in_process(*submit, "out/*/step-*", "fit.sh", cwd=tmp_path, code=0)
    logs = [path.read_text() for path in sorted((tmp_path / "logs").glob("fit/*/attempts/1/log"))]
    every = sorted(found for text in logs for found in re.findall("given (.*)", text))
    assert every == ["out/1/step-10 10", "out/2/step-20 20", "unset unset", "unset unset"]


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_plain_bash_runs_the_line_of_the_readme(tmp_path: Path, has_checkpoint: bool) -> None:
    for step in (9, 10) if has_checkpoint else ():
        (tmp_path / f"out/step-{step}").mkdir(parents=True)
    done = subprocess.run(
        ["bash", "-c", f'{readme_line()}; echo "[$newest]"'], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == ("[out/step-10]\n" if has_checkpoint else "[]\n")


# It never loads, and each of its starts comes further before it is killed.
FORGETFUL = """\
import os, time
for step in range(1, 300):
    print(f"step {step}/300 loss {9 - step / 100:.3f}", flush=True)
    if step == 12 + int(os.environ["HPC_GPT_ATTEMPT"]):
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
"""


def test_a_script_that_never_loads_is_ended_and_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FORGETFUL)
    (tmp_path / "fit.sh").write_text(script("python3 train.py"))
    in_process(
        *("submit", "--cluster", "local", "--wait", "--set", "job.restart_in_job=true"),
        *("--set", "job.retry_pause_s=0", "fit.sh"),
        cwd=tmp_path,
        code=3,
    )
    run = newest()
    why = in_process("why", str(run.path)).stdout
    sentence = "attempt 3 began at step 1 again, after 14: the script loaded no checkpoint"
    assert "no_progress" in why
    assert sentence in " ".join(why.split())
    assert [f"steps 1-{12 + number}; " in why for number in (1, 2, 3)] == [True] * 3
    assert len(run.attempts()) == 3
    assert sentence in " ".join(in_process("status", str(run.path)).stdout.split())
    (record,) = json.loads(in_process("report", str(run.path), "--json", code=0).stdout)["records"]
    assert any(
        sentence in flag and 'srun python3 train.py ${newest:+--resume "$newest"}' in flag for flag in record["flags"]
    )


def test_a_resumption_names_the_variables_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fit.sh").write_text(script('echo "step 1/$MAX_STEPS loss 3.0"', "sleep 0.2", "exit 3"))
    monkeypatch.setenv("MAX_STEPS", "400")
    in_process("submit", "--cluster", "local", "--wait", "fit.sh", cwd=tmp_path, code=3)
    resume = ("submit", "--resume", newest().run_id, "--dry-run")
    assert "MAX_STEPS" not in in_process(*resume, code=0).stderr
    monkeypatch.delenv("MAX_STEPS")
    assert "note: the script reads MAX_STEPS, which is unset now" in in_process(*resume, code=0).stderr


# Its checkpoint of step 20 has all files, and cannot be read.
DAMAGED = """\
import os, sys
given = os.environ["HPC_GPT_RESUME_FROM"]
first = int(given.rpartition("-")[2]) if given else 0
if given and "damaged" in open(given + "/model.bin").read():
    raise RuntimeError("PytorchStreamReader failed reading zip archive: invalid header or archive is corrupted")
for step in range(first + 1, 31):
    print(f"step {step}/30 loss {5 - step / 10:.2f}", flush=True)
    if step % 10 == 0:
        os.makedirs(f"out/step-{step}", exist_ok=True)
        open(f"out/step-{step}/model.bin", "w").write("damaged" if step == 20 and not first else "weights")
    if step == 22 and not first:
        os.kill(os.getpid(), 9)
"""
# It takes the highest number itself.
OWN_CHOICE = """\
import os
newest = max(os.listdir("out"), key=lambda name: int(name[11:]))
print("step", open(f"out/{newest}/trainer_state.json").read())
"""
RETRIES = ("--set", "job.restart_in_job=true", "--set", "job.retry_pause_s=0")


def test_after_a_damaged_checkpoint_the_one_before_is_given(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DAMAGED)
    (tmp_path / "fit.sh").write_text(script(GIVEN, "python3 train.py"))
    submit = ("submit", "--cluster", "local", "--wait", "--checkpoints", "out/step-*", *RETRIES, "fit.sh")
    in_process(*submit, cwd=tmp_path, code=0)
    run = newest()
    assert given(run) == [" ", "out/step-20 20", "out/step-10 10"]
    why = " ".join(in_process("why", str(run.path)).stdout.split())
    assert f"error: damaged checkpoint {tmp_path}/out/step-20: RuntimeError: PytorchStreamReader failed" in why


def test_a_half_checkpoint_that_the_script_takes_is_named(tmp_path: Path) -> None:
    for step, files in ((20, ("optimizer.pt", "trainer_state.json")), (29, ("optimizer.pt",))):
        (folder := tmp_path / f"out/checkpoint-{step}").mkdir(parents=True)
        for name in files:
            (folder / name).write_text("0")
    (tmp_path / "train.py").write_text(OWN_CHOICE)
    (tmp_path / "fit.sh").write_text(script(GIVEN, "python3 train.py"))
    submit = ("submit", "--cluster", "local", "--wait", "--checkpoints", "out/checkpoint-*", *RETRIES, "fit.sh")
    in_process(*submit, cwd=tmp_path, code=3)
    run = newest()
    assert given(run) == ["out/checkpoint-20 20"]
    why = " ".join(in_process("why", str(run.path)).stdout.split())
    taken = "the script took out/checkpoint-29, which is not whole (it has no trainer_state.json)"
    assert f"{taken}; the newest whole one is out/checkpoint-20" in why
    assert f"hpc-gpt submit --resume {run.run_id}" in why
