"""What queued runs are told of bad nodes, by stand-ins of Slurm's clients; tests/slurm asks a real one."""

import os
from pathlib import Path

import pytest

from hpc_gpt.core.ends import bad_nodes
from hpc_gpt.launcher.attempts.siblings import forgive, tell
from tests.made_runs import unsubmitted_run


@pytest.mark.parametrize("refuses", [False, True])
def test_a_queued_job_is_changed_once_and_a_refusal_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refuses: bool
) -> None:
    finder, sibling = unsubmitted_run("generic-slurm"), unsubmitted_run("generic-slurm")
    queue = f"7|(null)|n[1-2]|{sibling.job_script}\\n8|n4|(null)|{sibling.job_script}\\n9|(null)||/elsewhere/job.sh"
    banner = "Authorized use only\\n| maintenance on Monday |\\n"
    scripts = {"squeue": f"printf '{banner}{queue}\\n'", "sbatch": "true", "scontrol": f"echo $* >>{tmp_path}/asked"}
    for name, text in scripts.items():
        refusal = "; echo 'error: Access denied' >&2; exit 1" if refuses and name == "scontrol" else ""
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}{refusal}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tell(finder, ["n2", "n3"])
    assert (tmp_path / "asked").read_text() == "update JobId=7 ExcNodeList=n1,n2,n3\n"
    if refuses:
        assert capsys.readouterr().out == "note: Slurm does not change the nodes of job 7: Access denied\n"
        assert sibling.told_nodes() == {}
        return
    assert capsys.readouterr().out == f"job 7 of run {sibling.run_id} excludes n3, too\n"
    assert sibling.told_nodes() == {"n3": finder.run_id}
    assert (forgive("generic-slurm", "n2"), forgive("generic-slurm", "n3"), sibling.told_nodes()) == (0, 1, {})


def test_one_runs_word_alone_tells_nobody() -> None:
    for _ in range(2):
        bad_nodes.note("site", "n3", "ranks hung", "first", 1)
    bad_nodes.note("site", "n4", "slow", "first", 1, sure=True)
    assert bad_nodes.found("site", "first", 0.0) == ["n4"]
    bad_nodes.note("site", "n3", "ranks hung", "second", 1)
    assert (bad_nodes.found("site", "first", 0.0), bad_nodes.found("site", "second", 0.0)) == (["n3", "n4"], ["n3"])
