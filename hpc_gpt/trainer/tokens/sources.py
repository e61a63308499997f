"""Reads text: a text file, a jsonl file, either of them compressed, or a folder of such files, in a fixed order.

Documents come in pieces, so a file may be larger than memory; `DOCUMENT_END` follows each document. A file compressed
by gzip (.gz) or Zstandard (.zst, an extra) has the suffix of its content before that: corpus.jsonl.gz. The suffix
decides: .jsonl and .ndjson have an object in each line, all else is text. `hpc-gpt data` also reads Parquet (.parquet;
pyarrow, an extra), and in both formats a key other than "text".
"""

import codecs
import contextlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import DataError, check_package
from hpc_gpt.core.files import data_dir
from hpc_gpt.core.format import and_more, counted, plain
from hpc_gpt.trainer.tokens.content import COMPRESSED_SUFFIXES, content

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
TEXT_KEY = "text"
# How a file of JSON objects begins, and the number of files to look into before a run.
_JSON, _LOOK_FILES = re.compile(rb'\s*\[?\s*\{\s*"'), 16
_MOST_NAMES = 20


class UnreadableFile(DataError):
    """Raised if a file cannot be read now; another machine may be able to."""


class _End(bytes):
    """A class of its own, because Python has one object for all equal bytes of length 1."""


DOCUMENT_END = _End(b"\0")


def find_path(name: str) -> Path:
    """The path of a file or folder. A relative one is searched in the current folder, then in the data folder."""
    path = Path(name).expanduser()
    in_data_dir = data_dir() / path
    return in_data_dir if not path.is_absolute() and not path.exists() and in_data_dir.exists() else path


def places_searched(name: str, beside: Path | None) -> str:
    """The folders in which a relative path was searched, as text; empty if the path is absolute or was found."""
    if (path := Path(name).expanduser()).is_absolute():
        return ""
    folders = dict.fromkeys([*([beside] if beside else []), Path.cwd(), data_dir()])
    if any((folder / path).exists() for folder in folders):
        return ""
    return f"looked for in {', '.join(str(folder) for folder in folders)}"


@dataclass
class DocumentCount:
    """The number of documents of a source, and of `empty` ones, which are left out."""

    documents: int = 0
    empty: int = 0


def text_files(source: Path, parquet: bool = False) -> list[Path]:
    """The files with text: `source` itself, or those in the folder, in the order of their paths.

    In a folder, hidden and empty files, tar archives and binaries (a NUL byte among the first 8192) are ignored.
    `parquet`: Parquet files are not ignored. Raises DataError if `source` does not exist.
    """
    if not source.exists():
        raise DataError(f"no text at {source}", "give a text file, a jsonl file or a folder")
    return [path for path, why in listed_files(source, parquet) if not why] if source.is_dir() else [source]


def listed_files(folder: Path, parquet: bool = False) -> list[tuple[Path, str]]:
    """Returns (file, why it is left out; empty if it is read) for the files of a folder, in the order of their
    paths."""
    paths = sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).parts)
    return [(path, _left_out(folder, path, parquet)) for path in paths if path.is_file()]


def left_out_line(folder: Path, parquet: bool = False) -> str:
    """A line on the files of a folder that are left out, with the reasons; empty if none is."""
    left = [f"{path.relative_to(folder)} ({why})" for path, why in listed_files(folder, parquet) if why]
    return f"left out: {names_line(left)}" if left else ""


def names_line(names: Sequence[str]) -> str:
    """The number of files, and the names of the first as text."""
    further = and_more(len(names), _MOST_NAMES, ", and ")
    return plain(f"{counted(len(names), 'file')}: {', '.join(names[:_MOST_NAMES])}{further}")


def _left_out(folder: Path, path: Path, parquet: bool) -> str:
    if any(part.startswith(".") for part in path.relative_to(folder).parts):
        return "hidden"
    if not path.stat().st_size:
        return "empty"
    if _is_parquet(path):
        return "" if parquet else "Parquet, which hpc-gpt data reads"
    return "binary" if _is_binary(path) else ""


def _is_jsonl(path: Path) -> bool:
    """Whether a file is jsonl, by its name."""
    return _suffix(path) in JSONL_SUFFIXES


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == PARQUET_SUFFIX


def check_forms(files: Sequence[Path]) -> None:
    """Raises DataError if one of the files called .json, or one of the first others, is JSON but not called .jsonl. It
    does so before a run begins, because a rank would find it only when it comes to the file, perhaps after hours."""
    others = [path for path in files if not _is_jsonl(path)]
    for path in [*(path for path in others if _suffix(path) == ".json"), *others[:_LOOK_FILES]]:
        _check_form(path, next(content(path), b""))


def _check_form(path: Path, begin: bytes) -> None:
    if not _is_jsonl(path) and _JSON.match(begin):
        raise DataError(
            f"{path} begins like JSON, but a name without .jsonl says text: its braces would be trained",
            "call it NAME.jsonl if each line is an object with its text; else "
            f"jq -c '{{text: .KEY}}' {shlex.quote(path.name)} >NAME.jsonl writes that",
        )


def _suffix(path: Path) -> str:
    """The suffix of a file's content, in lower case."""
    return (path.with_suffix("") if path.suffix in COMPRESSED_SUFFIXES else path).suffix.lower()


def _other_key(document: Any) -> str:
    """The start of a hint: the option for the key of an object's longest text; empty if it has no text."""
    texts = {key: text for key, text in document.items() if isinstance(text, str)} if isinstance(document, dict) else {}
    if not texts:
        return ""
    key = shlex.quote(max(texts, key=lambda key: len(texts[key])))
    return f"hpc-gpt data SOURCE --text-key {plain(key, ' ')} reads that key; else "


