"""Bytes that are neither states nor activations: buckets, gathered layers, what pipelines send; CUDA's own.

Elements of buckets are the defaults of DeepSpeed's configuration (reduce_bucket_size, allgather_bucket_size 5e8,
stage3_prefetch_bucket_size 5e7), bounded by what there is to put into them.
"""

from __future__ import annotations

from hpc_gpt.plan.activations import LayerBytes
from hpc_gpt.plan.parameters import layer_params, outer_params
from hpc_gpt.plan.training import Training

BUCKET = 5e8
PREFETCH = 5e7
GIB = 2.0**30
# CUDA's context with the kernels of torch, cuBLAS and NCCL on one GPU: 0.5 on V100 to 0.9 on H100 with CUDA graphs
# and workspaces. And the channels' buffers of one NCCL communicator: 2 x 4 MiB x 16 to 24 channels and up.
CONTEXT_GIB = 0.75
COMMUNICATOR_GIB = 0.4


def work_buffers(training: Training, rule: str, params: float, stage: int) -> float:
    """Beside states and activations while micro-batches run, in bytes; `params` of one GPU of the stage."""
    engine, zero = training.engine, training.zero_stage
    half = 4 if training.dtype == "fp32" else 2
    if engine == "fsdp":
        return _gathered(training, rule, params, 2 + 4)
    if engine == "ddp":
        return 0.0
    if engine in ("deepspeed-zero", "hf-deepspeed", "deepspeed-3d") and zero >= 1:
        if zero == 3:
            return _gathered(training, rule, params, 2) + half * (2 * min(BUCKET, params) + min(PREFETCH, params))
        wide = 4 if rule.startswith("bf16-optimizer") else half
        # Filled by one bucket while the other is on its way.
        return wide * min(BUCKET, params) * (2 if zero == 2 else 1)
    return 0.0


def _gathered(training: Training, rule: str, params: float, gradient: int) -> float:
    """Layers whole on every GPU: the one at work and the next, the embeddings and head, one layer's gradients."""
    width = 4 if training.dtype == "fp32" else 2
    if training.dp * training.cp == 1:
        return 0.0
    layer = layer_params(training.shape, training.tp)
    outer = outer_params(training.shape, training.tp, training.pp, 0)
    if training.pp == 1:
        return width * (2 * layer + outer) + gradient * max(layer, outer)
    return width * (2 * layer + outer) + gradient * layer


def sent_between_stages(training: Training, layer: LayerBytes, flying: float, stage: int) -> float:
    """Outputs that a stage keeps until their gradient comes, beside its layers' inputs: one stream a micro-batch.

    DeepSpeed splits them over the tensor-parallel group (pipe/engine.py, PartitionedTensor).
    """
    if training.pp == 1 or stage == training.pp - 1:
        return 0.0
    if training.engine == "deepspeed-3d":
        return flying * layer.stream / training.tp
    return flying * layer.stream


def context_gib(training: Training) -> float:
    """GiB that nvidia-smi shows beyond what PyTorch reserves: CUDA's context, and NCCL's buffers for the world and
    for every axis that is split."""
    if training.gpus == 1:
        return CONTEXT_GIB
    split = sum(size > 1 for size in (training.tp, training.pp, training.dp, training.cp))
    return CONTEXT_GIB + COMMUNICATOR_GIB * (1 if split == 1 else split + 1)
