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

from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.small_files import read_json, replace_whole

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
