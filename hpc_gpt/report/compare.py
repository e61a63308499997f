"""Two runs side by side: whether one is faster, which settings differ, and how both ended."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpc_gpt.readers.runs import RunRead, step_s_of_rates
from hpc_gpt.readers.steps import SPREAD, WIDE
from hpc_gpt.report.difference import (
    Interval,
    LossDifference,
    Series,
    Values,
    loss_difference,
    paired_change,
    resolution,
    rounds_of,
    series_of,
    speed_change,
    times,
)
from hpc_gpt.runs.record import Record
from hpc_gpt.secrets import without_secrets
from hpc_gpt.tables import flat

# What decides how much work one step is.
_BATCH = ("global_batch", "seq")
_SHAPE = ("params", "hidden", "layers", "heads")
VERDICTS = ("faster", "slower", "no_difference", "no_interval", "same_run", "identical")


@dataclass(frozen=True)
class Speed:
    """One figure of both runs, named as in a record or tokens_per_s_gpu, and by how many percent B is faster.

    `interval` is None if the steps are too few; then nothing is claimed.
    """

    name: str
    a: float | None
    b: float | None
    interval: Interval | None


@dataclass(frozen=True)
class Comparison:
    """B against A. `verdict` is one of VERDICTS; the first of `speeds` decides it.

    `reasons`: (0 for A or 1 for B, why it gives no interval). `steps`: the number of steady steps of each. `rounds`:
    the number of rounds of each if both are rows of benches, else 0. `notes`: what a reader must know, with {a} and
    {b} for the runs' names.
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
    """Compares B with A: by the step_s of steady steps, by tokens/s if a step is not the same work, and two rows of
    benches by their rounds."""
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
    notes += _spread(a, "{a}") + _spread(b, "{b}") + _skipped(a, "{a}") + _skipped(b, "{b}")
    notes += _kinship(a, b, verdict, apart, losses)
    return Comparison(a, b, verdict, speeds, reasons, (len(sides[0]), len(sides[1])), rounds, apart, losses, notes)


def _steady(run: RunRead) -> Values:
    """The seconds of the steady steps; empty if the log has no times of single steps."""
    step_s = run.steps["step_s"][run.steps.steady]
    return step_s[np.isfinite(step_s) & (step_s > 0)]


def _series(run: RunRead, step_s: Values) -> Series | str:
    """The logarithms of the seconds as a series, or why they give no interval."""
    if run.rounds:
        return "is a row of a bench, which has rounds but no single steps: compare the run folders of its rounds"
    if not len(step_s) and run.record.step_s is not None:
        return "has no times of single steps, only step_s"
    return series_of(np.log(step_s), math.log(WIDE))


def _unsure(runs: Sequence[RunRead], sides: Sequence[Values]) -> float:
    """How far rounding in logs may move two equal medians apart, as logarithms; our own runs are not rounded."""
    read = [side for run, side in zip(runs, sides, strict=True) if run.folder is None and len(side)]
    return float(sum(math.log1p(resolution(side) / 2 / float(np.median(side))) for side in read))


def _speeds(a: RunRead, b: RunRead, series: Sequence[Series | str], unsure: float, notes: list[str]) -> list[Speed]:
    """The figures that are compared; the first decides."""
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
            notes.append(
                f"{' and '.join(unknown)} of one run is not known: a step is assumed to be the same work in both"
            )
        return [by_step]
    per_s = speed("tokens_per_s", tokens)
    if per_s is None and differ == ["gpus"]:
        notes.append("the tokens of a step are not known: a step is assumed to be the same work in both")
        return [by_step]
    if per_s is None:
        notes.append(f"{_are(differ)} not the same, so a step is not the same work, and its tokens are not known")
        return [replace(by_step, interval=None)]
    if differ != ["gpus"]:
        notes.append(f"{_are(differ)} not the same, so a step is not the same work: tokens/s are compared")
    flops = [_flops_per_step(run.record) for run in (a, b)]
    more = [speed(name, work) for name, work in _further((a, b), differ, tokens, flops, notes)]
    return [per_s, *(each for each in more if each is not None)]


def _further(
    runs: Sequence[RunRead],
    differ: Sequence[str],
    tokens: Sequence[float | None],
    flops: Sequence[float | None],
    notes: list[str],
) -> list[tuple[str, Sequence[float | None]]]:
    """(name, figures of both runs) of what is compared besides tokens/s, as the keys that `differ` need it."""
    found: list[tuple[str, Sequence[float | None]]] = []
    if "gpus" in differ:
        gpus = [_size(run.record.gpus) for run in runs]
        found.append(
            (
                "tokens_per_s_gpu",
                [_size(own) / count if count else None for own, count in zip(tokens, gpus, strict=True)],
            )
        )
    if set(differ) & {"seq", *_SHAPE}:
        notes.append("a token is not the same work in both, so tflops_model per GPU is compared as well")
        found.append(("tflops_model", flops))
    return found


