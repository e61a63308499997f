"""What the words of a source say: recomputation, precision, the stack and how it holds its states, offload."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from hpc_gpt.plan.row_fields import Unusable, flag, shown, stage_of_zero, whole, words
from hpc_gpt.plan.training import Offload, OptimizerMode, Recompute

_ENGINES = ("deepspeed-3d", "deepspeed-zero", "hf-deepspeed", "fsdp", "ddp", "megatron-lm")
_HOPPER_ON = ("h100", "h200", "b200", "b300", "gb200", "gb300")
_LLAMA_NAMES = re.compile(r"llama|mistral|qwen|gemma|yi-|deepseek|baichuan|internlm|olmo")
_MOE_NAMES = re.compile(r"\bmoe\b|mixtral|\d+x\d+(?:\.\d+)?b\b|\d+b-a\d+b|switch-transformer")
_MEGATRON_CORE = re.compile(r"megatron[ -]?(?:lm|core|bridge)|\bmcore\b|\bnemo\b")
# Stacks whose attention is Transformer Engine's or PyTorch 2's.
_FUSED_ATTENTION = re.compile(
    r"megatron[ -]?core|megatron[ -]?bridge|\bmcore\b|\bnemo\b|transformer[ -]?engine|torchtitan"
)
_HUGGING_FACE = re.compile(r"\bhf\b|hugging ?face|\btransformers\b")
_ZERO = re.compile(r"(?:zero|zero stage|stage)[ _-]{0,2}([0-3])(?![0-9])")


def recompute_of(row: Mapping[str, Any]) -> Recompute | None:
    """`full (config use_checkpoint=true)` is full; None where the row does not say."""
    value = row.get("recompute")
    if value is None:
        return None
    if isinstance(value, bool):
        return "full" if value else "none"
    said = words(row, "recompute").strip()
    if said in ("", "no", "off", "false") or said.startswith(("none", "no ")):
        return "none"
    if said.startswith(("full", "uniform", "block", "yes", "all", "true")):
        return "full"
    if said.startswith(("selective", "core_attn", "attention")):
        return "selective"
    raise Unusable(f"recompute is {shown(value)}, but must be none, selective or full")


def dtype_of(row: Mapping[str, Any], device: str) -> str:
    """fp16, bf16 or fp32. FP8 is refused. A V100 has no bf16, so where nothing is said it is fp16 there."""
    said = words(row, "dtype")
    if re.search(r"fp8|float8|f8e\d|mxfp|nvfp4|fp4", said + " " + words(row, "options")):
        raise Unusable(f"FP8 is not modelled (dtype {shown(row.get('dtype'))})")
    for name, pattern in (("fp16", r"fp16|float16(?<!bfloat16)|half"), ("bf16", r"bf16|bfloat16")):
        if re.search(pattern, said):
            return name
    if re.search(r"fp32|float32|tf32|single", said):
        return "fp32"
    if said.strip():
        raise Unusable(f"dtype is {shown(row.get('dtype'))}, but must be fp16, bf16 or fp32")
    return "fp16" if device.startswith("v100") else "bf16"


def refuse_experts(row: Mapping[str, Any]) -> None:
    """Mixtures of experts have another shape."""
    for name in ("ep", "moe", "experts", "num_experts", "moe_experts", "n_experts"):
        value = row.get(name)
        dense = value in (None, False, 0, "", "no", "none", "dense") or (name != "moe" and value == 1)
        if not dense:
            raise Unusable(f"MoE is not modelled ({name} {shown(value)})")
    if _MOE_NAMES.search(words(row, "model")):
        raise Unusable(f"MoE is not modelled (model {shown(row.get('model'))})")


def refuse_context(row: Mapping[str, Any]) -> None:
    """Context parallelism splits the sequence, which nothing here does."""
    for name in ("cp", "context_parallel", "ulysses", "sp_degree"):
        degree = whole(row, name)
        if degree is not None and degree > 1:
            raise Unusable(f"context parallelism is not modelled ({name} {degree})")


def llama_like(row: Mapping[str, Any], hidden: int) -> bool:
    """Gated MLP, no biases, no learned positions: stated, or told by grouped queries, another MLP width or the name."""
    stated = flag(row, "swiglu")
    if stated is not None:
        return stated
    ffn = whole(row, "ffn")
    # Three matrices of 8/3 h hold as much as two of 4 h: another width than 4 h is a gated MLP's.
    return bool(_LLAMA_NAMES.search(words(row, "model"))) or (ffn is not None and ffn != 4 * hidden)


def flash_of(row: Mapping[str, Any], device: str, engine: str) -> bool:
    """Whether attention keeps no scores: stated, or as every stack of the device's time does it.

    FlashAttention needs Ampere; FSDP came with PyTorch 2's fused attention, and stacks for Hopper have it throughout.
    """
    stated = flag(row, "flash_attention")
    if stated is not None:
        return stated
    if device.startswith("v100"):
        return False
    said = " ".join(words(row, name) for name in ("stack", "options", "attention", "attn"))
    return "flash" in said or bool(_FUSED_ATTENTION.search(said)) or engine == "fsdp" or device.startswith(_HOPPER_ON)


def compiled_of(row: Mapping[str, Any]) -> bool:
    """Whether the row says that torch.compile was on: in its options or stack, or in a flag of its own."""
    for name in ("compile", "compiled", "torch_compile"):
        if isinstance(row.get(name), bool):
            return bool(row[name])
    return "compile" in " ".join(words(row, name) for name in ("options", "stack"))


def fuses_loss(row: Mapping[str, Any], engine: str) -> bool:
    """Whether cross-entropy is one kernel: who says that the flash-attn package is used under FSDP uses its loss too
    (flash_attn.losses.cross_entropy, the default of stacks like llm-foundry)."""
    return engine == "fsdp" and bool(flag(row, "flash_attention"))


def optimizer_mode_of(row: Mapping[str, Any]) -> OptimizerMode:
    """How one of our own runs computed its update; fused where nothing is said, and on the host."""
    mode = words(row, "optimizer_mode").strip()
    return mode if mode in get_args(OptimizerMode) else "fused"  # type: ignore[return-value]


# The `program` of a row that is a record of our own: its engines hold their states as they do here.
OURS = "hpc-gpt"


@dataclass(frozen=True)
class Stack:
    """The engine a row was run by, as the experiment's names go, and how it holds its states."""

    engine: str
    zero_stage: int
    bytes_rule: str | None
    offload: Offload
    distributed_optimizer: bool


