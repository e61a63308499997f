"""A sweep on a real cluster: an array and a job of its own, and what happens to one run of it happens to no other."""

import json
import re
import signal
import subprocess
from dataclasses import dataclass

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.slurm.launcher import LIMIT_S, Job, Launcher
from tests.slurm.stories import Teller, story

# Slurm gives the last element of an array the array's own id: a requeue of that id would start every element again.
ROWS = """
[engine]
name = "ddp"

[rows]
"failing" = {{ train.lr = 1e30, train.clip = 0.0, train.max_bad_steps = 1 }}
"impossible" = {{ impossible = "never" }}
"refused" = {{ job.constraint = "no-such-feature" }}
"cancelled" = {{ train.steps = {endless} }}
"alone" = {{ train.steps = 3, train.warmup_steps = 2, job.time = "00:05:00" }}
"requeued" = {{ train.steps = {endless} }}
"""


@dataclass
class Sweep:
    """What `submit --sweep --wait` made, that command, and what Slurm said of the array."""

    waiting: subprocess.Popen[str]
    id: str
    array: str
    jobs: dict[str, Job]
    shown: str


@story
def sweep(teller: Teller) -> Sweep:
    launcher = teller.launcher
    base = launcher.experiment.read_text().replace('name = "tiny"', 'name = "table"')
    base = base.replace("gpus = 4, tp = 2, pp = 2", "gpus = 1").replace("layers = 4", "layers = 1")
    path = launcher.folder / "table.toml"
    base = base.replace("save_every = 10", "save_every = 0")  # steps are short here, and without end
    path.write_text(base + ROWS.format(endless=10**6))
    asked = ("submit", "--sweep", "--wait", "--max-parallel", "3", str(path))
    waiting, said, _ = launcher.start(*asked, until="^not queued")
    # Between the two, a busy cluster has when each can start.
    found = re.search(
        r"sweep (\S+): 5 runs of table(?:.*\n)+?submitted 3 runs as array (\d+)\n(?:.*\n)*?submitted \S+ as job", said
    )
    assert found, said
    assert "not impossible: never\n" in said
    assert re.search(r"^not queued: row 'refused': sbatch refused the job: .*Invalid feature", said, re.MULTILINE)
    jobs = {}
    for row in ("failing", "cancelled", "alone", "requeued"):
        (folder,) = launcher.logs.glob(f"table-{row}/*")
        run = RunFolder(folder)
        jobs[row] = Job(launcher.cluster, run, str(run.submissions()[-1]["job_id"]))
    shown = launcher.cluster.run("scontrol", "--oneliner", "show", "job", jobs["cancelled"].id).stdout
    made = Sweep(waiting, found[1], found[2], jobs, shown)
    try:
        each_on_its_own(launcher, made)
    finally:
        launcher.cluster.run("scancel", *(job.id for job in jobs.values()))
        waiting.kill()
        waiting.communicate()
    return made


def each_on_its_own(launcher: Launcher, sweep: Sweep) -> None:
    """A run fails, one is requeued, one is cancelled, and no other notices; then Ctrl-C stops what is left."""
    failing, cancelled, requeued = (sweep.jobs[row] for row in ("failing", "cancelled", "requeued"))
    for job in (cancelled, requeued):
        job.wait_step(2)
    launcher.cluster.run("scancel", "--signal=USR2", requeued.id, check=True)
    requeued.wait("the first end", requeued.run.attempt(1).ended)
    failing.wait("its end", lambda: failing.run.attempt(1).ended())
    sweep.jobs["alone"].wait("its end", lambda: sweep.jobs["alone"].run.attempt(1).ended())
    requeued.wait_step(max(requeued.metrics(1)) + 1, attempt=2)
    assert states(launcher, sweep.id) == {
        "failing": "nan", "cancelled": "running", "alone": "done", "requeued": "running", "refused": "refused",
    }  # fmt: skip
    assert [attempt.started()["job_id"] for attempt in requeued.run.attempts()] == [requeued.id] * 2
    assert requeued.run.attempt(1).ended()["ended"] == "walltime"
    assert [len(sweep.jobs[row].run.attempts()) for row in ("failing", "cancelled", "alone")] == [1, 1, 1]
    said, _ = launcher.run("cancel", cancelled.id, "--yes")
    assert f"job {cancelled.id}" in said
    cancelled.wait("its end", cancelled.run.attempt(1).ended)
    assert requeued.slurm_state == "RUNNING"
    sweep.waiting.send_signal(signal.SIGINT)
    words, _ = sweep.waiting.communicate(timeout=LIMIT_S)
    assert sweep.waiting.returncode == 130, words
    assert states(launcher, sweep.id) == {
        "failing": "nan", "cancelled": "cancelled", "alone": "done", "requeued": "stopped", "refused": "refused",
    }  # fmt: skip


def states(launcher: Launcher, *names: str) -> dict[str, str]:
    """Row -> state, as `status --json` says."""
    return {run["row"]: run["state"] for run in json.loads(launcher.run("status", "--json", *names)[0])["runs"]}


@pytest.mark.long
@pytest.mark.story(sweep)
def test_equal_directives_are_one_array_and_status_is_one_line(launcher: Launcher, told: Teller) -> None:
    made = told(sweep)
    numbers = {row: job.id for row, job in made.jobs.items()}
    alone = numbers.pop("alone")
    assert numbers == {row: f"{made.array}_{i}" for i, row in enumerate(("failing", "cancelled", "requeued"))}
    assert "_" not in alone
    (line,) = [line for line in launcher.run("status", "--all")[0].splitlines() if " table" in line]
    assert line.split()[:4] == [made.id, "table", "5", "runs"]
    assert set(states(launcher, made.array)) == set(numbers)
    found = states(launcher, made.id)
    assert (set(found), found["refused"]) == ({*numbers, "alone", "refused"}, "refused")
    opened = launcher.run("status", made.id[:-1])[0]
    assert all(f"  table-{row} " in opened for row in (*numbers, "alone"))
    rendered = launcher.run("render", str(launcher.folder / "table.toml"), "--row", "cancelled")[0]
    assert made.jobs["cancelled"].run.job_script.read_text() == rendered
    assert " JobName=table " in made.shown
    assert " ArrayTaskThrottle=3 " in made.shown


@pytest.mark.long
@pytest.mark.story(sweep)
def test_a_run_fails_is_requeued_and_is_cancelled_by_itself(launcher: Launcher, told: Teller) -> None:
    made = told(sweep)
    assert states(launcher, made.id) == {
        "failing": "nan", "cancelled": "cancelled", "alone": "done", "requeued": "stopped", "refused": "refused",
    }  # fmt: skip
    assert [len(made.jobs[row].run.attempts()) for row in ("failing", "cancelled", "alone", "requeued")] == [1, 1, 1, 2]
    failing = made.jobs["failing"]
    assert failing.run.path.joinpath(f"slurm-{failing.id}.out").is_file()