def pieces(source: Path, count: DocumentCount | None = None, key: str = TEXT_KEY) -> Iterator[bytes]:
    """Yields the documents of all text and Parquet files in `source`; see `file_pieces`."""
    for path in text_files(source, parquet=True):
        yield from file_pieces(path, count, key)


def file_pieces(path: Path, count: DocumentCount | None = None, key: str = TEXT_KEY) -> Iterator[bytes]:
    """Yields the documents of one file as bytes in pieces, with `DOCUMENT_END` after each. `count` counts them.

    A text file is one document; jsonl has one in each object and Parquet one in each row, under `key`. Raises
    DataError, with file and offset, if the compressed data are damaged or truncated, or an object has no text;
    UnreadableFile if the file cannot be read.
    """
    count = count or DocumentCount()
    try:
        if _is_parquet(path):
            yield from _documents(_parquet_texts(path, key), count)
        elif _is_jsonl(path):
            yield from _documents(_jsonl_texts(path, key), count)
        else:
            piece = b""
            for number, piece in enumerate(content(path)):
                if number == 0:
                    _check_form(path, piece)
                yield piece
            if piece:
                yield DOCUMENT_END
            count.documents += 1
            count.empty += not piece
    except OSError as fault:
        raise UnreadableFile(
            f"cannot read {path}: {fault.strerror}", "give a text file, a jsonl file or a folder"
        ) from None


def check_text(path: Path) -> str:
    """A warning if a file's content does not begin as UTF-8, else empty. Raises DataError for JSON that is not called
    .jsonl, and for a NUL byte, which no text has."""
    if _is_parquet(path):
        check_package("pyarrow", str(path), "parquet")
        return ""
    begin = next(content(path), b"")[:8192]
    _check_form(path, begin)
    if b"\0" in begin:
        raise DataError(
            f"{path} is not text: it has a NUL byte at {begin.index(0):,}",
            "give UTF-8 text (iconv converts UTF-16), jsonl, one of these as .gz or .zst, or a folder of them",
        )
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begin)
    except UnicodeDecodeError as fault:
        return f"warning: {path} is not UTF-8 at byte {fault.start:,}: is it text?"
    return ""


def _documents(texts: Iterable[bytes], count: DocumentCount) -> Iterator[bytes]:
    for document in texts:
        count.documents += 1
        if document:
            yield document
            yield DOCUMENT_END
        else:
            count.empty += 1


def _jsonl_texts(path: Path, key: str) -> Iterator[bytes]:
    for number, offset, line, value in _values(content(path)):
        text = value.get(key) if isinstance(value, dict) else None
        if not isinstance(text, str):
            keys = f"; its keys are {', '.join(value)}" if isinstance(value, dict) else ""
            start = line[:40].decode("utf-8", errors="replace").rstrip()
            raise DataError(
                f'{path}:{number}: no object with a string under "{key}" at byte {offset} of the text: {start}'
                + plain(keys, " "),
                f'{_other_key(value)}each line must look like {{{json.dumps(key, ensure_ascii=False)}: "…"}}',
            )
        try:
            yield text.encode("utf-8")
        except UnicodeEncodeError as fault:
            half = f"\\u{ord(text[fault.start]):04x}"
            raise DataError(
                f'{path}:{number}: "{key}" at byte {offset} of the text has {half}, half of a surrogate pair, which is '
                "not a character",
                "write both halves, or U+FFFD in its place",
            ) from None


def _parquet_texts(path: Path, key: str) -> Iterator[bytes]:
    check_package("pyarrow", str(path), "parquet")
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            if key not in file.schema_arrow.names:
                has = ", ".join(file.schema_arrow.names)
                raise DataError(f'{path} has no column "{key}": {plain(has, " ")}', "give one of them as --text-key")
            batches = file.iter_batches(1024, columns=[key])
            for number, text in enumerate((text for batch in batches for text in batch.column(0).to_pylist()), start=1):
                if not isinstance(text, str | None):
                    raise DataError(f'{path}, row {number:,}: "{key}" is not text', "give another column as --text-key")
                yield (text or "").encode("utf-8")
    except UnicodeDecodeError as fault:
        raise DataError(
            f'{path} has text under "{key}" that is not UTF-8: {fault.reason}', "write the file again as UTF-8"
        ) from None
    except pyarrow.ArrowException as fault:
        raise DataError(f"{path} is damaged: {plain(str(fault), ' ')}", "copy it again from a sound copy") from None


def _values(text: Iterable[bytes]) -> Iterator[tuple[int, int, bytes, Any]]:
    """Yields (number of the line, its offset, its bytes, value) for each line that is not blank. The value of a line
    that is not JSON is None."""
    offset = 0
    for number, line in enumerate(_lines(text), start=1):
        if line.strip():
            value = None
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line)
            yield number, offset, line, value
        offset += len(line) + 1


def _lines(text: Iterable[bytes]) -> Iterator[bytes]:
    """Yields lines without their line ends. A line longer than a piece is joined once, at its end."""
    begun: list[bytes] = []
    for piece in text:
        first, *others = piece.split(b"\n")
        begun.append(first)
        for line in others:
            yield b"".join(begun)
            begun = [line]
    if last := b"".join(begun):
        yield last


def _is_binary(path: Path) -> bool:
    if path.suffix in COMPRESSED_SUFFIXES:
        return path.with_suffix("").suffix == ".tar"
    if path.suffix in (".txt", *JSONL_SUFFIXES):
        # Not opened: a data set may have very many files, and every rank lists them.
        return False
    try:
        with open(path, "rb") as file:
            return b"\0" in file.read(8192)
    except OSError:
        return False
