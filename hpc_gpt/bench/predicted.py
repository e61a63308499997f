"""What plan says of a cell's memory where nothing names the device: what is allocated does not depend on it."""

from __future__ import annotations

from dataclasses import replace

from hpc_gpt.errors import UserError
from hpc_gpt.plan.memory import predict_memory
from hpc_gpt.plan.training import training_of
from hpc_gpt.runs.record import Record
from hpc_gpt.settings.resolve import Resolved


def with_predicted_memory(record: Record, resolved: Resolved) -> Record:
    """The record with predicted_memory_gib, of the same settings on any GPU, where it was predicted for none; as it is
    where plan cannot say."""
    if record.predicted_memory_gib:
        return record
    try:
        memory = predict_memory(training_of(resolved))
    except UserError:
        return record
    sources = {**record.sources, "predicted_memory_gib": "plan, allocated at the peak, on any GPU: none is named here"}
    return replace(record, predicted_memory_gib=[stage.allocated for stage in memory.stages], sources=sources)
