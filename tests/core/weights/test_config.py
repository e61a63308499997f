"""config.json: each family's file gives its shape in both spellings; what cannot be trained is refused by its key."""

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.engines.base.facts import EngineFacts
from hpc_gpt.core.errors import ConfigError, LayoutError
from hpc_gpt.core.settings.experiment import Model
from hpc_gpt.core.settings.model import resolve_shape
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import PRESETS, preset
from hpc_gpt.core.weights.classes import architecture_of
from hpc_gpt.core.weights.config import (
    InitConfig,
    config_of,
    init_config_in,
    read_config,
    unfollowed_keys,
)
from hpc_gpt.core.weights.config_keys import ARCHITECTURES
from hpc_gpt.core.weights.names import stored_sizes
from hpc_gpt.trainer.model.attention import frequencies
from tests import marked
from tests.cli.command import in_process

FAMILIES = ["gpt2", *(name for name, shape in PRESETS.items() if shape.positions == "rope" and not shape.is_mixture)]

# As published with transformers 4: Llama 3.1's keys, without what ours writes in addition.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
LLAMA3 = LLAMA["rope_scaling"]


def as_mistral(name: str, *without: str) -> dict[str, Any]:
    """A preset's config.json as Mistral's class has it, which knows nothing of biases."""
    config = config_of(preset(name)) | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias", *without)}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(config: Any) -> Path:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return tmp_path

    return write


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_read_again_as_transformers_reads_it(name, write):
    shape = preset(name)
    folder = write(config_of(shape))
    assert read_config(folder, shape.seq) == shape
    assert read_config(folder / "config.json", shape.seq) == shape
    config = pytest.importorskip("transformers").AutoConfig.from_pretrained(str(folder))
    assert f"{type(config).__name__.removesuffix('Config')}" in (architecture_of(shape) or "")
    config.save_pretrained(str(folder / "again"))
    assert read_config(folder / "again", shape.seq) == shape


@pytest.mark.parametrize(
    "rotation",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_theta": 500000.0, "rope_scaling": {key.replace("rope_type", "type"): LLAMA3[key] for key in LLAMA3}},
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 500000.0, **LLAMA3}},
    ],
)
def test_both_spellings_of_the_rotation(rotation, write):
    rest = {key: value for key, value in LLAMA.items() if not key.startswith("rope")}
    assert read_config(write(rest | rotation)) == preset("llama3.1-8b")


def _merged(*parts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2,
         "vocab_size": 64, "intermediate_size": 64, "pad_token_id": None, "sliding_window": None}  # fmt: skip
_TYPES = st.sampled_from([{}, {"rope_type": "default"}, {"type": "default"}, {"rope_type": "llama3"},
                          {"type": "llama3"}, {"type": "llama3", "rope_type": "default"}])  # fmt: skip
