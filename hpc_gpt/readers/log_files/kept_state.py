"""What was read of a log is kept, so that a second look at one that grew reads what was appended and no more.

A kept state is used when the readers, and the log's path, device and inode are the same, the log is no shorter, and
its first bytes, those before the place that was read to, and samples between are as they were. A line rewritten
between the samples of a log that also grew goes unseen.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpc_gpt.readers.log_files import kept_files
from hpc_gpt.readers.log_files.lines import LineReader
from hpc_gpt.readers.log_files.reader_state import as_plain, from_plain
from hpc_gpt.readers.log_files.source import Source


class KeptState:
    """The state of one log, if it is kept. `offset`: the byte read to; 0 where nothing is known.

    `lines`: newlines up to there; `begun`: something stands behind the last of them.
    """

    def __init__(self, source: Source, path: Path) -> None:
        self.offset = self.lines = 0
        self.begun = False
        self.reader = LineReader(source.file)
        self._source = source
        self._file: Path | None = None
        if not source.is_stdin:
            self._file = kept_files.kept_file(path, source.device, source.inode, source.size)
        with contextlib.suppress(*kept_files.FAULTS):
            self._load()

    def keep(self, reader: LineReader, offset: int, lines: int, begun: bool) -> None:
        """Keep what was read up to a byte, where a line or a piece of one ends; -1 where no byte can be named."""
        if self._file is None or offset < kept_files.LEAST_BYTES or offset == self.offset:
            return
        with contextlib.suppress(OSError, ValueError):
            state, arrays = as_plain(reader)
            state |= {
                "offset": offset,
                "lines": lines,
                "begun": begun,
                "size": self._source.size,
                "changed_ns": self._source.changed_ns,
                "bytes": kept_files.digest(self._source.bytes_at, offset),
                "left_out": self._source.left_out,
            }
            kept_files.store(self._file, state, arrays)

    def _load(self) -> None:
        if self._file is None or (found := kept_files.load(self._file)) is None:
            return
        state, arrays = found
        source, offset = self._source, int(state["offset"])
        if not 0 < offset <= source.size:
            return
        # What did not grow and was written to is another file, and compressed data cannot be read from the middle.
        same = (state["size"], state["changed_ns"]) == (source.size, source.changed_ns)
        if not same and (source.compressed or state["size"] == source.size):
            return
        if state["bytes"] != kept_files.digest(source.bytes_at, offset):
            return
        lines, begun, left_out = int(state["lines"]), bool(state["begun"]), dict(state["left_out"])
        self.reader = from_plain(source.file, state, arrays)
        self.offset, self.lines, self.begun, source.left_out = offset, lines, begun, left_out
        os.utime(self._file)
