"""Runs on a real Slurm cluster: submitted, handed to plain sbatch, interrupted in every way, always the same losses."""

import json
import os
import re
import signal
import sys
from datetime import datetime
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpc_gpt.core.files import read_json_lines, user_name
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.docs.pages import blocks
from tests.slurm.launcher import (
    ENDLESS,
    HELD,
    LONG_LEAD,
    PAIR,
    SAVED,
    SINGLE,
    STEPS,
    UNSAVED,
    Job,
    Launcher,
    paused,
)
from tests.slurm.references import single, unbroken
from tests.slurm.stories import Teller, slow_storied, storied

NAME = "x; rm -rf ~ $(touch pwned) 'q' \"d\" #no"
COMMENT = NAME + " \\ back\\slash %j"


@pytest.mark.story(unbroken)
def test_submit_trains_on_two_nodes_what_render_prints(launcher: Launcher, told: Teller) -> None:
    job = told(unbroken)
    found = job.losses()
    assert sorted(found) == list(range(1, STEPS + 1))
    assert found[STEPS] < found[1] - 0.1, "it learns"
    assert (len(job.nodes()), job.ended(), job.slurm_state) == (2, ["done"], "COMPLETED")
    assert launcher.state(job) == "done"
    rendered, _ = launcher.run("render", *PAIR)
    given = launcher.cluster.run("scontrol", "write", "batch_script", job.id, "-").stdout
    assert rendered == job.run.job_script.read_text() == given.removesuffix("\n") + "\n"


@pytest.mark.story(single)
def test_plain_sbatch_trains_and_its_starts_time_has_parts(launcher: Launcher, told: Teller) -> None:
    job = told(single)
    assert sorted(job.losses()) == list(range(1, STEPS + 1))
    assert launcher.state(job) == "done"
    found = json.loads((job.run.attempt(1).folder / "start.json").read_text())
    parts = found["start_parts"]
    assert sum(parts.values()) == pytest.approx(found["start_s"], rel=0.05)
    assert min(seconds for part, seconds in parts.items() if part != "staging") > 0
    began = datetime.fromisoformat(job.shown()["StartTime"]).timestamp()
    first_step = read_json_lines(job.run.attempt(1).metrics)[0]["time"]
    # Slurm's moment is a whole second, and the line of the first step is written after it.
    assert 0 < found["start_s"] < first_step - began + 1


@pytest.mark.long
@storied
def test_submit_trains_tp2_pp2_with_two_ranks_a_node(teller: Teller) -> None:
    job = teller.launcher.submit()
    job.wait_end()
    assert (max(job.losses()), len(job.nodes()), job.ended()) == (STEPS, 2, ["done"])


@pytest.mark.long(always=True)
@storied
def test_preemption_saves_requeues_once_and_resumes(teller: Teller) -> None:
    """It answers at once."""
    job = teller.launcher.submit("--partition", "low", *SINGLE, **paused(13))
    job.wait_paused()
    preemptor = job.preempt()
    job.hears(signal.SIGTERM)
    job.wait_end()
    assert job.ended() == ["preempted", "done"], job.log()
    assert "COMPLETED" in teller.cluster.run("scontrol", "show", "job", preemptor).stdout
    assert (job.restarts, len(job.history()), job.losses()) == (1, 2, teller(single).losses())
    assert min(job.metrics(2)) == max(job.metrics(1)) + 1, "it goes on where it was, not from a periodic save"


