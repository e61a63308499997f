"""What the script does before its ranks start: container, preflight, and whose run folder it writes into."""

import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.programs import put
from tests.slurm.launcher import HELD, PAIR, PROFILE, SINGLE, STEPS, Job, Launcher, paused
from tests.slurm.stories import Story, Teller, slow_story, story

# Leaves out everything up to the image and runs the rest, as a container would.
APPTAINER = """#!/bin/bash
echo "apptainer $*"
while [ "$1" != "/images/it's a.sif" ]; do shift; done
shift
exec "$@"
"""

# A rank's Python that is slow to start, as from a busy network file system.
SLOW_PYTHON = """#!/bin/bash
if [ "$2" = hpc_gpt.trainer.train ]; then
  touch "{folder}/starts.$RANK"
  until [ -e "{folder}/go" ]; do sleep 0.1; done
fi
exec "{python}" "$@"
"""
# A rank's Python that hangs in the first attempt, and hears no signal.
HANGING_PYTHON = """#!/bin/bash
if [ "$2" = hpc_gpt.trainer.train ] && [ "$HPC_GPT_ATTEMPT" = 1 ]; then
  trap '' TERM USR2
  touch "{folder}/starts.$RANK"
  while :; do sleep 1; done
fi
exec "{python}" "$@"
"""


SPECIMENS = Path(__file__).parents[1] / "specimens"


@story
def contained(teller: Teller) -> str:
    """The log of a run of two ranks in a container."""
    launcher = teller.launcher
    place = launcher.place("contained")
    put(place / "apptainer", APPTAINER)
    container = '[container]\nkind = "apptainer"\nimage = "/images/it\'s a.sif"\nmounts = ["/data my/x:/data:ro"]\n'
    site = f'{PROFILE}PATH = "{place}:{os.environ["PATH"]}"\n{container}'
    cluster = launcher.profile("container", f'python = "{sys.executable}"\n', site)
    said, _ = launcher.run("submit", "--wait", "--cluster", cluster, *PAIR, "--set", "train.steps=2")
    return (launcher.logs / "tiny" / said.split()[1] / "attempts" / "1" / "log").read_text()


def held_in_python(launcher: Launcher, name: str, text: str) -> tuple[Job, Path]:
    """A run of one rank whose Python the text is, once that has begun; and the folder that they share."""
    place = launcher.place(name)
    put(place / "python", text.format(folder=place, python=sys.executable))
    cluster = launcher.profile(name, f'python = "{place}/python"\n')
    asked = ("--cluster", cluster, *SINGLE, "--set", "train.steps=2")
    job = launcher.submit(*asked, HPC_GPT_PYTHON=f"{place}/python")
    job.wait("its rank", lambda: len(list(place.glob("starts.*"))) == 1)
    return job, place


@story
def terminated_at_its_start(teller: Teller) -> Job:
    """A preemption's SIGTERM while its rank starts."""
    job, place = held_in_python(teller.launcher, "slow-start", SLOW_PYTHON)
    teller.cluster.run("scancel", "--signal=TERM", job.id, check=True)
    job.wait("SIGTERM", lambda: "CANCELLED AT" in job.log())
    (place / "go").touch()
    job.wait_end()
    return job


@slow_story
def hanging(teller: Teller) -> Job:
    """Its rank hears no signal at the time limit."""
    job, _ = held_in_python(teller.launcher, "hanging", HANGING_PYTHON)
    teller.cluster.run("scontrol", "update", f"jobid={job.id}", "EndTime=now+1", check=True)
    job.wait("the time limit", lambda: "DUE TO TIME LIMIT" in job.log())
    job.wait("its way back", lambda: job.restarts == 1)
    job.far_from_its_limit()
    job.wait_end()
    return job


