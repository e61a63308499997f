"""Where the ranks of a rehearsed step are; the name a stand-in has; the rehearsal that a real Slurm refuses.

As commands the stand-ins run without coverage (`python -I -S`): no map knows which test executes a line of them.
"""

from pathlib import Path

import pytest

from hpc_gpt.launcher.rehearsal import commands, small_run
from hpc_gpt.launcher.rehearsal.local_slurm import RehearsedJob
from tests.launch.test_shell_functions import program
from tests.rehearsal.test_small_run import real

NO_STEP = "srun: error: Unable to create step for job 7: "
NO_NODES = f"{NO_STEP}Requested node configuration is not available"
NO_ROOM = f"{NO_STEP}More processors requested than permitted"

PLACES = {
    "": "node1 2 node2 2 node3 2",
    "--nodes=1-2": "node1 2",
    "--ntasks=1": "node1 1",
    "--ntasks=2 --ntasks-per-node=2": "node1 2",
    "--ntasks=5 --ntasks-per-node=4": "node1 4 node2 1",
    "--ntasks=5": "node1 2 node2 2 node3 1",
    "--ntasks=7": NO_ROOM,
    "--ntasks=7 --overcommit": "node1 3 node2 2 node3 2",
    "--nodelist=node3": "node3 2",
    "--nodelist=node3,node1": "node1 2 node3 2",
    "--nodelist=node3 --nodes=2": "node1 2 node3 2",
    "--nodelist=node4": NO_NODES,
    "--nodes=4": NO_NODES,
}


@pytest.mark.parametrize("words", PLACES)
def test_where_the_ranks_of_a_step_are(words: str) -> None:
    job = RehearsedJob(7, {"nodes": "3", "ntasks-per-node": "2"}, 60.0, [], "", {}, 0.0, "")
    job.nodes = ["node1", "node2", "node3"]
    try:
        found = commands.places(job, commands.parse_options("srun", [*words.split(), "true"])[0])
    except commands.RequestFault as fault:
        assert str(fault) == PLACES[words]
    else:
        assert " ".join(f"{node} {count}" for node, count in zip(*found, strict=True)) == PLACES[words]


def test_a_command_has_its_own_name_and_exit_code(slurm, capsys) -> None:
    own = Path("/proc/self/comm").read_text()
    try:
        commands.main(str(slurm.folder), "scontrol", "ping")
        assert Path("/proc/self/comm").read_text() == "scontrol\n"
        assert capsys.readouterr().out == "Slurmctld(primary) at rehearsal is UP\n"
        with pytest.raises(SystemExit, match="squeue: error: the rehearsal is over"):
            commands.main("/nowhere", "squeue", "-h", "-o%i")
    finally:
        Path("/proc/self/comm").write_text(own)


def test_a_refusal_of_a_real_slurm_ends_the_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    program(tmp_path, "scontrol", "echo 'Slurmctld(primary) at c is UP'")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    small = small_run.make_small(run := real(data__source="random"), 0)
    prepared, heard = small_run.PreparedRun(run, "#!/bin/bash\n", ""), list[small_run.Stage]()
    monkeypatch.setattr(small_run, "elements_of", lambda _: {})  # what would start
    outcome = small_run.rehearse(prepared, small, prepared, True, None, heard.append, print)
    refusal = "sbatch refused the job: Invalid account"
    assert [(each.name, each.ok, each.evidence) for each in heard] == [
        ("data", True, "random tokens"), ("slurm", False, f"sbatch --test-only: {refusal}"),
    ]  # fmt: skip
    assert outcome.cause == f"slurm: {refusal}"
