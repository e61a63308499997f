"""Megatron-LM's options for experts, and what it refuses beside them.

Source: megatron/core/transformer/transformer_config.py and moe/moe_utils.py (topk_routing_with_score_function) of
NVIDIA/Megatron-LM, main of August 2026. Without --moe-router-pre-softmax the softmax is over the k largest logits,
which equals a softmax over all experts with the weights of the k normed; a sigmoid's weights are always normed if k is
above 1.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, get_args

from hpc_gpt.core.errors import Fault
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.services import CudaGraph, Dispatcher

# {our key: the option's name in a dump} of figures that both have under one meaning.
SAME_FIGURES = {
    "experts_per_token": "moe_router_topk",
    "expert_ffn": "moe_ffn_hidden_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
    "expert_groups": "moe_router_num_groups",
    "groups_per_token": "moe_router_group_topk",
}
OVERLAP, SHARED_OVERLAP = "--overlap-moe-expert-parallel-comm", "--moe-shared-expert-overlap"
DISPATCHER, GRAPHS = "--moe-token-dispatcher-type", "--cuda-graph-impl"


def expert_options(shape: ModelShape, layout: Layout, dtype: str, others: Collection[str]) -> dict[str, object]:
    """The options of a mixture of experts, {option: value} as in `megatron_arguments`; none for a dense model.

    `others`: the user's own options: the dispatcher and the balance are theirs if they name them. By default a router
    with a bias is balanced by that alone, another one by a loss with the coefficient of Qwen3's published config.json.
    A sigmoid's router is in fp32 by default, as DeepSeek-V3's. --moe-grouped-gemm is passed in bf16 alone: "Currently
    GroupedGEMM for MoE only supports bf16 dtype." (megatron/training/arguments.py before core 0.16).
    """
    if not shape.is_mixture:
        return {}
    dense = shape.dense_layers
    options: dict[str, object] = {
        "--num-experts": shape.experts,
        **{f"--{option.replace('_', '-')}": getattr(shape, key) for key, option in SAME_FIGURES.items()},
        "--moe-shared-expert-gate": shape.shared_gate,
        "--moe-layer-freq": f"([0]*{dense}+[1]*{shape.layers - dense})" if dense else None,
        "--moe-router-score-function": "sigmoid" if shape.router == "sigmoid" else "softmax",
        "--moe-router-pre-softmax": shape.router == "softmax" and not shape.norm_topk,
        "--moe-router-enable-expert-bias": shape.router_bias,
        "--moe-router-topk-scaling-factor": shape.router_scale if shape.router_scale != 1 else None,
        "--moe-router-dtype": shape.router_dtype,
        "--moe-grouped-gemm": dtype == "bf16",
        "--expert-model-parallel-size": layout.ep,
        "--expert-tensor-parallel-size": layout.expert_tp,
    }
    plain: dict[str, object] = {DISPATCHER: "alltoall"}
    if shape.router == "sigmoid" and shape.router_dtype is None:
        plain["--moe-router-dtype"] = "fp32"
    if shape.router_bias:
        plain |= {"--moe-router-load-balancing-type": "none", "--moe-router-bias-update-rate": 0.001}
    else:
        plain |= {"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": 0.001}
    return options | {option: value for option, value in plain.items() if option not in others}


def expert_fault(shape: ModelShape) -> str | None:
    """The reason why Megatron-LM cannot train this mixture; None if it can, or if the model is dense."""
    if not shape.is_mixture:
        return None
    if shape.router_bias and shape.router != "sigmoid":
        return f"model.router_bias is true, and it has a bias only for router sigmoid, not for {shape.router}"
    if shape.router == "sigmoid" and shape.norm_topk != (shape.experts_per_token != 1):
        return f"model.norm_topk is {shape.norm_topk}, and it norms a sigmoid's weights exactly if k is above 1"
    if shape.experts_per_token == 1 and shape.router != "sigmoid" and (shape.norm_topk or shape.router != "softmax"):
        return "its softmax over one expert is always 1: use model.norm_topk = false and router softmax with k 1"
    return None


def split_faults(engine: Engine, layout: Layout, dtype: str) -> Iterator[Fault]:
    """The faults of a mixture's layout, with Megatron-LM's own conditions. That for fp16 is in its releases before
    core 0.16 (December 2025) alone."""
    if layout.tp > 1 and not engine.sequence_parallel:
        yield Fault(
            f'the model has experts and tp is {layout.tp}, and Megatron-LM refuses "MoE and tensor parallelism ... '
            'without also enabling sequence parallelism" (megatron/core/transformer/moe/moe_layer.py)',
            "use engine.sequence_parallel = true, or --tp 1",
            keys=("engine.sequence_parallel", "layout"),
        )
    if layout.ep > 1 and dtype == "fp16":
        yield Fault(
            f'ep is {layout.ep}, and train.dtype fp16: "Expert parallelism is not supported with fp16 training." '
            "(megatron/training/arguments.py)",
            'use train.dtype = "bf16", or --ep 1',
        )


def refused(what: str, quote: str, hint: str) -> Fault:
    """The fault of `what`, with Megatron-Core's own condition."""
    source = "megatron/core/transformer/transformer_config.py"
    return Fault(f'{what}, which Megatron-LM refuses here: "{quote}" ({source})', hint)