def _speeds_of_rows(a: RunRead, b: RunRead, notes: list[str]) -> tuple[list[Speed], list[tuple[int, str]]]:
    """Tokens/s of two rows and further figures, and (place, reason) if there is no interval."""
    series = [rounds_of(-np.log(np.array(run.rounds))) for run in (a, b)]
    reasons = [(place, reason) for place, reason in enumerate(series) if isinstance(reason, str)]
    interval = None
    of_a, of_b = series
    if not isinstance(of_a, str) and not isinstance(of_b, str):
        common = min(len(a.rounds), len(b.rounds))
        if list(a.files) == list(b.files):
            found = paired_change(of_a, of_b)
            notes.append(f"the interval is that of the {common} ratios of rounds, which were measured in turns")
            if isinstance(found, str):
                reasons.append((1, found))
            else:
                interval = found
        else:
            interval = speed_change(of_a, of_b)
            notes.append("the rows are of two benches, so their rounds are not pairs")
        if common < 5:
            notes.append(f"the interval is wide, as there are only {common} rounds: use bench --rounds 5 or more")
    middles = [run.record.tokens_per_s for run in (a, b)]
    speeds = [Speed("tokens_per_s", middles[0], middles[1], interval)]
    flops = [run.record.tflops_model for run in (a, b)]
    for name, figures in _further((a, b), _differ(a.record, b.record), middles, flops, notes):
        sizes = [*map(_size, figures), *map(_size, middles)]
        if all(sizes):
            worth = sizes[1] / sizes[0] * sizes[2] / sizes[3]
            speeds.append(Speed(name, sizes[0], sizes[1], times(interval, worth) if interval else None))
    return speeds, reasons


def _size(figure: float | None) -> float:
    """The figure if it is positive and finite, else 0."""
    return float(figure) if figure is not None and math.isfinite(figure) and figure > 0 else 0.0


def _median(run: RunRead, series: Series | str) -> float | None:
    return run.record.step_s if isinstance(series, str) else float(np.median(_steady(run)))


def _differ(a: Record, b: Record) -> list[str]:
    """The keys that both have and that differ, so that a step is other work, or shared by another number of GPUs."""

    def is_other(key: str) -> bool:
        of_a, of_b = getattr(a, key), getattr(b, key)
        if of_a is None or of_b is None:
            return False
        # Programs count and pad the vocabulary differently.
        return bool(abs(of_a - of_b) > (0.01 * max(of_a, of_b) if key == "params" else 0))

    return [key for key in (*_BATCH, "gpus", *_SHAPE) if is_other(key)]


def tokens_per_step(record: Record) -> float | None:
    """Tokens of one step: global_batch x seq, else tokens_per_s x step_s."""
    if record.global_batch and record.seq:
        return float(record.global_batch) * float(record.seq)
    step_s = step_s_of_rates(record)
    return record.tokens_per_s * step_s if record.tokens_per_s and step_s else None


def _are(keys: Sequence[str]) -> str:
    return f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'}"


def _flops_per_step(record: Record) -> float | None:
    """1e12 FLOPs of one step on one GPU, by tflops_model's formula."""
    step_s = step_s_of_rates(record)
    return record.tflops_model * step_s if record.tflops_model and step_s else None


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
    """Whether both have the same steps with the same figures."""
    pairs = [(a.steps[name], b.steps[name]) for name in ("step", "step_s", "loss")]
    timed = bool(np.isfinite(a.steps["step_s"]).any())
    return timed and all(np.array_equal(of_a, of_b, equal_nan=True) for of_a, of_b in pairs)


def _losses_match(a: Record, b: Record, notes: list[str]) -> bool:
    """Whether equal steps have seen as many tokens; adds a note if not, and if the vocabularies differ."""
    if a.global_batch and a.seq and b.global_batch and b.seq and a.global_batch * a.seq != b.global_batch * b.seq:
        tokens = f"{a.global_batch * a.seq:,} tokens, one of {{b}} {b.global_batch * b.seq:,}"
        notes.append(f"losses at equal steps are not compared: a step of {{a}} has {tokens}")
        return False
    if a.vocab and b.vocab and a.vocab != b.vocab:
        notes.append(f"the vocabularies differ, {a.vocab:,} and {b.vocab:,}, and so do the scales of the losses")
    return True


def _spread(run: RunRead, name: str) -> list[str]:
    """The report's note on step times that spread widely: such an interval may be of the machine's other load."""
    return [f"of {name}: {flag}" for flag in run.record.flags if flag.startswith(SPREAD)]


def _skipped(run: RunRead, name: str) -> list[str]:
    if not run.steps.is_skipped[run.steps.steady].any():
        return []
    return [f"some steady steps of {name} were skipped, and did no optimizer work"]


