"""A record: the figures of one run, under the same keys whatever program ran it.

A figure is declared here once: its field, and with `shown` its heading, digits and meaning in every table. A record
always has all keys; a figure that was not measured is null. Keys are added, and removed only with a feature.
A key that ends in a unit is in that unit; 1 GiB is 2^30 bytes; a TFLOPs figure names its formula.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hpc_gpt.core.columns import Column, known_end, look_up
from hpc_gpt.core.files import read_json, replace_whole
from hpc_gpt.core.format import (
    NOTHING,
    show_count,
    show_digits,
    show_params,
    show_rate,
    show_share,
    show_value,
    show_whole,
)
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.devices import units_of
from hpc_gpt.core.settings.layout import AXES
from hpc_gpt.core.typed_tables import from_tables

SCHEMA = 1
# If `device` is null because no GPU was used, its source ends so.
ON_CPU = "the ranks ran on CPU"
# The kind of a flag that only says why a main figure is null: nothing is wrong.
ABSENT = "absent"
# The kind of a flag that says that `step_s` is rough: few differences of times give it.
ROUGH_STEP = "rough step"


class Flag(str):
    """A text about what looks wrong, with a kind if others treat it specially, else ""."""

    __slots__ = ("kind",)
    kind: str

    def __new__(cls, text: str, kind: str = "") -> Flag:
        """Makes a flag of a text; a text that is a flag keeps its kind, unless another is given."""
        flag = super().__new__(cls, text)
        flag.kind = kind or getattr(text, "kind", "")
        return flag


def shown(
    heading: str,
    digits: Callable[[Any], str] = show_value,
    *,
    value: Callable[[Any], Any] | None = None,
    keys: tuple[str, ...] = (),
    of_mixture: bool = False,
    **options: Any,
) -> Any:
    """The default of a record's field, null, with the figure's column in tables, lists, exports and the page.

    `heading`, `digits` and `options`: as in Column. Without a string under the field, `means` is also its meaning in
    help and schemas. `value` gives a row's value if it is not that of the field, and `keys` the fields that it is of.
    `of_mixture`: a figure of a mixture's step, which logs, metrics and sinks have under the field's name.
    """

    def made(name: str) -> Column:
        return Column(heading, keys or (name,), value or (lambda row: look_up(row, name)), digits, **options)

    return field(default=None, metadata={"column": made, "of_mixture": of_mixture, "means": options.get("means", "")})


def _tflops(name: str, formula: str, means: str, **options: Any) -> Any:
    unit = "TFLOP/s per rank"
    return shown(
        f"TFLOP/s ({name})", show_digits, label=f"tflops_{name}", unit=unit, formula=formula, means=means, **options
    )


def _utilisation(record: Any) -> str | None:
    """Mean and spread: `71.9 +/- 22.0`."""
    mean = record.gpu_util_mean
    return None if mean is None else f"{mean:.1f} +/- {record.gpu_util_spread or 0.0:.1f}"


@dataclass(frozen=True, slots=True)
class Record:
    """The figures of one run. Memory lists have one figure per pipeline stage. Times are ISO 8601 in UTC."""

    # which run
    schema: int = SCHEMA
    "Version of this set of keys."
    run: str | None = None
    "The run's id: the name of its folder or log."
    name: str | None = None
    "The experiment, or what the log calls it."
    dialect: str | None = None
    "The program whose log lines have the figures."
    engine: str | None = shown(
        "Program",
        value=lambda record: record.engine or record.dialect,
        keys=("engine", "dialect"),
        right=False,
        means="the engine, else the program that wrote the log",
    )
    "The engine that trained."
    job_id: str | None = None
    "The scheduler's job id, 4711_3 in an array."
    # what ran, on what
    gpus: int | None = shown("GPUs", show_count, means="GPUs of the whole run")
    "GPUs, or ranks on a CPU."
    nodes: int | None = None
    "Nodes."
    device: str | None = shown("Device", str, right=False, means="the GPU")
    "The GPU's model."
    tp: int | None = shown("TP")
    "Tensor parallel size."
    pp: int | None = shown("PP")
    "Pipeline parallel size."
    cp: int | None = shown(
        "CP",
        value=lambda record: record.cp if (record.cp or 1) > 1 else None,
        optional=True,
        means="ranks that share each sample",
    )
    "Context parallel size: ranks that share each sample."
    dp: int | None = shown("DP")
    "Data parallel size: copies of the model."
    ep: int | None = shown(
        "EP",
        value=lambda record: record.ep if (record.ep or 1) > 1 else None,
        optional=True,
        means="ranks that divide the experts of a layer",
    )
    "Expert parallel size: ranks of cp x dp that divide the experts of a mixture."
    zero_stage: int | None = shown("ZeRO", show_count, means="ZeRO stage")
    "ZeRO stage."
    micro_batch: int | None = shown("Micro-batch", show_count, means="samples of one forward pass of a GPU")
    "Samples in one pass of one rank."
    micro_batches: int | None = shown("Micro-batches")
    "Passes per step of one rank."
    global_batch: int | None = shown("Batch", show_count, means="samples of one optimizer step over all GPUs")
    "Samples per step: micro_batch x micro_batches x dp."
    seq: int | None = shown("Seq", show_count, means="tokens of a sample")
    "Tokens per sample."
    hidden: int | None = None
    "Width of the model."
    layers: int | None = None
    "Layers."
    heads: int | None = None
    "Attention heads."
    vocab: int | None = None
    "Vocabulary, padding included."
    params: int | None = shown("Size", show_params, means="parameters, a tied embedding counted once; 1 B = 10^9")
    "Parameters; a tied embedding counts once."
    params_active: int | None = shown(
        "Active", show_params, optional=True, means="parameters of a mixture that a token uses"
    )
    "Parameters of a mixture that a token uses: without the experts that it is not sent to, both embeddings in."
    recompute: str | None = None
    "Activations recomputed: none, selective, full, a share of the layers (1/4), or modules (layernorm,moe_act)."
    dtype: str | None = None
    "Data type of the matrix products."
    matmul: str | None = None
    "Format of the layers' products, if it is not dtype: train.matmul."
    settings: dict[str, Any] = field(default_factory=dict)
    "Every other switch; settings.engine.compile reaches inside."
    started: str | None = shown("Started", right=False, means="first start, UTC")
    "First start, UTC."
    ended_at: str | None = None
    "End, UTC."
    # how fast
    step_s: float | None = shown(
        "Step s", show_digits, label="step time", unit="s", means="median seconds of the steady steps"
    )
    "Seconds per step: the median of the steps after warm-up."
    step_s_p10: float | None = None
    "10th percentile of the same steps."
    step_s_p90: float | None = None
    "90th percentile."
    steps_used: int | None = None
    "The number of these steps."
    warmup_steps: int | None = None
    "Steps left out as warm-up."
    tokens_per_s: float | None = shown(
        "Tokens/s", show_whole, label="tokens/s", means="global batch x sequence / step time"
    )
    "Tokens per second of all GPUs together."
    tokens_per_s_gpu: float | None = shown(
        "Tokens/s per GPU",
        show_rate,
        label="tokens/s per GPU",
        optional=True,
        means="as the program prints them if it does, else tokens/s / GPUs",
    )
    "Tokens per second of one GPU, as printed by the program if it prints them."
    step_s_mean: float | None = None
    "Seconds per step: the mean of the same steps."
    tokens_total: int | None = None
    "Tokens trained."
    tflops_seed: float | None = _tflops(
        "seed",
        "6 P s B, 8 with full recomputation",
        "per GPU: 8 P s B / (t n 1e12) with full recomputation, 6 without (Megatron-DeepSpeed's perf tables)",
    )
    "TFLOP/s per GPU: (8 or 6) P s B, as Megatron-DeepSpeed's perf tables count."
    tflops_hardware: float | None = _tflops(
        "hardware", "Narayanan et al. 2021, eq. 3", "per GPU: Narayanan et al. 2021, eq. 3, recomputation counted"
    )
    "TFLOP/s per GPU: Narayanan et al. 2021, eq. 3."
    tflops_model: float | None = _tflops(
        "model",
        "6 N + 12 L h s a token, PaLM",
        "per GPU: (6 N + 12 L h s) s B / (t n 1e12), PaLM appendix B; N: weights that multiply a token",
    )
    "TFLOP/s per GPU: 6 N + 12 L h s per token, PaLM; N: weights that multiply a token."
    tflops_printed: float | None = _tflops(
        "printed", "as the program prints it", "as the program prints it, by its own formula", optional=True
    )
    "TFLOP/s per GPU as the program printed it, by its own formula."
    mfu_printed: float | None = shown(
        "MFU printed",
        show_share,
        label="mfu_printed",
        formula="as the program prints it",
        means="as the program prints it, by its own formula and peak",
        optional=True,
    )
    "MFU as the program printed it, by its own formula and peak, 0 to 1."
    mfu: float | None = shown(
        "MFU",
        show_share,
        label="mfu",
        formula="tflops_model over the device's dense peak",
        means="TFLOP/s (model) over the device's dense peak",
    )
    "Model FLOPs utilisation: tflops_model divided by the device's dense peak, 0 to 1."
    hfu: float | None = None
    "Hardware FLOPs utilisation: tflops_hardware divided by the device's dense peak, 0 to 1."
    # memory
    memory_allocated_gib: list[float] | None = None
    "Peak that PyTorch allocated on a GPU, one figure per pipeline stage."
    memory_reserved_gib: list[float] | None = None
    "Peak that PyTorch reserved on a GPU, one figure per pipeline stage."
    predicted_memory_gib: list[float] | None = None
    "Predicted allocated peak of a GPU, one figure per pipeline stage."
    memory_seed003_gib: float | None = None
    "GiB per GPU by (4 P + 2 activations) x 2 bytes, a formula in common use."
    predicted_step_s: float | None = None
    "Predicted seconds per step."
    # the device during the run
    gpu_util_mean: float | None = shown("GPU %", str, value=_utilisation, keys=("gpu_util_mean", "gpu_util_spread"))
    "GPU utilisation in percent, the mean over time and GPUs."
    gpu_util_spread: float | None = None
    "Standard deviation of gpu_util_mean."
    allocator_retries: int | None = shown("Retries", str)
    "How often the allocator had to free memory and retry."
    attention_used: str | None = shown("Attention", str, right=False)
    "Attention kernel."
    start_s: float | None = None
    "Seconds from the start of a job to the end of its first step, in the last attempt that trained a step."
    start_parts: dict[str, float] | None = None
    "Seconds of start_s: script, staging, imports, rendezvous, build, first_step."
    compile_s: float | None = shown("Compile s", show_digits)
    "Seconds of compilation."
    matmul_tflops_before: float | None = None
    "The device's measured matrix product rate before the steps."
    matmul_tflops_after: float | None = None
    "The device's measured matrix product rate after the steps."
    sm_clock_mhz: float | None = shown("MHz", show_digits)
    "Clock of the GPU, MHz."
    power_w: float | None = shown("W", show_digits)
    "Power of a GPU, W."
    rounds: int | None = None
    "Rounds in which a row of a sweep was measured."
    tokens_per_s_spread: float | None = None
    "Spread of tokens_per_s over the rounds."
    # its result
    loss_first: float | None = shown("Loss first", show_digits, means="loss at the first step")
    loss_last: float | None = shown("Loss last", show_digits, means="loss at the last step")
    loss_eval: float | None = shown("Loss eval", show_digits, means="loss of the last evaluation")
    loss_eval_by: dict[str, float | None] | None = None
    "Loss of the last evaluation on each source of a mixture."
    bpb: float | None = shown(
        "Bits/byte", show_digits, optional=True, means="bits per byte of text in the last evaluation"
    )
    bpb_by: dict[str, float | None] | None = None
    "Bits per byte of text in the last evaluation on each source of a mixture."
    balance_loss: float | None = shown(
        "Balance loss",
        show_digits,
        optional=True,
        means="a mixture's load-balance loss at the last step, as the program scales it",
        of_mixture=True,
    )
    z_loss: float | None = shown(
        "Z loss",
        show_digits,
        optional=True,
        means="loss on the router's logits at the last step, as the program scales it",
        of_mixture=True,
    )
    expert_load: float | None = shown(
        "Expert load",
        show_digits,
        optional=True,
        means="tokens of the fullest expert over the mean at the last step, in the worst layer",
        of_mixture=True,
    )
    experts_dead: int | None = shown(
        "Dead experts",
        show_count,
        optional=True,
        means="experts without a token at the last step, of all layers",
        of_mixture=True,
    )
    skipped_steps: int | None = shown(
        "Skipped steps", show_count, means="steps without an update, as after an overflow"
    )
    "Steps skipped by an overflow."
    nan_steps: int | None = shown("NaN steps", show_count, means="steps whose loss is not a number")
    save_s: float | None = None
    "Seconds to save a checkpoint, the median."
    gpu_hours: float | None = shown("GPU hours", show_digits, means="GPUs x hours over all attempts")
    "GPUs x hours of all attempts."
    goodput: float | None = shown(
        "Goodput",
        show_share,
        label="goodput",
        formula="steps that count over all time",
        means="share of the time of all attempts that went into steps that count",
    )
    "Share of the time of all attempts that went into steps that count, 0 to 1."
    gpu_hours_by: dict[str, float] | None = None
    "GPU-hours by part: steps, start, compile, preflight, saves, evaluation, lost, between, spares, other."
    node_list: str | None = None
    "Nodes of the last attempt."
    failed_node: str | None = None
    "The node that failed."
    attempts: list[dict[str, Any]] | None = None
    "Each start of the run: steps, times, how it ended."
    ended: str | None = shown(
        "Ended", value=lambda row: known_end(look_up(row, "ended")), right=False, means="blank: nothing says how"
    )
    "How the run ended, or its state."
    cause: str | None = None
    "Why it ended, as the log says."
    # where it is from
    config_hash: str | None = shown("Config", str, right=False)
    "Equal for repeats of one run."
    versions: dict[str, str] = field(default_factory=dict)
    "Versions of the software."
    flags: list[str] = field(default_factory=list)
    "What looks wrong, in words."
    flag_kinds: list[str] = field(default_factory=list)
    "The kind of each flag; empty for most."
    sources: dict[str, str] = field(default_factory=dict)
    "For each key the file and line, or how it was inferred."

    def __post_init__(self) -> None:
        kinds = self.flag_kinds if len(self.flag_kinds) == len(self.flags) else [""] * len(self.flags)
        flags = [Flag(text, kind) for text, kind in zip(self.flags, kinds, strict=True)]
        object.__setattr__(self, "flags", flags)
        object.__setattr__(self, "flag_kinds", [flag.kind for flag in flags])

    @property
    def all_flags(self) -> list[tuple[str, str]]:
        """Returns (text, kind) of each flag."""
        return list(zip(self.flags, self.flag_kinds, strict=True))

    @property
    def shown_layout(self) -> str:
        """The known sizes, as tp4-pp16-dp1; cp and ep only above 1. Empty if none is known."""
        sizes = ((axis, getattr(self, axis)) for axis in (*AXES, "ep"))
        return "-".join(
            f"{axis}{size}" for axis, size in sizes if size is not None and (size != 1 or axis not in ("cp", "ep"))
        )

    @property
    def is_on_cpu(self) -> bool:
        """Whether the ranks ran on CPUs, so that the run has no GPU hours."""
        return self.device is None and self.sources.get("device", "").endswith(ON_CPU)

    @property
    def units(self) -> str | None:
        """The units of the device to whose peak mfu and hfu refer: those of FP8 products, else of the dtype."""
        return units_of(self.dtype, self.matmul)

    def to_tables(self) -> dict[str, Any]:
        """The record as JSON types, in the order of the keys. A number that is not finite becomes null."""
        tables = finite({key: getattr(self, key) for key in RECORD_KEYS})
        assert isinstance(tables, dict)
        return tables

    def to_json(self) -> str:
        """The text of record.json."""
        return json.dumps(self.to_tables(), indent=1, ensure_ascii=True, allow_nan=False) + "\n"

    @staticmethod
    def from_tables(tables: Mapping[str, Any]) -> Record:
        """The record from its `to_tables`. Unknown keys are dropped, missing ones are null. Raises as `from_tables`."""
        record: Record = from_tables(Record, tables)
        return record


RECORD_KEYS = tuple(entry.name for entry in fields(Record))
# {key of a record: its column}; a column of several keys is listed under the first.
FIGURES: dict[str, Column] = {
    entry.name: entry.metadata["column"](entry.name) for entry in fields(Record) if "column" in entry.metadata
}
MIXTURE_FIGURES = tuple(entry.name for entry in fields(Record) if entry.metadata.get("of_mixture"))


def show_named(row: Any, keys: Iterable[str]) -> str:
    """The figures of a row with their headings, `expert load 1.880, dead experts 0`, without those that it lacks."""
    texts = ((FIGURES[key].heading, FIGURES[key].show(row)) for key in keys)
    return ", ".join(f"{heading.lower()} {text}" for heading, text in texts if text != NOTHING)


def write_record(run: RunFolder, record: Record, read: Mapping[str, Any] | None = None) -> None:
    """Replaces the run's record.json, unless it is the same; RunFolderError if it cannot be written. `read`: what it
    came from, for `reader.runs.kept_record`."""
    tables = record.to_tables() | ({"read": read} if read else {})
    if read_json(run.record) != tables:
        replace_whole(run.record, json.dumps(tables, indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The value as JSON types; a number that is not finite becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value