def broken_by_overlap(layout: Layout, has_chunks: bool, dispatcher: str | None, dtype: str) -> list[str]:
    """Megatron-Core's conditions of --overlap-moe-expert-parallel-comm that do not hold, in its words; those of
    recomputation are with it."""
    subject = "overlap_moe_expert_parallel_comm is"
    conditions = {
        f"{subject} only supported with expert model parallelism": layout.ep > 1,
        "virtual_pipeline_model_parallel_size must be specified when pipeline_model_parallel_size > 1": has_chunks
        or layout.pp == 1,
        f"{subject} supported with alltoall/flex token dispatcher": dispatcher != "allgather",
        f"{subject} only supported with bf16 or fp16 model": dtype != "fp32",
    }
    return [quote for quote, holds in conditions.items() if not holds]


def overlap_faults(layout: Layout, dtype: str, own: Mapping[str, str]) -> Iterator[Fault]:
    """The faults of --overlap-moe-expert-parallel-comm, if it is among the user's own options (`values_of`)."""
    if OVERLAP not in own:
        return
    has_chunks = any("virtual" in word or "pipeline-model-parallel-layout" in word for word in own)
    broken = broken_by_overlap(layout, has_chunks, own.get(DISPATCHER), dtype)
    if SHARED_OVERLAP in own:
        broken.append("disable moe_shared_expert_overlap when enabling overlap_moe_expert_parallel_comm")
    for quote in broken:
        yield refused(f"engine.megatron_args has {OVERLAP}", quote, f"leave {OVERLAP} out")


def values_of(words: Sequence[str]) -> dict[str, str]:
    """{word: the next one} of options and values."""
    return dict(zip(words, [*words[1:], ""], strict=False))


def stated_traits(words: Sequence[str]) -> dict[str, Any]:
    """The traits of a Training with experts that Megatron-LM's own arguments state; `words`: options and values."""
    own = values_of(words)
    traits: dict[str, Any] = {}
    flex = own.get("--moe-flex-dispatcher-backend", "deepep")  # the parser's default
    dispatcher = flex if (kind := own.get(DISPATCHER)) == "flex" else kind
    if dispatcher in get_args(Dispatcher):
        traits["dispatcher"] = dispatcher
    if "--moe-router-force-load-balancing" in own:
        traits["routing"] = "forced balance"
    if OVERLAP in own:
        traits["ep_overlap"] = True
    graphs = [*following(words, "--cuda-graph-scope", "--cuda-graph-modules")]
    if known := tuple(graph for graph in graphs if graph in get_args(CudaGraph)):
        traits["cuda_graphs"] = known
    elif not graphs and own.get(GRAPHS) in ("local", "transformer_engine"):
        traits["cuda_graphs"] = ("full",)  # whole layers
    return traits


def following(words: Sequence[str], *options: str) -> Iterator[str]:
    """Yields the words between each of the options and the next `--`."""
    for place, word in enumerate(words):
        if word in options:
            yield from takewhile(lambda value: not value.startswith("--"), words[place + 1 :])
