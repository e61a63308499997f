"""The choice of an engine by name, and the checks and switches of torch before it is built."""

import importlib
import os
import sys
from types import ModuleType

import torch
import torch.distributed as dist

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.process import no_collections
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.training_state import Generators
from hpc_gpt.trainer.engines.attention import prepare_attention
from hpc_gpt.trainer.engines.balance import Balance
from hpc_gpt.trainer.engines.grouped_trial import try_grouped
from hpc_gpt.trainer.engines.kernels import check_compilers
from hpc_gpt.trainer.engines.library_patches import note_untested
from hpc_gpt.trainer.engines.protocol import TrainingEngine
from hpc_gpt.trainer.model.tensor_parallel import full_name


def module_of(engine: str) -> ModuleType:
    """The engine's module in this package. Its `build(resolved, device) -> TrainingEngine` is called on every rank
    after torch.distributed is initialised."""
    with no_collections():
        return importlib.import_module(engine_named(engine).trainer)


def build_engine(resolved: Resolved, device: torch.device) -> TrainingEngine:
    """Builds the engine that the experiment names, ready to train on this rank.

    torch.distributed must be initialised with one rank for each GPU of the layout. Raises ConfigError if the device
    cannot do the arithmetic, or a compiler for it is missing.
    """
    check_dtype_on(resolved.train.dtype, device, resolved.engine.name)
    check_matmul_on(resolved.train.matmul, device)
    check_compilers(resolved.engine, device, resolved.layout.cp)
    note_untested("torch")
    if resolved.train.deterministic:
        make_deterministic()
    allow_tf32(resolved.train.tf32)
    try_grouped(resolved, device)
    engine: TrainingEngine = module_of(resolved.engine.name).build(resolved, device)
    prepare_attention(engine.module, engine.attention, device)
    engine.balance = Balance(resolved, engine.module, device, lambda: engine.step)
    if (weights := engine.given_weights) is not None:
        names = {full_name(parameter) for parameter in engine.module.parameters()} | engine.balance.names
        assert names == weights.taken, f"not from train.init: {names ^ weights.taken}"
        weights.close()
    engine.generators = Generators(device)
    return engine


def check_dtype_on(dtype: str, device: torch.device, engine: str) -> None:
    """Raises ConfigError for arithmetic that the device lacks: fp16 under DeepSpeed on a CPU, bf16 before Ampere."""
    if dtype == "fp16" and device.type == "cpu" and not engine_named(engine).trains_fp16_on_cpu:
        raise ConfigError(
            "train.dtype is fp16, but DeepSpeed does not train in fp16 on a CPU",
            'use train.dtype = "fp32" or "bf16", or engine.name = "ddp" or "fsdp"',
        )
    if dtype == "bf16" and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise ConfigError(
                f"train.dtype is bf16, but {torch.cuda.get_device_name(device)} (compute capability "
                f"{major}.{minor}) has no bf16 arithmetic, which came with 8.0",
                'use train.dtype = "fp16"',
            )


def check_matmul_on(matmul: str, device: torch.device) -> None:
    """Raises ConfigError for matrix products that the device has no units for: FP8 before sm_89 and gfx950. On a
    CPU prints a note that they are slow."""
    if matmul == "none":
        return
    if device.type != "cuda":
        if dist.get_rank() == 0:
            print(
                f"note: train.matmul is {matmul}: on a CPU it is slower than bf16, so only for a trial", file=sys.stderr
            )
        return
    major, minor = torch.cuda.get_device_capability(device)
    first = (9, 5) if torch.version.hip is not None else (8, 9)  # AMD's gfx950; gfx942 has FP8 of another format
    if (major, minor) < first:
        raise ConfigError(
            f"train.matmul is {matmul}, but {torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) "
            f"has no units for its FP8 (e4m3fn, e5m2), which came with {first[0]}.{first[1]}",
            "leave train.matmul out",
        )


def make_deterministic() -> None:
    """Uses deterministic kernels only: the same layout gives the same bits. Call it before the first kernel runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Otherwise torch fills every empty buffer: for DeepSpeed's 2 GB bucket that takes 2 s per step on a CPU.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def allow_tf32(allowed: bool) -> None:
    """Lets fp32 products run as TF32 on a GPU that has it (Ampere and later), with 10 bits of mantissa instead of 23.

    These calls set torch's older and newer switches alike: Inductor reads the older ones, kernels the newer ones, and
    torch raises an error if they disagree.
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
