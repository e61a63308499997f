"""A script whose last command succeeds is not done if its training failed."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.ends.program_end import PrintedEnd, end_of_program, facts_of, write_said
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.attempts import script_end
from hpc_gpt.launcher.decide import prepare
from hpc_gpt.launcher.request import Request, ScriptRequest
from hpc_gpt.launcher.submission import write_run
from hpc_gpt.reader.failures.live_lines import LiveLines
from hpc_gpt.trainer.program.process import ForeignLog, said_by
from tests.cli.command import in_process
from tests.launcher.local.conftest import newest, status_of
from tests.made_runs import add_attempt
from tests.programs import put

RAISED = (
    'Traceback (most recent call last):\n  File "fit.py", line 3, in <module>\nZeroDivisionError: division by zero\n'
)
STEPS = "".join(f"step {step} loss {5 - step}.0\n" for step in range(1, 4))
OF_4 = STEPS.replace(" loss", "/4 loss")
OF_3 = STEPS.replace(" loss", "/3 loss")


def said_of(text: str) -> PrintedEnd:
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
        (RAISED, "program"),
        (f"{RAISED}CUDA kernel errors might be reported later\n[rank0]:[W1120 10:00] not destroyed\n", "program"),
        (f"{RAISED}\nDuring handling of the above exception, another exception occurred:\n\n{RAISED}", "program"),
        ("Traceback (most recent call last):\n  File \"a.py\", line 3\nqueue.Empty\n", "program"),
        (f"{SHELL} 4711 Killed                  python fit.py\n", "program"),
        ("Segmentation fault (core dumped)\n", "program"),
        (f"{SHELL} 4711 Segmentation fault      (core dumped) ./fit\n", "program"),
        (f"{SHELL}fit: command not found\n", "program"),
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
        (STEPS + "Segmentation fault count: 0\n", "words"),
        (RAISED + "the end\n", "words"),  # without steps: the script goes on, so it has handled it
        (f"{SHELL}fit: command not found\nfailed\n", "words"),
        (f"{SHELL} 4711 Killed                  python fit.py\nthe end\n", "words"),
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
    assert said_by(lines, 100.0).failed is None, "the script has printed a line after it"
    now = 104.0
    lines.take(f"{SHELL}fit: command not found")
    assert said_by(lines, 106.0).failed.cause == "fit: command not found"
    assert (said_by(lines, 106.0).failed_s, said_by(lines, 120.0).failed_s) == (2.0, 16.0)
    late = LiveLines()
    late.moment = None  # of a watch that began after the script
    for line in RAISED.splitlines():
        late.take(line)
    assert (said_by(late).failed_s, said_by(late).of_program) == (None, True)


def test_a_later_step_takes_back_the_words_of_an_end() -> None:
    line = " [exiting program after 1180 minutes] datetime: 2026-11-20 10:00:00\n"
    for end, words in ((line, "exiting program after 1180 minutes"), ("Target loss reached\n", "Target loss reached")):
        for later, left in (("", words), ("step 4 loss 1.0\n", "")):
            said = said_of(STEPS + end + later)
            assert f"{said.limit}{said.over}"[: len(left) or None] == left


@pytest.mark.parametrize(
    ("text", "planned"), [(OF_4, 4), (STEPS, 0), (OF_4.replace("step", "epoch 2 step"), 0), ("3/4 files read\n", 0)]
)
def test_a_step_of_so_many_says_how_many_are_planned(text: str, planned: int) -> None:
    assert said_of(text).planned == planned


@pytest.fixture(scope="module")
def scripts_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of a job script, each attempt of which ends in a way of its own."""
    folder = tmp_path_factory.mktemp("scripts")
    (script := folder / "fit.slurm").write_text("#!/bin/bash\n#SBATCH -t 7\npython fit.py\n")
    prepared = prepare(Request(str(script), "generic-slurm", None, {}, script=ScriptRequest(script, (), ())))
    return write_run(prepared, folder / "logs", {})


