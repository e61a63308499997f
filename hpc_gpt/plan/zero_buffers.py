"""What ZeRO holds beside its states under our configuration (settings/ds_config.py), by reading DeepSpeed 0.19.8.

A bucket is allocated whole, and is as long as the configuration says. One data-parallel rank that has all weights
exchanges nothing and has none (train/engines/zero_alone.py); what is left there are ZeRO-2's and -3's gradients, which
wait in a list until they would fill one.

Measured with torch's profiler on a CPU, all allocations of a step, 19M parameters, at one and two ranks, in bf16 and
fp32 (tests/plan/test_held_bytes.py does it at one rank). fp16, which DeepSpeed does not train in on a CPU, by reading.
"""

from __future__ import annotations

from hpc_gpt.plan.parameters import layer_params, outer_params
from hpc_gpt.plan.states import rule_of
from hpc_gpt.plan.training import Training
from hpc_gpt.settings.ds_config import BUCKET_ELEMENTS, BUCKET_ELEMENTS_ALONE

PREFETCH = 5e7


def is_alone(training: Training) -> bool:
    """Whether nothing is exchanged: ds_config.is_alone of a Training. Somebody else's run goes DeepSpeed's own way."""
    ours = training.bytes_rule is None and training.engine in ("deepspeed-3d", "deepspeed-zero")
    if not ours or training.dtype == "fp16" or training.dp * training.cp > 1:
        return False
    return training.offload == "none" or (training.offload == "optimizer" and training.zero_stage == 3)


def bucket_elements(training: Training) -> float:
    """Elements of a bucket: ds_config.bucket_elements of a Training."""
    shape = training.shape
    whole = shape.layers * layer_params(shape, 1) + outer_params(shape, 1, 1, 0)
    return min(BUCKET_ELEMENTS_ALONE if is_alone(training) else BUCKET_ELEMENTS, whole)


def zero_buffers(training: Training, params: float) -> float:
    """Bytes of buckets, of their copies on the way, and of gradients that wait; `params` of one GPU of the stage."""
    stage, ranks = training.zero_stage, training.dp * training.cp
    bucket = bucket_elements(training)
    filled = min(bucket, params)
    width = 4 if training.dtype == "fp32" else 2
    sent = 2 if training.dtype == "fp16" else 4  # data_types.grad_accum_dtype, communication_data_type
    if rule_of(training) == "bf16-optimizer-immediate":
        # runtime/engine.py, allreduce_no_retain: the fp32 gradients are one tensor and are flattened in one piece.
        return 4 * params if ranks > 1 else 0.0
    if stage == 0:
        return width * filled if ranks > 1 else 0.0
    if is_alone(training):
        # Of ZeRO-2 in fp32 they are the sums themselves in a step's first micro-batch, and beside them afterwards.
        sums_wait = stage == 2 and training.dtype == "fp32" and training.micro_batches == 1
        # One that is longer than a bucket comes all the same.
        waiting = max(filled, training.shape.vocab / training.tp * training.shape.hidden)
        return width * waiting if stage > 1 and not sums_wait else 0.0
    if stage == 1:
        # A pipeline's engine allocates one for its reduction beside the optimizer's own (reduce_gradients).
        return sent * bucket * (2 if training.engine == "deepspeed-3d" else 1)
    if stage == 2:
        # Two of them, one being filled while the other is sent (overlap_comm), from two ranks on.
        buckets = 2 if ranks > 1 and training.offload == "none" else 1
        # Flattened, and turned into fp32 to be sent and back.
        copies = width + sent if width != sent else width if ranks > 1 else 0
        return width * bucket * buckets + copies * filled
    # reduce_scatter_coalesced: the bucket's gradients end to end, and this rank's share of them.
    return sent * bucket + sent * filled * (1 + 1 / ranks) + (width * min(PREFETCH, params) if ranks > 1 else 0.0)


def standing_bucket(training: Training) -> float:
    """Bytes of the bucket that ZeRO-3 keeps from one step to the next; 0 where it has none, or it is given back."""
    if training.bytes_rule is not None or training.zero_stage != 3 or is_alone(training):
        return 0.0
    return bucket_elements(training) * (2 if training.dtype == "fp16" else 4)
