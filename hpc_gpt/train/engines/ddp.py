"""Engine ddp: the whole model on every rank, under torch's DistributedDataParallel; on one rank the bare model.

bf16 and fp16 keep fp32 master weights (`master_weights`); with `train.optimizer_mode` compiled these are flat and one
pass updates them. With `engine.sharded_optimizer` ZeroRedundancyOptimizer splits the moments over the ranks, whole
parameters at a time. With `engine.overlap_update` each part of the model has an optimizer of its own, and is updated
beside the next step's forward pass, just before that part runs.

Not beside the backward pass: clipping needs the norm of the whole gradient, so no weight can be updated before the last
gradient is there. An update is limited by memory and a forward pass by arithmetic, so on a GPU they share the device:

    stream of the model      waits for 0, embeds      waits for 1, block 1      waits for 2, block 2      ...
    stream beside it         updates 0, 1             updates 2                 updates 3                 ...

The update of a part begins with the part before it. On a CPU it comes just before its own part. Every gradient exists
until its part is updated; by then few activations do.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpc_gpt.model.fp8 import WeightsOnce
from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.model.tensor_parallel import TensorParallel
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.train.checkpoints.replicated import ReplicatedCheckpoint, read_weights
from hpc_gpt.train.engines.kernels import compile_model, compiler
from hpc_gpt.train.engines.master_weights import HALF, FlatMasters, MasterWeights, OnePassAdamW
from hpc_gpt.train.engines.optimizer import Update, build_optimizer, gradients_of, norms_of
from hpc_gpt.train.engines.private_parts import for_each
from hpc_gpt.train.engines.protocol import TorchEngine


class Ddp(TorchEngine):
    """See `hpc_gpt.train.engines.protocol.TrainingEngine`. On one rank there is no wrapper and no collective."""

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        layout, engine, train = resolved.layout, resolved.engine, resolved.train
        assert layout.tp == layout.pp == 1, "the settings' check of the engine refuses the others"
        super().__init__(resolved, device)
        tp = TensorParallel(given=self.given, device=device, context=self.context)
        self.module = Gpt(resolved.model, train.seed, tp, Techniques.of(engine, train.matmul)).to(device)
        parts = self.module.parts()
        self._masters = _masters_of(resolved, parts)
        # What one update updates: a part, or the whole model.
        self._parts = parts if engine.overlap_update else [[weight for part in parts for weight in part]]
        owners = self._parts
        if self._masters is not None:
            owners = [[self._masters.master_of(weight) for weight in part] for part in self._parts]
        self._parameters = [parameter for part in owners for parameter in part]
        optimizers = _build_optimizers(resolved, owners, self._masters)
        compile_model(self.module, engine)
        once = train.matmul != "none" and not engine.overlap_update
        self._cast_weights = WeightsOnce(self.module.blocks, compiler(engine)) if once else None
        self._replicas = self._wrap() if layout.data_ranks > 1 else None
        self._model = self._replicas or self.module
        norms = self._masters.norms if self._masters else lambda: norms_of(gradients_of(self._parameters))
        self._update = Update(optimizers, norms, None, train.clip, self._scaler, device)
        self._checkpoint = ReplicatedCheckpoint(self._parameters, optimizers)
        self._overlapped: OverlappedUpdate | None = None
        if engine.overlap_update:
            side = SideStream(device) if device.type == "cuda" else None
            self._overlapped = OverlappedUpdate(self.module, self._update_part, self._drop_gradients, side)

    def _wrap(self) -> DistributedDataParallel:
        """The model under DDP.

        All ranks draw the same weights from the seed, so none are sent. Every parameter is used in every step and DDP
        looks for no unused ones, so `static_graph` would save nothing.
        """
        # Buffers are each rank's own copies of its weights; torch 2.13 has renamed the switch.
        takes = inspect.signature(DistributedDataParallel).parameters
        buffers = {next(key for key in ("forward_sync_buffers", "broadcast_buffers") if key in takes): False}
        wrapped = DistributedDataParallel(self.module, gradient_as_bucket_view=True, init_sync=False, **buffers)  # type: ignore[arg-type]
        if self._masters is not None:
            # A lambda, because DDP compares a hook's annotations, which are strings in this module, with types.
            wrapped.register_comm_hook(self._masters, lambda masters, bucket: masters.average(bucket))
        return wrapped

    def _gradients(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """The context of a micro-batch: the gradient is averaged over the ranks if it is the `last`, else kept."""
        if self._replicas is not None and self._masters is not None:
            self._masters.collects = not last
        if self._replicas is None or last:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self._replicas.no_sync()
        return context

    def _update_weights(self, lr: float) -> tuple[Tensor, Tensor]:
        self.finish()
        updated = self._update.begin(lr)
        if self._overlapped is not None:
            self._overlapped.begin()
        else:
            for number in range(len(self._parts)):
                self._update_part(number)
                self._drop_gradients(number)
            self._weights_changed()
        return updated

    def _update_part(self, number: int) -> None:
        self._update.step(number)
        if self._masters is not None:
            self._masters.refresh(self._parts[number])

    def _drop_gradients(self, number: int) -> None:
        weights = self._parts[number]
        if self._masters is not None:
            self._masters.drop_gradients(weights)
        if self._replicas is not None and self._masters is None:
            # The gradients are views of DDP's buckets, and have to stay in place.
            for_each("zero_", gradients_of(weights))
        else:
            for weight in weights:
                weight.grad = None

    def finish(self) -> None:
        """Does what `engine.overlap_update` has left for the next forward pass."""
        if self._overlapped is not None:
            self._overlapped.finish()

    def _weights_are_loaded(self) -> None:
        if self._masters is not None:
            self._masters.copy_back()
        self._weights_changed()

    def _weights_changed(self) -> None:
        if self._cast_weights is not None:
            self._cast_weights()


build = Ddp
__all__ = ["Ddp", "build", "read_weights"]


def _masters_of(resolved: Resolved, parts: list[list[nn.Parameter]]) -> MasterWeights | None:
    """The master weights of a model's `parts`, whose weights become half; None in fp32."""
    train = resolved.train
    if train.dtype not in HALF:
        return None
    half = HALF[train.dtype]
    if train.optimizer_mode != "compiled":
        return MasterWeights(parts, half)
    once = resolved.batch.micro_batches == resolved.layout.data_ranks == 1
    return FlatMasters(parts, half, half if once else torch.float32, apart=resolved.engine.overlap_update)


