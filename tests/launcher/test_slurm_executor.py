"""What a submission to Slurm leaves in submissions.jsonl: for a run, the jobs of a chain, an array; without Slurm."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.errors import JobRefused
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.slurm import executor as slurm_executor
from hpc_gpt.core.slurm.clients import Answer
from tests.made_runs import unsubmitted_run
from tests.programs import put

REFUSAL = Answer(1, "", "sbatch: error: QOSMaxSubmitJobPerUserLimit")


@pytest.fixture
def run(own_folders: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    srun = put(tmp_path / "bin" / "srun", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{srun.parent}:/usr/bin:/bin")
    return unsubmitted_run("generic-slurm")


def sbatch(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> list[list[str]]:
    """Its command lines; it gives these answers, then jobs 1, 2 and so on."""
    lines: list[list[str]] = []

    def ask(line: list[str], environment: object, cluster: str | None) -> Answer:
        lines.append([*line, *([cluster] if cluster else [])])
        known = len(lines) <= len(answers)
        return answers[len(lines) - 1] if known else Answer(0, f"Submitted batch job {len(lines)}\n", "")

    monkeypatch.setattr(slurm_executor, "ask", ask)
    return lines


def test_a_run_is_one_job(run, monkeypatch):
    lines = sbatch(monkeypatch)
    assert slurm_executor.submit_to_slurm(run, run.resolved()) == ["1"]
    (line,) = lines
    (entry,) = run.submissions()
    assert (entry["scheduler"], entry["job_id"], entry["refused"]) == ("slurm", "1", None)
    assert entry["command"] == line
    assert line[-2:] == ["--export=ALL", str(run.job_script)]
    assert "link" not in entry


def test_each_job_of_a_chain_says_which_until_one_is_refused(run, monkeypatch):
    resolved = run.resolved()
    chained = replace(resolved, cluster=replace(resolved.cluster, chain="singleton"))
    taken = [Answer(0, f"Submitted batch job {number}\n", "") for number in (7, 8)]
    lines = sbatch(monkeypatch, *taken, REFUSAL)
    assert slurm_executor.submit_to_slurm(run, chained, 4) == ["7", "8"]
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


def test_each_element_of_an_array_is_a_job_of_its_own(run, monkeypatch, tmp_path):
    other = unsubmitted_run("generic-slurm")
    lines = sbatch(monkeypatch)
    assert slurm_executor.submit_array(tmp_path, run.resolved(), [run, other], 3) == "1"
    (line,) = lines
    assert [each.submissions()[-1]["job_id"] for each in (run, other)] == ["1_0", "1_1"]
    assert "--array=0-1%3" in line


def test_a_refused_array_is_refused_in_each_run(run, monkeypatch, tmp_path):
    other = unsubmitted_run("generic-slurm")
    sbatch(monkeypatch, REFUSAL)
    with pytest.raises(JobRefused, match="QOSMaxSubmitJobPerUserLimit"):
        slurm_executor.submit_array(tmp_path, run.resolved(), [run, other], None)
    for each in (run, other):
        assert (each.submissions()[-1].get("job_id"), bool(each.submissions()[-1]["refused"])) == (None, True)
