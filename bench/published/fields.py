"""The fields of a published row: one schema that checks them, and functions that interpret their text.

The forms are those of the sources; any other form is refused or ignored.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_args

from bench.published.programs import HABITS, kind_of, offloads_activations
from hpc_gpt.core.engines import engines
from hpc_gpt.core.engines.base.programs import program_states
from hpc_gpt.core.engines.base.training import Matmul, Offload, States, Training
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.format import plain
from hpc_gpt.core.recomputation import RECOMPUTES, Recompute, known_recompute

_HOPPER_ON = ("h100", "h200", "b200", "b300", "gb200", "gb300")
_MEGATRON_CORE = re.compile(r"megatron[ -](?:lm|core|bridge)|nemo")
_FUSED_ATTENTION = re.compile(r"megatron-(?:core|bridge)|transformer engine")
_FSDP = re.compile(r"fsdp|torchtitan|llm-foundry")
# How it ran: those in the table of planner/README.md, under the names of a Training.
TRAITS = (
    *("attention", "grad_sum", "dp_overlap", "tp_overlap", "fused_loss", "edges_as_layers", "states"),
    *(
        "offloaded_layers",
        "whole_gradients",
        "whole_logits",
        "dispatcher",
        "routing",
        "ep_overlap",
        "ep_outside_dp",
        "fp8_head",
    ),
)
_ZERO = re.compile(r"zero[ -]?([0-3])(?!\d)")


class Unusable(ValueError):
    """The reason why a row cannot be predicted, with the name of the field."""


def _read_figure(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unusable(f"{name} is {shown(value)}, not a number")
    if not 0 < value < 1e15:
        raise Unusable(f"{name} is {shown(value)}, but must be above 0 and less than 1e15")
    return float(value)


def _read_count(name: str, value: object) -> int:
    number = _read_figure(name, value)
    if not number.is_integer():
        raise Unusable(f"{name} is {shown(value)}, not a whole number")
    return int(number)


def _read_number(name: str, value: object) -> int:
    return 0 if value == 0 and value is not False else _read_count(name, value)


def _read_flag(name: str, value: object) -> bool:
    if value in (0, 1):
        return bool(value)
    raise Unusable(f"{name} is {shown(value)}, but must be true or false")


def _read_stage(name: str, value: int) -> int:
    if value not in (0, 1, 2, 3):
        raise Unusable(f"{name} is {shown(value)}, but must be 0, 1, 2 or 3")
    return int(value)


def _read_text(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        value = " ".join(f"{key} {part}" for key, part in value.items())
    return str(value)[:1000].lower().strip()


# How a field is read; of what a row does not state, the last figure. Whole numbers from 1, measured numbers above 0,
# flags, text in lower case (of a table, its keys and values), and objects that the function which uses them checks.
_KINDS: list[tuple[str, Callable[[str, Any], Any], Any]] = [
    (
        "gpus_per_node hidden layers heads kv_heads head_dim ffn vocab seq gpus tp pp dp cp ep vp fsdp micro_bs "
        "global_bs grad_accum local_bs batch_per_dp offloaded_layers experts experts_per_token moe_ffn shared_ffn etp "
        "moe_every expert_groups groups_per_token q_lora kv_lora qk_nope qk_rope v_head window window_every",
        _read_count,
        0,
    ),
    ("dense_layers mtp_layers", _read_number, 0),
    (
        "tokens_per_batch sec_per_iter samples_per_sec tokens_per_sec_per_gpu tflops_per_gpu mfu memory_gib",
        _read_figure,
        0.0,
    ),
    (
        "swiglu untied sequence_parallel flash_attention distributed_optimizer act_cpu_offload dp_overlap tp_overlap "
        "edges_as_layers whole_gradients whole_logits compiled fits oom noisy ep_overlap ep_outside_dp fp8_head "
        "dropless sinks qk_norm",
        _read_flag,
        None,
    ),
    ("zero_stage", _read_stage, None),
    (
        "source citation device fabric model parallelism schedule stack engine options sharding optimizer offload "
        "recompute dtype attention grad_sum fused_loss states tflops_kind memory_kind router dispatcher routing bias "
        "expert_weights container",
        _read_text,
        "",
    ),
    ("moe partition memory_by_stage_gib cuda_graph_scope recompute_modules", lambda name, value: value, None),
]


class Fields(SimpleNamespace):
    """The fields that are read; 0, empty or None if the row does not state one. `given`: the row as it is in the
    file."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Unknown fields are ignored. Raises Unusable for one that does not fit."""
        found: dict[str, Any] = {"given": given}
        for names, read, absent in _KINDS:
            for name in names.split():
                found[name] = absent if given.get(name) is None else read(name, given[name])
        super().__init__(**found)

    def shown(self, name: str) -> str:
        """A field's value in the file, for a message."""
        return shown(self.given.get(name))


