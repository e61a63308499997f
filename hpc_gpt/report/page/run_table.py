"""The page's tables: the runs, with the source of each figure, and throughput and memory by layout, with bars."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from hpc_gpt.readers.runs import RunRead
from hpc_gpt.report.page.anomalies import ENDED_TEXTS, FAILED, ended_text
from hpc_gpt.report.page.svg import Svg, element, number, ornament, safe
from hpc_gpt.report.tables import peak_memory_gib, show_name
from hpc_gpt.runs.record import Record
from hpc_gpt.words import NOTHING, show_digits, show_params, show_share, show_whole

# Larger figures are shown in powers of ten, as no training has them.
_LARGEST = 1e18
BAR_WIDTH, BAR_HEIGHT = 150.0, 12.0
MOST_LINES = 60  # of the layouts


@dataclass(frozen=True)
class Heading:
    """A column's heading; `means` says what it holds."""

    text: str
    means: str
    right: bool = True


@dataclass(frozen=True)
class Cell:
    """A cell: its text, its sort key if the text is no number, and where the figure is from."""

    text: str
    sort: str = ""
    source: str = ""


@dataclass(frozen=True)
class Line:
    """A run's line: its name, how it ended (`sign`, `ended`), whether it failed (`bad`), and its other cells."""

    label: str
    sign: str
    ended: str
    bad: bool
    cells: Sequence[Cell]


@dataclass(frozen=True)
class _Column:
    heading: Heading
    keys: tuple[str, ...]
    value: Callable[[Record], float | str | None]
    show: Callable[[float], str] = show_digits


def layout_text(record: Record) -> str:
    """tp4-pp16-dp1, with the ZeRO stage if it is above 0; `-` if the layout is not known."""
    known = [f"{axis}{value}" for axis in ("tp", "pp", "dp") if (value := getattr(record, axis)) is not None]
    words = safe("-".join(known), 40)
    zero = f" ZeRO {safe(record.zero_stage, 10)}" if record.zero_stage else ""
    return (words + zero).strip() or NOTHING


def tokens_per_s_gpu(record: Record) -> float | None:
    """Tokens per second of one GPU."""
    tokens, gpus = number(record.tokens_per_s), number(record.gpus)
    return tokens / gpus if tokens is not None and gpus else None


def figure_text(show: Callable[[float], str], figure: float | None) -> str:
    """The figure as `show` writes it, very large and very small ones in powers of ten."""
    if figure is None:
        return NOTHING
    return show(figure) if abs(figure) < _LARGEST and (figure == 0 or abs(figure) > 1e-12) else f"{figure:.3g}"


def run_label(run: RunRead, place: int) -> str:
    """A run's name on the page: as in the terminal's table, else its file."""
    if run.record.name or run.record.run:
        return safe(show_name(run.record), 160)
    return safe(run.files[0].name, 160) if run.files else f"run {place + 1}"


def _params(figure: float) -> str:
    return show_params(int(figure))


def _plain(figure: float) -> str:
    return f"{figure:.0f}" if figure == int(figure) else show_digits(figure)


def rate_text(figure: float) -> str:
    """At least three digits, with commas between thousands."""
    return f"{figure:,.0f}" if abs(figure) >= 1000 else show_digits(figure)


def _time(record: Record) -> str | None:
    return record.started.replace("T", " ")[:16] if record.started else None


def _spread(record: Record) -> str | None:
    low, high = number(record.step_s_p10), number(record.step_s_p90)
    if low is None or high is None:
        return None
    return f"{figure_text(show_digits, low)}..{figure_text(show_digits, high)}"


def _key(text: str, key: str, means: str, show: Callable[[float], str] = show_digits) -> _Column:
    return _Column(Heading(text, means), (key,), lambda record: number(getattr(record, key)), show)


def _words(text: str, keys: tuple[str, ...], means: str, value: Callable[[Record], str | None]) -> _Column:
    return _Column(Heading(text, means, False), keys, value)


