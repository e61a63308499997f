"""Makes one step table of a run's logs: chooses the program and rank whose lines are used, and numbers their steps.

MLPerf's submissions print counts and rates under the same names without a unit. The batch and the times show whether
these are steps, samples or tokens; if they do not, the figures are left out.
"""

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from hpc_gpt.core.runs.record import MIXTURE_FIGURES
from hpc_gpt.reader.lines.dialects import dialects
from hpc_gpt.reader.lines.fields import EPOCHS, STEP_FIELDS, TESTS
from hpc_gpt.reader.lines.part import Part
from hpc_gpt.reader.lines.steps import Mask, Places, StepColumn, StepTable, joined_by_step, steps_that_count
from hpc_gpt.reader.programs.tqdm import BAR_OF_TRAINING

# The fields that give the time of a step, the best first.
TIMES = ("step_s", "tokens_per_s", "tokens_per_s_gpu", "samples_per_s", "samples_per_s_gpu", "elapsed_s")
_FEWEST_GENERIC = 5
BARS_OF_OTHERS = "bars that may count something other than steps"
AT_ONCE = "lines of steps of several trainings at once: no curve, no loss and no time is read"
_SLOW_ITEM_S = 1.05  # a bar that counts seconds has one item per second
_MOST_STEPS = 1e15  # no run trains so many
_LARGEST_FIGURE = 1e18  # no figure of a step is larger
_ABOUT = 0.9  # the least share of the lines of the rank with most: another rank's log may have been cut earlier
# Without `skipped_so_far`, which becomes `skipped`, and `epoch`, as epochs are joined before.
_TAKEN = tuple(name for name in STEP_FIELDS if name not in ("skipped_so_far", "epoch"))
_LEAST_APART = 3  # from this many steps between lines on, a difference of one is rounding
_TWICE = 2.0  # two figures of a step's time that differ by this factor have different units


@dataclass
class LogSteps(StepTable):
    """The step table of a run of logs.

    `interval`: the number of steps per line; it may be unknown for a single line (`interval_known`). `numbered`: the
    step numbers are known; else the lines are counted. `dialect`: the program that printed the lines. `absurd`: the
    number of figures that were left out as too large.
    """

    interval: int = 1
    interval_known: bool = True
    numbered: bool = True
    dialect: str | None = None
    absurd: int = 0


def main_steps(part: Part) -> tuple[str, StepTable] | None:
    """Returns (dialect, its lines of steps) of a part, in which several programs may print their own; None without any.

    The choice is the dialect that times a step most directly, then the one with most lines, then with most fields.
    Lines without number, time and loss belong to other lines of steps. The generic dialect is used only if no known
    program prints steps.
    """
    wanted = ("step", "loss", "consumed_samples", "consumed", *TIMES)
    by_dialect = [
        (name, steps)
        for name, steps in part.steps.items()
        if len(steps) and any(field in steps for field in wanted) and _is_training(part, name, steps)
    ]
    of_known = [pair for pair in by_dialect if pair[0] not in _last_resorts()]
    return min(of_known or by_dialect, key=lambda pair: _worth(*pair), default=None)


def add_losses_beside(part: Part) -> None:
    """If one program prints step times and another prints losses of the same steps, joins their lines by step number.

    A timer may start later, or print less often. A loop may count from 0.
    """
    main = main_steps(part)
    if main is None or "loss" in main[1] or not np.isfinite(main[1]["step"]).all():
        return
    name, timer = main
    for other in sorted(part.steps.values(), key=lambda steps: -len(steps)):
        if "loss" not in other or not np.isfinite(other["step"]).all() or max(timer.stride, other.stride) > 1:
            continue
        order = np.argsort(np.concatenate((timer.line, other.line)), kind="stable")
        if (np.diff(np.concatenate((timer["step"], other["step"]))[order]) >= -1).all():
            part.steps[name] = joined_by_step(timer, other)
            return


