"""Holds rates against each other and against what a device can do, and says why a figure is null.

Tokens/s by the sizes and the rate that the program prints for the same steps may differ by 5 %. Beyond that the figure
is left out and a flag gives both, unless a known habit of the program's arithmetic explains the difference. TFLOPs
above a device's peak are left out, whoever counted them.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hpc_gpt.core.runs.record import ABSENT, Flag, Record
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.reader.dialects.generic import DIFFUSION
from hpc_gpt.reader.records.draft import Draft
from hpc_gpt.reader.records.log_steps import LogSteps

_ALIKE = 0.05
_LEAST = 5  # figures that a comparison needs
_ABSURD = 100.0  # ratio of two figures of one quantity from which on one of them is absurd
_OF_RATE = ("tokens_per_s", "tflops_seed", "tflops_hardware", "tflops_model", "mfu", "hfu")
_BY_FORMULA = ("tflops_seed", "tflops_hardware", "tflops_model")
_FLOPS_ALIKE = 0.1  # programs count a norm, a head or the causal half of attention in different ways
_GROWN = 3.0  # times the first figure: a rate that grows with the step by less may be a slow start
_STRAIGHT = 0.995  # correlation of the step with what only grows with it


def drop_growing_rates(draft: Draft, steps: LogSteps) -> None:
    """Drops the rates of a program that divides all tokens so far by the time of the last step."""
    for name in ("tokens_per_s", "tokens_per_s_gpu", "samples_per_s", "samples_per_s_gpu"):
        done = steps[name] * np.where(np.isfinite(steps["step_s"]), steps["step_s"], 1.0)
        rows = np.flatnonzero(np.isfinite(done) & np.isfinite(steps["step"]) & steps.counts)
        if len(rows) < _LEAST or not done[rows[-1]] > _GROWN * done[rows[0]] > 0:
            continue
        if np.ptp(steps["step"][rows]) and np.corrcoef(steps["step"][rows], done[rows])[0, 1] > _STRAIGHT:
            first, last = (steps[name][row] for row in (rows[0], rows[-1]))
            draft.flag(f"{name} grows with the step, from {first:,.0f} to {last:,.0f}: it is no rate, and left out")
            del steps.columns[name]


def doubt_flops(record: Record) -> Record:
    """The record without TFLOPs above the peak of its device, or of every device if it is not known; no share of a peak
    is above 1. If the program's own figure is possible but is none of those by formula, a flag gives both."""
    peaks = DEVICES[record.device].peaks if record.device in DEVICES else {}
    peak = max(peaks.values() or (most for each in DEVICES.values() for most in each.peaks.values()))
    what = f"the peak of {record.device}" if peaks else "the peak of every device"
    gone, flags = dict[str, None](), [*record.flags]
    for name in ("tflops_printed", *_BY_FORMULA, "mfu", "hfu"):
        figure, is_share = getattr(record, name) or 0.0, name in ("mfu", "hfu")
        if figure > (1 if is_share else peak):
            gone[name] = None
            flags.append(Flag(f"{name} would be {figure:,.4g}, above {1 if is_share else what}: left out", "absurd"))
    own = [figure for name in _BY_FORMULA if name not in gone and (figure := getattr(record, name))]
    printed = record.tflops_printed if "tflops_printed" not in gone else None
    if own and printed and all(abs(figure / printed - 1) > _FLOPS_ALIKE for figure in own):
        by_shape = own[-1]  # tflops_model, if it is known
        flags.append(f"the program prints {printed:,.4g} TFLOP/s a GPU, by shape and step time it is {by_shape:,.4g}")
    sources = {**record.sources, **dict.fromkeys(gone, "null: impossible")}
    return replace(record, **gone, sources=sources, flags=flags)  # type: ignore[arg-type]


def doubt_rates(record: Record, steps: LogSteps) -> Record:
    """The record without a rate that the program's own rate contradicts, and without the figures that follow from it.

    If the program's arithmetic explains that, or too few lines show it, its rate per GPU is replaced instead.
    """
    checked = _without_doubtful(record, steps)
    speed, gpus, printed = checked.tokens_per_s, checked.gpus, checked.tokens_per_s_gpu
    if not speed or not gpus or not printed or abs(printed * gpus / speed - 1) <= _ALIKE:
        return checked
    message = (
        f"the program prints {printed:,.0f} tokens/s per GPU, but the total over {gpus} GPUs gives {speed / gpus:,.0f}"
    )
    flags = checked.flags if len(checked.flags) > len(record.flags) else [*checked.flags, message]
    sources = {**checked.sources, "tokens_per_s_gpu": "tokens_per_s / gpus"}
    return replace(checked, tokens_per_s_gpu=speed / gpus, flags=flags, sources=sources)