@pytest.mark.long
@storied
def test_scancel_hpc_gpt_cancel_and_ctrl_c_leave_no_pending_job(teller: Teller) -> None:
    launcher = teller.launcher
    asked = (*SINGLE, *ENDLESS, *UNSAVED)
    waiting, _, found = launcher.start("submit", "--wait", *asked, until=r"submitted (\S+) as job (\d+)")
    (folder,) = launcher.logs.glob(f"*/{found[1]}")
    by_ctrl_c = Job(launcher.cluster, RunFolder(folder), found[2])
    by_scancel, by_cancel = (launcher.submit(*asked) for _ in range(2))
    jobs = (by_scancel, by_cancel, by_ctrl_c)
    for job in jobs:
        job.wait_step(2)
    teller.cluster.run("scancel", by_scancel.id, check=True)
    assert by_cancel.id in launcher.run("cancel", by_cancel.id, "--yes")[0]
    waiting.send_signal(signal.SIGINT)
    words, _ = waiting.communicate()
    assert waiting.returncode == 130, words
    for job in jobs:
        job.wait_end("CANCELLED", "COMPLETED")
        job.wait("ended.json", job.run.attempts()[-1].ended)
        assert (job.restarts, len(job.run.attempts())) == (0, 1)
        assert job.run.attempts()[-1].ended()["requeue"] is False
    queue = ("squeue", "-h", "-o", "%i", "-j", ",".join(job.id for job in jobs))
    jobs[0].wait("an empty queue", lambda: not launcher.cluster.run(*queue).stdout.split())
    assert [launcher.state(job) for job in jobs] == ["cancelled", "cancelled", "stopped"]
    assert (by_cancel.run.path / f"cancelled.{by_cancel.id}").exists()
    for job in jobs[:2]:  # by Slurm's accounting, and by our own mark
        cause = json.loads(launcher.run("why", job.run.run_id, "--json")[0])["cause"]
        assert re.fullmatch(rf"{user_name(os.getuid())} cancelled it on \d{{4}}-\d\d-\d\d at \d\d:\d\d", cause)


def test_a_waiting_job_is_cancelled(launcher: Launcher) -> None:
    told = ("--set", "notify.command=cat >>$HPC_GPT_RUN/told", "--set", 'notify.on=["stopped", "failed"]')
    job = launcher.submit(*HELD, *told)
    assert launcher.state(job) == "pending"
    launcher.run("cancel", job.run.run_id, "--yes")
    job.wait_end("CANCELLED")
    assert launcher.state(job) == "cancelled"
    assert not (job.run.path / "told").exists()


@pytest.mark.long
@storied
def test_hostile_names_and_an_enclosing_job_do_no_harm(teller: Teller) -> None:
    """Two runs of one experiment at once, from an odd folder to an odd folder, inside what looks like another job."""
    folder = teller.launcher.folder / "hostile"
    (odd := folder / "a b'c\"d $(touch pwned) `touch pwned`; é 100% %j").mkdir(parents=True)
    enclosing = {
        "SLURM_JOB_ID": "1", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_NTASKS": "1", "SBATCH_PARTITION": "nowhere",
        "RANK": "3", "WORLD_SIZE": "9", "MASTER_PORT": "1", "SLURM_RESTART_COUNT": "5",
    }  # fmt: skip
    words = (*SINGLE, "-J", NAME, "--comment", COMMENT)
    jobs = [teller.launcher.submit(*words, cwd=odd, HPC_GPT_LOGS=str(odd / "logs"), **enclosing) for _ in range(2)]
    assert jobs[0].run.path != jobs[1].run.path
    for job in jobs:
        asked = ("squeue", "-h", "-t", "all", "-j", job.id, "-o")
        assert [teller.cluster.run(*asked, key).stdout.rstrip("\n") for key in ("%j", "%k")] == [NAME, COMMENT]
        job.wait_end()
        assert (job.ended(), job.losses()) == (["done"], teller(single).losses())
        assert "note: this is within job 1, but a new job is queued, with nodes of its own" in job.noted
    assert "within job" not in teller(single).noted
    assert not list(folder.rglob("pwned"))
    assert not (teller.launcher.folder / "pwned").exists()


