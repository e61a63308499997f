"""Megatron-LM's recomputation: the options for `engine.recompute`, and what Megatron-Core refuses beside it.

Source, which the faults quote: megatron/core/transformer/transformer_config.py of NVIDIA/Megatron-LM, __post_init__
(main of August 2026). --recompute-modules exists since core 0.12 (April 2025).
"""

from collections.abc import Iterator, Mapping, Sequence

from hpc_gpt.core.engines.base.megatron_experts import GRAPHS, OVERLAP, SHARED_OVERLAP, following, refused, values_of
from hpc_gpt.core.errors import Fault
from hpc_gpt.core.recomputation import Recompute, known_recompute, modules_of, recomputation
from hpc_gpt.core.settings.model_shape import ModelShape


def recompute_options(recompute: Recompute, layers: int) -> dict[str, object]:
    """The options, {option: value} as in `megatron_arguments`; `layers`: those of a chunk of a pipeline stage, of which
    a share is recomputed, the first ones."""
    if recompute == "none":
        return {}
    if not (share := recomputation(recompute).share):
        return {"--recompute-granularity": "selective", "--recompute-modules": modules_of(recompute) or None}
    method, count = ("uniform", 1) if recompute == "full" else ("block", round(share * layers))
    return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": count}


def stated_recompute(words: Sequence[str]) -> Recompute | None:
    """The value of `engine.recompute` that the user's own options amount to; `words`: options and values. None without
    such an option, and for the first layers of a stage (block), whose share depends on the layout."""
    own = values_of(words)
    granularity = own.get("--recompute-granularity")
    if granularity == "full" and own.get("--recompute-method") == "uniform":
        return "full"
    if granularity == "selective" or "--recompute-activations" in own:
        return known_recompute(",".join(following(words, "--recompute-modules")) or "selective")
    return None


def recompute_faults(
    recompute: Recompute, layers: int, shape: ModelShape, dtype: str, own: Mapping[str, str]
) -> Iterator[Fault]:
    """The faults of a value of `engine.recompute`. `layers`: as above; `own`: the user's own options (`values_of`)."""
    if recompute == "none":
        return
    asks, share = f"engine.recompute is {recompute}", recomputation(recompute).share
    if not (share * layers).is_integer():
        able = [f"{count}/{layers}" for count in range(1, layers) if abs(count - share * layers) < 1]
        yield Fault(f"{asks}, but {layers} layers of a stage, or of a chunk of one, have no such share",
                    f"use {' or '.join([*able, 'full'])}")  # fmt: skip
    no_experts = not shape.is_mixture and "no experts"
    lacks = {
        "mla_up_proj": shape.kv_lora is None and "no latent attention (model.kv_lora)",
        "mlp": all(kind.routed for kind in shape.kinds) and "no layer without experts",
        "moe": no_experts,
        "moe_act": no_experts,
        "shared_experts": shape.shared_ffn is None and "no shared experts",
    }
    for module in modules_of(recompute):
        if lack := lacks.get(module):
            yield Fault(f"{asks}, but the model has {lack}", f"leave {module} out")
    for quote, hint in _conditions(recompute, dtype, own):
        yield refused(asks, quote, hint)


def _conditions(recompute: Recompute, dtype: str, own: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (Megatron's own condition, hint) for each that is not met."""
    modules, whole = modules_of(recompute), recomputation(recompute).share > 0
    if "moe_act" in modules and dtype != "bf16":
        yield ("moe_act in recompute_modules is only supported with moe_grouped_gemm.",
               'use train.dtype = "bf16": --moe-grouped-gemm is passed in bf16 alone')  # fmt: skip
    narrow = "--fp8-format" in own and own.get("--fp8-recipe", "delayed") == "delayed"
    if narrow and {"moe_act", "layernorm"} & {*modules}:
        yield ("Delayed scaling does not support moe_act and layernorm recompute for fp8.",
               "use another --fp8-recipe, or leave both out")  # fmt: skip
    if "shared_experts" in modules and SHARED_OVERLAP in own:
        yield ("shared_experts recompute cannot work with --moe-shared-expert-overlap.",
               "leave one of them out")  # fmt: skip
    if OVERLAP in own and (whole or "moe" in modules):
        what = "full recomputation" if whole else "moe in recompute_modules"
        yield (f"disable {what} when enabling overlap_moe_expert_parallel_comm",
               f"use layernorm,moe_act, or leave {OVERLAP} out")  # fmt: skip
    if own.get(GRAPHS) in ("local", "transformer_engine") and whole:
        yield ("full recompute is only supported with full iteration CUDA graph.",
               f"use modules, or {GRAPHS} full_iteration")  # fmt: skip
    if own.get(GRAPHS) == "transformer_engine" and "moe" in modules and "moe_router" in own:
        yield ("moe recompute is not supported with moe_router CUDA graph with: --cuda-graph-impl transformer_engine.",
               "use layernorm,moe_act, or graphs without moe_router")  # fmt: skip
    if "--cpu-offloading-num-layers" in own:
        yield ("CPU offloading does not work when activation recomputation is enabled",
               "leave one of them out")  # fmt: skip