def _without_doubtful(record: Record, steps: LogSteps) -> Record:
    if not record.tokens_per_s or not record.step_s:
        return record
    printed, source = _printed_rate(record, steps), record.sources.get("tokens_per_s", "")
    if printed is None or "the program's own" in source:  # nothing else gives the rate
        return record
    ratio = printed / record.tokens_per_s
    if abs(ratio - 1) <= _ALIKE or _same_tokens(record, steps):
        return record
    sizes = "the tokens of a step" if "per step" in source else "batch, sequence"
    message = f"the program prints {printed:,.0f} tokens/s, but {sizes} and step time give {record.tokens_per_s:,.0f}"
    reason, kind = _arithmetic(record, ratio), "disagrees" if 1 / _ABSURD < ratio < _ABSURD else "absurd"
    if reason:
        return replace(record, flags=[*record.flags, Flag(f"{message}: {reason}", kind)])
    derived = ["tokens_per_s_gpu"] if record.sources.get("tokens_per_s_gpu") == "tokens_per_s / gpus" else []
    gone = {name: None for name in (*_OF_RATE, *derived) if getattr(record, name) is not None}
    sources = {name: source for name, source in record.sources.items() if name not in gone}
    return replace(record, **gone, sources=sources, flags=[*record.flags, Flag(f"{message}: left out", kind)])  # type: ignore[arg-type]


def _same_tokens(record: Record, steps: LogSteps) -> bool:
    """Whether rate and time of the same lines give the tokens of a step: the time may change during a run."""
    tokens = steps["tokens_per_s"] * steps["step_s"]
    steady = tokens[steps.steady & np.isfinite(tokens)]
    size = (record.global_batch or 0) * (record.seq or 0)
    return bool(size and len(steady) >= _LEAST and abs(float(np.median(steady)) / size - 1) <= _ALIKE)


def _printed_rate(record: Record, steps: LogSteps) -> float | None:
    """The tokens/s of the job that the program prints; None without any, or if the rate itself gave step_s."""
    if not np.isfinite(steps["step_s"]).any():
        return None
    sized = record.global_batch and record.seq
    for name, factor in (
        ("tokens_per_s", 1),
        ("tokens_per_s_gpu", record.gpus),
        ("samples_per_s", record.seq if sized else None),
        ("samples_per_s_gpu", (record.seq or 0) * (record.gpus or 0) if sized else None),
    ):
        steady = steps[name][steps.steady & np.isfinite(steps[name])]
        later = steady[len(steady) // 2 :]  # a running mean comes near its figure with time
        if factor and len(later) >= _LEAST and float(np.median(later)) > 0:
            return float(np.median(later)) * factor
    return None


def _arithmetic(record: Record, ratio: float) -> str:
    """Why a program's rate is `ratio` times the true one; "" if no known reason explains it."""
    for count, what in (
        (record.micro_batches, "micro-batches"),
        (record.dp, "data-parallel ranks"),
        (record.cp, "context-parallel ranks"),
        (record.gpus, "GPUs"),
    ):
        if count and abs(ratio * count - 1) <= _ALIKE:
            return f"it counts one of {count} {what}"
        if count and abs(ratio / count - 1) <= _ALIKE:
            return f"each of {count} {what} counts all tokens"
    return ""


# {figure: the figures that give it if the program does not print it}
_FOLLOWS_FROM: Mapping[str, tuple[str, ...]] = {
    "step_s": (),
    "global_batch": ("micro_batch", "micro_batches", "dp"),
    "seq": (),
    "tokens_per_s": ("global_batch", "seq", "step_s"),
    "params": ("hidden", "layers", "heads", "vocab"),
    "tflops_hardware": ("step_s", "global_batch", "seq", "gpus", "layers", "hidden", "vocab", "recompute"),
}
_NOT_PRINTED = dict.fromkeys(_FOLLOWS_FROM, "no line states it") | {"step_s": "no line gives the time of steps alone"}
_BY_KIND = ("tokens_per_s", "tflops_hardware")  # figures that another statement can contradict


def flag_absent(record: Record, draft: Draft) -> Record:
    """The record with a flag for each main figure that is null: the unknown inputs, or the statement that contradicts
    it."""
    flags = list(record.flags)
    of_text = () if DIFFUSION in draft else ("seq", "tokens_per_s", "params", "tflops_hardware")
    for name, inputs in _FOLLOWS_FROM.items():
        if getattr(record, name) is None and name in ("step_s", "global_batch", *of_text):
            flags.append(Flag(f"{name} is null: {_why_null(record, draft, name, inputs)}", ABSENT))
    return replace(record, flags=flags)


def _why_null(record: Record, draft: Draft, name: str, inputs: tuple[str, ...]) -> str:
    inputs = ("seq",) if name == "global_batch" and draft.whole("global_batch_tokens") else inputs
    missing = [figure for figure in inputs if getattr(record, figure) is None]
    reasons = [f"{', '.join(missing)} not known"] if missing else []
    source = record.sources.get("tflops_hardware" if name == "params" and not missing else name, "")
    if source.startswith("null: "):
        reasons.append(source.removeprefix("null: "))
    if not reasons and name in _BY_KIND:
        reasons += [flag for flag, kind in record.all_flags if kind in ("disagrees", "absurd")][-1:]
    return "; ".join(reasons) or _NOT_PRINTED[name]
