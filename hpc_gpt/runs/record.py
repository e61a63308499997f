"""A record: the figures of one run, under the same keys whatever program ran it.

A record always has all keys; a figure that was not measured is null. Keys are added, never removed. A key that ends in
a unit is in that unit; 1 GiB is 2^30 bytes; a TFLOPs figure names its formula.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hpc_gpt.files import read_json, replace_whole
from hpc_gpt.runs.run_folder import RunFolder

SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """The figures of one run. Memory lists have a figure for each pipeline stage. Times are ISO 8601 in UTC."""

    # which run
    schema: int = SCHEMA
    run: str | None = None
    name: str | None = None
    dialect: str | None = None
    engine: str | None = None
    job_id: str | None = None
    # what ran, on what
    gpus: int | None = None
    nodes: int | None = None
    device: str | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    zero_stage: int | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    global_batch: int | None = None
    seq: int | None = None
    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    vocab: int | None = None
    params: int | None = None
    recompute: str | None = None
    dtype: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    started: str | None = None
    ended_at: str | None = None
    # how fast
    step_s: float | None = None
    step_s_p10: float | None = None
    step_s_p90: float | None = None
    steps_used: int | None = None
    warmup_steps: int | None = None
    tokens_per_s: float | None = None
    step_s_mean: float | None = None
    tokens_total: int | None = None
    tflops_seed: float | None = None
    tflops_hardware: float | None = None
    tflops_model: float | None = None
    tflops_printed: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    # memory
    memory_allocated_gib: list[float] | None = None
    memory_reserved_gib: list[float] | None = None
    predicted_memory_gib: list[float] | None = None
    memory_seed003_gib: float | None = None
    predicted_step_s: float | None = None
    # the device during the run
    gpu_util_mean: float | None = None
    gpu_util_spread: float | None = None
    allocator_retries: int | None = None
    attention_used: str | None = None
    compile_s: float | None = None
    matmul_tflops_before: float | None = None
    matmul_tflops_after: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    rounds: int | None = None
    tokens_per_s_spread: float | None = None
    # its result
    loss_first: float | None = None
    loss_last: float | None = None
    loss_eval: float | None = None
    skipped_steps: int | None = None
    nan_steps: int | None = None
    save_s: float | None = None
    gpu_hours: float | None = None
    node_list: str | None = None
    failed_node: str | None = None
    attempts: list[dict[str, Any]] | None = None
    ended: str | None = None
    cause: str | None = None
    # how it is known
    config_hash: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)

    def to_tables(self) -> dict[str, Any]:
        """The record in types of JSON, in the order of the keys. A number that is not finite becomes null."""
        tables = finite({key: getattr(self, key) for key in RECORD_KEYS})
        assert isinstance(tables, dict)
        return tables

    def to_json(self) -> str:
        """The text of record.json."""
        return json.dumps(self.to_tables(), indent=1, ensure_ascii=True, allow_nan=False) + "\n"

    @staticmethod
    def from_tables(tables: Mapping[str, Any]) -> Record:
        """The record from its `to_tables`. Unknown keys are dropped, missing ones are null."""
        known = {entry.name for entry in fields(Record)}
        return Record(**{key: value for key, value in tables.items() if key in known})

    @staticmethod
    def from_json(text: str) -> Record:
        """The record from its `to_json`; ValueError for any other text."""
        tables = json.loads(text)
        if not isinstance(tables, dict):
            raise ValueError("a record is a JSON object")
        return Record.from_tables(tables)


RECORD_KEYS = tuple(entry.name for entry in fields(Record))


def write_record(run: RunFolder, record: Record) -> None:
    """Replace the run's record.json unless it is equal; RunFolderError if it cannot be written."""
    if read_json(run.record) != record.to_tables():
        replace_whole(run.record, record.to_json())


