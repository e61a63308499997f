"""Records and their predictions as text: an aligned table, csv, Markdown, JSON, JSON lines, or one record as a block.

The columns are the usual ones in the order of Megatron-DeepSpeed's tables, or the ones that a user names. Nothing is
cut to a width. A pipe gets whole lines; a terminal too narrow for the table gets a block per record.
"""

import functools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hpc_gpt.core import terminal
from hpc_gpt.core.columns import Column, Grid, as_csv, column, filled, grid, known_end, look_up, peak
from hpc_gpt.core.ends.failures import colour_of
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.format import (
    NOTHING,
    counted,
    plain,
    show_digits,
    show_params,
    show_share,
    show_value,
    show_whole,
    wrapped,
)
from hpc_gpt.core.formulas import seed_factor
from hpc_gpt.core.keys import names_of
from hpc_gpt.core.runs.record import (
    FIGURES,
    MIXTURE_FIGURES,
    RECORD_KEYS,
    ROUGH_STEP,
    SCHEMA,
    Record,
    finite,
    show_named,
)
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.layout import AXES
from hpc_gpt.core.tables import close_matches

# The tables of an experiment whose keys a record keeps.
_KEPT = ("model", "layout", "engine", "train", "data")
# The key of a record under which its sweep's varied values are.
_VARIED = "settings.sweep.varied"
_HINT = "hpc-gpt help record lists the keys of a record; a dot reaches into one, as in settings.engine.optimizer"


def show_spread(record: Record) -> str:
    """The step time's 10th to 90th percentile."""
    if record.step_s_p10 is None:
        return NOTHING
    return f"{show_digits(record.step_s_p10)}..{show_digits(record.step_s_p90)}"


def peak_memory_gib(record: Record) -> tuple[float | None, str]:
    """(the highest memory of any stage, the kind of the figure: allocated or reserved); (None, "") without one."""
    for figures, kind in ((record.memory_allocated_gib, "allocated"), (record.memory_reserved_gib, "reserved")):
        figures_gib = [figure for figure in figures or () if figure is not None and abs(figure) < 1e15]
        if figures_gib:
            return max(figures_gib), kind
    return None, ""


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """A prediction's error as a share of the measured value; None if either is not known.

    >>> relative_error(3.0, 2.0)
    0.5
    """
    if not predicted or not measured or measured <= 0:
        return None
    error = predicted / measured - 1
    return error if math.isfinite(error) else None


def show_name(record: Record) -> str:
    """A run's name/run; the run alone if it begins with the name, or if it is another program's log.

    >>> show_name(Record(name="demo", run="20261120-1")), show_name(Record(name="train", run="train-4711"))
    ('demo/20261120-1', 'train-4711')
    """
    if record.name and record.run:
        is_log = record.dialect not in (None, "hpc-gpt") and not record.run.isdigit()  # a bare number says too little
        if is_log or record.run.startswith(record.name):
            return record.run
    return "/".join(part for part in (record.name, record.run) if part) or NOTHING


def show_losses(record: Record) -> str:
    """The loss of the first step -> of the last step; without them the loss of the last evaluation, marked.

    >>> show_losses(Record(loss_first=10.9, loss_last=3.2, loss_eval=3.3)), show_losses(Record(loss_eval=3.3))
    ('10.900 -> 3.200', '3.300 (eval)')
    """
    if record.loss_first is None or record.loss_last is None:
        return NOTHING if record.loss_eval is None else f"{record.loss_eval:.3f} (eval)"
    return f"{record.loss_first:.3f} -> {record.loss_last:.3f}"


def show_layout(record: Record) -> str:
    """The layout as tp4-pp16-dp1, or a dash if no size is known."""
    return record.shown_layout or NOTHING


def choose_columns(keys: Sequence[str]) -> tuple[Column, ...]:
    """A column per key, as in the usual table if a column there has this key alone; ConfigError for an unknown key."""
    columns = (*(FIGURES[axis] for axis in (*AXES, "ep")), *COLUMNS)
    usual = {single.keys[0]: single for single in columns if len(single.keys) == 1}
    full_keys = [(key, full_key(key)) for key in keys]
    return tuple(usual.get(full) or column(key, full, right=_is_figure(full)) for key, full in full_keys)


