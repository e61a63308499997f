"""Runs on a real Slurm cluster: submitted, handed to plain sbatch, interrupted in every way, always the same losses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hpc_gpt.runs.run_folder import RunFolder
from tests.slurm.cluster import Cluster, send
from tests.slurm.launcher import Job, Launcher, any_has_pending, pause_after

STEPS = 40


class SlowEnds(NamedTuple):
    """Runs that Slurm takes its time with; the other tests go on meanwhile."""

    walltime: Job
    dead_nodes: dict[str, tuple[Job, str]]


@pytest.fixture(scope="module", autouse=True)
def slow_ends(launcher: Launcher, small: Cluster) -> Iterator[SlowEnds]:
    """A run whose two minutes are running out, and two that lose a node: the one with the script, and the other.

    They begin before all else. The dead nodes' names are beside their jobs.
    """
    walltime = launcher.submit("--time", "2")
    losing = {which: launcher.submit() for which in ("batch host", "other node")}
    pause_after([(walltime, 3), *((job, 13) for job in losing.values())])
    dead_nodes, frozen = {}, []
    for number, (which, job) in enumerate(losing.items()):
        victim = job.nodes()[number]
        frozen += small.cut_power(victim)
        dead_nodes[which] = (job, victim)
    yield SlowEnds(walltime, dead_nodes)
    for pid in frozen:
        send(pid, signal.SIGKILL)
    for _, victim in dead_nodes.values():
        small.start_slurmd(victim)


@pytest.fixture(scope="module")
def unbroken(launcher: Launcher) -> RunFolder:
    """The run that was not interrupted, by `submit --wait`: what the others are compared with."""
    said, words = launcher.run("submit", "--wait")
    run = RunFolder(next((launcher.logs / "tiny").glob(said.split()[1])))
    assert "next: hpc-gpt report" in words
    return run


def losses(job: Job) -> dict[int, float]:
    """Step -> loss over all attempts. A step that was done twice must have had the same loss."""
    merged: dict[int, float] = {}
    for attempt in job.run.attempts():
        for step, loss in job.metrics(attempt.number).items():
            assert merged.setdefault(step, loss) == loss, f"step {step} differs between attempts"
    return merged


def ended(job: Job) -> list[str]:
    return [str(attempt.ended().get("ended")) for attempt in job.run.attempts()]


def history(job: Job) -> list[str]:
    """The state of each start of the job in Slurm's accounting."""
    return job.cluster.run("sacct", "-D", "-X", "-n", "-P", "-o", "State", "-j", job.id).stdout.split()


def test_submit_trains_tp2_pp2_on_two_nodes(launcher: Launcher, unbroken: RunFolder) -> None:
    job = launcher.job_of(unbroken)
    found = losses(job)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert found[STEPS] < found[1] - 0.1, "it learns"
    assert len(job.nodes()) == 2
    assert ended(job) == ["done"]
    assert job.slurm_state == "COMPLETED"
    assert launcher.state(job) == "done"


def test_render_sbatch_and_the_run_folder_have_the_same_bytes(launcher: Launcher, unbroken: RunFolder) -> None:
    rendered, _ = launcher.run("render")
    kept = unbroken.job_script.read_text()
    given = launcher.cluster.run("scontrol", "write", "batch_script", launcher.job_of(unbroken).id, "-").stdout
    assert rendered == kept == given.removesuffix("\n") + "\n"


