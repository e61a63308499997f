"""Reads text: a text file, a jsonl file, either of them compressed, or a folder of such files, in a fixed order.

Documents come in pieces, so a file may be larger than memory; `DOCUMENT_END` follows each document. A file compressed
by gzip (.gz) or Zstandard (.zst, an extra) has the suffix of its content before that: corpus.jsonl.gz. A file's
content decides whether it is jsonl (`is_jsonl`); an object may take several lines. `hpc-gpt data` also reads Parquet
(pyarrow, an extra), and in both formats a key other than "text".
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

from hpc_gpt.core.errors import DataError
from hpc_gpt.core.files import data_dir
from hpc_gpt.core.format import and_more, counted, plain
from hpc_gpt.core.settings.requirements import check_package
from hpc_gpt.trainer.tokens.content import COMPRESSED_SUFFIXES, content

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
TEXT_KEY = "text"
# Files about a data set that are often next to its jsonl and do not belong to its text.
_ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|dataset_infos?|dataset_dict)(\.(md|txt|rst|html|cff|json))?",
    re.IGNORECASE,
)
_ABOUT_IT = "about the data"
# The bytes of a file to read for its first value, and the files of a folder to look into if their names do not tell.
_LOOK_BYTES, _LOOK_FILES = 1 << 24, 16
_OBJECT, _FIRST_KEY = re.compile(rb'\s*\{\s*["}]'), re.compile(rb'\s*\{\s*("[^"\\]*")\s*:')
# Up to this size, an object over several lines may end at any line; a larger one ends at its first line's indent.
_SMALL_BYTES = 1 << 16
_OPEN = object()
_MOST_NAMES = 20


class UnreadableFile(DataError):
    """The system refuses to read a file, on this machine and at this moment; its content is unknown."""


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

    In a folder, hidden and empty files, tar archives and binaries (a NUL byte among the first 8192) are ignored; in a
    folder with jsonl also README, LICENSE and the like. `parquet`: Parquet files are not ignored. Raises DataError if
    `source` does not exist.
    """
    if not source.exists():
        raise DataError(f"no text at {source}", "give a text file, a jsonl file or a folder")
    return [path for path, why in listed_files(source, parquet) if not why] if source.is_dir() else [source]


def listed_files(folder: Path, parquet: bool = False) -> list[tuple[Path, str]]:
    """(file, why it is left out; empty if it is read) for the files of a folder, in the order of their paths."""
    paths = sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).parts)
    listed = [(path, _left_out(folder, path, parquet)) for path in paths if path.is_file()]
    about = {path for path, why in listed if not why and _ABOUT.fullmatch(path.name)}
    if about and _have_jsonl([path for path, why in listed if not why and path not in about]):
        return [(path, _ABOUT_IT if path in about else why) for path, why in listed]
    return listed


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


def _have_jsonl(files: Sequence[Path]) -> bool:
    """Whether there is jsonl among files, by their names, or by the content of the first whose names do not tell."""
    others = [path for path in files if not named_jsonl(path)]
    return len(others) < len(files) or any("text" in (_first_object(path) or ()) for path in others[:_LOOK_FILES])


def named_jsonl(path: Path) -> bool:
    """Whether a file is jsonl by its name."""
    return _unpacked(path).suffix.lower() in JSONL_SUFFIXES


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == PARQUET_SUFFIX


def is_jsonl(path: Path, key: str = TEXT_KEY) -> bool:
    """Whether a file is jsonl: by its name, or because its first value is an object with the key of its text.

    Raises DataError, with the keys of its first object, for `.json` of another form, and for a file of objects only,
    the first without that key: read as text, it would keep its braces. A file about the data counts as text.
    """
    if named_jsonl(path):
        return True
    first = _first_object(path)
    if first is not None and key in first:
        return True
    if _ABOUT.fullmatch(path.name):
        return False
    if _is_named_json(path):
        raise _no_documents(path, first, key)
    if first is not None and all(isinstance(value, dict) for *_, value in _values(content(path))):
        raise _no_documents(path, first, key)
    return False


def check_forms(files: Sequence[Path]) -> None:
    """Raises DataError if `is_jsonl` refuses one of the files called .json or one of the first others. It does so
    before a run begins, because a rank would find it only when it comes to the file, perhaps after hours."""
    others = [path for path in files if not named_jsonl(path) and not _is_named_json(path)]
    for path in [*filter(_is_named_json, files), *others[:_LOOK_FILES]]:
        is_jsonl(path)


