"""Streams as micro-batches: a position that counts what was consumed, and runs that go on from it to the last digit."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_gpt.core.errors import DataError
from hpc_gpt.core.process import is_alive, start_time
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment import Data
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.training_state import read_positions
from hpc_gpt.trainer.data import Stream, StreamedShards, open_stream
from hpc_gpt.trainer.model.context_parallel import WHOLE, SequencePart
from hpc_gpt.trainer.tokens.samples import open_samples
from hpc_gpt.trainer.tokens.shard_stream import ShardSet
from tests.made_runs import read_run
from tests.processes import children_of, command_of
from tests.trainer.launch import Launch, figures, new_run, settings, train
from tests.trainer.tokens.shard_folders import streaming, write_shard, write_shards
from tests.waiting import wait_for

pytestmark = pytest.mark.xdist_group("train-streamed_shards")

Open = Callable[..., StreamedShards]


@pytest.fixture
def start() -> Iterator[Open]:
    opened: list[StreamedShards] = []

    def begin(resolved: Resolved, dp_rank: int = 0, part: SequencePart = WHOLE) -> StreamedShards:
        shards = open_samples(resolved)
        assert isinstance(shards, ShardSet)
        stream: Any = open_stream(shards, resolved, dp_rank, torch.device("cpu"), part=part)
        opened.append(stream)
        return opened[-1]

    yield begin
    for stream in opened:
        stream.close()


def rows(stream: Stream, *steps: int) -> list[Any]:
    found = []
    for step in steps:
        for tokens, targets in stream.step(step):
            assert tokens.dtype == targets.dtype == torch.int64
            assert tokens.shape == targets.shape == (2, 4)
            assert torch.equal(tokens[:, 1:], targets[:, :-1])
            found.append(tokens.tolist())
    return found


def test_documents_of_a_stream_go_along_with_its_micro_batches(tmp_path: Path, start: Open) -> None:
    (folder := tmp_path / "text").mkdir()
    for name in "abc":
        (folder / f"{name}.jsonl").write_text('{"text": "to"}\n{"text": "be"}\n' * 20)
    stream = start(streaming(folder, mask_documents=True, eval_fraction=0.4, train={"eval_every": 1}))
    for micro_batch in (*stream.step(0), *stream.evaluation(1)):
        assert len(micro_batch) == 3
        tokens, _, boundaries = micro_batch
        begins = torch.cat([torch.ones(len(tokens), 1, dtype=torch.bool), tokens[:, :-1] == 0], 1)
        assert torch.equal(boundaries.starts == torch.arange(tokens.shape[1]), begins)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_is_what_was_consumed_however_far_was_read(tmp_path: Path, start: Open, workers: int) -> None:
    sizes = (700, 30, 300, 5)
    folder = write_shards(tmp_path / "shards", sizes)
    resolved = streaming(folder, dp=2, workers=workers)
    for dp_rank in range(2)[workers > 0 :]:
        one = start(resolved, dp_rank)
        first = rows(one, *range(3))
        saved = {dp_rank: json.loads(json.dumps(one.position()))}
        # Four samples a step and rank; five micro-batches more are read.
        places = saved[dp_rank]["places"].items()
        assert sum(epoch * sizes[int(shard[:2])] + taken for shard, (epoch, taken) in places) == 12
        rest = rows(one, *range(3, 40))
        assert len(first + rest) == 80
        other = start(resolved, dp_rank)
        other.restore(saved)
        assert rows(other, *range(3, 40)) == rest
        assert other.position() == one.position()


def test_what_a_step_leaves_is_passed_over(tmp_path: Path, start: Open) -> None:
    resolved = streaming(write_shards(tmp_path / "shards", (300,)))
    whole, part = start(resolved, 0), start(resolved, 0)
    next(part.step(0))
    assert rows(part, 1) == rows(whole, 0, 1)[2:]
    assert part.position() == whole.position()


def test_evaluation_has_the_same_samples_in_any_layout(tmp_path: Path, start: Open) -> None:
    folder = write_shards(tmp_path / "shards", (30, 30, 30, 30))
    one = streaming(folder, eval_fraction=0.25, train={"eval_every": 1})
    one = replace(one, batch=replace(one.batch, micro_batches=4, global_batch=8))
    two = streaming(folder, dp=2, eval_fraction=0.25, train={"eval_every": 1})
    alone = start(one, 0)
    found = [tokens.tolist() for tokens, _ in alone.evaluation(3)]
    assert found == [tokens.tolist() for tokens, _ in alone.evaluation(3)]
    split = [[tokens.tolist() for tokens, _ in start(two, dp_rank).evaluation(3)] for dp_rank in range(2)]
    assert sorted(found) == sorted(split[0] + split[1])
    assert {bytes(row[0:1]) for batch in found for row in batch} == {b"3"}
    # Training goes on where it was.
    before = alone.position()
    list(alone.evaluation(3))
    assert alone.position() == before


def test_skipped_shards_are_counted_and_told_once(tmp_path, start, capfd):
    folder = write_shards(tmp_path / "shards", (50, 50))
    write_shard(folder / "02.txt.gz", "2000" * 9)
    (folder / "02.txt.gz").write_bytes((folder / "02.txt.gz").read_bytes()[:20])
    stream = start(streaming(folder, on_bad_shard="skip"), 0)
    rows(stream, *range(80))
    assert stream.skipped_shards == 1
    said = capfd.readouterr().out
    assert said.count("skipping the rest of shard 02.txt.gz") == 1
    assert "it ends at byte 20" in said
    again = start(streaming(folder, on_bad_shard="skip"), 0)
    again.restore({0: stream.position()})
    rows(again, *range(80, 120))
    assert again.skipped_shards == 1
    assert capfd.readouterr().out == ""
    with pytest.raises(DataError, match=r"02\.txt\.gz is truncated: it ends at byte 20"):
        rows(start(streaming(folder), 0), *range(80))


STEPS = 12


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Resolved:
    """The tiny GPT on shards of this repository's own sources, one of them cut: two ranks, a worker each."""
    (folder := tmp_path_factory.mktemp("text") / "shards").mkdir()
    sources = sorted((Path(__file__).resolve().parents[2] / "hpc_gpt" / "trainer" / "tokens").glob("*.py"))
    for number, source in enumerate(sources[:6]):
        write_shard(folder / f"{number}{('.txt', '.jsonl.gz')[number % 2]}", source.read_text())
    cut = folder / "1.jsonl.gz"
    cut.write_bytes(cut.read_bytes()[:-300])
    layout = {"tp": 1, "pp": 1, "dp": 2}
    one = settings(Path("unused"), layout, steps=STEPS, eval_every=5, eval_batches=1)
    return replace(one, data=Data("stream", str(folder), eval_fraction=0.2, workers=1, on_bad_shard="skip"))


