"""A step table while its log is read, in bounded memory; and the rules for impossible figures."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpc_gpt.reader.lines.fields import NEVER_ZERO, STEP_FIELDS
from hpc_gpt.reader.lines.steps import NOT_FINITE, Places, StepColumn, StepTable

_FIGURES = re.compile(r"[-+]?(?:\d[\d.,]*(?:[eE][-+]?\d{1,3})?|(?i:\b(?:nan|inf(?:inity)?)\b))")
_MOST_SHAPES = 64
_FEW_LINES = 2
SUMMED = ("skipped", "nan")
PENDING = 1024  # lines, or blocks of lines, that wait until they are joined


@dataclass
class StepRows:
    """The table of one dialect in one part while the log is read, in bounded memory.

    The last line stays open: later lines can add figures of its step. If there are very many lines, every second one is
    dropped, then every second of the remaining ones. The lines that are kept depend only on their number, not on
    whether they came one by one or in blocks: every `stride`-th, beginning with the first.
    """

    count: int = 0
    stride: int = 1
    totals: dict[str, float] = field(default_factory=dict)
    open_row: dict[str, float] = field(default_factory=dict)
    open_line: int = 0
    has_loss: bool = False
    no_loss: float | None = None  # the figure that may stand for a missing loss
    closed: int = -1  # the index of the last line that is in the columns or was skipped
    shapes: set[str] = field(default_factory=set)  # the shapes of an unknown program's lines, until two are alike
    alike: bool = False
    blocks: list[StepTable] = field(default_factory=list)
    _pending: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    @property
    def last_step(self) -> float | None:
        """The step number of the last line."""
        return self.open_row.get("step")

    @property
    def lacks_loss(self) -> bool:
        """Whether no line so far has a loss; the same figure in every line, if it is not above 0, stands for none."""
        self._see_losses([self.open_row["loss"]] if "loss" in self.open_row else [])
        return not self.has_loss

    @property
    def has_printed_loss(self) -> bool:
        """Whether a line so far has a figure as its loss, also NaN or a figure that stands for none."""
        return "loss" in self.open_row or self.no_loss is not None or "nan_loss" in self.totals

    def would_be_loss(self, loss: float) -> bool:
        """Whether another rank's figure is the loss that all lines so far lack. NaN counts as a loss only if these
        lines have no figure at all, because NaN may also stand for a missing loss."""
        if not math.isfinite(loss):
            return not self.has_printed_loss
        return loss > 0 or loss != self.no_loss

    def add(self, row: dict[str, float], line: int) -> None:
        """Adds one line."""
        self._close()
        self.open_row, self.open_line = row, line
        self.count += 1

    def _see_losses(self, losses: Sequence[float] | StepColumn) -> None:
        if self.has_loss or not len(losses):
            return
        finite = np.asarray(losses, np.float64)
        finite = finite[np.isfinite(finite)]
        if len(finite):
            self.no_loss = float(finite[0]) if self.no_loss is None else self.no_loss
            self.has_loss = bool(((finite > 0) | (finite != self.no_loss)).any())

    def see_shape(self, line: str) -> None:
        """Notes the shape of a line, which is its text without figures."""
        if not self.alike and len(self.shapes) < _MOST_SHAPES:
            shape = " ".join(_FIGURES.sub("0", line).split())
            self.alike = shape in self.shapes
            self.shapes.add(shape)

    def first_kept(self) -> int:
        """The number of next lines that are skipped before one is kept; from there every `stride`-th is kept."""
        return -self.count % self.stride

    def add_block(
        self,
        count: int,
        line: Places,
        columns: dict[str, StepColumn],
        totals: Mapping[str, float],
        last: tuple[dict[str, float], int],
    ) -> None:
        """Adds `count` lines at once, and `last`, the line after them.

        `line` and `columns` have only the lines that `first_kept` and `stride` keep; `totals` cover all `count` lines.
        """
        self._close()
        self._join_pending()
        if "loss" in columns:
            self._see_losses(columns["loss"])
        if len(line):
            self.blocks.append(StepTable(columns, line))
        self.count += count
        self.closed = self.count - 1
        for name, value in totals.items():
            self._sum(name, value)
        self.add(*last)

    def keep_at_most(self, rows: int) -> None:
        """Drops every second line until at most `rows` are kept."""
        before = self.stride
        while -(-self.count // self.stride) > rows:
            self.stride *= 2
        if self.stride > before:
            whole = self.closed_lines()
            self.blocks = [whole.take(np.arange(0, len(whole), self.stride // before))]

    def table(self, left_out: dict[str, int]) -> StepTable:
        """The table, in which impossible figures are NaN; `left_out` counts them."""
        self._close()
        tables = [self.closed_lines()]
        if self.open_row and (self.count - 1) % self.stride:
            tables.append(_table_of([(self.open_line, self.open_row)]))
        whole = StepTable.joined(tables)
        # A loss that is always NaN is reported; another field that is always NaN has no figure.
        columns = {
            name: column
            for name, column in sound_columns(whole.columns, left_out).items()
            if name == "loss" or not np.isnan(column).all()
        }
        if self.lacks_loss and self.no_loss is not None and self.no_loss < 0 and self.count > _FEW_LINES:
            columns.pop("loss", None)  # a stage without the loss prints this figure in its place
        table = StepTable(columns, whole.line, stride=self.stride, count=self.count, totals=dict(self.totals))
        table.alike = self.alike
        return table

    def closed_lines(self) -> StepTable:
        """All kept lines except the open one."""
        self._join_pending()
        self.blocks = [StepTable.joined(self.blocks)]
        return self.blocks[0]

    def _close(self) -> None:
        """Moves the open line into the columns, as it is complete."""
        row, ordinal = self.open_row, self.count - 1
        if not self.count or self.closed == ordinal:
            return
        self.closed = ordinal
        self._see_losses([row["loss"]] if "loss" in row else [])
        if bad := max((flag for name, flag in NOT_FINITE.items() if not math.isfinite(row.get(name, 0.0))), default=0):
            row["not_finite"] = float(bad)
        if ordinal % self.stride == 0:
            self._pending.append((self.open_line, row))
            if len(self._pending) >= PENDING:
                self._join_pending()
        for name in SUMMED:
            if name in row:
                self._sum(name, row[name])
        if "loss" in row and not math.isfinite(row["loss"]):
            self._sum("nan_loss", 1)

    def _sum(self, name: str, value: float) -> None:
        if math.isfinite(value) and value >= 0:
            self.totals[name] = self.totals.get(name, 0.0) + value

    def _join_pending(self) -> None:
        if self._pending:
            self.blocks.append(_table_of(self._pending))
            self._pending = []
        if len(self.blocks) > PENDING:
            self.blocks = [StepTable.joined(self.blocks)]


def _table_of(rows: Sequence[tuple[int, Mapping[str, float]]]) -> StepTable:
    """The table of rows (line, its figures)."""
    names = [name for name in STEP_FIELDS if any(name in row for _, row in rows)]
    columns = {name: np.array([row.get(name, np.nan) for _, row in rows], np.float64) for name in names}
    return StepTable(columns, np.array([line for line, _ in rows], np.int64))


MOST_STEP = 2.0**53  # above it floats skip whole numbers
_LONGEST_S = 1e9
# A diverging training prints infinite values: they are NaN in the columns, but not a fault of the log.
_MAY_OVERFLOW = frozenset(("loss", "loss_eval", "grad_norm", "lr", *NEVER_ZERO))
_MAY_BE_NEGATIVE = _MAY_OVERFLOW | {"step", "skipped_so_far", "epoch", "at"}


def sound_columns(columns: Mapping[str, StepColumn], left_out: dict[str, int]) -> dict[str, StepColumn]:
    """The columns with NaN for impossible figures, such as a step time of 0; `left_out` counts them by field."""
    sound = {}
    for name, column in columns.items():
        infinite = np.isinf(column)
        with np.errstate(invalid="ignore"):
            wrong = np.zeros(len(column), np.bool_) if name in _MAY_OVERFLOW else infinite
            if name == "step_s":
                wrong = wrong | (column <= 0) | (column > _LONGEST_S)
            elif name not in _MAY_BE_NEGATIVE:
                wrong = wrong | (column < 0)
        count = int(wrong.sum())
        if count:
            reason = f"impossible figures of {name}"
            left_out[reason] = left_out.get(reason, 0) + count
        away = wrong | infinite
        if name in NEVER_ZERO:  # 0 may be a loss that the program prints but does not train with
            away = away | (column == 0)
        sound[name] = np.where(away, np.nan, column) if away.any() else column
    return sound


def sound_step(step: float) -> bool:
    """Whether a step can have this number.

    >>> sound_step(12.0), sound_step(-1.0), sound_step(1e300), sound_step(1.5)
    (True, False, False, False)
    """
    return 0 <= step <= MOST_STEP and step.is_integer()
