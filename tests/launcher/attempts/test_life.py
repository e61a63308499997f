"""What is not known is not gone: who holds a run, as a resumption, a removal and another container see it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.checkpoints.branches import is_read, reading
from hpc_gpt.core.errors import RunFolderError, SlurmUnreachable
from hpc_gpt.core.process import Life, life_of, process_identity
from hpc_gpt.core.processes import lock
from hpc_gpt.core.processes.lock import holder
from hpc_gpt.core.runs.run_folder import RunFolder, jobs_of, local_job
from hpc_gpt.launcher.attempts.life import SlurmStates, ask_life
from hpc_gpt.launcher.local.queue import note_attempt
from hpc_gpt.launcher.resumption import check_not_live
from hpc_gpt.launcher.watch.status import PATIENCE, read_status
from tests.cli.command import in_process
from tests.made_runs import add_attempt, metrics_line, unsubmitted_run, with_job
from tests.programs import put
from tests.waiting import wait_for

SILENT = 'echo "slurm_load_jobs error: Socket timed out on send/recv operation" >&2; exit 1'
needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0,
    reason="unshare makes no pid namespace for this user here",
)
# A process that holds the lock of a run until it is killed, or a reader's note. It is pid 1 of its namespace.
HOLDS = """
import os, signal, sys
from pathlib import Path
from hpc_gpt.core.processes import lock
from hpc_gpt.core.checkpoints.branches import reading
from hpc_gpt.core.runs.run_folder import RunFolder
with {"lock": lock.locked, "note": reading}[sys.argv[1]](RunFolder(Path(sys.argv[2]))):
    print("held", flush=True)
    signal.pause()
