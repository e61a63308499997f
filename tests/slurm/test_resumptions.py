"""Job scripts resume on a real cluster: with torchrun, from each writer's checkpoints, and at the time limit."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.slurm.half_saves import PATTERNS
from tests.slurm.launcher import Job, Launcher

HERE = Path(__file__).parent
SCRIPT = "#!/bin/bash\n#SBATCH --job-name=fit -N 1 --ntasks=1 --time=9\n{line}\n"
AT_ONCE = ("--set", "job.restart_in_job=true", "--set", "job.retry_pause_s=0")
TORCHRUN = f"srun {sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 {HERE / 'resuming.py'}"
LOADED_NONE, SAVED_NONE = "the script loaded no checkpoint", "no checkpoint had been saved"


def submit(launcher: Launcher, folder: Path, line: str, *options: str) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fit.sh").write_text(SCRIPT.format(line=line))
    return launcher.submit(*options, "fit.sh", cwd=folder)


def wait_over(job: Job) -> None:
    """Waits for the verdict that ends the run: a job that was put back before it waits minutes in the queue."""
    job.wait("its end", lambda: any(each.verdict().get("go_on") is False for each in job.run.attempts()))


def text_of(launcher: Launcher, verb: str, job: Job) -> str:
    """The output of a verb about the run, with its lines joined."""
    return " ".join(launcher.run(verb, str(job.run.path))[0].split())


def spans(launcher: Launcher, job: Job) -> list[tuple[int, int]]:
    """(first, last step) of each attempt by the run's record."""
    (record,) = json.loads(launcher.run("report", "--json", str(job.run.path))[0])["records"]
    return [(each["first_step"], each["last_step"]) for each in record["attempts"]]


def check_never_loaded(launcher: Launcher, job: Job, last_steps: list[int], why: str) -> None:
    """The run has ended as no_progress, with the cause and the steps of each attempt in why, status and the record."""
    said = text_of(launcher, "why", job)
    number = len(last_steps)
    sentence = f"attempt {number} began at step 1 again, after {max(last_steps[:-1])}: {why}"
    assert "no_progress" in said
    assert sentence in said
    assert sentence in text_of(launcher, "status", job)
    for last in last_steps:
        assert f"steps 1-{last}; " in said
    assert spans(launcher, job) == [(1, last) for last in last_steps]


SOUND = ("older", "counts", "epochs")


@pytest.mark.long
def test_which_starts_of_a_torchrun_began_again(launcher: Launcher) -> None:
    place = launcher.place("torchrun")
    patterns = ("--checkpoints", "out/step-*.pt")
    jobs = {
        kind: submit(launcher, place / kind, f"{TORCHRUN} {kind}", *AT_ONCE, *patterns)
        for kind in ("never", "none", *SOUND)
    }
    for job in jobs.values():
        wait_over(job)
    for kind, last_steps, why in (("never", [14, 15, 16], LOADED_NONE), ("none", [14, 15], SAVED_NONE)):
        check_never_loaded(launcher, jobs[kind], last_steps, why)
    for kind in SOUND:
        said = text_of(launcher, "why", jobs[kind])
        assert len(jobs[kind].run.attempts()) == 3, said
        assert "again" not in said, kind
        assert jobs[kind].ended()[-1] == "done", said
    assert spans(launcher, jobs["older"]) == [(1, 14), (7, 20), (13, 24)]


@pytest.mark.long
def test_a_kill_in_a_save_of_each_writer(launcher: Launcher) -> None:
    place = launcher.place("half-saves")
    jobs = {}
    for writer, pattern in PATTERNS.items():
        line = f"srun {sys.executable} {HERE / 'half_saves.py'} {writer}"
        jobs[writer] = submit(launcher, place / writer, line, *AT_ONCE, "--checkpoints", pattern)
    for writer, job in jobs.items():
        wait_over(job)
        log = job.log()
        first, second = re.findall("(?m)^given (.*)", log)
        assert (first, second.split()[1]) == ("none 0", "10"), (writer, log)
        assert (job.ended(), spans(launcher, job)) == (["error", "done"], [(1, 20), (11, 30)]), writer
        assert "the given checkpoint can be read" in log, writer


# Prints a step each tenth of a second, and never loads.
FORGETFUL = """\
import time
for step in range(1, 100000):
    print(f"step {step} loss {9 - step / 1e5:.3f}", flush=True)
    time.sleep(0.1)
"""


@pytest.mark.long
def test_two_time_limits_of_a_script_that_never_loads(launcher: Launcher) -> None:
    place = launcher.place("forgetful") / "run"
    job = submit(launcher, place, f"srun {sys.executable} -c '{FORGETFUL}'")
    for attempt in (1, 2, 3):
        job.wait_step(5, attempt)
        if attempt > 1:
            reached = max(job.last_step(earlier) for earlier in range(1, attempt))
            again = f"attempt {attempt} began at step 1 again, after {reached}: {LOADED_NONE}"
            assert again in text_of(launcher, "status", job), "while it runs"
        launcher.cluster.run("scontrol", "update", f"jobid={job.id}", "EndTime=now+5", check=True)
        ended = job.run.attempt(attempt)
        job.wait(f"the end of attempt {attempt}", lambda ended=ended: ended.verdict())
        if ended.verdict()["go_on"]:
            launcher.cluster.run("scontrol", "update", f"jobid={job.id}", "TimeLimit=9", check=True)
            job.start_soon()
    wait_over(job)
    assert job.ended()[:3] == ["walltime"] * 3
    why = text_of(launcher, "why", job)
    assert "no_progress" in why
    assert again in why
    assert spans(launcher, job) == [(1, job.last_step(attempt)) for attempt in (1, 2, 3)]
