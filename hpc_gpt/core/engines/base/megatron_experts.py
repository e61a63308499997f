"""Megatron-LM's options for experts: those of a run, and the shape and the layout that a dump of its arguments states.

Source: megatron/core/transformer/transformer_config.py and moe/moe_utils.py (topk_routing_with_score_function) of
NVIDIA/Megatron-LM, main of August 2026. Without --moe-router-pre-softmax the softmax is over the k largest logits,
which equals a softmax over all experts with the weights of the k normed; a sigmoid's weights are always normed if k is
above 1.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import takewhile
from typing import Any, get_args

from hpc_gpt.core.errors import Fault
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.services import CudaGraph, Dispatcher

# {our key: the option's name in a dump} of figures that both have under one meaning.
_SAME = {
    "experts_per_token": "moe_router_topk",
    "expert_ffn": "moe_ffn_hidden_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
    "expert_groups": "moe_router_num_groups",
    "groups_per_token": "moe_router_group_topk",
}
_OF_LATENT = {
    "q_lora": "q_lora_rank", "kv_lora": "kv_lora_rank", "qk_rope": "qk_pos_emb_head_dim", "v_head": "v_head_dim",
}  # fmt: skip
_DEFAULTS = {entry.name: entry.default for entry in fields(ModelShape)}
OVERLAP, DISPATCHER = "--overlap-moe-expert-parallel-comm", "--moe-token-dispatcher-type"
_LAYERS = re.compile(r"\[[01](?:, ?[01]){0,999}\]")


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
        **{f"--{option.replace('_', '-')}": getattr(shape, key) for key, option in _SAME.items()},
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


def overlap_faults(layout: Layout, dtype: str, words: Sequence[str]) -> Iterator[Fault]:
    """The faults of --overlap-moe-expert-parallel-comm, if it is among the user's own `words`, options and values, with
    Megatron-Core's conditions (transformer_config.py, __post_init__); those of recomputation are with it."""
    if OVERLAP not in words:
        return
    values_of = dict(zip(words, [*words[1:], ""], strict=False))
    chunks = any("virtual" in word or "pipeline-model-parallel-layout" in word for word in words)
    subject = "overlap_moe_expert_parallel_comm is"
    refused = (
        (layout.ep == 1, f"{subject} only supported with expert model parallelism"),
        (
            layout.pp > 1 and not chunks,
            "virtual_pipeline_model_parallel_size must be specified when pipeline_model_parallel_size > 1",
        ),
        (values_of.get(DISPATCHER) == "allgather", f"{subject} supported with alltoall/flex token dispatcher"),
        (dtype == "fp32", f"{subject} only supported with bf16 or fp16 model"),
        (
            "--moe-shared-expert-overlap" in words,
            "disable moe_shared_expert_overlap when enabling overlap_moe_expert_parallel_comm",
        ),
    )
    for is_so, quote in refused:
        if is_so:
            message = f'engine.megatron_args has {OVERLAP}, which Megatron-LM refuses here: "{quote}"'
            yield Fault(f"{message} (megatron/core/transformer/transformer_config.py)", f"leave {OVERLAP} out")


def stated_experts(arguments: Mapping[str, str]) -> dict[str, Any]:
    """The keys of [model] and [layout] about experts, and DeepSeek's attention, that a dump of arguments states:
    {argument: text} to {key: value}, without defaults of [model]. Empty for a dense model with usual attention.

    The number of dense layers is right wherever the layers with experts lie; if it is not known, the number of experts
    per token is missing, too. DeepSpeed's fork has a list of numbers of experts, and other names.
    """
    stated = dict(_attention(arguments))
    counts = [int(count) for count in re.findall(r"\d{1,6}", arguments.get("num_experts", ""))]
    if max(counts, default=0) < 2:
        return stated
    stated["experts"] = max(counts)
    stated |= {key: value for key, option in _SAME.items() if (value := _whole(arguments, option)) is not None}
    if (k := _whole(arguments, "moe_router_topk", "topk")) is not None:
        stated["experts_per_token"] = k
    if (dense := _dense_layers(arguments)) is not None:
        stated["dense_layers"] = dense
    else:
        stated.pop("experts_per_token", None)
    if "moe_router_topk" in arguments:
        sigmoid = arguments.get("moe_router_score_function", "").strip() == "sigmoid"
        stated |= {
            "router": "sigmoid" if sigmoid else "softmax",
            "norm_topk": k != 1 if sigmoid else not _is_on(arguments, "moe_router_pre_softmax"),
            "router_bias": _is_on(arguments, "moe_router_enable_expert_bias"),
            "shared_gate": _is_on(arguments, "moe_shared_expert_gate"),
            "router_scale": _figure(arguments, "moe_router_topk_scaling_factor") or 1.0,
        }
    stated = {key: value for key, value in stated.items() if value != _DEFAULTS[key]}
    sizes = {
        "ep": _whole(arguments, "expert_model_parallel_size", "moe_expert_parallel_size"),
        "etp": _whole(arguments, "expert_tensor_parallel_size"),
    }
    return stated | {axis: size for axis, size in sizes.items() if size is not None}


