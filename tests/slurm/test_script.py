"""What the script does before its ranks start: in a container, by a Python that is slow or gone, of an old version."""

import os
import sys

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.programs import put, ran
from tests.slurm.launcher import PAIR, PROFILE, SINGLE, Job, Launcher
from tests.slurm.stories import Teller, storied
from tests.specimens.test_made_before import OLDER, REFUSED, unpack

# Leaves out everything up to the image and runs the rest, as a container would.
CONTAINER = """#!/bin/bash
echo "${0##*/} $*"
while [ "$1" != "/images/it's a.sif" ]; do shift; done
shift
exec "$@"
"""

# A rank's Python that is slow to start, as from a busy network file system.
SLOW_PYTHON = """#!/bin/bash
if [ "$2" = hpc_gpt.trainer ]; then
  touch "{folder}/starts.$RANK"
  until [ -e "{folder}/go" ]; do sleep 0.1; done
fi
exec "{python}" "$@"
"""


@pytest.mark.long
@storied
def test_a_container_holds_every_rank(teller: Teller) -> None:
    launcher = teller.launcher
    place = launcher.place("contained")
    put(place / "singularity", CONTAINER)  # the nodes have no apptainer
    container = '[container]\nkind = "apptainer"\nimage = "/images/it\'s a.sif"\nmounts = ["/data my/x:/data:ro"]\n'
    site = f'{PROFILE}PATH = "{place}:{os.environ["PATH"]}"\n{container}'
    cluster = launcher.profile("container", f'python = "{sys.executable}"\n', site)
    said, _ = launcher.run("submit", "--wait", "--cluster", cluster, *PAIR, "--set", "train.steps=2")
    log = (launcher.logs / "tiny" / said.split()[1] / "attempts" / "1" / "log").read_text()
    assert log.count("singularity exec --nv --bind ") == 2
    assert log.count("--bind /data my/x:/data:ro /images/it's a.sif ") == 2
    assert "ended done after step 2" in log


@pytest.mark.long
@storied
def test_a_sites_own_ways_reach_the_ranks(teller: Teller) -> None:
    """Lines of setup, variables by name, and one GPU for each task of two on a node. A line that fails ends the run,
    and `why` names it."""
    launcher = teller.launcher
    place = launcher.place("own-ways")
    (place / "own.toml").write_text(
        'name = "own"\nengine.name = "command"\nlayout = { gpus = 2, nodes = 1 }\n'
        'command = { run = "echo rank $SLURM_LOCALID has GPU $CUDA_VISIBLE_DEVICES, $CACHE", per = "gpu" }\n'
    )
    top = 'setup = ["SITE=lumi", "export TREE=/sw/$SITE"]\nsrun = ["--gpus-per-task=1"]\n'
    site = f"{PROFILE}CACHE = '${{TREE}}/$TREE/$(touch {place}/pwned)'\n"
    cluster = launcher.profile("own-ways", top, site)
    said, _ = launcher.run("submit", str(place / "own.toml"), "--wait", "--cluster", cluster)
    log = (launcher.logs / "own" / said.split()[1] / "attempts" / "1" / "log").read_text()
    for rank in (0, 1):
        assert f"rank {rank} has GPU {rank}, /sw/lumi/$TREE/$(touch {place}/pwned)\n" in log, log
    assert not (place / "pwned").exists()
    cluster = launcher.profile("no-setup", 'setup = ["cat /nowhere/env"]\n')
    said, words = launcher.run("submit", str(place / "own.toml"), "--wait", "--cluster", cluster, code=3)
    assert ": cat /nowhere/env; Slurm says FAILED" in words
    why, _ = launcher.run("why", said.split()[1])
    assert "Error: setup failed on n" in why
    assert "cat: /nowhere/env: No such file or directory" in why


@pytest.mark.long
@storied
def test_a_sigterm_while_ranks_start_does_not_end_the_job(teller: Teller) -> None:
    """A preemption's: the job has its GraceTime, and Slurm requeues it afterwards if it still runs."""
    place = teller.launcher.place("slow-start")
    put(place / "python", SLOW_PYTHON.format(folder=place, python=sys.executable))
    cluster = teller.launcher.profile("slow-start", f'python = "{place}/python"\n')
    asked = ("--cluster", cluster, *SINGLE, "--set", "train.steps=2")
    job = teller.launcher.submit(*asked, HPC_GPT_PYTHON=f"{place}/python")
    job.wait("its rank", lambda: len(list(place.glob("starts.*"))) == 1)
    teller.cluster.run("scancel", "--signal=TERM", job.id, check=True)
    job.wait("SIGTERM", lambda: "CANCELLED AT" in job.log())
    (place / "go").touch()
    job.wait_end()
    assert job.ended() == ["done"], job.log()


def test_a_missing_python_is_one_line_and_a_user_error(launcher: Launcher) -> None:
    cluster = launcher.profile("no-python", 'python = "/nosuch/python"\n')
    said, words = launcher.run("submit", "--wait", "--cluster", cluster, code=3)
    run = next((launcher.logs / "tiny").glob(said.split()[1]))
    assert "no /nosuch/python on n" in words
    log = (run / "attempts" / "1" / "log").read_text()
    assert log.startswith("Error: no /nosuch/python on n")
    assert log.count("\n") == 3


@pytest.mark.long
def test_a_script_of_0_3_ends_before_its_ranks(launcher: Launcher) -> None:
    """Handed to sbatch: the first program that it starts does not read its settings."""
    folder = unpack(OLDER, launcher.place("of-0.3"))
    environment = {**launcher.environment, "HPC_GPT_PYTHON": sys.executable}
    job_id = ran("sbatch", "--parsable", "job.sh", cwd=folder, env=environment, code=0).stdout.strip()
    job = Job(launcher.cluster, RunFolder(launcher.logs / "small" / job_id), job_id)
    job.wait_end("FAILED")
    assert f"{REFUSED}\n\nhint: render it again with this version" in job.log()
    assert job.run.attempt(1).ended()["ended"] == "user_error"
    assert not job.run.attempt(1).metrics.exists()
    assert REFUSED in launcher.run("status")[0]
