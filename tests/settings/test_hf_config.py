"""config.json: each family's file gives its shape in both spellings; what cannot be trained is refused by its key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.errors import ConfigError, LayoutError
from hpc_gpt.settings.experiment import Model
from hpc_gpt.settings.hf_config import config_of, read_config
from hpc_gpt.settings.model_shape import ModelShape, architecture_of
from hpc_gpt.settings.presets import PRESETS, preset
from hpc_gpt.settings.resolve import resolve_shape
from tests.cli.command import in_process

FAMILIES = ["gpt2", *(name for name, shape in PRESETS.items() if shape.positions == "rope")]

# As published with transformers 4: Llama 3.1's keys, without what ours writes in addition.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA3 = LLAMA["rope_scaling"]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(config: Any) -> Path:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return tmp_path

    return write


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_read_again_and_so_is_what_transformers_makes_of_it(name, write):
    shape = preset(name)
    folder = write(config_of(shape))
    assert read_config(folder, shape.seq) == shape
    assert read_config(folder / "config.json", shape.seq) == shape
    config = pytest.importorskip("transformers").AutoConfig.from_pretrained(str(folder))
    assert f"{type(config).__name__.removesuffix('Config')}" in (architecture_of(shape) or "")
    config.save_pretrained(str(folder / "again"))
    assert read_config(folder / "again", shape.seq) == shape


def test_a_byte_order_mark_is_no_fault(write):
    folder = write(config_of(preset("gpt2")))
    file = folder / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read_config(folder, 1024) == preset("gpt2")


@pytest.mark.parametrize(
    "rotation",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {key.replace("rope_type", "type"): LLAMA3[key] for key in LLAMA3},
        },
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 500000.0, **LLAMA3}},
    ],
)
def test_both_spellings_of_the_rotation(rotation, write):
    rest = {key: value for key, value in LLAMA.items() if not key.startswith("rope")}
    assert read_config(write(rest | rotation)) == preset("llama3.1-8b")


def test_null_is_what_the_class_makes_of_it(write):
    small = LLAMA | {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None}
    shape = read_config(write(small))
    assert (shape.head_width, shape.key_heads, shape.rope_scaling) == (128, 32, None)


def test_head_dim_and_layers_without_rotation(write):
    smol = config_of(preset("smollm3-3b"))
    assert read_config(write({**smol, "no_rope_layers": None})).nope_every == 4
    assert read_config(write({**smol, "no_rope_layers": [1] * 36})).nope_every is None
    assert read_config(write({**config_of(preset("qwen3-8b")), "head_dim": None})).head_width == 128


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"architectures": ["Olmo2ForCausalLM"]}, "architectures is Olmo2ForCausalLM, .* OLMo norms after"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma has four norms"),
        ({"architectures": ["GptOssForCausalLM"]}, "GPT-OSS has experts and attention sinks"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepSeek has latent attention"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "it has experts"),
        ({"architectures": ["MixtralForCausalLM"]}, "it has experts"),
        ({"architectures": ["Phi3ForCausalLM"]}, "Phi rotates"),
        ({"architectures": ["XForCausalLM"]}, "architectures is XForCausalLM, which cannot be trained here$"),
        ({"architectures": None, "model_type": "bert"}, "model_type is bert"),
        ({"model_type": "qwen2"}, "architectures is LlamaForCausalLM, but model_type is qwen2"),
        ({"num_local_experts": 8}, "num_local_experts is 8, a key that is not known"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map is .*, a key that is not known"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", which this trainer has not'),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"attention_bias": True}, "attention_bias is true, but the other"),
        ({"sliding_window": 1024}, "sliding_window is 1024, a window shorter than model.seq 8192"),
        ({"layer_types": ["sliding_attention"]}, "layer_types is"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling is .*another kind"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "another kind"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling is .* lacks one of factor"),
        ({"rope_scaling": LLAMA3 | {"beta_fast": 32}}, "whose key beta_fast is not known"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "say something else"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": "4096"}, 'hidden_size is "4096", which is no whole number'),
        ({"hidden_size": True}, "hidden_size is true, which is no whole number"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": 1e400}, "num_hidden_layers is Infinity"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_key_and_value(changed, words, write):
    with pytest.raises(ConfigError, match=words) as refusal:
        read_config(write(LLAMA | changed))
    assert refusal.value.hint
    assert "\n" not in str(refusal.value)


def test_sizes_that_contradict_each_other_are_refused_as_an_experiments(write):
    with pytest.raises(LayoutError, match="kv_heads 5 does not divide the 32 heads"):
        read_config(write(LLAMA | {"num_key_value_heads": 5}))


def test_mistrals_class_has_a_window_if_the_file_says_none(write):
    mistral = config_of(preset("llama3.1-8b")) | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    for key in ("attention_bias", "mlp_bias"):
        del mistral[key]
    assert read_config(write(mistral | {"sliding_window": None})) == preset("llama3.1-8b")
    with pytest.raises(ConfigError, match="not given, so that of the class, 4096"):
        read_config(write(mistral))
    assert read_config(write(mistral), seq=4096).seq == 4096
    qwen = config_of(preset("qwen2.5-7b")) | {"sliding_window": 131072, "max_window_layers": 28}
    assert read_config(write(qwen), 4096) == preset("qwen2.5-7b"), "use_sliding_window is false"
    with pytest.raises(ConfigError, match="sliding_window is 2048"):
        read_config(write(qwen | {"use_sliding_window": True, "sliding_window": 2048}))


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000])
def test_a_damaged_file_is_refused(text, write):
    with pytest.raises(ConfigError, match=r"config\.json: no (JSON|object)"):
        read_config(write(text))


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere/config.json: No such file|nowhere: No such file"):
        read_config(tmp_path / "nowhere")


def test_the_experiments_own_keys_are_laid_over_the_file(write):
    shape = resolve_shape(Model(hf=str(write(LLAMA)), seq=512, layers=2))
    assert shape == replace(preset("llama3.1-8b"), seq=512, layers=2)
    with pytest.raises(ConfigError, match="both give the sizes"):
        resolve_shape(Model(hf="x", preset="gpt2"))


def test_shapes_without_a_class():
    llama = preset("llama3.2-1b")
    assert architecture_of(ModelShape(768, 12, 12)) == "GPT2LMHeadModel"
    for changed in ({"mlp": "gelu"}, {"norm": "layernorm"}, {"qk_norm": True, "bias": "qkv"}):
        assert architecture_of(replace(llama, **changed)) is None


def test_model_takes_a_file_or_a_folder(write, tmp_path, monkeypatch):
    folder = write(LLAMA)
    monkeypatch.chdir(tmp_path)
    words = ("--cluster", "a100-80g-8", "--gpus", "64", "--json")
    for name in (str(folder), str(folder / "config.json"), "./config.json"):
        found = json.loads(in_process("plan", "--model", name, *words).stdout)
        assert found["model"]["kv_heads"] == 8, found["model"]
        assert found["model"]["rope_scaling"]["factor"] == 8
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.toml").write_text('[model]\nhf = "../config.json"\nlayers = 4\n[engine]\nname = "fsdp"\n')
    monkeypatch.chdir("/")
    done = in_process("render", str(tmp_path / "mine" / "run.toml"), "--cluster", "a100-80g-8", "--gpus", "8")
    assert done.code == 0, done.stderr
    assert '"kv_heads": 8' in done.stdout
    assert str(tmp_path) not in done.stdout
    write("{")
    for verb in ("plan", "render", "submit"):
        refused = in_process(verb, "--model", str(folder), "--gpus", "8", "--cluster", "a100-80g-8")
        assert (refused.code, refused.stdout) == (2, "")
        assert "config.json: no JSON" in refused.stderr
        assert "hint: " in refused.stderr
