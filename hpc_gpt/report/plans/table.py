"""A search as text: the best of each layout, best first, and why the others lose."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TypeVar

from hpc_gpt.plan.figures import Figures
from hpc_gpt.plan.search import Candidate, Searched
from hpc_gpt.report.plans.bars import memory_bar, time_bar
from hpc_gpt.report.plans.words import PARTS, count_words, does_not_fit, loses, seconds, settings_words
from hpc_gpt.words import Grid, plain

T = TypeVar("T")

LINES = 7  # that fit, and half as many that do not
_HEADINGS = (
    "Layout", "Engine", "Batch", "Settings", "Memory", "GiB", "Step s", "Tokens/s", "Time", "Against the best"
)  # fmt: skip
_RIGHT = (False, False, True, False, False, True, True, True, False, False)


def as_table(searched: Searched, width: int | None, blocks: bool, lines: int = LINES) -> str:
    """An aligned table, a line a layout; where `width` columns cannot hold it, with what is words on a line of its own,
    or as a block a layout (None: any width)."""
    best = searched.best_of_splits
    shown = [*best[:lines], *searched.too_large[: max(1, lines // 2)]]
    grid = Grid(_HEADINGS, _RIGHT, [_cells(candidate, best[0], blocks) for candidate in shown])
    if width is None or grid.width <= width:
        return grid.aligned()
    narrow = Grid(_figures_of(_HEADINGS), _figures_of(_RIGHT), [_figures_of(cells) for cells in grid.lines])
    if narrow.width <= width:
        head, *rows = narrow.aligned().splitlines()
        both = [f"{row}\n{_words(cells, width)}\n" for row, cells in zip(rows, grid.lines, strict=True)]
        return f"{head}\n" + "".join(both)
    margin = max(map(len, _HEADINGS[1:]))
    return "\n".join(_block(cells, margin, width) for cells in grid.lines)


def _cells(candidate: Candidate, best: Candidate, blocks: bool) -> list[str]:
    training, step = candidate.training, candidate.step
    return [
        str(candidate.split),
        training.engine,
        f"{training.micro_batch} x {training.micro_batches}",
        settings_words(training),
        memory_bar(candidate.need_gib, candidate.card_gib, 10, blocks),
        f"{candidate.need_gib:.1f}",
        seconds(step.step_s) if step else "-",
        f"{candidate.tokens_per_s:,.0f}" if step else "-",
        time_bar(step, 20) if step else "-",
        loses(candidate, best) if step else does_not_fit(candidate),
    ]


def _figures_of(cells: Sequence[T]) -> list[T]:
    """The columns whose cells are short."""
    return [cells[place] for place in (0, 4, 5, 6, 7, 8)]


def _words(cells: Sequence[str], width: int) -> str:
    engine, batch, settings, against = cells[1], cells[2], cells[3], cells[9]
    text = f"{engine} {batch}" + (f", {settings}" if settings != "-" else "") + f": {against}"
    return textwrap.fill(text, width, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)


def _block(cells: Sequence[str], margin: int, width: int) -> str:
    text = f"{cells[0]}\n"
    for heading, cell in zip(_HEADINGS[1:], cells[1:], strict=True):
        if cell != "-":
            lead = f"  {heading:<{margin}}  "
            text += textwrap.fill(cell, max(width, 40), initial_indent=lead, subsequent_indent=" " * len(lead)) + "\n"
    return text


def legend(searched: Searched) -> str:
    """What the letters of the bars stand for, of those that can occur."""
    used = [
        part
        for part in PARTS
        if any(getattr(candidate.step, part.field) > 0 for candidate in searched.best_of_splits if candidate.step)
    ]
    return "batch: samples of a micro-batch x micro-batches; time: " + ", ".join(
        f"{part.letter} {part.name}" for part in used
    )


def heading(searched: Searched, name: str, params: int) -> str:
    """What was asked, and how much of it fits."""
    question, machine = searched.question, searched.machine
    batch = f"global batch {question.global_batch}" if question.global_batch else (
        f"micro-batches: {question.settled['micro_batches']}"
    )  # fmt: skip
    total = searched.fitting + searched.not_fitting
    card = f"{question.gpus} {machine.device} ({machine.memory_gib:.3g} GiB)"
    fitting = f"{searched.fitting:,} of {total:,} settings fit"
    return plain(
        f"{name} ({count_words(params)} parameters) on {card}, {batch} x {question.shape.seq} tokens, "
        f"{question.dtype}: {fitting}"
    )


def figures_words(figures: Figures, gpus: int) -> list[str]:
    """Of the best: a few lines, each figure by its name."""
    low, high = figures.step_s_low, figures.step_s_high
    return [
        f"step {seconds(figures.step_s)} s ({seconds(low)} to {seconds(high)}), {figures.tokens_per_s:,.0f} tokens/s, "
        f"{figures.tokens_per_s_per_gpu:,.0f} a GPU",
        f"a GPU: tflops_model {figures.tflops_model:.1f}, tflops_hardware {figures.tflops_hardware:.1f}, "
        f"tflops_seed {figures.tflops_seed:.1f}; mfu {100 * figures.mfu:.1f} %, hfu {100 * figures.hfu:.1f} %",
        f"{tokens_words(figures.budget_tokens)} tokens: {_days(figures.days)} on {gpus} GPUs, "
        f"{figures.gpu_hours:,.0f} GPU-hours",
    ]


def left_out_words(searched: Searched) -> str:
    """Layouts that were left out, counted by why; nothing where none was."""
    parts = [f"{count} as {reason}" for reason, count in searched.left_out.items()]
    if searched.too_large:
        parts.append(f"{len(searched.too_large)} as none of their settings fits")
    return f"layouts left out: {'; '.join(parts)}" if parts else ""


def unchecked(searched: Searched) -> str:
    """What the search could not look at; nothing where it looked at all."""
    moved = any(candidate.training.offload != "none" for candidate in searched.candidates)
    if not moved or searched.machine.host_memory_gib is not None:
        return ""
    return "how much memory a host has is not known: give host_memory_gib in the profile's [machine] to check offload"


def tokens_words(tokens: float) -> str:
    """A budget of tokens.

    >>> tokens_words(300e9), tokens_words(2.5e6), tokens_words(15e12)
    ('300e9', '2.5e6', '15,000e9')
    """
    unit, power = (1e9, 9) if tokens >= 1e9 else (1e6, 6)
    return f"{tokens / unit:,.5g}e{power}"


def _days(days: float) -> str:
    return f"{days:,.1f} days" if days >= 1 else f"{24 * days:.1f} hours"


def wrapped(text: str, width: int | None) -> list[str]:
    """The text in lines of the terminal; in one where there is none (None)."""
    if width is None or len(text) <= width:
        return [text]
    return textwrap.wrap(text, max(width, 20), subsequent_indent="  ", break_on_hyphens=False)
