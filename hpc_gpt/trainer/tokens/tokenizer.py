"""Tokenizers: bytes, characters, or one of the packages `tokenizers` and `tiktoken` (extras).

data.tokenizer and `hpc-gpt data --tokenizer` take:

    byte                 each byte is a token, a zero byte ends a document
    char                 a table of the text's characters, in a file beside the token file
    FILE.vocab.json      such a table, for other text
    FILE.json            a tokenizer.json of Hugging Face's tokenizers
    tiktoken:NAME        an encoding of tiktoken, such as gpt2, from its cache: nothing is downloaded

A table of characters, such as `corpus.tokens.vocab.json`, has `schema`, `tokenizer` and `characters`, one string sorted
by code point. Its character n is token n + 1, and token 0 ends a document. The token file's header has the first 16 hex
digits of the characters' SHA-256, so a table and a token file can be checked against each other.
"""

import contextlib
import functools
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.errors import DataError, OsErrorAs, check_package, read_hint
from hpc_gpt.core.files import json_in
from hpc_gpt.trainer.tokens.sources import DOCUMENT_END, find_path

BYTE, CHAR, TIKTOKEN = "byte", "char", "tiktoken:"
TABLE_SUFFIX = ".vocab.json"
TABLE_SCHEMA = 1
_GATHERED_BYTES = 1 << 20
# With chunks of 1 MiB a package takes twice as long.
_CHUNK_BYTES = 1 << 16
# Names of the token that ends a document in a tokenizer.json.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "[EOS]")
# Names of the token that begins a document: Llama 3's, Llama 2's and Mistral's, and Gemma's.
_BEGINS = ("<|begin_of_text|>", "<s>", "<bos>")
# Names of tiktoken's encodings, and the pattern of a model's name on Hugging Face.
_ENCODINGS = ("gpt2", "r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base")
_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")  # the token of a byte that no other token has
_MODEL = re.compile(r"[\w.-]+/[\w.-]+")
_REBUILD = "make both again: hpc-gpt data SOURCE -o FILE --tokenizer char"

Tokens = NDArray[Any]


class Tokenizer(Protocol):
    """A tokenizer: `name` as in a token file's header, at most 32 bytes; every token is below `vocab`. `end` is the
    token after each document; None if it writes none."""

    name: str
    vocab: int
    end: int | None

    @property
    def token_bytes(self) -> Tokens:
        """The bytes that each token adds to the UTF-8 text, [vocab]; 0 for special tokens, such as `end`."""

    def encode(self, pieces: Iterable[bytes], where: str) -> Iterator[Tokens]:
        """Yields the tokens of documents that come in pieces (`sources.file_pieces`), in unsigned arrays of any length.

        Raises DataError, with `where` as the text's name and the offset, for bytes that are not UTF-8.
        """