def readers_of(launch: Launch) -> list[int]:
    """The processes that the ranks have started to read."""
    children = (pid for rank in launch.ranks for pid in children_of(rank.pid))
    return [pid for pid in children if "reader_process" in " ".join(command_of(pid))]


def await_end(readers: list[tuple[int, str | None]]) -> None:
    wait_for("end of the readers", lambda: not any(is_alive(*reader) for reader in readers))


def test_an_interrupted_stream_goes_on_to_the_same_figures(tmp_path: Path, streamed: Resolved) -> None:
    unbroken = new_run(tmp_path / "unbroken", streamed)
    whole = train(unbroken, 2)
    assert whole.ended == ("done", STEPS, False), whole.log

    run = new_run(tmp_path / "broken", streamed)
    launch = Launch(run, 2, HOLD_AT_LINE="3")
    launch.await_hold()
    readers = readers_of(launch)
    assert len(readers) == 2
    alive = [(pid, start_time(pid)) for pid in readers]
    # As Slurm does it: to every process of the job.
    for pid in readers:
        os.kill(pid, signal.SIGTERM)
    launch.signal(signal.SIGTERM)
    launch.await_words("rank 1 has SIGTERM")
    launch.signal(signal.SIGCONT, [0])
    assert launch.wait() == [0, 0], launch.log
    await_end(alive)
    saved = newest(run)
    assert read_positions(saved).keys() == {0, 1}
    last = train(run, 2)
    assert last.ended == ("done", STEPS, False), last.log
    assert "warning" not in last.log
    assert figures(run) == figures(unbroken)
    for one in (run, unbroken):
        assert "skipped 1 damaged shard of the data" in read_run(one).flags
    assert last.log.count("the rest of shard 1.jsonl.gz: ") + launch.log.count("skipping the rest of shard") == 1


@pytest.mark.long
def test_a_reader_that_is_killed_ends_its_run_and_not_in_a_hang(tmp_path: Path, streamed: Resolved) -> None:
    # Large batches, which soon use up what lies in the pipe.
    batch, endless = replace(streamed.batch, micro_batch=64, global_batch=256), replace(streamed.train, steps=100_000)
    run = new_run(tmp_path, replace(streamed, train=endless, batch=batch))
    launch = Launch(run, 2, HOLD_AT_LINE="2")
    launch.await_hold()
    readers = readers_of(launch)
    alive = [(pid, start_time(pid)) for pid in readers]
    os.kill(readers[-1], signal.SIGKILL)
    launch.signal(signal.SIGCONT, [0])
    assert set(launch.wait()) == {1}, launch.log
    assert f"data reader (process {readers[-1]}) was killed by SIGKILL" in launch.log
    assert launch.attempt.ended()["ended"] == "error"
    await_end(alive)


def newest(run: RunFolder) -> Path:
    return sorted(run.checkpoints.glob("step-*"))[-1]