def check_traits(row: Mapping[str, Any], where: str) -> None:
    """ConfigError, for the whole file, if a row states a trait with a value that is not listed."""
    listed = {name: get_args(Training.__annotations__[name]) for name in TRAITS}
    for name, values in listed.items():
        given = row.get(name)
        if given is None or given == "not stated":
            continue
        known = [value for part in values for value in (get_args(part) or (part,)) if value is not type(None)]
        if known and given not in known:
            raise ConfigError(
                f"{where}: {name} is {shown(given)}, which is not listed", f"use one of {', '.join(known)}"
            )
        if not known and isinstance(given, bool) != (name != "offloaded_layers"):
            raise ConfigError(
                f"{where}: {name} is {shown(given)}, which is not listed",
                "use true, or a whole number of offloaded_layers",
            )


def stage_figures(stage: str, value: object) -> tuple[float, float, float]:
    """A stage's (steady, peak allocated, peak reserved) GiB. Raises Unusable."""
    if not isinstance(value, (list, tuple)) or len(value) != 3 or None in value:
        raise Unusable(f"memory_by_stage_gib: stage {stage} has not three figures")
    steady, allocated, reserved = (_read_figure(f"memory_by_stage_gib: stage {stage}", figure) for figure in value)
    return steady, allocated, reserved


def shown(value: object) -> str:
    """A value for a message: on one line, and short."""
    text = plain(repr(value))
    return text if len(text) <= 40 else text[:37] + "..."


def refuse_unmodelled(row: Fields) -> None:
    """Raises Unusable for a mixture of experts whose shape is not stated, and for other schedules than 1F1B (another
    bubble, other activations in flight)."""
    named = re.search(r"\bmoe\b|mixtral", row.model)
    missing = [name for name in ("experts", "experts_per_token", "moe_ffn") if not getattr(row, name)]
    if missing and (row.ep > 1 or row.moe or named or row.experts):
        said = f"ep {row.ep}" if row.ep > 1 else f"moe {row.shown('moe')}" if row.moe else f"model {row.shown('model')}"
        raise Unusable(f"MoE ({said}): {' and '.join(missing)} missing")
    if row.schedule and "1f1b" not in row.schedule:
        raise Unusable(f"schedule {row.shown('schedule')} is not modelled")


def dtype_of(row: Fields, device: str) -> str:
    """fp16, bf16 or fp32. If none is stated, or only 8 or 4 bits: fp16 on a V100, which has no bf16, else bf16."""
    for name in ("fp16", "bf16", "fp32"):
        if name in row.dtype:
            return name
    if row.dtype and matmul_of(row) == "none":
        raise Unusable(f"dtype is {row.shown('dtype')}, but must be fp16, bf16 or fp32")
    return "fp16" if device.startswith("v100") else "bf16"


def matmul_of(row: Fields) -> Matmul:
    """The format of a layer's products, by the text of the dtype and the options."""
    text = f"{row.dtype} {row.options}"
    if "fp4" in text:
        return "nvfp4"
    if not re.search(r"fp8|float8", text):
        return "none"
    return "mxfp8" if re.search(r"mxfp8|fp8-mx", text) else "fp8-row" if "row" in text else "fp8-tensor"


# Other names of modules in `recompute_modules`: those of the MoE ModelZoo's tables.
_MODULES = {"norm": "layernorm", "act": "moe_act"}
_EVERY = re.compile(r"(?:every|each) (\d{1,3})(?:st|nd|rd|th) layer")


def recompute_of(row: Fields) -> Recompute | None:
    """The row's recomputation: the word with which its text begins, `every 4th layer`, or `modules`, which
    `recompute_modules` lists; None if it is not stated."""
    if not row.recompute:
        return None
    stated = next((word for word in RECOMPUTES if row.recompute.startswith(word)), row.recompute)
    if every := _EVERY.match(row.recompute):
        stated = f"1/{every[1]}"
    elif row.recompute == "modules" and isinstance(row.recompute_modules, list):
        stated = ",".join(_MODULES.get(name, str(name)) for name in row.recompute_modules)
    if known_recompute(stated) is None:
        raise Unusable(f"recompute is {row.shown('recompute')} {stated}, but must be none, selective, full, every Nth "
                       "layer or modules")  # fmt: skip
    return stated


def degrees_of(row: Fields) -> dict[str, int]:
    """`zero1(dp2)+tp2+pp4` as dp 2, tp 2, pp 4; empty if `parallelism` has no degrees."""
    found = re.findall(r"(?<![a-z])(tp|pp|dp|cp|ep)(\d{1,6})", row.parallelism)
    degrees = {name: int(size) for name, size in found}
    if any(size < 1 for size in degrees.values()):
        raise Unusable(f"parallelism is {row.shown('parallelism')}: a degree below 1")
    if degrees.get("ep", 1) > 1 and not row.experts:
        raise Unusable(f"MoE (parallelism {row.shown('parallelism')}): experts missing")
    return degrees


def is_llama_like(row: Fields) -> bool:
    """Whether the model has a gated MLP, no biases and no learned positions: as stated, else by its name or MLP width.

    A gated MLP has three matrices, of 8/3 h to hold as many parameters as two of 4 h: any width but 4 h means gated.
    """
    if row.swiglu is not None:
        return row.swiglu
    return "llama" in row.model or row.ffn not in (0, 4 * row.hidden)