def finite(value: Any) -> Any:
    """The value in types of JSON; a number that is not finite becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


# What each key of a record means, for `hpc-gpt help record`.
MEANING = {
    "schema": "version of this set of keys",
    "run": "the run's id: the name of its folder or log",
    "name": "the experiment, or what the log calls it",
    "dialect": "the program whose log lines the figures are from",
    "engine": "what trained",
    "job_id": "the scheduler's number, 4711_3 in an array",
    "gpus": "GPUs, or ranks on a CPU",
    "nodes": "nodes",
    "device": "the GPU's model",
    "tp": "tensor parallel size",
    "pp": "pipeline parallel size",
    "dp": "data parallel size",
    "zero_stage": "ZeRO stage",
    "micro_batch": "samples in one pass of one rank",
    "micro_batches": "passes in a step of one rank",
    "global_batch": "samples in a step: micro_batch x micro_batches x dp",
    "seq": "tokens in a sample",
    "hidden": "width of the model",
    "layers": "layers",
    "heads": "attention heads",
    "vocab": "vocabulary with its padding",
    "params": "parameters, the tied embedding once",
    "recompute": "activations recomputed: none, selective, full",
    "dtype": "data type of the matrix products",
    "settings": "every other switch; settings.engine.compile reaches inside",
    "started": "first start, UTC",
    "ended_at": "end, UTC",
    "step_s": "seconds of a step: the median of the steps after warm-up",
    "step_s_p10": "10th percentile of the same steps",
    "step_s_p90": "90th percentile",
    "steps_used": "how many steps these are from",
    "warmup_steps": "steps left out as warm-up",
    "tokens_per_s": "tokens per second, of all GPUs",
    "step_s_mean": "seconds of a step: the mean of the same steps",
    "tokens_total": "tokens trained",
    "tflops_seed": "TFLOP/s per GPU: 8 P s B (6 without recomputation), seed 001",
    "tflops_hardware": "TFLOP/s per GPU: Narayanan et al. 2021, eq. 3",
    "tflops_model": "TFLOP/s per GPU: 6 P + 12 L h s a token, PaLM",
    "tflops_printed": "TFLOP/s per GPU as the program printed it, by its own formula",
    "mfu": "tflops_model over the device's dense peak",
    "hfu": "tflops_hardware over the device's dense peak",
    "memory_allocated_gib": "peak of a GPU that PyTorch allocated, one figure per pipeline stage",
    "memory_reserved_gib": "peak of a GPU that PyTorch reserved, one figure per pipeline stage",
    "predicted_memory_gib": "allocated peak of a GPU as predicted, one figure per pipeline stage",
    "memory_seed003_gib": "memory of a GPU by seed 003's formula",
    "predicted_step_s": "seconds of a step as predicted",
    "gpu_util_mean": "GPU utilisation, percent",
    "gpu_util_spread": "standard deviation of gpu_util_mean",
    "allocator_retries": "times the allocator had to free memory and retry",
    "attention_used": "attention kernel",
    "compile_s": "seconds of compilation",
    "matmul_tflops_before": "the device's measured matrix product rate before the steps",
    "matmul_tflops_after": "the same after the steps",
    "sm_clock_mhz": "clock of the GPU",
    "power_w": "power of a GPU",
    "rounds": "rounds of a benchmark",
    "tokens_per_s_spread": "spread of tokens_per_s over the rounds",
    "loss_first": "loss of the first step",
    "loss_last": "loss of the last step",
    "loss_eval": "loss of the last evaluation",
    "skipped_steps": "steps skipped by an overflow",
    "nan_steps": "steps whose loss is not a number",
    "save_s": "median seconds of a checkpoint",
    "gpu_hours": "GPUs x hours, all attempts",
    "node_list": "nodes of the last attempt",
    "failed_node": "the node that failed",
    "attempts": "each start of the run: steps, times, how it ended",
    "ended": "how the run ended, or its state",
    "cause": "why it ended, as the log says it",
    "config_hash": "equal for repeats of one run",
    "versions": "versions of the software",
    "flags": "what looks wrong, in words",
    "sources": "for each key the file and line, or how it was inferred",
}
