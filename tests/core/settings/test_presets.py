"""The presets of other families than GPT-2's, against published counts and transformers' own classes."""

from typing import Any

import pytest

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import PRESETS, preset

# Parameters; those of Llama 3.1 and 3.2, Qwen and SmolLM are the sizes that their model cards' files have.
PARAMS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "smollm3-3b": 3_075_098_624,
}
# Of a mixture, in 1e9: parameters, as published; active ones, both embeddings in, as published, and without the first
# embedding if the published figure is.
MIXTURES = {
    "qwen3-30b-a3b": ((30.53, 30.5), (3.35, 3.3), None),
    "qwen3-235b-a22b": ((235.09, 235.1), (22.19, 22), None),
    "mixtral-8x7b": ((46.70, 46.7), (12.88, 12.9), None),
    "mixtral-8x22b": ((140.62, 140.6), (39.15, 39), None),
    "olmoe-1b-7b": ((6.92, 6.9), (1.28, 1.3), None),
    "glm-4.5": ((352.80, 355), (33.63, 32), None),
    "deepseek-v3": ((671.03, 671), (37.55, 37), 36.63),
    "kimi-k2": ((1026.41, 1026), (32.86, 32), 31.69),
    "gpt-oss-20b": ((20.91, 20.9), (4.19, 3.6), 3.61),
    "gpt-oss-120b": ((116.83, 116.8), (5.71, 5.1), 5.13),
}
CLASSES = {
    "llama": "Llama",
    "smollm2": "Llama",
    "mistral": "Mistral",
    "smollm3": "SmolLM3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}


def class_of(name: str) -> str:
    return next(kind for begun, kind in CLASSES.items() if name.startswith(begun))


def config_keys(shape: ModelShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
    }


def test_each_other_preset_has_a_count():
    assert [name for name in PRESETS if PRESETS[name].positions == "rope"] == [*PARAMS, *MIXTURES]


def test_parameters_are_the_published_count():
    assert {name: preset(name).params for name in PARAMS} == PARAMS


# Of each class of transformers one, the smallest.
@pytest.mark.parametrize("name", ["llama3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b", "smollm3-3b"])
@pytest.mark.long(but="first")
def test_parameters_are_those_of_transformers_class(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape, kind = preset(name), class_of(name)
    config = getattr(transformers, f"{kind}Config")(**config_keys(shape))
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMS[name]


def test_llama_3_2_scales_its_rotation_by_32_and_3_1_by_8():
    factors = {name: shape.rope_scaling.factor for name, shape in PRESETS.items() if shape.rope_scaling}
    assert {name for name, factor in factors.items() if factor == 32} == {"llama3.2-1b", "llama3.2-3b"}
    assert {name for name, factor in factors.items() if factor == 8} == {
        f"llama3.1-{size}" for size in ("8b", "70b", "405b")
    }
    assert len(factors) == 5


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_has_the_published_parameters_and_active_ones(name):
    shape, ((params, published), (active, published_active), without_embedding) = preset(name), MIXTURES[name]
    assert round(shape.params / 1e9, 2) == params
    assert round(shape.params_active / 1e9, 2) == active
    embedding = shape.padded_vocab * shape.hidden
    if without_embedding is not None:
        assert round((shape.params_active - embedding) / 1e9, 2) == without_embedding
    if name == "glm-4.5":  # with its MTP layer and without embeddings
        one, projection = shape.kinds[-1], 2 * shape.hidden**2
        assert (shape.params - 2 * embedding + one.params + projection) / 1e9 == pytest.approx(355.24, abs=0.01)
        active = shape.params_active - 2 * embedding + one.params_active + projection
        assert active / 1e9 == pytest.approx(32.48, abs=0.01)
    else:
        assert float(f"{params:.{len(str(int(params))) + (published != int(published))}g}") == published
        counted = without_embedding or active
        assert abs(counted - published_active) <= (0.5 if published_active == int(published_active) else 0.051)


def test_a_mixtures_layers_add_up_to_its_parameters():
    for name in MIXTURES:
        shape = preset(name)
        assert sum(kind.count for kind in shape.kinds) == shape.layers
        assert shape.kind_of(0).name == ("dense" if shape.dense_layers else "experts")
        assert shape.kind_of(shape.dense_layers).name == shape.kind_of(shape.layers - 1).name == "experts"
        whole = sum(kind.count * (kind.params - kind.expert_params) for kind in shape.kinds) + shape.outer_params
        assert shape.params - whole == shape.expert_params > shape.params - shape.params_active > 0