def all_columns(records: Sequence[Record]) -> list[Column]:
    """The usual columns, the keys that sweeps vary after the run, and every other column for which a record has a
    value before the end."""
    usual = {key for figure_column in COLUMNS for key in figure_column.keys}
    others = [
        replace(figure_column, optional=True)
        for figure_column in FIGURES.values()
        if not usual.issuperset(figure_column.keys)
    ]
    return filled([COLUMNS[0], *varied_columns(records), *COLUMNS[1:-1], *others, COLUMNS[-1]], records)


def varied_columns(records: Sequence[Record]) -> list[Column]:
    """A column for each key that the records' sweeps vary."""
    columns = []
    for key in dict.fromkeys(key for record in records for key in varied_of(record)):
        try:
            varied = full_key(key)
        except ConfigError:  # a key of another version
            varied = f"{_VARIED}.{key}"
        columns.append(column(key, varied, str))
    return columns


def varied_of(record: Record) -> dict[str, Any]:
    """The values of a record's run that its sweep varies, by dotted key."""
    return (record.settings.get("sweep") or {}).get("varied") or {}


def sort_records(records: Sequence[Record], keys: Sequence[str]) -> list[int]:
    """The records' indexes, sorted by the keys, the first key leading; `-key` sorts from high to low.

    Records without a value come last in both directions; equal ones keep their order. ConfigError for an unknown key.
    """
    full = [full_key(key.removeprefix("-")) for key in keys]
    order = list(range(len(records)))
    for key, name in zip(reversed(keys), reversed(full), strict=True):
        value = {index: look_up(records[index], name) for index in order}
        with_value = [index for index in order if value[index] is not None]
        with_value.sort(key=lambda index: _comparable(value[index]), reverse=key.startswith("-"))
        order = with_value + [index for index in order if value[index] is None]
    return order


def full_key(key: str) -> str:
    """The full name of a record's key: `lr` and `train.lr`, keys of an experiment, are settings.train.lr. A key of
    [command] or [job], such as command.values.lr, is in a record if its sweep varies it. ConfigError for an unknown
    key."""
    name, dot, _ = key.partition(".")
    if name in RECORD_KEYS and (not dot or "dict" in Record.__annotations__[name]):
        return key
    for table, _, short in (path.partition(".") for path in names_of(Experiment)):
        if table in _KEPT and key in (short, f"{table}.{short}"):
            return short if table in ("model", "layout") and short in RECORD_KEYS else f"settings.{table}.{short}"
    if key.startswith("command.values.") or (name in ("command", "job") and key in names_of(Experiment)):
        return f"{_VARIED}.{key}"
    unknown = key if name in RECORD_KEYS else name
    raise ConfigError(f"a record has no key {unknown!r}", close_matches(unknown, RECORD_KEYS) or _HINT)


def _comparable(value: Any) -> tuple[int, Any]:
    """The sort key of a value: numbers sort before texts, as records may have either under one key."""
    if isinstance(value, int | float):
        return 0, value
    if isinstance(value, list) and all(isinstance(entry, int | float) for entry in value):
        return 0, max(value, default=0)
    return 1, str(value)


def _is_figure(key: str) -> bool:
    kinds = Record.__annotations__[key.partition(".")[0]]
    return any(kind in kinds for kind in ("int", "float")) and "dict" not in kinds


_STEP = replace(
    FIGURES["step_s"],
    mark=lambda row: "~" if ROUGH_STEP in getattr(row, "flag_kinds", ()) else "",
    means=f"{FIGURES['step_s'].means}; after ~ from few differences of times",
)
# The columns of tables of runs, in their order: csv and `--columns all` have them all, any other table `usual_columns`.
COLUMNS = (
    Column("Run", ("name", "run", "job_id"), show_name, right=False),
    Column("Layout", (*AXES, "ep"), show_layout, right=False,
           means="tensor, pipeline, context, data and expert parallel sizes"),
    *(FIGURES[key] for key in ("gpus", "params", "params_active", "micro_batches", "micro_batch", "global_batch")),
    _STEP,
    Column("p10..p90", ("step_s_p10", "step_s_p90", "steps_used", "warmup_steps"), show_spread,
           means="10th and 90th percentile of the same steps"),
    FIGURES["tokens_per_s"],
    # Only if the number of a run's GPUs is not known: else tokens/s say as much.
    replace(FIGURES["tokens_per_s_gpu"], value=lambda record: None if record.tokens_per_s else record.tokens_per_s_gpu),
    *(FIGURES[f"tflops_{name}"] for name in ("seed", "hardware", "model", "printed")),
    replace(FIGURES["mfu"], optional=True),
    FIGURES["mfu_printed"],
    Column("Memory GiB", ("memory_allocated_gib", "memory_reserved_gib"), lambda record: peak_memory_gib(record)[0],
           show_digits, optional=True,
           means="GPU memory of the stage with most: allocated, else reserved; 1 GiB = 2^30"),
    Column("Loss", ("loss_first", "loss_last", "loss_eval"), show_losses,
           means="of the first step -> of the last step, else of the last evaluation"),
    *(FIGURES[key] for key in ("bpb", *MIXTURE_FIGURES)),
    replace(FIGURES["ended"], style=lambda record: colour_of(record.ended or "")),
)  # fmt: skip
# By their first keys.
_USUAL = frozenset(
    ("tp", "gpus", "params", "global_batch", "step_s", "tokens_per_s", "tokens_per_s_gpu", "tflops_model",
     "mfu", "memory_allocated_gib", "loss_first", "ended")
)  # fmt: skip
_LEAST_FILLED = 0.1  # share of the rows that have a value


