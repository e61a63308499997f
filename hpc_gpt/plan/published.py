"""What a row's source measured: the seconds of a step, whichever figure they are told by, and the memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_gpt import formulas
from hpc_gpt.plan.row_fields import Unusable, figure, flag, shown, words
from hpc_gpt.plan.training import Shape, Training

MEMORY_KINDS = ("nvidia_smi", "reserved", "allocated", "component")


@dataclass(frozen=True)
class Published:
    """What was measured, None for what was not. `by_stage`: (stage, (steady, peak allocated, peak reserved)) in GiB."""

    step_s: float | None
    memory_gib: float | None
    memory_kind: str | None
    fits: bool | None
    noisy: bool
    by_stage: tuple[tuple[int, tuple[float, float, float]], ...] = ()


def published(row: Mapping[str, Any], training: Training, global_batch: float | None, peak_tflops: float) -> Published:
    """The figures of a row. `global_batch` in samples as published: without it only seconds can be read as seconds."""
    by_stage = _by_stage(row, training.pp)
    memory = figure(row, "memory_gib")
    kind = words(row, "memory_kind").replace("-", "_") or None
    if kind is not None and kind not in MEMORY_KINDS:
        raise Unusable(f"memory_kind is {shown(row.get('memory_kind'))}, but must be one of {', '.join(MEMORY_KINDS)}")
    if memory is None and by_stage:
        kind, memory = "reserved", max(reserved for _, (_, _, reserved) in by_stage)
    elif memory is not None and kind is None:
        raise Unusable("memory_kind is missing beside memory_gib")
    fits = flag(row, "fits")
    return Published(
        step_s=_step_s(row, training, global_batch, peak_tflops),
        memory_gib=memory,
        memory_kind=kind,
        fits=False if flag(row, "oom") else fits,
        noisy=bool(flag(row, "noisy")),
        by_stage=by_stage,
    )


def params_of(shape: Shape) -> float:
    """Parameters of the whole model, a tied embedding once: README of the planner, closed form 1, summed up.

    12 h^2 + 13 h a layer for GPT-2's; h^2 (2 + 2 kv/a) + 3 h ffn + 2 h for a gated one without biases.
    """
    hidden = shape.hidden
    attention = hidden * hidden * (2 + 2 * shape.kv_share)
    layer = attention + (3 if shape.gated else 2) * hidden * shape.mlp + (2 if shape.gated else 4) * hidden
    if shape.biases:
        layer += (2 + 2 * shape.kv_share) * hidden + shape.mlp + hidden
    rows = shape.vocab * hidden * (1 if shape.tied else 2)
    return shape.layers * layer + rows + (shape.seq * hidden if shape.positions else 0) + 2 * hidden


def _step_s(row: Mapping[str, Any], training: Training, global_batch: float | None, peak: float) -> float | None:
    seconds = figure(row, "sec_per_iter")
    if seconds is not None or global_batch is None:
        return seconds
    rate = figure(row, "samples_per_sec")
    if rate is not None:
        return global_batch / rate
    tokens_s = figure(row, "tokens_per_sec_per_gpu")
    if tokens_s is not None:
        return global_batch * training.shape.seq / (tokens_s * training.gpus)
    tflops = figure(row, "tflops_per_gpu")
    if tflops is not None:
        one_second = tflops_of(words(row, "tflops_kind"), training, global_batch)
        if one_second is not None:
            return _positive(one_second / tflops)
    share = figure(row, "mfu")
    if share is None:
        return None
    share = share / 100 if share > 1 else share
    if share > 1:
        raise Unusable(f"mfu is {shown(row.get('mfu'))}, more than all")
    needed = tflops_of("model", training, global_batch)
    return _positive(needed / (share * peak)) if needed is not None and peak > 0 else None


def _positive(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) and seconds > 0 else None


def tflops_of(kind: str, training: Training, global_batch: float) -> float | None:
    """TFLOP/s per GPU that a step of one second would be, by the formula that `tflops_kind` names.

    "hardware, size*4*2" and "size*factor*2" are the seed's; "eq.3" and other hardware figures Narayanan's; "12*l*h^2"
    his without attention and head; "model" PaLM's (formulas.py has them all). None where the words name no formula.
    """
    shape, gpus = training.shape, training.gpus
    batch = max(1, round(global_batch))
    params = params_of(shape)
    model = formulas.tflops_model(
        params=params, layers=shape.layers, hidden=shape.hidden, seq=shape.seq, global_batch=batch, gpus=gpus, step_s=1
    )
    recompute = "full" if any(sign in kind for sign in ("4*2", "96", "x4")) else training.recompute
    if "size*" in kind or "size *" in kind:
        return formulas.tflops_seed(
            params=params, seq=shape.seq, global_batch=batch, gpus=gpus, step_s=1, recompute=recompute
        )
    if "l*h^2" in kind:
        return 96 * batch * shape.seq * shape.layers * shape.hidden**2 / (gpus * 1e12)
    if "model" in kind:
        return model
    if "hardware" not in kind and "eq.3" not in kind and "eq. 3" not in kind:
        return None
    if shape.gated or shape.kv_share != 1:  # eq. 3 is of GPT-2's shape: as many passes over these parameters
        return model * (4 / 3 if recompute == "full" else 1.0)
    return formulas.tflops_hardware(
        layers=shape.layers,
        hidden=shape.hidden,
        seq=shape.seq,
        vocab=shape.vocab,
        global_batch=batch,
        gpus=gpus,
        step_s=1,
        recompute=recompute,
    )


def _by_stage(row: Mapping[str, Any], pp: int) -> tuple[tuple[int, tuple[float, float, float]], ...]:
    stages = row.get("memory_by_stage_gib")
    if stages is None:
        return ()
    if not isinstance(stages, Mapping) or not stages:
        raise Unusable(f"memory_by_stage_gib is {shown(stages)}, not a table of stages")
    found = []
    for name, figures in stages.items():
        if not (str(name).isascii() and str(name).isdigit() and len(str(name)) <= 6 and int(name) < pp):
            raise Unusable(f"memory_by_stage_gib names stage {shown(name)}, but pp is {pp}")
        if not isinstance(figures, (list, tuple)) or len(figures) != 3:
            raise Unusable(f"memory_by_stage_gib: stage {name} has not three figures")
        row_of = dict(zip(("steady", "allocated", "reserved"), figures, strict=True))
        try:
            steady, allocated, reserved = (figure(row_of, part) for part in row_of)
        except Unusable as fault:
            raise Unusable(f"memory_by_stage_gib: stage {name}: {fault}") from None
        if steady is None or allocated is None or reserved is None:
            raise Unusable(f"memory_by_stage_gib: stage {name} has not three figures")
        found.append((int(name), (steady, allocated, reserved)))
    return tuple(sorted(found))
