"""A model's shape, its layout, and how it is trained, by us or by others: the input of every prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hpc_gpt.errors import LayoutError
from hpc_gpt.formulas import Recompute
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.model_shape import ModelShape

Offload = Literal["none", "optimizer", "full"]
OptimizerMode = Literal["fused", "foreach", "for-loop", "compiled"]


@dataclass(frozen=True)
class Training:
    """A shape, its layout, and everything else that memory or time depends on. `engine` is a name of an experiment's.

    `program_states` (a `base.states.States`) says how another program of the engine's kind holds its states; None means
    our engine.
    """

    shape: ModelShape
    tp: int = 1
    pp: int = 1
    dp: int = 1
    vp: int = 1  # interleaved chunks a stage
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero_stage: int = 0
    dtype: str = "bf16"
    flash: bool = False  # the attention kernel keeps no matrix of scores
    engine: str = "megatron-lm"
    program_states: Any = None
    sharded_optimizer: bool = False
    offload: Offload = "none"
    offload_ratio: float = 1.0  # share of the optimizer states and their gradients that goes to the host
    stage_layers: tuple[int, ...] | None = None  # None: as even as possible
    fused_loss: bool = False  # cross-entropy in one kernel, on 16-bit logits
    compiled: bool = False  # torch.compile fuses the passes over activations
    compiled_loss: bool = False  # our own loss is compiled, too
    compiled_head: bool = False  # with the head in one piece, so that the gradient of the logits overwrites them
    activations_on_host: bool = False  # those kept for the backward pass are in the host's memory
    on_nvme: bool = False  # what is offloaded is on NVMe, not in the host's memory
    optimizer_mode: OptimizerMode = "fused"  # for states on the GPU; the host updates what is offloaded
    loss_chunks: int = 1  # pieces in which logits are computed, and recomputed in the backward pass
    one_pass_loss: bool = False  # our loss with its gradients in one pass: nothing is recomputed

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "vp", "micro_batch", "micro_batches", "loss_chunks"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}, but must be at least 1", f"give a positive {name}")
        if self.shape.heads % self.tp:
            raise LayoutError(
                f"tp {self.tp} does not divide the {self.shape.heads} heads",
                f"use a tp that divides {self.shape.heads}",
            )
        if self.pp * self.vp > self.shape.layers:
            raise LayoutError(
                f"pp {self.pp} x vp {self.vp} needs as many layers, but the model has {self.shape.layers}",
                f"use a pp x vp of {self.shape.layers} or fewer",
            )

    @property
    def layout(self) -> Layout:
        return Layout(self.tp, self.pp, self.dp)

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.micro_batches * self.dp
