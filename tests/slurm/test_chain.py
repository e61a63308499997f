"""Chains on a real Slurm cluster: forecast, several jobs to the end in both modes, a budget, another layout."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder, job_ids
from tests.slurm.launcher import ENDLESS, LONG_LEAD, SINGLE, STEPS, UNSAVED, Job, Launcher, paused
from tests.slurm.references import single
from tests.slurm.stories import Teller, slow_story, story

# The budget of one GPU, in seconds. The last of them, the lead of the signal, are for saving.
BUDGET_S, LEAD_S = 45, 10
# What a slow twin took from its job's start to its first step.
START_S = 4
# Where a run goes on by jobs that wait for each other.
CHAINED = 'chain = "singleton"\n'


REFUSED = """\
#!/bin/bash
#SBATCH --job-name=refused -N 1 --time=9
touch trains
until [ -e go ]; do sleep 0.1; done
echo "step 1 loss 2.5"
exit 7
"""


def slow_twin(job: Job, logs: Path, step_s: float, save_s: float, site: str = "site") -> RunFolder:
    """A copy of a run in a logs folder of its own that says it took so long, at that site."""
    run = RunFolder(logs / job.run.path.parent.name / job.run.run_id)
    shutil.copytree(job.run.path, run.path)
    for attempt in run.attempts():
        lines = [json.loads(line) for line in attempt.metrics.read_text().splitlines()]
        for line in lines:
            line["time"] = attempt.started()["started"] + START_S + line["step"] * step_s
            line["step_s"] = step_s
            line["save_s"] = line["save_s"] and save_s
        attempt.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = (run.path / "resolved.json").read_text().replace('"name": "site"', f'"name": "{site}"')
    (run.path / "resolved.json").write_text(text)
    return run


def queued(launcher: Launcher, name: str) -> list[str]:
    return launcher.cluster.run("squeue", "-h", "-o", "%i", f"--name={name}").stdout.split()


def end_link(job: Job, attempt: int) -> None:
    """The signal of the time limit, once the attempt has stopped itself."""
    job.wait_paused(attempt)
    current = str(job.run.attempt(attempt).started()["job_id"])
    job.cluster.run("scancel", "--signal=USR2", current, check=True)
    job.hears(signal.SIGUSR2)
    job.wait(f"end of attempt {attempt}", job.run.attempt(attempt).ended)


@slow_story
def by_walltime(teller: Teller) -> Job:
    """A singleton run that Slurm itself signals at its time limit."""
    site = teller.launcher.profile("chained", CHAINED)
    job = teller.launcher.submit("--cluster", site, *SINGLE, *LONG_LEAD, **paused(8))
    job.wait_paused()
    job.near_its_limit()
    job.hears(signal.SIGUSR2)
    job.wait("the second end", lambda: len(job.run.attempts()) == 2 and job.run.attempt(2).ended())
    job.wait("its script's end", lambda: teller.launcher.state(job) != "running")
    return job


@slow_story
def over_budget(teller: Teller) -> Job:
    """A run without end that its budget ends."""
    hours = BUDGET_S / 3600
    asked = ("--max-gpu-hours", f"{hours:.6f}", "--set", f"job.signal_lead_s={LEAD_S}")
    # In logs of its own, no earlier run says how long a start takes: on a busy machine more than the budget.
    logs = {"HPC_GPT_LOGS": str(teller.launcher.folder / "over-budget")}
    job = teller.launcher.submit(*SINGLE, *asked, *ENDLESS, *UNSAVED, **paused(3), **logs)
    # A stopped rank leaves the machine to others, and looks at the clock at its next step. On a busy machine the time
    # may be over before it stops.
    job.wait("its start", lambda: job.run.attempts() and job.run.attempt(1).started())
    over = job.run.attempt(1).started()["started"] + BUDGET_S - LEAD_S
    job.wait("the end of the budget", lambda: job.last_step(1) > 0 and time.time() > over)
    job.wait("its end", lambda: job.resume() or job.run.attempt(1).ended())
    job.wait_end()
    return job


@story
def refused(teller: Teller) -> list[tuple[Job, str]]:
    """A rendered run and a job script that are to be requeued, but Slurm refuses. Gives their signals' classes."""
    run = teller.launcher.submit(*SINGLE, **paused(8))
    folder = teller.launcher.place("refused")
    (folder / "train.slurm").write_text(REFUSED)
    own = {"HPC_GPT_CLUSTER": "", "HPC_GPT_EXPERIMENT": ""}
    script = teller.launcher.submit("train.slurm", cwd=folder, **own)
    run.wait_paused()
    script.wait("its start", (folder / "trains").exists)
    for job in (run, script):
        job.cluster.run("scontrol", "update", f"jobid={job.id}", "requeue=0", check=True)
    job = run
    job.cluster.run("scancel", "--signal=USR2", job.id, check=True)
    job.hears(signal.SIGUSR2)
    (folder / "go").touch()
    for job in (run, script):
        job.wait("its end", lambda job=job: job.slurm_state not in ("RUNNING", "COMPLETING"))
    return [(run, "walltime"), (script, "error")]


