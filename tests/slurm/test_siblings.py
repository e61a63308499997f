"""Queued runs learn of a bad node that another run has found, on a real Slurm cluster."""

import json
import re
from pathlib import Path

import pytest

from hpc_gpt.core.ends import bad_nodes
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.slurm.launcher import HELD, SINGLE, Job, Launcher, paused

QUIET = (*SINGLE, *HELD, "-p", "quiet")


@pytest.mark.long
def test_queued_runs_leave_out_a_node_that_another_found_bad(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = {"HPC_GPT_STATE": str(tmp_path / "state"), "HPC_GPT_LOGS": str(tmp_path / "logs")}
    monkeypatch.setenv("HPC_GPT_STATE", there["HPC_GPT_STATE"])
    finder = launcher.submit(*SINGLE, "-p", "quiet", **there, **paused(1))
    finder.wait_paused()
    queued = {
        name: launcher.submit(*QUIET, *more, **there)
        for name, more in {
            "plain": (),
            "with a list": ("-x", "q2"),
            "too few": ("-x", "q2,q3"),
            "names its node": ("-w", "q1"),
            "another profile": ("--cluster", launcher.profile("other")),
        }.items()
    }
    said = "".join(launcher.run("submit", *QUIET, "--grid", "train.seed=1,2", **there))
    array = re.findall(r"submitted 2 runs as array (\d+)", said)[0]
    script = queued["plain"].run.job_script
    sbatch = ("sbatch", "--parsable", "--uid=65534", "--begin=now+1hour", "-p", "quiet", "--chdir=/", str(script))
    others = launcher.cluster.run(*sbatch, check=True).stdout.strip()

    def excluded(job_id: str) -> str:
        return Job(launcher.cluster, RunFolder(tmp_path), job_id).shown()["ExcNodeList"]

    def shown() -> dict[str, str]:
        return {name: excluded(job.id) for name, job in queued.items()}

    try:
        before = shown()
        bad_nodes.note("site", "q1", "matmul 41 TFLOP/s, median of its peers 90", finder.run.run_id, 1, sure=True)
        finder.resume()
        finder.wait_end("COMPLETED")
        assert shown() == before | {"plain": "q1", "with a list": "q1,q2"}, finder.log()
        assert (excluded(array + "_0"), excluded(others)) == ("(null)", "(null)")
        few = f"note: job {queued['too few'].id} may still get q1: without, Slurm has too few nodes"
        assert few in finder.log()
        rows = json.loads(launcher.run("status", "--json", **there)[0])["runs"]
        causes = {row["run"]: row["cause"] for row in rows}
        note = f"without q1, which is bad by run {finder.run.run_id}"
        assert [name for name, job in queued.items() if note in causes[job.run.run_id]] == ["plain", "with a list"]
        said = "".join(launcher.run("doctor", "--cluster", "site", "--forgive", "q1", **there))
        assert "2 queued jobs may get it again" in said
        assert shown() == before
    finally:
        launcher.cluster.run("scancel", array, others, *(job.id for job in queued.values()))
