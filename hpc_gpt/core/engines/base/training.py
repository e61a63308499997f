"""The input of every prediction: a model's shape, its layout, and how it is trained, by us or by others; and the bytes
per parameter that a program holds: weights, gradients and optimizer states."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, get_args

from hpc_gpt.core.errors import ConfigError, LayoutError, check_sizes
from hpc_gpt.core.optimizers import OptimizerFacts, optimizer_named
from hpc_gpt.core.recomputation import Recompute, recomputation
from hpc_gpt.core.settings.experiment import CpExchange, Matmul
from hpc_gpt.core.settings.layout import AXES, Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.services import AttentionKernel, CudaGraph, Dispatcher, GradSum, HeldAs, Loss, Routing
from hpc_gpt.core.settings.shape_split import check_split, expert_params, hidden_share, kind_params

Offload = Literal["none", "optimizer", "full"]
OptimizerMode = Literal["fused", "foreach", "for-loop"]
# A tensor of seq x seq that attention gets, because its kernel cannot leave keys out by itself. documents: numbers
# added to the scores of each sample, in all layers; full: only in layers without a window; window: the same for all
# samples, in layers with a window; these stay for all layers. layers: booleans in layers with a window, in each of
# which the kernel keeps a copy in numbers. (FlexAttention's tables, 16 bytes for 128 x 128 scores, are not counted.)
AttentionMask = Literal["none", "documents", "full", "window", "layers"]
# Bytes of a logit at the peak of the loss: operators in 16 bits, compiled passes in fp32, one kernel.
LOGIT_BYTES = {"half": 8.0, "jit": 10.0, "kernel": 4.0}
_SIZES = (*AXES, "ep", "etp", "vp", "micro_batch", "micro_batches", "loss_chunks", "muon_steps")
_LISTED = {
    name: get_args(values)
    for name, values in {
        "cp_exchange": CpExchange, "matmul": Matmul, "attention": AttentionKernel, "grad_sum": GradSum,
        "fused_loss": Loss, "states": HeldAs, "dispatcher": Dispatcher, "routing": Routing, "mask": AttentionMask,
    }.items()
}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """A shape, its layout, and everything else that memory or time depends on. `engine`: a name as in an experiment.

    `program_states` (a `States`): how another program of the engine's kind holds its states; None means our engine.
    Raises LayoutError for a layout that does not split evenly, ConfigError for a value that is not listed.
    """

    shape: ModelShape
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1  # ranks of cp x dp that divide the experts of a layer
    etp: int | None = None  # ranks that share an expert; None: tp
    shard: int | None = None  # ranks of the data axis that share weights and optimizer; None: all
    vp: int = 1  # interleaved chunks per stage
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    zero_stage: int = 0
    dtype: str = "bf16"
    tf32: bool = False  # products of fp32 numbers run as TF32, where the device has it
    flash: bool = False  # the attention kernel keeps no matrix of scores
    engine: str = "megatron-lm"
    program_states: Any = None
    sharded_optimizer: bool = False
    offload: Offload = "none"
    stage_layers: tuple[int, ...] | None = None  # None: as even as possible
    compiled: bool = False  # torch.compile fuses the passes over activations
    compiled_loss: bool = False  # our own loss is compiled, too
    # The loss is compiled together with the head, so the gradient of the logits overwrites them.
    compiled_head: bool = False
    mask: AttentionMask = "none"
    activations_on_host: bool = False  # activations for the backward pass are in the host's memory
    optimizer: str = "adamw"
    optimizer_mode: OptimizerMode = "fused"  # how states on the GPU are updated; the host updates offloaded ones
    muon_steps: int = 5
    muon_dtype: Literal["bf16", "fp32"] = "bf16"  # of Newton-Schulz's products, and of matrices under way
    loss_chunks: int = 1  # pieces in which logits are computed, and recomputed in the backward pass
    one_pass_loss: bool = False  # our loss computes its gradients in the same pass: nothing is recomputed
    keep_residuals: bool = False  # a compiled layer keeps the residual after attention, not the terms of its sum
    # How it runs, which the layout does not show.
    cp_exchange: CpExchange = "heads"
    matmul: Matmul = "none"
    attention: AttentionKernel = "te"  # the kernel's name if `flash`; te: the best one on the device
    grad_sum: GradSum | None = None  # number format in which gradients are summed, kept and reduced; None: the engine's
    dp_overlap: bool = False  # gradients are reduced, and sharded parameters gathered, during the passes
    gathers_wait: bool = False  # but gathers of parameters wait (an exception to dp_overlap)
    tp_overlap: bool = False  # communication of tensor parallelism overlaps its matrix products
    fused_loss: Loss | None = None  # None: as the engine does
    edges_as_layers: bool = False  # embedding and head each take a layer's place in the split over stages and chunks
    states: HeldAs | None = None  # how a parameter is held, in bytes: 2 + 12, 4 + 8, or 2 + 4; None: as the engine does
    offloaded_layers: int = 0  # layers whose activations are copied to the host
    whole_gradients: bool = False  # ZeRO-2 and -3 reduce only after the last micro-batch
    keeps_weights: bool = False  # FSDP's weights stay gathered from the forward pass of a step to its update
    gather_blocks: int | None = None  # layers whose shards are gathered together; None: by their size
    whole_logits: bool = False  # every tensor-parallel rank gathers all logits
    ep_outside_dp: bool = False  # ep is an axis of its own, whose ranks read the same samples
    dispatcher: Dispatcher | None = None  # how tokens are sent to their experts; None: one copy to each node
    routing: Routing = "real"  # forced balance: every expert gets equally many tokens
    dropless: bool = True  # if false, tokens above an expert's capacity, the mean, are dropped
    padded_experts: bool = False  # experts are multiplied in one batch, each padded to the rows of the largest
    ep_overlap: bool = False  # tokens are sent beside the passes of another micro-batch
    fp8_head: bool = False  # the head's products are in the format of the layers' (`matmul`)
    cuda_graphs: tuple[CudaGraph, ...] = ()  # parts of a layer that are launched as one graph
    experts_alone: bool = False  # `of_experts`: its parameters are those of the routed experts

    apart = False  # whether it is of experts alone, which ep divides: our engines keep and reduce them by themselves

    def __post_init__(self) -> None:
        check_sizes({name: getattr(self, name) for name in _SIZES})
        recomputation(self.recompute)  # raises for a value without a meaning
        for name, values in _LISTED.items():
            if (value := getattr(self, name)) is not None and value not in values:
                raise ConfigError(f"{name} is {value!r:.40}, which is not known", f"use one of {', '.join(values)}")
        if self.cp > 1:
            self._check_context()
        if self.ep > 1 or self.etp is not None:
            self._check_experts()
        if self.shape.heads % self.tp:
            raise LayoutError(
                f"tp {self.tp} does not divide the {self.shape.heads} heads",
                f"use a tp that divides {self.shape.heads}",
            )
        if self.pp * self.vp > self.shape.layers + (2 if self.edges_as_layers else 0):
            raise LayoutError(
                f"pp {self.pp} x vp {self.vp} needs as many layers, but the model has {self.shape.layers}",
                f"use a pp x vp of {self.shape.layers} or fewer",
            )

    def _check_context(self) -> None:
        if self.shape.seq % self.cp:
            raise LayoutError(
                f"cp {self.cp} does not divide the {self.shape.seq} tokens of a sequence",
                f"use a cp that divides {self.shape.seq}",
            )
        heads = self.shape.heads // self.tp
        if self.cp_exchange == "heads" and heads % self.cp:
            raise LayoutError(
                f"cp {self.cp} does not divide the {heads} heads of a rank, which it exchanges for tokens",
                f"use a cp that divides {heads}",
            )

    def _check_experts(self) -> None:
        ranks, experts = self.tp * self.data_ranks, self.shape.experts or 0
        if experts and experts % self.ep == 0 and ranks % (self.ep * self.expert_tp) == 0:
            return
        if not self.ep_outside_dp:
            check_split(self.shape, self.layout)

    @property
    def layout(self) -> Layout:
        if self.ep_outside_dp:
            return Layout(self.tp, self.pp, self.dp * self.ep, self.cp, self.ep)
        return Layout(self.tp, self.pp, self.dp, self.cp, self.ep, self.etp, self.shard)

    @property
    def gpus(self) -> int:
        return self.layout.gpus

    @property
    def width(self) -> int:
        """Bytes of a number in the passes."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def muon_width(self) -> int:
        """Bytes of a number in Muon's products."""
        return 4 if self.muon_dtype == "fp32" else 2

    @property
    def optimizer_facts(self) -> OptimizerFacts:
        return optimizer_named(self.optimizer)

    @property
    def hidden(self) -> float:
        """The share of the layers' matrices among the parameters: of the experts, or of all others."""
        return hidden_share(self.shape, self.experts_alone)

    @property
    def moments(self) -> float:
        """Bytes per parameter of the optimizer's fp32 states."""
        return self.optimizer_facts.moment_bytes(self.hidden)

    @property
    def expert_tp(self) -> int:
        """The number of ranks over which one expert is divided."""
        return self.etp or self.tp

    @property
    def expert_replicas(self) -> int:
        """The number of ranks that share an expert's gradients and states."""
        ranks = self.tp * self.data_ranks * (self.ep if self.ep_outside_dp else 1)
        return ranks // (self.ep * self.expert_tp)

    @property
    def params_of_kinds(self) -> tuple[tuple[float, float], ...]:
        """Parameters on one GPU of a layer of each kind: (all, those of routed experts)."""
        return _params_of_kinds(self.shape, self.tp, self.ep, self.etp)

    @property
    def layer_params(self) -> float:
        """Parameters of the largest layer on one GPU."""
        return max(params for params, _ in self.params_of_kinds)

    @property
    def of_experts(self) -> "Training":
        """This training with the layout of its experts: dp is the number of an expert's replicas."""
        of_experts = object.__new__(Training)  # made without __init__: a search asks for thousands, which need no check
        degrees = {"dp": self.expert_replicas, "cp": 1, "ep": 1, "etp": None, "ep_outside_dp": False}
        of_experts.__dict__.update(vars(self) | degrees, experts_alone=True, apart=self.ep > 1)
        return of_experts

    @property
    def data_ranks(self) -> int:
        """The number of ranks that share gradients, optimizer and, if sharded, weights: cp x dp."""
        return self.cp * self.dp

    @property
    def shards(self) -> int:
        """The number of those ranks that share weights and optimizer, where these are sharded."""
        return self.shard or self.data_ranks

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch on one rank."""
        return self.micro_batch * self.shape.seq // self.cp

    @property
    def key_copies(self) -> float:
        """Copies of each key head on the ranks of cp: above 1 if they exchange heads and there are fewer than ranks."""
        keys = max(1, self.shape.key_heads // self.tp)
        return max(1.0, self.cp / keys) if self.cp_exchange == "heads" else 1.0

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.micro_batches * self.dp


@lru_cache(maxsize=4096)
def _params_of_kinds(shape: ModelShape, tp: int, ep: int, etp: int | None) -> tuple[tuple[float, float], ...]:
    return tuple((kind_params(kind, tp, ep, etp), expert_params(kind, tp, ep, etp)) for kind in shape.kinds)


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter on one GPU.

    `gradients`: in the passes; `step_gradients`: in the optimizer step. `renewed`: freed and allocated again in every
    step, which leaves holes. `host`: offloaded to the host.
    """

    parameters: float
    gradients: float
    optimizer: float
    step_gradients: float
    renewed: float
    host: float = 0.0


