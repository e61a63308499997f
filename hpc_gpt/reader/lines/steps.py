"""The step table of any run, the steps that count, and the time of a step.

The warm-up rule. The first step of each attempt is warm-up: it allocates, opens connections, compiles. So are the steps
after it, up to the first one that takes at most 1.25 times the median of the attempt's later half, but never more than
half of the attempt's steps. Steps whose time includes an evaluation or a save, skipped steps, which do no optimizer
work, and steps with a NaN loss are set apart. All other steps are the steady state: its median, 10th and 90th
percentile are reported. If a line of a log is the mean of several steps, the line counts as one step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.format import counted
from hpc_gpt.core.runs.record import MIXTURE_FIGURES, ROUGH_STEP, Flag
from hpc_gpt.reader.lines.fields import STEP_FIELDS

StepColumn = NDArray[np.float64]
Places = NDArray[np.signedinteger[Any]]
Mask = NDArray[np.bool_]

# The columns that a table may have: those of a log's lines, and four that only our own metrics have. `memory_gib` is
# the allocated memory of the stage with most.
STEP_COLUMNS = (*STEP_FIELDS, "bpb", "tokens", "save_s", "eval_s", "memory_gib")
# Further arrays of a table with an entry for each line, and their defaults.
_ARRAYS = {"line": 0, "attempt": 1, "counts": True, "steady": False, "after_pause": False, "nan": False}

# Fields that a line of steps may lack after a NaN, or that only some lines have.
_NOT_OF_FORM = frozenset(
    (
        *("loss", "grad_norm", "not_finite", "nan", "skipped", "skipped_so_far", "loss_eval", "save_s", "tokens"),
        *MIXTURE_FIGURES,
    )
)
_FEWEST_WITH_LOSS = 2
MIN_NAN_NORMS = 2  # with sound losses beside them: a single one may be a spike
NOT_FINITE = {"grad_norm": 1, "loss": 2}  # the values of `not_finite`
CROWDED_LINES = 50  # last lines in which an expert must have most tokens for a flag
_NOW_AND_THEN = 0.1  # the share of lines that may lack a loss although one follows


@lru_cache(1024, typed=True)  # 1 is not True
def _shared(rows: int, value: Any) -> NDArray[Any]:
    """A constant array that tables share and that takes no memory; it is read-only."""
    return np.broadcast_to(np.array(value), rows)


def _joined(several: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The arrays one after the other; without memory if all are the same constant array."""
    kinds = {(array.dtype, array.strides, array[:1].tobytes()) for array in several if len(array)}
    if len(kinds) == 1 and next(iter(kinds))[1] == (0,):
        return _shared(sum(map(len, several)), next(array[0].item() for array in several if len(array)))
    return np.concatenate(several)


def no_places() -> Places:
    """An empty array of indexes."""
    return np.zeros(0, np.int64)


def _no_marks() -> Mask:
    return np.zeros(0, np.bool_)


