"""Data that do not fit the run are refused: too few tokens for a sample, or another vocabulary than the model's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpc_gpt.errors import DataError
from hpc_gpt.tokens import run_data
from hpc_gpt.tokens.run_data import check_length
from tests.tokens.shard_folders import SEQ, reading


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
    monkeypatch.setattr(run_data, "open_tokenizer", lambda words: SimpleNamespace(vocab=300))
    file = SimpleNamespace(path=tmp_path / "a", tokens=np.zeros(99, dtype=np.uint16))
    monkeypatch.setattr(run_data, "open_megatron", lambda path, vocab: file)
    (tmp_path / "a.idx").touch()
    with pytest.raises(DataError, match="a vocabulary of 300, but the model's is 256"):
        run_data.open_file(reading("megatron", tmp_path / "a", tokenizer="tiktoken:x"))
    assert run_data.open_file(reading("megatron", tmp_path / "a", tokenizer="tiktoken:x", vocab=300)) is file
    assert run_data.open_file(reading("megatron", tmp_path / "a")) is file