def _kinship(a: RunRead, b: RunRead, verdict: str, apart: Sequence[Apart], losses: LossDifference | None) -> list[str]:
    """Notes on how the runs are related."""
    if verdict in ("same_run", "identical"):
        return []
    notes = []
    job, are_logs = a.record.job_id, a.folder is None and b.folder is None
    if are_logs and job is not None and job == b.record.job_id:
        notes.append(f"both are of job {job}: two logs of one run, or two runs of one job")
    elif are_logs and losses is not None and losses.alike == losses.common >= 8:
        notes.append("equal losses: two logs of one run, or a repeat of the same training")
    hashes = a.record.config_hash, b.record.config_hash
    if verdict in ("faster", "slower") and hashes[0] is not None and hashes[0] == hashes[1]:
        others = [each.key for each in apart if each.is_stated]
        but = f" except {', '.join(others)}" if others else ""
        notes.append(f"the settings are the same{but}: the difference is from the nodes, their load or the day")
    return notes


# Keys of a record that are settings, those that decide speed first. The keys of `settings` come after them.
SETTING_KEYS = (
    "device", "gpus", "nodes", "engine", "tp", "pp", "dp", "zero_stage", "micro_batch", "micro_batches",
    "global_batch", "seq", "params", "hidden", "layers", "heads", "vocab", "recompute", "dtype", "attention_used",
)  # fmt: skip
# Our own runs have these in `settings` as well.
_TWICE = frozenset(("engine.name", "engine.zero_stage", "engine.recompute", "train.dtype"))
# Measured figures that other programs' logs have among their settings.
_FIGURES = frozenset(("timers_ms",))
# A key that matches _FAST affects speed; a key with a word of _NAMING only names something.
_FAST = re.compile(
    r"parallel|zero|stage|offload|recompute|checkpoint_activ|checkpoint_num|attention|flash|compile|fus|overlap|bucket"
    r"|prefetch|batch|accumulation|nccl|precision|bf16|fp16|fp8|tf32|worker|reshard|optimizer|experts|capacity"
)
_NAMING = (
    "path", "paths", "dir", "folder", "file", "files", "save", "load", "name", "project", "entity", "wandb",
    "tensorboard", "log", "logging", "host", "hostname", "addr", "port", "rank", "time", "date", "title", "version",
    "user", "tag", "output", "exit", "prompt", "resumed", "sweep", "interval",
)  # fmt: skip
_SWITCHES = {"true": 1.0, "yes": 1.0, "on": 1.0, "false": 0.0, "no": 0.0, "off": 0.0, "none": 0.0, "null": 0.0}


@dataclass(frozen=True)
class Apart:
    """A setting in which two runs differ; None for a run that does not state it."""

    key: str
    a: Any
    b: Any

    @property
    def is_stated(self) -> bool:
        """Whether both runs state it; otherwise they may not differ."""
        return self.a is not None and self.b is not None


def flat_settings(record: Record) -> dict[str, Any]:
    """Every stated setting under a dotted key, and versions, in the order of SETTING_KEYS; without secrets."""
    found = {key: getattr(record, key) for key in SETTING_KEYS}
    own = flat(without_secrets({key: value for key, value in record.settings.items() if key not in _FIGURES}))
    found |= {key: value for key, value in own.items() if key not in _TWICE and key not in found}
    found |= {"node_list": record.node_list}
    found |= {f"versions.{key}": value for key, value in record.versions.items()}
    return {key: value for key, value in found.items() if value is not None}


def settings_apart(a: Record, b: Record) -> list[Apart]:
    """The settings in which two runs differ, those that affect speed first, those that only one states last."""
    of_a, of_b = flat_settings(a), flat_settings(b)
    found = [
        Apart(key, of_a.get(key), of_b.get(key))
        for key in {**of_a, **of_b}
        if _plain(of_a.get(key)) != _plain(of_b.get(key))
    ]
    if a.config_hash and b.config_hash and a.config_hash != b.config_hash:
        found.append(Apart("config_hash", a.config_hash, b.config_hash))
    return sorted(found, key=_weight)


def _weight(apart: Apart) -> tuple[bool, int, int]:
    known = {key: place for place, key in enumerate(SETTING_KEYS)}
    if apart.key in known:
        return not apart.is_stated, 0, known[apart.key]
    if apart.key == "config_hash":
        return not apart.is_stated, 5, 0
    if apart.key == "node_list" or apart.key.startswith("versions."):
        return not apart.is_stated, 3, 0
    key = apart.key.lower()
    if any(word in _NAMING for word in re.split(r"[^a-z0-9]+", key)):
        return not apart.is_stated, 4, 0
    return not apart.is_stated, 1 if _FAST.search(key) else 2, 0


def _plain(value: Any) -> Any:
    """The value to compare: `False`, 0, `false` and `None` are the same in different programs."""
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
