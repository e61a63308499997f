"""What the script does before its ranks start: container, preflight, and whose run folder it writes into."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from tests.slurm.launcher import PROFILE, Launcher

# Leaves out everything up to the image and runs the rest, as a container would.
APPTAINER = """#!/bin/bash
echo "apptainer $*"
while [ "$1" != "/images/it's a.sif" ]; do shift; done
shift
exec "$@"
"""

# Slurm's own, but its controller is away the first two times that the script asks for its job.
SCONTROL = """#!/bin/bash
if [ "$1" = --oneliner ] && [ "$(wc -c <"{folder}/asked")" -lt 2 ]; then
  printf x >>"{folder}/asked"
  echo "slurm_load_jobs error: Unable to contact slurm controller" >&2
  exit 1
fi
exec {scontrol} "$@"
"""
# Slurm's own, which knows no host.
HOSTLESS = """#!/bin/bash
[ "$2" = hostnames ] || exec {scontrol} "$@"
"""
# A rank's Python that is slow to start, as from a busy network file system.
SLOW_PYTHON = """#!/bin/bash
if [ "$2" = hpc_gpt.train ]; then
  touch "{folder}/starts.$RANK"
  until [ -e "{folder}/go" ]; do sleep 0.1; done
fi
exec "{python}" "$@"
"""
# A rank's Python that hangs in the first attempt, and hears no signal.
HANGING_PYTHON = """#!/bin/bash
if [ "$2" = hpc_gpt.train ] && [ "$HPC_GPT_ATTEMPT" = 1 ]; then
  trap '' TERM USR2
  touch "{folder}/hangs.$RANK"
  while :; do sleep 1; done
fi
exec "{python}" "$@"
"""


def command(path: Path, text: str) -> None:
    """A command of the test's own."""
    path.write_text(text)
    path.chmod(0o755)


def profile(launcher: Launcher, name: str, text: str, site: str = PROFILE) -> str:
    """Writes a profile of its own name and gives the name."""
    (launcher.folder / "config" / "clusters" / f"{name}.toml").write_text(text + site)
    return name


def test_a_container_holds_every_rank(launcher: Launcher, tmp_path: Path) -> None:
    command(tmp_path / "apptainer", APPTAINER)
    container = '[container]\nkind = "apptainer"\nimage = "/images/it\'s a.sif"\nmounts = ["/data my/x:/data:ro"]\n'
    site = f'{PROFILE}PATH = "{tmp_path}:{os.environ["PATH"]}"\n{container}'
    cluster = profile(launcher, "container", f'python = "{sys.executable}"\n', site)
    said, _ = launcher.run("submit", "--wait", "--cluster", cluster, "--set", "train.steps=2")
    log = (launcher.logs / "tiny" / said.split()[1] / "attempts" / "1" / "log").read_text()
    assert log.count("--bind /data my/x:/data:ro /images/it's a.sif ") == 4
    assert "ended done after step 2" in log


def test_a_controller_that_is_away_for_a_moment_costs_no_requeue(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "asked").touch()
    command(tmp_path / "scontrol", SCONTROL.format(folder=tmp_path, scontrol=shutil.which("scontrol")))
    cluster = profile(launcher, "away", "", f'{PROFILE}PATH = "{tmp_path}:{os.environ["PATH"]}"\n')
    job = launcher.submit("--cluster", cluster)
    job.wait_step(2)
    launcher.cluster.run("scancel", "--signal=USR2", job.id, check=True)
    job.wait_end()
    assert (tmp_path / "asked").read_text() == "xx"
    assert [attempt.ended()["ended"] for attempt in job.run.attempts()] == ["walltime", "done"]


def test_a_sigterm_while_ranks_start_does_not_end_the_job(launcher: Launcher, tmp_path: Path) -> None:
    """A preemption's: the job has its GraceTime, and Slurm requeues it afterwards if it still runs."""
    command(tmp_path / "python", SLOW_PYTHON.format(folder=tmp_path, python=sys.executable))
    cluster = profile(launcher, "slow-start", f'python = "{tmp_path}/python"\n')
    environment = {"HPC_GPT_PYTHON": f"{tmp_path}/python"}
    job = launcher.submit("--cluster", cluster, "--set", "train.steps=2", **environment)
    job.wait("its ranks", lambda: len(list(tmp_path.glob("starts.*"))) == 4)
    launcher.cluster.run("scancel", "--signal=TERM", job.id, check=True)
    job.wait("SIGTERM", lambda: "CANCELLED AT" in job.log())
    (tmp_path / "go").touch()
    job.wait_end()
    assert [attempt.ended()["ended"] for attempt in job.run.attempts()] == ["done"], job.log()


