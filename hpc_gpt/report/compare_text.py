"""A comparison as text and as JSON."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpc_gpt.core.columns import peak
from hpc_gpt.core.format import counted, cut, plain, show_digits, show_value, some, wrapped
from hpc_gpt.core.runs.record import FIGURES, SCHEMA, finite
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.reader.runs.own_run import DIALECT
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.compare import Comparison, Losses, SettingDifference, Speed
from hpc_gpt.report.difference import LEVEL, Interval
from hpc_gpt.report.tables import show_layout, show_name

# The number of differing settings shown; --json has all.
SHOWN = 24
_LONGEST = 60
_SPEEDS = {
    **{key: FIGURES[key] for key in ("step_s", "tokens_per_s", "tokens_per_s_gpu")},
    "tflops_model": replace(FIGURES["tflops_model"], label="tflops_model, TFLOP/s per GPU", unit=""),
}


def verdict_text(comparison: Comparison, a: str, b: str) -> str:
    """The verdict on B: `faster by 4 % (3.1 to 4.9)`, `no difference shown (-0.8 to +1.1 %)`, `tokens/s 0.054 x; no
    interval can be given: …`."""
    if comparison.verdict == "same_run":
        return f"the same run as {a}"
    if comparison.verdict == "identical":
        return f"the same steps and figures as {a}: two copies of one log"
    speed = comparison.speeds[0]
    interval = speed.interval
    if interval is None:
        why = "; ".join(f"{(a, b)[place]} {reason}" for place, reason in comparison.reasons)
        ratio = f"{_SPEEDS[speed.name].label} {speed.b / speed.a:.3g} x; " if speed.a and speed.b else ""
        return f"{ratio}no interval can be given: {why or 'a step is not the same work in both'}"
    if comparison.verdict == "no_difference":
        return f"no difference shown ({percent_text(interval)[1]} %)"
    middle, ends = percent_text(interval)
    return f"{comparison.verdict} by {middle} % ({ends})"


def percent_text(interval: Interval) -> tuple[str, str]:
    """Returns (the change, its interval) in percent: with signs if no difference is shown, else without.

    >>> percent_text(Interval(4.02, 3.11, 4.94)), percent_text(Interval(0.1, -0.83, 1.07))
    (('4', '3.1 to 4.9'), ('+0', '-0.8 to +1.1'))
    """
    width = max(interval.high - interval.low, 1e-9)
    digits = min(max(0, 1 - math.floor(math.log10(width))), 2)
    if not interval.is_shown:
        return (
            f"{interval.change:+.{max(0, digits - 1)}f}",
            f"{interval.low:+,.{digits}f} to {interval.high:+,.{digits}f}",
        )
    low, high = sorted((abs(interval.low), abs(interval.high)))
    while digits < 6 and float(f"{low:.{digits}f}") == 0:
        digits += 1
    return f"{abs(interval.change):,.{max(0, digits - 1)}f}", f"{low:,.{digits}f} to {high:,.{digits}f}"


def comparison_text(comparison: Comparison, a: str, b: str, width: int | None = None) -> str:
    """The verdict, its figures, how both runs ended, the settings that differ and the notes, one per line; lines are
    wrapped at `width`."""
    lines = [
        (_SPEEDS[speed.name].label, _speed(speed, place, comparison)) for place, speed in enumerate(comparison.speeds)
    ]
    lines += [("loss", text) for text in _loss(comparison.losses, b)]
    lines += [("bpb", text) for text in _loss(comparison.bpb, b, "bpb", "common evaluation")]
    for name, key in (("memory reserved", "memory_reserved_gib"), ("memory allocated", "memory_allocated_gib")):
        peaks = [peak(getattr(run.record, key)) for run in (comparison.a, comparison.b)]
        if any(peaks):  # a run on a CPU has no peak
            change = f", {peaks[1] - peaks[0]:+.2f} GiB" if peaks[0] and peaks[1] else ""
            of_a, of_b = ("unknown" if peak_gib is None else f"{show_digits(peak_gib)} GiB" for peak_gib in peaks)
            lines.append((name, f"{of_a} -> {of_b}{change}"))
    lines.append(("ended", f"{_ended(comparison.a)} -> {_ended(comparison.b)}"))
    stated = [difference for difference in comparison.differences if difference.is_stated]
    text = wrapped(f"{b} against {a}: {verdict_text(comparison, a, b)}", width) + _columns(lines, "  ", width)
    if stated:
        values = [(difference.key, " -> ".join(_values(difference.a, difference.b))) for difference in stated[:SHOWN]]
        text += ["  settings that differ:", *_columns(values, "    ", width)]
    for note in _notes(comparison, stated, a, b):
        text += wrapped(f"  note: {plain(note)}", width)
    return "\n".join([*text, ""])


def _columns(lines: Sequence[tuple[str, str]], indent: str, width: int | None) -> list[str]:
    margin = max(len(plain(name)) for name, _ in lines)
    whole = [f"{indent}{plain(name):<{margin}}  {plain(line)}" for name, line in lines]
    return [piece for line in whole for piece in wrapped(line, width, len(indent) + margin + 2)]


def title(run: RunRead) -> str:
    """The run on one line: name, layout, GPUs, engine."""
    record = run.record
    parts = [show_name(record)]
    if record.tp:
        parts.append(show_layout(record))
    if record.gpus:
        what = "rank" if record.dialect == DIALECT and not record.device else "GPU"
        parts.append(counted(record.gpus, what))
    parts += [str(part) for part in (record.device, record.engine, record.dtype) if part]
    return plain(", ".join(parts))


def _speed(speed: Speed, place: int, comparison: Comparison) -> str:
    figure = _SPEEDS[speed.name]
    text = f"{figure.digits(speed.a)} -> {figure.digits(speed.b)} {figure.unit}".rstrip()
    if place == 0 and all(comparison.rounds):
        of_a, of_b = comparison.rounds
        text += f", medians of {counted(of_a, 'round')} {'each' if of_a == of_b else f'and {of_b}'}"
    elif place == 0 and all(comparison.steps):
        text += f", medians of {comparison.steps[0]:,} and {comparison.steps[1]:,} steady steps"
    if place > 0 and speed.interval is not None:
        middle, ends = percent_text(speed.interval)
        word = "higher" if speed.interval.change > 0 else "lower"
        text += f", {word} by {middle} % ({ends})" if speed.interval.is_shown else f", no difference shown ({ends} %)"
    return text


def _loss(losses: Losses | None, b: str, name: str = "loss", steps: str = "common step") -> list[str]:
    if losses is None:
        return []
    if losses.alike_steps == losses.common_steps:
        every = "all " if losses.common_steps > 1 else ""
        return [f"the same to the last digit at {every}{counted(losses.common_steps, steps)}"]
    text = f"{losses.a:.4g} -> {losses.b:.4g} at step {losses.last_common_step:,.0f}, the last that both have"
    if losses.alike_steps:
        first = counted(losses.alike_steps, steps).removeprefix("1 ")
        text += f"; the same to the last digit at the first {first}"
    if losses.tail is None:
        return [text]
    tail, over = losses.tail, f"over the last {counted(losses.tail_steps, steps)}"
    if not tail.is_shown:
        return [text, f"no difference shown {over} ({tail.low:+.2g} to {tail.high:+.2g})"]
    low, high = sorted((abs(tail.low), abs(tail.high)))
    word = "higher" if tail.change > 0 else "lower"
    by = f"{abs(tail.change):.2g} ({low:.2g} to {high:.2g})"
    return [text, f"they diverge: the {name} of {b} is {word} by {by} {over}"]


def _ended(run: RunRead) -> str:
    record = run.record
    return hide_secrets(f"{record.ended or 'unknown'}{f' ({cut(record.cause, 120)})' if record.cause else ''}")


def _values(*values: Any) -> list[str]:
    """The values as text. Floats keep up to ten digits, as settings may differ in the seventh. Texts longer than
    _LONGEST are cut to the part where they differ, from the word before it."""
    texts = [f"{value:.10g}" if isinstance(value, float) else show_value(value) for value in values]
    if any(len(text) > _LONGEST for text in texts):
        alike = (len(set(letters)) == 1 for letters in zip(*texts, strict=False))
        first_apart = sum(itertools.takewhile(bool, alike))
        word = texts[0].rfind(" ", 0, max(0, texts[0].rfind(" ", 0, first_apart)))
        begin = word if first_apart - word < _LONGEST // 2 else first_apart - _LONGEST // 4
        texts = [f"…{text[begin:]}" if begin > 0 else text for text in texts]
    return [cut(text, _LONGEST) for text in texts]


def _notes(comparison: Comparison, stated: Sequence[SettingDifference], a: str, b: str) -> list[str]:
    notes = [_named(note, a, b) for note in comparison.notes]
    if len(stated) > SHOWN:
        notes.append(f"{len(stated) - SHOWN} more settings differ: --json lists them")
    for side, name in (("a", a), ("b", b)):
        unshared = [difference for difference in comparison.differences if not difference.is_stated]
        keys = [difference.key for difference in unshared if getattr(difference, side) is not None]
        if keys:
            notes.append(
                f"only {name} states {counted(len(keys), 'setting')}: {some([cut(key, 40) for key in keys], 6)}"
            )
    return notes


def _named(note: str, a: str, b: str) -> str:
    return note.replace("{a}", a).replace("{b}", b)


def as_tables(comparisons: Sequence[Comparison], names: Sequence[str]) -> dict[str, Any]:
    """`{"schema": 1, "level": 0.95, "comparisons": [...]}`; a comparison per further run, with the first run."""
    tables = [
        finite(_tables(comparison, names[0], name)) for comparison, name in zip(comparisons, names[1:], strict=True)
    ]
    return {"schema": SCHEMA, "level": LEVEL, "comparisons": tables}


def _bounds(interval: Interval | None, *names: str) -> dict[str, float | None]:
    """The change, low end and high end of an interval under the three `names`; all None without an interval."""
    bounds = (interval.change, interval.low, interval.high) if interval else (None, None, None)
    return dict(zip(names, bounds, strict=True))


def _losses(losses: Losses | None) -> dict[str, Any] | None:
    if losses is None:
        return None
    figures = {key: value for key, value in vars(losses).items() if key != "tail"}
    return figures | _bounds(losses.tail, "tail_difference", "tail_low", "tail_high")


def _tables(comparison: Comparison, a: str, b: str) -> dict[str, Any]:
    runs = (comparison.a, comparison.b)
    return {
        "a": a,
        "b": b,
        "runs": [run.record.run for run in runs],
        "names": [run.record.name for run in runs],
        "verdict": comparison.verdict,
        "words": verdict_text(comparison, "A", "B"),
        "speeds": [
            {"name": speed.name, "a": speed.a, "b": speed.b}
            | _bounds(speed.interval, "faster_percent", "low_percent", "high_percent")
            for speed in comparison.speeds
        ],
        "steady_steps": list(comparison.steps),
        "rounds": list(comparison.rounds),
        "no_interval": [{"run": "ab"[place], "reason": reason} for place, reason in comparison.reasons],
        "differ": [vars(difference) for difference in comparison.differences if difference.is_stated],
        "stated_by_one": [vars(difference) for difference in comparison.differences if not difference.is_stated],
        "loss": _losses(comparison.losses),
        "bpb": _losses(comparison.bpb),
        "memory_allocated_gib": [run.record.memory_allocated_gib for run in runs],
        "memory_reserved_gib": [run.record.memory_reserved_gib for run in runs],
        "ended": [run.record.ended for run in runs],
        "cause": [hide_secrets(run.record.cause) if run.record.cause else None for run in runs],
        "notes": [_named(note, "A", "B") for note in comparison.notes],
    }