def _build_optimizers(
    resolved: Resolved, parts: list[list[nn.Parameter]], masters: MasterWeights | None
) -> list[torch.optim.Optimizer]:
    """An optimizer for each part of the parameters that are updated."""
    if isinstance(masters, FlatMasters):
        return [OnePassAdamW(resolved.train, masters, resolved.engine, number) for number in range(len(parts))]
    optimizers = [build_optimizer(resolved.train, part) for part in parts]
    if not resolved.engine.sharded_optimizer:
        return optimizers
    # Imported here: its package loads torch's FSDP and more, 0.4 s of each start.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    (whole,) = optimizers
    kind = type(whole)
    takes = inspect.signature(kind).parameters
    settings: dict[str, Any] = {key: value for key, value in whole.defaults.items() if key in takes}
    return [
        ZeroRedundancyOptimizer(whole.param_groups, optimizer_class=kind, parameters_as_bucket_view=True, **settings)
    ]


class SideStream:
    """A CUDA stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None]) -> Any:
        """Runs `work` after all that the current stream has got so far; returns the event of its end."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            return self._stream.record_event()

    def join(self, event: Any) -> None:
        """Lets the current stream wait for the event."""
        torch.cuda.current_stream().wait_event(event)


class OverlappedUpdate:
    """Updates the parts of `model`, which are those of `Gpt.parts`, during the forward pass after `begin`.

    `update(number)` updates a part, on the stream `side` if there is one. `drop(number)`, always on the model's stream
    and after the update's end, drops its gradients, whose memory is then the model's again. The hooks are on the model
    and its blocks, which are never compiled themselves unless the model is compiled whole.
    """

    def __init__(
        self, model: Gpt, update: Callable[[int], None], drop: Callable[[int], None], side: SideStream | None
    ) -> None:
        self._update, self._drop, self._side = update, drop, side
        self._parts = len(model.blocks) + 2
        # Parts whose update has begun, and parts that have been updated and may run.
        self._begun = self._ready = self._parts
        self._events: list[Any] = []
        model.register_forward_pre_hook(partial(self._before, 0))
        for number, block in enumerate(model.blocks, 1):
            block.register_forward_pre_hook(partial(self._before, number))
        model.blocks[-1].register_forward_hook(partial(self._before, self._parts - 1))

    def begin(self) -> None:
        """Makes the update of all parts due."""
        assert self._ready == self._parts, "the update before is not over"
        self._begun = self._ready = 0
        self._events.clear()

    def finish(self) -> None:
        """Updates what is still due, and lets the current stream wait for it."""
        self._prepare(self._parts - 1)

    def _before(self, number: int, *of_hook: Any) -> None:
        self._prepare(number)

    @torch.no_grad()
    def _prepare(self, number: int) -> None:
        """Updates all parts up to `number`, which is the next to run, and begins with the one after it."""
        ahead = self._side is not None
        while self._begun < min(number + 1 + ahead, self._parts):
            part = self._begun
            self._begun += 1
            if self._side is None:
                self._update(part)
            else:
                self._events.append(self._side.run(partial(self._update, part)))
        while self._ready <= number:
            if self._side is not None:
                self._side.join(self._events[self._ready])
            self._drop(self._ready)
            self._ready += 1
