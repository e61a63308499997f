"""Trainings of the tiny GPT on DeepSpeed's engines, and the plain reference they are held against."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

from hpc_gpt.cluster import ClusterProfile
from hpc_gpt.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.layout import Layout
from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.tensor_parallel import full_name
from hpc_gpt.resolve import Resolved, resolve
from hpc_gpt.train.engine import Engine as Trainer
from tests.distributed.equality_cases import EVALUATION, GLOBAL_BATCH, SEQ, VOCAB, micro_batches, whole_batch
from tests.distributed.plain_gpt import PlainRun, train_plainly

STEPS = 6
CLIP = 0.25  # below every step's norm
Figures = list[tuple[float, float, bool]]


def settings(layout: Layout, engine: Engine, dtype: str = "fp32", **train: Any) -> Resolved:
    """As the command line would resolve them: two micro-batches a step."""
    return resolve(
        Experiment(
            name="zero",
            model=Model(hidden=32, layers=3, heads=4, vocab=VOCAB, seq=SEQ),
            engine=engine,
            layout=LayoutRequest(**asdict(layout), gpus=layout.gpus, micro_batches=2, global_batch=GLOBAL_BATCH),
            train=Train(
                **{"steps": STEPS, "dtype": dtype, "lr": 5e-4, "min_lr": 1e-4, "warmup_steps": 2, "clip": CLIP} | train
            ),  # fmt: skip
        ),
        ClusterProfile(name="test", scheduler="local", gpus_per_node=8),
    )


def train(engine: Trainer, resolved: Resolved, steps: range) -> Figures:
    """(loss, norm, skipped) of each step."""
    results = []
    for step in steps:
        result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, step)))
        results.append((float(result.loss), float(result.grad_norm), bool(result.skipped)))
    return results


@cache
def reference(dtype: str = "fp32") -> PlainRun:
    """Six steps in one plain PyTorch process, in fp32."""
    resolved = settings(Layout(1, 1, 1), Engine(), dtype)
    initial = {full_name(one): one.detach() for one in Gpt(resolved.model, resolved.train.seed).parameters()}
    batches = [whole_batch(step) for step in range(STEPS)]
    return train_plainly(resolved.model, resolved.train, initial, batches, whole_batch(EVALUATION))