def of_earlier_version(commit: str) -> Callable[[Teller], Job]:
    """A script that an earlier version rendered, handed to sbatch: it takes the code of today. Asked to end by the
    signal ahead of the time limit, it continues in a second attempt."""

    def at(teller: Teller) -> Job:
        launcher = teller.launcher
        place = launcher.place(f"at-{commit}")
        script = place / "job.sh"
        text = (SPECIMENS / f"slurm_at_{commit}.sh").read_text()
        script.write_text(text.replace("/tokens/are/here", str(launcher.folder / "some.tokens")))
        job_id = launcher.sbatch(script, cwd=place, **paused(2))
        job = Job(teller.cluster, RunFolder(launcher.logs / "tiny" / job_id), job_id)
        job.wait_paused()
        launcher.cluster.run("scancel", "--signal=USR2", job.id, check=True)
        job.hears(signal.SIGUSR2)
        job.wait_end()
        return job

    at.__name__ = f"at_{commit}"
    return at


at_1424389 = story(of_earlier_version("1424389"))
at_b498b09 = slow_story(of_earlier_version("b498b09"))


@story
def with_taken_port(teller: Teller) -> tuple[Job, list[int]]:
    """Somebody listens on the port that follows from its id. Gives the ports that may follow."""
    job = teller.launcher.submit(*SINGLE, *HELD, "--set", "train.steps=2")
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first, *others = (10000 + (int(job.id) + 7919 * number) % (low - 10000) for number in range(10))
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # a daemon listens there
            taken.bind(("127.0.0.1", first))
            taken.listen()
        job.release()
        job.wait_end()
    return job, others


@pytest.mark.long
@pytest.mark.story(contained)
def test_a_container_holds_every_rank(told: Teller) -> None:
    log = told(contained)
    assert log.count("--bind /data my/x:/data:ro /images/it's a.sif ") == 2
    assert "ended done after step 2" in log


@pytest.mark.long
@pytest.mark.story(terminated_at_its_start)
def test_a_sigterm_while_ranks_start_does_not_end_the_job(told: Teller) -> None:
    """A preemption's: the job has its GraceTime, and Slurm requeues it afterwards if it still runs."""
    job = told(terminated_at_its_start)
    assert job.ended() == ["done"], job.log()


@pytest.mark.long
@pytest.mark.story(hanging)
def test_ranks_that_hang_at_the_time_limit_do_not_end_the_run(told: Teller) -> None:
    """Slurm kills them KillWait seconds later, and the script with them: it has put the job back by then."""
    job = told(hanging)
    assert "the run continues without them" in job.run.attempt(1).log.read_text()
    assert job.ended() == ["walltime", "done"], job.log()
    assert job.run.attempt(1).verdict()["go_on"] is True
    assert job.restarts == 1


def test_a_missing_python_is_one_line_and_a_user_error(launcher: Launcher) -> None:
    cluster = launcher.profile("no-python", 'python = "/nosuch/python"\n')
    said, words = launcher.run("submit", "--wait", "--cluster", cluster, code=3)
    run = next((launcher.logs / "tiny").glob(said.split()[1]))
    assert "no /nosuch/python on n" in words
    log = (run / "attempts" / "1" / "log").read_text()
    assert log.startswith("Error: no /nosuch/python on n")
    assert log.count("\n") == 3


@pytest.mark.long
@pytest.mark.story(with_taken_port)
def test_a_port_that_is_taken_is_passed_over(told: Teller) -> None:
    """The port follows from the job id; rank 0 would fail, or meet another job's ranks, on one that is taken."""
    job, others = told(with_taken_port)
    found = re.search(r"rendezvous 127.0.0.1:(\d+)\n", job.log())
    assert found, job.log()
    assert int(found[1]) in others


@pytest.mark.long
@pytest.mark.parametrize(
    "story_of", [at_1424389, pytest.param(at_b498b09, marks=pytest.mark.long)], ids=["1424389", "b498b09"]
)
def test_a_script_of_an_earlier_version_runs_todays_modules(told: Teller, story_of: Story[Job]) -> None:
    job = told(story_of)
    assert job.ended() == ["walltime", "done"], job.log()
    assert sorted(job.losses()) == list(range(1, STEPS + 1))
    assert "resumed after step " in job.log()
