"""Engine command on a real cluster: three real programs, one killed, one without a node, one at its time limit.

A bash loop, a train.py in nanoGPT's manner under torchrun, and transformers' Trainer under accelerate. Each continues
from its own checkpoints, and its losses are those of an unbroken run.
"""

import shutil
from collections import Counter

import pytest

from tests.around import around, events_of, named
from tests.command.mine import experiment, kill, loss_of_loop, losses, processes
from tests.slurm.launcher import LONG_LEAD, Job
from tests.slurm.stories import Teller, slow_storied, storied

STEPS = 40


def start(
    teller: Teller, name: str, story: str, *more: str, nodes: int = 1, step_s: str = "0", waits_at: str = "0"
) -> Job:
    tables = {"layout": {"gpus": nodes, "nodes": nodes}, "job": {"retry_pause_s": 1}}
    path = experiment(teller.launcher.place(f"{name}-{story}"), name, tables=tables)
    return teller.launcher.submit(str(path), *more, STEPS=str(STEPS), STEP_S=step_s, WAITS_AT=waits_at)


def unbroken(teller: Teller, name: str, nodes: int = 1) -> dict[int, float]:
    """Step -> loss of a run that is left alone."""
    job = start(teller, name, "unbroken", nodes=nodes)
    job.wait_end()
    return losses(job.run)


def check(job: Job, ended: str, expected: dict[int, float], saved: int) -> None:
    """The first attempt ended so, and the second went on from a checkpoint of that step or a later one, to the end."""
    job.wait_end()
    # A rank that lost the dead node's may write its own words first: the judge knows better.
    assert job.ended() == [ended, "done"], job.log()
    assert sorted(losses(job.run)) == list(range(1, STEPS + 1))
    assert losses(job.run) == expected
    begun = job.run.attempt(2).trainer()
    assert begun["resumed_step"] >= saved
    assert min(job.metrics(2)) == begun["resumed_step"] + 1
    assert not processes(job.run)


@storied
def test_a_killed_loop_goes_on_and_each_event_is_told_once(teller: Teller) -> None:
    """Its events are in its folder, with one for each checkpoint."""
    told = teller.launcher.folder / "loop-killed" / "told"
    job = start(teller, "loop", "killed", *around(told, "saved"), waits_at="13")
    job.wait_step(13)
    kill(job.run, "loop.sh")
    check(job, "error", {step: loss_of_loop(step) for step in range(1, STEPS + 1)}, saved=10)
    assert teller.launcher.state(job) == "done"
    events = events_of(job.run, told)
    saved = [event for event in events if event["event"] == "saved"]
    first, retried, second, ended = others = [event for event in events if event not in saved]
    assert named(others) == [("first_step", 1), ("retried", 1), ("first_step", 2), ("ended", 2)]
    for number, event in enumerate((first, second), 1):
        assert (event["ended"], event["cause"], event["next"]) == (None, None, "it trains")
        assert event["step"] >= min(job.metrics(number))
    cause = job.run.attempt(1).ended()["cause"]
    assert (retried["ended"], retried["cause"], retried["next"]) == ("error", cause, "attempt 2 in 1 s")
    assert retried["step"] == job.last_step(1)
    assert (ended["ended"], ended["cause"]) == ("done", f"{STEPS} of {STEPS} steps")
    assert (ended["next"], ended["hours_left"]) == (f"no other attempt: {ended['cause']}", 0.0)
    assert (ended["step"], ended["steps"], ended["loss"]) == (STEPS, None, loss_of_loop(STEPS))
    assert ended["gpu_hours"] > retried["gpu_hours"] > 0
    assert "notify:" not in job.log()
    kept = {event["step"]: event["checkpoint"] for event in saved}
    assert kept == {step: str(job.run.path / f"work/out/ckpt-{step}") for step in range(10, STEPS + 1, 10)}


@pytest.mark.long
@slow_storied
def test_nanogpts_manner_goes_on_without_its_first_node(teller: Teller) -> None:
    job = start(teller, "nano", "node", nodes=2, step_s="0.3")
    job.wait_step(13)
    with teller.cluster.without_power(job.nodes()[0]):
        job.wait_end()
    check(job, "node_failure", unbroken(teller, "nano", nodes=2), saved=10)


@pytest.mark.long
@slow_storied
def test_transformers_trainer_goes_on_after_its_limit(teller: Teller) -> None:
    """It does not save on a signal: it continues from its last save, if there is one by then."""
    job = start(teller, "hf", "limit", *LONG_LEAD, step_s="2")
    job.wait_step(2)
    job.near_its_limit()
    job.wait("the end of its first attempt", lambda: job.run.attempt(1).ended())
    job.far_from_its_limit()
    check(job, "walltime", unbroken(teller, "hf"), saved=0)


@pytest.mark.long
@storied
def test_one_process_a_gpu_knows_its_rank(teller: Teller) -> None:
    """Four tasks on two nodes, each of which says who it is."""
    show = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $SLURM_NODEID $MASTER_ADDR ${MASTER_PORT:+port}" >{run}/task-$RANK'
    tables = {"layout": {"gpus": 4, "nodes": 2}}
    path = experiment(teller.launcher.place("per-gpu"), "who", {"run": show, "per": "gpu"}, tables)
    job = teller.launcher.submit(str(path))
    job.wait_end()
    assert job.ended() == ["done"], job.log()
    found = [(job.run.path / f"task-{rank}").read_text().split() for rank in range(4)]
    assert found == [[str(rank), "4", str(rank % 2), str(rank // 2), "127.0.0.1", "port"] for rank in range(4)]


@pytest.mark.long
@storied
def test_one_process_a_job_sees_every_slot_of_it(teller: Teller) -> None:
    """It looks for its slots on two nodes of two GPUs as mpirun does, and starts a step on both."""
    show = (
        "hosts=$(scontrol show hostnames | wc -l); "
        'echo "$SLURM_NNODES $SLURM_TASKS_PER_NODE ${SLURM_STEP_ID:-no step} $hosts" >{run}/slots; '
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 bash -c 'touch {run}/on-$SLURMD_NODENAME'; "
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; command -v mpirun >/dev/null || exit 0; "
        "mpirun --bind-to none bash -c 'echo $OMPI_COMM_WORLD_SIZE $SLURMD_NODENAME >{run}/mpi-$OMPI_COMM_WORLD_RANK'"
    )
    tables = {"layout": {"gpus": 4, "nodes": 2}}
    path = experiment(teller.launcher.place("per-job"), "slots", {"run": show, "per": "job"}, tables)
    job = teller.launcher.submit(str(path))
    job.wait_end()
    assert job.ended() == ["done"], job.log()
    run = job.run.path
    assert (run / "slots").read_text() == "2 2(x2) no step 2\n"
    assert len(list(run.glob("on-*"))) == 2
    if shutil.which("mpirun"):
        ranks = [(run / f"mpi-{rank}").read_text().split() for rank in range(4)]
        assert {size for size, _ in ranks} == {"4"}
        assert sorted(Counter(node for _, node in ranks).values()) == [2, 2], "its own slots of both nodes"
