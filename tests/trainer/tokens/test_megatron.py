"""Megatron's .bin and .idx: read as its own writer lays them out, and every damage named with its place."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.core.errors import DataError
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.tokens.build import build_megatron
from hpc_gpt.trainer.tokens.megatron import open_megatron
from hpc_gpt.trainer.tokens.run_data import ensure_data
from hpc_gpt.trainer.tokens.samples import FileSamples, open_samples
from tests.trainer.tokens.shard_folders import reading, streaming

KINDS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def write_as_megatron(prefix: Path, documents: Sequence[Sequence[int]], code: int) -> None:
    """From the format's description alone: each document is one sequence."""
    item = np.dtype(KINDS[code]).itemsize
    lengths = [len(document) for document in documents]
    starts = [item * sum(lengths[:place]) for place in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    lists = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *starts)
    documents_at = struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    Path(f"{prefix}.idx").write_bytes(head + lists + documents_at)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(one, dtype=KINDS[code]).tobytes() for one in documents))


def run(path: Path | str, vocab: int = 256, **data: Any) -> Resolved:
    return reading("megatron", path, vocab, **data)


@given(
    code=st.sampled_from(sorted(KINDS)),
    documents=st.lists(st.lists(st.integers(0, 100), max_size=9), min_size=1, max_size=6),
)
@settings(max_examples=60)
def test_documents_come_out_in_a_row(tmp_path_factory, code, documents):
    prefix = tmp_path_factory.getbasetemp() / "corpus.v1_text_document"
    write_as_megatron(prefix, documents, code)
    if not any(documents):
        with pytest.raises(DataError, match="holds no tokens"):
            open_megatron(prefix, 256)
        return
    assert open_megatron(prefix, 256).tokens.tolist() == [token for one in documents for token in one]


def test_samples_are_windows_over_all_documents(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    write_as_megatron(prefix, [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [12, 13]], 8)
    assert ensure_data(run(prefix)) == prefix
    samples = open_samples(run(prefix))
    assert isinstance(samples, FileSamples)
    found = sorted(samples.train(number).tolist() for number in range(samples.train_size))
    assert found == [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9], [9, 10, 11, 12, 13]]
    identity = samples.identity
    write_as_megatron(prefix, [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11], [12, 13]], 8)
    assert open_samples(run(prefix)).identity != identity


def test_a_token_outside_the_vocabulary_is_named_in_each_reading(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    write_as_megatron(prefix, [[1, 2, 3], [4, 5, 6, 300, 8, 9]], 4)
    with pytest.raises(
        DataError, match=r"corpus\.bin has token 300 at byte 24, but the model's vocabulary is 256"
    ) as no:
        ensure_data(run(prefix))
    assert "model.vocab to more than 300" in no.value.hint
    assert ensure_data(run(prefix, vocab=301)) == prefix
    samples = open_samples(run(prefix))
    assert isinstance(samples, FileSamples)
    with pytest.raises(DataError, match="token 300 at byte 24"):
        [samples.train(number) for number in range(samples.train_size)]
    write_as_megatron(prefix, [[1, 2, 3], [4, 5, -6, 7, 8]], 4)
    with pytest.raises(DataError, match="token -6 at byte 20"):
        ensure_data(run(prefix))


def test_what_we_write_is_what_we_read(tmp_path: Path) -> None:
    source, prefix = tmp_path / "x.jsonl", tmp_path / "x"
    source.write_text('{"text": "one"}\n{"text": "two more"}\n')
    assert build_megatron(source, prefix) == 13
    assert bytes(open_megatron(prefix, 256).tokens.tolist()) == b"one\0two more\0"
    again = tmp_path / "again"
    write_as_megatron(again, [[*b"one\0"], [*b"two more\0"]], 8)
    for suffix in (".bin", ".idx"):
        assert Path(f"{prefix}{suffix}").read_bytes() == Path(f"{again}{suffix}").read_bytes()


@pytest.mark.long
def test_the_standard_library_is_prepared_for_every_kind_of_data(data_folder: Path) -> None:
    prefix = ensure_data(run("stdlib"))
    assert prefix is not None
    assert len(open_megatron(prefix, 256).tokens) > 2_000_000
    folder = ensure_data(streaming(Path("stdlib"), dp=4, workers=4, eval_fraction=0.05, train={"eval_every": 5}))
    assert folder is not None
    suffixes = [path.name.partition(".")[2] for path in sorted(folder.iterdir())]
    assert suffixes == ["txt", "jsonl", "txt.gz", "jsonl.gz"] * 10
    assert sorted(data_folder.glob(".*")) == []