_THETAS = st.sampled_from([{}, {"rope_theta": 5e5}, {"rope_theta": 1000000}])
_ORIGINALS = st.sampled_from([{}, {"original_max_position_embeddings": 64}, {"original_max_position_embeddings": 96.0}])
_FACTORS = {"factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4.0}
_DICTS = st.builds(_merged, _TYPES, _THETAS, _ORIGINALS,
                   st.sampled_from([_FACTORS, _FACTORS, {}, {"partial_rotary_factor": 1.0}]))  # fmt: skip
_BESIDE = st.builds(_merged, _THETAS, _ORIGINALS,
                    st.sampled_from([{}, {"max_position_embeddings": 256}]))  # fmt: skip


@hypothesis.given(
    st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "smollm3"]), _BESIDE, _DICTS | st.none(), _DICTS | st.none()
)
@hypothesis.settings(max_examples=80, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_every_spelling_gives_the_frequencies_of_the_class(write, kind, beside, old, new):
    transformers = pytest.importorskip("transformers")
    config = {"model_type": kind, "head_dim": 16, **SIZES, **beside}
    config |= {name: one for name, one in {"rope_scaling": old, "rope_parameters": new}.items() if one is not None}
    folder = write(config)
    model = getattr(transformers, ARCHITECTURES[kind])
    rotation = getattr(inspect.getmodule(model), f"{ARCHITECTURES[kind].removesuffix('ForCausalLM')}RotaryEmbedding")
    try:
        of_class = rotation(model.config_class.from_pretrained(str(folder))).inv_freq
    except (KeyError, TypeError):  # a factor that is missing
        with pytest.raises(ConfigError, match=r"lacks one of factor|say something else"):
            read_config(folder, 32)
        return
    try:
        shape = read_config(folder, 32)
    except ConfigError as refused:
        assert re.search("say something else|lacks one of factor", str(refused)), refused
        assert old, "two dicts that contradict each other"
        assert new
        return
    torch.testing.assert_close(frequencies(16, shape.rope_theta, shape.rope_scaling), of_class, rtol=1e-6, atol=0)


def test_null_is_what_the_class_makes_of_it(write):
    small = LLAMA | {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None}
    shape = read_config(write(small))
    assert (shape.head_width, shape.key_heads, shape.rope_scaling) == (128, 32, None)


def test_head_dim_and_layers_without_rotation(write):
    smol = config_of(preset("smollm3-3b"))
    assert read_config(write({**smol, "no_rope_layers": None})).nope_every == 4
    assert read_config(write({**smol, "no_rope_layers": [1] * 36})).nope_every is None
    qwen = config_of(preset("qwen3-0.6b"))  # whose width over its heads is 64
    assert qwen.pop("head_dim") == 128
    assert read_config(write(qwen)).head_width == 128


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"architectures": ["Olmo2ForCausalLM"]}, "architectures is Olmo2ForCausalLM, .* OLMo norms after"),
        ({"architectures": ["Gemma2ForCausalLM"]}, r"Gemma's norms multiply by 1 \+ weight"),
        ({"architectures": ["GemmaForCausalLM"]}, r"Gemma's norms multiply by 1 \+ weight"),
        ({"architectures": ["OlmoForCausalLM"]}, "the norms of the first OLMo have no weights"),
        ({"architectures": ["DeepseekForCausalLM"]}, "of DeepSeek's models the second and third version are read"),
        ({"architectures": ["MixtralForCausalLM"]}, "architectures is MixtralForCausalLM, but model_type is llama"),
        ({"architectures": ["Phi3ForCausalLM"]}, "Phi rotates"),
        ({"architectures": ["XForCausalLM"]}, "architectures is XForCausalLM, which cannot be trained here$"),
        ({"architectures": None, "model_type": "bert"}, "model_type is bert"),
        ({"model_type": "qwen2"}, "architectures is LlamaForCausalLM, but model_type is qwen2"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map is .*, code in the folder, which is never run here"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*, weights in another format"),
        ({"transformers_weights": "b.safetensors"}, "transformers_weights is .*, another file of weights"),
        ({"per_layer_config": {"1": {"num_attention_heads": 8}}}, "per_layer_config is .*, layers that differ"),
        ({"is_causal": False}, "is_causal is false, which this trainer does not have: it has true"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is true, an encoder"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", which this trainer does not have'),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"attention_bias": True}, "attention_bias is true, but the other"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling is .*another kind"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "another kind"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling is .* lacks one of factor"),
        ({"rope_scaling": {"full_attention": LLAMA3}}, "rope_scaling is .*, a rotation for each kind of layer"),
        ({"rope_scaling": LLAMA3 | {"partial_rotary_factor": 0.5}}, "whose partial_rotary_factor is not 1"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "say something else"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8.5}}, "is 8.5, which must be a whole number"),
        ({"original_max_position_embeddings": 8.5}, "_embeddings is 8.5, which must be a whole number"),
        ({"rope_scaling": LLAMA3 | {"rope_theta": "1e6"}}, "whose rope_theta is not a number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": "4096"}, 'hidden_size is "4096", which is not a whole number'),
        ({"hidden_size": True}, "hidden_size is true, which is not a whole number"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": 1e400}, "num_hidden_layers is Infinity"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_key_and_value(changed, words, write):
    with pytest.raises(ConfigError, match=words) as refusal:
        read_config(write(LLAMA | changed))
    assert refusal.value.hint
    assert "\n" not in str(refusal.value)


def test_contradictory_sizes_are_refused_as_an_experiments(write):
    with pytest.raises(LayoutError, match="num_key_value_heads 5 does not divide the 32 heads"):
        read_config(write(LLAMA | {"num_key_value_heads": 5}))


def test_what_the_file_does_not_give_is_the_classs_default(write):
    mistral = as_mistral("mistral-7b", "num_key_value_heads")
    assert read_config(write({**mistral, "sliding_window": None})).key_heads == 8
    with pytest.raises(ConfigError, match="num_key_value_heads is null, which its class does not take"):
        read_config(write({**mistral, "sliding_window": None, "num_key_value_heads": None}))
    scaling = {key: LLAMA3[key] for key in LLAMA3 if key != "original_max_position_embeddings"}
    found = read_config(write(LLAMA | {"rope_scaling": scaling})).rope_scaling
    assert found is not None
    assert found.original_max_position_embeddings == LLAMA["max_position_embeddings"]


def test_gpt_2s_other_names_are_read(write):
    gpt2 = config_of(preset("gpt2"))
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
             "n_positions": "max_position_embeddings"}  # fmt: skip
    assert read_config(write({names.get(key, key): value for key, value in gpt2.items()})) == preset("gpt2")
    assert read_config(write(gpt2 | {"hidden_size": 768})) == preset("gpt2")
    with pytest.raises(ConfigError, match="hidden_size is 1024, but n_embd, which means the same, is 768"):
        read_config(write(gpt2 | {"hidden_size": 1024}))
    with pytest.raises(ConfigError, match="add_cross_attention is true"):
        read_config(write(gpt2 | {"add_cross_attention": True}))