def stack_of(row: Mapping[str, Any], *, dtype: str, pp: int, tp: int, degrees: Mapping[str, int]) -> Stack:
    """The engine: `engine` where it is one of ours, else by the words of `stack`, `sharding`, `options` and the
    citation, else by the ZeRO stage."""
    said = " ".join(words(row, name) for name in ("stack", "options", "parallelism"))
    cited = said if words(row, "stack") else said + " " + words(row, "citation") + " " + words(row, "source")
    sharding = words(row, "sharding")
    zero = stage_of_zero(row)
    if zero is None:
        zero = degrees.get("zero_stage")
    if zero is None:
        named = _ZERO.search(said)
        zero = int(named.group(1)) if named else None
    deepspeed = "deepspeed" in cited or "dspeed" in cited
    fsdp = (
        bool(re.search(r"fsdp|torchtitan|llm-foundry", cited)) or bool(sharding) or sharded_over(row) not in (None, 1)
    )
    if fsdp:
        zero = _zero_of_sharding(sharding, zero)
    zero = zero or 0
    if zero >= 2 and pp > 1 and not fsdp:
        raise Unusable(f"zero_stage {zero} with pp {pp}: no engine shards gradients across a pipeline")
    distributed = bool(flag(row, "distributed_optimizer")) or "distrib" in words(row, "optimizer")
    named_engine = words(row, "engine").strip()
    if named_engine in _ENGINES:
        engine = named_engine
    elif fsdp:
        engine = "ddp" if zero == 0 else "fsdp"
    elif pp == tp == 1 and not zero and re.search(r"\bddp\b|distributed ?data ?parallel", said):
        engine = "ddp"
    elif (deepspeed or zero) and pp == tp == 1 and _HUGGING_FACE.search(cited):
        engine = "hf-deepspeed"
    elif zero >= 2 or (deepspeed and pp == 1 and (zero or tp == 1)):
        engine = "deepspeed-zero"
    elif deepspeed or (zero == 1 and not distributed and not _MEGATRON_CORE.search(cited)):
        engine = "deepspeed-3d"
    else:
        engine = "megatron-lm"
        distributed = distributed or zero == 1
    if words(row, "program") == OURS and engine != "megatron-lm":
        return Stack(engine, zero, None, offload_of(row), distributed)
    rule = _bytes_rule(engine, words(row, "dtype"), dtype, distributed)
    return Stack(engine, zero, rule, offload_of(row), distributed)


