"""How programs of an engine's kind hold their states, which `[plan] like` and `kind` name: what they hold, and when.

Our engines keep an account of their own. A program has the loss of its kind, whatever holds its states.
"""

import math
from dataclasses import dataclass, replace

from hpc_gpt.core.engines.base.ds_config import PREFETCH_ELEMENTS
from hpc_gpt.core.engines.base.training import LOGIT_BYTES, StateBytes, States, Training, zero_states
from hpc_gpt.core.engines.ddp import Ddp
from hpc_gpt.core.engines.fsdp import Fsdp
from hpc_gpt.core.engines.megatron_lm import LOGIT_IN_PLACE, one_gradient_buffer
from hpc_gpt.core.settings.services import ProgramKind

# reduce_bucket_size and allgather_bucket_size in DeepSpeed's default configuration.
BUCKET_ELEMENTS = 5e8


@dataclass(frozen=True)
class Loss:
    """Bytes of a logit at the peak of the loss of programs like an engine."""

    in_16_bits: float = 14.0  # if no kernel fuses the loss
    compiled: float | None = None  # None: as LOGIT_BYTES has it
    over_tp: float | None = None  # by operators, over tp; None: as without tp
    keeps_logits: bool = False  # until the step

    def logit_bytes(self, training: Training) -> float:
        """Bytes of one logit at the peak.

        Megatron: 2 + 4 + 4 for 16 bits, fp32, softmax. DeepSpeed's pipeline keeps the loss of the last micro-batch and
        its graph, 14 bytes, through the step (0.68 GiB of the last stage in a log of it). PyTorch's cross-entropy in
        fp32: 2 + 4 for the log-softmax and two gradients of 4; one gradient less in a compiled model. transformers'
        loss stays in 16 bits: logits, their shifted copy, log-softmax and two gradients. A fused kernel holds the
        logits and their gradient alone.
        """
        if training.fused_loss == "jit" and self.compiled is not None:
            return self.compiled
        if training.fused_loss in LOGIT_BYTES:
            return LOGIT_BYTES[training.fused_loss]
        if self.over_tp is not None and training.tp > 1 and training.dtype != "fp32":
            return self.over_tp
        if training.dtype == "fp32":
            return 16.0
        return min(self.in_16_bits, 10.0) if training.compiled and training.fused_loss is None else self.in_16_bits


# {engine that a program is like: its loss}
LOSSES = {
    "deepspeed-3d": Loss(keeps_logits=True),
    # Compiled: logits and gradient in 16 bits, rows' sums (torchtitan, June 2025). Over tp:
    # torch.distributed.tensor.parallel.loss has four fp32 tensors in its backward pass.
    "fsdp": Loss(compiled=5.0, over_tp=20.0),
    "hf-deepspeed": Loss(in_16_bits=10.0),
    "megatron-lm": Loss(in_16_bits=10.0),
}


class Program(States):
    """A program that is not ours: the loss is that of its kind."""

    def logit_bytes(self, training: Training) -> float:
        return LOSSES.get(training.engine, Loss()).logit_bytes(training)

    def keeps_logits(self, training: Training) -> bool:
        return LOSSES.get(training.engine, Loss()).keeps_logits


class OthersDdp(Program, Ddp):
    """PyTorch's DDP: it holds what our engine holds. A compiler that sees the checkpoint drops what is not needed."""

    def stops_early(self, training: Training) -> bool:
        return True


class OthersFsdp(Program, Fsdp):
    """PyTorch's FSDP: it holds what our engine holds."""

    synchronizations = 1.0  # fitted with it: data, logs and clipping of their own loops
    splits_by_dtensor = True

    def stops_early(self, training: Training) -> bool:
        return True


class MegatronFsdp(OthersFsdp):
    """Megatron-Core's FSDP: its layers are Megatron's."""

    is_unfused = False
    splits_by_dtensor = False
    scales_first = is_pytorchs = False
    gathers_ahead = True

    def stops_early(self, training: Training) -> bool:
        return False


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
    all-reduce (20 after a step, 22 at the peak).
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


_ONE_KIND: dict[str, States] = {"ddp": OthersDdp(), "fsdp": OthersFsdp(), "megatron-lm": Megatron()}
_MEGATRON_2021, _DEEPSPEED = Megatron2021Fp16(), DeepspeedFp16()
# {(engine, kind): states} of the kinds that are not the usual one
KINDS: dict[tuple[str, ProgramKind], States] = {
    ("fsdp", "gathers ahead"): MegatronFsdp(),
    ("megatron-lm", "two gradients"): Nanotron(),
    ("deepspeed-3d", "fp32 sums"): Bf16Optimizer(),
}


def program_states(engine: str, kind: ProgramKind | None, dtype: str, sharded: bool) -> States:
    """How a program that is like `engine` holds its states. Megatron-LM in fp16 without a distributed optimizer copies
    gradients in the step. `kind` is one of KINDS, or None for the usual one."""
    if kind is not None:
        return KINDS[engine, kind]
    if engine == "megatron-lm" and dtype == "fp16" and not sharded:
        return _MEGATRON_2021
    return _ONE_KIND.get(engine, _DEEPSPEED)
