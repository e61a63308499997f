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
    assert [name for name in PRESETS if PRESETS[name].positions == "rope"] == list(PARAMS)


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_are_the_published_count_and_transformers(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape, kind = preset(name), class_of(name)
    assert shape.params == PARAMS[name]
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
