"""The character tokenizer: a table of a text's own characters, in a file of its own beside the token file.

`corpus.tokens.vocab.json` holds `schema`, `tokenizer` and `characters`, which are one string in the order of their
code points: character n of it is token n + 1, and token 0 ends a document. The token file's header names the
table by the first 16 hex digits of its SHA-256, so that either tells whether they belong together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from hpc_gpt.errors import DataError
from hpc_gpt.tokens.tokenizer import TABLE_SUFFIX, Tokens, texts

CHAR = "char"
SCHEMA = 1


class CharTokenizer:
    """See `hpc_gpt.tokens.tokenizer.Tokenizer`."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.name = f"{CHAR}:{hashlib.sha256(characters.encode('utf-8')).hexdigest()[:16]}"
        self.vocab = 1 + len(characters)
        self._points = np.frombuffer(characters.encode("utf-32-le"), dtype="<u4")

    def encode(self, pieces: Iterable[bytes], where: str) -> Iterator[Tokens]:
        """The characters' numbers; DataError for one that the table lacks."""
        for offset, text in texts(pieces, where):
            if text is None:
                yield np.zeros(1, dtype=np.uint32)
                continue
            points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
            places = np.searchsorted(self._points, points)
            known = self._points[np.minimum(places, len(self._points) - 1)] == points
            if not known.all():
                first = int(np.argmin(known))
                at = offset + len(text[:first].encode("utf-8"))
                raise DataError(
                    f"{where} has the character {text[first]!r} at byte {at} of its text; table {self.name} has none",
                    "make a table from all of the text: hpc-gpt data SOURCE -o FILE --tokenizer char",
                )
            yield (places + 1).astype(np.uint32)

    def to_json(self) -> str:
        """The text of the table's file."""
        table = {"schema": SCHEMA, "tokenizer": self.name, "characters": self.characters}
        return json.dumps(table, indent=1, ensure_ascii=True) + "\n"


def collect_characters(pieces: Iterable[bytes], where: str) -> CharTokenizer:
    """The table of all characters of a text; reads it once."""
    found: set[str] = set()
    for _, text in texts(pieces, where):
        found.update(text or "")
    return CharTokenizer("".join(sorted(found)))


def table_path(tokens: Path) -> Path:
    """Where the table of a token file lies."""
    return tokens.with_name(tokens.name + TABLE_SUFFIX)


def read_table(path: Path) -> CharTokenizer:
    """The tokenizer of a table's file; DataError where it is missing or no sound table."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        characters, name, schema = table["characters"], table["tokenizer"], table["schema"]
        found = CharTokenizer(characters)
        sound = schema == SCHEMA and name == found.name and list(characters) == sorted(set(characters))
    except OSError as fault:
        raise DataError(f"cannot read the table of characters {path}: {fault.strerror}", _REBUILD) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound or not characters:
        raise DataError(f"{path} is no table of characters, or was changed", _REBUILD)
    return found


def check_table(tokens: Path, name: str) -> None:
    """DataError unless the table beside a token file is there and the one its header names."""
    path = table_path(tokens)
    found = read_table(path)
    if found.name != name:
        raise DataError(
            f"{path} is table {found.name}, but {tokens} was made with {name}: they do not belong together", _REBUILD
        )


_REBUILD = "make both again: hpc-gpt data SOURCE -o FILE --tokenizer char"