class States:
    """The way in which a program holds its states. The defaults describe one that reduces without buckets."""

    name: ClassVar[str]
    # Whether layers like GPT-2's keep dropout masks.
    has_dropout: ClassVar[bool] = True
    # Whether a layer's operators run one by one, without fused kernels; None: as in the engine.
    is_unfused: ClassVar[bool | None] = None
    # Synchronizations in a step, as a multiple of DeepSpeed's in its documented configuration.
    synchronizations: ClassVar[float] = 1.0
    scales_first: ClassVar[bool] = False  # whether each cast to FP8 first finds its scale in a pass of its own
    # PyTorch's FSDP, whose hooks gather, and its context_parallel: a ring of every head's keys, summed by operators.
    is_pytorchs: ClassVar[bool] = False
    gathers_ahead: ClassVar[bool] = False  # whether shards are gathered before the host comes to their layer
    # Whether tp is by PyTorch's parallel styles, which dispatch operators again.
    splits_by_dtensor: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Names the class by its module."""
        cls.name = cls.__module__.rpartition(".")[2].replace("_", "-")

    def rule(self, training: Training) -> str:
        """The name of the rule by which the states are held, as `plan --explain` prints it."""
        return self.name

    def state_bytes(self, training: Training) -> StateBytes:
        """Bytes per parameter that the training holds."""
        raise NotImplementedError

    def update_bytes(self, training: Training, params: float, matrix: float, table: float) -> float:
        """Bytes of the update's temporaries, in addition to StateBytes; `params`: parameters on one GPU of the stage.

        `matrix`: parameters of a layer's largest matrix, of which two are updated in a row. `table`: parameters of the
        embedding, 0 if the stage has none.
        """
        return 0.0

    def buckets(self, training: Training, params: float) -> float:
        """Bytes of the buckets through which gradients are reduced; `params`: parameters on one GPU of the stage."""
        return self.lasting_bucket(training)

    def stops_early(self, training: Training) -> bool:
        """Whether the recomputation of a layer ends before its last product, as PyTorch's checkpoint without reentrance
        does: it stops once every saved tensor is there (torch.utils.checkpoint, set_checkpoint_early_stop)."""
        return False

    def copies_by_layer(self, training: Training) -> bool:
        """Whether 16-bit gradients are copied by whole layers, not by matrices."""
        return False

    def keeps_logits(self, training: Training) -> bool:
        """Whether logits are kept until the step."""
        return False

    def logit_bytes(self, training: Training) -> float:
        """Bytes of one logit at the peak of a backward pass."""
        raise NotImplementedError

    def lasting_bucket(self, training: Training) -> float:
        """Bytes of a bucket that stays allocated from step to step."""
        return 0.0


def zero_states(training: Training, weight: int, gradient: int, master: int, moments: float = 1.0) -> StateBytes:
    """ZeRO's states by bytes per parameter: the optimizer over dp from stage 1 on, gradients from 2, weights in 3.

    The optimizer uses fp32 copies of its share of the gradients, which are allocated in the step and freed after
    it (Rajbhandari et al. 2020, section 5). `moments`: the size of its moments by that in fp32.
    """
    stage, dp = training.zero_stage, training.shards
    parameters = weight / dp if stage == 3 else float(weight)
    gradients = gradient / dp if stage >= 2 else float(gradient)
    optimizer = (master + moments * training.moments) / (dp if stage >= 1 or training.sharded_optimizer else 1)
    copy = (4 / dp if stage >= 1 or training.sharded_optimizer else 4.0) if gradient == 2 else 0.0
    host = 0.0
    if training.offload != "none" and stage >= 1:
        # The host has master weights, moments and fp32 gradients; under ZeRO-2 and -3 each gradient is sent at once.
        host, optimizer, copy = optimizer + 4 / dp, 0.0, 0.0
        gradients = 0.0 if stage >= 2 else gradients
        if training.offload == "full":
            host, parameters = host + parameters, 0.0
    return StateBytes(parameters, gradients, optimizer, gradients + copy, gradients + copy, host)


# For `Training.states`: bytes per parameter of the weight and of the master weight, and the moments by those in fp32.
_HELD = {"mixed": (2, 4, 1.0), "fp32": (4, 0, 1.0), "bf16": (2, 0, 0.5), "bf16 moments": (2, 4, 0.5)}


def stated_states(training: Training, by_program: StateBytes, sharding: int) -> StateBytes:
    """The states as the training states them; `by_program`: those of its program, `sharding`: a ZeRO stage.

    Gradients that are summed in a buffer leave no holes; the optimizer copies 16-bit gradients to fp32. If the sums are
    not sharded, weights also stay gathered in 16 bits (FSDP2 in a pipeline).
    """
    ranks, states = training.shards, by_program
    width = 4 if training.grad_sum == "fp32" else 2
    if training.states is not None or (training.grad_sum is not None and sharding < 3):
        weight, master, moments = _HELD[training.states or "mixed"]
        if training.grad_sum is None:
            width = 2 if training.states == "bf16" else 4
        staged = replace(training, zero_stage=sharding)
        states = zero_states(staged, weight, width, master, moments)
        if training.states == "fp32" and sharding in (1, 2):
            states = replace(states, parameters=states.parameters / ranks + 2)
        copied = (
            0.0
            if training.states is not None and training.states not in ("mixed", "bf16 moments")
            else states.step_gradients - states.gradients
        )
        states = replace(
            states, step_gradients=states.gradients + copied, renewed=copied if sharding < 2 else states.renewed
        )
    if training.whole_gradients and ranks > 1 and training.micro_batches > 1:
        if training.pp > 1:  # weights stay gathered; torchtitan's rows also hold the shards of the gradients
            states = replace(states, parameters=states.parameters + 2.0, gradients=states.gradients + width)
        else:  # shards replace the whole gradients as these are reduced, and leave no holes
            states = replace(states, gradients=float(width), renewed=0.0)
    return states


def plain_states(training: Training) -> StateBytes:
    """The states in fp32, where at most the optimizer is sharded: 4 + 4 + 8 bytes."""
    return zero_states(training, weight=4, gradient=4, master=0)
