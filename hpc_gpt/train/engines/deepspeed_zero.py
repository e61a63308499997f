"""Engine deepspeed-zero: our tensor parallelism x DeepSpeed's ZeRO 0 to 3 over data-parallel ranks, with offloading."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.errors import CheckpointError, ConfigError
from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.model.tensor_parallel import TensorParallel
from hpc_gpt.settings.ds_config import clips_itself, deepspeed_config, is_alone, shards_in_bf16_optimizer, zero_stage
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.requirements import check_offload_path
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.training_state import load_random_state, put_identity, put_random_state
from hpc_gpt.train.checkpoints.universal import find_differences, load_universal, put_pieces, read_weights
from hpc_gpt.train.engines.attention import attention_kernels
from hpc_gpt.train.engines.compilation import compile_model
from hpc_gpt.train.engines.deepspeed_setup import TAG, import_deepspeed, quiet
from hpc_gpt.train.engines.gradient_norm import GradientNorm, owned
from hpc_gpt.train.engines.optimizer import build_optimizer, learning_rate
from hpc_gpt.train.engines.pinned_memory import pin_what_is_asked_for
from hpc_gpt.train.engines.protocol import MicroBatches, StepResult
from hpc_gpt.train.engines.zero_alone import keep_to_itself
from hpc_gpt.train.engines.zero_step import UnseenStep, can_step_unseen
from hpc_gpt.train.engines.zero_sums import sum_where_read

__all__ = ["build", "read_weights"]


def build(resolved: Resolved, device: torch.device) -> DeepspeedZero:
    """The engine on this rank; torch.distributed is initialised, with as many ranks as the layout has."""
    return DeepspeedZero(resolved, device)


class Groups:
    """DeepSpeed's `mpu`: a rank's place along tp, which it calls model parallel, and along dp."""

    def __init__(self, layout: Layout, rank: int) -> None:
        at = layout.coordinate(rank)
        self._tp = _group(layout, "tp", rank), at.tp, layout.tp
        self._dp = _group(layout, "dp", rank), at.dp, layout.dp

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tp[0]

    def get_model_parallel_rank(self) -> int:
        return self._tp[1]

    def get_model_parallel_world_size(self) -> int:
        return self._tp[2]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._dp[0]

    def get_data_parallel_rank(self) -> int:
        return self._dp[1]

    def get_data_parallel_world_size(self) -> int:
        return self._dp[2]

    # Newer names for the same, which parts of DeepSpeed ask for first.
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def _group(layout: Layout, axis: str, rank: int) -> dist.ProcessGroup:
    """This rank's group along `axis`, also where it is alone in it: DeepSpeed takes None for all ranks."""
    groups = [(ranks, dist.new_group(ranks)) for ranks in layout.groups(axis)]
    own: dist.ProcessGroup = next(group for ranks, group in groups if rank in ranks)
    return own


