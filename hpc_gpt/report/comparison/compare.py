"""Two runs side by side: whether one is faster, what they do not share, and what came of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpc_gpt.readers.runs.run_read import RunRead
from hpc_gpt.report.comparison.difference import Interval, Series, Values, resolution, series_of, speed_change
from hpc_gpt.report.comparison.loss_difference import LossDifference, loss_difference
from hpc_gpt.report.comparison.rounds import FEWEST_ROUNDS, rounds_change, times
from hpc_gpt.report.comparison.settings import Apart, settings_apart
from hpc_gpt.runs.record import Record

# What decides how much work a step is.
_BATCH = ("global_batch", "seq")
_SHAPE = ("params", "hidden", "layers", "heads")
VERDICTS = ("faster", "slower", "no_difference", "no_interval", "same_run", "identical")


@dataclass(frozen=True)
class Speed:
    """One figure of both runs by its name in a record, or tokens_per_s_gpu, and by how many percent B is faster.

    `interval` is None where the steps do not suffice; then nothing is claimed.
    """

    name: str
    a: float | None
    b: float | None
    interval: Interval | None


@dataclass(frozen=True)
class Comparison:
    """B against A. `verdict` is one of VERDICTS; the first of `speeds` decides it.

    `reasons`: (0 for A or 1 for B, why it gives no interval). `steps`: how many steady steps each has. `rounds`: of two
    rows of benches, which are compared by these, how many each has. `notes`: what a reader must know, with {a} and {b}
    for the runs' names.
    """

    a: RunRead
    b: RunRead
    verdict: str
    speeds: Sequence[Speed]
    reasons: Sequence[tuple[int, str]]
    steps: tuple[int, int]
    rounds: tuple[int, int]
    apart: Sequence[Apart]
    losses: LossDifference | None
    notes: Sequence[str]


def compare_runs(a: RunRead, b: RunRead) -> Comparison:
    """Compares B with A: steady steps by step_s, or by tokens/s where a step is not the same work; two rows of benches
    by their rounds."""
    sides = [_steady(a), _steady(b)]
    notes: list[str] = []
    rounds = (len(a.rounds), len(b.rounds)) if a.rounds and b.rounds else (0, 0)
    if all(rounds):
        speeds, reasons = _speeds_of_rows(a, b, notes)
    else:
        series = [_series(run, side) for run, side in zip((a, b), sides, strict=True)]
        reasons = [(place, reason) for place, reason in enumerate(series) if isinstance(reason, str)]
        speeds = _speeds(a, b, series, _unsure((a, b), sides), notes)
    verdict = _verdict(a, b, speeds)
    apart = settings_apart(a.record, b.record)
    losses = loss_difference(a, b) if not all(rounds) and _losses_match(a.record, b.record, notes) else None
    notes += _skipped(a, "{a}") + _skipped(b, "{b}") + _kinship(a, b, verdict, apart, losses)
    return Comparison(a, b, verdict, speeds, reasons, (len(sides[0]), len(sides[1])), rounds, apart, losses, notes)


def _steady(run: RunRead) -> Values:
    """Seconds of the steady steps; none where the log only has a total."""
    step_s = run.steps["step_s"][run.steps.steady]
    return step_s[np.isfinite(step_s) & (step_s > 0)]


def _series(run: RunRead, step_s: Values) -> Series | str:
    """The logarithms of the seconds as a series, or why it gives no interval."""
    if run.rounds:
        return "is a row of a bench, which has rounds and no single steps: compare the run folders of its rounds"
    if not len(step_s) and run.record.step_s is not None:
        return "gives no times of single steps, only a step_s"
    return series_of(np.log(step_s))


def _unsure(runs: Sequence[RunRead], sides: Sequence[Values]) -> float:
    """How far apart the digits of the logs may put two medians of equal speeds, as logarithms; ours are in full."""
    read = [side for run, side in zip(runs, sides, strict=True) if run.folder is None and len(side)]
    return float(sum(math.log1p(resolution(side) / 2 / float(np.median(side))) for side in read))


def _speeds(a: RunRead, b: RunRead, series: Sequence[Series | str], unsure: float, notes: list[str]) -> list[Speed]:
    """The figures to compare by, the deciding one first."""
    step_s = [_median(run, own) for run, own in zip((a, b), series, strict=True)]
    tokens = [tokens_per_step(run.record) for run in (a, b)]
    differ = _differ(a.record, b.record)

    def speed(name: str, work: Sequence[float | None]) -> Speed | None:
        sizes = [*map(_size, work), *map(_size, step_s)]
        if not all(sizes):
            return None
        (work_a, work_b, s_a, s_b), (of_a, of_b) = sizes, series
        interval = None
        if not isinstance(of_a, str) and not isinstance(of_b, str):
            interval = speed_change(of_a, of_b, work_b / work_a, unsure)
        return Speed(name, work_a / s_a, work_b / s_b, interval)

    steps_per_s = speed("steps_per_s", (1.0, 1.0))
    by_step = Speed("step_s", step_s[0], step_s[1], steps_per_s.interval if steps_per_s else None)
    if not differ:
        unknown = [key for key in _BATCH if getattr(a.record, key) is None or getattr(b.record, key) is None]
        if unknown:
            notes.append(f"{' and '.join(unknown)} of one is not known: a step is taken to be the same work in both")
        return [by_step]
    per_s = speed("tokens_per_s", tokens)
    if per_s is None and differ == ["gpus"]:
        notes.append("tokens of a step are not known: a step is taken to be the same work in both")
        return [by_step]
    if per_s is None:
        notes.append(f"{_are(differ)} not the same, so a step is not the same work, and its tokens are not known")
        return [replace(by_step, interval=None)]
    if differ != ["gpus"]:
        notes.append(f"{_are(differ)} not the same, so a step is not the same work: tokens/s are compared")
    more = []
    if "gpus" in differ:
        gpus = [_size(run.record.gpus) for run in (a, b)]
        each = [_size(count) / own if own else None for count, own in zip(tokens, gpus, strict=True)]
        more.append(speed("tokens_per_s_gpu", each))
    if set(differ) & {"seq", *_SHAPE}:
        notes.append("a token is not the same work in both, so tflops_model, per GPU, stands beside tokens/s")
        more.append(speed("tflops_model", [_flops_per_step(run.record) for run in (a, b)]))
    return [per_s, *(each for each in more if each is not None)]


def _speeds_of_rows(a: RunRead, b: RunRead, notes: list[str]) -> tuple[list[Speed], list[tuple[int, str]]]:
    """Tokens/s of two rows, and what stands beside them; (place, reason) where there is no interval."""
    too_few = [(place, run) for place, run in enumerate((a, b)) if len(run.rounds) < FEWEST_ROUNDS]
    reasons = [(place, f"has {len(run.rounds)} round, and an interval needs {FEWEST_ROUNDS}") for place, run in too_few]
    interval = None
    if not reasons:
        paired = list(a.files) == list(b.files)
        found = rounds_change(a.rounds, b.rounds, paired)
        if isinstance(found, str):
            reasons.append((1, found))
        else:
            interval = found
        common = min(len(a.rounds), len(b.rounds))
        which = (
            f"the interval is Student's t of the {common} ratios of rounds that were measured in turns"
            if paired
            else "the rows are of two benches, so their rounds are no pairs: the interval is Welch's t"
        )
        if interval is not None:
            notes.append(which)
        if common < _FEW_ROUNDS:
            notes.append(f"{common} rounds are few, which makes an interval wide: bench --rounds 5 or more")
    middles = [run.record.tokens_per_s for run in (a, b)]
    speeds = [Speed("tokens_per_s", middles[0], middles[1], interval)]
    differ = _differ(a.record, b.record)
    beside: list[tuple[str, list[float | None]]] = []
    if "gpus" in differ:
        gpus = [_size(run.record.gpus) for run in (a, b)]
        beside.append(
            ("tokens_per_s_gpu", [_size(own) / n if n else None for own, n in zip(middles, gpus, strict=True)])
        )
    if set(differ) & {"seq", *_SHAPE}:
        notes.append("a token is not the same work in both, so tflops_model, per GPU, stands beside tokens/s")
        beside.append(("tflops_model", [run.record.tflops_model for run in (a, b)]))
    for name, figures in beside:
        sizes = [*map(_size, figures), *map(_size, middles)]
        if all(sizes):
            worth = sizes[1] / sizes[0] * sizes[2] / sizes[3]
            speeds.append(Speed(name, sizes[0], sizes[1], times(interval, worth) if interval else None))
    return speeds, reasons


_FEW_ROUNDS = 5


def _size(figure: float | None) -> float:
    """The figure where it is one that can be divided by, else 0."""
    return float(figure) if figure is not None and math.isfinite(figure) and figure > 0 else 0.0


def _median(run: RunRead, series: Series | str) -> float | None:
    return run.record.step_s if isinstance(series, str) else math.exp(series.middle)


def _differ(a: Record, b: Record) -> list[str]:
    """Keys that both state, and that make a step of B other work than one of A, or let other GPUs share it."""

    def is_other(key: str) -> bool:
        of_a, of_b = getattr(a, key), getattr(b, key)
        if of_a is None or of_b is None:
            return False
        # Programs count and pad the vocabulary each in its own way.
        return bool(abs(of_a - of_b) > (0.01 * max(of_a, of_b) if key == "params" else 0))

    return [key for key in (*_BATCH, "gpus", *_SHAPE) if is_other(key)]


def tokens_per_step(record: Record) -> float | None:
    """Tokens of one step: global_batch x seq, else what tokens_per_s and step_s make."""
    if record.global_batch and record.seq:
        return float(record.global_batch) * float(record.seq)
    return record.tokens_per_s * record.step_s if record.tokens_per_s and record.step_s else None


def _are(keys: Sequence[str]) -> str:
    return f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'}"


def _flops_per_step(record: Record) -> float | None:
    """1e12 FLOPs of one step on one GPU, by tflops_model's formula."""
    return record.tflops_model * record.step_s if record.tflops_model and record.step_s else None