MEMORY = RAISED.replace(
    "ZeroDivisionError: division", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2"
)
RAN = "exit code 0"
ZERO = "exit code 0, but ZeroDivisionError: division by zero"
# What a script prints, its exit code, seconds from its failure to its end; how it ends, how its cause begins, its note.
WAYS = {
    "nothing is said": ("loading\n", 0, 0, "done", RAN, None),
    "words of no failure": ("CUDA out of memory is avoided by checkpointing\n", 0, 0, "done", RAN, None),
    # without steps a handled failure is a note, as is one after the last planned step
    "fit | tee log": (RAISED, 0, 1, "error", ZERO, None),
    "fit || echo failed": (RAISED + "failed\n", 0, 1, "done", RAN, "division by zero"),
    "fit || { sleep 6; fit; }": (RAISED, 0, 6, "done", RAN, "division by zero"),
    "./missing || true; sleep 6": (f"{SHELL}./missing: No such file or directory\n", 0, 6, "done", RAN, "No such file"),
    "fit 3 3; fit raise; true": (OF_3 + RAISED, 0, 0, "done", "3 of 3 steps", "division by zero"),
    "fit; echo end": (STEPS + RAISED + "end\n", 0, 9, "error", ZERO, None),
    "fit 3 6 raise & wait": (OF_4.replace("/4", "/6") + RAISED, 0, 0, "error", ZERO, None),
    "too little memory": (MEMORY, 0, 0, "gpu_memory", "exit code 0, but torch", None),
    "no module | tee": ("/usr/bin/python3: No module named fit\n", 0, 0, "user_error", "exit code 0, but", None),
    # the last planned step, and before it
    "fit 2 4": (OF_4.partition("step 3")[0], 0, 0, "error", "ends by itself at 2 of 4 steps, with exit code 0", None),
    "fit 3 3; kill -TERM $$": (OF_3, 143, 0, "done", "3 of 3 steps; exit code 143", None),
    "fit 2 4; kill -TERM $$": (OF_4.partition("step 3")[0], 143, 0, "error", "exit code 143", None),
    "fit 3 3; exit 1": (OF_3, 1, 0, "error", "exit code 1", None),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_scripts_end_by_what_it_printed_and_its_code(scripts_run: RunFolder, way: str) -> None:
    text, code, failed_s, ended, cause, note = WAYS[way]
    attempt, lines = scripts_run.new_attempt(), LiveLines()
    attempt.log.write_text(text)
    log = ForeignLog(attempt, scripts_run.resolved(), 0, lines.take, planned=lambda: lines.planned)
    log.take(*text.splitlines())
    said = said_by(lines)
    write_said(attempt, 0, replace(said, failed_s=failed_s) if said.failed else said)
    script_end.main([str(scripts_run.path), str(attempt.number), str(code)])
    end = attempt.ended()
    assert end["ended"] == ended, end
    assert end["cause"].startswith(cause), end
    assert (note or "") in (end.get("note") or ""), end
    assert bool(end.get("note")) is bool(note)


# The Trainer of transformers, started once more after its last step.
AGAIN = """[transformers]   Total optimization steps = 32
[transformers]   Resuming training from checkpoint with epoch 1 and global step 32
\r  0%|          | 0/32 [00:00<?, ?it/s][transformers]

Training completed. Do not forget to share your model on huggingface.co/models =)
{'train_runtime': '0.0045', 'train_steps_per_second': '0', 'train_loss': '0', 'epoch': '1'}
"""
BEGINS = AGAIN.partition("[transformers]   Resuming")[0]


@pytest.mark.parametrize(
    ("text", "ended", "cause"),
    [
        (AGAIN, "done", "32 of 32 steps"),
        (AGAIN.replace("Resuming", "Going on"), "done", "Training completed; it had no step to train"),
        (AGAIN.replace("step 32", "step 30"), "error", "ends by itself at 30 of 32 steps"),
        (BEGINS, "error", "ends by itself at 0 of 32 steps"),
        (f"{BEGINS}[default] worker group successfully finished\n", "error", "ends by itself at 0 of 32 steps"),
    ],
)
def test_a_finished_training_that_starts_once_more_is_done(tmp_path: Path, text: str, ended: str, cause: str) -> None:
    end = end_of_program(facts_of(add_attempt(RunFolder(tmp_path), [], None), 0, 0, said_of(text)))
    assert end is not None
    assert (end.ended, str(end.cause)[: len(cause)]) == (ended, cause)


# --- through a shell

FIT = "fit() { printf 'step 1 loss 4.0\\nstep 2 loss 3.0\\n'; python3 -c 'import no_such_module'; }\n"
NO_MODULE = "exit code 0, but ModuleNotFoundError: No module named 'no_such_module'"
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("lines", "ended", "says"),
    [
        ("fit; echo end", "user_error", NO_MODULE),
        pytest.param("fit & wait", "user_error", NO_MODULE, marks=LONG),
        pytest.param("fit 2>&1 | tee fit.log", "user_error", NO_MODULE, marks=LONG),
        ("./missing || true\nsleep 6\necho worked", "done", "No such file or directory"),
        pytest.param("timeout 1 sleep 9; [ $? = 124 ] && exit 0", "done", "", marks=LONG),
        pytest.param("echo step 2/3; echo step 3/3 loss 2.0; kill -TERM $$; sleep 9", "done", "", marks=LONG),
    ],
    ids=["fails", "beside", "tee", "note", "timeout", "killed after its last step"],
)  # fmt: skip
def test_a_script_here_has_one_start_and_why_says_it(tmp_path: Path, lines: str, ended: str, says: str) -> None:
    (tmp_path / "fit.slurm").write_text(f"#!/bin/bash\n#SBATCH -t 7\n{FIT}{lines}\n")
    words = ("submit", "--cluster", "local", "--wait", "fit.slurm")
    in_process(*words, cwd=tmp_path, code=0 if ended == "done" else 3)
    run = newest()
    assert ([each.number for each in run.attempts()], run.attempt(1).ended()["ended"]) == ([1], ended)
    why = in_process("why", str(run.path)).stdout
    assert says in why
    (record,) = json.loads(in_process("report", "--json", str(run.path)).stdout)["records"]
    status = status_of(run)
    assert (status.gpus, status.gpu_hours, record["gpus"], record["gpu_hours"]) == (None,) * 4, "it asks for none"
    notes = json.loads(in_process("why", "--json", str(run.path)).stdout)["notes"]
    assert (record["ended"], [each for each in record["flags"] if "its log says" in each]) == (ended, notes)
    assert len(notes) == (ended == "done" and bool(says))
    for note in notes:
        assert note.startswith("exit code 0, but its log says ")
        assert f"note     {note}" in why


