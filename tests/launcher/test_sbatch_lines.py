"""The whole line by which each kind of job is submitted; a stand-in of sbatch notes it. A % in a path is text."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.settings.experiment import ScriptFacts
from hpc_gpt.core.slurm.directives import asks_for_gpus
from hpc_gpt.core.slurm.executor import submit_array, submit_own, submit_to_slurm
from tests.launcher.test_shell_functions import program
from tests.made_runs import make_run

OURS = "--chdir={here} --output={run2}/slurm-%j.out"
LINES = {
    "requeue": OURS + " --export=ALL {run}/job.sh",
    "none": OURS + " --export=ALL {run}/job.sh",
    "singleton": OURS + " --job-name=demo-{id} --dependency=ok:5,singleton --export=ALL {run}/job.sh",
    "array": "--chdir={here} --array=0-1%3 --output={logs2}/%a/slurm-%A_%a.out --dependency=ok:5,afterany:8 "
             "--export=ALL {logs}/array.sh",
    "own": "--nice --requeue --open-mode=append --output={run2}/x-%j --error={run2}/x-%j {run}/job.sh {run} /py "
           "--begin=now",
    # A later job of a script: job.sh has the options of the first one alone.
    "later": "--clusters=far --nice=3 --requeue --open-mode=append --output={run2}/slurm-%j.out "
             "--error={run2}/slurm-%j.out {run}/job.sh {run} /py --nice=3",
}  # fmt: skip


@pytest.mark.parametrize("kind", LINES)
def test_a_job_is_submitted_with_these_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    program(tmp_path, "sbatch", f"echo \"$*\" >>'{tmp_path}/asked'; echo 'Submitted batch job 9 on cluster far'")
    program(tmp_path, "srun", "")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.delenv("HPC_GPT_PYTHON", raising=False)
    run = make_run(logs := tmp_path / "50%", "generic-slurm", submit=False)
    resolved = replace(run.resolved(), job=replace(run.resolved().job, dependency="ok:5"))
    if kind == "array":
        assert submit_array(logs, resolved, [run, run], 3, "8") == "9"
    elif kind == "own":
        monkeypatch.setenv("HPC_GPT_PYTHON", "/py")
        assert submit_own(run.path, "x-%j", resolved, {"": run}, ["--nice"], ["--begin=now"]) == "9"
    elif kind == "later":
        monkeypatch.setenv("HPC_GPT_PYTHON", "/py")
        for _ in range(2):
            (tmp_path / "asked").unlink(missing_ok=True)
            assert submit_to_slurm(run, replace(resolved, script=ScriptFacts("0")), options=["--nice=3"]) == ["9"]
    else:
        assert submit_to_slurm(run, replace(resolved, cluster=replace(resolved.cluster, chain=kind))) == ["9"]
    places = {"here": Path.cwd(), "run": run.path, "run2": str(run.path).replace("%", "%%"), "logs": logs,
              "logs2": str(logs).replace("%", "%%"), "id": run.run_id}  # fmt: skip
    assert (tmp_path / "asked").read_text() == LINES[kind].format(**places) + "\n"
    noted = run.submissions()[0]
    assert (noted["job_id"], noted["slurm_cluster"]) == ("9_0" if kind == "array" else "9", "far")


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("#SBATCH --gpus=4", True),
        ("#SBATCH -N 2 --gpus-per-node=4", True),
        ("#SBATCH --gres=gpu:4", True),
        ("#SBATCH --gres nvme:1,gpu:a100:4", True),
        ("#SBATCH -G 4", True),
        ("#SBATCH -N 2 --gres=nvme:1", False),
        ("# SBATCH --gpus=4", False),
        ("srun --gpus=4 x", False),
        ("#SBATCH --gpu-bind=none", False),
    ],
)
def test_a_script_that_asks_for_gpus_is_known_by_a_directive(line: str, asks: bool, tmp_path: Path) -> None:
    assert not asks_for_gpus(tmp_path / "job.sh")
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{line}\ntrue\n")
    assert asks_for_gpus(tmp_path / "job.sh") is asks