def _verdict(a: RunRead, b: RunRead, speeds: Sequence[Speed]) -> str:
    if _is_same_run(a, b):
        return "same_run"
    if _is_identical(a, b):
        return "identical"
    interval = speeds[0].interval
    if interval is None:
        return "no_interval"
    return "no_difference" if not interval.is_shown else "faster" if interval.change > 0 else "slower"


def _is_same_run(a: RunRead, b: RunRead) -> bool:
    if a.folder is not None or b.folder is not None:
        return a.folder is not None and b.folder is not None and a.folder.resolve() == b.folder.resolve()
    files = [{path.resolve() for path in run.files} for run in (a, b)]
    return bool(files[0]) and files[0] == files[1] and a.record.run == b.record.run


def _is_identical(a: RunRead, b: RunRead) -> bool:
    """Whether both tell of the same steps in the same figures."""
    pairs = [(a.steps[name], b.steps[name]) for name in ("step", "step_s", "loss")]
    timed = bool(np.isfinite(a.steps["step_s"]).any())
    return timed and all(np.array_equal(of_a, of_b, equal_nan=True) for of_a, of_b in pairs)


def _losses_match(a: Record, b: Record, notes: list[str]) -> bool:
    """Whether a step of both has seen as many tokens of the same vocabulary; if not, says so."""
    if a.global_batch and a.seq and b.global_batch and b.seq and a.global_batch * a.seq != b.global_batch * b.seq:
        tokens = f"{a.global_batch * a.seq:,} tokens, one of {{b}} {b.global_batch * b.seq:,}"
        notes.append(f"losses at equal steps are not compared: a step of {{a}} holds {tokens}")
        return False
    if a.vocab and b.vocab and a.vocab != b.vocab:
        notes.append(f"the vocabularies differ, {a.vocab:,} and {b.vocab:,}: so do the losses' scales")
    return True


def _skipped(run: RunRead, name: str) -> list[str]:
    if not run.steps.is_skipped[run.steps.steady].any():
        return []
    return [f"skipped steps are among the steady ones of {name}: those do no optimizer work"]


def _kinship(a: RunRead, b: RunRead, verdict: str, apart: Sequence[Apart], losses: LossDifference | None) -> list[str]:
    """What the runs have to do with each other."""
    if verdict in ("same_run", "identical"):
        return []
    notes = []
    job, are_logs = a.record.job_id, a.folder is None and b.folder is None
    if are_logs and job is not None and job == b.record.job_id:
        notes.append(f"both are of job {job}: two logs of one run, or two runs of one job")
    elif are_logs and losses is not None and losses.alike == losses.common >= 8:
        notes.append("equal losses: two logs of one run, or the same training once more")
    hashes = a.record.config_hash, b.record.config_hash
    if verdict in ("faster", "slower") and hashes[0] is not None and hashes[0] == hashes[1]:
        others = [each.key for each in apart if each.is_stated]
        but = f", but for {', '.join(others)}" if others else ""
        notes.append(f"the settings are the same{but}: so the difference is of the nodes, their load or the day")
    return notes
