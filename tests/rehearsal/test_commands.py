"""What the stand-ins of Slurm answer, whole, in the test's own process; and the rehearsal that a real Slurm refuses.

As commands they run without coverage (`python -I -S`), so that no map knows which test executes a line of them.
"""

import math
import os
import time
from pathlib import Path

import pytest

from hpc_gpt.launcher.rehearsal import commands, small_run
from hpc_gpt.launcher.rehearsal.controller import signal_number
from hpc_gpt.launcher.rehearsal.local_slurm import MARK, RUNNING, RehearsedJob, SlurmState
from tests.launch.test_shell_functions import program
from tests.rehearsal.test_small_run import real

AWAY = "is not known to a rehearsal, which answers what hpc-gpt and its scripts ask; a real Slurm knows it"
SCRIPT = """#SBATCH --job-name='a b' --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:v100:4
#SBATCH --time=1:30
#SBATCH --no-requeue --open-mode=append
true
#SBATCH --nodes=9
"""
NO_NODES = "srun: error: Unable to create step for job 7: Requested node configuration is not available"
NO_ROOM = "srun: error: Unable to create step for job 7: More processors requested than permitted"


def said(call, *arguments: object) -> object:
    try:
        return call(*arguments)
    except ValueError as fault:
        return str(fault)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmState:
    """Four nodes and the next job 7, whose script asks for three nodes of two tasks."""
    monkeypatch.chdir(tmp_path)
    Path("job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=3 --ntasks-per-node=2 --time=1:30\ntrue\n")
    return SlurmState([f"node{number}" for number in range(1, 5)], 0, {MARK: str(tmp_path)}, next_id=7)


def asked(state: SlurmState, line: str) -> object:
    name, *words = line.split()
    return said(lambda: commands._COMMANDS[name](state, *commands.parse_options(name, words)))


def running(state: SlurmState, *words: str) -> RehearsedJob:
    asked(state, " ".join(["sbatch", *words, "job.sh"]))
    job = state.jobs[state.next_id - 1]
    job.state, job.nodes = RUNNING, state.nodes[: job.sizes.nodes]
    return job


def test_a_job_is_as_it_was_asked_for(state: SlurmState, capsys) -> None:
    job = running(state, "--exclude=node4", "--begin=now+90", "--wait", "job.sh")
    assert (job.id, job.limit_s, job.exclude, job.submit_folder) == (7, 120, "node4", os.getcwd())
    assert job.eligible == pytest.approx(time.time() + 90, abs=20)
    assert (job.options["job-name"], job.argv[1:]) == ("job.sh", ["job.sh"])
    spooled = Path(job.argv[0])
    assert (spooled.read_text(), spooled.stat().st_mode & 0o777) == (Path("job.sh").read_text(), 0o700)
    assert state.ignored == {"sbatch --wait": None}
    assert asked(state, "sbatch --test-only job.sh") == ""
    assert capsys.readouterr().err == "sbatch: Job 1 to start now using 3 nodes\n"
    assert (running(state, "--time=UNLIMITED").limit_s, state.next_id) == (math.inf, 9)
    Path("job.sh").write_text(SCRIPT)
    job = running(state, "--nodes=3")
    assert (job.options["job-name"], job.options["open-mode"], job.limit_s, job.requeues) == (
        "a b",
        "append",
        120,
        False,
    )
    assert (job.sizes.nodes, job.sizes.tasks, job.per_node, job.sizes.gpus) == (3, 12, 4, 4)
    assert {signal_number(name) for name in ("SIGUSR2", "usr2", "12")} == {12}


def test_a_profiles_options_are_accepted_and_idle_ones_named() -> None:
    options, left = commands.parse_options("sbatch", ["--error=job.err", "--nice=5", "--hold", "job.sh"])
    assert left == ["job.sh"]
    assert list(commands.ignored_options("sbatch", options)) == ["sbatch --error=job.err", "sbatch --hold"]
    assert not commands.ignored_options("sbatch", {"error": "both", "output": "both"})
    words = ["--export=ALL", "--mpi", "pmix", "--output=ranks.log", "-lK1", "bash"]
    options, left = commands.parse_options("srun", words)
    assert (list(commands.ignored_options("srun", options)), left) == (["srun --output=ranks.log"], ["bash"])


PLACES = {
    "": "node1 2 node2 2 node3 2",
    "--nodes=1": "node1 2",
    "--nodes=1-2": "node1 2",
    "--ntasks=1": "node1 1",
    "--ntasks=2": "node1 1 node2 1",
    "--ntasks=2 --ntasks-per-node=2": "node1 2",
    "--ntasks=5 --ntasks-per-node=4": "node1 4 node2 1",
    "--ntasks=6": "node1 2 node2 2 node3 2",
    "--ntasks=5": "node1 2 node2 2 node3 1",
    "--ntasks=7": NO_ROOM,
    "--ntasks=7 --overcommit": "node1 3 node2 2 node3 2",
    "--ntasks-per-node=1": "node1 1 node2 1 node3 1",
    "--nodelist=node3": "node3 2",
    "--nodelist=node3,node1": "node1 2 node3 2",
    "--nodelist=node3 --nodes=2": "node1 2 node3 2",
    "--nodelist=node4": NO_NODES,
    "--nodes=4": NO_NODES,
}


