"""A script whose last command succeeds is not done if its training failed."""

import json
import sys
from pathlib import Path

import pytest

from hpc_gpt.core.ends.program_end import Said, write_said
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.launcher.attempts.script_end import end_script
from hpc_gpt.launcher.prepare import prepare
from hpc_gpt.launcher.request import Request, ScriptRequest
from hpc_gpt.launcher.submission import write_run
from hpc_gpt.reader.live_lines import LiveLines
from hpc_gpt.trainer.program.process import said_by
from tests.cli.command import in_process
from tests.launcher.local.conftest import ended, newest
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


SHELL = "/tmp/slurm_script: line 9: "
SRUN = "srun: error: n3: task 1: "


@pytest.mark.parametrize(
    ("text", "how"),
    [
        # of a program: a traceback, a kill, or what is not there
        (STEPS + RAISED + "the end\n", "program"),
        (RAISED + "the end\n", "program"),
        (RAISED + "x\n" * 40, "program"),
        (f"{RAISED}\nDuring handling of the above exception, another exception occurred:\n\n{RAISED}", "program"),
        ("Traceback (most recent call last):\n  File \"a.py\", line 3\nqueue.Empty\n", "program"),
        (f"{SHELL} 4711 Killed                  python fit.py\nthe end\n", "program"),
        (f"{SHELL} 4711 Segmentation fault      (core dumped) ./fit\n", "program"),
        (f"{SHELL}fit: command not found\nfailed\n", "program"),
        (f"{SHELL}./missing: No such file or directory\n", "program"),
        ("/usr/bin/python3: No module named fit\n", "program"),
        ("python3: can't open file '/tmp/fit.py': [Errno 2] No such file or directory\n", "program"),
        (f"{SRUN}Killed\n", "program"),
        ("slurmstepd-n3: error: Detected 1 oom_kill event in StepId=7.0. Some tasks have been OOM Killed.\n",
         "program"),
        ("slurmstepd: error: execve(): ./fit: No such file or directory\n", "program"),
        # of a process, whichever it is
        (STEPS + f"{SRUN}Exited with exit code 1\nthe end\n", "some"),
        (f"{SRUN}Exited with exit code 7\n", "some"),
        (STEPS + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n", "some"),
        # words
        (STEPS + "WARNING: No space left on device, the cache is in memory\n", "words"),
        ("rank 0 says that CUDA out of memory makes it retry\n", "words"),
        # nothing: caught, ignored, only noted, or a consequence that says nothing of this program
        ("CUDA out of memory is avoided by checkpointing\n", ""),
        (STEPS + "CUDA out of memory is avoided by checkpointing\n", ""),
        (RAISED + STEPS, ""),
        ("step 1 loss 4.0\n" + RAISED + "step 2 loss 3.0\nstep 3 loss 2.0\n", ""),
        (STEPS + "Exception ignored in: <function f at 0x7>\n" + RAISED, ""),
        (STEPS + f"{SHELL}nvidia-smi: command not found\n", ""),
        (STEPS + "fit.py:7: UserWarning: the error is large\n", ""),
        (STEPS + "ConnectionResetError: [Errno 104] Connection reset by peer\n", ""),
        (f"{SRUN}Terminated\n", ""),
        (f"srun: forcing job termination\nsrun: got SIGCONT\n{SRUN}Killed\n", ""),  # timeout 9 srun …
        ("loading\n" * 30, ""),
    ],
)  # fmt: skip
def test_how_sure_a_failure_is(text: str, how: str) -> None:
    said = said_of(text)
    found = "program" if said.of_program else "some" if said.failed else "words" if said.note else ""
    assert found == how, said


def test_when_a_failure_came(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lines = LiveLines()
    for line in f"{RAISED}loading\n".splitlines():
        lines.take(line)
    now = 104.0
    lines.take(f"{SHELL}fit: command not found")
    assert said_by(lines, 106.0).failed.cause == "fit: command not found", "the other one is too long ago"
    assert said_by(lines, 106.0).failed_s == 2.0
    assert said_by(lines, 104.0).failed.cause == "ZeroDivisionError: division by zero"
    assert said_by(lines, 120.0).failed_s == 16.0
    late = LiveLines()
    late.moment = None  # of a watch that began after the script
    for line in RAISED.splitlines():
        late.take(line)
    assert (said_by(late).failed_s, said_by(late).of_program) == (None, True)


def test_a_later_step_takes_back_a_limit_of_its_own() -> None:
    line = " [exiting program after 1180 minutes] datetime: 2026-11-20 10:00:00\n"
    assert said_of(STEPS + line).limit
    assert not said_of(STEPS + line + "step 4 loss 1.0\n").limit


@pytest.mark.parametrize(
    ("text", "planned"), [(OF_4, 4), (STEPS, 0), (OF_4.replace("step", "epoch 2 step"), 0), ("3/4 files read\n", 0)]
)
def test_a_step_of_so_many_says_how_many_are_planned(text: str, planned: int) -> None:
    assert said_of(text).planned == planned


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
            RAISED.replace(
                "ZeroDivisionError: division", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2"
            ),
            "gpu_memory",
            "exit code 0, but torch",
        ),
        ("CUDA out of memory is avoided by checkpointing\n", "done", "exit code 0, its log has no lines of steps"),
        (OF_4, "error", "ends by itself at 0 of 4 steps, with exit code 0"),
        ("loading\n", "done", "exit code 0, its log has no lines of steps"),
    ],
)
def test_a_script_that_exits_with_0_has_the_class_of_its_failure(tmp_path, text, ended, cause):
    run, attempt = attempt_of(tmp_path, text)
    end_script(run, attempt, 0, "JobState=RUNNING Restarts=0")
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


