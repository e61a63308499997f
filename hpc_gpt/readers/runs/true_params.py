"""The true number of parameters, from the shape; the program's own count; and why the two differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_gpt.readers.logs.part import Part
from hpc_gpt.readers.runs.derived import is_on, number
from hpc_gpt.readers.runs.draft import Draft
from hpc_gpt.settings.model_shape import ModelShape

# Engines whose model is GPT-2's unless their arguments say otherwise.
_GPT2 = frozenset(("megatron-lm", "deepspeed-3d", "deepspeed-zero", "gpt-neox", "hf", "hf-deepspeed"))
_GI = 2**30
# What a program prints is rounded, to two digits or more.
_ROUNDING = 0.005


@dataclass(frozen=True)
class Architecture:
    """A decoder's shape and switches; GPT-2's unless said otherwise. `rows`: of the embedding, padding included."""

    hidden: int
    layers: int
    heads: int
    rows: int
    seq: int
    kv_heads: int = 0
    ffn: int = 0
    head_dim: int = 0
    gated: bool = False
    biases: bool = True
    qkv_biases: bool = True
    learned_positions: bool = True
    rms_norm: bool = False
    tied: bool = True
    embedding_norm: bool = False

    @property
    def is_gpt2(self) -> bool:
        """Whether it is the shape that the project trains itself."""
        plain = not self.gated and self.biases and self.learned_positions and not self.rms_norm
        plain = plain and not self.embedding_norm
        sizes = self.kv_heads in (0, self.heads) and self.ffn in (0, 4 * self.hidden)
        return plain and sizes and self.head_dim in (0, self.hidden // self.heads) and self.hidden % self.heads == 0

    @property
    def params(self) -> int:
        """Parameters of the whole model, a tied embedding once."""
        if self.is_gpt2:
            shape = ModelShape(self.hidden, self.layers, self.heads, self.rows, self.seq, self.tied, vocab_multiple=1)
            return shape.params
        h = self.hidden
        width = (self.head_dim or h // self.heads) * self.heads
        kv = (self.head_dim or h // self.heads) * (self.kv_heads or self.heads)
        ffn = self.ffn or 4 * h
        block = h * (width + 2 * kv) + width * h + (3 if self.gated else 2) * h * ffn
        if self.biases:
            block += h + (2 if self.gated else 1) * ffn + h
        if self.qkv_biases:
            block += width + 2 * kv
        norm = h if self.rms_norm else 2 * h
        embedding = self.rows * h * (1 if self.tied else 2)
        norms = 2 if self.embedding_norm else 1
        positions = self.seq * h if self.learned_positions else 0
        return self.layers * (block + 2 * norm) + norms * norm + embedding + positions

    def replicated(self) -> int:
        """Parameters that every tensor-parallel rank of GPT-2 holds: norms, the biases of row-parallel layers, and
        positions."""
        return self.layers * 6 * self.hidden + self.seq * self.hidden + 2 * self.hidden


def architecture(draft: Draft, arguments: Mapping[str, str]) -> tuple[Architecture | None, str]:
    """(the shape, "") if it is known, else (None, why not)."""
    sizes = [draft.whole(name) for name in ("hidden", "layers", "heads", "vocab")]
    if any(size is None for size in sizes):
        return None, "the shape is not known"
    hidden, layers, heads, rows = (size for size in sizes if size is not None)
    if max(hidden, layers, heads, rows) > 10**9:
        return None, "the shape is larger than any model"
    if max(draft.whole("experts") or 0, number(arguments, "num_local_experts", "n_routed_experts") or 0) > 1:
        return None, "a mixture of experts, whose parameters do not all follow from the shape"
    positions = str(draft.get("position_embedding") or arguments.get("pos_emb", "learned")).strip(" '\"")
    rotary = positions not in ("learned_absolute", "learned", "absolute")
    rotary = rotary or is_on(arguments, "use_rotary_position_embeddings", "use_rope")
    gated = bool(draft.get("swiglu")) or is_on(arguments, "swiglu", "geglu", "reglu")
    gated = gated or arguments.get("glu_activation", "None").strip() not in ("None", "")
    no_bias = is_on(arguments, "disable_bias_linear") or arguments.get("add_bias_linear", "").strip() == "False"
    # A Trainer trains any model; only GPT-2's configuration calls its width n_embd.
    trainer = str(draft.get("engine")).startswith("hf") and not any("n_embd" in key for key in arguments)
    known = (draft.get("engine") in _GPT2 and not trainer) or gated or rotary
    if not known:
        return None, "whether the model is like GPT-2 is not known"
    seq = number(arguments, "max_position_embeddings") or draft.whole("seq")
    if not rotary and seq is None:
        return None, "the number of positions is not known"
    kv_heads = draft.whole("kv_heads") or 0
    if arguments.get("group_query_attention", "").strip() == "False":
        kv_heads = 0
    untied = bool(draft.get("untied_embeddings"))
    untied = untied or is_on(arguments, "untie_embeddings_and_output_weights", "no_weight_tying")
    return Architecture(
        hidden,
        layers,
        heads,
        rows,
        seq or 0,
        kv_heads=kv_heads,
        ffn=draft.whole("ffn") or 0,
        head_dim=number(arguments, "kv_channels") or 0,
        gated=gated,
        biases=not no_bias,
        qkv_biases=not no_bias or is_on(arguments, "add_qkv_bias"),
        learned_positions=not rotary,
        rms_norm=arguments.get("normalization", "").strip() in ("RMSNorm", "rmsnorm"),
        tied=not untied,
        embedding_norm=is_on(arguments, "embed_layernorm"),
    ), ""


def add_params(draft: Draft, arguments: Mapping[str, str], parts: Sequence[Part]) -> None:
    """Add `params`: from the shape, else the program's own count; a flag says if the two differ."""
    stated = [(fact.value, str(fact.place)) for part in parts for fact in part.facts.get("params", ())]
    printed = [(float(value), where) for value, where in stated if isinstance(value, int | float) and value >= 0]
    summed = _sum_of_ranks(draft, parts)
    if printed:
        draft.set("params_printed", printed[0][0], printed[0][1])
    elif summed is not None:
        draft.set("params_printed", summed[0], f"{summed[1]}, the sum over the ranks")
    shape, why = architecture(draft, arguments)
    draft.values.pop("params", None)
    draft.sources.pop("params", None)
    if shape is not None:
        draft.set("params", shape.params, f"inferred: from the shape ({_words(shape)})")
        for value, where in printed:
            _compare(draft, shape, value, where)
        if summed is not None:
            _compare_sum(draft, shape, *summed)
        return
    useful = [(value, where) for value, where in printed if value >= 1]
    if useful:
        draft.set("params", round(useful[0][0]), f"{useful[0][1]}, the program's own count; {why}")
    elif summed is not None:
        total, where, whole = summed
        rows, hidden = draft.whole("vocab"), draft.whole("hidden")
        if whole and (draft.whole("pp") or 1) > 1 and rows and hidden:
            draft.set(
                "params", round(total - rows * hidden), f"inferred: sum over the ranks ({where}), the embedding once"
            )
        elif whole and (draft.whole("pp") or 1) == 1 and (draft.whole("tp") or 1) == 1:
            draft.set("params", round(total), f"{where}, the program's own count; {why}")
    elif printed:
        draft.flag(f"the program counts no parameters ({printed[0][1]}): unknown, {why}")


