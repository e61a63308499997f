"""Tokenizers: what goes in comes out, documents end, and what does not fit is refused with the nearest that does."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from hpc_gpt.core.errors import ConfigError, DataError
from hpc_gpt.trainer.tokens.build import build_tokens
from hpc_gpt.trainer.tokens.run_data import ensure_data
from hpc_gpt.trainer.tokens.samples import open_samples
from hpc_gpt.trainer.tokens.shard_stream import ShardSet, ShardStream, evaluation_samples
from hpc_gpt.trainer.tokens.sources import DOCUMENT_END
from hpc_gpt.trainer.tokens.token_file import open_tokens
from hpc_gpt.trainer.tokens.tokenizer import (
    Tokenizer,
    beginning_documents,
    collect_characters,
    open_tokenizer,
    read_table,
    table_path,
    texts,
)
from tests.trainer.tokens.shard_folders import SEQ, reading

TEXT = "Fünf Boxkämpfer jagen\nViktor quer über den Deich. 日本 🙂\n"


def encoded(tokenizer: Tokenizer, *documents: str) -> list[int]:
    pieces = (piece for document in documents for piece in (document.encode(), DOCUMENT_END))
    return [int(token) for array in tokenizer.encode(pieces, "there") for token in array]


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 300 tokens, trained here; 0 ends a document."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.enable_truncation(8)  # as many files say; a text is not a prompt
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    bpe.train_from_iterator([TEXT] * 50, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.json"
    bpe.save(str(path))
    return path


@given(documents=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=4))
@settings(max_examples=50)
def test_characters_come_out_as_they_went_in(documents: list[str]) -> None:
    table = collect_characters((piece for text in documents for piece in (text.encode(), DOCUMENT_END)), "there")
    tokens = encoded(table, *documents)
    assert table.vocab == 1 + len(set("".join(documents)))
    assert "".join("\0\0" if token == 0 else table.characters[token - 1] for token in tokens) == "".join(
        text + "\0\0" for text in documents
    )


def test_a_character_file_and_its_table_belong_together(tmp_path: Path) -> None:
    source, out = tmp_path / "t.txt", tmp_path / "x.tokens"
    source.write_text(TEXT * 20)
    file = build_tokens(source, out, "char")
    table = read_table(table_path(out))
    assert file.tokenizer == table.name
    assert file.tokenizer.startswith("char:")
    assert file.vocab == table.vocab == 1 + len(set(TEXT))
    assert "".join(table.characters[token - 1] for token in file.tokens[:-1]) == TEXT * 20
    assert file.tokens[-1] == 0
    run = reading("tokens", out, tokenizer="char")
    assert ensure_data(run) == out
    assert ensure_data(reading("tokens", out, tokenizer=str(table_path(out)))) == out  # by its table's path, too


def test_a_table_is_kept_and_a_failed_build_leaves_none(tmp_path: Path) -> None:
    source, out = tmp_path / "t.txt", tmp_path / "x.tokens"
    source.write_text("text")
    table_path(out).write_text("mine")
    with pytest.raises(DataError, match=r"x\.tokens\.vocab\.json already exists"):
        build_tokens(source, out, "char")
    assert table_path(out).read_text() == "mine"
    table_path(out).unlink()
    source.write_bytes(b"good\n\xff")
    with pytest.raises(DataError, match=r"t\.txt is not UTF-8 at byte 5 of its text"):
        build_tokens(source, out, "char")
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.txt"]


def test_a_tokenizer_json_makes_tokens(tokenizer_json: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(tokenizer_json))
    bpe = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    bpe.no_truncation()
    tokens = encoded(tokenizer, TEXT, "Deich")
    assert tokenizer.vocab == bpe.get_vocab_size() == 300
    assert bpe.decode([token for token in tokens if token]) == TEXT + "Deich"
    assert [place for place, token in enumerate(tokens) if token == 0] == [len(bpe.encode(TEXT).ids), len(tokens) - 1]
    word = encoded(tokenizer, "Deich")
    assert encoded(tokenizer, "Deich<|endoftext|>Deich") == word + word, "as docs/data.md says"
    (tmp_path / "t.txt").write_text(TEXT)
    file = build_tokens(tmp_path / "t.txt", tmp_path / "x.tokens", str(tokenizer_json))
    assert open_tokens(file.path).tokens.tolist() == encoded(tokenizer, TEXT)
    assert (file.vocab, file.tokenizer) == (300, tokenizer.name)
    with pytest.raises(DataError, match=r"vocabulary of 300 .*, but the model's is 256") as refused:
        ensure_data(reading("tokens", file.path, tokenizer=str(tokenizer_json)))
    assert "set model.vocab = 300" in refused.value.hint


def test_tiktoken_makes_tokens_without_any_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoding of our own, through the door tiktoken has for such: a module in the namespace tiktoken_ext."""
    import tiktoken.load
    import tiktoken.registry

    reader = tiktoken.load.read_file
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "of_the_test.py").write_text(
        "from tiktoken.load import load_tiktoken_bpe\n"
        "def ours():\n"
        "    ranks = {bytes([byte]): byte for byte in range(256)} | {b'ei': 256}\n"
        "    return {'name': 'ours', 'pat_str': r'\\S+|\\s+', 'mergeable_ranks': ranks,\n"
        "            'special_tokens': {'<|endoftext|>': 257}}\n"
        "def far():\n"
        "    return {'name': 'far', 'mergeable_ranks': load_tiktoken_bpe('https://localhost:1/far.tiktoken')}\n"
        "ENCODING_CONSTRUCTORS = {'ours': ours, 'far': far}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", None)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    tiktoken.registry._available_plugin_modules.cache_clear()
    try:
        tokenizer = open_tokenizer("tiktoken:ours")
        assert encoded(tokenizer, "dein", "<|endoftext|>") == [100, 256, 110, 257, *b"<|endoftext|>", 257]
        assert (tokenizer.name, tokenizer.vocab) == ("tiktoken:ours", 258)
        with pytest.raises(
            DataError, match="the files of tokenizer tiktoken:far are not in tiktoken's cache"
        ) as refused:
            open_tokenizer("tiktoken:far")
        assert tiktoken.load.read_file is reader
        assert 'tiktoken.get_encoding("far")' in refused.value.hint
        with pytest.raises(DataError, match="no encoding 'gpt5'"):
            open_tokenizer("tiktoken:gpt5")
    finally:
        tiktoken.registry._available_plugin_modules.cache_clear()
        sys.modules.pop("tiktoken_ext", None)


