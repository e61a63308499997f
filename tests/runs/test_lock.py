"""The lock of a run: one holder, taken over only from one that is gone."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpc_gpt.runs import lock
from hpc_gpt.runs.lock import Holder, RunLocked, process_holder
from hpc_gpt.runs.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture
def other():
    """A process that may hold a lock, and can be ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_living_process_keeps_it_and_a_dead_one_does_not(run: RunFolder, other) -> None:
    lock.take(run, process_holder(other.pid))
    for ask in (lambda: lock.take(run, process_holder(os.getpid())), lambda: lock.check_free(run)):
        with pytest.raises(RunLocked, match=f"is being trained by process {other.pid} on ") as held:
            ask()
        assert held.value.hint == f"hpc-gpt stop {run.run_id} first, or wait for its end"
    other.kill()
    other.wait()
    lock.check_free(run)
    lock.take(run, process_holder(os.getpid()))
    lock.release(run, Holder("elsewhere", 1, "1"))
    assert lock.holder(run) == process_holder(os.getpid())
    lock.release(run, process_holder(os.getpid()))
    assert list(run.path.iterdir()) == []


def test_a_pid_that_is_used_again_holds_nothing(run: RunFolder, other) -> None:
    lock.take(run, Holder(process_holder(other.pid).host, other.pid, "1"))
    lock.take(run, process_holder(os.getpid()))


@pytest.mark.parametrize("text", ['{"host": "gone-1", "pid": 7, "pid_start": "70"}\n', "{", ""])
def test_one_that_cannot_be_asked_is_refused_with_the_line_that_removes_it(run: RunFolder, text: str) -> None:
    path = lock.lock_path(run)
    path.write_text(text or " ")
    with pytest.raises(RunLocked) as held:
        lock.take(run, process_holder(os.getpid()))
    assert ("process 7 on gone-1, which cannot be asked from here" in str(held.value)) is (len(text) > 1)
    assert f"rm {path}" in held.value.hint
    subprocess.run(held.value.hint.partition(": ")[2], shell=True, check=True)
    lock.take(run, process_holder(os.getpid()))


def test_of_many_that_take_over_a_dead_lock_at_once_one_has_it(run: RunFolder) -> None:
    lock.take(run, Holder(process_holder(os.getpid()).host, os.getpid(), "1"))
    taken: list[int] = []
    barrier = threading.Barrier(8)

    def start(number: int) -> None:
        barrier.wait()
        try:  # each has a job of its own, which no other finds gone
            lock.take(run, Holder("here", slurm_job=str(number)), lambda other: other.slurm_job is None)
        except RunLocked:
            return
        taken.append(number)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    holder = lock.holder(run)
    assert holder is not None
    assert [str(number) for number in taken] == [holder.slurm_job]