@pytest.mark.long
@pytest.mark.parametrize(
    ("lines", "begins_s", "follows_s", "ended"),
    [("no-such-trainer; true", 6, 0, "user_error"), ("sleep 6; no-such-trainer; true", 0, 15, "user_error")],
)
def test_a_slow_machine_changes_no_verdict(tmp_path: Path, monkeypatch, lines, begins_s, follows_s, ended) -> None:
    """Python takes so many seconds to start, for the script and for its watch."""
    slow = f'case "$*" in *program.start*) sleep {begins_s} ;; *script_watch*) sleep {follows_s} ;; esac'
    monkeypatch.setenv(
        "HPC_GPT_PYTHON", str(put(tmp_path / "python", f'#!/bin/sh\n{slow}\nexec {sys.executable} "$@"\n'))
    )
    (tmp_path / "fit.slurm").write_text(f"#!/bin/bash\n#SBATCH -t 7\n{lines}\n")
    in_process("submit", "--cluster", "local", "--wait", "fit.slurm", cwd=tmp_path, code=0 if ended == "done" else 3)
    assert newest().attempt(1).ended()["ended"] == ended


def test_a_program_of_ones_own_is_not_done_either(tmp_path: Path) -> None:
    lines = ["[engine]", 'name = "command"', "[command]", 'run = "python3 -c \\"import no_such_module\\" || true"']
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


@pytest.mark.long(but="first")
@pytest.mark.parametrize("submits", ['sbatch "$0"', 'sbatch --parsable "$0" >id'])
def test_a_script_that_queues_itself_is_not_done_here(tmp_path: Path, monkeypatch, submits: str) -> None:
    put(tmp_path / "sbatch", "#!/bin/sh\necho Submitted batch job 4711\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    guard = f'#!/bin/bash\n#SBATCH -t 7\nif [ -z "$SLURM_JOB_ID" ]; then\n  {submits}\n  exit\nfi\npython3 fit.py\n'
    (tmp_path / "fit.slurm").write_text(guard)
    done = in_process("submit", "--cluster", "local", "--wait", "fit.slurm", cwd=tmp_path, code=3)
    job = "the script queued job 4711, and" if "parsable" not in submits else "line 4 of the script calls sbatch"
    assert f"exit code 0, but {job}" in done.stderr


@pytest.mark.long
def test_a_script_that_queues_another_job_is_done_here(tmp_path: Path, monkeypatch) -> None:
    put(tmp_path / "sbatch", "#!/bin/sh\necho Submitted batch job 4711\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "fit.slurm").write_text("#!/bin/bash\n#SBATCH -t 7\necho trained\nsbatch evaluate.slurm\n")
    in_process("submit", "--cluster", "local", "--wait", "fit.slurm", cwd=tmp_path, code=0)
