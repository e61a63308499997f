"""A script whose last command succeeds is not done if its training failed."""

import json
from pathlib import Path

import pytest

from hpc_gpt.core.ends.end_policy import End, Said, end_of_exit_0, write_said
from hpc_gpt.core.ends.what_next import end_script
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.launcher.launch.prepare import prepare
from hpc_gpt.launcher.launch.request import Request, ScriptRequest
from hpc_gpt.launcher.launch.submission import write_run
from hpc_gpt.reader.readers.attempt_cause import read_cause
from hpc_gpt.reader.readers.live_lines import LiveLines
from hpc_gpt.trainer.program.process import said_by
from tests.cli.command import in_process
from tests.local.conftest import ended, newest
from tests.programs import put

RAISED = (
    'Traceback (most recent call last):\n  File "fit.py", line 3, in <module>\nZeroDivisionError: division by zero\n'
)
STEPS = "".join(f"step {step} loss {5 - step}.0\n" for step in range(1, 4))
OF_4 = STEPS.replace(" loss", "/4 loss")
OF_3 = STEPS.replace(" loss", "/3 loss")


def said_of(text: str) -> Said:
    lines = LiveLines()
    for line in text.splitlines():
        lines.take(line)
    return said_by(lines)


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        (STEPS + RAISED + "the end\n", True),
        (RAISED + "the end\n", True),
        (STEPS + "srun: error: n3: task 1: Exited with exit code 1\nthe end\n", True),
        ("/tmp/slurm_script: line 9:  4711 Killed                  python fit.py\nthe end\n", True),
        ("/tmp/slurm_script: line 9: fit: command not found\nfailed\n", True),
        # caught, ignored, only noted, or a consequence that says nothing of this program
        (RAISED + STEPS, False),
        ("step 1 loss 4.0\n" + RAISED + "step 2 loss 3.0\nstep 3 loss 2.0\n", False),
        (RAISED + "x\n" * 40, False),
        (STEPS + "Exception ignored in: <function f at 0x7>\n" + RAISED, False),
        (STEPS + "/tmp/slurm_script: line 9: nvidia-smi: command not found\n", False),
        (STEPS + "fit.py:7: UserWarning: the error is large\n", False),
        (STEPS + "ConnectionResetError: [Errno 104] Connection reset by peer\n", False),
        ("loading\n" * 30, False),
    ],
)
def test_a_failure_near_or_after_the_last_step_counts(text: str, failed: bool) -> None:
    assert (said_of(text).failed is not None) == failed


@pytest.mark.parametrize(
    ("text", "planned"), [(OF_4, 4), (STEPS, 0), (OF_4.replace("step", "epoch 2 step"), 0), ("3/4 files read\n", 0)]
)
def test_a_step_of_so_many_says_how_many_are_planned(text: str, planned: int) -> None:
    assert said_of(text).planned == planned


FAILED = End("user_error", "ImportError: no name x")


@pytest.mark.parametrize(
    ("step", "planned", "spacing", "ended", "cause"),
    [
        (3, 0, 1, "user_error", "exit code 0, but ImportError: no name x"),
        (3, 9, 1, "user_error", "exit code 0, but ImportError: no name x"),
        (9, 9, 1, "done", "9 of 9 steps"),  # at its exit
        (8, 9, 1, "done", "9 of 9 steps"),
    ],
)
def test_the_class_is_the_failures_unless_the_last_step_was_made(step, planned, spacing, ended, cause):
    assert end_of_exit_0(step, planned, spacing, "", FAILED) == End(ended, cause)


def attempt_of(folder: Path, text: str) -> tuple[RunFolder, Attempt]:
    (script := folder / "fit.slurm").write_text("#!/bin/bash\n#SBATCH -t 7\npython fit.py\n")
    prepared = prepare(Request(str(script), "generic-slurm", None, {}, script=ScriptRequest(script, (), ())))
    run = write_run(prepared, folder / "logs", {})
    attempt = run.new_attempt()
    attempt.log.write_text(text)
    write_said(attempt, 0, said_of(text))
    return run, attempt


@pytest.mark.parametrize(
    ("text", "ended", "cause"),
    [
        (RAISED, "error", "exit code 0, but ZeroDivisionError: division by zero"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
            "gpu_memory",
            "exit code 0, but torch",
        ),
        (OF_4, "error", "ends by itself at 0 of 4 steps, with exit code 0"),
        ("loading\n", "done", "exit code 0, its log has no lines of steps"),
    ],
)
def test_a_script_that_exits_with_0_has_the_class_of_its_failure(tmp_path, text, ended, cause):
    run, attempt = attempt_of(tmp_path, text)
    end_script(run, attempt, 0, "JobState=RUNNING Restarts=0", read_cause)
    assert attempt.ended()["ended"] == ended
    assert attempt.ended()["cause"].startswith(cause)