# What published files of each family have beyond the sizes, with the values that they have there: no text of any file,
# but its keys.
_PDROPS = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
_DROPOUTS = {**_PDROPS, "summary_first_dropout": 0.1}
_SUMMARY = {"summary_activation": None, "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True}  # fmt: skip
_GPT2 = {"n_ctx": 1024, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
_WINDOWS = {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 32768}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2 | _DROPOUTS | _SUMMARY),
    "gpt2-medium": ("gpt2-medium", _GPT2 | _DROPOUTS | _SUMMARY | {"n_special": 0, "predict_special_tokens": True}),
    "gpt2-large": ("gpt2-large", _GPT2 | {"output_past": True}),
    "distilgpt2": (
        "gpt2",
        _GPT2 | _DROPOUTS | {"_num_labels": 1, "gradient_checkpointing": False, "id2label": {"0": "LABEL_0"},
                             "label2id": {"LABEL_0": 0}},
    ),
    "Llama-2": ("llama3.1-8b", {"_name_or_path": "x", "pad_token_id": 0, "max_length": 4096, "pretraining_tp": 1}),
    "Llama-3.2": ("llama3.2-1b", {"eos_token_id": [128001, 128008], "head_dim": 64, "mlp_bias": False}),
    "SmolLM2": (
        "smollm2-135m",
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    ),
    "Qwen2.5-0.5B": ("qwen2.5-0.5b", _WINDOWS | {"use_mrope": False}),
    "Qwen2.5-7B": ("qwen2.5-7b", _WINDOWS),
    "Qwen3": ("qwen3-0.6b", {**_WINDOWS, "sliding_window": None, "attention_bias": False}),
    "SmolLM3": (
        "smollm3-3b",
        {"max_window_layers": 28, "pretraining_tp": 2, "layer_types": ["full_attention"] * 36, "mlp_bias": False,
         "sliding_window": None, "attention_bias": False, "pad_token_id": 128004},
    ),
    "Mistral-7B": ("mistral-7b", {}),
    "a fine-tune": (
        "llama3.2-1b",
        {"unsloth_version": "2024.9", "unsloth_fixed": True, "quantization_config": None, "temperature": 0.6},
    ),
    "another's rotation": ("llama3.2-1b", {"rope_scaling": {**LLAMA3, "factor": 32.0, "beta_fast": 32}}),
    "another's window": ("llama3.2-1b", {"sliding_window": 16, "num_local_experts": 8}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name, write):
    known, more = PUBLISHED[name]
    config = (
        as_mistral(known) | {"sliding_window": None} if name.startswith("Mistral") else config_of(preset(known)) | more
    )
    folder, shape = write(config), replace(preset(known), pad_token=more.get("pad_token_id"))
    assert read_config(folder, shape.seq) == shape


@pytest.mark.long(but="first")
@pytest.mark.parametrize("name", ["SmolLM3", "Llama-2", "Qwen2.5-0.5B", "Qwen3", "Mistral-7B", "gpt2"])
def test_the_pad_token_is_that_of_transformers_embedding(name, write):
    transformers = pytest.importorskip("transformers")
    known = PUBLISHED[name][0]
    config = as_mistral(known) | {"sliding_window": None} if name == "Mistral-7B" else config_of(preset(known))
    del config["architectures"]
    config |= {"num_hidden_layers": 1, "n_layer": 1, "no_rope_layers": [1]}
    vocab = config["vocab_size"]
    for given in ({"pad_token_id": 9}, {"pad_token_id": 0}, {"pad_token_id": -1}, {"pad_token_id": None}, {}):
        config.pop("pad_token_id", None)
        folder = write(config | given)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        assert read_config(folder, 512).pad_token == model.get_input_embeddings().padding_idx, given
    for given in (vocab, -vocab - 1):
        write(config | {"pad_token_id": given})
        if name == "gpt2":
            assert read_config(folder, 512).pad_token is None
            continue
        with pytest.raises(
            ConfigError, match=f"pad_token_id is {given}, a row that an embedding of {vocab} rows lacks: "
        ):
            read_config(folder, 512)
    if name == "SmolLM3":
        with pytest.raises(ConfigError, match=r"lacks \(not given; its class has 128004\)"):
            read_config(write(config | {"vocab_size": 49152}), 512)


@pytest.mark.parametrize("name", ["gpt2", "llama3.2-1b", "smollm3-3b"])
def test_a_pad_token_is_written_again_as_the_folder_has_it(name, write):
    for given in (9, 0, -1, None):
        folder = write(config_of(preset(name)) | {"pad_token_id": given})
        shape, begun = read_config(folder, 512), init_config_in(folder)
        assert config_of(shape, begun=begun)["pad_token_id"] == given
        assert config_of(replace(shape, pad_token=None), begun=begun)["pad_token_id"] == given
        if shape.pad_token is not None:
            assert read_config(write(config_of(shape)), 512) == shape, "without weights of the folder"
            own = replace(shape, pad_token=11)
            assert read_config(write(config_of(own, begun=begun)), 512) == own, "the run's own goes before"


# What other programs keep in a config.json that changes gradients and no logit.
OF_THE_LOSS = {"label_smoothing": 0.1, "loss_type": "ForMaskedLM", "z_loss": 1e-4, "router_aux_loss_coef": 0.01,
               "output_router_logits": True, "freeze_layers": 2, "layerdrop": 0.1, "embd_dropout": 0.1}  # fmt: skip


def test_what_changes_training_alone_is_followed_or_refused(write):
    named = EngineFacts.unfollowed
    gpt2, llama = config_of(preset("gpt2")), config_of(preset("llama3.2-1b"))
    assert unfollowed_keys(write(gpt2), 512, named) == unfollowed_keys(write(llama), 512, named) == []
    words = "resid_pdrop is 0.1, embd_pdrop is 0.1, attn_pdrop is 0.1: not followed, as there is no dropout here"
    for given in (_DROPOUTS, {}):  # the class's
        config = {key: value for key, value in gpt2.items() if not key.endswith("pdrop")} | given
        [line] = unfollowed_keys(write(config), 512, named)
        assert line.endswith(f"config.json: {words}")
    [line] = unfollowed_keys(write(llama | {"initializer_range": 1 / 24, "pad_token_id": 3}), 512, named)
    assert "config.json: initializer_range is 0.0416667: not followed, as weights are drawn with 0.02 here" in line
    [line] = unfollowed_keys(write(llama | {"pad_token_id": 3}), 512, engine_named("megatron-lm").unfollowed)
    assert "config.json: pad_token_id is 3: not followed, as its row is trained like any other" in line
    with pytest.raises(ConfigError, match=r"attention_dropout is 0\.1, which this trainer does not have"):
        read_config(write(llama | {"attention_dropout": 0.1}))


# A small model of each class, whose weights matter, and other values for a key by the type of its own.
TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4,
        "num_key_value_heads": 2, "vocab_size": 13, "pad_token_id": None, "initializer_range": 0.3}  # fmt: skip
