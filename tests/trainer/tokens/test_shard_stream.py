"""Streams: every sample of an epoch once in any layout, and a resume in any layout that repeats and skips none."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.core.errors import DataError
from hpc_gpt.trainer.tokens import content, shard_stream
from hpc_gpt.trainer.tokens.reader_process import BLOCK, Chunk, ReaderTask, read_chunks
from hpc_gpt.trainer.tokens.run_data import open_shards
from hpc_gpt.trainer.tokens.shard_stream import ShardSet, ShardStream, evaluation_samples, fraction_for, list_shards
from tests.trainer.tokens.shard_folders import SEQ, streaming, write_shard, write_shards

# Empty, shorter than a block, a block exactly, and several with a rest.
SIZES = (3, 0, BLOCK, 40, 2 * BLOCK + 9, 1, BLOCK - 1, BLOCK + 1, 17)
layouts = st.sampled_from([(1, 0), (1, 1), (1, 3), (2, 2), (3, 1), (4, 2), (3, 3), (9, 0)])
Sample = tuple[int, str]


class InThisProcess:
    """A reader without its process, which would take a third of a second to start; those have tests of their own."""

    def __init__(self, task: ReaderTask) -> None:
        self._chunks = read_chunks(task)

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def close(self) -> None:
        self._chunks.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    patch = pytest.MonkeyPatch()
    patch.setattr(shard_stream, "ReaderProcess", InThisProcess)
    yield write_shards(tmp_path_factory.mktemp("shards") / "shards", SIZES)
    patch.undo()


class Rank:
    """A data-parallel rank's stream, and what it has taken."""

    def __init__(self, path: Path, dp: int, workers: int, dp_rank: int, positions: dict[int, Any], **data: Any) -> None:
        resolved = streaming(path, dp, workers, **data)
        self.stream = ShardStream(open_shards(resolved), resolved, dp_rank)
        self.position = self.stream.restore(positions)

    def take(self) -> Sample:
        """(epoch, the sample's first SEQ characters)"""
        rows, change = self.stream.take(1)
        text = bytes(rows[0][:SEQ].tolist()).decode()
        shard = next(name for name in self.position.places if int(name[:2]) == int(text[0], 16))
        epoch = self.position.places[shard][0]
        self.position.move(change)
        return epoch, text

    def saved(self) -> Any:
        return json.loads(json.dumps(self.stream.to_json(self.position)))


def expected(sizes: tuple[int, ...] = SIZES) -> list[str]:
    return [f"{number:x}{sample:03x}" for number, size in enumerate(sizes) for sample in range(size)]


@settings(max_examples=20)
@given(layout=layouts, seed=st.integers(0, 3))
def test_an_epoch_has_every_sample_once_in_any_layout(folder: Path, layout: tuple[int, int], seed: int) -> None:
    dp, workers = layout
    found = []
    for dp_rank in range(dp):
        rank = Rank(folder, dp, workers, dp_rank, {}, train={"seed": seed})
        if not any(SIZES[int(shard[:2])] for shard in rank.position.places):
            continue  # its one shard has no sample
        while min(epoch for epoch, _ in rank.position.places.values()) == 0:
            epoch, text = rank.take()
            found += [text] if epoch == 0 else []
    assert sorted(found) == sorted(expected())


