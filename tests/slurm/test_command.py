"""Engine command on a real cluster: three real programs, each killed, without a node, at its time limit, and requeued.

A bash loop, a train.py in nanoGPT's manner under torchrun, and transformers' Trainer under accelerate. Each continues
from its own checkpoints, and its losses are those of an unbroken run.
"""

import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable

import pytest

from hpc_gpt.core.runs.after_jobs import after_table, list_after
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.around import around, curve, events_of, named
from tests.command.mine import experiment, kill, loss_of_loop, losses, processes
from tests.processes import command_of, send
from tests.slurm.launcher import LONG_LEAD, Job, Launcher
from tests.slurm.stories import Story, Teller, slow_story, story
from tests.torture.checks import settled_class

STEPS = 40
# A program of each kind, its part that a fault is for, and its nodes.
SCRIPTS = {"loop": "loop.sh", "nano": "train.py", "hf": "hf_train.py"}
NODES = {"loop": 1, "nano": 2, "hf": 1}


def start(teller: Teller, name: str, story: str, *more: str, step_s: str = "0.1") -> Job:
    folder = teller.launcher.place(f"{name}-{story}")
    gpus = NODES[name]
    tables = {"layout": {"gpus": gpus, "nodes": NODES[name]}, "job": {"retry_pause_s": 1}}
    path = experiment(folder, name, tables=tables)
    return teller.launcher.submit(str(path), *more, STEPS=str(STEPS), STEP_S=step_s)


def killed(name: str) -> Callable[[Teller], Job]:
    """Its program gets SIGKILL. Its events are in its folder, and the last checkpoint gets a job."""

    def tell(teller: Teller) -> Job:
        after = ("--set", "after.run=basename {checkpoint}", "--set", "after.every=0")
        job = start(teller, name, "killed", *around(teller.launcher.folder / f"{name}-killed" / "told"), *after)
        job.wait_step(13)
        kill(job.run, SCRIPTS[name])
        job.wait_end()
        job.wait("the job after its last checkpoint", lambda: any(each.is_over for each in list_after(job.run.path)))
        return job

    return tell


def without_a_node(name: str) -> Callable[[Teller], Job]:
    """Its first node loses its power."""

    def tell(teller: Teller) -> Job:
        job = start(teller, name, "node", step_s="0.3")
        job.wait_step(13)
        with teller.cluster.without_power(job.nodes()[0]):
            job.wait_end()
        return job

    return tell


def at_its_limit(name: str) -> Callable[[Teller], Job]:
    """Slurm itself signals it ahead of its time limit."""

    def tell(teller: Teller) -> Job:
        job = start(teller, name, "limit", *LONG_LEAD, step_s="2")
        job.wait_step(2)
        job.near_its_limit()
        job.wait("the end of its first attempt", lambda: job.run.attempt(1).ended())
        job.far_from_its_limit()
        job.wait_end()
        return job

    return tell


FAULTS = {"killed": killed, "node": without_a_node, "limit": at_its_limit}
# One fault of one program in `make test`, the others in `make test-all`.
QUICK = {("loop", "killed")}


def of(name: str, fault: str) -> Story[Job]:
    tell = FAULTS[fault](name)
    tell.__name__ = f"{name}_{fault}"
    return (slow_story if fault != "killed" else story)(tell)


@story
def unbroken_nano(teller: Teller) -> Job:
    job = start(teller, "nano", "unbroken", step_s="0")
    job.wait_end()
    return job


@story
def unbroken_hf(teller: Teller) -> Job:
    job = start(teller, "hf", "unbroken", step_s="0")
    job.wait_end()
    return job


CASES = [
    pytest.param(name, fault, of(name, fault), marks=[] if (name, fault) in QUICK else pytest.mark.long)
    for name in SCRIPTS
    for fault in FAULTS
]
ENDS = {"killed": "error", "node": "node_failure", "limit": "walltime"}


def expected(told: Teller, name: str) -> dict[int, float]:
    if name == "loop":
        return {step: loss_of_loop(step) for step in range(1, STEPS + 1)}
    return losses(told({"nano": unbroken_nano, "hf": unbroken_hf}[name]).run)


@pytest.mark.parametrize(("name", "fault", "case"), CASES)
def test_a_program_of_ones_own_goes_on_after(launcher, told, name, fault, case):
    job = told(case)
    # A rank that lost the dead node's may write its own words first: the judge knows better.
    assert [settled_class(attempt) for attempt in job.run.attempts()] == [ENDS[fault], "done"], job.log()
    assert sorted(losses(job.run)) == list(range(1, STEPS + 1))
    assert losses(job.run) == expected(told, name)
    begun = job.run.attempt(2).trainer()
    # transformers' Trainer does not save on a signal: it continues from its last save, if there is one by then.
    assert begun["resumed_step"] >= (10 if fault != "limit" else 0 if name == "hf" else 1)
    assert min(job.metrics(2)) == begun["resumed_step"] + 1
    assert launcher.state(job) == "done"
    assert not processes(job.run)


@pytest.mark.story(CASES[0].values[2])
def test_its_command_gets_each_event_once_tensorboard_its_curve(launcher: Launcher, told: Teller) -> None:
    name, _, case = CASES[0].values
    job = told(case)
    events = events_of(job.run, launcher.folder / f"{name}-killed" / "told")
    first, retried, second, ended = events
    assert named(events) == [("first_step", 1), ("retried", 1), ("first_step", 2), ("ended", 2)]
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
    assert curve(job.run) == pytest.approx(losses(job.run))
    assert "notify:" not in job.log()
    assert "track:" not in job.log()
    (after,) = after_table(job.run.path)
    assert (after["step"], after["state"], after["code"]) == (STEPS, "done", 0)
    assert str(STEPS) in list_after(job.run.path)[0].log.read_text()