def test_a_script_that_asks_for_no_gpu_has_none_anywhere(tmp_path: Path) -> None:
    (tmp_path / "fit.slurm").write_text("#!/bin/bash\n#SBATCH -t 7\necho step 1 loss 4.0\n")
    in_process("submit", "--cluster", "local", "--wait", "fit.slurm", cwd=tmp_path, code=0)
    status, record = ended(newest()), RunFolder(newest().path).record
    assert (status.gpus, status.gpu_hours) == (None, None)
    in_process("report", str(newest().path), code=0)
    found = json.loads(record.read_text())
    assert (found["gpus"], found["gpu_hours"]) == (None, None)


@pytest.mark.parametrize("last", ["fit; echo end", "fit || echo failed", "fit & wait", "fit 2>&1 | tee fit.log"])
def test_wait_fails_and_why_says_it(tmp_path: Path, last: str) -> None:
    fit = "fit() { printf 'step 1 loss 4.0\\nstep 2 loss 3.0\\n'; python3 -c 'import no_such_module'; }\n"
    (tmp_path / "fit.slurm").write_text(f"#!/bin/bash\n#SBATCH -t 7\n{fit}{last}\n")
    in_process("submit", "--cluster", "local", "--wait", "fit.slurm", cwd=tmp_path, code=3)
    run = newest()
    assert ended(run).state == "user_error"
    said = in_process("why", str(run.path)).stdout
    assert "exit code 0, but ModuleNotFoundError: No module named 'no_such_module'" in said


def test_a_program_of_ones_own_is_not_done_either(tmp_path: Path) -> None:
    lines = ["[engine]", 'name = "command"', "[command]", 'run = "python3 -c \\"import no_such_module\\"; echo end"']
    (tmp_path / "mine.toml").write_text("\n".join([*lines, 'per = "job"', "snapshot = false", ""]))
    done = in_process("submit", "--cluster", "local", "--gpus", "1", "--wait", "mine.toml", cwd=tmp_path, code=3)
    assert "exit code 0, but ModuleNotFoundError: No module named 'no_such_module'" in done.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/tmp/slurm_script: line 9:  4711 Killed                  python fit.py", True),
        ("srun: error: n3: task 1: Killed", True),
        ("rank      : 1 (local_rank: 1)\nexitcode  : 137 (pid: 4711)", True),
        ("RuntimeError: the worker was Killed by its parent", False),
        ("/tmp/slurm_script: line 9: syntax error near unexpected token `done'", False),
    ],
)
def test_the_kernels_memory_is_suspected_after_signal_9_alone(tmp_path: Path, line: str, says: bool) -> None:
    (tmp_path / "fit.log").write_text(f"starts\n{line}\n")
    assert ("out of memory" in in_process("why", "fit.log", cwd=tmp_path).stdout) == says


@pytest.mark.parametrize("submits", ['sbatch "$0"', 'sbatch --parsable "$0" >id'])
def test_a_script_that_queues_itself_is_not_done_here(tmp_path: Path, monkeypatch, submits: str) -> None:
    put(tmp_path / "sbatch", "#!/bin/sh\necho Submitted batch job 4711\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    guard = f'#!/bin/bash\n#SBATCH -t 7\nif [ -z "$SLURM_JOB_ID" ]; then\n  {submits}\n  exit\nfi\npython3 fit.py\n'
    (tmp_path / "fit.slurm").write_text(guard)
    done = in_process("submit", "--cluster", "local", "--wait", "fit.slurm", cwd=tmp_path, code=3)
    job = "the script queued job 4711, and" if "parsable" not in submits else "line 4 of the script calls sbatch"
    assert f"exit code 0, but {job}" in done.stderr


def test_a_script_that_queues_another_job_is_done_here(tmp_path: Path, monkeypatch) -> None:
    put(tmp_path / "sbatch", "#!/bin/sh\necho Submitted batch job 4711\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "fit.slurm").write_text("#!/bin/bash\n#SBATCH -t 7\necho trained\nsbatch evaluate.slurm\n")
    in_process("submit", "--cluster", "local", "--wait", "fit.slurm", cwd=tmp_path, code=0)