@settings(max_examples=30)
@given(layout=layouts.filter(lambda layout: layout[0] < 9), before=st.integers(0, 1300), after=st.integers(1, 200))
def test_a_resume_in_the_same_layout_is_as_if_unbroken(folder, layout, before, after):
    dp, workers = layout
    whole = [Rank(folder, dp, workers, dp_rank, {}) for dp_rank in range(dp)]
    broken = [Rank(folder, dp, workers, dp_rank, {}) for dp_rank in range(dp)]
    for rank in (*whole, *broken):
        for _ in range(before // dp):
            rank.take()
    positions = {dp_rank: rank.saved() for dp_rank, rank in enumerate(broken)}
    resumed = [Rank(folder, dp, workers, dp_rank, positions) for dp_rank in range(dp)]
    for one, other in zip(whole, resumed, strict=True):
        assert [one.take() for _ in range(after)] == [other.take() for _ in range(after)]
        assert one.saved() == other.saved()


@settings(max_examples=40)
@given(phases=st.lists(st.tuples(layouts.filter(lambda layout: layout[0] < 9), st.integers(0, 700)), max_size=5))
def test_a_resume_in_another_layout_repeats_and_skips_none(folder, phases):
    positions: dict[int, Any] = {}
    taken: Counter[Sample] = Counter()
    for (dp, workers), count in [*phases, ((1, 0), 0)]:
        ranks = [Rank(folder, dp, workers, dp_rank, positions) for dp_rank in range(dp)]
        taken.update(rank.take() for rank in ranks for _ in range(count // dp))
        positions = {dp_rank: rank.saved() for dp_rank, rank in enumerate(ranks)}
    assert not taken or max(taken.values()) == 1
    for shard, (epoch, count) in positions[0]["places"].items():
        number = int(shard[:2])
        mine = [(at, int(text[1:], 16)) for at, text in taken if int(text[0], 16) == number]
        for past in range(epoch):
            assert sorted(sample for at, sample in mine if at == past) == list(range(SIZES[number]))
        assert len([at for at, _ in mine if at == epoch]) == count
        assert all(at <= epoch for at, _ in mine)


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40), readers=st.integers(1, 12))
def test_shards_are_dealt_out_once_and_by_size(sizes: list[int], readers: int) -> None:
    readers = min(readers, len(sizes))
    names = tuple(f"{number:03d}" for number in range(len(sizes)))
    dealt = ShardSet(Path(), names, tuple(sizes), (), "").assign_shards(readers)
    assert sorted(name for own in dealt for name in own) == sorted(names)
    totals = [sum(sizes[int(name)] for name in own) for own in dealt]
    # Nobody is without, and nobody ahead of another by more than the shard that came last.
    assert all(dealt)
    assert max(totals) - min(totals) <= max(sizes)


def test_epochs_and_seeds_have_orders_of_their_own(folder: Path) -> None:
    size = len(expected())
    rank, other = Rank(folder, 1, 0, 0, {}), Rank(folder, 1, 0, 0, {}, train={"seed": 6})
    first, second = ([rank.take()[1] for _ in range(size)] for _ in range(2))
    # With one rank, epochs do not overlap, whatever the number of workers.
    three = Rank(folder, 1, 3, 0, {})
    assert sorted(first) == sorted(second) == sorted(three.take()[1] for _ in range(size)) == sorted(expected())
    assert first != second
    assert first != [other.take()[1] for _ in range(size)]
    # Neighbours do not stay neighbours.
    numbers = [int(text, 16) for text in first]
    assert sum(b - a == 1 for a, b in pairwise(numbers)) < 20


def test_shards_that_come_later_join_the_epoch_the_others_are_in(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards", (5, 5))
    rank = Rank(folder, 1, 0, 0, {})
    before = [rank.take() for _ in range(12)][10:]
    write_shard(folder / "02.txt", "200020012002")
    resumed = Rank(folder, 1, 0, 0, {0: rank.saved()})
    rest = [resumed.take() for _ in range(11)]
    assert sorted([*before, *rest]) == [(1, text) for text in expected((5, 5, 3))]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Six shards: a gzip that is cut off, one with a byte changed, a cut Zstandard frame and a jsonl line without text,
    each of 600 samples, and two sound ones."""
    folder = write_shards(tmp_path / "damaged", ())
    for number, suffix in enumerate((".txt.gz", ".txt.gz", ".txt.zst", ".jsonl", ".txt", ".txt")):
        write_shard(folder / f"{number:02d}{suffix}", "".join(f"{number:x}{sample:03x}" for sample in range(600)))
    for name in ("00.txt.gz", "02.txt.zst"):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-200])
    changed = bytearray((folder / "01.txt.gz").read_bytes())
    changed[-6] ^= 1  # within the sum at its end
    (folder / "01.txt.gz").write_bytes(changed)
    with open(folder / "03.jsonl", "a") as file:
        file.write('{"body": "no text"}\n{"text": "never reached"}\n')
    return folder


def test_a_damaged_shard_stops_with_file_and_offset(damaged: Path) -> None:
    rank = Rank(damaged, 1, 0, 0, {})
    with pytest.raises(DataError, match=r"0[0-3]\.[a-z.]+(:2)?.* byte \d+"):
        [rank.take() for _ in range(6 * 600)]


def test_damaged_shards_are_skipped_alike_in_any_layout(folder: Path, damaged: Path) -> None:
    epochs = []
    for dp, workers in ((1, 0), (2, 3), (3, 2)):
        found, faults, count = [], {}, 0
        for dp_rank in range(dp):
            rank = Rank(damaged, dp, workers, dp_rank, {}, on_bad_shard="skip")
            while min(epoch for epoch, _ in rank.position.places.values()) == 0:
                epoch, text = rank.take()
                found += [text] if epoch == 0 else []
            # Counted once, in later epochs and attempts too.
            resumed = Rank(damaged, dp, workers, dp_rank, {dp_rank: rank.saved()}, on_bad_shard="skip")
            for _ in range(900):
                resumed.take()
            assert resumed.position.faults == rank.position.faults
            faults |= rank.position.faults
            count += len(rank.position.faults)
        assert count == len(faults) == 4
        assert sorted(faults) == ["00.txt.gz", "01.txt.gz", "02.txt.zst", "03.jsonl"]
        epochs.append(sorted(found))
    assert epochs[0] == epochs[1] == epochs[2]
    by_shard = Counter(text[0] for text in epochs[0])
    # All of the sound ones, and of the others what came before the fault.
    assert by_shard["4"] == by_shard["5"] == by_shard["3"] == 600
    assert len(set(epochs[0])) == len(epochs[0])


def test_what_one_rank_cannot_read_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_shards(tmp_path / "shards", (5,) * 6)
    rank = Rank(folder, 1, 0, 0, {}, on_bad_shard="skip")
    (folder / "05.txt").unlink()
    (folder / "05.txt").symlink_to("/proc/self/mem")  # EIO
    monkeypatch.setattr(content.time, "sleep", lambda _: None)
    with pytest.raises(DataError, match=r"cannot read .*05\.txt: Input/output error"):
        [rank.take() for _ in range(30)]


def test_evaluation_shards_are_the_last_and_never_trained_on(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards", (5, 5, 5, 5))
    resolved = streaming(folder, eval_fraction=0.3, train={"eval_every": 1})
    shards = open_shards(resolved)
    assert (shards.training, shards.evaluation) == (("00.txt", "01.jsonl", "02.txt.gz"), ("03.jsonl.gz",))
    found = evaluation_samples(shards, resolved, 12, set(range(0, 12, 2)))
    texts = {number: bytes(row[:SEQ].tolist()).decode() for number, row in found.items()}
    assert texts == {number: f"3{number % 5:03x}" for number in range(0, 12, 2)}
    rank = Rank(folder, 1, 0, 0, {}, eval_fraction=0.3)
    assert {rank.take()[1][0] for _ in range(30)} == {"0", "1", "2"}


def test_the_largest_are_dealt_first_to_the_reader_with_least() -> None:
    """In the order of their names one reader would have 3 + 3 and 6 at the end, the other 4 + 4."""
    shards = ShardSet(Path(), tuple("abcde"), (3, 4, 3, 4, 6), (), "")
    assert shards.assign_shards(2) == [("e", "a"), ("b", "d", "c")]
    assert ShardSet(Path(), tuple("abcd"), (1, 2, 3, 6), (), "").assign_shards(2) == [("d",), ("c", "b", "a")]


def test_a_compressed_shard_counts_as_its_text_about(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.txt", "x" * 1000)
    write_shard(tmp_path / "b.txt.gz", "x" * 1000)
    write_shard(tmp_path / "c.txt.zst", "x" * 1000)
    sizes = list_shards(tmp_path, streaming(tmp_path)).sizes
    packed = [(tmp_path / name).stat().st_size for name in ("b.txt.gz", "c.txt.zst")]
    assert sizes == (1000, 4 * packed[0], 4 * packed[1])


def test_the_share_for_evaluation_is_rounded_down(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards", [3] * 5)
    kept = [len(list_shards(folder, streaming(folder, eval_fraction=f)).evaluation) for f in (0.0, 0.19, 0.2, 0.39)]
    assert kept == [0, 0, 1, 1]


def test_a_set_is_known_by_names_sizes_and_tokenizer(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards", [3, 3, 3])

    def identity(**data: Any) -> str:
        return list_shards(folder, streaming(folder, **data)).identity

    before = identity()
    assert identity(eval_fraction=0.4) == before
    assert identity(tokenizer="tiktoken:gpt2") != before
    write_shard(folder / "00.txt", "longer than it was before")
    longer = identity()
    (folder / "00.txt").rename(folder / "000.txt")
    assert len({before, longer, identity()}) == 3


def test_the_hints_fraction_keeps_one_shard() -> None:
    for count in range(2, 3000):
        assert int(count * fraction_for(1, count)) >= 1
        assert count > 1000 or int(count * (fraction_for(1, count) - 0.001)) == 0
