"""The fields that a log's lines give: their names, their units, and figures as programs print them: 7,208,960 · 1.05M ·
480B · 38.12% · 1.5E-04 · 0:14:31.66 · nan."""

import math
import re

from hpc_gpt.core.format import show_count
from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.runs.record import FIGURES, MIXTURE_FIGURES

# A dump of arguments, {argument: text}, and the fields that it gives.
Fields = dict[str, str | int | float]
EPOCHS = "epochs"  # the dialect whose lines are of epochs
TESTS = "test_runner"  # a fact in the output of tests, which print lines of steps, too
# group or key -> (field, factor). Any other name is a field itself, unscaled.
UNITS: dict[str, tuple[str, float]] = {
    "step_ms": ("step_s", 1e-3),
    "seconds_per_step": ("step_s", 1.0),
    "ms_per_step": ("step_s", 1e-3),
    "steps_per_s": ("step_s", -1.0),  # the reciprocal: 1 / figure
    "runtime_min": ("runtime_s", 60.0),
    "runtime_hours": ("runtime_s", 3600.0),
    "elapsed_ms": ("elapsed_s", 1e-3),
    "save_ms": ("save_s", 1e-3),
    "mfu_percent": ("mfu", 1e-2),
    "params_millions": ("params", 1e6),
    "params_billions": ("params", 1e9),
    "params_trainable_millions": ("params_trainable", 1e6),
    "params_gi": ("params", GIB),
    "params_estimated_billions": ("params_estimated", 1e9),
    "consumed_tokens_billions": ("consumed_tokens", 1e9),
    # A program that balances whole sequences, or all ranks together, also prints a plain loss, which is 0.
    "balance_loss_of_sequences": ("balance_loss", 1.0),
    "balance_loss_of_ranks": ("balance_loss", 1.0),
    **{f"{name}_{how}": (name, 1.0) for name in ("loss", "loss_eval") for how in ("alone", "short")},
    "loss_bits": ("loss", math.log(2)),  # of base 2, as fairseq prints it
    "loss_eval_bits": ("loss_eval", math.log(2)),
    "at_ms": ("at", 1e-3),
    "tokens_per_ms": ("tokens_per_s", 1e3),
    "tokens_per_us": ("tokens_per_s", 1e6),
    "gflops": ("tflops", 1e-3),
    "memory_allocated_bytes": ("memory_allocated_gib", 1 / GIB),
    "memory_allocated_mib": ("memory_allocated_gib", 2.0**-10),
    "memory_allocated_mb": ("memory_allocated_gib", 1e6 / GIB),
    "memory_allocated_gb": ("memory_allocated_gib", 1e9 / GIB),
    "memory_reserved_bytes": ("memory_reserved_gib", 1 / GIB),
    "memory_reserved_mib": ("memory_reserved_gib", 2.0**-10),
    "memory_reserved_gb": ("memory_reserved_gib", 1e9 / GIB),
}
# Of a mixture's figures, a count alone can be 0.
NEVER_ZERO = tuple(name for name in MIXTURE_FIGURES if FIGURES[name].digits is not show_count)
# Fields of a line of steps. Each is a column of a StepTable; `step` is the number of the last step of the line.
STEP_FIELDS = (
    "step",
    "step_s",
    "loss",
    "grad_norm",
    *MIXTURE_FIGURES,  # the losses are as the program scales them (docs/reports.md)
    "lr",
    "tokens_per_s",
    "tokens_per_s_gpu",
    "samples_per_s",
    "samples_per_s_gpu",
    "tflops",  # the program's own, per GPU
    "mfu",
    "skipped",
    "skipped_so_far",  # since the run's start, not since the line before
    "nan",
    "batch",  # samples of each step, in lines of no known program
    "consumed_samples",
    "consumed_tokens",
    "consumed",  # steps, samples or tokens: the batch shows which
    "throughput",  # samples or tokens per second of the whole job: the batch and the times show which
    "elapsed_s",  # since the run's start
    "loss_eval",
    "epoch",  # passes over the data so far, to the program's rounding
    "at",  # epoch seconds; a time of day as printed is taken as UTC
    "not_finite",  # not from a pattern: 1 if the gradient norm was printed as NaN or infinite, 2 if the loss was
)
# Fields of a line of steps that are facts of the run: recorded when they change, not for every line.
STEP_FACTS = ("steps_planned", "epochs_planned", "global_batch", "seq", "micro_batch", "loss_scale", "epoch_steps")
# The facts that identify a run: two stretches of logs that differ in one of these belong to two runs.
MARKS = ("gpus", "tp", "pp", "cp", "dp", "hidden", "layers", "heads", "seq", "vocab", "micro_batch", "global_batch")
MEMORY_FIELDS = ("memory_allocated_gib", "memory_reserved_gib")
# Fields whose value is text.
TEXT_FIELDS = frozenset(
    (
        *("engine", "device", "dtype", "recompute", "name", "job_id", "node", "node_list", "rank_name"),
        *("torch_version", "framework_version", "deepspeed_version", "words", "key", "value"),
        *("position_embedding", "model_type"),
    )
)
SIZES = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_FIGURE = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?")
_DECIMAL_COMMA = re.compile(r"([-+]?\d+),(?!\d{3}(?!\d))(?=\d+(?:[eE]|$))")
# 1h 22m 38s; any unit may be missing.
_SPELT = re.compile(r"(?=\d)(?:(\d{1,6})d ?)?(?:(\d{1,4})h ?)?(?:(\d{1,4})m ?)?(?:(\d{1,4})s)?")
_CLOCK = re.compile(r"(?:(\d{1,6}) days?,? ?)?(?:(\d{1,6}):)?(\d{1,4}):(\d{1,2}(?:\.\d+)?)")
# In `2767.3/2800.1` and `832.1 (avg 830.0)` the first figure counts: the second is a running mean, or a goal.
_SECOND = re.compile(r" ?[/(].*")
_LONGEST = 64


