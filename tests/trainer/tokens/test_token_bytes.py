"""Bits per byte: the bytes that each token adds to the text, by each kind of tokenizer, and files that have them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from hpc_gpt.core.errors import DataError
from hpc_gpt.core.settings.data_source import MixedSource
from hpc_gpt.trainer.tokens.build import build_megatron, build_tokens
from hpc_gpt.trainer.tokens.description import describe_data
from hpc_gpt.trainer.tokens.run_data import add_token_bytes, ensure_data, open_file
from hpc_gpt.trainer.tokens.samples import open_samples
from hpc_gpt.trainer.tokens.sources import DOCUMENT_END
from hpc_gpt.trainer.tokens.token_file import HEADER, open_tokens, token_bytes_path, write_tokens
from hpc_gpt.trainer.tokens.tokenizer import open_tokenizer
from tests.trainer.tokens.shard_folders import reading

# Emoji (with a joiner and a skin tone), CJK, combining marks in both forms, line ends of two bytes, runs of spaces.
TEXT = "Fünf  Boxkämpfer\r\n日本語 👩🏽‍💻 🙂 e\u0301 é\u0323 it's\tend.\n"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MARKS = ["<unk>", "<s>", "</s>"]


def byte_level(decoder: bool) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if decoder:
        made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    made.train_from_iterator(["Fünf 日本 🙂  \r\n it's"] * 50, trainer)
    made.add_tokens(["<tool ü>"])
    return made


def as_llama() -> tokenizers.Tokenizer:
    pieces = [*MARKS, *BYTES, "▁", "▁▁", "B", "▁B", "o", "x", "it", "i", "t", "日", "e"]
    merges = [("▁", "▁"), ("▁", "B"), ("i", "t")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(MARKS)
    return made


def unigram() -> tokenizers.Tokenizer:
    pieces = [*MARKS, *BYTES, "▁", "▁Box", "k", "end", "日本", "ü", "."]
    made = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    made.add_special_tokens(MARKS)
    return made


def of_words(model: object, trainer: object, decoder: object) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    made.normalizer, made.decoder = normalizers.NFC(), decoder
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator([TEXT], trainer)
    return made


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": lambda: byte_level(True),
    "byte level without a decoder": lambda: byte_level(False),
    "as llama": as_llama,
    "unigram that normalises": unigram,
    "ends of words": lambda: of_words(
        models.BPE(end_of_word_suffix="</w>"),
        trainers.BpeTrainer(end_of_word_suffix="</w>", vocab_size=60),
        decoders.BPEDecoder(),
    ),
    "pieces of words": lambda: of_words(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"]),
        decoders.WordPiece(cleanup=False),
    ),
}
# What stands in the text that a tokenizer spells but not in what it decodes to: a space before or after the document.
SPACES = {"as llama": 1, "ends of words": 1, "pieces of words": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_have_the_bytes_of_the_text(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind]()
    made.save(str(path := tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(path))
    sizes = tokenizer.token_bytes
    for text in (TEXT, "<tool ü>🙂")[: 1 if kind == "pieces of words" else 2]:  # that one leaves out what it lacks
        tokens = np.concatenate(list(tokenizer.encode([text.encode(), DOCUMENT_END], "there")))
        ids = [token for token in tokens.tolist() if token != tokenizer.end]
        decoded = text if "without" in kind else made.decode(ids, skip_special_tokens=False)
        assert sizes[tokens].sum() == len(decoded.encode()) + SPACES.get(kind, 0), decoded
    assert sizes[[made.token_to_id(mark) for mark in MARKS if made.token_to_id(mark) is not None]].sum() == 0
    if tokenizer.end is not None:
        assert sizes[tokenizer.end] == 0


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_bytes_and_characters_have_theirs(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(TEXT.encode())
    file = build_tokens(tmp_path / "t.txt", tmp_path / "x.tokens", tokenizer)
    assert file.token_bytes is not None
    assert file.token_bytes[file.tokens].sum() == len(TEXT.encode())
    assert file.token_bytes[file.tokens[-1]] == 0


def saved(folder: Path) -> str:
    byte_level(True).save(str(path := folder / "tokenizer.json"))
    return str(path)


def notes(run: Any) -> list[str]:
    return [line.text for line in describe_data(run) if "bpb" in line.text]


def test_a_token_file_of_version_2_has_them_behind_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(TEXT.encode())
    file = build_tokens(tmp_path / "t.txt", tmp_path / "x.tokens", saved(tmp_path))
    whole = file.path.read_bytes()
    assert int.from_bytes(whole[8:12], "little") == 2
    tokens = whole[HEADER.size : -2 * file.vocab]
    assert np.frombuffer(tokens, "<u2").tolist() == file.tokens.tolist()
    assert np.frombuffer(whole[-2 * file.vocab :], "<u2").tolist() == file.token_bytes.tolist()  # type: ignore[union-attr]
    for cut in (whole[:-1], whole + b"\0"):
        (tmp_path / "cut.tokens").write_bytes(cut)
        with pytest.raises(DataError, match=r"and a header of 128 with bytes of text make"):
            open_tokens(tmp_path / "cut.tokens")


def test_a_file_without_them_says_how_and_gets_them(tmp_path: Path) -> None:
    """As 0.3 and Megatron-LM make files; nothing is built again."""
    (tmp_path / "t.txt").write_bytes(TEXT.encode() * 20)
    tokenizer = saved(tmp_path)
    new = build_tokens(tmp_path / "t.txt", tmp_path / "new.tokens", tokenizer)
    old, pair = tmp_path / "old file.tokens", tmp_path / "pair"
    write_tokens(old, new.vocab, new.tokenizer, [new.tokens])
    build_megatron(tmp_path / "t.txt", pair, tokenizer)
    token_bytes_path(pair).unlink()
    for source, path in (("tokens", old), ("megatron", pair)):
        kept = [entry.read_bytes() for entry in sorted(tmp_path.glob(f"{path.name}*"))]
        options = {"vocab": 300, "tokenizer": tokenizer, "eval_fraction": 0.5}
        run = reading(source, path, train={"eval_every": 1}, **options)
        assert open_samples(run).token_bytes == {None: None}
        quoted = f"'{path}'" if " " in path.name else str(path)
        adds = f"hpc-gpt data --bytes {quoted} {tokenizer} adds them"
        assert notes(run) == [f"bpb is null without the bytes of each token: {adds}"]
        assert not notes(reading(source, path, **options)), "nothing is evaluated"
        program = replace(run, engine=replace(run.engine, name="megatron-lm"))
        assert not notes(program), "Megatron-LM's evaluation has none"
        add_token_bytes(path, tokenizer)
        assert open_file(run).token_bytes.tolist() == new.token_bytes.tolist()  # type: ignore[union-attr]
        assert not notes(run)
        assert [
            entry.read_bytes() for entry in sorted(tmp_path.glob(f"{path.name}*")) if entry.suffix != ".bytes"
        ] == kept
        with pytest.raises(DataError, match=r"cannot write the bytes of tokens beside .*: File exists"):
            add_token_bytes(path, tokenizer)
    with pytest.raises(DataError, match=r"was made with tokenizer json:.*, but data.tokenizer is byte"):
        add_token_bytes(new.path, "byte")


def pair_of_bytes(folder: Path) -> Path:
    (folder / "t.txt").write_bytes(TEXT.encode() * 40)
    build_megatron(folder / "t.txt", folder / "pair")
    return folder / "pair"


def test_entries_that_no_token_reaches_are_cut(tmp_path: Path) -> None:
    """A tokenizer's added token that is not in the data, and a model with a smaller vocabulary."""
    pair = pair_of_bytes(tmp_path)
    run = reading("megatron", pair, vocab=250, eval_fraction=0.5, train={"eval_every": 1})
    assert len(open_file(run).token_bytes) == 250  # type: ignore[arg-type]
    ensure_data(run)