@pytest.mark.parametrize("words", PLACES)
def test_where_the_ranks_of_a_step_are(state: SlurmState, words: str) -> None:
    options, _ = commands.parse_options("srun", [*words.split(), "true"])
    found = said(commands.places, running(state), options)
    if isinstance(found, tuple):
        found = " ".join(f"{node} {count}" for node, count in zip(*found, strict=True))
    assert found == PLACES[words]


JOB = {"JobId": 7, "JobState": "RUNNING", "Reason": "None", "Restarts": 2, "ExitCode": "3:9",
       "EndTime": "2030-01-02T03:04:05", "PreemptTime": "None", "ExcNodeList": "(null)",
       "NodeList": "node1,node2,node3", "NumNodes": 3}  # fmt: skip
NO_JOB = "slurm_load_jobs error: Invalid job id specified"
ANSWERS = [
    ("sbatch --parsable job.sh", "9\n"),
    ("sbatch --nodes=4 --array=3 job.sh", "Submitted batch job 9\n"),
    ("sbatch --nodes=5 job.sh",
     "sbatch: error: Batch job submission failed: Requested node configuration is not available"),
    ("sbatch", f"sbatch: error: a script on stdin {AWAY}"),
    ("sbatch none.sh", "sbatch: error: Unable to open file none.sh"),
    ("sbatch --array=0-3 job.sh", f"sbatch: error: sbatch --array=0-3 {AWAY}"),
    ("sbatch --begin=noon job.sh", f"sbatch: error: the time noon {AWAY}"),
    ("sbatch --wrap=true", f"sbatch: error: sbatch --wrap {AWAY}"),
    ("scontrol ping", "Slurmctld(primary) at rehearsal is UP\n"),
    ("scontrol show config", "ClusterName             = rehearsal\nKillWait                = 30 sec\n"),
    ("scontrol show hostnames n[1-2],m", "n1\nn2\nm\n"),
    ("scontrol --oneliner show job 7", " ".join(f"{key}={value}" for key, value in JOB.items()) + " \n"),
    ("scontrol show job 7", "\n   ".join(f"{key}={value}" for key, value in JOB.items()) + "\n\n"),
    ("scontrol show job 9", NO_JOB),
    ("scontrol requeue 9", "Invalid job id specified for job 9"),
    ("scontrol update JobId=7 TimeLimit=10", f"scontrol: error: 'scontrol update timelimit=' {AWAY}"),
    ("scontrol show nodes", f"scontrol: error: 'scontrol show nodes' {AWAY}"),
    ("scontrol --details show job 7", f"scontrol: error: scontrol --details {AWAY}"),
    ("squeue --long", f"squeue: error: squeue --long {AWAY}"),
    ("scancel --name=it", f"scancel: error: scancel --name {AWAY}"),
    ("sbatch --nosuch job.sh", f"sbatch: error: sbatch --nosuch {AWAY}"),
    ("squeue --noheader --format=%i|%T|%r", "7|RUNNING|None\n8|PENDING|None\n"),
    ("squeue -h -o %i --jobs=8,9", "8\n"),
    ("squeue -h -o %i --states=running", "7\n"),
    ("squeue -h -o %i --states=all", "7\n8\n"),
    ("squeue -h -o %u", f"squeue: error: 'squeue -o %u' {AWAY}"),
    ("squeue -o %i", f"squeue: error: squeue without --noheader and --format {AWAY}"),
    ("scancel", f"scancel: error: scancel without a job id {AWAY}"),
    ("sacct -n -P -j 7,8 -o JobID,State", "7|RUNNING\n8|PENDING\n"),
    ("sacct -n -P -D -j 7 -o State,JobID", f"CANCELLED by {os.getuid()}|7\nRUNNING|7\n"),
    ("sacct -n -j 7 -o JobID", f"sacct: error: sacct but with -n -P -j and -o JobID,State {AWAY}"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), ANSWERS)
def test_a_command_answers(state: SlurmState, line: str, expected: str) -> None:
    job = running(state)
    job.restarts, job.exit, job.accounted = 2, (3, 9), ["CANCELLED"]
    job.ends_at = time.mktime(time.strptime("2030-01-02T03:04:05", "%Y-%m-%dT%H:%M:%S"))
    asked(state, "sbatch job.sh")
    assert asked(state, line) == expected


def test_a_command_has_its_own_name_and_exit_code(slurm, capsys) -> None:
    own = Path("/proc/self/comm").read_text().strip()
    try:
        commands.main(str(slurm.folder), "scontrol", "ping")
        assert Path("/proc/self/comm").read_text() == "scontrol\n"
        assert capsys.readouterr().out == "Slurmctld(primary) at rehearsal is UP\n"
        for folder, words, expected in (
            (slurm.folder, ("scontrol", "show", "job", "9"), NO_JOB),
            (slurm.folder, ("sinfo",), f"sinfo: error: sinfo {AWAY}"),
            (slurm.folder, ("srun", "true"), f"srun: error: srun outside a job {AWAY}"),
            (slurm.folder / "none", ("squeue", "-h", "-o%i"), "squeue: error: the rehearsal is over"),
        ):
            with pytest.raises(SystemExit) as end:
                commands.main(str(folder), *words)
            assert end.value.code == expected
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
    assert outcome.stages == heard
    assert [(each.name, each.ok, each.evidence) for each in heard] == [
        ("data", True, "random tokens"), ("slurm", False, f"sbatch --test-only: {refusal}"),
    ]  # fmt: skip
    assert outcome.cause == f"slurm: {refusal}"
