"""Two runs side by side: whether one is faster, which settings differ, and how both ended."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.secrets import without_secrets
from hpc_gpt.core.settings.layout import AXES
from hpc_gpt.core.tables import flat
from hpc_gpt.reader.lines.steps import WIDE
from hpc_gpt.reader.runs.figures import step_s_of_rates
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.difference import (
    FEWEST,
    Interval,
    Series,
    Values,
    level,
    resolution,
    rounds_of,
    series_of,
    speed_change,
)

# The keys that decide how much work one step is.
_BATCH = ("global_batch", "seq")
_SHAPE = ("params", "hidden", "layers", "heads")
_MOST_LOSS = 1e12  # a larger figure is not a loss


@dataclass(frozen=True)
class Speed:
    """One figure of both runs, and by how many percent B is faster. `name`: its key in a record, or tokens_per_s_gpu.

    `interval` is None if the steps are too few; then nothing is claimed.
    """

    name: str
    a: float | None
    b: float | None
    interval: Interval | None


@dataclass(frozen=True)
class Losses:
    """The losses `a` and `b` at the last step that both have.

    `alike_steps`: the number of first common steps with equal losses. `tail`: the median of B's loss less A's over the
    last tenth of the common steps, `tail_steps` of them, with its interval; None if these are too few. `diverge`:
    whether they end apart by more than noise; None if that is not known.
    """

    common_steps: int
    last_common_step: float
    a: float
    b: float
    alike_steps: int
    diverge: bool | None
    tail_steps: int
    tail: Interval | None


@dataclass(frozen=True)
class Comparison:
    """B against A. `verdict` is faster, slower, no_difference, no_interval, same_run or identical; the first of
    `speeds` decides it.

    `reasons`: (0 for A or 1 for B, why it gives no interval). `steps`: the number of steady steps of each. `rounds`:
    the number of rounds of each if both were measured in rounds, else 0. `notes`: what a reader must know, with {a} and
    {b} for the runs' names.
    """

    a: RunRead
    b: RunRead
    verdict: str
    speeds: Sequence[Speed]
    reasons: Sequence[tuple[int, str]]
    steps: tuple[int, int]
    rounds: tuple[int, int]
    differences: Sequence[SettingDifference]
    losses: Losses | None
    bpb: Losses | None  # the same of the evaluations' bits per byte
    notes: Sequence[str]


@dataclass(frozen=True)
class _Side:
    """The timing of one run. `series`: the logarithms of the seconds per unit of work (a step, or a token in a row
    with rounds), or why they give no interval. In `seconds` the run does `units`, `tokens` and, on each GPU, `flops`
    (1e12).
    """

    record: Record
    series: Series | str
    seconds: float
    units: float
    tokens: float
    flops: float


def compare_runs(a: RunRead, b: RunRead) -> Comparison:
    """Compares B with A: by the step_s of steady steps; by tokens/s if a step is not the same work in both; two rows
    that were measured in rounds by these."""
    runs, notes = (a, b), list[str]()
    steady = [_steady(run) for run in runs]
    are_rows = bool(a.rounds and b.rounds)
    sides = [_row_side(run) if are_rows else _step_side(run, step_s) for run, step_s in zip(runs, steady, strict=True)]
    of_a, of_b = (side.series for side in sides)
    reasons = [(place, reason) for place, reason in enumerate((of_a, of_b)) if isinstance(reason, str)]
    series = None
    if not isinstance(of_a, str) and not isinstance(of_b, str):
        series = _series_of_rows(a, b, of_a, of_b, notes) if are_rows else (of_a, of_b)
    speeds = _speeds(sides, series, 0.0 if are_rows else _unsure(runs, steady), are_rows, notes)
    verdict = _verdict(a, b, speeds)
    differences = setting_differences(a.record, b.record)
    match = not are_rows and _losses_match(a.record, b.record, notes)
    losses, bpb = (compare_losses(a, b, column) if match else None for column in ("loss", "bpb"))
    # If step times spread widely, the interval may come from the machine's other load.
    for run, name in zip(runs, ("{a}", "{b}"), strict=True):
        notes += [f"{name}: {flag}" for flag, kind in run.record.all_flags if kind == "spread"]
    for run, name in zip(runs, ("{a}", "{b}"), strict=True):
        if run.steps.is_skipped[run.steps.steady].any():
            notes.append(f"some steady steps of {name} were skipped: they did no optimizer work")
    notes += _kinship(a, b, verdict, differences, losses)
    rounds = (_count(a.rounds), _count(b.rounds)) if are_rows else (0, 0)
    return Comparison(
        a, b, verdict, speeds, reasons, (len(steady[0]), len(steady[1])), rounds, differences, losses, bpb, notes
    )


def _steady(run: RunRead) -> Values:
    """The seconds of the steady steps; empty if the log has no times of single steps."""
    step_s = run.steps["step_s"][run.steps.steady]
    return step_s[np.isfinite(step_s) & (step_s > 0)]


def _step_side(run: RunRead, step_s: Values) -> _Side:
    record, series = run.record, series_of(np.log(step_s), math.log(WIDE))
    if run.rounds:
        series = "is a row of a sweep, which has rounds but no single steps: compare the run folders of its rounds"
    elif not len(step_s) and record.step_s is not None:
        series = "has no times of single steps, only step_s"
    seconds = record.step_s
    if not isinstance(series, str):
        seconds = float(np.median(step_s))
        series = replace(series, shown=math.log(seconds))
    flops = (record.tflops_model or 0.0) * (step_s_of_rates(record) or 0.0)
    return _Side(record, series, _size(seconds), 1.0, _size(tokens_per_step(record)), _size(flops))


def _row_side(run: RunRead) -> _Side:
    """The timing of a row with rounds: its unit of work is a token, its figures are per second."""
    speeds = np.array(run.rounds)
    series, tokens = rounds_of(-np.log(speeds[np.isfinite(speeds)])), _size(run.record.tokens_per_s)
    if not isinstance(series, str) and tokens:
        series = replace(series, shown=-math.log(tokens))
    return _Side(run.record, series, 1.0 if tokens else 0.0, tokens, tokens, _size(run.record.tflops_model))


def _series_of_rows(a: RunRead, b: RunRead, of_a: Series, of_b: Series, notes: list[str]) -> tuple[Series, Series]:
    """The rounds of both rows as series. A sweep measures its rows in turns, so that a machine that grows warm slows
    both: their rounds are pairs, and the series has the ratios of the pairs."""
    common = min(len(a.rounds), len(b.rounds))
    ratios = np.log(np.array(b.rounds[:common])) - np.log(np.array(a.rounds[:common]))
    pairs = ratios[np.isfinite(ratios)]
    if list(a.files) == list(b.files) and len(pairs):
        common, shown = len(pairs), of_a.middle - of_b.middle
        of_a, of_b = Series(pairs, shown=shown), Series(np.zeros(common))
        notes.append(f"the interval comes from the {common} ratios of rounds, which were measured in turns")
    else:
        notes.append("the rows belong to two sweeps, so their rounds are not pairs")
    if common < 5:
        notes.append(f"the interval is wide, as there are only {common} rounds: use --rounds 5 or more")
    return of_a, of_b


def _count(rounds: Sequence[float]) -> int:
    """The number of rounds that were measured."""
    return sum(map(math.isfinite, rounds))


def _unsure(runs: Sequence[RunRead], steady: Sequence[Values]) -> float:
    """The log-ratio of two equal medians that rounding in logs alone could cause. Our own runs are not rounded."""
    read = [step_s for run, step_s in zip(runs, steady, strict=True) if run.folder is None and len(step_s)]
    return float(sum(math.log1p(resolution(step_s) / 2 / float(np.median(step_s))) for step_s in read))


def _speeds(
    sides: Sequence[_Side], series: tuple[Series, Series] | None, unsure: float, are_rows: bool, notes: list[str]
) -> list[Speed]:
    """The figures that are compared; the first one decides the verdict. Adds what a reader must know to `notes`."""
    a, b = sides

    def speed(name: str, work_a: float, work_b: float) -> Speed | None:
        """The work per second of both; None if it is not known."""
        if not (work_a and work_b and a.seconds and b.seconds):
            return None
        interval = speed_change(*series, (work_b / b.units) / (work_a / a.units), unsure) if series else None
        return Speed(name, work_a / a.seconds, work_b / b.seconds, interval)

    differ = _differ(a.record, b.record)
    are = f"{', '.join(differ)} {'is' if len(differ) == 1 else 'are'} not the same, so a step is not the same work"
    by_tokens = speed("tokens_per_s", a.tokens, b.tokens)
    if not are_rows:
        steps_per_s = speed("steps_per_s", 1.0, 1.0)
        by_step = Speed("step_s", a.seconds or None, b.seconds or None, steps_per_s.interval if steps_per_s else None)
        if not differ:
            unknown = [key for key in _BATCH if None in (getattr(a.record, key), getattr(b.record, key))]
            if unknown:
                keys = " and ".join(unknown)
                notes.append(f"{keys} of one run is not known: a step is taken to be the same work in both")
            return [by_step]
        if by_tokens is None and differ == ["gpus"]:
            notes.append("the tokens per step are not known: a step is taken to be the same work in both")
            return [by_step]
        if by_tokens is None:
            notes.append(f"{are}, and the tokens per step are not known")
            return [replace(by_step, interval=None)]
        if differ != ["gpus"]:
            notes.append(f"{are}: tokens/s are compared")
    compared: list[Speed | None] = [by_tokens or Speed("tokens_per_s", a.tokens or None, b.tokens or None, None)]
    if "gpus" in differ:
        compared.append(speed("tokens_per_s_gpu", *(side.tokens / (side.record.gpus or math.inf) for side in sides)))
    if set(differ) & {"seq", *_SHAPE}:
        notes.append("a token is not the same work in both, so tflops_model per GPU is compared, too")
        compared.append(speed("tflops_model", a.flops, b.flops))
        counts = [side.record.sources.get("tflops_model") for side in sides]
        if None not in counts and len({str(source).partition("; attention over ")[0] for source in counts}) > 1:
            notes.append("their tflops_model count different parameters: all, or the weights that multiply a token")
    return [figure for figure in compared if figure is not None]


def _size(figure: float | None) -> float:
    """The figure if it is positive and finite, else 0."""
    return float(figure) if figure is not None and math.isfinite(figure) and figure > 0 else 0.0


def _differ(a: Record, b: Record) -> list[str]:
    """The keys that both have and that differ: a step is other work, or another number of GPUs shares it."""

    pairs = {key: (getattr(a, key), getattr(b, key)) for key in (*_BATCH, "gpus", *_SHAPE)}
    # Programs differ in how they count parameters and pad the vocabulary.
    alike = {"params": 0.01}
    stated = {key: pair for key, pair in pairs.items() if None not in pair}
    return [key for key, (of_a, of_b) in stated.items() if abs(of_a - of_b) > alike.get(key, 0) * max(of_a, of_b)]


def tokens_per_step(record: Record) -> float | None:
    """Tokens per step: global_batch x seq, else tokens_per_s x step_s; None if neither is known."""
    if record.global_batch and record.seq:
        return float(record.global_batch) * float(record.seq)
    step_s = step_s_of_rates(record)
    return record.tokens_per_s * step_s if record.tokens_per_s and step_s else None


def _verdict(a: RunRead, b: RunRead, speeds: Sequence[Speed]) -> str:
    files = [{path.resolve() for path in (run.folder and [run.folder]) or run.files} for run in (a, b)]
    is_ours = [run.folder is not None for run in (a, b)]
    if files[0] and files[0] == files[1] and is_ours[0] == is_ours[1] and (is_ours[0] or a.record.run == b.record.run):
        return "same_run"
    columns = [(a.steps[name], b.steps[name]) for name in ("step", "step_s", "loss")]
    is_timed = bool(np.isfinite(a.steps["step_s"]).any())
    if is_timed and all(np.array_equal(of_a, of_b, equal_nan=True) for of_a, of_b in columns):
        return "identical"
    interval = speeds[0].interval
    if interval is None:
        return "no_interval"
    return "no_difference" if not interval.is_shown else "faster" if interval.change > 0 else "slower"


def _losses_match(a: Record, b: Record, notes: list[str]) -> bool:
    """Whether equal steps have seen as many tokens; if not, or if the vocabularies differ, a note is added."""
    if a.global_batch and a.seq and b.global_batch and b.seq and a.global_batch * a.seq != b.global_batch * b.seq:
        tokens = f"{a.global_batch * a.seq:,} tokens, a step of {{b}} {b.global_batch * b.seq:,}"
        notes.append(f"losses at equal steps are not compared: a step of {{a}} has {tokens}")
        return False
    if a.vocab and b.vocab and a.vocab != b.vocab:
        scales = "and so do the scales of the losses" + ("; bpb has one scale" if a.bpb and b.bpb else "")
        notes.append(f"the vocabularies differ, {a.vocab:,} and {b.vocab:,}, {scales}")
    return True


def compare_losses(a: RunRead, b: RunRead, column: str = "loss") -> Losses | None:
    """The difference between the losses of two runs, or another column; None without common steps."""
    (step_a, loss_a), (step_b, loss_b) = _losses_that_count(a, column), _losses_that_count(b, column)
    steps, of_a, of_b = np.intersect1d(step_a, step_b, assume_unique=True, return_indices=True)
    common = len(steps)
    if not common:
        return None
    loss_a, loss_b = loss_a[of_a], loss_b[of_b]
    difference = loss_b - loss_a
    alike = int(np.argmax(difference != 0)) if difference.any() else common
    last = difference[-max(FEWEST, common // 10) :]
    series = series_of(last)
    tail = None if isinstance(series, str) else level(series)
    diverge = False if alike == common else tail.is_shown if tail else None
    return Losses(common, float(steps[-1]), float(loss_a[-1]), float(loss_b[-1]), alike, diverge, len(last), tail)


def _losses_that_count(run: RunRead, column: str) -> tuple[Values, Values]:
    """Returns (ascending steps, their losses): each step that led to the run's last state, once."""
    curve = run.steps
    counted = (np.abs(curve[column]) < _MOST_LOSS) & np.isfinite(curve["step"]) & curve.counts
    # If a log has a step twice, its last line counts: unique takes the first of the reversed lines.
    steps, place = np.unique(curve["step"][counted][::-1], return_index=True)
    return steps, curve[column][counted][::-1][place]