@slow_storied
def test_walltime_saves_requeues_and_resumes(teller: Teller) -> None:
    """Slurm itself signals it at its time limit. Each kept checkpoint is evaluated, as while-it-runs.md says."""
    place = teller.launcher.place("evaluated")
    put_recipe(place)
    kept = ("save_every=5", "keep_last=1", "keep_every=10", "save_in_background=false")
    beside = [word for key in kept for word in ("--set", f"train.{key}")]
    beside += ["--set", "track.tensorboard=true", "--set", 'notify.on=["saved"]', "--set", "notify.timeout_s=60"]
    beside += ["--set", "notify.command=tee -a told | bash evaluate-each.sh"]
    job = teller.launcher.submit(*SINGLE, *LONG_LEAD, *beside, cwd=place, **paused(13))
    job.wait_paused()
    job.near_its_limit()
    job.hears(signal.SIGUSR2)
    job.far_from_its_limit()
    job.wait_end()
    assert job.ended() == ["walltime", "done"], job.log()
    assert (job.restarts, job.history()) == (1, ["REQUEUED", "COMPLETED"])
    assert job.losses() == teller(single).losses()
    assert json.loads((job.run.attempt(2).folder / "trainer.json").read_text())["resumed_step"] == max(job.metrics(1))
    # TensorBoard has been sent it over both attempts.
    events = EventAccumulator(str(job.run.path / "tensorboard"))
    events.Reload()
    assert {event.step: event.value for event in events.Scalars("loss")} == pytest.approx(job.losses())
    assert "track:" not in job.log()
    # [notify]: each checkpoint once, over both attempts; those of keep_every are evaluated by a job of their own.
    told = [json.loads(line) for line in (place / "told").read_text().splitlines()]
    saved = [each["step"] for each in told]
    # One that the next replaces within a second may have been removed before a look.
    assert saved == sorted(set(saved))
    assert {10, 20, STEPS} <= {*saved} <= {5, 10, max(job.metrics(1)), 15, 20, STEPS}
    assert {each["event"] for each in told} == {"saved"}
    assert all(each["checkpoint"] == str(job.run.checkpoints / f"step-{each['step']:08d}") for each in told)
    assert sorted(path.name for path in job.run.checkpoints.iterdir()) == [
        f"step-{step:08d}" for step in (10, 20, STEPS)
    ]
    assert not re.search("^notify: ", job.log(), re.MULTILINE), job.log()
    logs = [job.run.path / f"evaluate-{step}.log" for step in (10, 20)]
    job.wait("the evaluations", lambda: all(log.exists() and "\n" in log.read_text() for log in logs))
    jobs = [log.read_text().split("\n")[-2].split() for log in logs]
    assert [words[1:] for words in jobs] == [["1", "config.json", "model.safetensors"]] * 2
    assert len({job.id, *(words[0] for words in jobs)}) == 3
    assert not list(job.run.path.glob("evaluate-1[1-9].log"))


def put_recipe(folder: Path) -> None:
    """The two scripts of docs/while-it-runs.md in a folder, for each tenth step; the evaluation itself is a line with
    what it sees: the job, the training's job and the exported files."""
    each, evaluation = blocks("docs/while-it-runs.md", "bash")
    (folder / "evaluate-each.sh").write_text(each.replace("5000", "10"))
    shown = 'echo "$SLURM_JOB_ID ${SLURM_JOB_NUM_NODES}${HPC_GPT_RUN-}${SLURM_RESTART_COUNT-}" $(ls "$1/export-$2")'
    own = {"hpc-gpt": f"{sys.executable} -m hpc_gpt", 'python evaluate.py "$1/export-$2"': shown}
    for text, other in own.items():
        assert evaluation.count(text) == 1, text
        evaluation = evaluation.replace(text, other)
    (folder / "evaluate.slurm").write_text(evaluation)


@pytest.mark.long(always=True)
@slow_storied
def test_a_dead_node_requeues_and_resumes(teller: Teller) -> None:
    """The node with the script dies; test_race has one without."""
    job = teller.launcher.submit(*SINGLE, *SAVED, **paused(13))
    job.wait_paused()
    (victim,) = job.nodes()
    with teller.cluster.without_power(victim):
        job.wait_end()
    assert job.ended() == ["node_failure", "done"], job.log()
    assert victim not in job.nodes()
    assert (job.restarts, job.history()) == (1, ["NODE_FAIL", "COMPLETED"])
    first = json.loads(teller.launcher.run("why", job.run.run_id, "--json")[0])["attempts"][0]
    assert (first["ended"], first["failed_node"]) == ("node_failure", victim)
    assert min(job.metrics(2)) == 11, "it goes on from a periodic save"
    assert job.losses() == teller(single).losses()
