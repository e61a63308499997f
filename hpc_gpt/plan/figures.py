"""What a predicted step time comes to: throughput, FLOPs by every formula, and what a budget of tokens costs."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_gpt import formulas
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.training import Training

_DAY_S = 86400.0


@dataclass(frozen=True)
class Figures:
    """Of one candidate. FLOPs are TFLOP/s of one GPU, by the formulas of hpc_gpt.formulas; `budget_tokens` is what
    `days` and `gpu_hours` are for. `mfu` and `hfu` are 0 to 1."""

    step_s: float
    step_s_low: float
    step_s_high: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    tflops_seed: float
    tflops_hardware: float
    tflops_model: float
    mfu: float
    hfu: float
    gpu_hours_per_step: float
    budget_tokens: float
    days: float
    gpu_hours: float


def figures_of(
    training: Training, step_s: float, band: float, params: float, machine: Machine, budget_tokens: float
) -> Figures:
    """`params` of the whole model, the tied embedding once; `band` the relative half width of the step time's range."""
    shape, gpus, batch = training.shape, training.gpus, training.global_batch
    hardware = formulas.tflops_hardware(
        layers=shape.layers,
        hidden=shape.hidden,
        seq=shape.seq,
        vocab=shape.vocab,
        global_batch=batch,
        gpus=gpus,
        step_s=step_s,
        recompute=training.recompute,
    )
    model = formulas.tflops_model(
        params=params,
        layers=shape.layers,
        hidden=shape.hidden,
        seq=shape.seq,
        global_batch=batch,
        gpus=gpus,
        step_s=step_s,
    )
    seed = formulas.tflops_seed(
        params=params, seq=shape.seq, global_batch=batch, gpus=gpus, step_s=step_s, recompute=training.recompute
    )
    peak = machine.peak_tflops[training.dtype]
    tokens_per_s = batch * shape.seq / step_s
    seconds = budget_tokens / tokens_per_s
    return Figures(
        step_s=step_s,
        step_s_low=step_s * (1 - min(band, 1.0)),
        step_s_high=step_s * (1 + band),
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=tokens_per_s / gpus,
        tflops_seed=seed,
        tflops_hardware=hardware,
        tflops_model=model,
        mfu=formulas.mfu(model, peak),
        hfu=formulas.hfu(hardware, peak),
        gpu_hours_per_step=gpus * step_s / 3600,
        budget_tokens=budget_tokens,
        days=seconds / _DAY_S,
        gpu_hours=gpus * seconds / 3600,
    )
