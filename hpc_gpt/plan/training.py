"""The input of a prediction: a model's shape, its layout, and how it is trained, by us or by others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from hpc_gpt.errors import LayoutError
from hpc_gpt.settings.ds_config import stage_that_runs
from hpc_gpt.settings.engines import OFFERS, has_zero
from hpc_gpt.settings.experiment import Engine, EngineName, Recompute, Train
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.model_shape import ModelShape, partition_layers
from hpc_gpt.settings.resolve import Resolved

Offload = Literal["none", "optimizer", "full"]
OptimizerMode = Literal["fused", "foreach", "for-loop", "compiled"]
# Keys of [engine] that a Training has under the same name.
_SHARED = ("recompute", "offload", "offload_ratio", "sequence_parallel", "sharded_optimizer")
# Keys of [engine] that the planner chooses; it takes every other one from the experiment as it is.
PLANNED = ("name", "zero_stage", "recompute", "offload", "sequence_parallel", "sharded_optimizer")
_INTERLEAVED = "--num-layers-per-virtual-pipeline-stage"


@dataclass(frozen=True)
class PublishedShape(ModelShape):
    """A decoder that others trained. Llama's has `gated`, `kv_heads`, no tying, no biases and no learned positions.

    `ffn` is the width of the MLP; None means 4 x hidden.
    """

    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    biases: bool = True
    positions: bool = True

    @property
    def mlp(self) -> int:
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def kv_share(self) -> float:
        return 1.0 if self.kv_heads is None else self.kv_heads / self.heads

    @property
    def block_params(self) -> int:
        """12 h^2 + 13 h for GPT-2's; h^2 (2 + 2 kv/a) + 3 h ffn + 2 h for a gated one without biases (planner README,
        closed form 1)."""
        hidden, kv = self.hidden, self.head_dim * (self.kv_heads or self.heads)
        matrices = 2 * hidden**2 + 2 * hidden * kv + (3 if self.gated else 2) * hidden * self.mlp
        biases = 2 * hidden + 2 * kv + self.mlp + hidden if self.biases else 0
        return matrices + biases + (2 if self.gated else 4) * hidden

    @property
    def params(self) -> int:
        return super().params - (0 if self.positions else self.seq * self.hidden)


@dataclass(frozen=True)
class Training:
    """A shape, its layout, and everything else that memory or time depends on. `engine` is a name of an experiment's.

    `bytes_rule` names how another program's engine holds its states (states.RULES); None means our engine.
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
    bytes_rule: str | None = None
    sharded_optimizer: bool = False
    offload: Offload = "none"
    offload_ratio: float = 1.0  # share of the optimizer states and their gradients that goes to the host
    stage_layers: tuple[int, ...] | None = None  # None: as even as possible
    fused_loss: bool = False  # cross-entropy in one kernel, on 16-bit logits
    compiled: bool = False  # torch.compile fuses the passes over activations
    compiled_loss: bool = False  # our own loss is compiled, too
    activations_on_host: bool = False  # those kept for the backward pass are in the host's memory
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
    def sharding(self) -> int:
        """What is sharded over dp, as a ZeRO stage. FSDP shards everything unless its stage says less."""
        return 3 if self.engine == "fsdp" and self.zero_stage == 0 else self.zero_stage

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.micro_batches * self.dp

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed runs it, in our engine or another program's."""
        return has_zero(self.engine)


def training_of(resolved: Resolved) -> Training:
    """The training of a resolved experiment. Offload to NVMe counts as the host's memory."""
    engine, model, batch, dtype = resolved.engine, resolved.model, resolved.batch, resolved.train.dtype
    pp = resolved.layout.pp
    return Training(
        model,
        **asdict(resolved.layout),
        vp=_chunks(engine, model.layers, pp),
        micro_batch=batch.micro_batch,
        micro_batches=batch.micro_batches,
        zero_stage=stage_that_runs(engine.name, engine.zero_stage or 0, dtype),
        dtype=dtype,
        engine=engine.name,
        stage_layers=None if engine.partition == "layers" else tuple(partition_layers(model, pp, engine.partition)),
        optimizer_mode=update_mode(resolved.train),
        **{name: getattr(engine, name) for name in _SHARED},
        **traits_of(engine, engine.name, resolved.cluster.device),
    )


def traits_of(engine: Engine, name: str, device: str | None) -> dict[str, Any]:
    """Fields of a Training that follow from the device and those switches of `engine` that the engine `name` has.

    Our engines use PyTorch's attention kernels: only `math` keeps a matrix of scores. Megatron-LM's kernels that keep
    none need an Ampere or newer device.
    """
    if name == "megatron-lm":
        return {"flash": not (device or "").startswith("v100")}
    switches = OFFERS[name].switches
    return {
        "flash": engine.attention != "math",
        "compiled": engine.compile != "none",
        "compiled_loss": engine.compile != "none",
        "activations_on_host": engine.activation_offload and "activation_offload" in switches,
        "loss_chunks": engine.loss_chunks if "loss_chunks" in switches else 1,
        "one_pass_loss": engine.one_pass_loss and "one_pass_loss" in switches,
    }


def update_mode(train: Train) -> OptimizerMode:
    """How the GPU computes the update; fused by default. `host` is the fused kernel on the CPU."""
    mode = train.optimizer_mode
    return "fused" if mode is None or mode == "host" else mode


def engine_for(training: Training, base: Engine) -> Engine:
    """The `[engine]` table that runs the training, with those switches of `base` that its engine has."""
    switches = {name: getattr(base, name) for name in OFFERS[training.engine].switches}
    if training.pp == 1:
        switches["partition"] = "layers"
    if training.zero_stage != 3:
        switches["tiles"] = 1
    if training.offload == "none":
        switches["offload_path"] = None
    if training.engine == "megatron-lm":
        switches["megatron_args"] = _with_chunks(base.megatron_args, training)
    switches |= {name: getattr(training, name) for name in _SHARED}
    zero_stage = training.zero_stage if has_zero(training.engine) else None
    return Engine(**switches, name=cast(EngineName, training.engine), zero_stage=zero_stage)


def _chunks(engine: Engine, layers: int, pp: int) -> int:
    """Interleaved chunks of a stage, by Megatron-LM's own arguments."""
    arguments = [part for argument in engine.megatron_args for part in argument.split("=", 1)]
    if _INTERLEAVED not in arguments[:-1]:
        return 1
    deep = arguments[arguments.index(_INTERLEAVED) + 1]
    return max(1, layers // (pp * int(deep))) if deep.isdigit() and int(deep) else 1


def _with_chunks(arguments: Sequence[str], training: Training) -> tuple[str, ...]:
    """Megatron-LM's arguments with the training's chunks instead of any given before."""
    kept = [
        argument
        for before, argument in zip(("", *arguments), arguments, strict=False)
        if _INTERLEAVED not in (before, argument.partition("=")[0])
    ]
    if training.vp > 1:
        kept += [_INTERLEAVED, str(training.shape.layers // (training.pp * training.vp))]
    return tuple(kept)