@dataclass(frozen=True)
class Stack:
    """The engine of a row, by its name in an experiment, and how it holds its states."""

    engine: str
    zero_stage: int
    program_states: States
    offload: Offload
    sharded_optimizer: bool


def stack_of(row: Fields, *, dtype: str, tp: int, pp: int) -> Stack:
    """The engine: `engine` if it is one of ours, else by the text of `stack`, `sharding`, `options` and the citation,
    else by the ZeRO stage. Raises Unusable for a combination that no engine has."""
    text = f"{row.parallelism} {row.stack} {row.options}"
    cited = text if row.stack else f"{text} {row.citation} {row.source}"
    zero, deepspeed = row.zero_stage, "deepspeed" in cited
    if zero is None and (named := _ZERO.search(text)):
        zero = int(named[1])
    fsdp = bool(_FSDP.search(cited) or row.sharding or row.fsdp)
    if fsdp:
        zero = _zero_of_sharding(row.sharding, zero)
    zero = zero or 0
    if zero >= 2 and pp > 1 and not fsdp:
        raise Unusable(f"zero_stage {zero} with pp {pp}: no engine shards gradients across a pipeline")
    sharded = bool(row.distributed_optimizer) or "distrib" in row.optimizer
    if row.engine in engines():
        engine = row.engine
    elif fsdp:
        engine = "ddp" if zero == 0 else "fsdp"
    elif pp == tp == 1 and not zero and re.search(r"\bddp\b", text):
        engine = "ddp"
    elif (deepspeed or zero) and pp == tp == 1 and re.search(r"\bhf\b", cited):
        engine = "hf-deepspeed"
    elif zero >= 2 or (deepspeed and pp == 1 and (zero or tp == 1)):
        engine = "deepspeed-zero"
    elif deepspeed or (zero == 1 and not sharded and not _MEGATRON_CORE.search(cited)):
        engine = "deepspeed-3d"
    else:
        engine = "megatron-lm"
        sharded = sharded or zero == 1
    sums_in_fp32 = bool(re.search(r"bf16[ _-]?optimizer|fp32 grad", row.dtype))
    states = program_states(engine, kind_of(engine, row.stack, sums_in_fp32), dtype, sharded)
    return Stack(engine, zero, states, _offload_of(row), sharded)


def _zero_of_sharding(sharding: str, zero: int | None) -> int:
    """The ZeRO stage of one of FSDP's sharding strategies."""
    if "no_shard" in sharding:
        return 0
    if "grad" in sharding:
        return 2
    return 3 if zero is None or "full" in sharding or "hybrid" in sharding else zero


def shard_of(row: Fields, dp: int, cp: int) -> int | None:
    """The ranks of a group that shards; None if all of dp x cp do: `fsdp`, unless that is dp; or the text of
    `sharding`, as `hybrid (shard 4 x replicate 2)`, by default a node's."""
    ranks, shard = dp * cp, row.fsdp if row.fsdp not in (0, 1, dp) else None
    if shard is None and "hybrid" in row.sharding:
        stated = re.search(r"shard\D{0,3}(\d+)", row.sharding)
        shard = int(stated[1]) if stated else row.gpus_per_node
    if shard and ranks % shard:
        raise Unusable(f"hybrid sharding over {shard} ranks, which do not divide dp {ranks}")
    return None if not shard or shard == ranks else shard


def _offload_of(row: Fields) -> Offload:
    """What is offloaded: `offload`, else by the columns of the options, `{"Opt Offl": "Y", "Par Offl": "N"}`."""
    if row.offload in get_args(Offload):
        return row.offload  # type: ignore[return-value]
    options = row.given.get("options")
    columns = options.items() if isinstance(options, Mapping) else ()
    on = {str(key).lower() for key, value in columns if str(value).strip().lower() == "y"}
    if "par offl" in on:
        return "full"
    return "optimizer" if "opt offl" in on else "none"


def keeps_no_scores(row: Fields, device: str, engine: str) -> bool:
    """Whether attention keeps no scores: as stated, else as is usual for the device and the stack.

    FlashAttention needs Ampere; FSDP came with PyTorch 2's fused attention, and all stacks for Hopper have it.
    """
    if row.attention:
        return row.attention != "unfused"
    if row.flash_attention is not None:
        return row.flash_attention
    if device.startswith("v100"):
        return False
    fused = bool(_FUSED_ATTENTION.search(f"{row.stack} {row.options}"))
    return fused or HABITS[engine].flash or device.startswith(_HOPPER_ON)


def keeps_activations_on_host(row: Fields, stack: Stack, tp: int) -> bool:
    """Whether kept activations are on the host: as stated, or as the program of that kind does."""
    if row.act_cpu_offload:
        return True
    is_split = tp > 1 or "megatron" in row.stack + row.citation
    return recompute_of(row) == "full" and offloads_activations(stack.engine, stack.zero_stage, is_split)
