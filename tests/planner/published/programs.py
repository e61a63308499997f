"""What other programs of an engine's kind do, whose tables people publish, if a row does not say it.

`KINDS` has the habits by our engine's name, `PROGRAMS` how they hold their states, by a name for the tests.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from hpc_gpt.core.engines.base.ds_config import PREFETCH_ELEMENTS
from hpc_gpt.core.engines.base.training import LOGIT_BYTES, StateBytes, States, Training, zero_states
from hpc_gpt.core.engines.ddp import Ddp
from hpc_gpt.core.engines.fsdp import Fsdp
from hpc_gpt.core.engines.megatron_lm import LOGIT_IN_PLACE, one_gradient_buffer

# reduce_bucket_size and allgather_bucket_size by DeepSpeed's default.
BUCKET_ELEMENTS = 5e8


@dataclass(frozen=True)
class Kind:
    """The habits of programs of one engine's kind."""

    pads_vocabulary: bool = True
    flash: bool = False  # on every device that can
    sequence_parallel: bool = False  # with tp
    fused_loss: bool = False  # with flash attention
    loss_bytes: float = 14.0  # of a logit in 16 bits at the peak, if no kernel fuses the loss
    loss_compiled: float | None = None  # the same, compiled, if it is not LOGIT_BYTES's
    loss_over_tp: float | None = None  # the same by operators, over tp, if it is more
    keeps_logits: bool = False  # until the step

    def logit_bytes(self, training: Training) -> float:
        """Bytes of one logit at the peak.

        Megatron: 2 + 4 + 4 for 16 bits, fp32, softmax (planner README, closed form 4). DeepSpeed's pipeline keeps the
        loss of the last micro-batch and its graph, 14 bytes, through the step (seed 001's log: 0.68 GiB of the last
        stage). PyTorch's cross-entropy in fp32: 2 + 4 for the log-softmax and two gradients of 4; one gradient less in
        a compiled model. transformers' loss stays in 16 bits: logits, their shifted copy, log-softmax and two
        gradients. A fused kernel holds the logits and their gradient alone.
        """
        if training.fused_loss == "jit" and self.loss_compiled is not None:
            return self.loss_compiled
        if training.fused_loss in LOGIT_BYTES:
            return LOGIT_BYTES[training.fused_loss]
        if self.loss_over_tp is not None and training.tp > 1 and training.dtype != "fp32":
            return self.loss_over_tp
        if training.dtype == "fp32":
            return 16.0
        return min(self.loss_bytes, 10.0) if training.compiled and training.fused_loss is None else self.loss_bytes


KINDS = defaultdict(Kind) | {
    "ddp": Kind(pads_vocabulary=False),
    "deepspeed-3d": Kind(keeps_logits=True),
    "fsdp": Kind(
        pads_vocabulary=False,
        flash=True,  # it came with PyTorch 2's fused attention
        sequence_parallel=True,  # PyTorch's parallel styles do
        loss_compiled=5.0,  # logits and gradient in 16 bits, rows' sums (torchtitan, June 2025)
        loss_over_tp=20.0,  # torch.distributed.tensor.parallel.loss: four fp32 tensors in its backward pass
        fused_loss=True,  # flash_attn.losses.cross_entropy, the default of llm-foundry and others
    ),
    "hf-deepspeed": Kind(loss_bytes=10.0),
    "megatron-lm": Kind(loss_bytes=10.0),
}


class Program(States):
    """A program that is not ours: the loss is that of its kind."""

    def logit_bytes(self, training: Training) -> float:
        return KINDS[training.engine].logit_bytes(training)

    def keeps_logits(self, training: Training) -> bool:
        return KINDS[training.engine].keeps_logits


class OthersDdp(Program, Ddp):
    """PyTorch's DDP: it holds what our engine holds."""


class OthersFsdp(Program, Fsdp):
    """PyTorch's FSDP: it holds what our engine holds."""

    synchronizations = 1.0  # fitted with it: data, logs and clipping of their own loops
    splits_by_dtensor = True


class MegatronFsdp(OthersFsdp):
    """Megatron-Core's FSDP: its layers are Megatron's."""

    is_unfused = False
    splits_by_dtensor = False
    scales_first = is_pytorchs = False
    gathers_ahead = True


class Megatron(Program):
    """Megatron-LM: as our engine of that name does, and an update that is counted whole."""

    def state_bytes(self, training: Training) -> StateBytes:
        return one_gradient_buffer(training)

    def logit_bytes(self, training: Training) -> float:
        at_most = LOGIT_IN_PLACE if training.shape.is_mixture and training.fused_loss is None else math.inf
        return min(at_most, super().logit_bytes(training))