def test_plain_sbatch_trains_the_same(launcher: Launcher, unbroken: RunFolder, tmp_path: Path) -> None:
    """No submit before it, no HPC_GPT_LOGS: the script makes its own run folder beside itself, in an odd place."""
    folder = tmp_path / 'it\'s a $HOME; `odd` "folder"'
    folder.mkdir()
    script, _ = launcher.run("render")
    (folder / "job.sh").write_text(script)
    environment = {key: text for key, text in launcher.environment.items() if not key.startswith("HPC_GPT_")}
    environment["HPC_GPT_PYTHON"] = sys.executable
    done = subprocess.run(
        ["sbatch", "--parsable", "job.sh"], env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    job_id = done.stdout.strip()
    job = Job(launcher.cluster, RunFolder(folder / "logs" / "tiny" / job_id), job_id)
    job.wait_end()
    assert losses(job) == losses(launcher.job_of(unbroken))
    assert job.run.job_script.read_text() == script
    assert launcher.state(job) == "done"


@pytest.mark.parametrize("answers", ["at once", "late"])
def test_preemption_saves_requeues_once_and_resumes(
    launcher: Launcher, unbroken: RunFolder, small: Cluster, answers: str
) -> None:
    """Slurm calls the job SIGNALING, not RUNNING, as long as one of its nodes has not answered."""
    job = launcher.submit("--partition", "low")
    pause_after([(job, 13)])
    nodes = ",".join(job.nodes())
    slow = [small.slurmds[job.nodes()[1]].pid] if answers == "late" else []
    for pid in slow:
        send(pid, signal.SIGSTOP)
    asked = ("--parsable", "-p", "high", "-w", nodes, "-N2", "--gres=gpu:4", "-o", "/dev/null", "--wrap", "sleep 1")
    preemptor = small.run("sbatch", *asked, check=True).stdout.strip()
    if slow:
        job.wait("SIGTERM", lambda: "CANCELLED AT" in job.log())
        # The slow node's ranks have not heard of it.
        job.resume()
        job.wait("the first attempt's end", job.run.attempt(1).ended)
    for pid in slow:
        send(pid, signal.SIGCONT)
    job.wait_end()
    assert ended(job) == ["preempted", "done"], job.log()
    assert "COMPLETED" in small.run("scontrol", "show", "job", preemptor).stdout
    assert job.restarts == 1
    assert len(history(job)) == 2
    assert losses(job) == losses(launcher.job_of(unbroken))
    assert min(job.metrics(2)) == max(job.metrics(1)) + 1, "it goes on where it was, not from a periodic save"


def test_scancel_hpc_gpt_cancel_and_ctrl_c_leave_no_pending_job(launcher: Launcher) -> None:
    endless = ("--set", f"train.steps={10**6}", "--set", "train.save_every=0")
    waiting, by_ctrl_c = launcher.submit_and_wait(*endless)
    by_scancel, by_cancel = (launcher.submit(*endless) for _ in range(2))
    jobs = (by_scancel, by_cancel, by_ctrl_c)
    for job in jobs:
        job.wait_step(2)
    launcher.cluster.run("scancel", by_scancel.id, check=True)
    said, _ = launcher.run("cancel", by_cancel.id, "--yes")
    assert by_cancel.id in said
    waiting.send_signal(signal.SIGINT)
    words, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 130, words
    for job in jobs:
        job.wait_end("CANCELLED", "COMPLETED")
        job.wait("ended.json", job.run.attempts()[-1].ended)
        assert job.restarts == 0
        assert len(job.run.attempts()) == 1
        assert not job.run.attempts()[-1].requeue.exists()
    queue = launcher.cluster.run("squeue", "-h", "-o", "%i", "-j", ",".join(job.id for job in jobs)).stdout.split()
    assert queue == []
    assert [launcher.state(job) for job in jobs] == ["cancelled", "cancelled", "stopped"]
    assert (by_cancel.run.path / f"cancelled.{by_cancel.id}").exists()


def test_a_waiting_job_is_cancelled(launcher: Launcher) -> None:
    job = launcher.submit("--set", 'job.sbatch=["--begin=now+1hour"]')
    assert launcher.state(job) == "pending"
    launcher.run("cancel", job.run.run_id, "--yes")
    job.wait_end("CANCELLED")
    assert launcher.state(job) == "cancelled"


def test_ctrl_c_while_the_job_waits_cancels_it(launcher: Launcher) -> None:
    waiting, job = launcher.submit_and_wait("--set", 'job.sbatch=["--begin=now+1hour"]')
    waiting.send_signal(signal.SIGINT)
    words, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 130, words
    job.wait_end("CANCELLED")
    assert launcher.state(job) == "cancelled"


def test_one_dead_rank_ends_them_all_and_wait_exits_3_when_a_retry_goes_no_further(launcher: Launcher) -> None:
    endless = ("--set", f"train.steps={10**6}", "--set", "train.save_every=0", "--set", "job.retry_pause_s=1")
    waiting, job = launcher.submit_and_wait(*endless)
    for attempt in (1, 2):
        job.wait_step(2, attempt)
        victim = job.ranks()[1]
        rank = re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{victim}/environ").read_bytes())
        assert rank
        send(victim, signal.SIGKILL)
        job.wait("the verdict", job.run.attempt(attempt).verdict)
    words, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 3, words
    assert job.ranks() == []
    assert ended(job) == ["error", "error"]
    assert launcher.state(job) == "no_progress"
    assert "Error:" in words
    assert "hint:" in words
    assert job.slurm_state == "FAILED", "the script ends with the rank's own code"
    said, _ = launcher.run("why", job.run.run_id)
    assert f"rank     {int(rank[1])}\n" in said
    assert "nothing says who killed it" in said


def test_hostile_names_and_an_enclosing_job_do_no_harm(launcher: Launcher, tmp_path: Path, unbroken: RunFolder) -> None:
    """Two runs of one experiment at once, from an odd folder to an odd folder, inside what looks like another job."""
    odd = tmp_path / "a b'c\"d $(touch pwned) `touch pwned`; é 100% %j"
    odd.mkdir()
    name = "x; rm -rf ~ $(touch pwned) 'q' \"d\" #no"
    comment = name + " \\ back\\slash %j"
    enclosing = {
        "SLURM_JOB_ID": "1", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_NTASKS": "1", "SBATCH_PARTITION": "nowhere",
        "RANK": "3", "WORLD_SIZE": "9", "MASTER_PORT": "1", "SLURM_RESTART_COUNT": "5",
    }  # fmt: skip
    jobs = [
        launcher.submit("-J", name, "--comment", comment, cwd=odd, HPC_GPT_LOGS=str(odd / "logs"), **enclosing)
        for _ in range(2)
    ]
    assert jobs[0].run.path != jobs[1].run.path
    for job in jobs:
        shown = launcher.cluster.run("squeue", "-h", "-t", "all", "-j", job.id, "-o", "%j").stdout.rstrip("\n")
        assert shown == name
        assert (
            launcher.cluster.run("squeue", "-h", "-t", "all", "-j", job.id, "-o", "%k").stdout.rstrip("\n") == comment
        )
        job.wait_end()
        assert ended(job) == ["done"]
        assert losses(job) == losses(launcher.job_of(unbroken))
    assert not list(tmp_path.rglob("pwned"))
    assert not (launcher.folder / "pwned").exists()


def test_a_run_is_submitted_once_more(launcher: Launcher, unbroken: RunFolder) -> None:
    """Its folder keeps what was, and gains an attempt that finds nothing left to do."""
    before = {path: path.read_bytes() for path in unbroken.path.rglob("*") if path.is_file()}
    job = launcher.submit("--resume", unbroken.run_id)
    assert job.run.path == unbroken.path
    job.wait_end()
    assert ended(job) == ["done", "done"]
    changed = {path.name for path, text in before.items() if path.read_bytes() != text}
    assert changed <= {"submissions.jsonl", "record.json"}
    assert [line["job_id"] for line in unbroken.submissions()][1] == job.id


def test_walltime_saves_requeues_and_resumes(launcher: Launcher, slow_ends: SlowEnds, unbroken: RunFolder) -> None:
    job = slow_ends.walltime
    # Slurm lets stopped tasks go on when it signals them; if some version does not, the test does.
    job.wait("signal", lambda: job.run.attempt(1).ended() or any_has_pending(job.ranks(), signal.SIGUSR2), limit_s=150)
    job.resume()
    job.wait_end()
    assert ended(job) == ["walltime", "done"]
    assert job.restarts == 1
    assert history(job) == ["REQUEUED", "COMPLETED"]
    assert losses(job) == losses(launcher.job_of(unbroken))
    assert json.loads((job.run.attempt(2).folder / "trainer.json").read_text())["resumed_step"] == max(job.metrics(1))


@pytest.mark.parametrize("which", ["batch host", "other node"])
def test_a_dead_node_requeues_and_resumes(
    launcher: Launcher, slow_ends: SlowEnds, unbroken: RunFolder, which: str
) -> None:
    job, victim = slow_ends.dead_nodes[which]
    job.wait_end()
    assert ended(job) == ["node_failure", "done"]
    assert victim not in job.nodes()
    assert job.restarts == 1
    assert history(job) == ["NODE_FAIL", "COMPLETED"]
    first = json.loads(launcher.run("why", job.run.run_id, "--json")[0])["attempts"][0]
    assert (first["ended"], first["failed_node"]) == ("node_failure", victim)
    assert min(job.metrics(2)) in (11, 21, 31), "it goes on from a periodic save"
    assert losses(job) == losses(launcher.job_of(unbroken))
