"""Makes token files from text with any tokenizer, and test data from the standard library's sources."""

import contextlib
import functools
import gzip
import json
import shlex
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hpc_gpt.core.errors import DataError
from hpc_gpt.core.files import aside, give_name, try_folder
from hpc_gpt.core.settings.data_source import STDLIB as STDLIB
from hpc_gpt.trainer.tokens import megatron
from hpc_gpt.trainer.tokens.sources import TEXT_KEY, DocumentCount, file_pieces, pieces
from hpc_gpt.trainer.tokens.token_file import TokenFile, open_tokens, stdlib_path, token_bytes_path, write_tokens
from hpc_gpt.trainer.tokens.tokenizer import (
    BYTE,
    CHAR,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    beginning_documents,
    collect_characters,
    open_tokenizer,
    table_path,
)

# Not every machine has the tests, and installed packages do not belong to the standard library.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
STDLIB_SHARDS = 40
_ROOM = "set HPC_GPT_DATA to a folder with free space that you can write"
_ELSEWHERE = "give a file name in a folder with free space that you can write"


def build_tokens(
    source: Path | str,
    out: Path | str,
    tokenizer: str = BYTE,
    begins: bool = False,
    count: DocumentCount | None = None,
    key: str = TEXT_KEY,
) -> TokenFile:
    """Makes the token file `out` from a file of text, jsonl or Parquet, a folder of such files, or "stdlib".

    The same source gives the same bytes. `out` gets its name when it is complete. With tokenizer "char" its table of
    characters is written beside it. `begins`: a begin-of-text token comes before each document. `count` counts the
    documents; `key` is the key of their text in jsonl and Parquet. Raises DataError and leaves nothing if the source is
    missing, damaged or without text, if `out` exists, or if the disk refuses.
    """
    read, out = _reader(source, key=key), Path(out)
    table = None
    _refuse_taken(out, table_path(out) if tokenizer == CHAR else out)
    if tokenizer == CHAR:
        table = collect_characters(read(), str(source))
    chosen = open_tokenizer(tokenizer, begins) if table is None else beginning_documents(table) if begins else table
    with contextlib.ExitStack() as undo, _refusals(out, _ELSEWHERE):
        if table is not None:
            _write_table(table, table_path(out))
            undo.callback(table_path(out).unlink)
        _write(_reader(source, count, key)(), out, chosen, str(source))
        undo.pop_all()
    return open_tokens(out)


def build_megatron(
    source: Path | str,
    prefix: Path | str,
    tokenizer: str = BYTE,
    begins: bool = False,
    count: DocumentCount | None = None,
    key: str = TEXT_KEY,
) -> int:
    """Makes Megatron's `prefix.bin` and `prefix.idx` as `build_tokens` does, with a sequence per document.

    Returns the number of tokens.
    """
    prefix, chosen = Path(prefix), open_tokenizer(tokenizer, begins)
    _refuse_taken(*megatron.paths(prefix), token_bytes_path(prefix))
    with _refusals(prefix, _ELSEWHERE):
        made = megatron.write(_reader(source, count, key)(), prefix, chosen, str(source))
    return made  # noqa: RET504 (to mypy the `with` may swallow an exception)


def build_stdlib() -> TokenFile:
    """Opens the token file of the sources of this Python's standard library; makes it if it is missing.

    Two builders at once are safe: both write the same bytes under temporary names, and the first to finish renames its
    file. Raises DataError if the sources are missing or the disk refuses.
    """
    path = stdlib_path()
    if not path.exists():
        with _refusals(path, _ROOM, same_bytes=True):
            _write(_stdlib_pieces(), path, ByteTokenizer(), sysconfig.get_path("stdlib"))
    return open_tokens(path)


def build_stdlib_megatron() -> Path:
    """Returns the prefix of Megatron's pair of files of the same text, as bytes; makes them if one is missing."""
    prefix = stdlib_path("-megatron")
    if not all(path.exists() for path in megatron.paths(prefix)):
        with _refusals(prefix, _ROOM, same_bytes=True):
            megatron.write(_stdlib_pieces(), prefix, ByteTokenizer(), sysconfig.get_path("stdlib"), same_text=True)
    return prefix