TINY_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 13, "bos_token_id": 1,
             "eos_token_id": 2, "initializer_range": 0.3, **dict.fromkeys(_PDROPS, 0.0)}  # fmt: skip
OTHERS = {type(None): [1, 0.5, True], bool: [False, True], int: [1, 3], float: [0.5], str: ["relu"]}


@pytest.mark.parametrize("kind", marked(ARCHITECTURES, set(ARCHITECTURES) - {"llama"}))
def test_no_other_key_of_the_class_changes_a_gradient_or_logit(kind):
    """Each key of it, and of other programs, with other values: the same logits, but another loss or gradient."""
    model_of = getattr(pytest.importorskip("transformers"), ARCHITECTURES[kind])
    tokens, weights = torch.arange(24).view(2, 12) % 5, None

    def trained(keys: dict[str, Any]) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
        model = model_of(model_of.config_class(**keys))
        model.load_state_dict(weights or model.state_dict())
        logits = model.eval()(tokens).logits.detach()
        torch.manual_seed(3)
        loss = model.train()(tokens, labels=tokens).loss
        loss.backward()
        return model, logits, [loss.detach(), *(one.grad for one in model.parameters())]

    given = (TINY_GPT2 if kind == "gpt2" else TINY) | {"tie_word_embeddings": True}
    model, logits, gradients = trained(given)
    weights, found, tried = model.state_dict(), set(), 0
    for key, value in {**dict.fromkeys(OF_THE_LOSS), **model.config.to_dict()}.items():
        for other in OTHERS.get(type(value), []):
            try:
                _, of_other, theirs = trained({**given, key: OF_THE_LOSS.get(key, other)})
            except Exception:  # another size, or none that the class takes
                continue
            tried += 1
            if torch.equal(of_other, logits) and not all(map(torch.equal, theirs, gradients)):
                found.add(key)
    followed = {"tie_word_embeddings"} if kind == "gpt2" else {"tie_word_embeddings", "pad_token_id"}
    assert found - followed == ({*_PDROPS} if kind == "gpt2" else {"attention_dropout"}), "named, refused"
    assert tried > 50