class Nanotron(Megatron):
    """nanotron: operators apart, a loss on fp32 copies, and 16-bit gradients beside their fp32 sums."""

    is_unfused = True

    def state_bytes(self, training: Training) -> StateBytes:
        beside = 2 if training.micro_batches > 1 else 0
        return replace(one_gradient_buffer(training), gradients=4 + beside, step_gradients=4, renewed=beside)

    def logit_bytes(self, training: Training) -> float:
        return LOGIT_BYTES.get(training.fused_loss or "none", 14.0)


class Megatron2021Fp16(Program):
    """Megatron-LM 2.4 in fp16: 2 + 2 + 12, in the step 6 more.

    They are fp32 copies of the fp16 gradients, freed before the next step's first gradient, and a flat copy for the
    all-reduce (planner README: 20 after a step, 22 peak).
    """

    def state_bytes(self, training: Training) -> StateBytes:
        return StateBytes(2, 2, 12, 8, 6)


class DeepspeedFp16(Program):
    """DeepSpeed in fp16, and in bf16 before BF16_Optimizer: ZeRO-0 2 + 2 + 12, in the step 4 more; ZeRO-1 4 + 12/dp, in
    the step 4/dp more; ZeRO-2 2 + 14/dp; ZeRO-3 16/dp (Rajbhandari et al. 2020, section 5; DeepSpeed
    runtime/fp16/fused_optimizer.py and runtime/zero).

    Buckets have DeepSpeed's default sizes, or fewer elements if there are no more parameters; h^2 under ZeRO-3 (Hugging
    Face's "auto" and DeepSpeed's own examples).
    """

    def state_bytes(self, training: Training) -> StateBytes:
        width = 4 if training.dtype == "fp32" else 2
        return zero_states(training, width, width, 4)

    def buckets(self, training: Training, params: float) -> float:
        if training.zero_stage == 0:
            return 0.0
        width = 2 if training.dtype != "fp32" else 4
        if training.zero_stage == 3:
            return width * (2 * min(float(training.shape.hidden) ** 2, params) + min(PREFETCH_ELEMENTS, params))
        # ZeRO-2 fills one while the other is being reduced.
        return width * min(BUCKET_ELEMENTS, params) * (2 if training.zero_stage == 2 else 1)


class Bf16Optimizer(Program):
    """DeepSpeed's BF16_Optimizer: 2 + (2 + 4) + 12/dp (DeepSpeed runtime/bf16_optimizer.py)."""

    def state_bytes(self, training: Training) -> StateBytes:
        return StateBytes(2, 6, 12 / training.dp, 6, 2)

    def buckets(self, training: Training, params: float) -> float:
        return 4 * min(BUCKET_ELEMENTS, params)


PROGRAMS: dict[str, States] = {
    "ddp": OthersDdp(),
    "fsdp": OthersFsdp(),
    "megatron-fsdp": MegatronFsdp(),
    "megatron": Megatron(),
    "nanotron": Nanotron(),
    "megatron-2021-fp16": Megatron2021Fp16(),
    "deepspeed-fp16": DeepspeedFp16(),
    "bf16-optimizer": Bf16Optimizer(),
}


def program_states(engine: str, dtype: str, sharded: bool, sums_in_fp32: bool, stack: str = "") -> States:
    """How a program of the engine's kind holds its states. `sums_in_fp32`: whether the source says that gradients are
    summed in fp32; before BF16_Optimizer a pipeline in bf16 held the same as in fp16."""
    if engine == "fsdp" and "megatron" in stack:
        return PROGRAMS["megatron-fsdp"]
    if engine in ("ddp", "fsdp"):
        return PROGRAMS[engine]
    if "nanotron" in stack:
        return PROGRAMS["nanotron"]
    if engine == "megatron-lm":
        return PROGRAMS["megatron-2021-fp16" if dtype == "fp16" and not sharded else "megatron"]
    return PROGRAMS["bf16-optimizer" if engine == "deepspeed-3d" and sums_in_fp32 else "deepspeed-fp16"]


def offloads_activations(engine: str, zero_stage: int, is_split: bool) -> bool:
    """Whether it keeps recomputed layers' inputs on the host. DeepSpeed's Megatron for ZeRO-3 ships with
    --checkpoint-in-cpu, and only that program splits layers over tp (`is_split`) under ZeRO-3."""
    return engine == "deepspeed-zero" and zero_stage == 3 and is_split
