"""The reader's process: the same chunks, its faults with their words, and an end together with the rank's."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from hpc_gpt.core.errors import DataError
from hpc_gpt.core.process import is_alive, start_time
from hpc_gpt.trainer.tokens.reader_process import ReaderProcess, ReaderTask, read_chunks
from tests.trainer.tokens.shard_folders import SEQ, write_shards
from tests.waiting import wait_for


@pytest.fixture
def start() -> Iterator[Callable[[ReaderTask], ReaderProcess]]:
    started: list[ReaderProcess] = []

    def begin(task: ReaderTask) -> ReaderProcess:
        started.append(ReaderProcess(task))
        return started[-1]

    yield begin
    for reader in started:
        reader.close()


def task(folder: Path, skip: bool = False) -> ReaderTask:
    places = {path.name: (0, 3) for path in sorted(folder.iterdir())}
    return ReaderTask(str(folder), places, "byte", SEQ, 7, skip)


def test_chunks_are_those_of_a_reader_in_the_rank(tmp_path: Path, start: Callable[[ReaderTask], ReaderProcess]) -> None:
    what = task(write_shards(tmp_path / "shards é'", (300, 2, 9, 600)))
    for near, far in zip(islice(read_chunks(what), 12), start(what), strict=False):
        assert (near.shard, near.epoch, near.first, near.ends) == (far.shard, far.epoch, far.first, far.ends)
        assert near.rows.dtype == far.rows.dtype == np.uint16
        assert np.array_equal(near.rows, far.rows)


def test_a_fault_comes_with_file_and_offset(tmp_path: Path, start: Callable[[ReaderTask], ReaderProcess]) -> None:
    (folder := tmp_path / "shards").mkdir()
    (folder / "a.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
    with pytest.raises(DataError, match=r'a\.jsonl:2: no object with a string under "text" at byte 17') as fault:
        next(start(task(folder)))
    assert "each line must look like" in fault.value.hint
    chunk = next(start(task(folder, skip=True)))
    assert chunk.ends
    assert chunk.fault is not None
    assert "a.jsonl:2" in chunk.fault


def test_a_killed_reader_is_an_error_and_no_wait(tmp_path: Path, start: Callable[[ReaderTask], ReaderProcess]) -> None:
    reader = start(task(write_shards(tmp_path / "shards", (600, 600))))
    next(reader)
    os.kill(reader.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"data reader \(process {reader.pid}\) was killed by SIGKILL; was the mem"):
        [next(reader) for _ in range(1000)]


def test_the_ranks_signals_are_not_the_readers(tmp_path: Path, start: Callable[[ReaderTask], ReaderProcess]) -> None:
    reader = start(task(write_shards(tmp_path / "shards", (600, 600))))
    # At once, before its first line runs; and once it is at work.
    for _ in range(2):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(reader.pid, number)
        assert len(next(reader).rows)


@pytest.mark.parametrize("at_work", [True, False], ids=["writing", "starting"])
def test_a_killed_rank_leaves_no_reader(tmp_path: Path, at_work: bool) -> None:
    """The rank is killed while its readers wait for room in their pipes, or before they have begun."""
    folder = write_shards(tmp_path / "shards", (4095,) * 8)
    program = (
        "import os, sys, time\n"
        "from hpc_gpt.trainer.tokens.reader_process import ReaderProcess\n"
        "from tests.trainer.tokens.test_reader_process import task\n"
        "from pathlib import Path\n"
        "readers = [ReaderProcess(task(Path(sys.argv[1]))) for _ in range(2)]\n"
        "if sys.argv[2] == 'True': [next(reader) for reader in readers]\n"
        "helper = os.fork()\n"  # holds copies of the pipes, as a library's helper may
        "if helper: print(helper, *(reader.pid for reader in readers), flush=True)\n"
        "time.sleep(600)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", program, folder, str(at_work)], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    helper, *readers = [(int(pid), start_time(int(pid))) for pid in rank.stdout.readline().split()]
    try:
        assert len(readers) == 2
        assert all(is_alive(*reader) for reader in readers)
        rank.kill()
        rank.wait()
        rank.stdout.close()
        wait_for("end of the readers of a dead rank", lambda: not any(is_alive(*reader) for reader in readers))
        assert is_alive(*helper)
    finally:
        rank.kill()
        os.kill(helper[0], signal.SIGKILL)


def test_the_reader_loads_no_torch() -> None:
    program = "import json, sys, hpc_gpt.trainer.tokens.reader_process; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "deepspeed", "zstandard", "tokenizers"} & set(json.loads(done.stdout))