@dataclass
class StepTable:
    """Lines of steps in the order in which they were trained, one row each.

    `columns`: an array for each field of COLUMNS, NaN if a line lacks the field; a field that no line has is missing.
    Optional arrays of the same length: `line`, its number in the file; `attempt`, counted from 1; `counts`, whether the
    step led to the run's last state (False: a later attempt trained it again); `steady`, whether the step time is
    computed from it; `after_pause`, whether an evaluation or a save came between this line and the one before; `nan`,
    whether it is a NaN step (`mark_nan`).
    `files`: the file of the lines, by attempt.

    Of very many lines one in `stride` is stored, and the last one; `count` is the number of all lines. With a stride
    above 1 a median or a percentile is that of a sample. `totals` cover all lines: the sums of `skipped` and `nan`, and
    in `nan_loss` the number of losses that are NaN or infinite (NaN in the column).
    `alike`: two lines differ only in their figures (known only for a program that no dialect knows).
    `eval_step`, `eval_loss`: the evaluations, two arrays with a length of their own. `eval_by`: {step: {key of
    BY_SOURCE: {source: figure}}} for evaluations on a mixture.
    """

    columns: dict[str, StepColumn] = field(default_factory=dict)
    line: Places = field(default_factory=no_places)
    attempt: Places = field(default_factory=no_places)
    counts: Mask = field(default_factory=_no_marks)
    steady: Mask = field(default_factory=_no_marks)
    after_pause: Mask = field(default_factory=_no_marks)
    nan: Mask = field(default_factory=_no_marks)
    files: dict[int, str] = field(default_factory=dict)
    stride: int = 1
    count: int = 0
    totals: dict[str, float] = field(default_factory=dict)
    eval_step: StepColumn = field(default_factory=lambda: np.zeros(0))
    eval_loss: StepColumn = field(default_factory=lambda: np.zeros(0))
    eval_by: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    alike: bool = False

    def __post_init__(self) -> None:
        of_columns = {len(column) for column in self.columns.values()}
        rows = max(len(self.line), *of_columns, 0)
        for name, value in _ARRAYS.items():
            if not len(getattr(self, name)):
                setattr(self, name, _shared(rows, value))
        lengths = {len(getattr(self, name)) for name in _ARRAYS} | of_columns
        assert lengths == {rows}, lengths

    def __len__(self) -> int:
        return len(self.line)

    def __getitem__(self, name: str) -> StepColumn:
        """The values of a field, all NaN if no line has it."""
        assert name in STEP_COLUMNS, name
        return self.columns[name] if name in self.columns else np.full(len(self), np.nan)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @property
    def is_skipped(self) -> Mask:
        """The mask of steps without an update, as after an overflow of fp16."""
        return np.asarray(self["skipped"] > 0)

    def mark_nan(self, interval: int = 1, always: bool = False) -> None:
        """Marks the NaN steps in `nan`. A NaN step has a loss or a gradient norm that was printed as NaN or infinite,
        NaN iterations and no loss, or no loss in a line of a form whose earlier lines in the attempt all have one.
        Steps that fp16's loss scaler skips are not NaN steps. Beside a gradient norm that is not finite a sound loss
        stays; one of 0 stands for a NaN, as a Trainer filters it.

        `interval`: steps per line. `always`: every line without a loss is a NaN step.
        """
        has_loss, bad = np.isfinite(self["loss"]), self["not_finite"]
        by_count = self["nan"] > 0
        skipped = self.is_skipped & ~by_count
        lost = ~has_loss
        if lost.any() and not always:
            lost = np.zeros(len(self), np.bool_)
            form = self._form()
            for one_form in np.unique(form[~has_loss]):
                rows = np.flatnonzero((form == one_form) & ~skipped)
                lost[rows] = _lost(has_loss[rows] | (bad[rows] == NOT_FINITE["loss"]))
        is_nan = (bad > 0) | ((by_count | lost) & ~has_loss)
        # If the scaler skipped some of a line's several steps, the line has the mean loss of the others.
        others = (bad == NOT_FINITE["loss"]) & (self["skipped"] < interval)
        self.nan = np.asarray(is_nan & (others | ~skipped))
        if "loss" in self and self.nan.any():
            self.columns["loss"] = np.where(self.nan & (self["loss"] == 0), np.nan, self.columns["loss"])

    def nan_since(self, attempt: int) -> int | None:
        """The row of the first of the NaN steps that end an attempt; None if a finite step follows the last NaN step,
        or if these have sound losses and are fewer than MIN_NAN_NORMS. Steps that fp16's loss scaler skips count as
        neither."""
        if not self.nan.any():
            return None
        rows = np.flatnonzero(self.attempt == attempt)
        finite = np.flatnonzero(~self.nan[rows] & ~self.is_skipped[rows])
        last = rows[finite[-1] + 1 :] if len(finite) else rows
        nan_rows = last[self.nan[last]]
        ends = len(nan_rows) >= MIN_NAN_NORMS or not np.isfinite(self["loss"][nan_rows]).all()
        return int(nan_rows[0]) if len(nan_rows) and ends else None

    def _form(self) -> Places:
        """A number per row for its form: its attempt and the fields that it has, without the loss."""
        form = self.attempt.astype(np.int64)
        for name, column in self.columns.items():
            if name not in _NOT_OF_FORM:
                form = 2 * form + np.isfinite(column)
        return form

    def place(self, index: int) -> str:
        """`file:line` of a row."""
        return f"{self.files[int(self.attempt[index])]}:{self.line[index]}"

    def take(self, rows: Mask | Places) -> StepTable:
        """A table with the rows of a mask or of indexes; everything else stays."""
        if rows.dtype == np.bool_ and rows.all():
            return replace(self)
        columns = {name: column[rows] for name, column in self.columns.items()}
        arrays: dict[str, Any] = {name: getattr(self, name)[rows] for name in _ARRAYS}
        return replace(self, columns=columns, **arrays)

    @staticmethod
    def joined(tables: Sequence[StepTable]) -> StepTable:
        """The rows of all tables, in their order."""
        if len(tables) < 2:
            return tables[0] if tables else StepTable()
        present = {name for table in tables for name in table.columns}
        totals = {
            name: sum(table.totals.get(name, 0.0) for table in tables) for table in tables for name in table.totals
        }
        arrays: dict[str, Any] = {name: _joined([getattr(table, name) for table in tables]) for name in _ARRAYS}
        ends = np.cumsum([len(table) for table in tables]).tolist()
        for table, begin, end in zip(tables, [0, *ends], ends, strict=False):
            table.line = arrays["line"][begin:end]  # not twice in memory
        names = [name for name in STEP_COLUMNS if name in present]
        return StepTable(
            {name: np.concatenate([table[name] for table in tables]) for name in names},
            **arrays,
            files={number: file for table in tables for number, file in table.files.items()},
            stride=max(table.stride for table in tables),
            count=sum(table.count for table in tables),
            totals=totals,
            eval_step=np.concatenate([table.eval_step for table in tables]),
            eval_loss=np.concatenate([table.eval_loss for table in tables]),
            eval_by={step: losses for table in tables for step, losses in table.eval_by.items()},
            alike=any(table.alike for table in tables),
        )