def _kinship(
    a: RunRead, b: RunRead, verdict: str, differences: Sequence[SettingDifference], losses: Losses | None
) -> list[str]:
    """Notes on how the two runs are related: one job, equal losses, equal settings."""
    if verdict in ("same_run", "identical"):
        return []
    notes = []
    # Rows that were measured in rounds share one job.
    job, are_logs = a.record.job_id, a.folder is None and b.folder is None and not (a.record.rounds or b.record.rounds)
    if are_logs and job is not None and job == b.record.job_id:
        notes.append(f"both belong to job {job}: two logs of one run, or two runs in one job")
    elif are_logs and losses is not None and losses.alike_steps == losses.common_steps >= 8:
        notes.append("equal losses: two logs of one run, or a repeat of the same training")
    hashes = a.record.config_hash, b.record.config_hash
    if verdict in ("faster", "slower") and hashes[0] is not None and hashes[0] == hashes[1]:
        others = [difference.key for difference in differences if difference.is_stated]
        but = f" except {', '.join(others)}" if others else ""
        notes.append(f"the settings are the same{but}: the difference comes from the nodes, their load or the day")
    return notes


# Keys of a record that are settings; those that decide speed come first. The keys of `settings` come after them.
SETTING_KEYS = (
    "device", "gpus", "nodes", "engine", *AXES, "ep", "zero_stage", "micro_batch", "micro_batches",
    "global_batch", "seq", "params", "params_active", "hidden", "layers", "heads", "vocab", "recompute", "dtype",
    "matmul", "attention_used",
)  # fmt: skip
# Keys in `settings` of our own runs whose values the record's columns have as well.
_TWICE = frozenset(("engine.name", "engine.zero_stage", "engine.recompute", "train.dtype", "train.matmul"))
# Measured figures that other programs' logs have among their settings.
_FIGURES = frozenset(("timers_ms",))
# A key that matches _FAST affects speed; a key with a word of _NAMING only names something.
_FAST = re.compile(
    r"parallel|zero|stage|offload|recompute|checkpoint_activ|checkpoint_num|attention|flash|compile|fus|overlap|bucket"
    r"|prefetch|batch|accumulation|nccl|precision|matmul$|bf16|fp16|fp8|tf32|worker|reshard|optimizer|experts|capacity"
)
_NAMING = (
    "path", "paths", "dir", "folder", "file", "files", "save", "load", "name", "project", "entity", "wandb",
    "tensorboard", "log", "logging", "host", "hostname", "addr", "port", "rank", "time", "date", "title", "version",
    "user", "tag", "output", "exit", "prompt", "resumed", "sweep", "interval",
)  # fmt: skip
_SWITCHES = {"true": 1.0, "yes": 1.0, "on": 1.0, "false": 0.0, "no": 0.0, "off": 0.0, "none": 0.0, "null": 0.0}


