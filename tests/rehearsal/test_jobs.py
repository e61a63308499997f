"""Jobs under the stand-ins, as ../shared/slurm.md saw them on a real Slurm: signals, limits, requeues, preemption."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpc_gpt.core.process import start_time
from hpc_gpt.launcher.rehearsal.local_slurm import LocalSlurm, RehearsedJob, SlurmState, marked
from tests.rehearsal.commands import Commands

# Ranks that say what they get; with `stubborn` they stay.
RANKS = """
trap 'echo "script got TERM"' TERM
trap 'echo "script got USR2"' USR2
srun bash -c '
trap "echo rank $SLURM_PROCID got TERM; [ -e stubborn ] || exit 0" TERM
trap "echo rank $SLURM_PROCID got USR2" USR2
touch "ready.$SLURM_PROCID"
for i in {1..900}; do sleep 0.1; done' &
while kill -0 $! 2>/dev/null; do wait $!; done
echo "start ${SLURM_RESTART_COUNT:-0} ends"
[ -z "$SLURM_RESTART_COUNT" ] || exit 0
"""
TWO = ("--nodes=2", "--ntasks-per-node=1")


def submitted(slurm: LocalSlurm, commands: Commands, text: str, *flags: object) -> RehearsedJob:
    job_id = commands.submit("job", text, *flags)
    return slurm.jobs()[int(job_id)]


def started(slurm: LocalSlurm, commands: Commands, *flags: object) -> RehearsedJob:
    """A job whose two ranks listen."""
    job = submitted(slurm, commands, RANKS, *TWO, "--open-mode=append", *flags)
    commands.wait("ranks", lambda: len(list(commands.folder.glob("ready.*"))) == 2)
    return job


def test_usr2_ahead_of_the_limit_is_for_the_ranks_alone(slurm: LocalSlurm, commands: Commands) -> None:
    job = started(slurm, commands, "--time=10", "--signal=USR2@60")
    slurm.change(job, ends_at=time.time() + 60)
    commands.wait("USR2", lambda: commands.output("job").count("got USR2") == 2)
    assert "script got" not in commands.output("job")
    assert commands.state(str(job.id)) == "RUNNING"


def test_with_b_it_is_for_the_script_alone(slurm: LocalSlurm, commands: Commands) -> None:
    job = started(slurm, commands, "--time=10", "--signal=B:USR2@60")
    slurm.change(job, ends_at=time.time() + 60)
    commands.wait("USR2", lambda: "script got USR2" in commands.output("job"))
    assert "rank" not in commands.output("job")


def test_at_the_limit_comes_sigterm_and_then_sigkill(slurm: LocalSlurm, commands: Commands) -> None:
    (commands.folder / "stubborn").touch()
    job = started(slurm, commands, "--time=10")
    slurm.change(job, ends_at=time.time())
    fields = commands.wait_end(str(job.id))
    assert (fields["JobState"], fields["Reason"]) == ("TIMEOUT", "TimeLimit")
    said = commands.output("job")
    assert re.search(r"slurmstepd: error: \*\*\* JOB \d+ ON node1 CANCELLED AT \S+ DUE TO TIME LIMIT \*\*\*", said)
    assert {"rank 0 got TERM", "rank 1 got TERM", "script got TERM"} <= set(said.splitlines())
    assert not marked(slurm.folder, job.id)


def test_a_preemption_tells_the_ranks_waits_and_requeues(slurm: LocalSlurm, commands: Commands) -> None:
    (commands.folder / "stubborn").touch()
    job = started(slurm, commands, "--requeue")
    slurm.preempt(job)
    fields = commands.shown(str(job.id))
    assert fields["JobState"] == "RUNNING"
    assert fields["PreemptTime"] != "None"
    commands.wait("TERM", lambda: commands.output("job").count("got TERM") >= 2)
    assert "script got" not in commands.output("job"), "the grace is the ranks'"
    commands.wait("a new start", lambda: slurm.jobs()[job.id].restarts == 1)
    (commands.folder / "stubborn").unlink()

    def starts_again() -> bool:
        now = slurm.jobs()[job.id]
        return len(now.steps) == 1 and now.restarts == 1 and now.state == "RUNNING"

    commands.wait("the new ranks", starts_again)
    commands.wait("the end of the first start", lambda: "DUE TO PREEMPTION" in commands.output("job"))
    assert commands.shown(str(job.id))["PreemptTime"] == "None"
    states = commands.run("sacct", "-D", "-X", "-n", "-P", "-o", "State", "-j", str(job.id)).stdout.split()
    assert states == ["PREEMPTED", "RUNNING"]


def test_a_requeued_job_waits_and_knows_its_restart(slurm: LocalSlurm, commands: Commands) -> None:
    job = started(slurm, commands, "--requeue")
    with slurm.state() as state:
        state.requeue_s = 600
    assert commands.run("scontrol", "requeue", str(job.id)).returncode == 0
    commands.wait("the queue", lambda: commands.state(str(job.id)) == "PENDING")
    commands.wait("its reason", lambda: commands.shown(str(job.id))["Reason"] == "BeginTime")
    assert commands.run("scontrol", "update", f"jobid={job.id}", "ExcNodeList=node1,node2").returncode == 0
    slurm.change(job, eligible=0.0)
    commands.wait("the second start", lambda: slurm.jobs()[job.id].state == "RUNNING")
    assert slurm.jobs()[job.id].nodes == ["node3", "node4"]
    assert commands.shown(str(job.id))["Restarts"] == "1"


def test_no_requeue_is_kept_to(slurm: LocalSlurm, commands: Commands) -> None:
    job = started(slurm, commands, "--no-requeue")
    done = commands.run("scontrol", "requeue", str(job.id))
    assert done.returncode == 1
    assert "disabled" in done.stderr
    assert slurm.jobs()[job.id].state == "RUNNING"


def test_the_end_of_a_script_ends_what_it_left(slurm: LocalSlurm, commands: Commands) -> None:
    """Also what has left its session, as a daemon does."""
    job = commands.submit("leaves", "sleep 300 & setsid sleep 300 & touch left; exit 4")
    fields = commands.wait_end(job)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "4:0")
    assert not marked(slurm.folder)


def test_an_srun_that_is_killed_takes_its_ranks_along(slurm: LocalSlurm, commands: Commands) -> None:
    step = "srun bash -c 'echo $$ >new; mv new rank; exec sleep 300'"
    text = f"{step} & until [ -e go ]; do sleep 0.1; done; kill -9 $!; wait; sleep 300"
    job = submitted(slurm, commands, text)
    commands.wait("the rank", lambda: (commands.folder / "rank").exists())
    ranks = [int((commands.folder / "rank").read_text())]
    (commands.folder / "go").touch()
    commands.wait("its end", lambda: not [pid for pid in ranks if start_time(pid)])
    assert slurm.jobs()[job.id].state == "RUNNING"


def test_one_job_runs_at_a_time_and_the_others_wait(slurm: LocalSlurm, commands: Commands) -> None:
    first = commands.submit("first", "until [ -e go ]; do sleep 0.1; done")
    second = commands.submit("second", "[ -e go ]", "--dependency=singleton")
    third = commands.submit("third", "[ -e go ]")
    commands.wait("its reason", lambda: commands.shown(third)["Reason"] == "Priority")
    assert commands.shown(second)["Reason"] == "Dependency"
    commands.run("scancel", "--state=PENDING", first, third)
    (commands.folder / "go").touch()
    states = [commands.wait_end(job)["JobState"] for job in (first, second, third)]
    assert states == ["COMPLETED", "COMPLETED", "CANCELLED"]


def test_gpus_are_seen_where_there_are_enough(tmp_path: Path) -> None:
    for here, seen in ((4, {"0,1", "2,3"}), (3, {""}), (0, {"unset"})):
        (folder := tmp_path / str(here)).mkdir()
        with LocalSlurm(2, gpus=here) as slurm:
            commands = Commands({name: text for name, text in slurm.environment.items() if "CUDA" not in name}, folder)
            text = "srun bash -c 'echo ${CUDA_VISIBLE_DEVICES-unset}'"
            commands.wait_end(commands.submit("gpus", text, *TWO, "--gres=gpu:2"))
            assert set(commands.output("gpus").splitlines()) == seen


def test_a_script_is_run_as_it_was_submitted(slurm: LocalSlurm, commands: Commands) -> None:
    job = commands.submit("edited", "echo before", "--begin=now+3600")
    (commands.folder / "edited.sh").write_text("#!/bin/bash\necho after\n")
    commands.run("scontrol", "update", f"jobid={job}", "StartTime=now")
    commands.wait_end(job)
    assert commands.output("edited") == "before\n"


def test_whoever_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """The guard ends what the scheduler's own process cannot end any more."""
    (script := tmp_path / "job.sh").write_text("#!/bin/bash\nsrun sleep 300\n")
    program = (
        "import subprocess, sys, time\n"
        "from hpc_gpt.launcher.rehearsal.local_slurm import LocalSlurm\n"
        "slurm = LocalSlurm(1)\n"
        f"subprocess.run(['sbatch', '-o', '{tmp_path}/out', '{script}'], env=slurm.environment)\n"
        "while not [*slurm.jobs().values()][0].steps: time.sleep(0.05)\n"
        "print(slurm.folder, flush=True)\n"
        "time.sleep(300)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()  # what sbatch says
    folder = Path(process.stdout.readline().strip())
    assert folder.is_dir()
    left = marked(folder)
    assert left, "script, srun and rank"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 240
    while folder.exists() or any(start_time(pid) for pid in left):
        assert time.monotonic() < end, marked(folder)
        time.sleep(0.05)


def test_an_attempt_is_held_until_it_is_not_to_be(slurm: LocalSlurm, commands: Commands) -> None:
    for steps in ("8", ""):
        with slurm.state() as state:
            state.hold_after = steps
        commands.wait_end(commands.submit("job", "srun bash -c 'echo $HPC_GPT_HOLD_AFTER'"))
        assert commands.output("job") == f"{steps}\n"


def test_one_element_of_an_array_is_a_job_that_has_both_names(slurm: LocalSlurm, commands: Commands) -> None:
    said = 'echo "$SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_JOB_ID"; scontrol requeue "${SLURM_ARRAY_JOB_ID}_9" 2>&1'
    job = submitted(slurm, commands, f"{said}; squeue --noheader --array --format=%i", "--array=4", "--no-requeue")
    commands.wait_end(str(job.id))
    assert commands.output("job").splitlines() == [
        f"4 of {job.id}",
        f"Invalid job id specified for job {job.id}_9",
        f"{job.id}_4",
    ]
    assert commands.run("sacct", "-X", "-n", "-P", "-o", "JobID", "-j", f"{job.id}_4").stdout == f"{job.id}_4\n"


def test_rehearsals_at_once_have_jobs_of_other_ids():
    """From which the port follows at which a job's ranks meet."""
    assert len({SlurmState(["n1"], 0, {}).next_id for _ in range(8)}) > 1