def unit(name: str) -> tuple[str, float]:
    """Returns (field, factor) of a group's name."""
    return UNITS.get(name, (name, 1.0))


def figure(text: str) -> float | None:
    """The number that a program printed: NaN for `nan`, an infinity for `inf`.

    None if the text is not a number, or a number too large for a float.

    >>> [figure(text) for text in ("7,208,960", "1.05M", "38.12%", "1.5E-04", "0:14:31.66", "12.3/12.9", "cat")]
    [7208960.0, 1050000.0, 38.12, 0.00015, 871.66, 12.3, None]
    >>> [figure(text) for text in ("9,8765", "9,876", "1234,5e-2")]  # one comma, and not before three digits: a decimal
    [9.8765, 9876.0, 12.345]
    >>> [figure(text) for text in ("1h 22m 38s", "14s", "1h 3s", "2d")]
    [4958.0, 14.0, 3603.0, 172800.0]
    """
    text = text.strip().rstrip("%").strip()
    if not text or len(text) > _LONGEST:
        return None
    clock = _CLOCK.fullmatch(text) if ":" in text else _SPELT.fullmatch(text)
    if clock:
        days, hours, minutes, seconds = clock.groups("0")
        return int(days) * 86400 + int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    try:
        return _in_range(float(text), text) if "_" not in text else None
    except ValueError:
        pass
    match = _FIGURE.match(text)
    if match is None:
        return {"nan": math.nan, "inf": math.inf}.get(text.lower().lstrip("+-")[:3])
    suffix = _SECOND.sub("", text[match.end() :]).strip()
    if suffix not in SIZES:
        return None
    try:
        plain = _DECIMAL_COMMA.sub(r"\1.", match[0]).replace(",", "")
        return _in_range(float(plain) * SIZES[suffix], text)
    except ValueError:
        return None


def _in_range(value: float, text: str) -> float | None:
    """The value; None if it is infinite only because it is too large for a float."""
    return None if math.isinf(value) and "inf" not in text.lower() else value


def scaled(name: str, text: str) -> tuple[str, float | str] | None:
    """Returns (field, value) of a group's text; None if it should be a number and is not."""
    key, factor = unit(name)
    if key in TEXT_FIELDS:
        return key, text.strip()
    value = figure(text)
    if value is None:
        return None
    if factor < 0:
        return (key, 1 / value) if value else None
    return key, value * factor
