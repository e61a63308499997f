"""The lock under which DeepSpeed's kernels are built: kept while its process builds, left over by none."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from hpc_gpt.trainer.engines import build_lock
from hpc_gpt.trainer.engines.build_lock import LEFT_OVER_S, BuildLock
from hpc_gpt.trainer.engines.library_patches import use_build_lock
from tests.waiting import wait_for

HOLDS = """
import signal, sys
from hpc_gpt.trainer.engines.build_lock import BuildLock
BuildLock(sys.argv[1]).try_acquire()
print("held", flush=True)
signal.pause()
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "lock"


class Looking(BuildLock):
    """Counts its looks at a lock that another has."""

    looks = 0

    def _remove_left_over(self) -> None:
        super()._remove_left_over()
        self.looks += 1


def asked_for(lock: Path) -> threading.Thread:
    """Waits for it on a thread, which has an end once it has it; it then gives it back. It has looked three times."""
    mine = Looking(str(lock), wait_seconds=0.01)

    def ask() -> None:
        assert mine.try_acquire()
        mine.release()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    wait_for("three looks", lambda: mine.looks > 2 or not thread.is_alive())
    return thread


def comes(thread: threading.Thread) -> bool:
    return wait_for("the lock", lambda: not thread.is_alive())


def age(lock: Path, by_s: float) -> None:
    os.utime(lock, (time.time() - by_s,) * 2)


def test_who_looks_at_a_new_file_keeps_no_maker_from_locking_it(lock: Path, monkeypatch) -> None:
    opens, looks = os.open, list[int]()

    def open_and_be_seen(path: Path, *words: int) -> int:
        file = opens(path, *words)
        looks.append(opens(path, os.O_RDWR))  # as one that waits, between the file and its lock
        fcntl.flock(looks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        threading.Timer(0.2, os.close, looks).start()
        return file

    mine = BuildLock(str(lock))
    with monkeypatch.context() as patched:
        patched.setattr(build_lock.os, "open", open_and_be_seen)
        assert mine.try_acquire()
    assert lock.read_bytes() == b"locked by flock\n"
    with lock.open("r+b") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    mine.release()


def test_a_builder_keeps_its_lock_until_it_is_killed(lock: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, lock], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        age(lock, 2 * LEFT_OVER_S)
        asked = asked_for(lock)
        assert asked.is_alive()
        age(lock, 0)
        process.send_signal(signal.SIGKILL)
    assert comes(asked)
    assert not lock.exists()


def test_torchs_own_lock_counts_until_it_is_old(lock: Path) -> None:
    assert FileBaton(str(lock)).try_acquire()
    age(lock, LEFT_OVER_S / 2)
    asked = asked_for(lock)
    assert asked.is_alive()
    age(lock, LEFT_OVER_S + 1)
    assert comes(asked)


def test_torch_heeds_ours(lock: Path) -> None:
    mine = BuildLock(str(lock))
    assert mine.try_acquire()
    assert not FileBaton(str(lock)).try_acquire()
    mine.release()
    assert FileBaton(str(lock)).try_acquire()


def test_where_no_flock_is_age_alone_decides(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_flock)
    assert BuildLock(str(lock)).try_acquire()
    asked = asked_for(lock)
    assert asked.is_alive()
    age(lock, LEFT_OVER_S + 1)
    assert comes(asked)


def test_torch_builds_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "FileBaton", FileBaton)
    use_build_lock()
    (tmp_path / "lock").write_text("locked by flock\n")
    source = tmp_path / "nothing.cpp"
    source.write_text("no C++\n")
    with pytest.raises(RuntimeError, match="Error building extension 'nothing'"):
        cpp_extension.load("nothing", [str(source)], build_directory=str(tmp_path))
    assert not (tmp_path / "lock").exists()