def build_stdlib_shards() -> Path:
    """Returns a folder of shards of the same text; makes it if it is missing.

    A quarter each is plain text, jsonl, and both compressed by gzip.
    """
    folder = stdlib_path("-shards")
    if folder.exists():
        return folder
    try:
        with aside(folder) as temporary:
            temporary.mkdir(parents=True)
            files = list(_stdlib_files())
            for number in range(STDLIB_SHARDS):
                _write_shard(temporary, number, files[number::STDLIB_SHARDS])
            temporary.rename(folder)
    except OSError as fault:
        # Another builder was first: a folder cannot be renamed to one that is not empty.
        if not folder.is_dir():
            raise DataError(f"cannot write {folder}: {fault.strerror}", _ROOM) from None
    return folder


def check_disk_space(path: Path) -> None:
    """Raises DataError if data that are yet to be made cannot be written to `path`."""
    with _refusals(path, _ROOM):
        try_folder(path.parent)


@functools.cache
def stdlib_length() -> int:
    """The number of tokens of the standard library's sources, by bytes. Writes nothing."""
    return sum(len(piece) for piece in _stdlib_pieces())


def _stdlib_files() -> Iterator[Path]:
    top = Path(sysconfig.get_path("stdlib"))
    for path in sorted(top.rglob("*.py"), key=lambda path: path.relative_to(top).parts):
        if not _LEFT_OUT.intersection(path.relative_to(top).parts):
            yield path


def _stdlib_pieces() -> Iterator[bytes]:
    for path in _stdlib_files():
        yield from file_pieces(path)


def _write_shard(folder: Path, number: int, files: list[Path]) -> None:
    kind = ("txt", "jsonl", "txt.gz", "jsonl.gz")[number % 4]
    texts = [path.read_bytes() for path in files]
    if kind.startswith("jsonl"):
        lines = (json.dumps({"text": text.decode("utf-8", errors="replace")}) for text in texts if text)
        content = "".join(f"{line}\n" for line in lines).encode("ascii")
    else:
        content = b"".join(texts)
    # Without a time in the header the same text gives the same bytes.
    packed = gzip.compress(content, compresslevel=6, mtime=0) if kind.endswith(".gz") else content
    (folder / f"{number:03d}.{kind}").write_bytes(packed)


def _reader(
    source: Path | str, count: DocumentCount | None = None, key: str = TEXT_KEY
) -> Callable[[], Iterator[bytes]]:
    return _stdlib_pieces if str(source) == STDLIB else lambda: pieces(Path(source), count, key)


def _refuse_taken(*paths: Path) -> None:
    for path in paths:
        if not path.parent.exists() and next(above for above in path.parents if above.exists()).is_dir():
            raise DataError(f"the folder {path.parent} does not exist", f"mkdir -p {shlex.quote(str(path.parent))}")
        if path.exists():
            raise DataError(f"{path} already exists", "give another name, or remove it first")


@contextlib.contextmanager
def _refusals(out: Path, hint: str, same_bytes: bool = False) -> Iterator[None]:
    """Turns an OSError into a DataError. `same_bytes`: another builder's file has the same bytes and is used."""
    try:
        yield
    except FileExistsError:
        if not same_bytes:
            raise DataError(
                f"{out} already exists: another program just wrote it", "use it, or give another name"
            ) from None
    except OSError as fault:
        raise DataError(f"cannot write {out}: {fault.strerror}", hint) from None


def _write_table(table: CharTokenizer, path: Path) -> None:
    with _refusals(path, _ELSEWHERE), aside(path) as temporary:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(table.to_json(), encoding="utf-8")
        give_name(temporary, path)


def _write(text: Iterable[bytes], out: Path, tokenizer: Tokenizer, source: str) -> None:
    # A file of bytes tells by its name what each of them adds.
    sizes = None if tokenizer.name == BYTE else tokenizer.token_bytes
    if not write_tokens(out, tokenizer.vocab, tokenizer.name, tokenizer.encode(text, source), sizes):
        raise DataError(f"{source} has no text to make tokens from", "give a file or folder with some in it")
