"""Data that do not fit the run are refused: too few tokens for a sample, or another vocabulary than the model's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpc_gpt.core.errors import DataError
from hpc_gpt.trainer.tokens import run_data
from hpc_gpt.trainer.tokens.run_data import check_length
from tests.trainer.tokens.shard_folders import SEQ, reading


def test_a_file_needs_a_sample_to_train_and_one_to_evaluate() -> None:
    def check(count: int, **settings: Any) -> None:
        check_length(Path("a.tokens"), count, reading("tokens", "a.tokens", **settings))

    check(SEQ + 1)
    check(2 * (SEQ + 1), train={"eval_every": 1}, eval_fraction=0.5)
    check(2 * SEQ + 1, eval_fraction=0.5)
    # What the hint says works, where there are tokens enough for both.
    for count in range(3 * (SEQ + 1), 400 * SEQ, 7):
        with pytest.raises(DataError, match="tokens for evaluation") as other:
            check(count, train={"eval_every": 1}, eval_fraction=0.0)
        check(count, train={"eval_every": 1}, eval_fraction=float(other.value.hint.split()[3]))


def test_a_megatron_pair_has_no_tokenizer_so_settings_must_fit(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_data, "open_tokenizer", lambda words, begins: SimpleNamespace(vocab=300))
    file = SimpleNamespace(path=tmp_path / "a", tokens=np.zeros(99, dtype=np.uint16))
    monkeypatch.setattr(run_data, "open_megatron", lambda path, vocab, index: file)
    monkeypatch.setattr(run_data.megatron, "read_index", lambda path: None)
    (tmp_path / "a.idx").touch()
    with pytest.raises(DataError, match="a vocabulary of 300, but the model's is 256"):
        run_data.open_file(reading("megatron", tmp_path / "a", tokenizer="tiktoken:x"))
    assert run_data.open_file(reading("megatron", tmp_path / "a", tokenizer="tiktoken:x", vocab=300)) is file
    assert run_data.open_file(reading("megatron", tmp_path / "a")) is file


def test_a_file_that_is_not_found_says_where_it_was_looked_for(tmp_path: Path, monkeypatch) -> None:
    here, data, beside = (tmp_path / name for name in ("here", "data", "beside"))
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HPC_GPT_DATA", str(data))
    for source, name in (("tokens", "c.tokens"), ("megatron", "c"), ("stream", "c")):
        with pytest.raises(DataError) as refusal:
            run_data.ensure_data(reading(source, name), beside=beside)
        assert refusal.value.hint.startswith(f"looked for in {beside}, {here}, {data}; ")
        with pytest.raises(DataError) as refusal:
            run_data.ensure_data(reading(source, here / name), beside=beside)
        assert "looked for" not in refusal.value.hint
    # A file that is there and damaged has one place.
    (here / "c.tokens").write_bytes(b"")
    with pytest.raises(DataError, match=r"c\.tokens is empty") as refusal:
        run_data.ensure_data(reading("tokens", "c.tokens"), beside=beside)
    assert "looked for" not in refusal.value.hint


def test_a_relative_tokenizer_is_found_beside_the_experiment(tmp_path: Path, monkeypatch) -> None:
    (here := tmp_path / "here").mkdir()
    (beside := tmp_path / "beside").mkdir()
    monkeypatch.chdir(here)
    (beside / "t.json").write_text("{}")
    run = reading("tokens", tmp_path / "a.tokens", tokenizer="t.json")
    assert run_data.check_beside(run.data, beside) == beside
    assert run_data.located(run, beside).data.tokenizer == str(beside / "t.json")
    assert run_data.located(run, here) == run
    named = reading("tokens", tmp_path / "a.tokens")
    assert run_data.check_beside(named.data, beside) is None
    assert run_data.located(named, beside) == named
