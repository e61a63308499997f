"""The whole line by which each kind of job is submitted, the environment that it passes on, and what it leaves in
submissions.jsonl; a stand-in of sbatch notes it. A % in a path is text."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.errors import JobRefused
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment import ScriptFacts
from hpc_gpt.core.slurm.clients import Answer
from hpc_gpt.core.slurm.directives import asks_for_gpus
from hpc_gpt.core.slurm.environment import leaked_variables, submission_environment
from hpc_gpt.launcher import executor as slurm_executor
from hpc_gpt.launcher.executor import submit_array, submit_own, submit_to_slurm
from tests.launcher.test_shell_functions import program
from tests.made_runs import make_run, unsubmitted_run
from tests.programs import put

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
        (logs / "array.sh").write_text("#!/bin/bash\n")
        assert submit_array(logs, resolved, [run, run], 3, "8") == "9"
    elif kind == "own":
        monkeypatch.setenv("HPC_GPT_PYTHON", "/py")
        assert submit_own(run.path, "x-%j", resolved, [("", run)], ["--nice"], ["--begin=now"]) == "9"
    elif kind == "later":
        monkeypatch.setenv("HPC_GPT_PYTHON", "/py")
        for _ in range(2):
            (tmp_path / "asked").unlink(missing_ok=True)
            assert submit_to_slurm(run, replace(resolved, script=ScriptFacts("0")), options=["--nice=3"]).ids == ["9"]
    else:
        assert submit_to_slurm(run, replace(resolved, cluster=replace(resolved.cluster, chain=kind))).ids == ["9"]
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


REFUSAL = Answer(1, "", "sbatch: error: QOSMaxSubmitJobPerUserLimit")


@pytest.fixture
def run(own_folders: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    srun = put(tmp_path / "bin" / "srun", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{srun.parent}:/usr/bin:/bin")
    return unsubmitted_run("generic-slurm")


def sbatch(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> list[list[str]]:
    """Its command lines; it gives these answers, then jobs 1, 2 and so on."""
    lines: list[list[str]] = []

    def ask(line: list[str], environment: object, cluster: str | None, apart: bool) -> Answer:
        lines.append([*line, *([cluster] if cluster else [])])
        known = len(lines) <= len(answers)
        return answers[len(lines) - 1] if known else Answer(0, f"Submitted batch job {len(lines)}\n", "")

    monkeypatch.setattr(slurm_executor, "ask", ask)
    return lines


def test_each_job_of_a_chain_says_which_until_one_is_refused(run, monkeypatch):
    resolved = run.resolved()
    chained = replace(resolved, cluster=replace(resolved.cluster, chain="singleton"))
    taken = [Answer(0, f"Submitted batch job {number}\n", "") for number in (7, 8)]
    lines = sbatch(monkeypatch, *taken, REFUSAL)
    assert slurm_executor.submit_to_slurm(run, chained, 4).ids == ["7", "8"]
    entries = [(line.get("job_id"), line["link"], line["links"]) for line in run.submissions()]
    assert entries == [("7", 1, 4), ("8", 2, 4), (None, 3, 4)]
    assert {line["attempts_before"] for line in run.submissions()} == {0}
    run.new_attempt()
    slurm_executor.submit_to_slurm(run, resolved)
    assert run.submissions()[-1]["attempts_before"] == 1
    assert all("--dependency=singleton" in line for line in lines[:-1])


def test_the_cluster_that_took_the_first_job_takes_all(run, monkeypatch):
    lines = sbatch(monkeypatch, Answer(0, "Submitted batch job 7 on cluster far\n", ""))
    slurm_executor.submit_to_slurm(run, run.resolved())
    slurm_executor.submit_to_slurm(run, run.resolved())
    assert [line[-1] for line in lines] == [str(run.job_script), "far"]
    assert run.submissions()[0]["slurm_cluster"] == run.slurm_cluster() == "far"


def test_a_refused_array_is_refused_in_each_run(run, monkeypatch, tmp_path):
    other = unsubmitted_run("generic-slurm")
    (tmp_path / "array.sh").write_text("#!/bin/bash\n")
    sbatch(monkeypatch, REFUSAL)
    with pytest.raises(JobRefused, match="QOSMaxSubmitJobPerUserLimit"):
        slurm_executor.submit_array(tmp_path, run.resolved(), [run, other], None)
    for each in (run, other):
        assert (each.submissions()[-1].get("job_id"), bool(each.submissions()[-1]["refused"])) == (None, True)


SHELL = {
    "PATH": "/bin", "HF_TOKEN": "secret", "SLURM_CONF": "/etc/slurm.conf", "HPC_GPT_LOGS": "/logs",
    "OMP_NUM_THREADS": "4",
}  # fmt: skip
ENCLOSING_JOB = {
    "SLURM_JOB_ID": "7", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SRUN_CPUS_PER_TASK": "1", "SBATCH_PARTITION": "x",
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "1",
    "SUBMITIT_EXECUTOR": "slurm", "TORCHELASTIC_RUN_ID": "a", "PMI_RANK": "3", "HPC_GPT_RUN": "/logs/other",
    "HPC_GPT_ATTEMPT": "2", "HPC_GPT_ARRAY": "/logs/table", "HPC_GPT_ELEMENT": "6_1", "HPC_GPT_JOB": "7",
    "HPC_GPT_STOP_AT": "1700000000",
}  # fmt: skip


def test_an_enclosing_job_leaves_no_trace():
    assert submission_environment(SHELL | ENCLOSING_JOB, {"HPC_GPT_RUN": "/logs/mine"}) == {
        **SHELL,
        "HPC_GPT_RUN": "/logs/mine",
    }


def test_what_is_dropped_can_be_said():
    assert leaked_variables(SHELL | ENCLOSING_JOB) == sorted(ENCLOSING_JOB)
