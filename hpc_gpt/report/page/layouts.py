"""Throughput and memory by layout, as lines with bars: runs of one size stand together, the fastest first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hpc_gpt.readers.runs.run_read import RunRead
from hpc_gpt.report.columns import NOTHING, peak_memory_gib, show_digits, show_params
from hpc_gpt.report.page.safe_text import number, safe
from hpc_gpt.report.page.svg import Svg, element, ornament
from hpc_gpt.report.page.table import figure_words, layout_words, rate_words, tokens_per_s_gpu
from hpc_gpt.runs.record import Record

BAR_WIDTH, BAR_HEIGHT = 150.0, 12.0
MOST_LINES = 60


@dataclass(frozen=True)
class LayoutLine:
    """One layout: the medians over its runs, as text and as bars against the greatest of its size."""

    layout: str
    gpus: str
    program: str
    runs: str
    step: str
    tokens: str
    tokens_bar: Svg
    memory: str
    memory_bar: Svg


@dataclass(frozen=True)
class SizeGroup:
    """The layouts of one model size."""

    size: str
    lines: Sequence[LayoutLine]


@dataclass
class _Layout:
    record: Record
    steps: list[float]
    tokens: list[float]
    memory: list[float]
    kinds: set[str]
    runs: int = 0


def layouts_of(runs: Sequence[RunRead]) -> tuple[list[SizeGroup], int]:
    """The layouts that have a throughput or a memory figure, by size, the largest first; how many were left out."""
    groups: dict[str, dict[tuple[object, ...], _Layout]] = defaultdict(dict)
    for run in runs:
        record = run.record
        tokens, (memory, kind) = tokens_per_s_gpu(record), peak_memory_gib(record)
        if tokens is None and memory is None:
            continue
        size = figure_words(lambda figure: show_params(int(figure)), number(record.params))
        key = (layout_words(record), record.gpus, _program(record))
        entry = groups[size].setdefault(key, _Layout(record, [], [], [], set()))
        entry.runs += 1
        entry.tokens += [] if tokens is None else [tokens]
        entry.memory += [] if memory is None else [memory]
        entry.kinds |= {kind} if kind else set()
        entry.steps += [step] if (step := number(record.step_s)) is not None else []
    ordered = sorted(groups.items(), key=lambda item: -_largest_params(item[1]))
    shown: list[SizeGroup] = []
    room, left_out = MOST_LINES, 0
    for size, entries in ordered:
        lines = _lines(list(entries.values()))
        left_out += max(0, len(lines) - room)
        if room > 0:
            shown.append(SizeGroup("size not known" if size == NOTHING else f"{size} parameters", lines[:room]))
        room = max(0, room - len(lines))
    return shown, left_out


def stage_bars(figures: Sequence[float]) -> list[tuple[str, Svg]]:
    """(GiB, bar) of each pipeline stage, against the highest."""
    known = [number(value) for value in figures[:256]]
    most = max((figure for figure in known if figure is not None), default=0.0)
    return [(figure_words(show_digits, figure), _bar(figure, most)) for figure in known]


def _lines(entries: list[_Layout]) -> list[LayoutLine]:
    most_tokens = max((median(entry.tokens) for entry in entries if entry.tokens), default=0.0)
    most_memory = max((max(entry.memory) for entry in entries if entry.memory), default=0.0)
    entries.sort(key=lambda entry: -median(entry.tokens) if entry.tokens else 0.0)
    lines = []
    for entry in entries:
        tokens = median(entry.tokens) if entry.tokens else None
        memory = max(entry.memory) if entry.memory else None
        kinds = " or ".join(sorted(entry.kinds))
        lines.append(
            LayoutLine(
                layout_words(entry.record),
                safe(entry.record.gpus, 12) if entry.record.gpus is not None else NOTHING,
                _program(entry.record),
                str(entry.runs),
                figure_words(show_digits, median(entry.steps) if entry.steps else None),
                figure_words(rate_words, tokens),
                _bar(tokens, most_tokens),
                figure_words(show_digits, memory) + (f" {kinds}" if memory is not None else ""),
                _bar(memory, most_memory),
            )
        )
    return lines


def _program(record: Record) -> str:
    return safe(record.engine or record.dialect or NOTHING, 60)


def _largest_params(entries: dict[tuple[object, ...], _Layout]) -> float:
    return max(number(entry.record.params) or 0.0 for entry in entries.values())


def _bar(figure: float | None, most: float) -> Svg:
    share = figure / most if figure and most > 0 else 0.0
    frame = element("rect", x=0.5, y=0.5, width=BAR_WIDTH - 1, height=BAR_HEIGHT - 1, class_="frame")
    bar = element("rect", x=0, y=0, width=max(0.0, share) * BAR_WIDTH, height=BAR_HEIGHT, class_="bar")
    return ornament(frame + bar, BAR_WIDTH, BAR_HEIGHT, "bars")
