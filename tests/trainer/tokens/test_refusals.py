"""What the data of a run are refused for: each line and hint to the letter."""

import contextlib
import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import tokenizers
from pyarrow import parquet

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.launcher.submission import check_inputs
from hpc_gpt.trainer.tokens import megatron, run_data, sources, tokenizer
from hpc_gpt.trainer.tokens.build import build_megatron, build_tokens
from hpc_gpt.trainer.tokens.end_token import check_end_of_stream, check_end_token, end_token
from hpc_gpt.trainer.tokens.samples import FileSamples, open_samples
from hpc_gpt.trainer.tokens.shard_stream import ShardStream, evaluation_samples, list_shards
from hpc_gpt.trainer.tokens.token_file import HEADER, MAGIC, check_tokens, open_tokens, write_tokens
from tests.refusals import Row, check_refusal
from tests.trainer.tokens.shard_folders import SEQ, reading, streaming

REBUILD = "build it again: hpc-gpt data SOURCE -o FILE"
AGAIN = "make both again: hpc-gpt data SOURCE -o FILE --tokenizer char"
PAIR = "copy both files again, or make them again: hpc-gpt data SOURCE -o PREFIX --format megatron"
SOUND = 'copy it again from a sound copy, or skip such files: data.on_bad_shard = "skip"'
WHOLE = (
    "copy it again from a sound copy; gzip -dc x.txt.gz >NAME.txt writes the part that is whole, and "
    'data.on_bad_shard = "skip" leaves such files out of a stream'
)
SET_IT = "set data.end_token to the number of the token that ends a document, or data.mask_documents = false"
AS_JSONL = (
    "call it NAME.jsonl if each line is an object with its text; else jq -c '{text: .KEY}' x.json >NAME.jsonl writes "
    "that"
)


def of_file(content: bytes, read: Callable[[Path], Any], name: str = "a.tokens") -> Callable[[Path], Any]:
    """What is read of a file of such a content."""

    def act(folder: Path) -> Any:
        (folder / name).write_bytes(content)
        return read(folder / name)

    return act


def documents(path: Path) -> list[bytes]:
    return list(sources.file_pieces(path))


def tokens_file(folder: Path, count: int = 9, vocab: int = 256, name: str = "byte") -> Path:
    write_tokens(folder / "a.tokens", vocab, name, [np.arange(count) % 200])
    return folder / "a.tokens"


def lying_file(folder: Path) -> Path:
    """A token file whose header says a vocabulary of 67, with a token 100."""
    path = tokens_file(folder, 101, 128)
    overwrite(path, 16, struct.pack("<I", 67))
    return path


def overwrite(path: Path, at: int, content: bytes) -> Path:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)
    return path


def read_all(resolved: Resolved) -> None:
    samples = open_samples(resolved)
    assert isinstance(samples, FileSamples)
    for number in range(samples.train_size):
        samples.train(number)


def head(version: int = 1, width: int = 2, count: int = 2) -> bytes:
    return HEADER.pack(MAGIC, version, width, 256, count, b"byte", bytes(32), b"")


def pair(index: bytes, size: int = 0) -> Callable[[Path], Any]:
    """Megatron's files of an index and of so many bytes of tokens."""

    def act(folder: Path) -> Any:
        (folder / "p.idx").write_bytes(index)
        (folder / "p.bin").write_bytes(bytes(size))
        return megatron.open_megatron(folder / "p", 256)

    return act


def index(lengths: list[int], starts: list[int], documents: list[int], version: int = 1, code: int = 8) -> bytes:
    begin = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, len(lengths), len(documents))
    return begin + b"".join(np.array(part, kind).tobytes() for part, kind in
                            ((lengths, "<i4"), (starts, "<i8"), (documents, "<i8")))  # fmt: skip


def shards(count: int, text: str = "0123456789\n") -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        for number in range(count):
            (folder / f"{number}.txt").write_text(text)
        return folder

    return made


def listing(count: int, **settings: Any) -> Callable[[Path], Any]:
    return lambda at: list_shards(at, streaming(shards(count)(at), **settings))


def char_file(table: str) -> Callable[[Path], Any]:
    def act(folder: Path) -> Any:
        path = tokens_file(folder, name=tokenizer.CharTokenizer("ab").name)
        (folder / "a.tokens.vocab.json").write_text(table)
        return run_data.open_file(reading("tokens", path, tokenizer="char"))

    return act


