"""A plan as one page: a file that needs no server, no network, no script and no other file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_gpt.plan.figures import Figures
from hpc_gpt.plan.search import Candidate, Searched
from hpc_gpt.report.page import asset, check_target, csp_hash, page_environment
from hpc_gpt.report.page.svg import Svg, element, ornament
from hpc_gpt.report.plans.charts import hatches, memory_section, time_section
from hpc_gpt.report.plans.table import figures_words, heading, left_out_words
from hpc_gpt.report.plans.words import does_not_fit, loses, seconds, settings_words
from hpc_gpt.small_files import replace_whole

LINES = 40
CHARTED = 6
MARKER = '<meta name="generator" content="hpc-gpt plan'


def check_page(path: Path) -> None:
    """ConfigError unless `write_page` may put its page there: anything but a plan's page is never overwritten."""
    check_target(path, MARKER, "plan")


def write_page(
    path: Path, searched: Searched, figures: Sequence[Figures], name: str, params: int, command: str
) -> None:
    """Writes the page, whole or not at all. `figures` are of the candidates, in order."""
    check_page(path)
    replace_whole(path, build_page(searched, figures, name, params, command))


def build_page(searched: Searched, figures: Sequence[Figures], name: str, params: int, command: str) -> str:
    """The page's text. A pure function of the search and this version."""
    from hpc_gpt import __version__

    best = searched.best_of_splits
    shown = [*best[:LINES], *searched.too_large[: LINES // 2]]
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
        lines=[_line(candidate, best[0] if best else candidate) for candidate in shown],
        left_out=left_out_words(searched),
        figures=figures_words(figures[0], searched.question.gpus) if figures else [],
        command=command,
        memories=memory_section(charted),
        times=time_section(best[:LINES]),
    )  # fmt: skip
    return page


def _line(candidate: Candidate, best: Candidate) -> dict[str, Any]:
    run, step = candidate.training, candidate.step
    return {
        "layout": str(candidate.split),
        "engine": run.engine,
        "batch": f"{run.micro_batch} x {run.micro_batches}",
        "settings": settings_words(run),
        "bar": _memory_bar(candidate),
        "memory": f"{candidate.need_gib:.1f}",
        "step": seconds(step.step_s) if step else "-",
        "tokens": f"{candidate.tokens_per_s:,.0f}" if step else "-",
        "why": loses(candidate, best) if step else does_not_fit(candidate),
    }


def _memory_bar(candidate: Candidate) -> Svg:
    filled = min(1.0, candidate.need_gib / candidate.card_gib)
    bar = element("rect", x=0, y=0, width=60 * filled, height=10, class_="bar")
    return ornament(bar + element("rect", x=0.5, y=0.5, width=59, height=9, class_="frame"), 60, 10, "bars")
