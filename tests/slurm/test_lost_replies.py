"""sbatch whose answer is lost: the job may be queued, and is found again. The real sbatch and controller."""

import json
import re
import shutil
import signal
from pathlib import Path

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.slurm.conftest import sbatch_in
from tests.slurm.launcher import AWAY, HELD, SINGLE, Job, Launcher

# The controller stands still just as the request is sent. sbatch waits for 2 s.
HUNG = """#!/bin/bash
case " $* " in *" --test-only "* | *" --version "*) exec {sbatch} "$@" ;; esac
kill -STOP {controller}
SLURM_CONF={conf} exec {sbatch} "$@"
"""


def jobs_of(launcher: Launcher, folder: Path) -> list[str]:
    """The jobs in the queue whose script is in the folder."""
    listed = launcher.cluster.run("squeue", "-h", "-t", "pending,running", "--array", "-o", "%i|%o").stdout
    return [line.partition("|")[0] for line in listed.splitlines() if f"{folder}/" in line]


def test_a_controller_that_stood_still_may_have_the_job(bare_launcher: Launcher, tmp_path: Path) -> None:
    launcher, cluster = bare_launcher, bare_launcher.cluster
    (conf := tmp_path / "slurm.conf").write_text(cluster.conf.read_text() + "\nMessageTimeout=2\n")
    controller = cluster._controller
    assert controller is not None
    hung = sbatch_in(
        tmp_path / "hung", HUNG.format(sbatch=shutil.which("sbatch"), controller=controller.pid, conf=conf)
    )
    try:
        _, words = launcher.run("submit", *SINGLE, *HELD, code=4, **hung, **AWAY)
        assert "it may be queued" in words
        named = re.search(r"do not submit it again: hpc-gpt status (\S+)", words)
        assert named is not None
        run = RunFolder(next(launcher.logs.glob(f"*/{named[1]}")))
        (row,) = json.loads(launcher.run("status", str(run.path), "--json", **AWAY)[0])["runs"]
        assert (row["state"], row["cause"]) == ("unknown", "Slurm does not answer")
    finally:
        controller.send_signal(signal.SIGCONT)
    job = Job(cluster, run, "")
    job.wait("the job to be found", lambda: launcher.state(job) == "pending")
    (job.id,) = jobs_of(launcher, run.path)
    assert run.submissions()[-1]["job_id"] == job.id
    _, words = launcher.run("submit", "--resume", run.run_id, code=1)
    assert "is pending" in words
    said, _ = launcher.run("cancel", run.run_id)
    assert said == f"cancelled {run.run_id}, job {job.id}\n"
    assert not jobs_of(launcher, run.path)


def test_the_job_is_found_by_its_command(bare_launcher: Launcher, deaf: dict[str, str]) -> None:
    """A run, its resumption, and an array of a script of the user's own."""
    launcher = bare_launcher
    first = launcher.submit(*SINGLE, *HELD, **deaf)
    assert jobs_of(launcher, first.run.path) == [first.id]
    launcher.run("cancel", first.run.run_id)
    again = launcher.run("submit", "--resume", first.run.run_id, **deaf)[0]
    (second,) = jobs_of(launcher, first.run.path)
    assert again == f"submitted {first.run.run_id} as job {second}\n"
    launcher.run("cancel", first.run.run_id)
    assert not jobs_of(launcher, first.run.path)

    script = launcher.folder / "lost.slurm"
    script.write_text("#!/bin/bash\n#SBATCH --begin=now+1hour\n#SBATCH --ntasks=1\nsleep 9\n")
    said, _ = launcher.run("submit", "--array=3,5", str(script), **deaf)
    base = said.split()[-1]
    runs = [RunFolder(path.resolve()) for path in launcher.logs.glob("lost/*/1/[35]")]
    assert {run.submissions()[-1]["job_id"] for run in runs} == {f"{base}_3", f"{base}_5"}
    launcher.cluster.run("scancel", base, check=True)