def stated_balance(arguments: Mapping[str, str]) -> dict[str, Any]:
    """The balance of a mixture that a dump of arguments states: `balance` (loss, bias or none), and the coefficients
    `balance_coef` and `z_loss_coef` if the program trains with these losses."""
    kinds = re.findall(r"\w+", arguments.get("moe_router_load_balancing_type", ""))
    coefs = [*map(float, re.findall(r"\d+(?:\.\d*)?(?:e-?\d+)?", arguments.get("moe_aux_loss_coeff", "")))]
    with_loss = [coef for kind, coef in zip(kinds, coefs, strict=False) if kind.endswith("aux_loss") and coef > 0]
    has_bias = _is_on(arguments, "moe_router_enable_expert_bias")
    stated: dict[str, Any] = {"balance": "bias" if has_bias else "loss" if with_loss else "none"} if kinds else {}
    stated |= {"balance_coef": with_loss[0]} if with_loss else {}
    if z_loss := _figure(arguments, "moe_z_loss_coeff"):
        stated["z_loss_coef"] = z_loss
    return stated


def stated_traits(words: Sequence[str]) -> dict[str, Any]:
    """The traits of a Training with experts that Megatron-LM's own arguments state; `words`: options and values."""
    values_of = dict(zip(words, [*words[1:], ""], strict=False))
    traits: dict[str, Any] = {}
    flex = values_of.get("--moe-flex-dispatcher-backend", "deepep")  # the parser's default
    dispatcher = flex if (kind := values_of.get(DISPATCHER)) == "flex" else kind
    if dispatcher in get_args(Dispatcher):
        traits["dispatcher"] = dispatcher
    if "--moe-router-force-load-balancing" in values_of:
        traits["routing"] = "forced balance"
    if OVERLAP in values_of:
        traits["ep_overlap"] = True
    graphs = [*_following(words, "--cuda-graph-scope", "--cuda-graph-modules")]
    if known := tuple(graph for graph in graphs if graph in get_args(CudaGraph)):
        traits["cuda_graphs"] = known
    elif not graphs and values_of.get("--cuda-graph-impl") in ("local", "transformer_engine"):
        traits["cuda_graphs"] = ("full",)  # whole layers
    return traits


def _following(words: Sequence[str], *options: str) -> Iterator[str]:
    """Yields the words between each of the options and the next `--`."""
    for place, word in enumerate(words):
        if word in options:
            yield from takewhile(lambda value: not value.startswith("--"), words[place + 1 :])


def _attention(arguments: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    if _is_on(arguments, "multi_latent_attention"):
        for key, option in _OF_LATENT.items():
            if (value := _whole(arguments, option)) is not None:
                yield key, value
        yield "head_dim", (_whole(arguments, "qk_head_dim") or 0) + (_whole(arguments, "qk_pos_emb_head_dim") or 0)
    if later := _whole(arguments, "mtp_num_layers"):
        yield "mtp_layers", later


def _dense_layers(arguments: Mapping[str, str]) -> int | None:
    """The layers without experts; None if the dump does not state them."""
    layers, every = _whole(arguments, "num_layers", "encoder_num_layers"), None
    for name in ("moe_layer_freq", "expert_interval"):
        every = arguments.get(name, "").strip() if every in (None, "", "None") else every
    if every in (None, "", "None"):
        return 0
    if _LAYERS.fullmatch(every):
        listed = re.findall("[01]", every)
        return listed.count("0") if layers in (None, len(listed)) else None
    if layers is None or not re.fullmatch(r"\d{1,4}", every) or not int(every):
        return None
    return layers - len(range(0, layers, int(every)))


def _is_on(arguments: Mapping[str, str], name: str) -> bool:
    return arguments.get(name, "").strip() == "True"


def _whole(arguments: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if re.fullmatch(r"\d{1,9}", text := arguments.get(name, "").strip()):
            return int(text)
    return None


def _figure(arguments: Mapping[str, str], name: str) -> float | None:
    text = arguments.get(name, "").strip()
    return float(text) if re.fullmatch(r"\d{1,9}(?:\.\d{0,9})?(?:e-?\d{1,2})?", text) else None
