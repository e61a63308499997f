"""What Slurm really writes when jobs end badly, and what is read from it. The jobs train nothing."""

from pathlib import Path

import pytest

from hpc_gpt.reader.failures.causes import Cause, first_cause
from hpc_gpt.reader.lines.read_log import read_log
from tests.slurm.cluster import Cluster
from tests.slurm.launcher import is_under_way
from tests.waiting import wait_for

# A task says that it has started. Rank 2 of four on two nodes then ends by itself; the others would go on.
_STARTED = 'touch "FOLDER/started.$SLURM_JOB_ID.$SLURM_PROCID"'
_ALL = 'until set -- "FOLDER/started.$SLURM_JOB_ID."*; [ $# = 4 ]; do sleep 0.1; done'
_RANKS = f"srun --kill-on-bad-exit=1 bash -c '{_STARTED}; [ $SLURM_PROCID = 2 ] && {{ {_ALL}; END; }}; sleep 3000'"
JOBS = {
    "fails": _RANKS.replace("END", 'echo "KeyError: 1"; exit 3'),
    "killed": _RANKS.replace("END", "kill -9 $$"),
    "breaks": _RANKS.replace("END", "kill -11 $$"),
    "cancelled": f"srun bash -c '{_STARTED}; sleep 3000'",
    "too many": "srun -n 400 hostname",
    "no file": "srun /no/such/file",
}


@pytest.fixture(scope="module")
def ended(small: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """{job: (its log, its id)} of all jobs, run at the same time to their ends."""
    folder = tmp_path_factory.mktemp("words")
    jobs = {}
    for name, body in JOBS.items():
        script, log = folder / f"{name}.sh", folder / f"{name}.out"
        script.write_text("#!/bin/bash\n" + body.replace("FOLDER", str(folder)) + "\n")
        done = small.run("sbatch", "--parsable", "-N2", "-n4", f"--output={log}", str(script), check=True)
        jobs[name] = (log, done.stdout.strip())

    def state(job_id: str) -> str:
        return small.run("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T").stdout.strip()

    log, cancelled = jobs["cancelled"]
    wait_for("the tasks of srun", lambda: len(list(folder.glob(f"started.{cancelled}.*"))) == 4, log.read_text)
    small.run("scancel", cancelled)
    wait_for("ends", lambda: not any(is_under_way(state(each)) for _, each in jobs.values()), log.read_text)
    return jobs


def cause(log: Path) -> Cause:
    return first_cause(read_log(log).parts, False)


def test_a_task_that_fails_is_named_with_its_node(ended: dict[str, tuple[Path, str]], small: Cluster) -> None:
    found = cause(ended["fails"][0])
    assert (found.ended, found.text, found.rank) == ("error", "rank 2: KeyError: 1", 2)
    assert found.node in small.run("scontrol", "show", "hostnames", _nodes(small, ended["fails"][1])).stdout.split()
    assert {failure.ended for failure in found.echoes} == {"error", "cancelled"}


def _nodes(small: Cluster, job_id: str) -> str:
    return small.run("sacct", "-X", "-n", "-P", "-o", "NodeList", "-j", job_id).stdout.strip()


@pytest.mark.long(but="first")
@pytest.mark.parametrize(("job", "words"), [("killed", "Killed"), ("breaks", "Segmentation fault")])
def test_a_signal_is_the_tasks_own_and_not_the_steps_end(ended, job, words):
    found = cause(ended[job][0])
    assert (found.ended, found.rank) == ("error", 2)
    assert found.text.endswith(f"task 2: {words}")
    assert found.node is not None


def test_a_cancel_blames_nobody(ended: dict[str, tuple[Path, str]]) -> None:
    found = cause(ended["cancelled"][0])
    assert (found.ended, found.rank, found.node) == ("cancelled", None, None)
    assert f"JOB {ended['cancelled'][1]} ON" in found.text


@pytest.mark.parametrize("job", ["too many", "no file"])
def test_what_cannot_start_is_the_users(ended: dict[str, tuple[Path, str]], job: str) -> None:
    assert cause(ended[job][0]).ended == "user_error"


def test_accounting_says_it_too(ended: dict[str, tuple[Path, str]], small: Cluster, tmp_path: Path) -> None:
    for form in ("-P", "-X"):
        wanted = {"cancelled": "cancelled", "fails": "error"}
        for job, ends in wanted.items():
            said = small.run("sacct", "-X", form, "-o", "JobID,JobName,State,ExitCode", "-j", ended[job][1]).stdout
            (tmp_path / "sacct.txt").write_text(said)
            assert cause(tmp_path / "sacct.txt").ended == ends, said
