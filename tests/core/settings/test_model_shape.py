"""Model shapes: parameters counted matrix by matrix, padding, stages. What is refused: cli/refused/shapes.txt."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import PRESETS, preset
from hpc_gpt.core.settings.shape_split import (
    default_tp,
    kind_params,
    params_of_stages,
    partition_layers,
    replicated_params,
    stage_layers,
)
from hpc_gpt.core.weights.classes import no_class_note

LLAMA = {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rope", "bias": "none"}

shapes = st.builds(
    ModelShape,
    hidden=st.integers(1, 64).map(lambda size: 8 * size),
    layers=st.integers(1, 12),
    heads=st.just(8),
    vocab=st.integers(1, 1000),
    seq=st.integers(1, 128),
    tied=st.booleans(),
    vocab_multiple=st.sampled_from([1, 8, 64, 128]),
)


@given(shapes)
def test_parameters_are_the_sum_over_all_matrices(shape):
    h = shape.hidden
    block = [(h, 3 * h), (3 * h,), (h, h), (h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,), (h,), (h,), (h,), (h,)]
    whole = [(shape.padded_vocab, h), (shape.seq, h), (h,), (h,)] + block * shape.layers
    if not shape.tied:
        whole.append((shape.padded_vocab, h))
    count = sum(rows[0] * (rows[1] if len(rows) == 2 else 1) for rows in whole)
    assert shape.params == count


@given(shapes, st.sampled_from([1, 2, 4]))
def test_the_ranks_hold_the_model_and_each_what_is_whole(shape, tp):
    held = tp * (shape.layers * kind_params(shape.kinds[-1], tp)) - (tp - 1) * shape.layers * replicated_params(
        ModelShape(shape.hidden, 1, shape.heads, seq=1)
    )
    # Of one layer: without its positions and its last norm.
    held += (tp - 1) * shape.layers * (shape.hidden + 2 * shape.hidden)
    assert held == pytest.approx(shape.layers * shape.kinds[0].params)


def test_ranks_that_share_a_head_of_keys_hold_a_part():
    shape = ModelShape(64, 1, 8, kv_heads=2, **LLAMA)
    keys = next(matrix for matrix in shape.kinds[-1].matrices if matrix.name == "k")
    assert [keys.rows_on(tp) for tp in (1, 2, 4, 8)] == [16, 8, 8, 8]
    assert [keys.size_on(tp) / 64 for tp in (1, 2, 4, 8)] == [16, 8, 4, 2]


@given(shapes)
def test_sizes_that_say_gpt2_in_full_are_gpt2s(shape):
    full = replace(shape, kv_heads=shape.heads, head_dim=shape.hidden // shape.heads, ffn=4 * shape.hidden)
    assert (full.is_gpt2, full.params) == (True, shape.params)
    assert not replace(shape, norm="rmsnorm").is_gpt2
    assert set(shape.table()) == {"hidden", "layers", "heads", "vocab", "seq", "tied", "vocab_multiple"}


@given(shapes)
def test_padded_vocabulary_is_the_next_multiple(shape):
    assert shape.padded_vocab % shape.vocab_multiple == 0
    assert 0 <= shape.padded_vocab - shape.vocab < shape.vocab_multiple


@pytest.mark.shared
def test_every_size_of_megatron_deepspeed_is_a_preset(shared):
    import re

    source = next((shared / "seeds").glob("001_*")).read_text(errors="replace")
    sizes = {found.lower() for found in re.findall(r"^\|\s*\d+ \|\s*([\d.]+B)\s*\|", source, re.MULTILINE)}
    assert len(sizes) >= 12
    assert sizes <= set(PRESETS)


def test_preset_in_any_case_and_unknown_with_close_matches():
    assert preset("48B") == preset("48b")
    with pytest.raises(ConfigError, match="no model preset 'gpt2-x'") as refusal:
        preset("gpt2-x")
    assert "gpt2-xl" in refusal.value.hint


@given(st.integers(1, 200), st.integers(1, 64))
def test_stages_hold_all_layers_as_even_as_can_be(layers, pp):
    stages = stage_layers(layers, pp)
    assert len(stages) == pp
    assert sum(stages) == layers
    assert max(stages) - min(stages) <= 1
    assert stages == sorted(stages, reverse=True)


@given(shapes, st.integers(1, 12))
def test_stages_hold_every_parameter_and_a_tied_head_twice(shape, pp):
    pp = min(pp, shape.layers)
    for partition in ("layers", "parameters"):
        held = params_of_stages(shape, partition_layers(shape, pp, partition))
        copies = shape.padded_vocab * shape.hidden if shape.tied and pp > 1 else 0
        assert sum(held) == shape.params + copies


def all_partitions(layers, pp):
    if pp == 1:
        return [[layers]]
    return [[first, *rest] for first in range(1, layers - pp + 2) for rest in all_partitions(layers - first, pp - 1)]


@given(shapes, st.integers(1, 5))
def test_by_parameters_no_split_has_a_smaller_largest_stage(shape, pp):
    pp = min(pp, shape.layers)
    stages = partition_layers(shape, pp, "parameters")
    assert len(stages) == pp
    assert sum(stages) == shape.layers
    assert min(stages) >= 1
    best = min(max(params_of_stages(shape, other)) for other in all_partitions(shape.layers, pp))
    assert max(params_of_stages(shape, stages)) == best


def test_a_large_vocabulary_takes_layers_from_first_and_last():
    assert partition_layers(preset("gpt2"), 4, "parameters") == [1, 5, 5, 1]
    # 52e9 parameters in 64 layers: the embedding is half a layer.
    assert partition_layers(preset("48b"), 16, "parameters") == partition_layers(preset("48b"), 16) == [4] * 16
    assert partition_layers(preset("gpt2-xl"), 4, "parameters") == [11, 13, 13, 11]


def test_by_layers_is_even_and_numbers_are_taken_as_they_are():
    assert partition_layers(preset("gpt2"), 5) == stage_layers(12, 5)
    assert partition_layers(preset("gpt2"), 3, (1, 10, 1)) == [1, 10, 1]


@given(st.integers(1, 16), st.integers(1, 8), st.sampled_from([12, 25, 32]), st.integers(1, 16))
def test_default_tp_is_the_largest_that_the_rule_allows(per_node, factor, heads, pp):
    gpus = factor * pp
    allowed = [tp for tp in range(1, per_node + 1) if per_node % tp == 0 and heads % tp == 0 and gpus % (tp * pp) == 0]
    assert default_tp(gpus, per_node, ModelShape(8 * heads, pp, heads), pp) == max(allowed)


def test_layers_without_rotation():
    shape = ModelShape(64, 8, 8, nope_every=4, **LLAMA)
    assert [layer for layer in range(8) if not shape.rotates(layer)] == [3, 7]
    assert all(replace(shape, nope_every=None).rotates(layer) for layer in range(8))
    assert not any(ModelShape(64, 8, 8).rotates(layer) for layer in range(8))


_NEAREST = [
    ({"experts": 8}, "MixtralForCausalLM is the nearest, with model.norm_topk=true"),
    ({"experts": 8, "dense_layers": 1, "ffn": 40}, "Qwen3MoeForCausalLM is the nearest, with model.qk_norm=true"),
    ({"experts": 8, "norm_topk": True, "router": "topk-softmax"}, "MixtralForCausalLM .* model.router=softmax"),
    ({"experts": 8, "router": "sigmoid", "router_bias": True}, "Glm4MoeForCausalLM .* model.shared_ffn=24"),
    ({"experts": 8, "shared_ffn": 40}, "Qwen2MoeForCausalLM .* model.shared_gate=true"),
    ({"experts": 8, "nope_every": 2, "qk_norm": True}, "Qwen3MoeForCausalLM is the nearest, with no model.nope_every"),
]


@pytest.mark.parametrize(("changed", "words"), _NEAREST)
def test_a_shape_of_no_class_has_a_nearest_one(changed, words):
    experts = {"experts_per_token": 2, "expert_ffn": 24} if "experts" in changed else {}
    plain = ModelShape(32, 2, 4, 64, 24, mlp="swiglu", norm="rmsnorm", positions="rope", bias="none")
    assert re.search(words, no_class_note(replace(plain, **experts, **changed)))


def test_shapes_with_a_class_have_no_note():
    planned = {"kv_lora", "sinks", "mtp_layers"}  # which no engine trains
    assert [
        name for name in PRESETS if no_class_note(preset(name)) and not {*preset(name).special_keys} & planned
    ] == []