def _is_training(part: Part, name: str, steps: StepTable) -> bool:
    """Whether lines report training steps. Lines of an unknown program do only if the step always rises, and there are
    at least five, or they name their epoch, or two are alike and the log is not the output of tests."""
    if name not in _last_resorts() or name == EPOCHS:  # `settle_epochs` has judged these
        return True
    numbers = steps["step"][np.isfinite(steps["step"])]
    alike = (steps.alike and len(numbers) > 1) or np.isfinite(steps["epoch"]).any()
    enough = steps.count >= _FEWEST_GENERIC or (alike and TESTS not in part.facts)
    return bool(enough and (np.diff(numbers) > 0).all())


@cache
def _last_resorts() -> frozenset[str]:
    return frozenset(dialect.name for dialect in dialects() if dialect.last_resort)


def _worth(name: str, steps: StepTable) -> tuple[int, int, int, str]:
    timed = next((place for place, key in enumerate(TIMES) if key in steps), len(TIMES))
    return timed, -steps.count, -len(steps.columns), name


def has_steps(part: Part) -> bool:
    """Whether a part shows training: steps, a bar or a total."""
    steps = any(len(steps) and _is_training(part, name, steps) for name, steps in part.steps.items())
    return bool(part.progress or part.totals or steps or AT_ONCE in part.left_out)


def drop_other_bars(parts: Sequence[Part]) -> None:
    """Drops the bars of a run without other signs of a training: bars of an evaluation, or of files, look the same.

    A Trainer's bar has no name either: a bar whose items take longer than a second is kept, as these are likely steps.
    """
    engines = {dialect.name for dialect in dialects() if dialect.engine}
    for part in parts:
        if part.totals or BAR_OF_TRAINING in part.facts or part.steps or engines & part.dialects.keys():
            return
        if any(step and elapsed and elapsed / step > _SLOW_ITEM_S for step, elapsed, _ in part.progress[-1:]):
            return
    for part in parts:
        if part.progress:
            part.left_out = dict(Counter(part.left_out) + Counter({BARS_OF_OTHERS: len(part.progress)}))
        part.progress, part.facts = [], {name: facts for name, facts in part.facts.items() if name != "steps_planned"}


def step_span(part: Part) -> tuple[float, float] | None:
    """Returns (first, last) step of a part by its lines of steps, else by its bars; None without any."""
    main = main_steps(part)
    if main is not None:
        steps = main[1]["step"]
        sound = steps[np.isfinite(steps) & (steps < _MOST_STEPS)]
        if len(sound):
            return float(sound[0]), float(sound.max())
    bars = [step for step, _, _ in part.progress if step < _MOST_STEPS]
    bars = [step for step in bars if step] or bars  # a bar counts finished steps: 0 is not a step
    return (bars[0], max(bars)) if bars else None


def furthest_step(part: Part) -> float | None:
    """The furthest step that a part shows beyond its lines of steps: by the bar of its steps, which must agree with the
    last line, or by a save after it, within two distances of these lines. None without any."""
    main = main_steps(part)
    if main is None or not len(numbers := main[1]["step"][np.isfinite(main[1]["step"])]):
        return None
    last, interval, line = float(numbers[-1]), log_interval(main[1]), int(main[1].line[-1])
    place = bisect.bisect_right(part.progress, line, key=lambda bar: bar[2])
    agrees = place > 0 and abs(part.progress[place - 1][0] - last) <= interval
    reached = [step for step, _, _ in part.progress[place - 1 :]] if agrees else []
    saved = [(step, at) for step, _, at in part.saves if step is not None]
    saved += [(float(fact.value), fact.place.line) for fact in part.facts.get("step_saved", ())]
    reached += [step for step, at in saved if at > line and last < step < last + 2 * interval]
    return max((step for step in reached if step < _MOST_STEPS), default=None)


def reaches(span: tuple[float, float] | None, planned: float | None) -> bool:
    """Whether a span reaches the last planned step, which is one lower if steps count from 0."""
    return bool(span and planned and planned > 0 and span[1] >= planned - (span[0] == 0 and planned > 1))