@story
def singletons(teller: Teller) -> tuple[Job, dict[str, str]]:
    """The same by jobs that are all submitted at once. Gives where its logs are, too."""
    launcher = teller.launcher
    logs = launcher.folder / "singletons"
    site = launcher.profile("chained", CHAINED)
    slow_twin(teller(single), logs, 6.0, 1.0, site)
    there = {"HPC_GPT_LOGS": str(logs)}
    asked = (*SINGLE, "--cluster", site, "--until", f"steps={STEPS}", "--time", "1")
    said = launcher.run("submit", *asked, "--dry-run", "--script", **there)[1]
    found = re.search(r"forecast: (\d+) jobs of 1 by singleton jobs", said)
    assert found, said
    jobs = int(found[1])
    assert jobs >= 3
    job = launcher.submit(*asked, **there, **paused(8, 16))
    ids = job_ids(job.run)
    for each in ids:  # the forecast wanted short ones; nothing here is to depend on the time that they take
        teller.cluster.run("scontrol", "update", f"jobid={each}", "TimeLimit=60", check=True)
    assert (
        [line["link"] for line in job.run.submissions()]
        == list(range(1, jobs + 1))
        == [number + 1 for number, _ in enumerate(ids)]
    )
    assert set(queued(launcher, f"tiny-{job.run.run_id}")) <= set(ids)
    for attempt in (1, 2):
        end_link(job, attempt)
        if attempt == 1:
            (row,) = json.loads(launcher.run("status", ids[-1], "--json", **there)[0])["runs"]
            assert (row["run"], row["state"]) == (job.run.run_id, row["state"])
            assert row["state"] in ("pending", "running")
    job.wait("the last end", lambda: len(job.run.attempts()) == 3 and job.run.attempt(3).ended())
    job.wait("an empty queue", lambda: not queued(launcher, f"tiny-{job.run.run_id}"))
    return job, there


@pytest.mark.long
@pytest.mark.story(singletons, single)
def test_singleton_links_are_sent_at_once_and_leave_none_behind(launcher, told):
    job, there = told(singletons)
    ids = job_ids(job.run)
    assert job.ended() == ["walltime", "walltime", "done"], job.log()
    assert [str(attempt.started()["job_id"]) for attempt in job.run.attempts()] == ids[:3]
    assert job.losses() == told(single).losses()
    for any_id in ids:
        (row,) = json.loads(launcher.run("status", any_id, "--json", **there)[0])["runs"]
        assert (row["run"], row["state"]) == (job.run.run_id, "done")


@pytest.mark.story(single)
def test_cancelling_one_link_ends_them_all(launcher: Launcher, told: Teller, tmp_path: Path) -> None:
    site = launcher.profile("chained", CHAINED)
    slow_twin(told(single), tmp_path, 6.0, 1.0, site)
    there = {"HPC_GPT_LOGS": str(tmp_path)}
    job = launcher.submit(*SINGLE, "--cluster", site, "--until", f"steps={STEPS}", "--time", "1", "--set",
                          'job.sbatch=["--begin=now+1hour"]', **there)  # fmt: skip
    ids = job_ids(job.run)
    assert len(queued(launcher, f"tiny-{job.run.run_id}")) == len(ids) >= 3
    launcher.run("cancel", ids[-1], "--yes", **there)
    job.wait("an empty queue", lambda: not queued(launcher, f"tiny-{job.run.run_id}"))
    (row,) = json.loads(launcher.run("status", ids[0], "--json", **there)[0])["runs"]
    assert row["state"] == "cancelled"


@pytest.mark.long
@pytest.mark.story(over_budget)
def test_a_budget_ends_a_link_saved_and_no_other_begins(launcher: Launcher, told: Teller) -> None:
    job = told(over_budget)
    assert job.ended() == ["budget"], job.log()
    (attempt,) = job.run.attempts()
    step = attempt.ended()["step"]
    assert (job.run.checkpoints / f"step-{step:08d}" / "complete.json").exists()
    assert max(job.metrics(1)) == step
    assert launcher.state(job) == "budget"
    _, said = launcher.run("submit", "--resume", str(job.run.path), code=2)
    assert "are spent" in said
    # Nor does a job start that was already in the queue.
    started = launcher.sbatch(job.run.job_script, "--output=/dev/null", HPC_GPT_RUN=str(job.run.path))
    again = Job(launcher.cluster, job.run, started)
    again.wait_end()
    assert not job.run.attempts()[-1].metrics.exists(), "no rank has started"
    assert launcher.state(again) == "budget"


@pytest.mark.long  # test_runs has the time limit, the test above the jobs
@pytest.mark.story(by_walltime, single)
def test_a_singleton_chain_goes_on_at_its_time_limit(launcher: Launcher, told: Teller) -> None:
    """One link was forecast, so the first sends the second itself."""
    job = told(by_walltime)
    assert job.ended() == ["walltime", "done"]
    assert len(job_ids(job.run)) == 2
    assert job.losses() == told(single).losses()
    assert launcher.state(job) == "done"


@pytest.mark.long
@pytest.mark.story(refused)
def test_a_requeue_that_slurm_refuses_is_said_with_a_way_out(launcher: Launcher, told: Teller) -> None:
    for job, ended in told(refused):
        assert job.ended() == [ended], job.log()
        message = job.run.attempt(1).requeue_refused()
        assert "disabled" in message, job.log()
        refusal = f'Slurm refuses the requeue ({message}): chain = "singleton" in the profile needs none'
        for said in (launcher.run("status", str(job.run.path))[0], launcher.run("why", str(job.run.path))[0]):
            assert refusal in " ".join(said.split()), said
            assert "continues" not in said
        assert launcher.state(job) == ended