def checkpoints_on_host(row: Mapping[str, Any], stack: Stack, tp: int) -> bool:
    """Whether kept activations wait on the host: DeepSpeed's Megatron for ZeRO-3 ships with --checkpoint-in-cpu, and it
    alone splits layers under ZeRO-3."""
    if any(flag(row, name) for name in ("act_cpu_offload", "activation_cpu_offload", "activations_cpu_offload")):
        return True
    if stack.engine != "deepspeed-zero" or stack.zero_stage != 3 or recompute_of(row) != "full":
        return False
    return tp > 1 or "megatron" in words(row, "stack") + words(row, "citation")


def splits_sequence(row: Mapping[str, Any], stack: Stack, tp: int) -> bool:
    """Sequence parallelism: stated, or with it came tensor parallelism to FSDP (PyTorch's parallel styles)."""
    stated = flag(row, "sequence_parallel")
    return stack.engine == "fsdp" and tp > 1 if stated is None else stated


def sharded_over(row: Mapping[str, Any]) -> int | None:
    """`fsdp`: over how many GPUs, None where the row does not say."""
    return None if isinstance(row.get("fsdp"), bool) else whole(row, "fsdp")


def refuse_schedule(row: Mapping[str, Any]) -> None:
    """Schedules without 1F1B's bubble, or that hold activations otherwise."""
    said = words(row, "schedule")
    if re.search(r"zero[ -]?bubble|\bzb|dual ?pipe|chimera|gpipe|all[ -]forward|\bafab\b|v-half", said):
        raise Unusable(f"schedule {shown(row.get('schedule'))} is not modelled")


def offload_of(row: Mapping[str, Any]) -> Offload:
    """What lies on the host: the options' own columns first, then the words of the stack and its citation."""
    stated = words(row, "offload").strip()
    if stated in ("none", "optimizer", "full"):
        return stated  # type: ignore[return-value]
    options = row.get("options")
    if isinstance(options, Mapping):
        said = {str(key).lower(): str(value).strip().lower() for key, value in options.items()}
        columns = {key: value in ("y", "yes", "true", "1") for key, value in said.items() if "off" in key}
        if columns:
            if any(on for key, on in columns.items() if "par" in key):
                return "full"
            return "optimizer" if any(columns.values()) else "none"
    said_all = " ".join(words(row, name) for name in ("stack", "options", "citation", "offload"))
    if re.search(r"no[ -]offload|without offload|offload (?:off|none|false)", said_all) or "offload" not in said_all:
        return "none"
    return "full" if re.search(r"full offload|param\w{0,6} offload|offload param", said_all) else "optimizer"


def _zero_of_sharding(sharding: str, zero: int | None) -> int:
    """FSDP's words for how much is sharded, as ZeRO's stages."""
    if "hybrid" in sharding:
        raise Unusable(f"hybrid sharding is not modelled (sharding {sharding!r})")
    if "no_shard" in sharding:
        return 0
    if "grad" in sharding:
        return 2
    return 3 if zero is None or "full" in sharding else zero


def _bytes_rule(engine: str, dtype_words: str, dtype: str, distributed: bool) -> str | None:
    """How an engine with several ways holds its states; None for the one way of the others."""
    if engine in ("deepspeed-3d", "deepspeed-zero", "hf-deepspeed"):
        # Before BF16_Optimizer a pipeline in bf16 held what it holds in fp16; who sums in fp32 says so.
        fp32_sums = re.search(r"bf16[ _-]?optimizer|fp32 grad", dtype_words)
        return "bf16-optimizer" if engine == "deepspeed-3d" and fp32_sums else "deepspeed-fp16"
    if engine == "megatron-lm":
        return "megatron-2021-fp16" if dtype == "fp16" and not distributed else "megatron"
    return None


def degrees_of(row: Mapping[str, Any]) -> dict[str, int]:
    """`zero1(dp2)+tp2+pp4` as zero_stage 1, dp 2, tp 2, pp 4; empty where the row has no such words."""
    said = words(row, "parallelism")
    found = {name: int(size) for name, size in re.findall(r"(?<![a-z])(tp|pp|dp|cp|ep)[ =:_-]{0,2}(\d{1,6})", said)}
    zero = _ZERO.search(said)
    if zero:
        found["zero_stage"] = int(zero.group(1))
    if any(size < 1 for name, size in found.items() if name != "zero_stage"):
        raise Unusable(f"parallelism is {shown(row.get('parallelism'))}: a degree below 1")
    return found