def test_bytes_that_are_not_the_datas_are_refused_at_submit(tmp_path: Path) -> None:
    pair = pair_of_bytes(tmp_path)
    run = reading("megatron", pair, vocab=256, eval_fraction=0.5, train={"eval_every": 1})
    beside = token_bytes_path(pair)
    whole = beside.read_bytes()
    assert whole[16:20] == b"byte"
    entries, text = whole[128:], tmp_path / "t.txt"
    for content, words in {
        whole[:-1]: "is damaged: it does not have the size and the SHA-256",
        whole[:200] + b"\7" + whole[201:]: "is damaged",
        whole[:80] + bytes(32) + whole[112:]: "belongs to other data than",
        entries[:-1]: "has 511 bytes, which are not those of a vocabulary of 256",
        entries[:200]: "has the bytes of 100 tokens, but .* has token 2",  # of 0.4.0, and cut off
    }.items():
        beside.write_bytes(content)
        with pytest.raises(DataError, match=words) as refused:
            ensure_data(run)
        assert "hpc-gpt data --bytes FILE TOKENIZER" in refused.value.hint
    beside.write_bytes(entries)  # of 0.4.0
    ensure_data(run)
    of_bytes = build_tokens(text, tmp_path / "x.tokens", saved(tmp_path))
    damaged = bytearray(of_bytes.path.read_bytes())
    damaged[-1] ^= 1
    of_bytes.path.write_bytes(damaged)
    with pytest.raises(DataError, match="is damaged: the bytes of its tokens"):
        open_tokens(of_bytes.path)


def test_a_pair_knows_its_tokenizer(tmp_path: Path) -> None:
    pair, tokenizer = pair_of_bytes(tmp_path), saved(tmp_path)
    options: dict[str, Any] = {"eval_fraction": 0.5, "train": {"eval_every": 1}}
    with pytest.raises(DataError, match=r"pair was made with tokenizer byte, but data.tokenizer is .*tokenizer.json"):
        ensure_data(reading("megatron", pair, vocab=300, tokenizer=tokenizer, **options))
    build_megatron(tmp_path / "t.txt", tmp_path / "other", tokenizer)
    ensure_data(reading("megatron", tmp_path / "other", vocab=300, tokenizer=tokenizer, **options))
    mix = {name: MixedSource(path=str(tmp_path / name), source="megatron", weight=1.0) for name in ("pair", "other")}
    run = reading("megatron", pair, vocab=300, **options)
    run = replace(run, data=replace(run.data, source="mix", path=None, mix=mix))
    with pytest.raises(DataError, match="the mixture's files were made with different tokenizers: other with json:"):
        ensure_data(run)


def test_shards_for_evaluation_without_a_sample_are_refused(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_bytes(TEXT.encode() * (20 if number < 3 else 0) + b"x")
    run = reading("stream", tmp_path, vocab=256, eval_fraction=0.25, train={"eval_every": 1})
    with pytest.raises(DataError, match=r"the shards for evaluation under .*, 3.txt, have no sample of seq"):
        ensure_data(run)


def test_a_stream_has_those_of_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(TEXT.encode())
    tokenizer = saved(tmp_path)
    run = reading("stream", tmp_path / "t.txt", vocab=300, tokenizer=tokenizer)
    of_tokens = open_samples(run).token_bytes[None]
    assert of_tokens is not None
    assert of_tokens.tolist() == open_tokenizer(tokenizer).token_bytes.tolist()
