"""What ZeRO holds beside its states under our configuration (settings/ds_config.py), by reading DeepSpeed 0.19.8.

A bucket is allocated whole, and is as long as the configuration says. A gradient that is longer is reduced by itself.

Measured with torch's profiler on a CPU, all allocations of a step, 19M parameters, at one and two ranks, in bf16 and
fp32 (tests/plan/test_held_bytes.py does it at one rank). fp16, which DeepSpeed does not train in on a CPU, by reading.
"""

from __future__ import annotations

from hpc_gpt.plan.parameters import layer_params, outer_params
from hpc_gpt.plan.states import rule_of
from hpc_gpt.plan.training import Training
from hpc_gpt.settings.ds_config import BUCKET_ELEMENTS, BUCKET_ELEMENTS_ALONE

PREFETCH = 5e7
# Elements of a gradient whose norm is taken at once.
NORM = 2.5e8


def bucket_elements(training: Training) -> float:
    """Elements of a bucket: ds_config.bucket_elements of a Training."""
    shape = training.shape
    whole = shape.layers * layer_params(shape, 1) + outer_params(shape, 1, 1, 0)
    return min(BUCKET_ELEMENTS_ALONE if training.dp * training.cp == 1 else BUCKET_ELEMENTS, whole)


def zero_buffers(training: Training, params: float) -> float:
    """Bytes of buckets, of their copies on the way, and of gradients that wait; `params` of one GPU of the stage."""
    stage, ranks = training.zero_stage, training.dp * training.cp
    bucket = bucket_elements(training)
    filled = min(bucket, params)
    norm = 0.0
    if ranks == 1:
        # The embedding's gradient is longer than these smaller buckets, and offloading takes its norm in fp64.
        table = training.shape.vocab / training.tp * training.shape.hidden
        filled = min(max(bucket, table), params)
        norm = 8 * min(table, NORM) if training.offload != "none" else 0.0
    width = 4 if training.dtype == "fp32" else 2
    sent = 2 if training.dtype == "fp16" else 4  # data_types.grad_accum_dtype, communication_data_type
    if rule_of(training) == "bf16-optimizer-immediate":
        # runtime/engine.py, allreduce_no_retain: the fp32 gradients are one tensor and are flattened in one piece.
        return 4 * params if ranks > 1 else 0.0
    if stage == 0:
        return width * filled if ranks > 1 else 0.0
    if stage == 1:
        # A pipeline's engine allocates one for its reduction beside the optimizer's own (reduce_gradients).
        return sent * bucket * (2 if training.engine == "deepspeed-3d" else 1)
    if stage == 2:
        # Two of them, one being filled while the other is sent (overlap_comm), from two ranks on.
        buckets = 2 if ranks > 1 and training.offload == "none" else 1
        # Flattened, and turned into fp32 to be sent and back.
        copies = width + sent if width != sent else width if ranks > 1 else 0
        # Without a wider type to be summed in, a further micro-batch's gradients are beside the sums until its end.
        further = ranks == 1 and width == sent and training.micro_batches > 1 and training.offload == "none"
        return width * bucket * buckets + copies * filled + (width * params if further else 0.0) + norm
    # reduce_scatter_coalesced: the bucket's gradients end to end, and this rank's share of them.
    ahead = width * min(PREFETCH, params) if ranks > 1 else 0.0
    return sent * bucket + sent * filled * (1 + 1 / ranks) + ahead + norm


def standing_bucket(training: Training) -> float:
    """Bytes of the bucket that ZeRO-3 keeps from one step to the next; 0 where it has none, or it is given back."""
    if training.bytes_rule is not None or training.zero_stage != 3:
        return 0.0
    return bucket_elements(training) * (2 if training.dtype == "fp16" else 4)