def beginning_documents(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with its begin-of-text token before each document. Raises DataError if it has none."""
    begin = getattr(tokenizer, "begin", None)
    if not isinstance(tokenizer, WordTokenizer) or begin is None:
        raise DataError(
            f"tokenizer {tokenizer.name} has no token that begins a text",
            f"leave --begin-token and data.begin_token out, or give a tokenizer.json with {' or '.join(_BEGINS)}",
        )
    return replace(tokenizer, begins=True)


def open_tokenizer(description: str, begins: bool = False) -> Tokenizer:
    """Opens the tokenizer of a description. `begins`: it writes its begin-of-text token before each document.

    Raises DataError or ConfigError if there is no such tokenizer, or it has no begin-of-text token.
    """
    if begins:
        return beginning_documents(open_tokenizer(description))
    if description == BYTE:
        return ByteTokenizer()
    if description.startswith(TIKTOKEN):
        return _open_tiktoken(description)
    if description.endswith(".json"):
        path = find_path(description)
        return read_table(path) if description.endswith(TABLE_SUFFIX) else _open_file(path)
    if description == CHAR:
        raise DataError(
            "tokenizer char needs its table of characters, which is made from a text",
            f"make it: hpc-gpt data SOURCE -o FILE --tokenizer char, then give FILE{TABLE_SUFFIX}",
        )
    raise DataError(
        f"no tokenizer {description!r}; known: byte, char, FILE{TABLE_SUFFIX}, a tokenizer.json, tiktoken:NAME",
        _tokenizer_meant(description),
    )


def _tokenizer_meant(name: str) -> str:
    """The hint for a name that is not a tokenizer's: an encoding, a model, a folder or another file."""
    path = find_path(name)
    if name in _ENCODINGS:
        return f"use {TIKTOKEN}{name}"
    if (path / "tokenizer.json").is_file():
        return f"use {path / 'tokenizer.json'}"
    written = "transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    if path.exists():
        return f"a tokenizer is a tokenizer.json of Hugging Face's tokenizers; {written}"
    model = shlex.quote(name) if _MODEL.fullmatch(name) else "OWNER/MODEL"
    return (
        f"a model's tokenizer is a file: hf download {model} tokenizer.json --local-dir . gets it, and "
        "--tokenizer tokenizer.json reads it; byte needs none"
    )


def tokenizer_name(description: str) -> str:
    """The tokenizer's name in a token file's header. Loads no tokenizer and needs no package."""
    if description.endswith(".json") and not description.endswith(TABLE_SUFFIX):
        return _file_name(_read(find_path(description)))
    return open_tokenizer(description).name if description.endswith(TABLE_SUFFIX) else description


class ByteTokenizer:
    """Each byte is a token."""

    name = BYTE
    vocab = 256
    end: int | None = 0
    token_bytes: Tokens = np.minimum(np.arange(vocab), 1)

    def encode(self, pieces: Iterable[bytes], where: str) -> Iterator[Tokens]:
        """Yields the bytes; see `Tokenizer`."""
        gathered: list[bytes] = []
        size = 0
        try:
            for piece in pieces:
                gathered.append(piece)
                size += len(piece)
                if size >= _GATHERED_BYTES:
                    yield np.frombuffer(b"".join(gathered), dtype=np.uint8)
                    gathered, size = [], 0
        except DataError:
            # The text before the fault is used.
            yield np.frombuffer(b"".join(gathered), dtype=np.uint8)
            raise
        yield np.frombuffer(b"".join(gathered), dtype=np.uint8)


@dataclass
class WordTokenizer:
    """A package's tokenizer: `encode_text` is the package's method, `end` its token after a document, if any, and
    `begin` the token before one, which is written if `begins`. `sizes()` has pairs of a token and its bytes of text."""

    name: str
    vocab: int
    encode_text: Any
    end: int | None
    begin: int | None = None
    sizes: Any = tuple
    begins: bool = False

    def encode(self, pieces: Iterable[bytes], where: str) -> Iterator[Tokens]:
        """See `Tokenizer`."""
        is_first, ends = self.begins, np.array([] if self.end is None else [self.end], dtype=np.uint32)
        for _, text in texts(pieces, where):
            if is_first and text is not None:
                yield np.array([self.begin], dtype=np.uint32)
            is_first = self.begins and text is None
            yield ends if text is None else np.array(self.encode_text(text), dtype=np.uint32)

    @functools.cached_property
    def token_bytes(self) -> Tokens:
        sizes = dict(self.sizes()) | {self.end: 0, self.begin: 0}
        return np.array([sizes.get(token, 0) for token in range(self.vocab)])


class CharTokenizer:
    """Each character of the table is a token; see `Tokenizer`."""

    end: int | None = 0

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.name = f"{CHAR}:{hashlib.sha256(characters.encode('utf-8')).hexdigest()[:16]}"
        self.vocab = 1 + len(characters)
        self._points = np.frombuffer(characters.encode("utf-32-le"), dtype="<u4")
        self.token_bytes: Tokens = np.array([0, *(len(character.encode()) for character in characters)])

    def encode(self, pieces: Iterable[bytes], where: str) -> Iterator[Tokens]:
        """See `Tokenizer`. Raises DataError also for a character that is not in the table."""
        for offset, text in texts(pieces, where):
            if text is None:
                yield np.zeros(1, dtype=np.uint32)
                continue
            points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
            places = np.searchsorted(self._points, points)
            is_in_table = self._points[np.minimum(places, len(self._points) - 1)] == points
            if not is_in_table.all():
                first = int(np.argmin(is_in_table))
                at = offset + len(text[:first].encode("utf-8"))
                raise DataError(
                    f"{where} has the character {text[first]!r} at byte {at} of its text; table {self.name} does not "
                    "have it",
                    "make a table from all of the text: hpc-gpt data SOURCE -o FILE --tokenizer char",
                )
            yield (places + 1).astype(np.uint32)

    def to_json(self) -> str:
        """The text of the table's file."""
        table = {"schema": TABLE_SCHEMA, "tokenizer": self.name, "characters": self.characters}
        return json.dumps(table, indent=1, ensure_ascii=True) + "\n"


def collect_characters(pieces: Iterable[bytes], where: str) -> CharTokenizer:
    """Makes the table of all characters of a text."""
    characters: set[str] = set()
    for _, text in texts(pieces, where):
        characters.update(text or "")
    return CharTokenizer("".join(sorted(characters)))


def table_path(tokens: Path) -> Path:
    """The path of a token file's table of characters."""
    return tokens.with_name(tokens.name + TABLE_SUFFIX)


def read_table(path: Path) -> CharTokenizer:
    """Reads a table of characters. Raises DataError if it is missing or damaged."""
    with (
        OsErrorAs(DataError, f"cannot read the table of characters {path}", partial(read_hint, of_contents=_REBUILD)),
        contextlib.suppress(ValueError, KeyError, TypeError, AttributeError),
    ):
        table = json_in(path)
        characters, name, schema = table["characters"], table["tokenizer"], table["schema"]
        char_table = CharTokenizer(characters)
        sound = schema == TABLE_SCHEMA and name == char_table.name and list(characters) == sorted(set(characters))
        if sound and characters:
            return char_table
    raise DataError(f"{path} is not a table of characters, or was changed", _REBUILD)


def check_table(tokens: Path, name: str) -> None:
    """Raises DataError unless the table beside a token file exists and is the one in its header."""
    path = table_path(tokens)
    table = read_table(path)
    if table.name != name:
        raise DataError(
            f"{path} is table {table.name}, but {tokens} was made with {name}: they do not belong together", _REBUILD
        )


def texts(pieces: Iterable[bytes], where: str) -> Iterator[tuple[int, str | None]]:
    """Yields (offset in bytes, text) of documents in chunks of at most 64 KiB; text None ends a document.

    A longer document is cut after the last line end within 64 KiB, so the cuts depend only on the text. Raises
    DataError, with the offset, for bytes that are not UTF-8.
    """
    begun, offset = bytearray(), 0

    def take(size: int) -> tuple[int, str]:
        nonlocal offset
        try:
            text = begun[:size].decode("utf-8")
        except UnicodeDecodeError as fault:
            raise DataError(
                f"{where} is not UTF-8 at byte {offset + fault.start} of its text: {fault.reason}",
                'tokenizer "byte" takes any bytes; or convert the text, or set data.on_bad_shard = "skip"',
            ) from None
        del begun[:size]
        start, offset = offset, offset + size
        return start, text

    for piece in pieces:
        if piece is DOCUMENT_END:
            if begun:
                yield take(len(begun))
            yield offset, None
            continue
        begun += piece
        while len(begun) > _CHUNK_BYTES:
            yield take(_cut(begun))
    if begun:
        yield take(len(begun))


def _cut(begun: bytearray) -> int:
    """The size of the next chunk: up to the last line end within 64 KiB, else up to the start of a character."""
    line = begun.rfind(b"\n", 0, _CHUNK_BYTES) + 1
    if line:
        return line
    at = _CHUNK_BYTES
    while at > _CHUNK_BYTES - 4 and begun[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _open_file(path: Path) -> Tokenizer:
    text = _read(path)
    check_package("tokenizers", f"tokenizer {path}")
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(text.decode("utf-8"))
    except Exception as fault:
        # The package has no exception class of its own.
        line = next(iter(str(fault).splitlines()), type(fault).__name__)
        raise DataError(f"{path} is not a tokenizer.json: {line}", "give a tokenizer.json") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ends = (tokenizer.token_to_id(end) for end in _ENDS)
    begins = (tokenizer.token_to_id(begin) for begin in _BEGINS)
    return WordTokenizer(
        _file_name(text),
        # Token numbers may have gaps.
        1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0),
        lambda text: tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids,
        next((end for end in ends if end is not None), None),
        next((begin for begin in begins if begin is not None), None),
        lambda: _sizes(tokenizer, json.loads(text)),
    )


def _sizes(tokenizer: Any, about: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yields (token, bytes that it adds to the text) of a tokenizer.json, whose content is `about`.

    A byte-level token has a character for each byte, which may be a part of a character of the text. What others add,
    the decoder says: between two letters, because it may add or drop a space at an end.
    """
    is_by_byte = '"ByteLevel"' in json.dumps([about.get("decoder"), about.get("pre_tokenizer")])
    decode, added = getattr(tokenizer.decoder, "decode", " ".join), tokenizer.get_added_tokens_decoder()
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number in added:
            yield number, 0 if added[number].special else len(token.encode())
        elif is_by_byte:
            yield number, len(token)
        else:
            text = decode(["a", token, "a"]).encode()
            yield number, 1 if _FALLBACK.fullmatch(token) else len(text) - len(decode(["a", "a"]))


def _read(path: Path) -> bytes:
    with OsErrorAs(DataError, f"cannot read tokenizer {path}", 'give a tokenizer.json, or "byte"'):
        return path.read_bytes()


def _file_name(text: bytes) -> str:
    return f"json:{hashlib.sha256(text).hexdigest()[:16]}"


def _open_tiktoken(description: str) -> Tokenizer:
    check_package("tiktoken", f"tokenizer {description}", "tiktoken")
    import tiktoken
    import tiktoken.load

    name = description.removeprefix(TIKTOKEN)
    if name not in tiktoken.list_encoding_names():
        raise DataError(f"no encoding {name!r} in tiktoken", f"known: {', '.join(tiktoken.list_encoding_names())}")
    reader = tiktoken.load.read_file

    def read_local(blobpath: str) -> bytes:
        if "://" in blobpath:
            raise FileNotFoundError(blobpath)
        return reader(blobpath)

    # Otherwise tiktoken would use the network without a time limit, which fails after minutes on a compute node.
    tiktoken.load.read_file = read_local
    try:
        encoding = tiktoken.get_encoding(name)
    except FileNotFoundError:
        raise DataError(
            f"the files of tokenizer {description} are not in tiktoken's cache (TIKTOKEN_CACHE_DIR)",
            f"on a machine with network: python -c 'import tiktoken; tiktoken.get_encoding(\"{name}\")'",
        ) from None
    finally:
        tiktoken.load.read_file = reader
    return WordTokenizer(
        description, encoding.n_vocab, encoding.encode_ordinary, encoding.eot_token,
        sizes=lambda: ((encoding.encode_single_token(value), len(value)) for value in encoding.token_byte_values()),
    )  # fmt: skip