def usual_columns(records: Sequence[Record]) -> list[Column]:
    """The columns that a terminal, a page and a pipe show: the run, the keys that sweeps vary, and the usual columns
    that a tenth of the records fill."""
    others = [column for column in COLUMNS[1:] if column.keys[0] in _USUAL]
    return [COLUMNS[0], *varied_columns(records), *filled(others, records, _LEAST_FILLED)]


def records_text(
    records: Sequence[Record],
    form: str = "table",
    width: int | None = None,
    columns: Sequence[Column] | None = None,
) -> str:
    """All pieces of `record_pieces` as one text."""
    return "".join(record_pieces(records, form, width, columns))


def record_pieces(
    records: Sequence[Record],
    form: str = "table",
    width: int | None = None,
    columns: Sequence[Column] | None = None,
) -> Iterator[str]:
    """The records as table, md, csv, json or jsonl, in pieces; JSON has one piece per record.

    table: aligned, one line per record, or one block per record if the table is wider than `width` (None: any width);
    empty without records. Flags are left out, as the verb writes them to stderr. csv: a heading for each key of
    `columns`, by default of every column of COLUMNS, and figures in full. json: `{"schema": 1, "records": [...]}`,
    every key of every record; jsonl: one object per line.
    """
    if form == "json":
        begin, end = json_text({"schema": SCHEMA, "records": [0]}).split("0") if records else ("", "")
        for number, record in enumerate(records):
            # Texts in JSON have no line breaks: every line break here precedes an indentation.
            yield (",\n  " if number else begin) + json_text(record.to_tables()).rstrip().replace("\n", "\n  ")
        yield end or json_text({"schema": SCHEMA, "records": []})
    elif form == "jsonl":
        yield from (json_lines([record.to_tables()]) for record in records)
    elif form == "csv":
        keys = [key for column in columns or COLUMNS for key in column.keys]
        yield as_csv(keys, [[look_up(record, key) for key in keys] for record in records])
    else:
        table = grid(columns or usual_columns(records), records)
        if form == "md":
            yield table.markdown()
        elif records and columns is None and width is not None and table.width > width:
            yield "\n".join(as_block(replace(record, flags=[]), width) for record in records)
        elif records:
            yield table.fitted(width, "\n", terminal.painted if width is not None else None)


def json_text(page: dict[str, Any]) -> str:
    """A page of `--json`."""
    return json.dumps(page, indent=1, allow_nan=False) + "\n"


def json_lines(lines: Sequence[dict[str, Any]]) -> str:
    """An object on each line."""
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def as_block(record: Record, width: int | None = None) -> str:
    """One record with a line per figure, FLOPs figures with their formulas; flags at the end."""
    title = plain(show_name(record))
    lines = [(label, plain(text)) for label, text in _block_lines(record) if text != NOTHING]
    margin = max(len(label) for label, _ in lines) if lines else 0
    text = title + "\n" + "".join(f"  {label:<{margin}}  {value}\n" for label, value in lines)
    for flag in record.flags:
        text += "\n".join(wrapped(f"  note: {plain(flag)}", width, 8)) + "\n"
    return text