def blocked(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """What is made below a path that is a file."""
    return of_file(b"", lambda path: make(path / "below" / "x"), "file")


def without_packages(act: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def do(folder: Path) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name: None)
            return act(folder)

    return do


def parquet_of(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def act(folder: Path) -> Any:
        parquet.write_table(pyarrow.table({"id": [7], "content": ["x"]}), folder / "a.parquet")
        return read(folder / "a.parquet")

    return act


def beside_another(folder: Path, name: str) -> Any:
    """A relative path that is both beside the experiment and here."""
    for each in ("here", "beside"):
        (folder / each).mkdir()
        (folder / each / name).touch()
    with contextlib.chdir(folder / "here"):
        return run_data.check_beside(reading("tokens", name).data, folder / "beside")


def text_to(make: Callable[[Path, Path], Any], *taken: str, text: str = "text") -> Callable[[Path], Any]:
    def act(folder: Path) -> Any:
        (folder / "in.txt").write_text(text)
        for name in taken:
            (folder / name).touch()
        return make(folder / "in.txt", folder / "out")

    return act


# fmt: off
ROWS: dict[str, Row] = {
    "no file": (lambda at: open_tokens(at / "a.tokens"),
     "no token file HERE/a.tokens | make it: hpc-gpt data SOURCE -o FILE, or correct data.path"),
    "an empty file": (of_file(b"", open_tokens), f"HERE/a.tokens is empty: 0 bytes | {REBUILD}"),
    "another file": (of_file(b"hello", open_tokens, "my.txt"),
     "HERE/my.txt is not a token file: it starts with b'hello', not b'HPCGPTTK' | if it is text, make one from it:"
     " hpc-gpt data my.txt -o my-1.tokens"),
    "a header cut off": (of_file(head()[:127], open_tokens),
     f"HERE/a.tokens is truncated: 127 bytes, but the header alone has 128 | {REBUILD}"),
    "another version": (of_file(head(version=3), open_tokens),
     "HERE/a.tokens is a token file of version 3 with 2 bytes a token; this version reads versions 1 and 2 with 2 or "
     f"4 | {REBUILD}"),
    "a folder": (lambda at: open_tokens(at), "cannot read HERE: Is a directory | give a token file that can be read"),
    "no tokens": (of_file(head(count=0), open_tokens),
     f"HERE/a.tokens holds no tokens | its source had no text; {REBUILD}"),
    "a byte too few": (of_file(head() + bytes(3), open_tokens),
     f"HERE/a.tokens is truncated: 131 bytes, but 2 tokens of 2 bytes and a header of 128 make 132 | {REBUILD}"),
    "a byte too many": (of_file(head() + bytes(5), open_tokens),
     f"HERE/a.tokens is too long: 133 bytes, but 2 tokens of 2 bytes and a header of 128 make 132 | {REBUILD}"),
    "a larger vocabulary": (lambda at: open_tokens(tokens_file(at, vocab=257), max_vocab=256),
     "HERE/a.tokens has a vocabulary of 257 (tokenizer byte), but the model's is 256 | set model.vocab = 257, or "
     "give a token file made with another tokenizer"),
    "a token above its header's": (lambda at: run_data.ensure_data(reading("tokens", lying_file(at))),
     f"HERE/a.tokens has token 67 at byte 262, but a vocabulary of 67, as its header says | {REBUILD}"),
    "such a token as it is read": (lambda at: read_all(reading("tokens", lying_file(at))),
     f"HERE/a.tokens has token ... at byte ..., but a vocabulary of 67, as its header says | {REBUILD}"),
    "tokens that were changed": (
        lambda at: check_inputs(reading("tokens", overwrite(tokens_file(at), 130, b"\7")), None, has_gpu=False),
     "HERE/a.tokens is damaged: its tokens have SHA-256 718ffe362f4f…, but its header says e0cb19ca992a… | copy it "
     f"again from a sound copy, or {REBUILD}"),
    "a token outside": (lambda at: write_tokens(at / "a", 100, "byte", [np.array([3, 100])]),
     "token 100 is outside the vocabulary of 100"),
    "no tokenizer of that name": (lambda at: tokenizer.open_tokenizer("bpe"),
     "no tokenizer 'bpe'; known: byte, char, FILE.vocab.json, a tokenizer.json, tiktoken:NAME | a model's "
     "tokenizer is a file: hf download OWNER/MODEL tokenizer.json --local-dir . gets it, and --tokenizer "
     "tokenizer.json reads it; byte needs none"),
    "an encoding's name": (lambda at: tokenizer.open_tokenizer("cl100k_base"),
     "no tokenizer 'cl100k_base'; known: byte, char, FILE.vocab.json, a tokenizer.json, tiktoken:NAME | use "
     "tiktoken:cl100k_base"),
    "a model's name": (lambda at: tokenizer.open_tokenizer("meta-llama/Llama-3.1-8B"),
     "no tokenizer 'meta-llama/Llama-3.1-8B'; known: byte, char, FILE.vocab.json, a tokenizer.json, tiktoken:NAME | a "
     "model's tokenizer is a file: hf download meta-llama/Llama-3.1-8B tokenizer.json --local-dir . gets it, and "
     "--tokenizer tokenizer.json reads it; byte needs none"),
    "a model's folder": (of_file(b"{}", lambda path: tokenizer.open_tokenizer(str(path.parent)), "tokenizer.json"),
     "no tokenizer 'HERE'; known: byte, char, FILE.vocab.json, a tokenizer.json, tiktoken:NAME | use "
     "HERE/tokenizer.json"),
    "another's file": (of_file(b"{}", lambda path: tokenizer.open_tokenizer(str(path)), "tokenizer.model"),
     "no tokenizer 'HERE/tokenizer.model'; known: byte, char, FILE.vocab.json, a tokenizer.json, tiktoken:NAME | a "
     "tokenizer is a tokenizer.json of Hugging Face's tokenizers; transformers writes one: "
     "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"),
    "no package for it": (without_packages(of_file(b"{}", lambda path: tokenizer.open_tokenizer(str(path)), "t.json")),
     "tokenizer HERE/t.json needs tokenizers, which is not installed | pip install 'hpc-gpt[train]'"),
    "no package for an encoding": (without_packages(lambda at: tokenizer.open_tokenizer("tiktoken:gpt2")),
     "tokenizer tiktoken:gpt2 needs tiktoken, which is not installed | pip install 'hpc-gpt[tiktoken]'"),
    "no package for what is packed": (without_packages(of_file(b"", documents, "x.zst")),
     "HERE/x.zst needs zstandard, which is not installed | pip install 'hpc-gpt[zstd]'"),
    "a character outside its table": (
        lambda at: list(tokenizer.CharTokenizer("ab").encode([b"ab", "aü".encode()], "there")),
     "there has the character 'ü' at byte 3 of its text; table char:fb8e20fc2e4c3f24 does not have it | make a "
     "table from "
     "all of the text: hpc-gpt data SOURCE -o FILE --tokenizer char"),
    "no token to begin": (lambda at: tokenizer.open_tokenizer("byte", begins=True),
     "tokenizer byte has no token that begins a text | leave --begin-token and data.begin_token out, or give a "
     "tokenizer.json with <|begin_of_text|> or <s> or <bos>"),
    "char without a table": (lambda at: tokenizer.open_tokenizer("char"),
     "tokenizer char needs its table of characters, which is made from a text | make it: hpc-gpt data SOURCE -o "
     "FILE --tokenizer char, then give FILE.vocab.json"),
    "no tokenizer.json": (of_file(b"{}", lambda path: tokenizer.open_tokenizer(str(path)), "t.json"),
     "HERE/t.json is not a tokenizer.json: ... | give a tokenizer.json"),
    "a tokenizer.json that is not there": (lambda at: tokenizer.open_tokenizer(str(at / "t.json")),
     'cannot read tokenizer HERE/t.json: No such file or directory | give a tokenizer.json, or "byte"'),
    "no UTF-8": (lambda at: list(tokenizer.texts([b"ab", b"c\xff"], "it")),
     'it is not UTF-8 at byte 3 of its text: invalid start byte | tokenizer "byte" takes any bytes; or convert the'
     ' text, or set data.on_bad_shard = "skip"'),
    "no table": (lambda at: run_data.open_file(
        reading("tokens", tokens_file(at, name=tokenizer.CharTokenizer("ab").name), tokenizer="char")),
     f"cannot read the table of characters HERE/a.tokens.vocab.json: No such file or directory | {AGAIN}"),
    "another's table": (char_file(tokenizer.CharTokenizer("abc").to_json()),
     "HERE/a.tokens.vocab.json is table char:ba7816bf8f01cfea, but HERE/a.tokens was made with "
     f"char:fb8e20fc2e4c3f24: they do not belong together | {AGAIN}"),
    "a table that was changed": (char_file(tokenizer.CharTokenizer("ab").to_json().replace("ab", "ac")),
     f"HERE/a.tokens.vocab.json is not a table of characters, or was changed | {AGAIN}"),
    "JSON by another name": (of_file(b'{"id": 1, "body": "x"}', documents, "x.json"),
     "HERE/x.json begins like JSON, but a name without .jsonl says text: its braces would be trained | " + AS_JSONL),
    "a line without text": (of_file(b'{"text": "a"}\n{"id": 2}\n', documents, "x.jsonl"),
     'HERE/x.jsonl:2: no object with a string under "text" at byte 14 of the text: {"id": 2}; its keys are id | '
     'each line must look like {"text": "…"}'),
    "a line with another text": (of_file(b'{"id": "7", "body of it": "a text"}\n', documents, "x.jsonl"),
     'HERE/x.jsonl:1: no object with a string under "text" at byte 0 of the text: {"id": "7", "body of it": "a text"}; '
     "its keys are id, body of it | hpc-gpt data SOURCE --text-key 'body of it' reads that key; else each line must "
     'look like {"text": "…"}'),
    "half a character": (of_file(b'{"text": "a \\ud83d\\ude00"}\n{"text": "b \\ud83d c"}\n{"text": "d"}\n', documents,
                                 "x.jsonl"),
     'HERE/x.jsonl:2: "text" at byte 27 of the text has \\ud83d, half of a surrogate pair, which is not a character | '
     "write both halves, or U+FFFD in its place"),
    "a column that is not UTF-8": (lambda at: [
        parquet.write_table(pyarrow.table({"text": pyarrow.array([b"a", b"b\xed\xa0\xbd"]).view("string")}),
                            at / "a.parquet"), documents(at / "a.parquet")],
     'HERE/a.parquet has text under "text" that is not UTF-8: invalid continuation byte | write the file again as '
     "UTF-8"),
    "no file of text": (lambda at: documents(at / "gone.txt"),
     "cannot read HERE/gone.txt: No such file or directory | give a text file, a jsonl file or a folder"),
    "a gzip of other bytes": (of_file(b"no gzip", documents, "x.txt.gz"),
     "HERE/x.txt.gz is damaged at byte 0 or up to 7 after it: Error -3 while decompressing data: incorrect header "
     f"check | {SOUND}"),
    "a gzip that was changed": (of_file(gzip.compress(b"x", mtime=0)[:-8] + bytes(8), documents, "x.txt.gz"),
     "HERE/x.txt.gz is damaged at byte 0 or up to 21 after it: Error -3 while decompressing data: incorrect data "
     f"check | {SOUND}"),
    "a column that is none": (parquet_of(lambda path: documents(path)),
     'HERE/a.parquet has no column "text": id, content | give one of them as --text-key'),
    "a column of numbers": (parquet_of(lambda path: list(sources.file_pieces(path, key="id"))),
     'HERE/a.parquet, row 1: "id" is not text | give another column as --text-key'),
    "a gzip cut off": (of_file(gzip.compress(b"x", mtime=0)[:-1], documents, "x.txt.gz"),
     f"HERE/x.txt.gz is truncated: it ends at byte 20, within its compressed data | {WHOLE}"),
    "no index": (lambda at: megatron.open_megatron(at / "p", 256),
     "cannot read HERE/p.idx: No such file or directory | data.path is the prefix that Megatron's .bin and .idx "
     "share"),
    "no tokens of Megatron's": (lambda at: [pair(index([2], [0], [0, 1]), 4)(at), (at / "p.bin").unlink(),
                                            megatron.open_megatron(at / "p", 256)],
     "cannot read HERE/p.bin: No such file or directory | data.path is the prefix that Megatron's .bin and .idx "
     "share"),
    "no index of Megatron's": (pair(b"hello"),
     f"HERE/p.idx is not an index of Megatron-LM: it starts with b'hello' at byte 0 | {PAIR}"),
    "an index cut off in its header": (pair(index([2], [0], [0, 1])[:33]),
     f"HERE/p.idx is truncated at byte 33, in its header of 34 | {PAIR}"),
    "an index of version 2": (pair(index([2], [0], [0, 1], version=2)),
     f"HERE/p.idx has version 2 at byte 9 and type 8 at byte 17; this reads version 1, types 1 to 8 | {PAIR}"),
    "a type that is none": (pair(index([2], [0], [0, 1], code=9)),
     f"HERE/p.idx has version 1 at byte 9 and type 9 at byte 17; this reads version 1, types 1 to 8 | {PAIR}"),
    "tokens with a fraction": (pair(index([2], [0], [0, 1], code=6), 16),
     "HERE/p.idx has type 6 at byte 17, which is float64, but a token is a whole number | give a pair "
     "of files with whole numbers: hpc-gpt data SOURCE -o PREFIX --format megatron"),
    "documents that do not rise": (pair(index([2, 3], [0, 4], [0, 2, 1, 2]), 10),
     "HERE/p.idx is damaged: its document index, from byte 58 on, does not rise from 0 to 2, its sequences: 2 comes "
     f"before 1 | {PAIR}"),
    "an index cut off": (pair(index([2], [0], [0, 1])[:-1]),
     f"HERE/p.idx is truncated: it ends at byte 61, but 1 sequence and 2 document entries make 62 | {PAIR}"),
    "a sequence that does not follow": (pair(index([2, 3], [0, 5], [0, 1, 2])),
     "HERE/p.idx is damaged: sequence 1 has 3 tokens and begins at byte 5, as bytes 38 and 50 say; they do not "
     f"follow the one before | {PAIR}"),
    "no sequences": (pair(index([], [], [0])), f"HERE/p.idx holds no sequences, as byte 18 says | {PAIR}"),
    "tokens cut off": (pair(index([2], [0], [0, 1]), 3),
     f"HERE/p.bin is truncated: it ends at byte 3, but p.idx has tokens up to byte 4 | {PAIR}"),
    "tokens too many": (pair(index([2], [0], [0, 1]), 5),
     f"HERE/p.bin is too long: it ends at byte 5, but p.idx has tokens up to byte 4 | {PAIR}"),
    "an empty pair": (pair(index([0], [0], [0, 1])), f"HERE/p.bin holds no tokens | {PAIR}"),
    "a token above": (
        lambda at: [build_megatron(text_to(lambda source, out: source)(at), at / "p"),
                    check_tokens(megatron.open_megatron(at / "p", 117))],
     "HERE/p.bin has token 120 at byte 4, but the model's vocabulary is 117 | set model.vocab to more than 120, or"
     " give token files made with another tokenizer"),
    "a table that is there": (text_to(lambda source, out: build_tokens(source, out, "char"), "out.vocab.json"),
     "HERE/out.vocab.json already exists | give another name, or remove it first"),
    "a pair that is there": (text_to(build_megatron, "out.bin"),
     "HERE/out.bin already exists | give another name, or remove it first"),
    "a token file that is there": (text_to(build_tokens, "out"),
     "HERE/out already exists | give another name, or remove it first"),
    "no text there": (lambda at: build_tokens(at / "missing", at / "out"),
     "no text at HERE/missing | give a text file, a jsonl file or a folder"),
    "nothing to make tokens from": (text_to(lambda source, out: build_tokens(source, out), text=""),
     "HERE/in.txt has no text to make tokens from | give a file or folder with some in it"),
    "nothing to make a pair from": (text_to(lambda source, out: build_megatron(source, out), text=""),
     "HERE/in.txt has no text to make tokens from | give a file or folder with some in it"),
    "a place that cannot be written": (blocked(lambda out: build_tokens(out.parents[1], out)),
     "cannot write HERE/file/below/x: Not a directory | give a file name in a folder with free space that you "
      "can write"),
    "a folder without text": (listing(0),
     "HERE has no text to stream | give a folder of text, jsonl, .gz or .zst files"),
    "fewer shards than ranks": (listing(1, dp=2),
     "HERE has 1 shard to train on, but dp 2 x data.workers 1 = 2 readers need one each | use dp 1 or less, or "
     "split the text into 2 files"),
    "fewer shards than readers": (listing(5, dp=2, workers=3),
     "HERE has 5 shards to train on, but dp 2 x data.workers 3 = 6 readers need one each | set data.workers = 2, "
     "or split the text into 6 files"),
    "no shard that is left": (listing(2, eval_fraction=0.9, dp=2, workers=1),
     "HERE has 1 shard to train on (2 less 1 for evaluation), but dp 2 x data.workers 1 = 2 readers need one each"
     " | use dp 1 or less, or split the text into 3 files"),
    "none for evaluation": (listing(4, eval_fraction=0.1, train={"eval_every": 1}),
     "HERE has 4 shards, and data.eval_fraction = 0.1 leaves none for evaluation | set data.eval_fraction to "
     "0.25 or more, or train.eval_every = 0"),
    "no more for evaluation": (listing(1, eval_fraction=0.1, train={"eval_every": 1}),
     "HERE has 1 shard, and data.eval_fraction = 0.1 leaves none for evaluation | split the text into 2 files "
     "or more, set train.eval_every = 0, or make a token file: hpc-gpt data HERE"),
    "shards below a sample": (
        lambda at: ShardStream(list_shards(at, streaming(shards(1, "abc")(at))), streaming(at), 0).take(1),
     "no shard of data-parallel rank 0 under HERE has a sample of seq + 1 = 5 tokens | give larger files, or a "
     "shorter model.seq"),
    "evaluation below a sample": (
        lambda at: evaluation_samples(
            list_shards(at, streaming(shards(2, "abc")(at), eval_fraction=0.5)), streaming(at), 3, {0}),
     "the shards for evaluation under HERE, 1.txt, have no sample of seq + 1 = 5 tokens | set data.eval_fraction "
     "higher, or train.eval_every = 0"),
    # the end of a document
    "no end token": (of_file(
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})).to_str().encode(),
        lambda path: end_token(reading("tokens", "a", tokenizer=str(path), mask_documents=True)), "t.json"),
     f"data.mask_documents is true, but tokenizer HERE/t.json has no token that ends a document | {SET_IT}"),
    "an end outside": (lambda at: end_token(reading("tokens", "a", mask_documents=True, end_token=256)),
     f"the end token is 256, but the model's vocabulary has tokens 0 to 255 | {SET_IT}"),
    "no end among the tokens": (
        lambda at: check_end_token(
            reading("tokens", "a", mask_documents=True, end_token=7), np.zeros(1234, np.uint16), Path("a.tokens")),
     f"data.mask_documents is true, but none of 1,234 tokens of a.tokens is the end token 7 | {SET_IT}"),
    "no end among the first": (
        lambda at: check_end_of_stream(
            streaming(shards(1)(at), mask_documents=True, end_token=7), at / "0.txt"),
     f"data.mask_documents is true, but none of the first 12 tokens of HERE/0.txt is the end token 7 | {SET_IT}"),
    # a run's data
    "bytes for another tokenizer": (
        lambda at: run_data.ensure_data(reading("tokens", tokens_file(at), tokenizer="tiktoken:gpt2")),
     "HERE/a.tokens was made with tokenizer byte, but data.tokenizer is tiktoken:gpt2 | set data.tokenizer = byte,"
     " or make the file again: hpc-gpt data SOURCE -o FILE --tokenizer tiktoken:gpt2"),
    "a file's own tokenizer for bytes": (
        lambda at: run_data.ensure_data(reading("tokens", tokens_file(at, name="json:0123"))),
     "HERE/a.tokens was made with tokenizer json:0123, but data.tokenizer is byte | set data.tokenizer = the "
     "tokenizer.json it was made with, or make the file again: hpc-gpt data SOURCE -o FILE --tokenizer byte"),
    "the library's sources in characters": (
        lambda at: run_data.ensure_data(reading("megatron", "stdlib", tokenizer="char")),
     "data.tokenizer is char, but the standard library's sources use tokenizer byte | hpc-gpt data stdlib -o FILE "
     "--tokenizer char, then data.path = FILE"),
    "a tokenizer above the model": (
        lambda at: run_data.open_shards(reading("stream", shards(1)(at), vocab=255)),
     "tokenizer byte has a vocabulary of 256, but the model's is 255 | set model.vocab = 256, or another "
     "data.tokenizer"),
    "a path of two files": (lambda at: beside_another(at, "a.tokens"),
     "data.path a.tokens is ambiguous: HERE/beside/a.tokens, beside the file with the key, and HERE/here/a.tokens | "
     "remove one, or give an absolute path: --set data.path=PATH"),
    "one token too few": (lambda at: run_data.ensure_data(reading("tokens", tokens_file(at, SEQ))),
     "HERE/a.tokens has 4 tokens to train on (4 less 0 for evaluation), but one sample needs seq + 1 = 5 | give "
     "more text, or a shorter model.seq"),
    "one too few to evaluate": (
        lambda at: run_data.ensure_data(
            reading("tokens", tokens_file(at, 2 * SEQ + 1), eval_fraction=0.5, train={"eval_every": 1})),
     "HERE/a.tokens has 4 tokens for evaluation (0.5 of 9), but one sample needs seq + 1 = 5 | set "
     "data.eval_fraction to 0.556 or more, or train.eval_every = 0"),
}
# fmt: on


@pytest.mark.parametrize("name", ROWS)
def test_it_is_refused_so(name: str, tmp_path: Path) -> None:
    check_refusal(ROWS[name], tmp_path)