_COLUMNS = (
    _key("GPUs", "gpus", "GPUs of the whole run", _plain),
    _key("Size", "params", "parameters, a tied embedding counted once; 1 B = 10^9", _params),
    _words("Layout", ("tp", "pp", "dp", "zero_stage"), "tensor, pipeline and data parallel sizes; ZeRO stage",
           lambda record: words if (words := layout_text(record)) != NOTHING else None),
    _key("Step s", "step_s", "median seconds of the steady steps"),
    _Column(Heading("p10..p90 s", "10th and 90th percentile of the same steps; sorted by the 10th"),
            ("step_s_p10", "step_s_p90"), _spread),
    _key("Tokens/s", "tokens_per_s", "global batch x sequence / step time", show_whole),
    _Column(Heading("Tokens/s per GPU", "tokens/s / GPUs"), ("tokens_per_s", "gpus"), tokens_per_s_gpu,
            rate_text),
    _key("TFLOP/s seed", "tflops_seed", "per GPU: 8 P s B / (t n 1e12) with full recomputation, 6 without; seed 001"),
    _key("TFLOP/s hardware", "tflops_hardware", "per GPU: Narayanan et al. 2021, eq. 3, recomputation counted"),
    _key("TFLOP/s model", "tflops_model", "per GPU: (6 P + 12 L h s) s B / (t n 1e12), PaLM appendix B"),
    _key("TFLOP/s printed", "tflops_printed", "as the program prints it, by its own formula"),
    _key("MFU", "mfu", "TFLOP/s model over the device's dense peak", show_share),
    _Column(Heading("Memory GiB", "GPU memory of the stage with most: allocated, else reserved; 1 GiB = 2^30"),
            ("memory_allocated_gib", "memory_reserved_gib"), lambda record: peak_memory_gib(record)[0]),
    _key("Loss first", "loss_first", "loss at the first step"),
    _key("Loss last", "loss_last", "loss at the last step"),
    _key("Loss eval", "loss_eval", "loss of the last evaluation"),
    _key("Skipped steps", "skipped_steps", "steps without an update, as after an overflow", _plain),
    _key("NaN steps", "nan_steps", "steps whose loss is not a number", _plain),
    _Column(Heading("Attempts", "starts of the run"), ("attempts",),
            lambda record: float(len(record.attempts)) if record.attempts else None, _plain),
    _key("GPU hours", "gpu_hours", "GPUs x hours over all attempts"),
    _key("Glob-BS", "global_batch", "samples of one optimizer step over all GPUs", _plain),
    _key("Mic-BS", "micro_batch", "samples of one forward pass of a GPU", _plain),
    _key("Seq", "seq", "tokens of a sample", _plain),
    _words("Program", ("engine", "dialect"), "the engine, else the program whose log it is",
           lambda record: record.engine or record.dialect),
    _words("Device", ("device",), "the GPU", lambda record: record.device),
    _words("Started", ("started",), "UTC", _time),
)  # fmt: skip
SHOWN_KEYS = frozenset(key for column in _COLUMNS for key in column.keys) | {"ended"}
# A column of these with only zeros is left out.
_ZERO_IS_NOTHING = {"skipped_steps", "nan_steps"}


def table_of(runs: Sequence[RunRead], labels: Sequence[str], sources: bool) -> tuple[list[Heading], list[Line]]:
    """Headings and lines; a column without any value is left out. `sources`: cells have the source of their figure."""
    grid = [[_cell(column, run.record, sources) for column in _COLUMNS] for run in runs]
    filled = [at for at, column in enumerate(_COLUMNS) if any(_says(column, line[at]) for line in grid)]
    lines = [
        _line(run.record, label, [cells[at] for at in filled])
        for run, label, cells in zip(runs, labels, grid, strict=True)
    ]
    return [_COLUMNS[at].heading for at in filled], lines


def ended_sign(ended: str | None) -> str:
    """A sign for how a run ended, shown beside the text."""
    if ended in ("done", "running", "pending"):
        return {"done": "✓", "running": "▶", "pending": "○"}[ended]
    level = ENDED_TEXTS.get(ended or "", ("", None))[1]
    return "✗" if level == FAILED else "?" if ended in (None, "unknown") else "■"


def _line(record: Record, label: str, cells: list[Cell]) -> Line:
    bad = ENDED_TEXTS.get(record.ended or "", ("", None))[1] == FAILED
    return Line(label, ended_sign(record.ended), ended_text(record.ended), bad, cells)


