"""A sweep on a real cluster: an array and a job of its own, and what happens to one run of it happens to no other."""

import json
import re
import signal

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.slurm.launcher import Job, Launcher
from tests.slurm.stories import Teller, storied

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


def states(launcher: Launcher, *names: str) -> dict[str, str]:
    """Row -> state, as `status --json` says."""
    return {run["row"]: run["state"] for run in json.loads(launcher.run("status", "--json", *names)[0])["runs"]}


@pytest.mark.long
@storied
def test_equal_directives_are_one_array_and_status_is_one_line(teller: Teller) -> None:
    """A run fails, one is requeued, one is cancelled, and no other notices; then Ctrl-C stops what is left."""
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
    sweep, array = found.groups()
    assert "not impossible: never\n" in said
    assert re.search(r"^not queued: row 'refused': sbatch refused the job: .*Invalid feature", said, re.MULTILINE)
    jobs = {}
    for row in ("failing", "cancelled", "requeued", "alone"):
        (folder,) = launcher.logs.glob(f"table-{row}/*")
        run = RunFolder(folder)
        jobs[row] = Job(launcher.cluster, run, str(run.submissions()[-1]["job_id"]))
    failing, cancelled, requeued, alone = jobs.values()
    try:
        # What is alike is one array, and status has one line of it.
        assert [job.id for job in (failing, cancelled, requeued)] == [f"{array}_{number}" for number in range(3)]
        assert "_" not in alone.id
        shown = cancelled.shown()
        assert (shown["JobName"], shown["ArrayTaskThrottle"]) == ("table", "3")
        assert cancelled.run.job_script.read_text() == launcher.run("render", str(path), "--row", "cancelled")[0]
        (line,) = [line for line in launcher.run("status", "--all")[0].splitlines() if " table" in line]
        assert line.split()[:4] == [sweep, "table", "5", "runs"]
        assert set(states(launcher, array)) == {"failing", "cancelled", "requeued"}
        opened = launcher.run("status", sweep[:-1])[0]
        assert all(f"  table-{row} " in opened for row in jobs)
        for job in (cancelled, requeued):
            job.wait_step(2)
        launcher.cluster.run("scancel", "--signal=USR2", requeued.id, check=True)
        requeued.wait("the first end", requeued.run.attempt(1).ended)
        for job in (failing, alone):
            job.wait("its end", job.run.attempt(1).ended)
        requeued.wait_step(max(requeued.metrics(1)) + 1, attempt=2)
        assert states(launcher, sweep) == {
            "failing": "nan", "cancelled": "running", "alone": "done", "requeued": "running", "refused": "refused",
        }  # fmt: skip
        assert [attempt.started()["job_id"] for attempt in requeued.run.attempts()] == [requeued.id] * 2
        assert requeued.run.attempt(1).ended()["ended"] == "walltime"
        said, _ = launcher.run("cancel", cancelled.id, "--yes")
        assert f"job {cancelled.id}" in said
        cancelled.wait("its end", cancelled.run.attempt(1).ended)
        assert requeued.slurm_state == "RUNNING"
        waiting.send_signal(signal.SIGINT)
        words, _ = waiting.communicate()
        assert waiting.returncode == 130, words
        assert states(launcher, sweep) == {
            "failing": "nan", "cancelled": "cancelled", "alone": "done", "requeued": "stopped", "refused": "refused",
        }  # fmt: skip
        assert [len(job.run.attempts()) for job in (failing, cancelled, alone, requeued)] == [1, 1, 1, 2]
        assert failing.run.path.joinpath(f"slurm-{failing.id}.out").is_file()
    finally:
        launcher.cluster.run("scancel", *(job.id for job in jobs.values()))
        waiting.kill()
        waiting.wait()