@story
def cancelled(teller: Teller) -> Job:
    """By hpc-gpt cancel: Slurm's SIGTERM reaches the program itself."""
    job = start(teller, "loop", "cancelled", step_s="1")
    job.wait_step(3)
    teller.launcher.run("cancel", job.run.run_id)
    job.wait("its end", lambda: job.run.attempt(1).ended())
    job.wait_end("CANCELLED")
    return job


@story
def preempted(teller: Teller) -> Job:
    """By a job of higher priority for its node."""
    job = start(teller, "loop", "preempted", "--partition", "low", step_s="0.3")
    job.wait_step(3)
    job.preempt()
    job.wait("its end", lambda: job.run.attempt(1).ended())
    job.wait_end()
    return job


@pytest.mark.long
@pytest.mark.story(cancelled, preempted)
def test_what_slurm_ends_saves_once_and_counts_as_what_it_is(told: Teller) -> None:
    job = told(cancelled)
    assert job.ended() == ["cancelled"], job.log()
    assert (job.run.path / "work" / "out" / f"ckpt-{job.last_step(1)}" / ".done").exists()
    assert job.log().count("saved on a signal") == 1
    job = told(preempted)
    assert job.ended() == ["preempted", "done"], job.log()
    assert min(job.metrics(2)) == max(job.metrics(1)) + 1
    assert losses(job.run) == {step: loss_of_loop(step) for step in range(1, STEPS + 1)}


@story
def asked_late(teller: Teller) -> Job:
    """Slurm's signal reaches its program first, which saves and ends, in its second attempt with exit code 0; what
    watches it gets its own later, as on a loaded node."""
    run = 'saves() { bash loop.sh "$@" || [ "$HPC_GPT_ATTEMPT" = 2 ]; }; saves'
    folder = teller.launcher.place("loop-late")
    tables = {"layout": {"gpus": 1, "nodes": 1}, "job": {"retry_pause_s": 1}}
    path = experiment(folder, "loop", {"run": run}, tables)
    job = teller.launcher.submit(str(path), STEPS=str(STEPS), STEP_S="0.3")
    for attempt, step in ((1, 3), (2, 9)):
        job.wait_step(step, attempt)
        for pid in processes(job.run, "loop.sh"):
            if command_of(pid)[1:2] == ["loop.sh"]:
                send(pid, signal.SIGTERM)
        job.wait("its program's end", lambda: not processes(job.run, "loop.sh"))
        time.sleep(0.5)
        for pid in job.ranks():
            send(pid, signal.SIGUSR2)
        job.wait("its end", lambda number=attempt: job.run.attempt(number).ended())
    job.wait_end()
    return job


@pytest.mark.long
@pytest.mark.story(asked_late)
def test_a_signal_that_its_program_got_first_is_waited_for(told: Teller) -> None:
    job = told(asked_late)
    assert job.ended() == ["walltime", "walltime", "done"], job.log()
    assert losses(job.run) == {step: loss_of_loop(step) for step in range(1, STEPS + 1)}


@story
def one_a_gpu(teller: Teller) -> RunFolder:
    """Four tasks on two nodes, each of which says who it is."""
    folder = teller.launcher.place("per-gpu")
    show = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $SLURM_NODEID $MASTER_ADDR ${MASTER_PORT:+port}" >{run}/task-$RANK'
    tables = {"layout": {"gpus": 4, "nodes": 2}}
    job = teller.launcher.submit(str(experiment(folder, "who", {"run": show, "per": "gpu"}, tables)))
    job.wait_end()
    return job.run


@pytest.mark.story(one_a_gpu)
def test_one_process_a_gpu_knows_its_rank(told: Teller) -> None:
    run = told(one_a_gpu)
    assert run.attempt(1).ended()["ended"] == "done", run.attempt(1).log.read_text()
    found = [(run.path / f"task-{rank}").read_text().split() for rank in range(4)]
    assert found == [[str(rank), "4", str(rank % 2), str(rank // 2), "127.0.0.1", "port"] for rank in range(4)]


@story
def one_a_job(teller: Teller) -> RunFolder:
    """One process for two nodes of two GPUs, which looks for its slots as mpirun does, and starts a step on both."""
    folder = teller.launcher.place("per-job")
    show = (
        "hosts=$(scontrol show hostnames | wc -l); "
        'echo "$SLURM_NNODES $SLURM_TASKS_PER_NODE ${SLURM_STEP_ID:-no step} $hosts" >{run}/slots; '
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 bash -c 'touch {run}/on-$SLURMD_NODENAME'; "
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; command -v mpirun >/dev/null || exit 0; "
        "mpirun --bind-to none bash -c 'echo $OMPI_COMM_WORLD_SIZE $SLURMD_NODENAME >{run}/mpi-$OMPI_COMM_WORLD_RANK'"
    )
    tables = {"layout": {"gpus": 4, "nodes": 2}}
    job = teller.launcher.submit(str(experiment(folder, "slots", {"run": show, "per": "job"}, tables)))
    job.wait_end()
    return job.run


@pytest.mark.long
@pytest.mark.story(one_a_job)
def test_one_process_a_job_sees_every_slot_of_it(told: Teller) -> None:
    run = told(one_a_job)
    assert run.attempt(1).ended()["ended"] == "done", run.attempt(1).log.read_text()
    assert (run.path / "slots").read_text() == "2 2(x2) no step 2\n"
    assert len(list(run.path.glob("on-*"))) == 2
    if shutil.which("mpirun"):
        ranks = [(run.path / f"mpi-{rank}").read_text().split() for rank in range(4)]
        assert {size for size, _ in ranks} == {"4"}
        assert sorted(Counter(node for _, node in ranks).values()) == [2, 2], "its own slots of both nodes"