def _words(shape: Architecture) -> str:
    kind = "GPT-2's" if shape.is_gpt2 else ""
    details = [
        kind,
        f"{shape.layers} layers",
        f"hidden {shape.hidden}",
        f"{shape.rows} rows of embedding",
        f"{shape.seq} positions" if shape.learned_positions else "no learned positions",
        "gated" if shape.gated else "",
        f"{shape.kv_heads} KV heads" if shape.kv_heads not in (0, shape.heads) else "",
        "untied" if not shape.tied else "",
        "a norm behind the embedding" if shape.embedding_norm else "",
    ]
    return ", ".join(each for each in details if each)


def _compare(draft: Draft, shape: Architecture, value: float, where: str) -> None:
    """Flag a program's own count that is not the shape's, and why, if that is known."""
    true = shape.params
    tp = draft.whole("tp") or 1
    if value > 0 and value % _GI == 0:
        return _compare_gi(draft, true, int(value) // _GI, where)
    if abs(value - true) <= _exactness(value) * true:
        return None
    reason = ""
    if value == 0:
        reason = "parameters sharded by ZeRO-3 count as none"
    elif abs(value * _GI / 1e9 / true - 1) < 1e-3 or (value % 1e9 == 0 and true // _GI == value / 1e9):
        reason = "it divides by 2^30"
    elif tp > 1 and abs(value - true - (tp - 1) * shape.replicated()) < 1e-4 * true:
        reason = f"what every one of {tp} tensor-parallel ranks holds counts {tp} times"
    elif abs(value - true * tp) < 0.01 * true * tp and tp > 1:
        reason = f"every one of {tp} tensor-parallel ranks counts"
    elif abs(value * (draft.whole("gpus") or 1) / true - 1) < 0.1:
        reason = "it is one rank's share"
    if not reason and abs(value / true - 1) <= _ROUNDING:
        return None
    draft.flag(
        f"the program counts {_count(value)} parameters ({where}), the shape gives {_count(true)}"
        + (f": {reason}" if reason else "")
    )
    return None


def _compare_gi(draft: Draft, true: int, printed: int, where: str) -> None:
    """The same for a size that was worked out in units of 2^30, whole."""
    words = f"the program prints a size of {printed}B ({where}), the shape gives {_count(true)} parameters"
    if abs(true / _GI - printed) < 1:
        draft.flag(f"{words}: it divides by 2^30")
    elif abs(true / 1e9 - printed) >= 1:
        draft.flag(words)


def _exactness(value: float) -> float:
    """How far, of its size, a count may be off by the digits that it is printed to, as 52.005 B or 124.44M."""
    for unit in (1e9, 1e6, 1e3):
        if value >= unit:
            scaled = value / unit
            for digits in range(7):
                if abs(round(scaled, digits) - scaled) < 1e-9 * scaled:
                    return 0.5 * 10.0**-digits / scaled
    return 0.0


def _sum_of_ranks(draft: Draft, parts: Sequence[Part]) -> tuple[float, str, bool] | None:
    """(sum of what the ranks count, where, whether every tensor and pipeline rank is there); None without any."""
    counts: dict[str, tuple[float, str]] = {}
    for part in parts:
        for rank, (value, place) in part.rank_params.items():
            if math.isfinite(value):
                counts.setdefault(rank, (value, str(place)))
    if not counts:
        return None
    ways = (draft.whole("tp") or 1) * (draft.whole("pp") or 1)
    first = next(iter(counts.values()))[1]
    return sum(value for value, _ in counts.values()), first, len(counts) == ways


def _compare_sum(draft: Draft, shape: Architecture, total: float, where: str, whole: bool) -> None:
    true = shape.params
    tp, pp = draft.whole("tp") or 1, draft.whole("pp") or 1
    if not whole:
        return None
    # Ranks of ZeRO-3 each count the whole model.
    if tp * pp > 1 and abs(total / (tp * pp) / true - 1) < 0.01:
        return _compare(draft, shape, total / (tp * pp), where)
    expected = true + (tp - 1) * shape.replicated() + (shape.rows * shape.hidden if pp > 1 and shape.tied else 0)
    if abs(total / expected - 1) > 0.001 and abs(total / true - 1) > _ROUNDING:
        draft.flag(f"the ranks count {_count(total)} parameters together ({where}), the shape gives {_count(true)}")
    return None


def _count(value: float) -> str:
    return f"{round(value):,}"