def log_interval(steps: StepTable) -> int:
    """The number of steps per line: the most common distance between neighbouring lines."""
    numbers = steps["step"]
    distance = _most_common(np.diff(numbers[np.isfinite(numbers)]))
    return max(1, distance // max(1, steps.stride)) if distance else 1


def run_steps(
    attempts: Sequence[Sequence[Part]],
    interval_asked: int | None = None,
    epoch_steps: float | None = None,
    batch: int | None = None,
    seq: int | None = None,
) -> LogSteps:
    """The steps of all attempts, each from the part with most lines.

    `interval_asked`: steps between two lines by the arguments; `epoch_steps`: steps per epoch; `batch`: samples per
    step; `seq`: tokens per sample.
    """
    pieces: list[StepTable] = []
    names: dict[str, int] = {}
    intervals: dict[int, int] = {}
    numbered = True
    for number, parts in enumerate(attempts, 1):
        if (chosen := _main_part(parts)) is None:
            continue
        part, name, steps = chosen
        interval = log_interval(steps) if len(steps) > 1 else interval_asked or 1
        columns = {key: steps[key].copy() for key in _TAKEN if key in steps or "consumed" in steps}
        if "skipped" not in steps and "skipped_so_far" in steps:
            columns["skipped"] = np.diff(steps["skipped_so_far"], prepend=0.0).clip(min=0.0)
        if "batch" in steps and "step" in columns and "consumed_samples" not in steps:
            columns["consumed_samples"] = np.cumsum(steps["batch"] * np.diff(columns["step"], prepend=0.0))
        if "consumed" in steps:
            _resolve(columns, batch, seq)
        has_number = "step" in columns and np.isfinite(columns["step"]).any()
        if "consumed" in steps and has_number:
            interval = _most_common(np.diff(columns["step"][np.isfinite(columns["step"])])) or 1
        elif not has_number:
            columns["step"], interval = _numbers(steps, interval_asked, epoch_steps)
            numbered = interval_asked is not None or interval > 1
            if pieces and _bars_go_on(attempts[number - 2], part):
                columns["step"] += pieces[-1]["step"][-1]
        _join_unnumbered(columns, part, name, steps.line)
        attempt, paused = np.full(len(steps), number, np.int64), after_pause(part, steps)
        pieces.append(replace(steps, columns=columns, attempt=attempt, after_pause=paused, files={number: part.file}))
        names[name] = names.get(name, 0) + steps.count
        intervals[interval] = intervals.get(interval, 0) + steps.count
    table = LogSteps(**vars(StepTable.joined(pieces)), numbered=numbered)
    if not pieces:
        return table
    for column in table.columns.values():
        absurd = np.abs(column) > _LARGEST_FIGURE
        table.absurd += int(absurd.sum())
        column[absurd] = np.nan
    table.columns = {name: column for name, column in table.columns.items() if np.isfinite(column).any()}
    table.counts = steps_that_count(table["step"], table.attempt)
    table.interval = max(intervals, key=lambda interval: intervals[interval])
    table.mark_nan(table.interval)
    table.dialect = max(names, key=lambda name: names[name])
    table.interval_known = len(table) > 1 or interval_asked is not None or not table["step"][0] > 1
    return table


def _bars_go_on(before: Sequence[Part], part: Part) -> bool:
    """Whether the bars of an attempt go on where those of the attempt before ended; then counted lines do, too."""
    ended = [step for other in before for step, _, _ in other.progress[-1:]]
    return bool(ended and part.progress and part.progress[0][0] >= max(ended))


def _resolve(columns: dict[str, StepColumn], batch: int | None, seq: int | None) -> None:
    """Sets steps, samples and rates by the counts and rates without a unit; removes these."""
    steps = counted_in(columns, batch, seq)
    columns["at"] = np.where(np.isfinite(columns["step"] if steps is None else steps), columns["at"], np.nan)
    if steps is not None and batch:
        columns["step"], columns["consumed_samples"] = steps, steps * batch
        if (rate := rate_in(columns, steps, batch, seq)) is not None:
            columns[rate[0]] = rate[1]
    columns["consumed"] = columns["throughput"] = np.full(len(columns["consumed"]), np.nan)


def _most_common(distances: StepColumn) -> int | None:
    """The most common distance of at least one step, None without any."""
    counts = Counter(distances[(distances >= 1) & (distances < 1e9)].tolist())
    return int(max(counts, key=lambda distance: (counts[distance], -distance))) if counts else None


def _main_part(parts: Sequence[Part]) -> tuple[Part, str, StepTable] | None:
    """The part of an attempt whose lines of steps are used, its dialect and the lines.

    It is the first part with most lines. If they have no loss, like the lines of a pipeline's first stage, it is the
    first part with a loss and about as many lines.
    """
    candidates = [(part, *chosen) for part in parts if (chosen := main_steps(part)) is not None]
    if not candidates:
        return None
    best = max(candidates, key=lambda candidate: candidate[2].count)
    about = (each for each in candidates if each[1] == best[1] and each[2].count >= _ABOUT * best[2].count)
    return best if "loss" in best[2] else next((each for each in about if "loss" in each[2]), best)


def _numbers(steps: StepTable, interval_asked: int | None, epoch_steps: float | None) -> tuple[StepColumn, int]:
    """Returns (step of every line, interval) of lines without a step number: by their epochs, else counted."""
    epochs = steps["epoch"]
    if epoch_steps and np.isfinite(epochs).all() and (np.diff(epochs) > 0).all():
        numbers = np.round(epochs * epoch_steps)
        if numbers[0] > 0 and (np.diff(numbers) > 0).all():
            numbers = _evenly(numbers)
            return numbers, max(1, round((numbers[-1] - numbers[0]) / max(1, len(numbers) - 1) / steps.stride))
    interval = interval_asked or 1
    return np.arange(1, len(steps) + 1, dtype=np.float64) * interval * steps.stride, interval


def _evenly(numbers: StepColumn) -> StepColumn:
    """The step numbers, which come from rounded epochs, at even distances if they are even to one step: an epoch whose
    samples do not fill whole batches is longer than its steps. The first line may report step 1."""
    distances = np.diff(numbers[1:])
    every = _most_common(distances) or 0
    if every < _LEAST_APART or len(distances) < _LEAST_APART or (np.abs(distances - every) > 1).any():
        return numbers
    even: StepColumn = every * (np.round(numbers[1] / every) + np.arange(-1.0, len(numbers) - 1))
    even[0] = even[0] if abs(even[0] - numbers[0]) <= 1 else numbers[0]
    return even


def _join_unnumbered(columns: dict[str, StepColumn], part: Part, main: str, line: Places) -> None:
    """Fills columns that the dialect lacks from lines without a step, such as DeepSpeed's of an overflow.

    They belong to the next line of steps. Counts are summed.
    """
    for name, other in part.steps.items():
        if name == main or "step" in other:
            continue
        following = np.searchsorted(line, other.line)
        inside = following < len(line)
        for key in _TAKEN:
            if key == "at" or key not in other or (key in columns and np.isfinite(columns[key]).any()):
                continue
            filled = np.full(len(line), 0.0 if key in ("skipped", "nan") else np.nan)
            if key in ("skipped", "nan"):
                np.add.at(filled, following[inside], other[key][inside])
            else:
                filled[following[inside]] = other[key][inside]
            columns[key] = filled


def after_pause(part: Part, steps: StepTable) -> Mask:
    """Mask of the lines that follow an evaluation or a save: their time includes it."""
    marks = np.zeros(len(steps), np.bool_)
    pauses = [line for _, _, line in (*part.evals, *part.saves)]
    if pauses and len(steps):
        following = np.searchsorted(steps.line, np.array(pauses, np.int64), side="right")
        marks[following[(following < len(steps)) & (following > 0)]] = True
    return marks


def evaluations(steps: LogSteps, parts: Sequence[Part]) -> list[tuple[float, float, str]]:
    """Returns (step, loss, place) of the evaluations in the order of the attempts, NaN for an unknown step.

    An evaluation after the program's totals is its last; it counts only if there was none during the training.
    """
    evals: list[tuple[float, float, str]] = []
    for part in reversed(parts):
        ended = min((fact.place.line for fact in part.totals.values() if fact.place.file == part.file), default=np.inf)
        during = any(line < ended for _, _, line in part.evals)
        for step, loss, line in part.evals:
            if np.isfinite(loss) and (line < ended or not during):
                evals.append((np.nan if step is None else step, loss, f"{part.file}:{line}"))
    column = steps.columns.get("loss_eval", np.zeros(0))
    for index in np.flatnonzero(np.isfinite(column)):
        evals.append((float(steps["step"][index]), float(column[index]), steps.place(int(index))))
    return evals


def steps_to_show(steps: LogSteps, step_s: StepColumn, parts: Sequence[Part], step_tokens: int | None) -> StepTable:
    """The columns that a report shows, with this `step_s`; the progress of the bars if there are no lines of steps.

    Tokens/s follow from `step_tokens`, the tokens of one step, if the program prints none.
    """
    if not len(steps):
        return _steps_of_bars(parts)
    tokens_per_s = steps["tokens_per_s"]
    if step_tokens and not np.isfinite(tokens_per_s).any():
        with np.errstate(divide="ignore", over="ignore"):
            tokens_per_s = np.where(step_s > 0, step_tokens / step_s, np.nan)
    shown = ("step", "loss", "grad_norm", *MIXTURE_FIGURES, "lr", "at", "skipped")
    columns = {name: steps.columns[name] for name in shown if name in steps}
    evals = np.array([(step, loss) for step, loss, _ in evaluations(steps, parts)], np.float64).reshape(-1, 2)
    columns |= {"step_s": step_s, "tokens_per_s": tokens_per_s}
    return replace(steps, columns=columns, eval_step=evals[:, 0], eval_loss=evals[:, 1])


def _steps_of_bars(parts: Sequence[Part]) -> StepTable:
    """The progress of the bars in the part with most bars. Their whole seconds are too coarse for a step time."""
    bars = max((part.progress for part in parts), key=len, default=[])
    if not bars:
        return StepTable()
    step = np.array([number for number, _, _ in bars], np.float64)
    elapsed = np.array([np.nan if seconds is None else seconds for _, seconds, _ in bars], np.float64)
    # Every rank draws the bar: only new maxima count.
    new = step > np.concatenate([[-np.inf], np.maximum.accumulate(step)[:-1]])
    step, elapsed = step[new], elapsed[new]
    seconds = np.full(len(step), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds[1:] = np.diff(elapsed) / np.diff(step)
    return StepTable({"step": step[step > 0], "step_s": seconds[step > 0]})


def counted_in(columns: Mapping[str, StepColumn], batch: int | None, seq: int | None) -> StepColumn | None:
    """The step of each row by `consumed`; None if nothing shows its unit.

    A count of tokens is a multiple of batch x sequence in every row, a count of samples a multiple of the batch. The
    steps between two rows must then take about the time that the program prints for them.
    """
    consumed = columns["consumed"]
    counts = consumed[np.isfinite(consumed) & (consumed > 0)]
    if not len(counts) or not batch:
        return None
    sizes = [batch * seq] if seq else []
    for size in (*sizes, batch):
        if (counts % size == 0).all() and _fits(columns, consumed / size):
            return consumed / size
    return None


def _fits(columns: Mapping[str, StepColumn], steps: StepColumn) -> bool:
    """Whether the printed step time, if any, is close to the step time by the times of day."""
    printed, clock = _median(columns["step_s"]), clock_s(columns["at"], steps)
    return printed is None or clock is None or 1 / _TWICE < clock / printed < _TWICE


def clock_s(at: StepColumn, steps: StepColumn) -> float | None:
    """The median seconds of a step by the times of day of neighbouring rows; None without any."""
    timed = np.isfinite(at) & np.isfinite(steps)
    steps_apart, took = np.diff(steps[timed]), np.diff(at[timed])
    forward = (steps_apart > 0) & (took > 0)
    return float(np.median(took[forward] / steps_apart[forward])) if forward.any() else None


def rate_in(
    columns: Mapping[str, StepColumn], steps: StepColumn, batch: int, seq: int | None
) -> tuple[str, StepColumn] | None:
    """Returns (samples_per_s or tokens_per_s, values of `throughput`); None if nothing shows its unit."""
    rate, clock = _median(columns["throughput"]), clock_s(columns["at"], steps)
    if not rate or clock is None:
        return None
    for name, size in (("samples_per_s", batch), ("tokens_per_s", batch * (seq or 0))):
        if size and 1 / _TWICE < size / rate / clock < _TWICE:
            return name, columns["throughput"]
    return None


def _median(column: StepColumn) -> float | None:
    positive = column[np.isfinite(column) & (column > 0)]
    return float(np.median(positive)) if len(positive) else None
