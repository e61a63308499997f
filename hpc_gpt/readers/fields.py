"""The names that the groups of a pattern may have, and how the texts of a log become values.

A group is named for the field it gives, with its unit if that differs from the field's own: `step_ms` gives `step_s`.
A figure is read as programs print it: 7,208,960 · 1.05M · 480B · 38.12% · 1.5E-04 · 0:14:31.66 · nan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

GIB = 2.0**30
# group or key -> (field, factor). A name that is not here is a field's own, unscaled.
UNITS: dict[str, tuple[str, float]] = {
    "step_ms": ("step_s", 1e-3),
    "steps_per_s": ("step_s", -1.0),  # the reciprocal: 1 / figure
    "runtime_min": ("runtime_s", 60.0),
    "runtime_hours": ("runtime_s", 3600.0),
    "elapsed_ms": ("elapsed_s", 1e-3),
    "save_ms": ("save_s", 1e-3),
    "mfu_percent": ("mfu", 1e-2),
    "params_millions": ("params", 1e6),
    "params_billions": ("params", 1e9),
    "params_gi": ("params", GIB),
    "loss_bits": ("loss", math.log(2)),  # of base 2, as fairseq prints it
    "loss_eval_bits": ("loss_eval", math.log(2)),
    "at_ms": ("at", 1e-3),
    "tokens_per_ms": ("tokens_per_s", 1e3),
    "gflops": ("tflops", 1e-3),
    "memory_allocated_bytes": ("memory_allocated_gib", 1 / GIB),
    "memory_allocated_mib": ("memory_allocated_gib", 2.0**-10),
    "memory_allocated_gb": ("memory_allocated_gib", 1e9 / GIB),
    "memory_reserved_bytes": ("memory_reserved_gib", 1 / GIB),
    "memory_reserved_mib": ("memory_reserved_gib", 2.0**-10),
    "memory_reserved_gb": ("memory_reserved_gib", 1e9 / GIB),
}
# Fields of a line of steps. Each is a column of a StepTable; `step` is the number of the last step that a line is of.
STEP_FIELDS = (
    "step",
    "step_s",
    "loss",
    "grad_norm",
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
    "consumed_samples",
    "consumed_tokens",
    "elapsed_s",  # since the run's start
    "loss_eval",
    "epoch",  # passes over the data so far, to the program's rounding
    "at",  # epoch seconds; a time of day as printed is taken as UTC
)
# Fields of a line of steps that are facts of the run: kept when they change, not for every line.
STEP_FACTS = ("steps_planned", "global_batch", "seq", "micro_batch", "loss_scale")
MEMORY_FIELDS = ("memory_allocated_gib", "memory_reserved_gib")
# Fields whose value is text.
TEXT_FIELDS = frozenset(
    (
        "engine",
        "device",
        "dtype",
        "recompute",
        "name",
        "job_id",
        "node",
        "node_list",
        "rank_name",
        "torch_version",
        "framework_version",
        "deepspeed_version",
        "words",
        "key",
        "value",
    )
)
SIZES = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_FIGURE = re.compile(r"[-+]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?")
_CLOCK = re.compile(r"(?:(\d{1,6}) days?,? ?)?(?:(\d{1,6}):)?(\d{1,4}):(\d{1,2}(?:\.\d+)?)")
# In `2767.3/2800.1` and `832.1 (avg 830.0)` the first figure counts: the other is a mean so far, or a goal.
_SECOND = re.compile(r" ?[/(].*")
_LONGEST = 64


def unit(name: str) -> tuple[str, float]:
    """(field, factor) of a group's name."""
    return UNITS.get(name, (name, 1.0))


def figure(text: str) -> float | None:
    """The number that a program printed; NaN for `nan`, an infinity for `inf`; None if the text is no number, or one
    that no float can hold.

    >>> [figure(text) for text in ("7,208,960", "1.05M", "38.12%", "1.5E-04", "0:14:31.66", "12.3/12.9", "cat")]
    [7208960.0, 1050000.0, 38.12, 0.00015, 871.66, 12.3, None]
    """
    text = text.strip().rstrip("%").strip()
    if not text or len(text) > _LONGEST:
        return None
    try:
        return _held(float(text), text) if "_" not in text else None
    except ValueError:
        pass
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = clock.groups()
        return int(days or 0) * 86400.0 + int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds)
    found = _FIGURE.match(text)
    if found is None:
        return {"nan": math.nan, "inf": math.inf}.get(text.lower().lstrip("+-")[:3])
    rest = _SECOND.sub("", text[found.end() :]).strip()
    if rest not in SIZES:
        return None
    try:
        return _held(float(found[0].replace(",", "").replace("_", "")) * SIZES[rest], text)
    except ValueError:
        return None


def _held(value: float, text: str) -> float | None:
    """The value; None if it is infinite only because no float is so large."""
    return None if math.isinf(value) and "inf" not in text.lower() else value


def scaled(name: str, text: str) -> tuple[str, float | str] | None:
    """(field, value) of a group's text; None if it should be a number and is none."""
    key, factor = unit(name)
    if key in TEXT_FIELDS:
        return key, text.strip()
    value = figure(text)
    if value is None:
        return None
    if factor < 0:
        return (key, 1 / value) if value else None
    return key, value * factor


# A dump of arguments, {argument: text}, and what its texts mean.
Settled = dict[str, str | int | float]
_NONE = ("None", "none", "null", "")
_DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half", "16-mixed", "16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float", "32"), "fp32"),
}


def dtype_named(text: str) -> str | None:
    """fp16, bf16 or fp32 by any of its names; None for another.

    >>> dtype_named("torch.half"), dtype_named("bf16-mixed"), dtype_named("int8")
    ('fp16', 'bf16', None)
    """
    return _DTYPES.get(text.lower().replace("torch.", "").strip())


class Arguments:
    """A dump. Each method reads the first of the names that is there and is not None."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def text(self, *names: str) -> str | None:
        """The text, without space around it."""
        for name in names:
            found = self._texts.get(name)
            if found is not None and found.strip() not in _NONE:
                return found.strip()
        return None

    def whole(self, *names: str) -> int | None:
        """A whole number, which `1.0` is too; a text that is none counts as missing."""
        for name in names:
            text = self.text(name)
            try:
                value = float(text) if text is not None and len(text) <= 32 else None
            except ValueError:
                continue
            if value is not None and value.is_integer():
                return int(value)
        return None

    def true(self, *names: str) -> bool | None:
        """Whether any of them is `True`; None if all are missing."""
        found = [self._texts[name].strip() for name in names if name in self._texts]
        return any(text in ("True", "true") for text in found) if found else None

    def dtype(self, *names: str) -> str | None:
        """fp16, bf16 or fp32."""
        return dtype_named(self.text(*names) or "")


def without_unknown(found: Mapping[str, str | int | float | None]) -> Settled:
    """The fields that have a value."""
    return {name: value for name, value in found.items() if value is not None}


def quotient(gpus: int | None, *factors: int | None) -> int | None:
    """gpus / (product of factors); None if one is unknown or it does not divide."""
    product = 1
    for factor in factors:
        if not factor or factor < 0:
            return None
        product *= factor
    return gpus // product if gpus and gpus % product == 0 else None