class DeepspeedZero:
    """See `hpc_gpt.train.engines.protocol.Engine`."""

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        layout, engine = resolved.layout, resolved.engine
        rank = dist.get_rank()
        assert layout.pp == 1, "settle_engine refuses stages"
        assert dist.get_world_size() == layout.gpus, f"{dist.get_world_size()} ranks for {layout}"
        self.device = device
        self.tp_rank, self.pp_rank, self.dp_rank = layout.coordinate(rank)
        self._resolved = resolved
        self._attention = attention_kernels(resolved, device)
        config = deepspeed_config(resolved)
        if engine.offload_path is not None:
            check_offload_path(engine.offload_path)
        deepspeed = import_deepspeed(device)
        from hpc_gpt.train.engines.deepspeed_files import plug_in

        partitioned = zero_stage(resolved) == 3
        if partitioned and engine.offload != "none" and not engine.activation_offload:
            pin_what_is_asked_for(device)
        with quiet():
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
            self._groups = Groups(layout, rank)
            tp = TensorParallel(self.tp_rank, layout.tp, self._groups.get_model_parallel_group())
            context = (
                _partitioned_as_built(deepspeed, config, self._groups) if partitioned else contextlib.nullcontext()
            )
            with context:
                self.module = self._build_model(tp)
            if not partitioned:
                self.module.to(device)
            if partitioned and (engine.compile != "none" or is_alone(resolved)):
                _gather_by_block(deepspeed, self.module, engine.tiles)
            compile_model(self.module, engine, () if isinstance(self.module, Gpt) else self.module.blocks)
            parameters = list(self.module.parameters())
            self._optimizer = _build_optimizer(resolved, parameters)
            self._norm: GradientNorm | UnseenStep | None = None
            if clips_itself(resolved):
                self._norm = GradientNorm(
                    self._optimizer,
                    parameters,
                    self.tp_rank,
                    self._groups.get_model_parallel_group(),
                    resolved.train.clip,
                )
            self._engine, *_ = deepspeed.initialize(
                model=self.module, optimizer=self._optimizer, config=config, mpu=self._groups
            )
            plug_in(self._engine)
            if partitioned:
                sum_where_read(self._engine.optimizer)
            if is_alone(resolved):
                keep_to_itself(self._engine.optimizer)
            if self._norm is None and can_step_unseen(resolved, self._optimizer):
                self._norm = UnseenStep(self._engine.optimizer, self._optimizer, resolved.train.clip, self.tp_rank)
        if layout.dp == 1 and (clips_itself(resolved) or shards_in_bf16_optimizer(resolved)):
            # Averaging over one rank copies every gradient twice for nothing. (ZeRO's own optimizers need the call.)
            self._engine.enable_backward_allreduce = False

    def _build_model(self, tp: TensorParallel) -> Any:
        """The model: (tokens, targets) -> loss, parameters named (`name_parameter`).

        A subclass may have another, with its layers as `blocks`.
        """
        return Gpt(self._resolved.model, self._resolved.train.seed, tp, Techniques.of(self._resolved.engine))

    @property
    def step(self) -> int:
        """Optimizer steps done, skipped ones included."""
        return int(self._engine.global_steps)

    def train_step(self, micro_batches: MicroBatches) -> StepResult:
        """One optimizer step; see `Engine`."""
        engine, count = self._engine, self._resolved.batch.micro_batches
        lr = learning_rate(self._resolved.train, self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros((), device=self.device)
        with self._attention():
            for tokens, targets in islice(micro_batches, count):
                loss = engine(tokens, targets)
                total += loss.detach()
                engine.backward(loss)
                engine.step()  # counts; the last one of the step does it
        loss = self._mean(total / count)
        if self._norm is not None:
            assert self._norm.norm is not None
            assert self._norm.skipped is not None
            return StepResult(loss, self._norm.norm, lr, self._norm.skipped)
        optimizer = engine.optimizer
        if optimizer.overflow and zero_stage(self._resolved) < 3:
            # Offloaded, DeepSpeed 0.19.8 keeps a gradient that is not finite, and all steps after it overflow.
            optimizer.averaged_gradients = {}
        return StepResult(loss, optimizer._global_grad_norm, lr, bool(optimizer.overflow))

    @torch.no_grad()
    def evaluate(self, micro_batches: MicroBatches, count: int) -> Tensor:
        """Mean loss over `count` micro-batches of each data-parallel rank."""
        total = torch.zeros((), device=self.device)
        with self._attention():
            for tokens, targets in islice(micro_batches, count):
                total += self._engine(tokens, targets)
        return self._mean(total / count)

    def _mean(self, own: Tensor) -> Tensor:
        """The mean over data-parallel ranks."""
        if self._resolved.layout.dp > 1:
            dist.all_reduce(own, group=self._groups.get_data_parallel_group())
            own /= self._resolved.layout.dp
        return own

    def save(self, files: RankFiles) -> None:
        """DeepSpeed's own checkpoint, whose model it is, and every rank's generator state."""
        from hpc_gpt.train.engines.deepspeed_files import save_deepspeed

        save_deepspeed(self._engine, files)
        at = self.tp_rank, self.pp_rank, self.dp_rank
        put_pieces(files, self._engine, self.module, TAG, dist.get_rank(), at)
        put_random_state(files, dist.get_rank(), self.device)
        if dist.get_rank() == 0:
            put_identity(files, self._resolved, self.step)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, of either DeepSpeed engine and any layout; CheckpointError if it is of another
        model or arithmetic."""
        others = find_differences(folder, self._resolved)
        if self._resolved.engine.offload_path is not None:
            # Measured: a resumed run's loss was off by 1.2, and nothing was said.
            raise CheckpointError(
                f"{folder} cannot be resumed with engine.offload_path: DeepSpeed 0.19.8 does not restore on NVMe what "
                "it keeps there",
                "train it in one go, or offload to the host's memory from the start",
            )
        if not (folder / TAG).is_dir():
            raise CheckpointError(f"{folder} holds no weights", "remove it, and the one before is used")
        if others:
            load_universal(self._engine, self.module, folder, self._resolved, self.tp_rank)
        else:
            with quiet():
                self._engine.load_checkpoint(str(folder), tag=TAG)
            load_random_state(folder, dist.get_rank(), self.device)
        dist.barrier()

    def parameter_count(self) -> int:
        """Parameters of the whole model, a tied embedding once."""
        own = owned(self.module.parameters(), self.tp_rank)
        count = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in own)
        total = torch.tensor(count, dtype=torch.int64, device=self.device)
        dist.all_reduce(total, group=self._groups.get_model_parallel_group())
        return int(total)


@contextlib.contextmanager
def _partitioned_as_built(deepspeed: Any, config: dict[str, Any], groups: Groups) -> Iterator[None]:
    """Modules built inside give each rank its share of their parameters as soon as they are part of a larger module.

    So no rank ever holds more than one layer whole. DeepSpeed's own context, `zero.Init()`, replaces torch's
    constructors for that, and with them the generator that our initial weights are drawn by.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    init = deepspeed.zero.Init(
        config_dict_or_path=config, data_parallel_group=groups.get_data_parallel_group(), mpu=groups
    )

    def convert(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        for parameter in module.parameters() if module is not None else ():
            if not hasattr(parameter, "ds_id") and not parameter.is_meta:
                parameter.data = parameter.data.to(init.dtype)
                init._convert_to_zero_parameters([parameter])

    hook = register_module_module_registration_hook(convert)
    try:
        yield
    finally:
        hook.remove()


def _gather_by_block(deepspeed: Any, model: Any, tiles: int) -> None:
    """Has ZeRO-3 gather a block at once, unless tiles are to come singly: its hooks on layers cut a compiled graph up.

    Its gradients are taken at once, too. Where nothing is to be gathered that is worth it by itself.

    The head's weight is used by no layer's call of its own, which DeepSpeed finds out for itself in eager mode alone.
    """
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    if tiles == 1:
        deepspeed.utils.set_z3_leaf_modules(model, [type(model.blocks[0])])
    if isinstance(model, Gpt):
        deepspeed.zero.register_external_parameter(model, model.output_layer.weight)


def _build_optimizer(resolved: Resolved, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own; DeepSpeed's where part of the states is offloaded, as it insists."""
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
    """ConfigError where DeepSpeed cannot build its CPU Adam."""
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            f"engine.offload_ratio below 1 needs DeepSpeed's CPU Adam, which is built with g++ and ninja; "
            f"{' and '.join(missing)} cannot be found",
            "use engine.offload_ratio = 1.0, or install them (pip install ninja)",
        )