def _says(column: _Column, cell: Cell) -> bool:
    return cell.text != NOTHING and not (column.keys[0] in _ZERO_IS_NOTHING and cell.text == "0")


def _cell(column: _Column, record: Record, sources: bool) -> Cell:
    value = column.value(record)
    if value is None:
        cell = Cell(NOTHING)
    elif isinstance(value, str):
        cell = Cell(safe(value, 80), f"{number(record.step_s_p10):.6g}" if column.keys[0] == "step_s_p10" else "")
    else:
        text = figure_text(column.show, value)
        cell = Cell(text, sort if (sort := f"{value:.6g}") != text else "")
    return replace(cell, source=source_of(record, column.keys)) if sources and value is not None else cell


def source_of(record: Record, keys: Sequence[str]) -> str:
    """The sources of the keys' figures, each once."""
    return "; ".join(dict.fromkeys(safe(where, 240) for key in keys if (where := record.sources.get(key))))


@dataclass
class _Layout:
    record: Record
    steps: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    runs: int = 0


def layouts_of(runs: Sequence[RunRead]) -> tuple[list[dict[str, Any]], int]:
    """(layouts with a throughput or memory figure, by size, the largest first; the number of layouts left out)."""
    groups: dict[str, dict[tuple[object, ...], _Layout]] = defaultdict(dict)
    for run in runs:
        record = run.record
        tokens, (memory, kind) = tokens_per_s_gpu(record), peak_memory_gib(record)
        if tokens is None and memory is None:
            continue
        size = figure_text(_params, number(record.params))
        key = (layout_text(record), record.gpus, _program(record))
        entry = groups[size].setdefault(key, _Layout(record))
        entry.runs += 1
        entry.tokens += [] if tokens is None else [tokens]
        entry.memory += [] if memory is None else [memory]
        entry.kinds |= {kind} if kind else set()
        entry.steps += [step] if (step := number(record.step_s)) is not None else []
    shown: list[dict[str, Any]] = []
    room, left_out = MOST_LINES, 0
    for size, entries in sorted(groups.items(), key=lambda item: -_largest_params(item[1])):
        lines = _layout_lines(list(entries.values()))
        left_out += max(0, len(lines) - room)
        if room > 0:
            title = "size not known" if size == NOTHING else f"{size} parameters"
            shown.append({"size": title, "lines": lines[:room]})
        room = max(0, room - len(lines))
    return shown, left_out


def stage_bars(figures: Sequence[float]) -> list[tuple[str, Svg]]:
    """(GiB, bar) of each pipeline stage; bars are relative to the highest."""
    known = [number(value) for value in figures[:256]]
    most = max((figure for figure in known if figure is not None), default=0.0)
    return [(figure_text(show_digits, figure), _bar(figure, most)) for figure in known]


def _layout_lines(entries: list[_Layout]) -> list[dict[str, Any]]:
    """A line for each layout: medians over its runs, as text and as bars relative to the greatest of its size."""
    most_tokens = max((median(entry.tokens) for entry in entries if entry.tokens), default=0.0)
    most_memory = max((max(entry.memory) for entry in entries if entry.memory), default=0.0)
    entries.sort(key=lambda entry: -median(entry.tokens) if entry.tokens else 0.0)
    lines = []
    for entry in entries:
        record = entry.record
        tokens = median(entry.tokens) if entry.tokens else None
        memory = max(entry.memory) if entry.memory else None
        kinds = f" {' or '.join(sorted(entry.kinds))}" if memory is not None else ""
        lines.append(
            {
                "layout": layout_text(record),
                "gpus": safe(record.gpus, 12) if record.gpus is not None else NOTHING,
                "program": _program(record),
                "runs": str(entry.runs),
                "step": figure_text(show_digits, median(entry.steps) if entry.steps else None),
                "tokens": figure_text(rate_text, tokens),
                "tokens_bar": _bar(tokens, most_tokens),
                "memory": figure_text(show_digits, memory) + kinds,
                "memory_bar": _bar(memory, most_memory),
            }
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
