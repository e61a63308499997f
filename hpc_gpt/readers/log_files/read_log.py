"""A log read: what `read_lines` gives, from a path."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.readers.log_files.blocks import BlockReader
from hpc_gpt.readers.log_files.kept_state import KeptState
from hpc_gpt.readers.log_files.lines import LineReader
from hpc_gpt.readers.log_files.source import Source
from hpc_gpt.readers.part import Part


@dataclass(frozen=True)
class LogRead:
    """A log's parts. `lines`: how many it holds; `bytes`: how many bytes were read of the file now.

    `left_out`: what was skipped of the file, in words -> how often; what was skipped within a part is in the part.
    `refused`: why the file is no log, in words; then there are no parts.
    """

    parts: list[Part] = field(default_factory=list)
    lines: int = 0
    bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    refused: str | None = None


def read_log(path: Path) -> LogRead:
    """The log at a path, `-` for standard input. Nothing that a file holds, or that happens to it, is an error."""
    with Source(path) as source:
        if source.refused is not None:
            return LogRead(refused=source.refused, bytes=source.bytes_read)
        kept = KeptState(source, path)
        reader = BlockReader(kept.reader, kept.lines, kept.begun)
        held = b""
        if not (kept.offset and source.compressed):
            for chunk in source.chunks(kept.offset):
                reader.take(held)
                held = chunk
        # A line that is still being written is read now, and again when it is whole.
        if source.torn and not source.compressed:
            kept.keep(kept.reader, source.offset, reader.newlines, reader.begun)
            reader.take(held)
        else:
            reader.take(held)
            offset = source.size if source.compressed else source.offset
            kept.keep(kept.reader, offset, reader.newlines, reader.begun)
        return LogRead(reader.finish(), reader.lines, source.bytes_read, source.left_out)


def read_log_plainly(path: Path) -> LogRead:
    """What `read_log` gives, every line looked at for itself: slow, and what tests hold `read_log` to."""
    with Source(path) as source:
        if source.refused is not None:
            return LogRead(refused=source.refused, bytes=source.bytes_read)
        reader = LineReader(source.file)
        number, begun = 1, False
        for chunk in source.chunks():
            for index, line in enumerate(chunk.split(b"\n")):
                number += 1 if index else 0
                if line:
                    reader.take(number, line.decode("utf-8", "replace"))
            begun = not chunk.endswith(b"\n")
        number -= 0 if begun else 1
        return LogRead(reader.finish(number), number, source.bytes_read, source.left_out)
