"""The token that ends a document: the tokenizer's, or the one that is given, which must be in the data."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hpc_gpt.core.errors import DataError
from hpc_gpt.trainer.tokens import end_token as module
from hpc_gpt.trainer.tokens import megatron, token_file
from hpc_gpt.trainer.tokens.build import build_tokens
from hpc_gpt.trainer.tokens.end_token import check_end_token, end_token
from hpc_gpt.trainer.tokens.run_data import ensure_data
from hpc_gpt.trainer.tokens.sources import DOCUMENT_END
from hpc_gpt.trainer.tokens.tokenizer import ByteTokenizer, WordTokenizer
from tests.trainer.tokens.shard_folders import reading

WORDS = "one two three four five six seven eight nine ten " * 3


def words_of(end: int | None) -> WordTokenizer:
    return WordTokenizer("words", 50, lambda text: [1] * len(text.split()), end)


def test_it_is_the_tokenizers_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    masked = reading("tokens", "a.tokens", mask_documents=True)
    assert end_token(reading("tokens", "a.tokens")) is None
    assert end_token(masked) == 0
    assert end_token(reading("tokens", "a.tokens", mask_documents=True, end_token=9)) == 9
    # The table of a token file's characters is not opened for it.
    assert end_token(reading("tokens", "a.tokens", mask_documents=True, tokenizer="char")) == 0
    monkeypatch.setattr(module, "open_tokenizer", lambda name: words_of(3))
    assert end_token(masked) == 3


@pytest.mark.parametrize("kind", ["tokens", "stream", "megatron"])
def test_data_without_it_are_refused_before_they_are_read(tmp_path: Path, kind: str) -> None:
    (path := tmp_path / "text").mkdir()
    (text := path / "a.txt").write_text(WORDS)
    if kind == "tokens":
        path = build_tokens(text, tmp_path / "text.tokens").path
    elif kind == "megatron":
        path = tmp_path / "pair"
        megatron.write([text.read_bytes(), DOCUMENT_END], path, ByteTokenizer(), "a.txt")
    for sound in (0, ord("x")):  # a zero byte ends the text; of "six"
        assert ensure_data(reading(kind, path, mask_documents=True, end_token=sound)) == path
    with pytest.raises(DataError, match="is the end token 255") as refused:
        ensure_data(reading(kind, path, mask_documents=True, end_token=255))
    assert f"none of {len(WORDS) + 1} tokens of " in str(refused.value) or kind == "stream"
    assert "data.mask_documents = false" in refused.value.hint


@pytest.mark.parametrize("place", [0, 7, 40, 99])
def test_of_a_large_file_even_parts_are_searched(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    for each in (module, token_file):
        monkeypatch.setattr(each, "LOOK_TOKENS", 20)
        monkeypatch.setattr(each, "LOOK_AT_ONCE", 5)
    tokens: NDArray[np.uint16] = np.ones(100, dtype=np.uint16)
    tokens[place] = 0
    # Four parts, from 0, 31, 63 and 95 on.
    run = reading("tokens", "a.tokens", mask_documents=True)
    if place in (0, 99):
        check_end_token(run, tokens, Path("a.tokens"))
    else:
        with pytest.raises(DataError, match=r"none of 20 tokens of a\.tokens is the end token 0"):
            check_end_token(run, tokens, Path("a.tokens"))
