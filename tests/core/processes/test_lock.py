"""The lock of a run: one holder, taken over only from one that is gone."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.process import Life, boot_id
from hpc_gpt.core.processes import lock
from hpc_gpt.core.processes.find_processes import end_run_on, task_variables
from hpc_gpt.core.processes.lock import Holder, RunLocked, process_holder
from hpc_gpt.core.runs.run_folder import RunFolder


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


@pytest.mark.parametrize(("boot", "life"), [("of another boot", Life.GONE), (boot_id(), Life.LIVES)])
def test_a_start_time_counts_from_its_boot(run: RunFolder, other, boot, life: Life) -> None:
    before = replace(process_holder(other.pid), boot=boot)
    lock.take(run, before)
    assert lock.holder(run) == before
    assert before.life() is life
    with contextlib.nullcontext() if life is Life.GONE else pytest.raises(RunLocked):
        lock.take(run, process_holder(os.getpid()))


def test_what_a_dead_holder_had_started_is_named_and_keeps_it(run: RunFolder, other) -> None:
    lock.take(run, process_holder(other.pid))
    variables = {"PATH": os.environ["PATH"], **task_variables(run, run.new_attempt(), 0)}
    with subprocess.Popen(["sleep", "600"], env=variables) as left, subprocess.Popen(["sleep", "600"]) as unmarked:
        try:
            other.kill()
            other.wait()
            for ask in (lambda: lock.take(run, process_holder(os.getpid())), lambda: lock.check_free(run)):
                with pytest.raises(RunLocked, match=f"process {left.pid} runs on without a supervisor") as held:
                    ask()
                assert held.value.hint.startswith(f"hpc-gpt cancel {run.run_id}")
            assert end_run_on(run, 60) == [left.pid]
            assert (left.wait(), unmarked.poll()) == (-signal.SIGTERM, None)
            lock.take(run, process_holder(os.getpid()))
        finally:
            for each in (left, unmarked):
                each.kill()


@pytest.mark.parametrize("text", ['{"host": "gone-1", "pid": 7, "pid_start": "70"}\n', "{", ""])
def test_one_that_cannot_be_asked_is_refused_with_the_remedy(run: RunFolder, text: str) -> None:
    (path := lock.lock_path(run)).write_text(text or " ")
    with pytest.raises(RunLocked) as held:
        lock.take(run, process_holder(os.getpid()))
    assert ("process 7 on gone-1, which cannot be asked from here" in str(held.value)) is (len(text) > 1)
    if (holder := lock.holder(run)) is None:
        assert f"rm {path}" in held.value.hint
        subprocess.run(held.value.hint.partition(": ")[2], shell=True, check=True)
    else:
        assert f"hpc-gpt submit --resume {run.run_id} --force" in held.value.hint
        run.declare_gone(holder.job)
    lock.take(run, process_holder(os.getpid()))


def gone(*jobs: str):
    """The life of holders of which these jobs are gone and all others live."""
    return lambda other: Life.GONE if other.slurm_job in jobs else Life.LIVES


_at: dict[int, str] = {}  # {number of an access to the disk: the start that comes before it}
_accesses = itertools.count()
_come: list = []


def _interrupt(event: str, _: object) -> None:
    """Lets another start come before an access of the first one to the disk."""
    if _come and event in ("open", "os.rename", "os.link", "os.remove", "os.mkdir"):
        start = _come.pop()
        if (number := _at.pop(next(_accesses), None)) is not None:
            start(number)
        _come.append(start)


sys.addaudithook(_interrupt)


def _taken(folder: Path, between: dict[int, str]) -> tuple[list[str], int]:
    """(who took a dead lock, accesses of the first start): start 1, with others before some of its accesses."""
    global _accesses
    folder.mkdir()
    run, won = RunFolder(folder), []
    lock.take(run, Holder("here", slurm_job="0"))

    def start(number: str) -> None:
        try:  # the job 0 is gone; those of the starts live
            lock.take(run, Holder("here", slurm_job=number), gone("0"))
        except RunLocked:
            return
        won.append(number)

    _accesses = itertools.count()
    _at.clear()
    _at.update(between)
    _come.append(start)
    try:
        start("1")
    finally:
        _come.clear()
    assert (holder := lock.holder(run)) is not None
    assert [holder.slurm_job] == won, between
    return won, next(_accesses)


def test_a_dead_lock_goes_to_one_start_whatever_comes_between(tmp_path: Path) -> None:
    """A start that had read the dead lock took away the lock of the one that had taken over, for as long as it needed
    to see what it had: a third start found none, and had it, too."""
    _, accesses = _taken(tmp_path / "alone", {})
    assert accesses > 5
    for second, third in itertools.combinations(range(accesses + 3), 2):
        _taken(tmp_path / f"{second}-{third}", {second: "2", third: "3"})
    left = {path.name for folder in tmp_path.iterdir() for path in folder.iterdir()}
    assert left == {"lock.json"}


def test_one_killed_while_it_takes_over_leaves_it_to_the_next(tmp_path: Path) -> None:
    for access in range(_taken(tmp_path / "alone", {})[1]):
        run = RunFolder(tmp_path / str(access))
        run.path.mkdir()
        lock.take(run, Holder("here", slurm_job="0"))
        if (child := os.fork()) == 0:
            _come.append(lambda _: os._exit(0))
            _at.update({access: "ends"})
            globals()["_accesses"] = itertools.count()
            lock.take(run, Holder("here", slurm_job="00"), gone("0"))
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        lock.take(run, Holder("here", slurm_job="1"), gone("0", "00"))
        assert lock.holder(run) == Holder("here", slurm_job="1")