@dataclass(frozen=True)
class SettingDifference:
    """A setting in which two runs differ; None for a run that does not state it."""

    key: str
    a: Any
    b: Any

    @property
    def is_stated(self) -> bool:
        """Whether both runs state it; otherwise they may not differ."""
        return self.a is not None and self.b is not None


def flat_settings(record: Record) -> dict[str, Any]:
    """Every stated setting and version under its dotted key, without secrets; the SETTING_KEYS come first."""
    settings = {key: getattr(record, key) for key in SETTING_KEYS}
    further = flat(without_secrets({key: value for key, value in record.settings.items() if key not in _FIGURES}))
    settings |= {key: value for key, value in further.items() if key not in _TWICE and key not in settings}
    settings |= {"node_list": record.node_list}
    settings |= {f"versions.{key}": value for key, value in record.versions.items()}
    return {key: value for key, value in settings.items() if value is not None}


def setting_differences(a: Record, b: Record) -> list[SettingDifference]:
    """The settings in which two runs differ: first those that affect speed, last those that only one run states."""
    of_a, of_b = flat_settings(a), flat_settings(b)
    # A sweep's varied values are also among the settings themselves.
    keys = [key for key in dict.fromkeys((*SETTING_KEYS, *of_a, *of_b)) if not key.startswith("sweep.varied.")]
    differences = [SettingDifference(key, of_a.get(key), of_b.get(key)) for key in keys]
    differences = [difference for difference in differences if _plain(difference.a) != _plain(difference.b)]
    return sorted(differences, key=lambda difference: (not difference.is_stated, _weight(difference.key)))


def _weight(key: str) -> int:
    """The rank of a key in the list of differences: 0 if it decides speed, up to 4 if it cannot affect it."""
    if key in SETTING_KEYS:
        return 0
    if key == "node_list" or key.startswith("versions."):
        return 3
    key = key.lower()
    if any(word in _NAMING for word in re.split(r"[^a-z0-9]+", key)):
        return 4
    return 1 if _FAST.search(key) else 2


def _plain(value: Any) -> Any:
    """The value in the form that is compared: different programs write `False`, 0, `false` and `None` for the same."""
    if isinstance(value, str):
        text = value.strip().lower()
        if text in _SWITCHES:
            return _SWITCHES[text]
        try:
            value = float(text)
        except ValueError:
            # A list of one text, as from argparse with nargs="*".
            return text[2:-2] if text.startswith(("['", '["')) and text.count(",") == 0 else text
    if isinstance(value, bool | int | float):
        return "nan" if math.isnan(value) else float(value)
    return value
