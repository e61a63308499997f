"""A plan as one page with charts of the memory of each stage and the time of a step.

The file needs no server, network, script or other file. The parts of a bar differ by hatching.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_gpt import __version__
from hpc_gpt.core.columns import filled
from hpc_gpt.core.files import replace_whole
from hpc_gpt.planner.figures import figures_in, needs_most, plan_figures, summary
from hpc_gpt.planner.search import Candidate, Searched
from hpc_gpt.planner.table import (
    PARTS,
    PLAN_COLUMNS,
    STAGE_COLUMNS,
    PlanRow,
    engine_text,
    heading,
    left_out_text,
    unchecked,
)
from hpc_gpt.report.page import asset, check_page_target, csp_hash, page_environment
from hpc_gpt.report.svg import Svg, drawing, element, escaped, ornament

_LINES = 40
_DRAWN = ("card", "time")  # columns of a terminal that the page draws
_FIRST = ("layout", "memory", "step", "tokens_per_s")  # columns that a phone shows without scrolling; the others follow
CHARTED = 6
_MARKER = '<meta name="generator" content="hpc-gpt plan'
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
_REST = "not allocated: reserved, context"
# The most stages in a chart; they are evenly spread.
STAGES = 24
_ROW, _LABEL, _BAR = 38, 18, 14  # a row of a chart, and in it the line of its label and its bar
_WIDEST = 99.0  # percent of a chart's width
_CARD, _MOST = 40.0, 110.0  # the card's width in a bar of the table, and the longest bar: a longer one ends in a tip
# The hatching of each part, by its place; the first is plain.
_HATCHES = (
    "", "M0 8L8 0", "M0 0L8 8", "M0 4H8", "M4 0V8", "M0 4H8M4 0V8", "M0 8L8 0M0 0L8 8", "M2 2h1M6 6h1", "M0 2H8M0 6H8",
    "M2 0V8M6 0V8",
)  # fmt: skip


def check_page(path: Path) -> None:
    """Raises ConfigError if `path` has another file than a plan's page, which alone is overwritten."""
    check_page_target(path, _MARKER, "plan")


def write_plan_page(path: Path, searched: Searched, budget_tokens: float, name: str, params: int, command: str) -> None:
    """Writes the page completely or not at all."""
    check_page(path)
    replace_whole(path, build_plan_page(searched, budget_tokens, name, params, command))