FIT = 'fit() { python3 trainer.py "$@"; }\n'
TRAINER = """\
import sys
for step in range(1, int(sys.argv[1]) + 1):
    print(f"step {step}/{sys.argv[2]} loss {6 / step}", flush=True)
if "raise" in sys.argv:
    raise RuntimeError("invalid shape")
sys.exit(int(sys.argv[3]))
"""
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("lines", "ended", "note"),
    [
        # without steps a handled failure is a note
        pytest.param("./missing || true\nsleep 6\necho worked", "done", "No such file or directory", id="note"),
        pytest.param("fit 0 0 7 || echo fallback", "done", "", marks=LONG),
        pytest.param("for n in 1 2 3; do fit 0 0 $((3 - n)) && break; done", "done", "", marks=LONG),
        pytest.param("fit 0 0 raise || { sleep 6; fit 0 0 0; }", "done", "invalid shape", marks=LONG),
        pytest.param("timeout 1 sleep 9; [ $? = 124 ] && exit 0", "done", "", marks=LONG),
        pytest.param("echo 'CUDA out of memory is avoided by checkpointing'", "done", "", marks=LONG),
        pytest.param("fit 0 0 raise & wait; echo over", "error", "", marks=LONG),
        pytest.param("python3 -m no_such_module 2>&1 | tee fit.log", "user_error", "", marks=LONG),
        # the last planned step, and before it
        pytest.param("fit 3 3 0; kill -TERM $$; sleep 9", "done", "", marks=LONG),
        pytest.param("fit 3 3 0; fit 0 0 raise; true", "done", "invalid shape", marks=LONG),
        pytest.param("fit 3 3 1", "error", "", marks=LONG),
        pytest.param("fit 2 3 0; kill -TERM $$; sleep 9", "error", "", marks=LONG),
        pytest.param("fit 2 6 0", "error", "", marks=LONG),
        pytest.param("(cd . && fit 3 6 raise) & (cd . && fit 3 6 raise) & wait", "error", "", marks=LONG),
    ],
)  # fmt: skip
def test_a_script_here_has_one_start_and_a_note(tmp_path: Path, lines: str, ended: str, note: str) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "fit.slurm").write_text(f"#!/bin/bash\n#SBATCH -t 7\n{FIT}{lines}\n")
    words = ("submit", "--cluster", "local", "--wait", "fit.slurm")
    in_process(*words, cwd=tmp_path, code=0 if ended == "done" else 3)
    run = newest()
    assert ([each.number for each in run.attempts()], run.attempt(1).ended()["ended"]) == ([1], ended)
    (record,) = json.loads(in_process("report", "--json", str(run.path)).stdout)["records"]
    notes = json.loads(in_process("why", "--json", str(run.path)).stdout)["notes"]
    assert (record["ended"], [each for each in record["flags"] if "its log says" in each]) == (ended, notes)
    assert len(notes) == bool(note)
    for text in notes:
        assert text.startswith("exit code 0, but its log says ")
        assert note in text
        assert f"note     {text}" in in_process("why", str(run.path)).stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("lines", "begins_s", "follows_s", "ended"),
    [
        ("./missing || true; for n in 1 2 3 4 5 6 7; do echo part $n; sleep 1; done", 0, 5, "done"),
        ("./missing || true; sleep 7; echo whole", 0, 9, "done"),
        ("no-such-trainer; echo over", 6, 0, "user_error"),
        ("sleep 6; no-such-trainer; echo over", 0, 15, "user_error"),
        ("sleep 6; no-such-trainer; echo over", 0, 4, "user_error"),
    ],
)
def test_a_slow_machine_changes_no_verdict(tmp_path: Path, monkeypatch, lines, begins_s, follows_s, ended) -> None:
    """Python takes so many seconds to start, for the script and for its watch."""
    slow = f'case "$*" in *start.py*) sleep {begins_s} ;; *script_watch*) sleep {follows_s} ;; esac'
    monkeypatch.setenv(
        "HPC_GPT_PYTHON", str(put(tmp_path / "python", f'#!/bin/sh\n{slow}\nexec {sys.executable} "$@"\n'))
    )
    (tmp_path / "fit.slurm").write_text(f"#!/bin/bash\n#SBATCH -t 7\n{lines}\n")
    in_process("submit", "--cluster", "local", "--wait", "fit.slurm", cwd=tmp_path, code=0 if ended == "done" else 3)
    assert newest().attempt(1).ended()["ended"] == ended


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
