"""The rules of a model shape: sizes that contradict each other, or that no model can have."""

import math
from collections.abc import Iterator

from hpc_gpt.core.errors import Fault, raise_faults
from hpc_gpt.core.settings.layout import largest_divisor
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.model_shape import DEFAULTS, ModelShape
from hpc_gpt.core.settings.rules import keys_of

# Sizes below 1 that are not a fault by themselves, and the least that others may have.
_MAY_BE_ZERO = ("dense_layers", "mtp_layers")
_OF_EXPERTS = ("experts_per_token", "expert_ffn", "shared_ffn", "shared_gate", "dense_layers", "router", "router_bias",
               "expert_groups", "groups_per_token", "norm_topk", "router_scale", "router_dtype")  # fmt: skip
_OF_MLA = ("q_lora", "qk_rope", "v_head")


def check_shape(shape: ModelShape) -> None:
    """Raises LayoutError for sizes that contradict each other, or that no model can have: a line for each fault."""
    raise_faults(shape_faults(shape))


def shape_faults(shape: ModelShape) -> list[Fault]:
    """The faults of the shape; empty if a model can have it."""
    faults = [*size_faults(shape)]
    if not faults:  # the other rules divide by sizes
        faults = [*_head_faults(shape), *_rotation_faults(shape)]
        faults += [*_expert_faults(shape), *_attention_faults(shape)]
    else:
        faults += _expert_faults(shape)
    return [fault._replace(of_layout=True, keys=keys_of(fault) or ("model",)) for fault in faults]


def size_faults(shape: ModelShape | Model) -> Iterator[Fault]:
    """The faults of sizes below 1, or below 0 for some."""
    for name in DEFAULTS:
        size = getattr(shape, name, None)  # None of a [model] follows from others
        if name in ("nope_every", "pad_token") or isinstance(size, bool) or not isinstance(size, int):
            continue
        least = 0 if name in _MAY_BE_ZERO else 1
        if size < least:
            yield Fault(f"model.{name} is {size}, but must be at least {least}", f"give a positive {name}", True)


def _head_faults(shape: ModelShape) -> Iterator[Fault]:
    if shape.head_dim is None and shape.hidden % shape.heads:
        yield Fault(
            f"hidden {shape.hidden} is not a multiple of heads {shape.heads}: "
            f"{shape.hidden} / {shape.heads} = {shape.hidden / shape.heads:.2f}",
            "choose heads that divide hidden",
        )
    if shape.heads % shape.key_heads:
        yield Fault(
            f"kv_heads {shape.key_heads} does not divide the {shape.heads} heads: "
            f"{shape.heads} / {shape.key_heads} = {shape.heads / shape.key_heads:.2f}",
            f"use a model.kv_heads that divides {shape.heads}",
        )
    if not (shape.norm_eps > 0 and math.isfinite(shape.norm_eps)):
        yield Fault(f"model.norm_eps is {shape.norm_eps}, but must be above 0", "use 1e-5 or 1e-6")
    if shape.pad_token is not None and shape.positions == "learned":
        yield Fault(
            f"model.pad_token is {shape.pad_token}, but model.positions is learned: GPT-2 trains every row",
            "leave model.pad_token out",
        )
    elif shape.pad_token is not None and not 0 <= shape.pad_token < shape.vocab:
        yield Fault(
            f"model.pad_token is {shape.pad_token}, but the tokens are 0 to {shape.vocab - 1}",
            "name a token of the vocabulary, or leave model.pad_token out",
        )


def _rotation_faults(shape: ModelShape) -> Iterator[Fault]:
    stated = {"rope_theta": shape.rope_theta != 1e4, "rope_scaling": shape.rope_scaling, "nope_every": shape.nope_every}
    stated["rotated"] = shape.rotated != 1
    if shape.positions != "rope":
        if useless := [name for name, is_given in stated.items() if is_given]:
            yield Fault(
                f"model.{useless[0]} is given, but model.positions is {shape.positions}: nothing is rotated",
                f'set model.positions = "rope", or leave {", ".join(useless)} out',
            )
        return
    if shape.head_dim is None and shape.hidden % shape.heads:
        pass  # the head's width is a fault of its own
    elif shape.head_width % 2:
        yield Fault(
            f"model.head_dim is {shape.head_width}, but a rotation needs pairs: it must be even",
            f"use model.head_dim = {shape.head_width + 1}, or other heads",
        )
    elif not (0 < shape.rotated <= 1 and (shape.rotated * shape.head_width / 2).is_integer()):
        pairs = shape.head_width // 2
        share = min(pairs, max(1, round(shape.rotated * pairs))) if math.isfinite(shape.rotated) else pairs
        yield Fault(
            f"model.rotated is {shape.rotated:g}, but must be above 0, at most 1, and whole pairs of the "
            f"{shape.head_width} of a head",
            f"use model.rotated = {share / pairs:g}",
        )
    if not (shape.rope_theta > 1 and math.isfinite(shape.rope_theta)):
        yield Fault(f"model.rope_theta is {shape.rope_theta:g}, but must be above 1", "use 10000 or 500000")
    if shape.nope_every is not None and shape.nope_every < 2:
        yield Fault(f"model.nope_every is {shape.nope_every}, but must be 2 or more", "leave it out for none")
    if (scaling := shape.rope_scaling) is not None:
        figures = {"factor": (scaling.factor, 1.0), "low_freq_factor": (scaling.low_freq_factor, 0.0)}
        figures["original_max_position_embeddings"] = (scaling.original_max_position_embeddings, 1)
        for name, (figure, least) in figures.items():
            if not (figure >= least and figure > 0 and math.isfinite(figure)):
                must = f"at least {least:g}" if least else "above 0"
                yield Fault(f"model.rope_scaling.{name} is {figure:g}, but must be {must}", "Llama 3.1 has 8")
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if not (high > low and math.isfinite(high)):
            yield Fault(
                f"model.rope_scaling.high_freq_factor is {high:g}, but must be above low_freq_factor, {low:g}",
                "Llama 3.1 has 1 and 4",
            )