def build_plan_page(searched: Searched, budget_tokens: float, name: str, params: int, command: str) -> str:
    """The page's text: a pure function of the search and this version."""
    best = searched.best_of_layouts
    shown = [*best[:_LINES], *searched.too_large[: _LINES // 2]]
    charted = [*best[:CHARTED], *searched.too_large[:1]]
    style = asset("page.css") + asset("plan.css")
    page: str = page_environment().get_template("report/plan.html.j2").render(
        version=__version__,
        name=name,
        gpus=searched.question.gpus,
        device=searched.machine.device,
        card=f"{searched.machine.memory_gib:.3g}",
        style=Svg(style),
        style_hash=csp_hash(style),
        hatches=hatches(),
        summary=heading(searched, name, params),
        columns=sorted(
            (column for column in PLAN_COLUMNS if column.keys[0] not in _DRAWN),
            key=lambda column: column.keys[0] not in _FIRST,
        ),
        rows=[
            (PlanRow(candidate, best[0] if best else candidate), _row_class(candidate, best), _memory_bar(candidate))
            for candidate in shown
        ],
        left_out=left_out_text(searched),
        unchecked=unchecked(searched),
        best=_best(searched, budget_tokens),
        command=command,
        memories=memory_section(charted),
        times=time_section(best[:_LINES]),
    )  # fmt: skip
    return page


def _best(searched: Searched, budget_tokens: float) -> dict[str, Any] | None:
    """The best layout as texts and figures; None if nothing fits."""
    if not searched.candidates:
        return None
    best = searched.candidates[0]
    figures, run = figures_in(searched, best, budget_tokens), best.training
    assert figures is not None
    return {
        "title": "Best" if searched.best is not None else "Fastest",
        "layout": best.layout,
        "settings": f"{engine_text(run)}; batch {run.micro_batch} x {run.micro_batches}; {needs_most(best)}.",
        "figures": summary(plan_figures(best, figures)),
    }


def _row_class(candidate: Candidate, best: Sequence[Candidate]) -> str:
    """The CSS classes of a row, for its colour; the row's text says the same."""
    if candidate.step is None:
        return "impossible"
    return " ".join(("best",) * (candidate is best[0]) + ("tight",) * candidate.is_tight)


def _memory_bar(candidate: Candidate) -> Svg:
    """A bar of the needed memory over a frame for the card; the part that does not fit is outside it, in red."""
    long = _CARD * candidate.need_gib / candidate.card_gib
    if long > _CARD:
        long = max(long, _CARD + 4)  # visible at any size
    filled = min(long, _MOST - 6) if long > _MOST else long
    bar = element("rect", x=0, y=1, width=min(filled, _CARD), height=10, class_="bar")
    if filled > _CARD:
        bar += element("rect", x=_CARD, y=1, width=filled - _CARD, height=10, class_="bar over")
    if long > _MOST:
        bar += element("polygon", points=f"{filled:.1f},1 {_MOST:.1f},6 {filled:.1f},11", class_="bar over")
    frame = element("rect", x=0.5, y=0.5, width=_CARD, height=11, class_="frame card-frame")
    return ornament(bar + frame, max(_CARD + 1, min(long, _MOST)), 12, "bars")


def hatches() -> Svg:
    """The fill patterns of all drawings, in an image without visible content."""
    box = {"width": 8, "height": 8, "patternUnits": "userSpaceOnUse"}
    patterns = ""
    for place, path in enumerate(_HATCHES):
        if path:
            patterns += element("pattern", element("path", d=path, class_="hatch"), id=f"hatch-{place}", **box)
    return ornament(element("defs", patterns), 0, 0, "hatches")


# A section has charts that share a legend of (swatch, text); a chart is a drawing and a table of its figures.
def memory_section(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """A chart for each candidate: a bar for each stage against the card."""
    charts = [_memory_chart(candidate, place) for place, candidate in enumerate(candidates)]
    text = (
        "A bar is the peak memory of one GPU of a stage, in GiB; the dashed line is the card, and the part above it is "
        "red. In addition to allocated memory a bar has the memory that PyTorch reserves and that CUDA and NCCL hold."
    )
    legend = [_legend_entry(place, name) for place, name in enumerate((*MEMORY_PARTS, _REST))]
    return {
        "anchor": "memory", "title": "Memory of each stage", "words": text, "legend": legend, "charts": charts
    }  # fmt: skip


def time_section(candidates: Sequence[Candidate]) -> dict[str, Any] | None:
    """One chart with a bar for each layout; None if nothing fits."""
    timed = [candidate for candidate in candidates if candidate.step is not None]
    if not timed:
        return None
    used = [part for part in PARTS if any(getattr(one.step, part.field) > 0 for one in timed)]
    tokens = max(one.training.global_batch * one.training.shape.seq for one in timed)
    rows, figures = [], []
    for one in timed:
        scale = tokens / (one.training.global_batch * one.training.shape.seq)
        seconds = [getattr(one.step, part.field) * scale for part in used]
        rows.append((str(one.layout), seconds))
        figures.append([str(one.layout), *(f"{part_s:.3g}" for part_s in seconds), f"{sum(seconds):.4g}"])
    name = "Time of a step by layout"
    parts = [(PARTS.index(part), part.name) for part in used]
    picture = _bars(name, rows, parts, None, "s", "time-0")
    headings = ["Layout", *(part.name for part in used), "step"]
    chart = {"drawing": picture, "caption": f"{name}, seconds", "headings": headings, "rows": figures}
    text = f"Seconds of one step of {tokens:,} tokens, by part. The parts: " + "; ".join(
        f"{part.name}, {part.means}" for part in used
    )
    legend = [_legend_entry(*part) for part in parts]
    return {
        "anchor": "time", "title": "Time of a step", "words": f"{text}.", "legend": legend, "charts": [chart]
    }  # fmt: skip


def _memory_chart(candidate: Candidate, place: int) -> dict[str, Any]:
    stages, columns = candidate.memory.stages, filled(STAGE_COLUMNS, candidate.memory.stages)
    shown = _shown(len(stages), candidate.memory.deciding)
    rows, figures = [], []
    for number in shown:
        stage = stages[number]
        sizes = [float(getattr(stage, name)) for name in MEMORY_PARTS]
        unallocated = max(0.0, stage.nvidia_smi - stage.allocated)
        mark = " (decides)" if number == candidate.memory.deciding else ""
        rows.append((f"stage {number}{mark}", [*sizes, unallocated]))
        figures.append([f"{number}", *(column.show(stage) for column in columns)])
    name = f"Memory of {candidate.layout}"
    if len(shown) < len(stages):
        name += f", {len(shown)} of {len(stages)} stages"
    parts = list(enumerate((*MEMORY_PARTS, _REST)))
    picture = _bars(name, rows, parts, candidate.card_gib, "GiB", f"memory-{place}")
    headings = ["Stage", *(column.heading for column in columns)]
    return {"drawing": picture, "caption": f"{name}, GiB", "headings": headings, "rows": figures}


def _shown(stages: int, deciding: int) -> list[int]:
    """The stages to show: all, or STAGES of them, evenly spread, with the first, the last and the deciding one."""
    if stages <= STAGES:
        return list(range(stages))
    spread = {round(place * (stages - 1) / (STAGES - 1)) for place in range(STAGES)}
    return sorted(spread | {deciding})


def _bars(
    title: str,
    rows: Sequence[tuple[str, Sequence[float]]],
    parts: Sequence[tuple[int, str]],
    limit: float | None,
    unit: str,
    anchor: str,
) -> Svg:
    """Bars of `parts`, (place of the hatching, name), each below its label and sum; `limit` is a line across all."""
    most = max([sum(sizes) for _, sizes in rows] + ([limit] if limit else []))
    scale = _WIDEST / most if most > 0 else 0.0
    content, description = "", []
    for row, (label, sizes) in enumerate(rows):
        total = sum(sizes)
        top = row * _ROW + 2.0
        content += element("text", escaped(f"{label}: {total:.3g} {unit}"), x=0, y=top + 13)
        left = 0.0
        for (place, _), size in zip(parts, sizes, strict=True):
            wide = size * scale
            if wide >= 0.01:
                content += _part(f"{left:.2f}%", top + _LABEL, f"{wide:.2f}%", place)
            left += wide
        if limit and total > limit:
            above = f"{left - limit * scale:.2f}%"
            content += element(
                "rect", x=f"{limit * scale:.2f}%", y=top + _LABEL, width=above, height=_BAR, class_="over"
            )
        amounts = ", ".join(f"{name} {size:.3g}" for (_, name), size in zip(parts, sizes, strict=True) if size > 0)
        description.append(f"{label} {total:.3g} {unit}: {amounts}")
    height = len(rows) * _ROW + 4
    if limit:
        at = f"{limit * scale:.2f}%"
        content += element("line", x1=at, x2=at, y1=0, y2=height, class_="card")
        description.insert(0, f"The card has {limit:.3g} {unit}")
    return drawing(content, None, height, title, ". ".join(description[:40]), anchor)


def _part(left: float | str, top: float, wide: float | str, place: int) -> str:
    box: dict[str, Any] = {"x": left, "y": top, "width": wide, "height": _BAR}
    drawn = element("rect", class_=f"share share-{place}", **box)
    return drawn + (element("rect", fill=f"url(#hatch-{place})", **box) if _HATCHES[place] else "")


def _legend_entry(place: int, text: str) -> tuple[Svg, str]:
    return ornament(_part(0.0, 0.0, 14.0, place), 14, 14, "swatch"), text
