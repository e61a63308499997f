"""Engine deepspeed-zero: our tensor parallelism x DeepSpeed's ZeRO 0 to 3 over data-parallel ranks, with offloading."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.errors import ConfigError
from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.model.tensor_parallel import TensorParallel
from hpc_gpt.settings.ds_config import deepspeed_config, zero_stage
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.requirements import check_offload_path
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.universal import read_weights
from hpc_gpt.train.engines import private_parts
from hpc_gpt.train.engines.deepspeed_engine import DeepspeedEngine
from hpc_gpt.train.engines.deepspeed_setup import own_group, quiet, split_as_built
from hpc_gpt.train.engines.kernels import compile_model
from hpc_gpt.train.engines.optimizer import build_optimizer
from hpc_gpt.train.engines.protocol import MicroBatches, StepResult

__all__ = ["build", "read_weights"]


class Groups:
    """DeepSpeed's `mpu`: a rank's groups along tp, which DeepSpeed calls model parallel, and along dp."""

    get_model_parallel_group: Callable[[], dist.ProcessGroup]
    get_data_parallel_group: Callable[[], dist.ProcessGroup]

    def __init__(self, layout: Layout, rank: int) -> None:
        at = layout.coordinate(rank)
        # Even a single rank needs a group: DeepSpeed takes None for all ranks.
        tp, dp = (cast(dist.ProcessGroup, own_group(layout, axis, rank, alone=True)) for axis in ("tp", "dp"))
        # Parts of DeepSpeed ask first for the newer names, with `tensor`.
        self.get_model_parallel_group = self.get_tensor_model_parallel_group = lambda: tp
        self.get_model_parallel_rank = self.get_tensor_model_parallel_rank = lambda: at.tp
        self.get_model_parallel_world_size = self.get_tensor_model_parallel_world_size = lambda: layout.tp
        self.get_data_parallel_group = lambda: dp
        self.get_data_parallel_rank = lambda: at.dp
        self.get_data_parallel_world_size = lambda: layout.dp


# Host buffers above this size are pinned in just that size. It is less than the states of a layer that is worth
# offloading, and more than a micro-batch of tokens.
EXACT_FROM_MIB = 64
# In the order in which torch reads them.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class DeepspeedZero(DeepspeedEngine):
    """See `hpc_gpt.train.engines.protocol.Engine`."""

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        layout, engine = resolved.layout, resolved.engine
        assert layout.pp == 1, "the settings' check of the engine refuses stages"
        if engine.offload_path is not None:
            check_offload_path(engine.offload_path)
        super().__init__(resolved, device)
        partitioned = zero_stage(resolved) == 3
        if partitioned and engine.offload != "none" and not engine.activation_offload:
            pin_exact_sizes(device)
        with quiet():
            self._groups = Groups(layout, dist.get_rank())
            self._dp_group = self._groups.get_data_parallel_group()
            tp = TensorParallel(self.tp_rank, layout.tp, self._groups.get_model_parallel_group())
            if partitioned:
                with split_as_built(self._deepspeed, deepspeed_config(resolved), self._groups):
                    self.module = self._build_model(tp)
                if engine.compile != "none":
                    _gather_by_block(self._deepspeed, self.module, engine.tiles)
            else:
                self.module = self._build_model(tp).to(device)
            compile_model(self.module, engine, () if isinstance(self.module, Gpt) else self.module.blocks)
            optimizer = _build_optimizer(resolved, list(self.module.parameters()))
            self._initialize(optimizer, self._groups.get_model_parallel_group(), self._groups)

    def _build_model(self, tp: TensorParallel) -> Any:
        """The model: (tokens, targets) -> loss, with named parameters (`name_parameter`).

        A subclass may build another, with its layers as `blocks`.
        """
        return Gpt(self._resolved.model, self._resolved.train.seed, tp, Techniques.of(self._resolved.engine))

    def train_step(self, micro_batches: MicroBatches) -> StepResult:
        """One optimizer step; see `Engine`."""
        engine, count = self._engine, self._resolved.batch.micro_batches
        lr = self._set_rate()
        total = torch.zeros((), device=self.device)
        with self._attention():
            for tokens, targets in islice(micro_batches, count):
                loss = self._loss(tokens, targets)
                total += loss.detach()
                engine.backward(loss)
                engine.step()  # DeepSpeed updates the weights in the last call of a step
        return self._result(self._mean(total / count), lr)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._engine(tokens, targets)
        return loss


build = DeepspeedZero


def _gather_by_block(deepspeed: Any, model: Any, tiles: int) -> None:
    """Makes ZeRO-3 gather a whole block, unless there are tiles: its hooks on layers would split a compiled graph.

    The head's weight is not used in its own layer's call. DeepSpeed detects that only in eager mode.
    """
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    if tiles == 1:
        deepspeed.utils.set_z3_leaf_modules(model, [type(model.blocks[0])])
    if isinstance(model, Gpt):
        deepspeed.zero.register_external_parameter(model, model.output_layer.weight)


def _build_optimizer(resolved: Resolved, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own optimizer, or DeepSpeed's CPU Adam if a part of the states is offloaded, which requires it."""
    train = resolved.train
    if resolved.engine.offload_ratio < 1:
        check_compiler()
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        groups = build_optimizer(train, parameters).param_groups
        kept = [{key: group[key] for key in ("params", "weight_decay")} for group in groups]
        adam: torch.optim.Optimizer = DeepSpeedCPUAdam(
            kept, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, adamw_mode=True
        )
        return adam
    return build_optimizer(train, parameters)


def check_compiler() -> None:
    """Raises ConfigError if DeepSpeed cannot build its CPU Adam."""
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            f"engine.offload_ratio below 1 needs DeepSpeed's CPU Adam, which is built with g++ and ninja; "
            f"{' and '.join(missing)} cannot be found",
            "use engine.offload_ratio = 1.0, or install them (pip install ninja)",
        )


def pin_exact_sizes(device: torch.device) -> None:
    """Makes torch pin large host buffers in just their size from now on.

    torch allocates pinned memory in powers of two and keeps freed memory for the next request. That suits short-lived
    buffers, such as activations. ZeRO-3's states stay, and fill most of a host: 1.2 GiB would take 2 (pytorch/pytorch
    issue 95823), and memory that DeepSpeed frees while it builds would be lost. torch 2.13 has a setting that turns off
    both above a size.
    """
    settings = allocator_settings(os.environ)
    if device.type == "cuda" and settings is not None and private_parts.can_use(private_parts.ALLOCATOR):
        with contextlib.suppress(RuntimeError):  # an older torch does not know the setting
            private_parts.set_allocator(settings)


def allocator_settings(environment: Mapping[str, str]) -> str | None:
    """The user's own settings, which would be reset otherwise, with ours; None if the user's have that key already."""
    own = next((environment[name] for name in _ALLOCATOR if environment.get(name)), "")
    if "pinned_max" in own:
        return None
    return ",".join(filter(None, [own, f"pinned_max_cached_size_mb:{EXACT_FROM_MIB}"]))
