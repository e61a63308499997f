"""The token file: what goes in comes out, and every kind of damage is named."""

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.core.errors import DataError
from hpc_gpt.trainer.tokens import token_file
from hpc_gpt.trainer.tokens.token_file import HEADER, open_tokens, write_tokens


def write(path: Path, tokens: list[int], vocab: int = 256, pieces: int = 1) -> None:
    write_tokens(path, vocab, "byte", np.array_split(np.array(tokens, dtype=np.int64), pieces))


@given(data=st.data(), vocab=st.sampled_from([2, 256, 50257, 65536, 65537, 200_000, 2**32 - 1]))
@settings(max_examples=60, deadline=None)
def test_tokens_come_out_as_they_went_in(tmp_path_factory: Any, data: st.DataObject, vocab: int) -> None:
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=50))
    path = tmp_path_factory.mktemp("t") / "x.tokens"
    write(path, tokens, vocab, pieces=data.draw(st.integers(1, 3)))
    file = open_tokens(path)
    assert file.tokens.tolist() == tokens
    assert (file.vocab, file.tokenizer) == (vocab, "byte")
    assert file.tokens.dtype.itemsize == (2 if vocab <= 65536 else 4)
    assert file.sha == hashlib.sha256(file.tokens.tobytes()).hexdigest()
    assert path.stat().st_size == HEADER.size + len(tokens) * file.tokens.dtype.itemsize


@given(cut=st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_any_cut_is_named(tmp_path_factory: Any, cut: int) -> None:
    path = tmp_path_factory.mktemp("t") / "x.tokens"
    write(path, list(range(60)))
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole) - 1)])
    with pytest.raises(DataError, match=r"empty|truncated") as fault:
        open_tokens(path)
    assert str(path) in str(fault.value)
    assert fault.value.hint


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "x.tokens"
    write(path, [1])
    with pytest.raises(FileExistsError):
        write(path, [2])
    assert open_tokens(path).tokens.tolist() == [1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.tokens"]


def test_nothing_is_replaced_and_nothing_left(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    write(path, [1])
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        write(path, [2])
    assert path.read_bytes() == before

    def interrupted() -> Iterator[Any]:
        yield np.array([1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "y.tokens", 256, "byte", interrupted())
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.tokens"]


def test_a_token_file_has_its_name_once_its_bytes_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    fsync, give_name = os.fsync, token_file.give_name

    def noted(number: int) -> None:
        fsync(number)
        synced.add(os.fstat(number).st_ino)

    def named(aside: Path, path: Path) -> None:
        assert aside.stat().st_ino in synced
        give_name(aside, path)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(token_file, "give_name", named)
    write(tmp_path / "x.tokens", [1, 2, 3])
    assert (tmp_path / "x.tokens").is_file()