def test_ranks_that_hang_at_the_time_limit_do_not_end_the_run(launcher: Launcher, tmp_path: Path) -> None:
    """Slurm kills them KillWait seconds later, and the script with them: it has put the job back by then."""
    command(tmp_path / "python", HANGING_PYTHON.format(folder=tmp_path, python=sys.executable))
    cluster = profile(launcher, "hanging", f'python = "{tmp_path}/python"\n')
    environment = {"HPC_GPT_PYTHON": f"{tmp_path}/python"}
    job = launcher.submit("--cluster", cluster, "--set", "train.steps=2", **environment)
    job.wait("its ranks", lambda: len(list(tmp_path.glob("hangs.*"))) == 4)
    launcher.cluster.run("scontrol", "update", f"jobid={job.id}", "EndTime=now+1", check=True)
    job.wait("the time limit", lambda: "DUE TO TIME LIMIT" in job.log())
    job.wait("its way back", lambda: job.restarts == 1)
    launcher.cluster.run("scontrol", "update", f"jobid={job.id}", "TimeLimit=10", check=True)
    job.wait_end()
    assert "the run goes on without them" in job.run.attempt(1).log.read_text()
    assert [attempt.ended()["ended"] for attempt in job.run.attempts()] == ["walltime", "done"], job.log()
    assert job.run.attempt(1).verdict()["go_on"] is True
    assert job.restarts == 1


def test_a_missing_python_is_one_line_in_the_log_and_a_user_error(launcher: Launcher) -> None:
    cluster = profile(launcher, "no-python", 'python = "/nosuch/python"\n')
    said, words = launcher.run("submit", "--wait", "--cluster", cluster, code=3)
    run = next((launcher.logs / "tiny").glob(said.split()[1]))
    assert "no /nosuch/python on n" in words
    log = (run / "attempts" / "1" / "log").read_text()
    assert log.startswith("Error: no /nosuch/python on n")
    assert log.count("\n") == 3


def test_a_host_without_an_address_ends_the_job_instead_of_hanging_it(launcher: Launcher) -> None:
    cluster = profile(launcher, "no-address", 'node_suffix = ".invalid"\n', PROFILE.replace("HPC_GPT_MASTER_ADDR", "X"))
    _, words = launcher.run("submit", "--wait", "--cluster", cluster, code=3)
    assert ".invalid has no address" in words


def test_an_empty_node_list_ends_the_job_and_a_taken_port_is_passed_over(launcher: Launcher, tmp_path: Path) -> None:
    """The port follows from the job id; rank 0 would fail, or meet another job's ranks, on one that is taken."""
    command(tmp_path / "scontrol", HOSTLESS.format(scontrol=shutil.which("scontrol")))
    site = PROFILE.replace("HPC_GPT_MASTER_ADDR", "X") + f'PATH = "{tmp_path}:{os.environ["PATH"]}"\n'
    said, words = launcher.run("submit", "--wait", "--cluster", profile(launcher, "hostless", "", site), code=3)
    assert "scontrol names no host of 'n" in words
    before = int(said.split()[-1])
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first, second = (10000 + (before + 1 + step) % (low - 10000) for step in (0, 7919))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        job = launcher.submit("--set", "train.steps=2")
        assert int(job.id) == before + 1, "nobody else submits here"
        job.wait_end()
    assert f"rendezvous 127.0.0.1:{second}\n" in job.log()


def test_the_run_folder_of_another_script_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(launcher.run("render")[0])
    other = tmp_path / "other"
    other.mkdir()
    (other / "job.sh").write_text("#!/bin/bash\n")
    output = tmp_path / "out"
    done = subprocess.run(
        ["sbatch", "--quiet", "--wait", f"--output={output}", str(script)],
        env={**launcher.environment, "HPC_GPT_RUN": str(other)},
        check=False,
    )
    assert done.returncode == 1
    assert output.read_text().startswith("Error: HPC_GPT_RUN names the run of another script: ")
    assert sorted(path.name for path in other.iterdir()) == ["attempts", "job.sh"]


def test_a_script_that_cannot_write_its_run_folder_says_so(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(launcher.run("render")[0])
    output = tmp_path / "out"
    done = subprocess.run(
        ["sbatch", "--quiet", "--wait", f"--output={output}", str(script)],
        env={**launcher.environment, "HPC_GPT_LOGS": "/proc/nowhere"},
        check=False,
    )
    assert done.returncode == 1
    assert "Error: cannot make the run folder /proc/nowhere/tiny/" in output.read_text()