def joined_by_step(one: StepTable, other: StepTable) -> StepTable:
    """The steps of both tables with the fields of both; where both have a value, `one` wins. Steps rise in both."""
    steps = np.union1d(one["step"], other["step"])
    columns = {name: np.full(len(steps), np.nan) for name in STEP_COLUMNS if name in one or name in other}
    line = np.zeros(len(steps), np.int64)
    for table in (other, one):
        places = np.searchsorted(steps, table["step"])
        line[places] = table.line
        for name, column in table.columns.items():
            present = np.isfinite(column)
            columns[name][places[present]] = column[present]
    joined_table = StepTable(columns, line, files=one.files, count=len(steps), totals=one.totals)
    joined_table.alike = one.alike
    return joined_table


def _lost(has_loss: Mask) -> Mask:
    """The mask of the lines of one form that lack the loss that every earlier line had; none if the program prints the
    loss only now and then."""
    lacks = np.flatnonzero(~has_loss)
    if not len(lacks) or lacks[0] < _FEWEST_WITH_LOSS:
        return np.zeros(len(has_loss), np.bool_)
    ends = not has_loss[lacks[0] :].any()
    return np.asarray(~has_loss & (ends or len(lacks) <= _NOW_AND_THEN * len(has_loss)))


def steps_that_count(step: StepColumn, attempt: Places, resumed: Mapping[int, float] | None = None) -> Mask:
    """The mask of the steps that led to the run's last state.

    A later attempt resumes from a checkpoint, and the steps that an earlier one trained after that checkpoint are lost:
    a step trained twice counts once, as trained last. `resumed`: attempt -> its first step, if more is known than its
    lines say: an attempt that ended before its first line also discards steps.
    """
    counts = np.ones(len(step), np.bool_)
    if not resumed and len(step) and (attempt == attempt[0]).all():
        return counts
    resumed = resumed or {}
    first = math.inf
    stretches: dict[int, list[slice]] = {number: [] for number in resumed}
    for begin, end in pairwise([0, *(np.flatnonzero(np.diff(attempt)) + 1).tolist(), len(step)]):
        if begin < end:
            stretches.setdefault(int(attempt[begin]), []).append(slice(begin, end))
    for number in sorted(stretches, reverse=True):
        begins = math.inf
        for stretch in stretches[number]:
            counts[stretch] = ~(step[stretch] >= first)
            begins = min(begins, float(np.nanmin(step[stretch], initial=math.inf)))
        first = min(first, resumed.get(number, begins))
    return counts


MIN_TIMES = 5  # a step time from fewer is rough, unless the program prints it
WIDE = 1.5  # step times spread widely if the 90th percentile over the 10th is above this
SLOW_STEP = 1.25
OUTLIER = 1.5  # a steady step this many times the median is reported; it stays in the median
RULE = (
    f"warm-up: each attempt's first step, and those after it while above {SLOW_STEP} x the median of its later half, "
    "at most half of them; steps whose time holds an evaluation or a save, and those of a skip or a NaN, set apart"
)


