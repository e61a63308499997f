"""What is to be predicted: a model's shape, how it is split, how it is trained. Values alone, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpc_gpt.errors import LayoutError

Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "full"]
OptimizerMode = Literal["fused", "foreach", "for-loop", "compiled"]


@dataclass(frozen=True)
class Shape:
    """A decoder: GPT-2's by default, Llama's with `gated`, `kv_heads`, untied, no biases and no learned positions.

    `vocab` has its padding. `ffn` is the width of the MLP, 4 hidden unless given.
    """

    hidden: int
    layers: int
    heads: int
    vocab: int = 51200
    seq: int = 1024
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False  # SwiGLU: three matrices in the MLP
    tied: bool = True
    biases: bool = True
    positions: bool = True  # learned, s x h of them

    @property
    def mlp(self) -> int:
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def kv_share(self) -> float:
        """Keys' and values' width over the hidden size: 1 without grouped queries."""
        return 1.0 if self.kv_heads is None else self.kv_heads / self.heads


@dataclass(frozen=True)
class Training:
    """A shape, its layout and everything that decides memory or time. `engine` as in the experiment's.

    `bytes_rule` names how an engine holds its states, where one engine has several (memory.py lists them).
    """

    shape: Shape
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    vp: int = 1  # interleaved chunks a stage
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero_stage: int = 0
    dtype: str = "bf16"
    flash: bool = False
    engine: str = "megatron-lm"
    bytes_rule: str | None = None
    distributed_optimizer: bool = False
    offload: Offload = "none"
    offload_ratio: float = 1.0  # of the optimizer's states and their gradients, the part that goes to the host
    stage_layers: tuple[int, ...] | None = None  # None: as even as can be
    fused_loss: bool = False  # cross-entropy in one kernel, on 16-bit logits
    compiled: bool = False  # torch.compile: passes over activations are fused
    activations_on_host: bool = False  # what is kept for the backward pass waits in the host's memory
    optimizer_mode: OptimizerMode = "fused"  # of what is on the GPU; what is offloaded the host updates
    loss_chunks: int = 1  # logits are made and used up in so many pieces, and made again in the backward pass

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "vp", "micro_batch", "micro_batches", "loss_chunks"):
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
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def sharding(self) -> int:
        """What is sharded over dp, as ZeRO's stages count; of FSDP everything, unless it says less."""
        return 3 if self.engine == "fsdp" and self.zero_stage == 0 else self.zero_stage

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.micro_batches * self.dp