def show_begin(record: Record) -> str:
    """The checkpoint or the weights that the run began from; empty if it began from random ones."""
    parent = record.settings.get("resumed_from")
    if isinstance(parent, dict):
        return f"step {parent.get('step')} of run {parent.get('run')}{', as a branch' if parent.get('branch') else ''}"
    return str(record.settings.get("train", {}).get("init") or "")


def print_record(record: Record) -> None:
    """Prints one record as a block, as at the end of a run."""
    heading, _, body = as_block(record, terminal.width()).partition("\n")
    terminal.write_heading(heading)
    sys.stdout.write(body)
    sys.stdout.flush()


def _block_lines(record: Record) -> list[tuple[str, str]]:
    """(label, text) of each main figure."""
    layout = show_layout(record)
    where = f" on {counted(record.gpus, 'rank')}" if record.gpus else ""
    program = "".join(f", {name}" for name in (record.engine, record.dtype) if name)
    batch = NOTHING if record.global_batch is None else str(record.global_batch)
    if record.global_batch and record.micro_batch and record.micro_batches and record.dp:
        batch += f" = {record.micro_batch} x {record.micro_batches} x dp {record.dp}"
    step = _STEP.show(record)
    if record.step_s is not None and record.step_s_p10 is not None:
        step += f" s  (median of {record.steps_used}; 10th to 90th percentile {show_spread(record)}"
        step += f"; {record.warmup_steps} warm-up)"
    elif record.step_s is not None:
        step += " s  (single steps were not timed)"
    memory, kind = peak_memory_gib(record)
    ended = ": ".join(part for part in (known_end(record.ended), record.cause) if part) or NOTHING
    for_a_token = f", {show_params(record.params_active)} for a token" if record.params_active else ""
    return [
        ("ended", ended),
        ("model", (f"{show_params(record.params)} parameters" if record.params else NOTHING) + for_a_token),
        ("begins from", show_begin(record) or NOTHING),
        ("varied", ", ".join(f"{key} {show_value(value)}" for key, value in varied_of(record).items()) or NOTHING),
        ("layout", f"{layout}{where}{program}" if layout != NOTHING else NOTHING),
        ("batch", batch),
        ("loss", show_losses(record)),
        ("loss_eval", NOTHING if record.loss_eval is None else f"{record.loss_eval:.3f}"),
        *([] if record.bpb is None else [("bpb", f"{record.bpb:.4f}, bits per byte of text")]),
        *([("by source", by_source)] if (by_source := losses_by_source(record)) is not None else []),
        ("experts", show_named(record, MIXTURE_FIGURES) or NOTHING),
        ("step time", step),
        ("tokens/s", show_whole(record.tokens_per_s)),
        ("tokens/s per GPU", NOTHING if record.tokens_per_s else FIGURES["tokens_per_s_gpu"].show(record)),
        ("tokens", show_whole(record.tokens_total)),
        *((key, _flops(record, key)) for key in ("tflops_seed", "tflops_hardware", "tflops_model", "tflops_printed")),
        ("mfu", NOTHING if record.mfu is None else f"{record.mfu:.1%} of {record.device}, {record.units}"),
        (
            "mfu_printed",
            NOTHING if record.mfu_printed is None else f"{record.mfu_printed:.1%}, as the program prints it",
        ),
        ("memory", NOTHING if memory is None else f"{show_digits(memory)} GiB {kind}, on the stage with most"),
        ("predicted", _predicted(record)),
        ("attempts", _attempts(record)),
        ("GPU hours", show_digits(record.gpu_hours)),
        *([("goodput", show_goodput(record))] if record.goodput is not None else []),
    ]


def _attempts(record: Record) -> str:
    """The number of attempts, and how many of them are restarts inside a job."""
    attempts = record.attempts or []
    inside = sum(bool(attempt.get("in_job")) for attempt in attempts)
    return f"{len(attempts) or NOTHING}" + (f", of which {counted(inside, 'restart')} inside a job" if inside else "")


def show_goodput(record: Record) -> str:
    """The share of the time that went into steps that count, and the other parts of at least 1 %, largest first."""
    hours = record.gpu_hours_by or {}
    total = sum(hours.values())
    shares = {name: part / total for name, part in hours.items() if name != "steps" and part >= 0.01 * total > 0}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda pair: -pair[1]))
    return f"{record.goodput:.1%} of the time went into steps that count" + (f" ({parts})" if parts else "")