def _unpacked(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in COMPRESSED_SUFFIXES else path


def _is_named_json(path: Path) -> bool:
    return _unpacked(path).suffix.lower() == ".json"


def _first_object(path: Path) -> dict[str, Any] | None:
    """The object that a file begins with, None if it begins otherwise. An object of more than 16 MiB has only its first
    key."""
    size = 0

    def begin() -> Iterator[bytes]:
        nonlocal size
        for piece in content(path):
            size += len(piece)
            yield piece
            if size >= _LOOK_BYTES:
                return

    start = next(begin(), b"")
    if not _OBJECT.match(start):
        return None
    size = 0
    *_, value = next(_values(begin()))
    if value is None and size >= _LOOK_BYTES and (begun := _FIRST_KEY.match(start)):
        return {json.loads(begun[1]): None}
    return value if isinstance(value, dict) else None


def _no_documents(path: Path, first: dict[str, Any] | None, key: str) -> DataError:
    """The refusal of a file of JSON, with the keys of its first object."""
    start = next(content(path), b"").decode("utf-8", errors="replace").lstrip()
    what, write = "its first object has", "'{text: .KEY}'"
    if first is None:
        what, write = f"it begins with {start[:1]}, and the first object in it has", "'.[] | {text: .KEY}'"
        with contextlib.suppress(ValueError, RecursionError):
            first, _ = json.JSONDecoder().raw_decode(start, max(start.find("{"), 0))
    content_text = (
        f"{what} the keys {', '.join(first)}" if isinstance(first, dict) else f"it begins with {start[:40].rstrip()}"
    )
    return DataError(
        f'{path} is JSON, but not an object with a string under "{key}" for each document: {plain(content_text, " ")}',
        f"{_other_key(first) or 'hpc-gpt data --text-key KEY reads another key; else '}"
        f"jq -c {write} {shlex.quote(path.name)} >NAME.jsonl writes them",
    )


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
        elif is_jsonl(path, key):
            yield from _documents(_jsonl_texts(path, key), count)
        else:
            piece = b""
            for piece in content(path):
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
    """A warning if a file's content does not begin as UTF-8, else empty. Raises DataError for a NUL byte, which no text
    has."""
    if _is_parquet(path):
        check_package("pyarrow", "parquet", str(path))
        return ""
    begin = next(content(path), b"")[:8192]
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
    for number, offset, begin, value in _values(content(path)):
        text = value.get(key) if isinstance(value, dict) else None
        if not isinstance(text, str):
            keys = f"; its keys are {', '.join(value)}" if isinstance(value, dict) else ""
            start = begin[:40].decode("utf-8", errors="replace").rstrip()
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
    check_package("pyarrow", "parquet", str(path))
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
    """Yields (number of the first line, its offset, its bytes, value) for the JSON in a text: a value per line, or an
    object over several lines. A line that is not JSON has the value None."""
    begun: list[bytes] = []
    offset = first = at = size = 0
    for number, line in enumerate(_lines(text), start=1):
        if begun or line.strip():
            if not begun:
                first, at, size = number, offset, 0
            begun.append(line)
            size += len(line)
            if len(begun) == 1 or _may_end(begun[0], line, size):
                value = _json_in(b"\n".join(begun))
                if value is not _OPEN:
                    yield first, at, begun[0], value
                    begun = []
        offset += len(line) + 1
    if begun:
        yield first, at, begun[0], None


def _may_end(first: bytes, line: bytes, size: int) -> bool:
    """Whether an object over several lines may end with `line`; in a large one only some lines may."""
    is_out = len(line) - len(line.lstrip()) <= len(first) - len(first.lstrip())
    return line.rstrip().endswith(b"}") and (is_out or size < _SMALL_BYTES)


def _json_in(text: bytes) -> Any:
    """The JSON value of a text: None if it is not JSON, `_OPEN` if it is the start of an object."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as fault:
        return _OPEN if fault.doc.lstrip()[:1] == "{" and fault.pos >= len(fault.doc.rstrip()) else None
    except (ValueError, RecursionError):
        return None


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