@dataclass(frozen=True)
class StepTimes:
    """Median, percentiles and mean in seconds over `used` steps.

    `warmup`, `apart`: the numbers of steps left out as warm-up and set apart. `flags`: what looks wrong. `steady` marks
    the used steps among the measured ones.
    """

    step_s: float
    p10: float
    p90: float
    mean: float
    used: int
    warmup: int
    apart: int
    flags: tuple[Flag, ...] = ()
    steady: Mask = field(default_factory=_no_marks, compare=False)

    def exact(self) -> StepTimes:
        """The same times, which are exact although they are few: printed ones, or one over many lines."""
        flags = (Flag(str(flag)) if flag.kind == ROUGH_STEP else flag for flag in self.flags)
        return replace(self, flags=tuple(flags))


def time_steps(steps: StepTable, step_s: StepColumn, apart: Mask) -> StepTimes | None:
    """Measures the step time over the steps that count and have a time; None without any. Marks `steps.steady`.

    `step_s`: seconds of each row. `apart`: as in `measure_steps`.
    """
    timed = steps.counts & np.isfinite(step_s) & (step_s > 0)
    rows = slice(None) if timed.all() else timed
    times = measure_steps(step_s[rows], apart[rows], steps.attempt[rows])
    if times is not None:
        steps.steady = steps.steady.copy()
        steps.steady[timed] = times.steady
    return times


def measure_steps(step_s: StepColumn, apart: Mask, attempt: Places) -> StepTimes | None:
    """The step time over all steps of a run, in order; None without any.

    The arrays have one entry per step. `apart`: the mask of steps to set apart: the seconds include an evaluation or a
    save, or the step was skipped, or its loss is NaN. The steps of one attempt are adjacent.
    """
    if not len(step_s):
        return None
    warm = np.zeros(len(step_s), np.bool_)
    flags: list[Flag] = []
    begins = [0, *(np.flatnonzero(np.diff(attempt)) + 1).tolist(), len(step_s)]
    for begin, end in pairwise(begins):
        count, settled = warmup_count(step_s[begin:end], apart[begin:end])
        warm[begin : begin + count] = True
        if not settled:
            message = f"step times had not settled after half of its {end - begin} steps"
            flags.append(Flag(f"attempt {attempt[begin]}: {message}"))
    steady = ~warm & ~apart
    warmup, set_apart = int(warm.sum()), int((~warm & apart).sum())
    if not steady.any() and not warm.all():
        steady, set_apart = ~warm, 0
        message = "every step after warm-up holds an evaluation or a save, or was skipped: step_s includes that"
        flags.append(Flag(message, "none_plain"))
    if not steady.any():
        steady, warmup, set_apart = np.ones(len(step_s), np.bool_), 0, 0
        flags.append(Flag("no step is left after warm-up: step_s includes warm-up"))
    seconds = step_s[steady]
    if len(seconds) < MIN_TIMES:
        flags.append(Flag(f"step_s rests on {counted(len(seconds), 'step')}", ROUGH_STEP))
    mean = float(np.mean(seconds))
    low, middle, high = (float(quantile) for quantile in np.quantile(seconds, (0.1, 0.5, 0.9), overwrite_input=True))
    if high > WIDE * low and len(seconds) >= 5:
        flags.append(Flag(f"step times spread widely: 10th percentile {low:.3g} s, 90th {high:.3g} s", "spread"))
    return StepTimes(middle, low, high, mean, len(seconds), warmup, set_apart, tuple(flags), steady)


def warmup_count(step_s: StepColumn, apart: Mask) -> tuple[int, bool]:
    """Returns (the number of leading steps of an attempt that are warm-up, whether step times settled after them)."""
    plain = step_s if apart.all() or not apart.any() else step_s[~apart]
    if len(plain) < 2:
        return min(1, len(step_s)), True
    settled_s = SLOW_STEP * float(np.median(plain[len(plain) // 2 :]))
    looked_at = ~apart
    looked_at[0] = False
    fast = looked_at & (step_s <= settled_s)
    looked_at[int(fast.argmax()) if fast.any() else len(fast) :] = False
    slow = np.flatnonzero(looked_at)
    if not len(slow):
        return 1, True
    count, most = int(slow[-1]) + 1, max(1, len(step_s) // 2)
    return (most, False) if count > most else (count, True)
