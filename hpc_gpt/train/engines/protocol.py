"""What the training loop asks of an engine, and the choice of one by name."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.engines import private_parts

MicroBatches = Iterator[tuple[Tensor, Tensor]]


class StepResult(NamedTuple):
    """One optimizer step's figures. Tensors stay on the device; a caller that reads them waits for it.

    `loss` is the mean over micro-batches and data-parallel ranks, in nats per token. `grad_norm` is that of the whole
    model's gradient before clipping, inf or not a number if the gradient is not finite. `skipped`: the gradient
    was not finite, and the weights were left as they were.
    """

    loss: Tensor
    grad_norm: Tensor | float
    lr: float
    skipped: Tensor | bool


class Engine(Protocol):
    """One rank's share of a training. Every method but the attributes is collective: all ranks call it together."""

    tp_rank: int
    pp_rank: int
    dp_rank: int
    device: torch.device

    @property
    def step(self) -> int:
        """Optimizer steps done, skipped ones included; `load` restores it."""

    def train_step(self, micro_batches: MicroBatches) -> StepResult:
        """One optimizer step. Takes `resolved.batch.micro_batches` pairs (tokens, targets), int64 [micro_batch, seq],
        on the rank's device.

        Every rank gets the pairs of its own data-parallel rank; a stage leaves what it does not need.
        """

    def evaluate(self, micro_batches: MicroBatches, count: int) -> Tensor:
        """Mean loss over `count` micro-batches of each data-parallel rank; the same scalar on every rank."""

    def save(self, files: RankFiles) -> None:
        """Names what this rank writes of model, optimizer, step and generator states; touches no disk.

        The tensors named are the training's own: they are copied or written before the next step.
        """

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote. CheckpointError if that is of another model, layout or arithmetic."""

    def parameter_count(self) -> int:
        """Parameters of the whole model, a tied embedding once."""


# Each has `build(resolved, device) -> Engine` and
# `read_weights(folder, resolved) -> Iterator[tuple[str, Tensor]]`: from a checkpoint that `save` wrote, in one process
# without torch.distributed, every parameter of the whole model by its full name (`tensor_parallel.full_name`), fp32.
MODULES = {
    "deepspeed-3d": "hpc_gpt.train.engines.deepspeed_3d",
    "deepspeed-zero": "hpc_gpt.train.engines.deepspeed_zero",
    "fsdp": "hpc_gpt.train.engines.fsdp",
    "ddp": "hpc_gpt.train.engines.ddp",
    "hf-deepspeed": "hpc_gpt.train.engines.hf_deepspeed",
}


def build_engine(resolved: Resolved, device: torch.device) -> Engine:
    """The engine the experiment names, ready to train on this rank.

    torch.distributed must be initialised with one rank to each GPU of the layout. ConfigError if the device cannot do
    the arithmetic.
    """
    check_dtype(resolved.train.dtype, device, resolved.engine.name)
    private_parts.check_torch()
    if resolved.train.deterministic:
        make_deterministic()
    allow_tf32(resolved.train.tf32)
    module = importlib.import_module(MODULES[resolved.engine.name])
    engine: Engine = module.build(resolved, device)
    return engine


def check_dtype(dtype: str, device: torch.device, engine: str) -> None:
    """Refuses arithmetic that the device lacks: fp16 under DeepSpeed on a CPU, bf16 on a GPU older than Ampere."""
    if dtype == "fp16" and device.type == "cpu" and "deepspeed" in engine:
        raise ConfigError(
            "train.dtype is fp16, but DeepSpeed does not train in fp16 on a CPU",
            'use train.dtype = "fp32" or "bf16", or engine.name = "ddp" or "fsdp"',
        )
    if dtype == "bf16" and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise ConfigError(
                f"train.dtype is bf16, but {torch.cuda.get_device_name(device)} (compute capability "
                f"{major}.{minor}) has no bf16 arithmetic; it came with 8.0",
                'use train.dtype = "fp16"',
            )


def make_deterministic() -> None:
    """Same layout, same bits: deterministic kernels only, at some cost in speed. Call before the first kernel runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Else every empty buffer is filled first, DeepSpeed's 2 GB bucket at every step: 2 s on a CPU, for nothing.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def allow_tf32(allowed: bool) -> None:
    """Lets fp32 products run as TF32 on a GPU that has it (Ampere and later), with 10 bits of mantissa for 23, or not.

    Set by the calls that keep torch's older and newer switches equal: Inductor reads the older ones, kernels the newer
    ones, and torch refuses to answer if they disagree.
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