def losses_by_source(record: Record) -> str | None:
    """The last evaluation's loss on each source of a mixture, with its bits per byte; None without one."""
    losses, bits = record.loss_eval_by or {}, record.bpb_by or {}
    of_text = {name: f" ({of_source:.4f} bpb)" for name, of_source in bits.items() if of_source is not None}
    shown = (f"{name} {loss:.3f}{of_text.get(name, '')}" for name, loss in losses.items() if loss is not None)
    return ", ".join(shown) or None


def _predicted(record: Record) -> str:
    """The planner's prediction, with its error if the figure was also measured."""
    memory = max(record.predicted_memory_gib or [0.0])
    allocated = peak(record.memory_allocated_gib)
    parts = []
    for figure, unit, measured in (
        (record.predicted_step_s, "s a step", record.step_s),
        (memory or None, "GiB allocated", allocated),
    ):
        if figure is not None:
            off = relative_error(figure, measured)
            parts.append(f"{show_digits(figure)} {unit}" + (f" ({show_share(off, '+')})" if off is not None else ""))
    return ", ".join(parts) or NOTHING


def _flops(record: Record, key: str) -> str:
    figure = FIGURES[key]
    formula = figure.formula
    if key == "tflops_seed":
        formula = f"{seed_factor(record.recompute):g} P s B"
    shown = figure.show(record)
    return NOTHING if shown == NOTHING else f"{shown} {figure.unit}  ({formula})"


def predictions_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The predicted and measured figures of each record that has a prediction.

    An error is predicted / measured - 1. The step time is the record's, the memory the peak that PyTorch allocated on
    the stage with most. Unknown figures are None.
    """
    return [_prediction(record) for record in records if record.predicted_step_s or record.predicted_memory_gib]


def predictions_text(lines: Sequence[dict[str, Any]], form: str) -> str:
    """Predicted and measured figures per run, as table, md, csv, json or jsonl; all but csv and jsonl end with the
    mean absolute errors. A table without predictions is an empty text.

    The JSON is `{"schema": 1, "predictions": [...], "mean": {...}}`.
    """
    if form == "csv":
        return as_csv(list(_prediction(Record())), [list(line.values()) for line in lines])
    if form == "jsonl":
        return json_lines([finite(line) for line in lines])
    mean: dict[str, float | int | None] = {}  # over the runs with both a prediction and a measurement
    for name in ("step", "memory"):
        errors = [abs(error) for line in lines if (error := line[f"{name}_error"]) is not None]
        mean |= {f"{name}_error": sum(errors) / len(errors) if errors else None, f"{name}_runs": len(errors)}
    if form == "json":
        return json_text(finite({"schema": SCHEMA, "predictions": list(lines), "mean": mean}))
    title = f"mean of {mean['step_runs']} and {mean['memory_runs']} runs, absolute"
    last = (title, "", "", "", "", show_share(mean["step_error"]), "", "", show_share(mean["memory_error"]))
    table = grid(_PREDICTED, lines)
    table = Grid(table.headings, table.right, [*table.lines, last])
    return table.markdown() if form == "md" else table.fitted(terminal.width(), "\n") if lines else ""


def _prediction(record: Record) -> dict[str, Any]:
    layout = show_layout(record)
    memory, planned = peak(record.memory_allocated_gib), peak(record.predicted_memory_gib)
    # Steps on a CPU do not measure a prediction for a GPU.
    step_s = record.step_s if record.device is not None else None
    return {
        "name": record.name,
        "run": record.run,
        "layout": layout if layout != NOTHING else None,
        "device": record.device,
        "step_s": record.step_s,
        "predicted_step_s": record.predicted_step_s,
        "step_error": relative_error(record.predicted_step_s, step_s),
        "memory_gib": memory,
        "predicted_memory_gib": planned,
        "memory_error": relative_error(planned, memory),
    }


_PREDICTED = (
    Column("run", ("name", "run"), lambda line: show_name(Record(name=line["name"], run=line["run"])), right=False),
    column("layout", "layout", right=False),
    column("device", "device", right=False),
    column("s/step", "step_s", show_digits),
    column("predicted", "predicted_step_s", show_digits),
    column("error", "step_error", functools.partial(show_share, sign="+")),
    column("GiB", "memory_gib", show_digits),
    column("predicted", "predicted_memory_gib", show_digits),
    column("error", "memory_error", functools.partial(show_share, sign="+")),
)
