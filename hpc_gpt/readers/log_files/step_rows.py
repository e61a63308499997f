"""Lines of steps while a log is read: columns in bounded memory, whatever the log's length.

Of very many lines every second one is dropped, then every second of those: what is kept of n lines depends on n alone
and not on how they came, one by one or a block at a time. The last line is always kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.fields import STEP_FIELDS
from hpc_gpt.readers.log_files.sound import sound_columns
from hpc_gpt.readers.part import Column, Steps

MOST_ROWS = 1 << 17  # of all lines of steps of a file
SUMMED = ("skipped", "nan")
PENDING = 1024


@dataclass
class StepBlock:
    """Some lines of steps that follow each other: the kept ones' columns, and what counts of all of them.

    `at`: the place of each kept one among all lines so far. `columns`: NaN where a line lacks the field.
    """

    at: NDArray[np.int64]
    line: NDArray[np.int64]
    columns: dict[str, Column]


@dataclass
class StepRows:
    """The lines of steps of one dialect in one part. The last one stays open: what later lines say of it is added."""

    count: int = 0
    stride: int = 1
    totals: dict[str, float] = field(default_factory=dict)
    open_row: dict[str, float] = field(default_factory=dict)
    open_line: int = 0
    closed: int = -1  # the last line that is in the columns
    _pending: list[tuple[int, int, dict[str, float]]] = field(default_factory=list)
    _blocks: list[StepBlock] = field(default_factory=list)

    @property
    def last_step(self) -> float | None:
        """The number of the last line's step."""
        return self.open_row.get("step")

    @property
    def lacks_first_loss(self) -> bool:
        """Whether there is one line, and it tells no loss."""
        return self.count == 1 and "loss" not in self.open_row

    def add(self, row: dict[str, float], line: int) -> None:
        """One line."""
        self._close()
        self.open_row, self.open_line = row, line
        self.count += 1

    def first_kept(self) -> int:
        """How many of the lines that come next are passed over before one is kept; then each `stride`-th is."""
        return -self.count % self.stride

    def add_block(
        self,
        count: int,
        line: NDArray[np.int64],
        columns: dict[str, Column],
        totals: Mapping[str, float],
        last: tuple[dict[str, float], int],
    ) -> None:
        """`count` lines at once, and `last`, the one after them.

        `line` and `columns` are of those of the `count` that `first_kept` and `stride` keep, `totals` of all of them.
        """
        self._close()
        self._settle()
        at = self.count + self.first_kept() + self.stride * np.arange(len(line), dtype=np.int64)
        if len(line):
            self._blocks.append(StepBlock(at, line, columns))
        self.count += count
        self.closed = self.count - 1
        for name, value in totals.items():
            self._sum(name, value)
        self.add(*last)

    def keep_at_most(self, rows: int) -> None:
        """Drop every second line until no more than so many are kept."""
        before = self.stride
        while -(-self.count // self.stride) > rows:
            self.stride *= 2
        if self.stride == before:
            return
        self._pending = [each for each in self._pending if each[0] % self.stride == 0]
        for block in self._blocks:
            kept = block.at % self.stride == 0
            block.at, block.line = block.at[kept], block.line[kept]
            block.columns = {name: column[kept] for name, column in block.columns.items()}

    def steps(self, left_out: dict[str, int]) -> Steps:
        """The columns; figures that cannot be are NaN in them and counted."""
        self._close()
        self._settle()
        whole = _joined(self._blocks)
        if self.open_row and (not len(whole.at) or whole.at[-1] != self.count - 1):
            whole = _joined([whole, _block([(self.count - 1, self.open_line, self.open_row)])])
        # A loss of nothing but NaN is news; other fields then have no figure at all.
        columns = {
            name: column
            for name, column in sound_columns(whole.columns, left_out).items()
            if name == "loss" or not np.isnan(column).all()
        }
        return Steps(columns, whole.line, self.stride, self.count, dict(self.totals))

    def settled(self) -> StepBlock:
        """All columns but for the open line."""
        self._settle()
        self._blocks = [_joined(self._blocks)]
        return self._blocks[0]

    def resume(self, closed: int, block: StepBlock) -> None:
        """Go on from what `settled` gave, the last line in it being `closed`."""
        self.closed, self._blocks = closed, [block]

    def _close(self) -> None:
        """The open line is whole: into the columns with it."""
        row, ordinal = self.open_row, self.count - 1
        if not self.count or self.closed == ordinal:
            return
        self.closed = ordinal
        if ordinal % self.stride == 0:
            self._pending.append((ordinal, self.open_line, row))
            if len(self._pending) >= PENDING:
                self._settle()
        for name in SUMMED:
            if name in row:
                self._sum(name, row[name])
        if "loss" in row and not math.isfinite(row["loss"]):
            self._sum("nan_loss", 1)

    def _sum(self, name: str, value: float) -> None:
        if math.isfinite(value) and value >= 0:
            self.totals[name] = self.totals.get(name, 0.0) + value

    def _settle(self) -> None:
        if self._pending:
            self._blocks.append(_block(self._pending))
            self._pending = []
        if len(self._blocks) > PENDING:
            self._blocks = [_joined(self._blocks)]


def _block(rows: Iterable[tuple[int, int, Mapping[str, float]]]) -> StepBlock:
    rows = list(rows)
    names = [name for name in STEP_FIELDS if any(name in row for _, _, row in rows)]
    columns = {name: np.array([row.get(name, np.nan) for _, _, row in rows], np.float64) for name in names}
    return StepBlock(np.array([each[0] for each in rows]), np.array([each[1] for each in rows]), columns)


def _joined(blocks: list[StepBlock]) -> StepBlock:
    if not blocks:
        return StepBlock(np.zeros(0, np.int64), np.zeros(0, np.int64), {})
    known = {name for block in blocks for name in block.columns}
    columns = {
        name: np.concatenate([block.columns.get(name, np.full(len(block.at), np.nan)) for block in blocks])
        for name in STEP_FIELDS
        if name in known
    }
    return StepBlock(
        np.concatenate([block.at for block in blocks]), np.concatenate([block.line for block in blocks]), columns
    )