"""


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Makes squeue a script that does this; sacct knows nothing."""
    (folder := tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv(PATIENCE, "20")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    put(folder / "sacct", "#!/bin/bash\nexit 1\n")
    return lambda does: put(folder / "squeue", f"#!/bin/bash\n{does}\n")


@pytest.fixture
def running():
    """A run whose job 7 has begun and written no end."""
    run = with_job(unsubmitted_run("generic-slurm"), "7")
    add_attempt(run, [metrics_line(5)], None, job_id="7")
    lock.take(run, lock.job_holder("7"))
    return run


@pytest.mark.parametrize(
    ("slurm", "life"),
    [
        (SlurmStates(), Life.UNKNOWN),
        (SlurmStates(None, {"7": ["RUNNING"]}), Life.UNKNOWN),
        (SlurmStates(None, {"7": ["NODE_FAIL", "PENDING"]}), Life.UNKNOWN),
        (SlurmStates(None, {"7": ["COMPLETED"]}), Life.GONE),
        (SlurmStates({"8": "RUNNING"}), Life.GONE),
        (SlurmStates({"7": "RUNNING"}), Life.LIVES),
        (SlurmStates({"7": "FAILED"}), Life.GONE),
        (SlurmStates({"8": "RUNNING"}, asked=["8"]), Life.UNKNOWN),
        (SlurmStates({"8": "RUNNING"}, asked=["7"], is_private=True), Life.GONE),
    ],
)
def test_a_job_is_gone_only_if_slurm_says_so(tmp_path: Path, slurm: SlurmStates, life: Life) -> None:
    assert slurm.life("7", tmp_path) is life


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_the_job_of_another_user_may_be_hidden(tmp_path: Path) -> None:
    os.chown(tmp_path, 12001, 12001)
    private = SlurmStates({"8": "RUNNING"}, is_private=True)
    assert private.life("7", tmp_path) is Life.GONE, "root is shown all jobs"
    tmp_path.chmod(0o755)
    code = (
        "import os, sys, pathlib\nfrom hpc_gpt.launcher.attempts import life\nos.seteuid(12002)\n"
        "print(life.SlurmStates({}, is_private=True).life('7', pathlib.Path(sys.argv[1])).value)"
    )
    done = subprocess.run([sys.executable, "-c", code, "/"], capture_output=True, text=True, check=True)
    assert done.stdout == "not known\n"


def test_a_resumption_without_an_answer_is_refused(squeue, running) -> None:
    squeue(SILENT)
    with pytest.raises(SlurmUnreachable) as refused:
        check_not_live(running)
    assert "job 7" in str(refused.value)
    assert "Socket timed out on send/recv operation" in str(refused.value)
    assert "--force declares that it is gone" in refused.value.hint
    check_not_live(running, force=True, dry=True)
    assert not running.is_declared_gone("7")
    check_not_live(running, force=True)
    assert running.is_declared_gone("7")


def test_a_job_that_is_seen_alive_is_never_declared_gone(squeue, running) -> None:
    squeue('echo "7|RUNNING|None"')
    with pytest.raises(RunFolderError, match="is running"):
        check_not_live(running, force=True)
    assert not running.is_declared_gone("7")


def test_a_run_with_an_end_and_a_lock_needs_no_answer(squeue, running) -> None:
    squeue(SILENT)
    running.attempt(1).write_ended("error", "its cause", 5)
    with pytest.raises(SlurmUnreachable):
        check_not_live(running)
    lock.release(running, lock.job_holder("7"))
    check_not_live(running)


def test_a_job_of_another_user_is_asked_for_by_its_id(squeue, running) -> None:
    squeue('case "$*" in *--jobs=7*) echo "7|RUNNING|None" ;; *--jobs=*) exit 9 ;; esac')
    assert read_status([running])[0].state == "running"
    assert ask_life(running, lock.job_holder("7")) == (Life.LIVES, "")
    with pytest.raises(RunFolderError, match="is running"):
        check_not_live(running)
    squeue('case "$*" in *--jobs=*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;; esac')
    assert ask_life(running, lock.job_holder("7"))[0] is Life.GONE
    check_not_live(running)


def test_the_host_that_sees_it_removes_a_killed_cleans_lock(squeue, running) -> None:
    """A job on another host could not know that its holder is gone."""
    squeue('echo "7|FAILED|None"')
    lock.release(running, lock.job_holder("7"))
    with subprocess.Popen(["sleep", "600"]) as cleans:
        lock.take(running, lock.process_holder(cleans.pid))
        cleans.kill()
    lock.remove_gone(running, lambda other: ask_life(running, other)[0])
    assert not lock.lock_path(running).exists()


def in_namespace(run, what: str) -> subprocess.Popen[str]:
    """A process in a pid namespace of its own, as in a container, that holds the run's lock or a reader's note."""
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*apart, sys.executable, "-c", HOLDS, what, str(run.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@needs_namespaces
def test_another_container_is_seen_to_live_and_to_end() -> None:
    run = unsubmitted_run("local")
    process = in_namespace(run, "lock")
    try:
        path, holder = lock.lock_path(run), lock.holder(run)
        assert holder is not None
        assert (holder.pid, holder.life(), holder.life(path)) == (1, Life.UNKNOWN, Life.LIVES)
        with pytest.raises(lock.RunLocked, match="is being trained by process 1 on "):
            check_not_live(run, force=True)
        assert not run.is_declared_gone(holder.job)
    finally:
        process.kill()
        process.wait()
    wait_for("its end", lambda: holder.life(path) is Life.GONE)
    check_not_live(run)
    with lock.locked(run):
        pass


@needs_namespaces
def test_without_the_kernels_lock_a_container_is_not_known() -> None:
    run = unsubmitted_run("local")
    other = replace(lock.process_holder(os.getpid()), pid_namespace="pid:[1]")
    lock.lock_path(run).write_text(lock.text_of(other))
    run.add_submission({**lock.submission_line(os.getpid(), "9", [], "local"), "pid_namespace": "pid:[1]",
                        "job": other.job})  # fmt: skip
    run.new_attempt()
    (status,) = read_status([run])
    assert "in another container of this machine" in str(status.cause)
    with pytest.raises(lock.RunLocked, match="cannot be asked from here") as refused:
        check_not_live(run)
    assert "--force declares that it is gone" in refused.value.hint
    check_not_live(run, force=True)
    with lock.locked(run):
        pass


@needs_namespaces
def test_the_checkpoints_that_another_container_reads_stay() -> None:
    run = unsubmitted_run("local")
    process = in_namespace(run, "note")
    assert is_read(run.path)
    process.kill()
    process.wait()
    wait_for("its end", lambda: not is_read(run.path))
    with reading(run):
        assert is_read(run.path)
    assert not is_read(run.path)


def test_a_process_of_another_namespace_is_not_one_of_this_pid() -> None:
    note = process_identity(os.getpid())
    assert life_of(note) is Life.LIVES
    assert life_of({**note, "pid_namespace": "pid:[1]"}) is Life.UNKNOWN
    assert life_of({**note, "host": "elsewhere", "boot": "another"}) is Life.UNKNOWN
    assert life_of({**note, "boot": "another"}) is Life.GONE
    assert life_of({key: value for key, value in note.items() if key != "pid_namespace"}) is Life.LIVES, "of 0.4.0"
    assert json.dumps(note)


def test_a_later_job_with_the_same_pid_is_another_job() -> None:
    """A stop, a cancel and the restarts of a container's process 9 are not those of a later container's."""
    run, pid = unsubmitted_run("local"), os.getpid()
    earlier = {"job_id": str(pid), "job": local_job({**process_identity(pid), "pid_namespace": "pid:[1]"}), "in_job": 3}
    (run.new_attempt().folder / "attempt.json").write_text(json.dumps(earlier))
    run.add_submission({"scheduler": "local", **earlier})
    for job in jobs_of(run):
        run.stop_mark(job).touch()
        run.mark_cancelled(job)
    first, second = run.attempt(1), run.new_attempt()
    note_attempt(run, second, pid)
    assert (first.job_id, run.asked_to_end(first.job)) == (second.job_id, "cancelled")
    assert run.asked_to_end(second.job) == ""
    assert (second.job_start[1], second.restarts_in_job, first.next_of_job([second])) == (0, 0, None)
    third = run.new_attempt()
    note_attempt(run, third, pid)
    assert (third.job_start[1], second.next_of_job([third])) == (1, third)


def test_a_job_of_an_earlier_version_is_its_pid() -> None:
    run = unsubmitted_run("local")
    (run.new_attempt().folder / "attempt.json").write_text('{"job_id": "9"}')
    run.stop_mark("9").touch()
    assert run.asked_to_end(run.attempt(1).job) == "stopped"


STEPS = """#!/bin/bash
#SBATCH --ntasks=1
for ((step = 1; ; step++)); do echo "step $step | loss 3.0"; sleep 0.2; done
"""


@needs_namespaces
def test_the_host_stops_a_run_in_another_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_GPT_LOGS", str(tmp_path / "logs"))
    (tmp_path / "job.sh").write_text(STEPS)
    submit = f"{sys.executable} -m hpc_gpt submit --cluster local job.sh && exec sleep 600"
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", submit]
    with subprocess.Popen(apart, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as container:
        try:
            (path,) = wait_for("its run", lambda: list(tmp_path.glob("logs/job/*")))
            run = RunFolder(path)
            wait_for("its steps", lambda: run.attempt(1).last_metrics())
            wait_for("its lock", lambda: (owner := holder(run)) and owner.locked_on)
            assert read_status([run])[0].state == "running"
            assert "runs in another container of this machine" in in_process("cancel", path, "--yes", code=1).stderr
            in_process("stop", path, code=0)
            wait_for("its end", lambda: read_status([run])[0].state == "stopped")
        finally:
            container.kill()
