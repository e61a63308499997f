"""Token data of terabytes and counts up to 2^63: each place is exact, and the first batch comes as soon far on."""

import errno
import os
import random
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.trainer.data import DataStream
from hpc_gpt.trainer.tokens import megatron
from hpc_gpt.trainer.tokens.order import MixtureOrder, permute, sample_position
from hpc_gpt.trainer.tokens.samples import FileSamples, MixtureSamples
from hpc_gpt.trainer.tokens.shard_stream import ShardStream, list_shards
from hpc_gpt.trainer.tokens.token_file import HEADER, MAGIC, TokenFile, open_tokens
from tests.trainer.tokens.shard_folders import SEQ, reading, streaming, write_shards

MOST = 2**63 - 1
LONG, SEED, FRACTION = 4096, 11, 0.001
TOKENS = 2**41 - 32  # of four bytes: with the header 8 TiB
DOCUMENT = 2_000_000_000  # tokens; a sequence of Megatron has at most 2^31 - 1


def sparse(path: Path, size: int, head: bytes = b"") -> Path:
    """A file of that size, of which the disk has what is written alone."""
    with open(path, "wb") as file:
        file.write(head)
        try:
            file.truncate(size)
        except OSError as fault:
            if fault.errno != errno.EFBIG:
                raise
            pytest.skip(f"no file of {size:,} bytes here: {fault.strerror}")
    return path


def of_ours(folder: Path) -> TokenFile:
    head = HEADER.pack(MAGIC, 1, 4, 1 << 17, TOKENS, b"byte", bytes(32), b"")
    return open_tokens(sparse(folder / "far.tokens", HEADER.size + 4 * TOKENS, head))


def of_megatron(folder: Path) -> TokenFile:
    lengths = np.full(TOKENS // DOCUMENT, DOCUMENT, "<i4")
    starts = 4 * DOCUMENT * np.arange(len(lengths), dtype="<i8")
    head = np.array([1], "<u8").tobytes() + b"\4" + np.array([len(lengths), len(lengths) + 1], "<u8").tobytes()
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    parts = (b"MMIDIDX\0\0", head, lengths.tobytes(), starts.tobytes(), documents.tobytes())
    (folder / "far.idx").write_bytes(b"".join(parts))
    sparse(folder / "far.bin", 4 * DOCUMENT * len(lengths))
    return megatron.open_megatron(folder / "far", 1 << 17)


@pytest.mark.parametrize(("make", "begin"), [(of_ours, HEADER.size), (of_megatron, 0)])
def test_samples_of_eight_tebibytes_are_where_their_order_is(
    tmp_path: Path, make: Callable[[Path], TokenFile], begin: int
) -> None:
    file = make(tmp_path)
    samples = FileSamples(file, SEED, LONG, FRACTION)
    count = len(file.tokens)
    assert samples.train_size > 2**28
    chance = random.Random(1)
    last = samples.train_size * 10**6 - 1
    numbers = [0, samples.train_size - 1, samples.train_size, last, *(chance.randrange(last) for _ in range(20))]
    split = count - int(count * FRACTION)
    for turn, number in enumerate(numbers):
        place = sample_position(number, samples.train_size, SEED)
        expected = np.arange(1 + turn, LONG + 2 + turn, dtype="<i4")
        evaluation = split + number % samples.eval_size * LONG
        with open(file.path, "r+b") as written:
            for at in (place * LONG, evaluation):
                written.seek(begin + 4 * at)
                written.write(expected.tobytes())
        assert samples.train(number).tolist() == expected.tolist()
        assert samples.evaluation(number).tolist() == expected.tolist()
    assert os.stat(file.path).st_blocks * 512 < 64 << 20


@given(size=st.integers(1, MOST), place=st.integers(0, MOST), keys=st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None)
def test_no_two_places_of_any_order_are_the_same(size: int, place: int, keys: int) -> None:
    near = [number % size for number in range(place, place + min(size, 30))]
    own = tuple(keys ^ turn for turn in range(6))
    images = [permute(number, size, own) for number in near]
    assert len(set(images)) == len(near)
    assert all(0 <= image < size for image in images)


# --- the first batch


def calls_of(work: Callable[[], Any]) -> int:
    """How many functions, Python's and those in C, are called meanwhile."""
    count = 0

    def see(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("mixed", [False, True])
def test_the_first_batch_of_step_one_million_comes_as_soon(tmp_path: Path, mixed: bool) -> None:
    resolved = reading("random", None, 1 << 17)
    one: Any = FileSamples(of_ours(tmp_path), SEED, SEQ, FRACTION)
    if mixed:
        names = [f"s{number}" for number in range(20)]
        shares = [{name: Fraction(number + 1, 210) for number, name in enumerate(names)}]
        one = MixtureSamples(dict.fromkeys(names, one), MixtureOrder(shares, [0]))
    taken = {
        step: calls_of(lambda step=step: [*DataStream(one, resolved, 0, torch.device("cpu")).step(step)])  # type: ignore[misc]
        for step in (1, 10**6, 2**31 + 1)
    }
    # The order permutes again what is not below the size: one of them more often than another.
    assert max(taken.values()) < 2 * taken[1], taken


def test_shards_in_a_late_epoch_begin_as_soon_as_in_the_first(tmp_path: Path) -> None:
    resolved = streaming(write_shards(tmp_path / "shards", [40] * 5))
    shards = list_shards(tmp_path / "shards", resolved)
    calls = []
    for epoch in (0, 10**6):
        stream = ShardStream(shards, resolved, 0)
        stream.restore({0: {"places": dict.fromkeys(shards.training, (epoch, 0)), "faults": {},
                            "dp": 1, "workers": 0, "turn": 0}})  # fmt: skip
        calls.append(calls_of(lambda stream=stream: stream.take(2)))  # type: ignore[misc]
    assert max(calls) < 1.5 * min(calls), calls