ENDS = {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": None}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_an_export_passes_on_is_that_of_the_folder(name, write):
    shape = preset(name)
    longer = {} if name == "gpt2" else {"max_position_embeddings": 9 * shape.seq}
    folder = write(config_of(shape) | ENDS | longer)
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    begun = init_config_in(folder)
    assert begun.generation == {"do_sample": True}
    config = config_of(replace(shape, seq=shape.seq // 2), begun=begun)
    assert config | ENDS | longer == config
    if name == "gpt2":
        assert config["n_positions"] == 512, "as many learned positions as were trained"
    else:
        assert config_of(replace(shape, seq=10 * shape.seq), begun=begun)["max_position_embeddings"] == 10 * shape.seq
    write({key: value for key, value in json.loads((folder / "config.json").read_text()).items() if key not in ENDS})
    defaults = pytest.importorskip("transformers").AutoConfig.from_pretrained(str(folder))
    (folder / "generation_config.json").write_text("[")
    begun = init_config_in(folder)
    assert begun.generation is None
    assert {key: begun.config[key] for key in ENDS} == {key: getattr(defaults, key) for key in ENDS}, "the class's"


PLAIN = ModelShape(32, 4, 4, 64, 16, False, head_dim=8, kv_heads=2, ffn=24, mlp="swiglu", norm="rmsnorm",
                   positions="rope", bias="none")  # fmt: skip
# Its width is not a multiple of its heads, which Llama's class refuses.
ODD = replace(PLAIN, hidden=30)
CLASSES = [
    (PLAIN, None, "Llama"), (PLAIN, "Mistral", "Mistral"), (PLAIN, "SmolLM3", "SmolLM3"), (PLAIN, "Qwen2", "Llama"),
    (ODD, None, "Mistral"), (ODD, "Mistral", "Mistral"), (ODD, "SmolLM3", "SmolLM3"), (ODD, "Llama", "Mistral"),
    (replace(ODD, bias="qkv"), None, "Qwen2"), (replace(ODD, qk_norm=True), None, "Qwen3"),
    (replace(ODD, nope_every=2), "Llama", "SmolLM3"), (replace(PLAIN, bias="all"), "Mistral", "Llama"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "begun", "written"), CLASSES)
def test_an_export_has_the_class_it_began_from_or_one_that_loads(shape, begun, written, write):
    transformers = pytest.importorskip("transformers")
    folder = write(config_of(shape, begun=InitConfig(begun and f"{begun}ForCausalLM")))
    assert read_config(folder, shape.seq) == replace(shape, head_dim=None if shape.hidden == 32 else 8)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    assert type(model).__name__ == f"{written}ForCausalLM"
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == stored_sizes(shape)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000])
def test_a_damaged_file_is_refused(text, write):
    with pytest.raises(ConfigError, match=r"config\.json: not (JSON|an object)"):
        read_config(write(text))


def test_the_experiments_own_keys_are_laid_over_the_file(write):
    shape = resolve_shape(Model(hf=str(write(LLAMA)), seq=512, layers=2))
    assert shape == replace(preset("llama3.1-8b"), seq=512, layers=2)
    with pytest.raises(ConfigError, match="both give the sizes"):
        resolve_shape(Model(hf="x", preset="gpt2"))


def test_shapes_without_a_class():
    llama = preset("llama3.2-1b")
    assert architecture_of(ModelShape(768, 12, 12)) == "GPT2LMHeadModel"
    odd = {"hidden": 2047, "bias": "all"}  # Llama's alone has biases everywhere, and refuses the width
    for changed in ({"mlp": "gelu"}, {"norm": "layernorm"}, {"qk_norm": True, "bias": "qkv"}, odd):
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
    done = in_process("render", str(tmp_path / "mine" / "run.toml"), "--cluster", "a100-80g-8", "--gpus", "8", code=0)
    assert '"kv_heads": 8' in done.stdout
    assert str(tmp_path) not in done.stdout
    write("{")
    for verb in ("plan", "render", "submit"):
        refused = in_process(verb, "--model", str(folder), "--gpus", "8", "--cluster", "a100-80g-8")
        assert (refused.code, refused.stdout) == (2, "")
        assert "config.json: not JSON" in refused.stderr
        assert "hint: " in refused.stderr