@given(text=st.binary(min_size=1, max_size=60), size=st.integers(1, 20))
@settings(max_examples=50)
def test_bytes_are_tokens_whatever_the_pieces(text: bytes, size: int) -> None:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    tokens = np.concatenate(list(open_tokenizer("byte").encode([*pieces, DOCUMENT_END], "there")))
    assert bytes(tokens.tolist()) == text + DOCUMENT_END


@pytest.mark.parametrize("line", ["a line of text\n", "no end of it 日本", "🙂🙂🙂", "日本語"])
def test_a_long_document_is_cut_by_its_text_alone(line: str) -> None:
    text = (line * (160_000 // len(line.encode()))).encode()
    chunks = []
    for size in (1 << 24, 7_777):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        chunks.append([chunk for _, chunk in texts([*pieces, DOCUMENT_END], "there")])
    assert chunks[0] == chunks[1]
    assert chunks[0][-1] is None
    assert "".join(chunk or "" for chunk in chunks[0]).encode() == text
    assert len(chunks[0]) == 4  # three texts and the end
    if line.endswith("\n"):
        assert all(chunk.endswith("\n") for chunk in chunks[0][:-1])


@pytest.mark.parametrize("before", [b"", b"a line\n" * 20_000, b"\xc3\xa4" * 70_000])
def test_what_is_no_utf8_is_named_by_its_offset_in_the_text(before: bytes) -> None:
    with pytest.raises(DataError, match=f"there is not UTF-8 at byte {len(before) + 3} of its text"):
        list(texts([before + b"abc\xff", DOCUMENT_END], "there"))


def test_a_text_gets_no_token_that_a_prompt_begins_with(tokenizer_json: Path, tmp_path: Path) -> None:
    bpe = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    bpe.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    path = tmp_path / "prompt.json"
    bpe.save(str(path))
    plain = encoded(open_tokenizer(str(tokenizer_json)), TEXT, "ja")
    assert encoded(open_tokenizer(str(path)), TEXT, "ja") == plain
    assert plain.count(0) == 2


def test_a_begin_token_comes_before_each_document_if_asked_for(tokenizer_json: Path, tmp_path: Path) -> None:
    bpe = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    bpe.add_special_tokens(["<|begin_of_text|>"])
    path = tmp_path / "begins.json"
    bpe.save(str(path))
    begin = bpe.token_to_id("<|begin_of_text|>")
    plain = open_tokenizer(str(path))
    long = "Deich\n" * 20_000  # in several pieces
    expected = [begin, *encoded(plain, TEXT), begin, *encoded(plain, long), begin, *encoded(plain, "ja")]
    assert encoded(beginning_documents(plain), TEXT, long, "ja") == expected
    (tmp_path / "t.txt").write_text(TEXT)
    file = build_tokens(tmp_path / "t.txt", tmp_path / "x.tokens", str(path), begins=True)
    assert open_tokens(file.path).tokens.tolist() == [begin, *encoded(plain, TEXT)]
    for without in ("byte", "char", str(tokenizer_json)):
        with pytest.raises(DataError, match="has no token that begins a text"):
            build_tokens(tmp_path / "t.txt", tmp_path / "y.tokens", without, begins=True)
    assert not (tmp_path / "y.tokens").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_begins_each_document_too(tokenizer_json: Path, tmp_path: Path, workers: int) -> None:
    bpe = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    bpe.add_special_tokens(["<|begin_of_text|>"])
    path, folder = tmp_path / "begins.json", tmp_path / "shards"
    bpe.save(str(path))
    begin, plain = bpe.token_to_id("<|begin_of_text|>"), open_tokenizer(str(path))
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("ja", TEXT)))
    settings = {"tokenizer": str(path), "begin_token": True, "eval_fraction": 0.5, "workers": workers}
    run = reading("stream", folder, vocab=400, train={"eval_every": 1}, **settings)
    ensure_data(run)
    tokens = [begin, *encoded(plain, "ja"), begin, *encoded(plain, TEXT)]
    expected = [tokens[at : at + SEQ + 1] for at in range(0, len(tokens) - SEQ, SEQ)]
    shards = open_samples(run)
    assert isinstance(shards, ShardSet)
    found = evaluation_samples(shards, run, len(expected), set(range(len(expected))))
    assert [found[number].tolist() for number in range(len(expected))] == expected
    stream = ShardStream(shards, run, 0)
    try:
        assert sorted(row.tolist() for row in stream.take(len(expected))[0]) == sorted(expected)
    finally:
        stream.close()
    with pytest.raises(DataError, match="has no token that begins a text"):
        ensure_data(reading("stream", folder, vocab=400, tokenizer=str(tokenizer_json), begin_token=True))
    with pytest.raises(ConfigError, match=r'data\.source is "tokens"'):
        reading("tokens", folder, tokenizer=str(path), begin_token=True)
