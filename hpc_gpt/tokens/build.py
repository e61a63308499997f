"""Token files from text, by bytes: each byte is a token, and a zero byte ends a document. Vocabulary 256."""

from __future__ import annotations

import contextlib
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from hpc_gpt.errors import DataError
from hpc_gpt.paths import data_dir
from hpc_gpt.tokens.sources import file_pieces, pieces
from hpc_gpt.tokens.token_file import TokenFile, TokenWriter, open_tokens

BYTE_TOKENIZER = "byte"
BYTE_VOCAB = 256

# Not every machine has the tests, and installed packages are not the standard library.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def build_tokens(source: Path | str, out: Path | str, tokenizer: str = BYTE_TOKENIZER) -> TokenFile:
    """Makes the token file `out` from a text file, a jsonl file (key "text") or a folder of both.

    The same source gives the same bytes. `out` has its name only once it is complete. Raises DataError where the
    source is missing or has no text, where `out` is there already, or where the disk refuses; then nothing is left.
    """
    source, out = Path(source), Path(out)
    if tokenizer != BYTE_TOKENIZER:
        raise DataError(f"no tokenizer {tokenizer!r}; known: {BYTE_TOKENIZER}", f'use "{BYTE_TOKENIZER}"')
    if not source.exists():
        raise DataError(f"no text at {source}", "give a text file, a jsonl file or a folder")
    if out.exists():
        raise DataError(f"{out} is there already", "give another name, or remove it first")
    try:
        _write(pieces(source), out, str(source), "give a file name in a folder with room that you can write")
    except FileExistsError:
        raise DataError(f"{out} is there already: someone else just wrote it", "use it, or another name") from None
    return open_tokens(out)


def build_stdlib(path: Path | None = None) -> TokenFile:
    """The token file of the standard library's own sources, of the Python that runs; made where it is missing.

    Two builders at once are safe: both write the same bytes aside, and the first to finish gives them their name.
    Raises DataError where the sources are missing or the disk refuses.
    """
    path = path or stdlib_path()
    if not path.exists():
        with contextlib.suppress(FileExistsError):
            hint = "set HPC_GPT_DATA to a folder with room that you can write"
            _write(_stdlib_sources(), path, sysconfig.get_path("stdlib"), hint)
    return open_tokens(path)


def stdlib_path() -> Path:
    """Where that file is kept; its name carries the Python version, since each has sources of its own."""
    return data_dir() / f"stdlib-{platform.python_version()}.tokens"


def _stdlib_sources() -> Iterator[bytes]:
    top = Path(sysconfig.get_path("stdlib"))
    for path in sorted(top.rglob("*.py"), key=lambda path: path.relative_to(top).parts):
        if not _LEFT_OUT.intersection(path.relative_to(top).parts):
            yield from file_pieces(path)


def _write(text: Iterable[bytes], out: Path, source: str, hint: str) -> None:
    try:
        with TokenWriter(out, BYTE_VOCAB, BYTE_TOKENIZER) as writer:
            for piece in text:
                writer.add(np.frombuffer(piece, dtype=np.uint8))
            if not writer.count:
                raise DataError(f"{source} has no text to make tokens from", "give a file or folder with some in it")
            writer.finish()
    except FileExistsError:
        raise
    except OSError as fault:
        raise DataError(f"cannot write {out}: {fault.strerror}", hint) from None
