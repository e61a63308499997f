"""Bytes that are neither states nor activations: buckets, gathered layers, what pipelines send; CUDA's own.

Elements of buckets are the defaults of DeepSpeed's configuration (reduce_bucket_size, allgather_bucket_size 5e8,
stage3_prefetch_bucket_size 5e7, stage3_max_live_parameters and stage3_max_reuse_distance 1e9); of somebody else's run
bounded by what there is to put into them, of ours as `zero_buffers` has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_gpt.plan.activations import LayerBytes
from hpc_gpt.plan.parameters import layer_params, outer_params
from hpc_gpt.plan.states import rule_of
from hpc_gpt.plan.training import Training
from hpc_gpt.plan.zero_buffers import PREFETCH, zero_buffers

BUCKET = 5e8
LIVE = 1e9
GIB = 2.0**30
# CUDA's context with the kernels of torch, cuBLAS and NCCL on one GPU: 0.5 on V100 to 0.9 on H100 with CUDA graphs
# and workspaces. And the channels' buffers of one NCCL communicator: 2 x 4 MiB x 16 to 24 channels and up.
CONTEXT_GIB = 0.75
COMMUNICATOR_GIB = 0.4


def buckets(training: Training, params: float) -> float:
    """Bytes that gradients pass through on their way to the other ranks; `params` of one GPU of the stage.

    ZeRO-3's are h^2 elements where others published a run (Hugging Face's "auto" and DeepSpeed's own examples).
    """
    if not training.engine.startswith(("deepspeed", "hf")):
        return 0.0
    if training.bytes_rule is None:
        return zero_buffers(training, params)
    if training.zero_stage == 0:
        return 0.0
    elements, width = BUCKET, 2 if training.dtype != "fp32" else 4
    if training.zero_stage == 3:
        elements = float(training.shape.hidden) ** 2
        return width * (2 * min(elements, params) + min(PREFETCH, params))
    if rule_of(training).startswith("bf16-optimizer"):
        width = 4
    # ZeRO-2 fills one while the other is on its way.
    return width * min(elements, params) * (2 if training.zero_stage == 2 else 1)


@dataclass(frozen=True)
class Gathered:
    """Bytes of what ZeRO-3 and FSDP make whole on every GPU: while layers work, and while the loss does."""

    layers: float
    loss: float


NOTHING = Gathered(0.0, 0.0)


def gathered(training: Training) -> Gathered:
    """What is whole, one layer's gradients; embeddings and head with theirs while the loss works.

    ZeRO-3 gives back what it will not need within LIVE parameters, so that as many are whole; one rank has them all in
    its own share, and gathers what is on the host alone. FSDP has the layer at
    work and the next one, keeps the root's own weights (embeddings, head) through the backward pass, reduces in fp32.
    """
    zero3 = training.zero_stage == 3 and training.engine.startswith(("deepspeed", "hf"))
    if not (zero3 or training.engine == "fsdp") or (zero3 and _is_whole(training)):
        return NOTHING
    width = 4 if training.dtype == "fp32" else 2
    layer = layer_params(training.shape, training.tp)
    outer = sum(outer_params(training.shape, training.tp, training.pp, stage) for stage in {0, training.pp - 1})
    if zero3:
        live = max(layer, min(LIVE, training.shape.layers * layer + outer))
        return Gathered(width * (live + layer), width * (max(live, layer + outer) + outer))
    return Gathered(width * (2 * layer + outer) + (width + 4) * layer, width * (layer + outer) + (width + 4) * outer)


def _is_whole(training: Training) -> bool:
    """Whether a ZeRO-3 of ours has all weights on the GPU anyway."""
    return training.dp * training.cp == 1 and training.bytes_rule is None and training.offload != "full"


def sent_between_stages(training: Training, layer: LayerBytes, flying: float, stage: int) -> float:
    """Outputs that a stage keeps until their gradient comes, beside its layers' inputs: one stream a micro-batch.

    DeepSpeed splits them over the tensor-parallel group (pipe/engine.py, PartitionedTensor).
    """
    if training.pp == 1 or stage == training.pp - 1:
        return 0.0
    if training.engine == "deepspeed-3d":
        return flying * layer.stream / training.tp
    return flying * layer.stream


def embedding_masks(training: Training, layer: LayerBytes, flying: float, stage: int) -> float:
    """Masks of the dropout after the embedding, sbh bytes a micro-batch in flight (Korthikanti et al. 2022, section
    4.3), where layers have dropout too."""
    return flying * layer.stream / 2 if stage == 0 and layer.dropout else 0.0


def context_gib(training: Training) -> float:
    """GiB that nvidia-smi shows beyond what PyTorch reserves: CUDA's context, and NCCL's buffers for the world and
    for every axis that is split."""
    if training.gpus == 1:
        return CONTEXT_GIB
    split = sum(size > 1 for size in (training.tp, training.pp, training.dp, training.cp))
    return CONTEXT_GIB + COMMUNICATOR_GIB * (1 if split == 1 else split + 1)
