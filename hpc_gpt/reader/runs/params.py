"""Adds the parameters of the model in a log, by the program's own counts and by its shape, and those that multiply a
token.

Counts of the same quantity must agree to 5 %: otherwise the parameters are left out, and a flag gives both counts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hpc_gpt.core.engines import engines
from hpc_gpt.core.format import show_whole
from hpc_gpt.core.settings.model_keys import Bias
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.shape_split import replicated_params
from hpc_gpt.reader.runs.draft import Draft, is_on, number_of
from hpc_gpt.reader.runs.facts import Facts
from hpc_gpt.reader.runs.rules import Known

_GI = 2**30
_ROUNDING = 0.005  # printed counts are rounded to two digits or more
_EXACT = 1e-6  # a count with a smaller rounding error is exact
_ALIKE = 0.05  # counts of one model that differ by more contradict each other
_PART = "only a part of the parameters is trained, and the formulas assume all"
# Arguments that change the layers' matrices in ways that hpc-gpt does not read.
_OTHER_LAYERS = (
    *("is_hybrid_model", "hybrid_override_pattern", "hybrid_attention_ratio", "hybrid_layer_pattern"),
    *("heterogeneous_layers_config_path", "moe_latent_size", "attention_output_gate"),
    *("experimental_attention_variant", "decoder_num_layers", "decoder_seq_length"),
)
# Details of the shape in addition to its sizes, by the name of a model's architecture.
_LLAMA: dict[str, Any] = {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rope", "bias": "none"}
_KINDS = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "deepseek_v2", "deepseek_v3", "kimi_k2"), _LLAMA),
    **dict.fromkeys(("qwen2", "qwen2_moe", "glm4_moe"), _LLAMA | {"bias": "qkv"}),
    **dict.fromkeys(("qwen3", "qwen3_moe", "dots1"), _LLAMA | {"qk_norm": True}),
    "olmoe": _LLAMA | {"qk_norm": "width"},
}
# (the sum of the ranks' counts, the place of the first, whether all tensor and pipeline ranks count)
RankSum = tuple[float, str, bool]
_OFF = ("", "none", "null", "false", "0", "0.0", "standard")


def shape_of(draft: Draft, arguments: Mapping[str, str]) -> tuple[ModelShape | None, str]:
    """Returns (the model's shape, "") if it is known, else (None, why not). Its vocabulary is the embedding's rows."""
    sizes = [draft.whole(name) for name in ("hidden", "layers", "heads", "vocab")]
    if any(size is None for size in sizes):
        return None, "the shape is not known"
    hidden, layers, heads, rows = (size for size in sizes if size is not None)
    if max(hidden, layers, heads, rows) > 10**9:
        return None, "the shape is larger than any model"
    if other := other_layers(draft, arguments):
        return None, f"{other} gives layers that a plain decoder does not have"
    positions = str(draft.get("position_embedding") or arguments.get("pos_emb", "learned")).strip(" '\"")
    rotary = positions not in ("learned_absolute", "learned", "absolute")
    rotary = rotary or is_on(arguments, "use_rotary_position_embeddings", "use_rope")
    gated = bool(draft.get("swiglu")) or is_on(arguments, "swiglu", "geglu", "reglu")
    gated = gated or arguments.get("glu_activation", "None").strip() not in ("None", "")
    no_bias = is_on(arguments, "disable_bias_linear") or arguments.get("add_bias_linear", "").strip() == "False"
    engine = draft.get("engine")
    facts = engines().get(engine)
    # Taken for GPT-2 unless the arguments say otherwise: programs like our engines pad its vocabulary.
    like_gpt2 = engine == "gpt-neox" or (facts is not None and facts.pads_vocabulary)
    if engine == "hf" or (facts is not None and facts.any_model):
        # A Trainer trains any model; only GPT-2's configuration names its width n_embd.
        like_gpt2 = arguments.get('"model_type"', "gpt2") == "gpt2" and any("n_embd" in key for key in arguments)
    kind = _KINDS.get(str(draft.get("model_type")), {})
    if not (like_gpt2 or gated or rotary or kind):
        return None, "it is not known whether the model is like GPT-2"
    seq = number_of(arguments, "max_position_embeddings") or draft.whole("seq")
    if not (rotary or kind) and seq is None:
        return None, "the number of positions is not known"
    grouped = arguments.get("group_query_attention", "").strip() != "False"
    untied = bool(draft.get("untied_embeddings"))
    untied = untied or is_on(arguments, "untie_embeddings_and_output_weights", "no_weight_tying")
    rms_norm = arguments.get("normalization", "").strip() in ("RMSNorm", "rmsnorm")
    no_bias_but_qkv: Bias = "qkv" if is_on(arguments, "add_qkv_bias") else "none"
    nope = draft.whole("qk_nope")
    details: dict[str, Any] = {
        "kv_heads": draft.whole("kv_heads") if grouped else None,
        "head_dim": draft.whole("head_dim") if nope is None else nope + (draft.whole("qk_rope") or 0),
        "ffn": draft.whole("ffn"),
        "mlp": "swiglu" if gated else "gelu",
        "norm": "rmsnorm" if rms_norm else "layernorm",
        "positions": "rope" if rotary else "learned",
        "bias": no_bias_but_qkv if no_bias else "all",
        "embedding_norm": is_on(arguments, "embed_layernorm"),
        "qk_norm": is_on(arguments, "qk_layernorm") and "kv_lora" not in draft,
        **{name: draft.whole(name) for name in ("q_lora", "kv_lora", "qk_rope", "v_head") if "kv_lora" in draft},
        "mtp_layers": draft.whole("mtp_layers") or 0,
    }
    mixture = _mixture(draft, arguments, layers, draft.whole("ffn") or 4 * hidden)
    if isinstance(mixture, str):
        return None, mixture
    details |= kind | mixture
    return ModelShape(hidden, layers, heads, rows, seq or 0, not untied, vocab_multiple=1, **details), ""


def other_layers(draft: Draft, arguments: Mapping[str, str]) -> str | None:
    """The first argument that gives the layers matrices which a shape does not have; None without one."""
    others = (*_OTHER_LAYERS, *(() if "kv_lora" in draft else ("multi_latent_attention",)))
    return next((name for name in others if arguments.get(name, "").strip().lower() not in _OFF), None)


def _mixture(draft: Draft, arguments: Mapping[str, str], layers: int, ffn: int) -> dict[str, Any] | str:
    """The keys of a shape about experts by what the log states, {} for a dense model; a reason if it does not state
    enough of them. `ffn`: the width of an expert that the log does not state."""
    count, used = draft.whole("experts") or 1, draft.whole("experts_per_token") or 0
    if count == 1:
        return {}
    dense, usual = draft.whole("dense_layers") or 0, arguments.get("mlp_type", "standard").strip() == "standard"
    if not 0 < used <= count or not 0 <= dense < layers or not usual or "layers_listed" in draft:
        return "a mixture of experts, and the log does not say how many parameters a token uses"
    return {
        "experts": count,
        "experts_per_token": used,
        "expert_ffn": draft.whole("expert_ffn") or ffn,
        "shared_ffn": draft.whole("shared_ffn") or None,
        "shared_gate": bool(draft.get("shared_gate")),
        "dense_layers": dense,
    }


def shape_text(shape: ModelShape) -> str:
    """The shape in words, for the source of a figure."""
    with_experts = shape.layers - shape.dense_layers
    details = [
        "GPT-2's" if shape.is_gpt2 else "",
        f"{shape.layers} layers",
        f"hidden {shape.hidden}",
        f"{shape.padded_vocab} embedding rows",
        f"{shape.seq} positions" if shape.positions == "learned" else "no learned positions",
        "gated" if shape.is_gated else "",
        f"{shape.key_heads} KV heads" if shape.key_heads != shape.heads else "",
        "untied" if not shape.tied else "",
        "a norm after the embedding" if shape.embedding_norm else "",
        f"keys and values of rank {shape.kv_lora}" if shape.kv_lora else "",
        f"{shape.experts} experts in {with_experts} layers, {shape.experts_per_token} per token" * shape.is_mixture,
    ]
    return ", ".join(detail for detail in details if detail)


class Count(NamedTuple):
    """A program's own count of parameters. `of`: the whole model, a rank's trainable parameters, or an estimate."""

    value: float
    where: str
    of: str = "whole"


def add_vocab(draft: Draft, arguments: Mapping[str, str]) -> None:
    """Adds the rows of the embedding: the vocabulary, padded if the arguments say so."""
    plain, multiple = draft.whole("vocab_unpadded"), number_of(arguments, "make_vocab_size_divisible_by")
    if "vocab" in draft or not plain:
        return
    if multiple and (tp := draft.whole("tp")):
        rows = multiple * tp
        how = f"vocabulary {plain} padded to a multiple of {multiple} x tp {tp}"
        draft.infer("vocab", math.ceil(plain / rows) * rows, how)
    else:
        draft.set("vocab", plain, f"{draft.sources['vocab_unpadded']}, not padded")


def add_params(known: Known) -> None:
    """Adds `params`, and `active`, the parameters that a token uses: by the program's exact count of the whole model,
    else by the shape, else by the program's rounded count.

    An exact count is exact to a millionth. These are not counts of the whole model: one that a known reason explains,
    such as parameters that each tensor-parallel rank counts again; one that is too small for the known sizes, such as
    the count of one shard under FSDP; and an estimate. A flag says if count and shape differ.
    """
    draft, arguments = known.draft, known.arguments
    tp, pp, ep = (draft.whole(name) for name in ("tp", "pp", "ep"))
    # A program may state no axis.
    counts = list(_counts(known.facts, one_rank=(tp or 1, pp or 1, ep or 1) == (1, 1, 1)))
    summed = _sum_of_ranks(draft, known.facts)
    if counts:
        draft.set("params_printed", counts[0].value, counts[0].where)
    elif summed is not None:
        draft.set("params_printed", summed[0], f"{summed[1]}, the sum over the ranks")
    size, why = shape_of(draft, arguments)
    if size is not None:
        exact = _exact(counts)
        if summed is not None and (tp, pp, ep or 1) == (1, 1, 1) and summed[2]:
            exact.append(Count(*summed[:2]))
        if not _add_by_shape(draft, size, exact, counts, summed):
            size, why = None, "the program's own count contradicts the shape"
    else:
        _add_by_count(draft, counts, summed, why)
    trained = max((count.value for count in counts if count.of == "trainable"), default=0.0)
    if 0 < trained < (draft.whole("params") or 0) / 2 and not _is_share(draft, trained, draft.get("params")):
        size, why = None, _PART
    _add_active(known, size, why)


def _counts(facts: Facts, one_rank: bool) -> Iterator[Count]:
    """The program's own counts. Those of two groups, which some programs count apart, are added up."""
    kinds = {"params": "whole", "params_trainable": "trainable"}
    kinds |= {"params_of_rank": "whole"} if one_rank else {}
    kinds["params_estimated"] = "estimate"
    for name, of in kinds.items():
        yield from (Count(float(fact.value), fact.where, of) for fact in facts.figures(name) if fact.value >= 0)
    for one, other in (("params_dense", "params_sparse"), ("params_decayed", "params_not_decayed")):
        for first, second in zip(facts.figures(one), facts.figures(other), strict=False):
            yield Count(float(first.value) + float(second.value), first.where)


def _is_exact(value: float) -> bool:
    return _exactness(value) < _EXACT and bool(value % _GI)


def _exact(counts: Sequence[Count]) -> list[Count]:
    return [count for count in counts if count.of != "estimate" and _is_exact(count.value)]


def _add_by_shape(
    draft: Draft, size: ModelShape, exact: Sequence[Count], counts: Sequence[Count], summed: RankSum | None
) -> bool:
    """Adds the parameters by the program's exact count, else by the shape; False if a count contradicts the shape."""
    true, best = size.params, None
    for count in exact:
        close = abs(count.value / true - 1) <= _ALIKE or (count.of == "whole" and 0.5 < count.value / true < 2)
        if close and count.value >= _least_params(draft) and not _reason(draft, size, count.value):
            best = count
    alike = [_compare_count(draft, size, count) for count in counts]
    if summed is not None:
        alike.append(_compare_sum(draft, size, *summed))
    if best is not None:
        differs = f", the program's own count; the shape gives {show_whole(true)}" if round(best.value) != true else ""
        draft.set("params", round(best.value), best.where + differs)
    elif all(alike):
        draft.set("params", true, f"inferred: from the shape ({shape_text(size)})")
    return all(alike)


def _add_by_count(draft: Draft, counts: Sequence[Count], summed: RankSum | None, why: str) -> None:
    """Adds the parameters of a model whose shape is not known."""
    gpus, one_rank = draft.whole("gpus") or draft.whole("dp") or 1, {draft.whole("tp"), draft.whole("pp")} == {1}
    least = _least_params(draft)
    # FSDP counts a shard, DeepSpeed the whole model; the least parameters of the known sizes show which.
    whole_is_trained = gpus == 1 or draft.whole("zero_stage") or least > 1
    usable = {"whole": True, "trainable": whole_is_trained, "estimate": one_rank}
    useful = [count for count in counts if count.value >= least and usable[count.of]]
    # If both an adapter's parameters and all parameters are counted, the larger count is the model's.
    best = max(useful, default=None, key=lambda count: count.value)
    total, where, whole = summed or (0.0, "", False)
    tp, pp = (draft.whole(name) or 1 for name in ("tp", "pp"))
    embedding = (draft.whole("vocab") or 0) * (draft.whole("hidden") or 0)
    alone = whole and tp == pp == 1  # no two ranks have the same parameters
    if best := _exact_first(best, [*counts, *([Count(total, where)] if alone else [])], least):
        draft.set("params", round(best.value), f"{best.where}, the program's own count; {why}")
    elif alone:
        draft.set("params", round(total), f"{where}, the program's own count; {why}")
    elif whole and pp > 1 and embedding:
        draft.set("params", round(total - embedding), f"inferred: sum over the ranks ({where}), the embedding once")
    elif summed is None and any(count.value == 0 for count in counts):
        draft.flag(f"the program counts no parameters ({counts[0].where}): unknown, {why}")


def _exact_first(best: Count | None, counts: Sequence[Count], least: float) -> Count | None:
    """The best count, if any; but an exact one that another count is rounded from, or that counts more than a rounded
    best one, comes first."""
    if best is not None and _is_exact(best.value):
        return best
    rounded = [count.value for count in counts if not _is_exact(count.value)]
    exact = [count for count in _exact(counts) if count.value >= least]
    found = [
        count
        for count in exact
        if (best is not None and count.value > best.value)
        or any(abs(value / count.value - 1) <= max(_ROUNDING, _exactness(value)) for value in rounded)
    ]
    return max(found, default=best, key=lambda count: count.value)


def _add_active(known: Known, size: ModelShape | None, why: str) -> None:
    """Adds `active`: parameters, weights of a layer and width of attention that multiply a token, null if unknown."""
    draft, stated = known.draft, known.facts.best("params_active")
    if stated is not None and (size is None or not size.is_mixture):
        draft.set("params_active", stated.value, stated.where)
    hidden, layers, heads = (draft.whole(name) for name in ("hidden", "layers", "heads"))
    active: dict[str, float | None] = {}
    params = draft.whole("params")
    if not params and not (hidden and layers):
        return
    if size is not None:
        idle = size.params - size.params_active
        active = {"params": (params or size.params) - idle, "layer_weights": size.layer_weights}
        active["attention_width"] = size.query_width
        if size.special_keys:
            active["layer_weights"], active["attention_width"] = size.work_of_layer
        if size.is_mixture:
            draft.set("params_active", active["params"], f"inferred: from the shape ({shape_text(size)})")
    elif not other_layers(draft, known.arguments) and why != _PART:
        used = draft.whole("params_active") or (None if (draft.whole("experts") or 1) > 1 else params)
        width = (heads or 0) * (draft.whole("head_dim") or 0) or hidden
        active = {"params": used, "layer_weights": _layer_weights(draft, used), "attention_width": width}
    draft.set("active", {name: value for name, value in active.items() if value}, why)
    if why:
        draft.sources["tflops_hardware"] = f"null: {why}"


def _layer_weights(draft: Draft, used: int | None) -> float | None:
    """The weights of a layer of a model without a known shape: all but the tables, in equal parts."""
    rows, hidden, layers = (draft.whole(name) for name in ("vocab", "hidden", "layers"))
    if not (used and rows and hidden and layers and "untied_embeddings" in draft):
        return None
    tables = rows * hidden * (2 if draft.get("untied_embeddings") else 1)
    return (used - tables) / layers if used > tables else None


def _least_params(draft: Draft) -> int:
    """A lower bound of the parameters of a model of the known sizes: its embedding, and the matrices of its layers."""
    rows, hidden, layers, ffn = (draft.whole(name) or 0 for name in ("vocab_unpadded", "hidden", "layers", "ffn"))
    return max(1, hidden * ((rows or draft.whole("vocab") or 0) + layers * (hidden + 2 * ffn)))


def _compare_count(draft: Draft, size: ModelShape, count: Count) -> bool:
    """Flags a program's own count that differs, with the reason if known; returns whether it can be the same model."""
    true, value, where = size.params, count.value, count.where
    if value > 0 and value % _GI == 0:
        return _compare_gi(draft, true, int(value) // _GI, where)
    if abs(value - true) <= _exactness(value) * true:
        return True
    reason = _reason(draft, size, value) or _REASONS.get(count.of, "")
    if not reason and abs(value / true - 1) <= _ROUNDING:
        return True
    message = f"the program counts {show_whole(value)} parameters ({where}), the shape gives {show_whole(true)}"
    draft.flag(f"{message}: {reason}" if reason else message)
    # A count below half may belong to a rank or an adapter.
    return bool(reason) or value < true / 2 or abs(value / true - 1) <= _ALIKE


_REASONS = {
    "estimate": "it is an estimate",
    "trainable": "it counts the trained parameters, or one rank's share of them",
}


def _reason(draft: Draft, size: ModelShape, value: float) -> str:
    """Why a program's own count differs from the shape's; "" if that is not known."""
    true, tp = size.params, draft.whole("tp") or 1
    if value == 0:
        return "parameters sharded by ZeRO-3 count as none"
    if abs(value * _GI / 1e9 / true - 1) < 1e-3 or (value % 1e9 == 0 and true // _GI == value / 1e9):
        return "it divides by 2^30"
    if tp > 1 and abs(value - true - (tp - 1) * replicated_params(size)) < 1e-4 * true:
        return f"parameters that each of {tp} tensor-parallel ranks holds count {tp} times"
    if abs(value - true * tp) < 0.01 * true * tp and tp > 1:
        return f"each of {tp} tensor-parallel ranks counts the whole model"
    if _is_share(draft, value, true):
        return "it is one rank's share"
    return ""


def _is_share(draft: Draft, value: float, params: int) -> bool:
    gpus = draft.whole("gpus") or 1
    return gpus > 1 and abs(value * gpus / params - 1) < 0.1


def _compare_gi(draft: Draft, true: int, printed: int, where: str) -> bool:
    """Flags a size printed in whole units of 2^30 that differs from the shape's; returns whether it fits."""
    message = f"the program prints a size of {printed}B ({where}), the shape gives {show_whole(true)} parameters"
    if abs(true / _GI - printed) < 1:
        draft.flag(f"{message}: it divides by 2^30")
    elif abs(true / 1e9 - printed) >= 1:
        draft.flag(message)
        return False
    return True


def _exactness(value: float) -> float:
    """The relative rounding error of a count by its printed digits, such as 52.005 B or 124.44M."""
    for unit in (1e9, 1e6, 1e3):
        if value >= unit:
            scaled = value / unit
            for digits in range(7):
                if abs(round(scaled, digits) - scaled) < 1e-9 * scaled:
                    return 0.5 * 10.0**-digits / scaled
    return 0.0


def _sum_of_ranks(draft: Draft, facts: Facts) -> RankSum | None:
    """The sum of the ranks' counts; None without any."""
    counts = [fact for fact in facts.rank_params.values() if math.isfinite(fact.value)]
    if not counts:
        return None
    ways = (draft.whole("tp") or 1) * (draft.whole("pp") or 1)
    # A rank of an expert-parallel group has only its own experts.
    whole = len(counts) == ways and (draft.whole("ep") or 1) == 1
    return sum(fact.value for fact in counts), counts[0].where, whole


def _compare_sum(draft: Draft, size: ModelShape, total: float, where: str, whole: bool) -> bool:
    true = size.params
    tp, pp = draft.whole("tp") or 1, draft.whole("pp") or 1
    if not whole:
        return True
    # Ranks of ZeRO-3 each count the whole model.
    if tp * pp > 1 and abs(total / (tp * pp) / true - 1) < 0.01:
        return _compare_count(draft, size, Count(total / (tp * pp), where))
    second_embedding = size.padded_vocab * size.hidden if pp > 1 and size.tied else 0
    expected = true + (tp - 1) * replicated_params(size) + second_embedding
    if abs(total / expected - 1) > 0.001 and abs(total / true - 1) > _ROUNDING:
        counted = f"the ranks count {show_whole(total)} parameters together ({where})"
        draft.flag(f"{counted}, the shape gives {show_whole(true)}")
        return abs(total / expected - 1) <= _ALIKE
    return True