def _expert_faults(shape: ModelShape) -> Iterator[Fault]:
    experts, used, groups = shape.experts, shape.experts_per_token, shape.expert_groups
    if experts is None:
        if useless := _stated(shape, _OF_EXPERTS):
            verb = "is" if len(useless) == 1 else "are"
            yield Fault(
                f"{', '.join(useless)} {verb} given, but model.experts is not: no layer has experts",
                "give model.experts, or leave the others out",
            )
        return
    if experts == 1:
        yield Fault("model.experts is 1, but a mixture has at least 2", "leave it out, and give model.ffn")
    if missing := [name for name in ("experts_per_token", "expert_ffn") if getattr(shape, name) is None]:
        named = " and ".join(f"model.{name}" for name in missing)
        yield Fault(
            f"model.experts is {experts}, but {named} {'is' if len(missing) == 1 else 'are'} not given",
            f"set {named}",
        )
    if used is not None and used > max(1, experts):
        yield Fault(
            f"experts_per_token {used} is above the {experts} experts",
            f"use model.experts_per_token = {max(1, experts)} or fewer",
        )
    if shape.dense_layers >= shape.layers:
        yield Fault(
            f"dense_layers {shape.dense_layers} of {shape.layers} layers leaves none with experts",
            f"use model.dense_layers = {max(0, shape.layers - 1)} or fewer, or leave out the keys of experts",
        )
    if shape.shared_gate and shape.shared_ffn is None:
        yield Fault(
            "model.shared_gate is true, but model.shared_ffn is not given: nothing is shared", "set model.shared_ffn"
        )
    if not (shape.router_scale > 0 and math.isfinite(shape.router_scale)):
        yield Fault(f"model.router_scale is {shape.router_scale:g}, but must be above 0", "use 1, or leave it out")
    yield from _group_faults(experts, used, groups, shape.groups_per_token)


def _group_faults(experts: int, used: int | None, groups: int | None, chosen: int | None) -> Iterator[Fault]:
    """The faults of groups of experts, of which a token uses `chosen`."""
    if (groups is None) != (chosen is None):
        has, lacks = ("expert_groups", "groups_per_token") if chosen is None else ("groups_per_token", "expert_groups")
        yield Fault(
            f"model.{has} is {groups or chosen}, but model.{lacks} is not given", f"give both, or leave {has} out"
        )
    if groups is None or groups < 1 or experts < 1:
        return
    if experts % groups:
        yield Fault(
            f"expert_groups {groups} does not divide the {experts} experts: {experts} / {groups} = "
            f"{experts / groups:.2f}",
            f"use model.expert_groups = {largest_divisor(experts, groups)}",
        )
    elif chosen is not None and used is not None and used > chosen * experts // groups and chosen <= groups:
        of_each = experts // groups
        yield Fault(
            f"experts_per_token {used} is above the {chosen * of_each} experts of {chosen} groups, {of_each} in each",
            f"use model.groups_per_token = {-(-used // of_each)}",
        )
    if chosen is not None and chosen > groups:
        yield Fault(
            f"groups_per_token {chosen} is above expert_groups {groups}", f"use model.groups_per_token = {groups}"
        )


def _attention_faults(shape: ModelShape) -> Iterator[Fault]:
    letters = shape.window_layers
    if shape.window is None and letters is not None:
        yield Fault("model.window_layers is given, but model.window is not: no layer has a window", "set model.window")
    if letters is not None and ({*letters} - {*"SL"} or "S" not in letters or len(letters) > shape.layers):
        yield Fault(
            f'model.window_layers is "{letters}", but needs letters S (with the window) and L (all tokens), at least '
            f"one S, and at most {shape.layers}, one for each layer",
            'use model.window_layers = "SSSL", which repeats, or leave it out: all layers have the window',
        )
    if shape.kv_lora is None:
        if useless := _stated(shape, _OF_MLA):
            yield Fault(
                f"{', '.join(useless)} {'is' if len(useless) == 1 else 'are'} given, but model.kv_lora is not, which "
                "chooses DeepSeek's attention",
                "give model.kv_lora, or leave the others out",
            )
        return
    if shape.qk_rope is None or shape.head_dim is None or shape.qk_rope >= shape.head_dim:
        yield Fault(
            f"model.kv_lora is {shape.kv_lora}, but model.qk_rope is {shape.qk_rope}, and model.head_dim "
            f"{shape.head_dim}: a head has a rotated part and another one",
            "set model.head_dim to the whole width of a head's query, and model.qk_rope to a part of it; 192 and 64",
        )
    others = {"kv_heads": shape.key_heads != shape.heads, "qk_norm": shape.qk_norm, "rotated": shape.rotated != 1}
    others["positions"] = shape.positions != "rope"
    if wrong := [f"model.{name}" for name, is_given in others.items() if is_given]:
        yield Fault(
            f"model.kv_lora is {shape.kv_lora}, and DeepSeek's attention allows no other {', '.join(wrong)}",
            f"leave {', '.join(wrong)} out" + ('; set model.positions = "rope"' if others["positions"] else ""),
        )


def _stated(shape: ModelShape, names: tuple[str, ...]) -> list[str]:
    """The keys of [model] among `names` that differ from their default."""
    return [f"model.{name}" for name in names if getattr(shape, name) != DEFAULTS[name]]
