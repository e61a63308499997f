"""Which shards there are, who reads which, and what a set of them is known by; token files long enough for a sample."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpc_gpt.errors import DataError
from hpc_gpt.tokens.run_data import check_length
from hpc_gpt.tokens.shards import ShardSet, _fraction_for_one, list_shards
from tests.tokens.shard_folders import SEQ, reading, streaming, write_shard, write_shards


def test_the_largest_are_dealt_first_and_to_the_reader_with_least() -> None:
    """In the order of their names one reader would have 3 + 3 and 6 at the end, the other 4 + 4."""
    shards = ShardSet(Path(), tuple("abcde"), (3, 4, 3, 4, 6), (), "")
    assert shards.deal(2) == [("e", "a"), ("b", "d", "c")]
    assert ShardSet(Path(), tuple("abcd"), (1, 2, 3, 6), (), "").deal(2) == [("d",), ("c", "b", "a")]


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
        assert int(count * _fraction_for_one(count)) >= 1
        assert count > 1000 or int(count * (_fraction_for_one(count) - 0.001)) == 0


def test_a_file_needs_one_whole_sample_to_train_on_and_one_to_evaluate() -> None:
    def check(count: int, **settings: Any) -> None:
        check_length(Path("a.tokens"), count, reading("tokens", "a.tokens", **settings))

    check(SEQ + 1)
    with pytest.raises(DataError, match=f"has {SEQ} tokens to train on"):
        check(SEQ)
    evaluated = {"train": {"eval_every": 1}, "eval_fraction": 0.5}
    check(2 * (SEQ + 1), **evaluated)
    with pytest.raises(DataError, match=f"has {SEQ} tokens for evaluation") as refusal:
        check(2 * SEQ + 1, **evaluated)
    check(2 * SEQ + 1, eval_fraction=0.5)
    assert refusal.value.hint.startswith("set data.eval_fraction to ")
    # What the hint says works, where there are tokens enough for both.
    for count in range(3 * (SEQ + 1), 400 * SEQ, 7):
        with pytest.raises(DataError, match="tokens for evaluation") as other:
            check(count, train={"eval_every": 1}, eval_fraction=0.0)
        check(count, train={"eval_every": 1}, eval_fraction=float(other.value.hint.split()[3]))


def test_a_megatron_pair_has_no_tokenizer_so_the_settings_must_fit_the_model(tmp_path: Path, monkeypatch) -> None:
    from hpc_gpt.tokens import run_data

    monkeypatch.setattr(run_data, "open_tokenizer", lambda words: SimpleNamespace(vocab=300))
    file = SimpleNamespace(path=tmp_path / "a", tokens=np.zeros(99, dtype=np.uint16))
    monkeypatch.setattr(run_data, "open_megatron", lambda path, vocab: file)
    (tmp_path / "a.idx").touch()
    with pytest.raises(DataError, match="a vocabulary of 300, but the model's is 256"):
        run_data.open_file(reading("megatron", tmp_path / "a", tokenizer="tiktoken:x"))
    assert run_data.open_file(reading("megatron", tmp_path / "a", tokenizer="tiktoken:x", vocab=300)) is file
    assert run_data.open_file(reading("megatron", tmp_path / "a")) is file
