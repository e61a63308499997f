"""Every row of a file predicted, beside what was published of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpc_gpt.errors import UserError
from hpc_gpt.plan.calibrate import DATA_SHEET, Calibrated, chosen_for
from hpc_gpt.plan.constants import DEFAULT, Constants
from hpc_gpt.plan.memory import fits, predict_memory
from hpc_gpt.plan.prediction import Memory, StepTime
from hpc_gpt.plan.rows import LeftOut, Row, Rows
from hpc_gpt.plan.step_time import predict_step
from hpc_gpt.runs.record import finite

SCHEMA = 1
Chosen = tuple[Constants, str]


@dataclass(frozen=True)
class Predicted:
    """A row, what is predicted of it, and whose constants it was predicted with."""

    row: Row
    step: StepTime
    memory: Memory
    fits: bool
    calibration: str = DATA_SHEET

    @property
    def memory_kind(self) -> str:
        """The kind the row was measured in, nvidia-smi where it was not."""
        return self.row.published.memory_kind or "nvidia_smi"

    @property
    def memory_gib(self) -> float:
        """Of the stage that needs most, in the row's kind. Stages that the source does not tell of do not count."""
        stages = self.memory.stages
        listed = [stages[stage] for stage, _ in self.row.published.by_stage] or list(stages)
        if self.memory_kind == "component":
            first = stages[0]
            return first.parameters + first.gradients + first.optimizer + first.activations
        return max(float(getattr(stage, self.memory_kind)) for stage in listed)

    @property
    def time_error(self) -> float | None:
        """Predicted over published seconds, less 1."""
        published = self.row.published.step_s
        return None if published is None else self.step.step_s / published - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over published GiB, less 1."""
        published = self.row.published.memory_gib
        return None if published is None else self.memory_gib / published - 1


def choosing(clusters: Sequence[Calibrated], always: Calibrated | None = None) -> Callable[[Row], Chosen]:
    """Whose constants a row takes: `always`, else `chosen_for`'s, else those of data sheets."""

    def choose(row: Row) -> Chosen:
        cluster = always or chosen_for(row, clusters)
        return (cluster.constants, cluster.name) if cluster else (DEFAULT, DATA_SHEET)

    return choose


def predict_rows(rows: Rows, choose: Callable[[Row], Chosen]) -> list[Predicted | LeftOut]:
    """Every entry of a file, in its order. What cannot be predicted after all is left out with the reason."""
    return [entry if isinstance(entry, LeftOut) else predict_row(entry, choose) for entry in rows.entries]


def predict_row(row: Row, choose: Callable[[Row], Chosen]) -> Predicted | LeftOut:
    """One row."""
    constants, name = choose(row)
    try:
        memory = predict_memory(row.training, row.machine)
        predicted = Predicted(
            row, predict_step(row.training, row.machine, constants), memory, fits(memory, row.machine), name
        )
        if not (math.isfinite(predicted.step.step_s) and math.isfinite(predicted.memory_gib)):
            raise ValueError("a prediction beyond all numbers")
    except (UserError, ArithmeticError, ValueError) as fault:
        return LeftOut(row.id, row.source, row.cluster, f"cannot be predicted: {' '.join(str(fault).split())[:200]}")
    return predicted


def predicted_only(entries: Iterable[Predicted | LeftOut]) -> list[Predicted]:
    """Those that are not left out."""
    return [entry for entry in entries if isinstance(entry, Predicted)]


def as_table(entry: Predicted | LeftOut) -> dict[str, object]:
    """One row of the output. Keys are the same for every row; what does not apply is null."""
    if isinstance(entry, LeftOut):
        keys = ("step_s", "published_step_s", "memory_gib", "memory_kind", "published_memory_gib", "fits")
        return {
            "id": entry.id,
            "source": entry.source,
            **dict.fromkeys(keys),
            "published_fits": None,
            "layout": None,
            "left_out": entry.reason,
            **dict.fromkeys(
                ("step_error", "memory_error", "noisy", "band", "calibration", "assumed", "parts", "stages")
            ),
        }
    row, published, step = entry.row, entry.row.published, entry.step
    parts = ("compute_s", "recompute_s", "tp_s", "bubble_s", "p2p_s", "dp_s", "optimizer_s", "offload_s")
    tables = {
        "id": row.id,
        "source": row.source,
        "step_s": step.step_s,
        "published_step_s": published.step_s,
        "memory_gib": entry.memory_gib,
        "memory_kind": entry.memory_kind,
        "published_memory_gib": published.memory_gib,
        "fits": entry.fits,
        "published_fits": published.fits,
        "layout": row.layout,
        "left_out": None,
        "step_error": entry.time_error,
        "memory_error": entry.memory_error,
        "noisy": published.noisy,
        "band": step.band,
        "calibration": entry.calibration,
        "assumed": list(row.assumed),
        "parts": {part: getattr(step, part) for part in parts},
        "stages": [{"stage": stage, **_stage(entry, stage, figures)} for stage, figures in published.by_stage],
    }
    return dict(finite(tables))


def _stage(entry: Predicted, stage: int, figures: tuple[float, float, float]) -> dict[str, float]:
    predicted = entry.memory.stages[stage]
    return {
        "allocated_gib": predicted.allocated,
        "published_allocated_gib": figures[1],
        "reserved_gib": predicted.reserved,
        "published_reserved_gib": figures[2],
    }
