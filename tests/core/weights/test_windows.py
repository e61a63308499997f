"""Which layers of each class have the window: read from its file, written, and as the class itself has it."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.model import resolve_shape
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.rules.engine import export_notes
from hpc_gpt.core.settings.rules.shape import shape_faults
from hpc_gpt.core.weights.classes import architectures_of
from hpc_gpt.core.weights.config import config_of, init_config_in, read_config
from hpc_gpt.core.weights.config_keys import ARCHITECTURES, MIXTURES, NEVER_NULL

SEQ, LAYERS = 40, 6
COMMON = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
          "vocab_size": 64, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": None,
          "head_dim": 8}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SIGMOID = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
            "first_k_dense_replace": 1}  # fmt: skip
OF_CLASS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS | {"num_key_value_heads": 4},
    "dots1": _SIGMOID,
    "glm4_moe": _SIGMOID,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
_S, _F = "sliding_attention", "full_attention"
_SIXTEEN = {"sliding_window": 16}
_USED = _SIXTEEN | {"use_sliding_window": True}
_TYPES = {"layer_types": [_S, _F, _F, _S, _S, _F]}
# (model type, keys of its file, the letters of its layers with the window of 16)
ROWS: list[tuple[str, dict[str, Any], str]] = [
    *(("mistral", keys, letters) for keys, letters in (({}, "LLLLLL"), (_SIXTEEN, "SSSSSS"),
        ({"sliding_window": None}, "LLLLLL"), (_SIXTEEN | _TYPES, "SSSSSS"))),
    *(("mixtral", keys, letters) for keys, letters in (({}, "LLLLLL"), (_SIXTEEN, "SSSSSS"),
        (_SIXTEEN | {"use_sliding_window": False}, "SSSSSS"))),
    *((kind, keys, letters) for kind in ("qwen2", "qwen3") for keys, letters in (({}, "LLLLLL"), (_SIXTEEN, "LLLLLL"),
        (_USED, "LLLLLL"), (_USED | {"max_window_layers": 4}, "LLLLSS"),
        (_USED | _TYPES | {"max_window_layers": 0}, "SLLSSL"), (_USED | {"sliding_window": None}, "LLLLLL"))),
    *(("qwen2_moe", keys, letters) for keys, letters in (({}, "LLLLLL"), (_SIXTEEN, "LLLLLL"), (_USED, "SLSLSL"),
        (_USED | {"max_window_layers": 3}, "SLSLLL"), (_USED | _TYPES, "SLLSSL"))),
    *(("qwen3_moe", keys, letters) for keys, letters in (({}, "LLLLLL"), (_SIXTEEN, "LLLLLL"), (_USED, "SSSSSS"),
        (_USED | _TYPES | {"max_window_layers": 9}, "SSSSSS"))),
    *(("dots1", keys, letters) for keys, letters in (({}, "LLLLLL"), (_SIXTEEN, "LLLLLL"),
        (_SIXTEEN | {"max_window_layers": 2}, "LLSSSS"), (_SIXTEEN | _TYPES, "SLLSSL"))),
    *(("smollm3", keys, letters) for keys, letters in (({}, "LLLLLL"), (_SIXTEEN, "LLLLLL"), (_USED, "LLLSLL"),
        (_USED | {"no_rope_layers": [1] * 6}, "LLLLLL"), (_USED | _TYPES, "SLLSSL"))),
    *((kind, _USED | _TYPES, "LLLLLL") for kind in ("llama", "olmoe", "glm4_moe")),
    *(("gpt_oss", keys, letters) for keys, letters in ((_SIXTEEN, "SLSLSL"), (_SIXTEEN | _TYPES, "SLLSSL"))),
]  # fmt: skip
IDS = [f"{kind}-{'-'.join(keys)}-{letters}" for kind, keys, letters in ROWS]


def write(folder: Path, kind: str, keys: dict[str, Any]) -> Path:
    config = COMMON | OF_CLASS.get(kind, {}) | keys | {"model_type": kind}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def letters_of(shape: ModelShape) -> str:
    return "".join("S" if shape.window_of(layer) else "L" for layer in range(shape.layers))


@pytest.mark.parametrize(("kind", "keys", "letters"), ROWS, ids=IDS)
def test_a_file_has_the_windows_that_its_class_reads(kind, keys, letters, tmp_path: Path) -> None:
    shape = read_config(write(tmp_path, kind, keys), SEQ)
    assert letters_of(shape) == letters
    assert (shape.window, shape.windowed) == (16 if "S" in letters else None, letters.count("S"))
    assert read_config(tmp_path, 16).windowed == 0, "a window of the sequence is none"
    if kind != "gpt_oss":
        (tmp_path / "config.json").write_text(json.dumps(config_of(shape)))
        assert read_config(tmp_path, SEQ) == shape


@pytest.mark.long
@pytest.mark.parametrize(("kind", "keys", "letters"), [row for row in ROWS if row[0] != "gpt_oss"])
def test_transformers_class_attends_in_the_same_layers(kind, keys, letters, tmp_path: Path) -> None:
    """With the keys of the file, and with those that `export` writes for its shape."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = write(tmp_path, kind, keys)
    for _ in range(2):
        shape = read_config(folder, SEQ)
        config = json.loads((folder / "config.json").read_text())
        of_class = transformers.CONFIG_MAPPING[config["model_type"]]  # (AutoConfig takes some of Mistral's for others)
        model = transformers.AutoModelForCausalLM.from_config(of_class(**config), attn_implementation="eager")
        seen = model(torch.arange(SEQ)[None] % 64, output_attentions=True).attentions
        assert [int((layer[0, 0, -1] > 0).sum()) for layer in seen] == [16 if one == "S" else SEQ for one in letters]
        (folder / "config.json").write_text(json.dumps(config_of(shape)))


@pytest.mark.parametrize(
    ("kind", "keys", "words"),
    [
        ("qwen2", _SIXTEEN | _TYPES, "layer_types is .*, but its class has no window here"),
        ("qwen3", _USED | _TYPES | {"sliding_window": None}, "layer_types is .*, but its class has no window"),
        (
            "qwen2_moe",
            _SIXTEEN | _TYPES,
            "layer_types is .*, but use_sliding_window is false: its class fails",
        ),
        ("qwen2_moe", _USED | _TYPES | {"sliding_window": None}, "sliding_window is null, but use_sliding_window"),
        ("qwen2_moe", _USED | {"sliding_window": None}, "sliding_window is null, but use_sliding_window is true"),
        ("dots1", _TYPES | {"sliding_window": None}, "layer_types is"),
        ("dots1", _SIXTEEN | {"max_window_layers": None}, "max_window_layers is null"),
        ("smollm3", _SIXTEEN | _TYPES, "layer_types is .*, but use_sliding_window is false: its class has the window"),
        (
            "smollm3",
            _TYPES | {"sliding_window": None},
            "layer_types is .*, but its class has no window here, and fails",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0, but a token attends to itself"),
        ("qwen3", _USED | {"layer_types": [_S]}, "layer_types is .*, but num_hidden_layers is 6"),
    ],
)
def test_a_file_whose_windows_no_model_here_has_is_refused(kind, keys, words, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(write(tmp_path, kind, keys), SEQ)


def test_windows_with_the_switch_off_are_as_is_said(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")

    def seen(kind: str, **how: Any) -> list[int]:
        config = json.loads((write(tmp_path, kind, _SIXTEEN | _TYPES) / "config.json").read_text())
        config = transformers.CONFIG_MAPPING[kind](**config)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        layers = model(torch.arange(SEQ)[None] % 64, output_attentions=True, **how).attentions
        windows = [layer.self_attn.sliding_window for layer in model.model.layers]
        assert kind != "smollm3" or windows == [None] * LAYERS, "what flash attention gets"
        return [int((layer[0, 0, -1] > 0).sum()) for layer in layers]

    assert seen("smollm3") == [16, SEQ, SEQ, 16, 16, SEQ]
    with pytest.raises(RuntimeError, match="must match the size"):
        seen("qwen2_moe")
    with pytest.raises(TypeError):
        seen("qwen2")


@pytest.mark.parametrize("kind", ARCHITECTURES | MIXTURES)
def test_null_is_refused_where_its_class_refuses_it(kind, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    of_class = transformers.CONFIG_MAPPING[kind]
    for key, kinds in NEVER_NULL.items():
        others = {"num_experts_per_tok": 2} if kind.startswith("deepseek") else {}
        config = json.loads((write(tmp_path, kind, {key: None} | others) / "config.json").read_text())
        if kind == "gpt2":
            config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, key: None}
            (tmp_path / "config.json").write_text(json.dumps(config))
        if key != "auto_map":  # which AutoConfig looks through
            try:
                of_class(**config)
            except Exception:
                assert kind in kinds, key
            else:
                assert kind not in kinds, key
        if kind in kinds:
            with pytest.raises(ConfigError, match=f"{key} is null, which its class does not take"):
                read_config(tmp_path, SEQ)
        else:
            read_config(tmp_path, SEQ)


def test_a_window_beyond_the_trained_length_stays(tmp_path: Path) -> None:
    shape = read_config(write(tmp_path, "mistral", {}), SEQ)
    for given, window in (({"sliding_window": 4096}, 4096), ({}, 4096), ({"sliding_window": None}, None)):
        begun = init_config_in(write(tmp_path, "mistral", given | {"architectures": ["MistralForCausalLM"]}))
        assert config_of(shape, begun=begun)["sliding_window"] == window
        # One that is trained is the shape's own.
        assert config_of(replace(shape, window=8), begun=begun)["sliding_window"] == 8
        # Version 0.4.0 trained without a window that [model] lacked.
        begun = init_config_in(write(tmp_path, "mistral", _SIXTEEN | {"architectures": ["MistralForCausalLM"]}))
        assert config_of(shape, begun=begun)["sliding_window"] is None
    slides = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3}
    begun = init_config_in(write(tmp_path, "qwen2", slides))
    config = config_of(read_config(tmp_path, SEQ), begun=begun)
    assert config | slides == config


LLAMA = replace(preset("llama3.1-8b"), window=128)
NOTED = "no class of transformers has this shape, so export will refuse it"


@pytest.mark.parametrize(
    ("shape", "classes", "note"),
    [
        (LLAMA, ("MistralForCausalLM", "SmolLM3ForCausalLM"), ""),
        (replace(LLAMA, window_layers="SSSL"), ("SmolLM3ForCausalLM",), ""),
        (
            replace(LLAMA, bias="all"),
            (),
            "LlamaForCausalLM is the nearest, with no model.window",
        ),
        (replace(preset("gpt2"), window=128), (), "GPT2LMHeadModel is the nearest, with no model.window"),
        (
            replace(preset("gpt2"), window=128, window_layers="SL"),
            (),
            "GPT2LMHeadModel is the nearest, with no model.window_layers, no model.window",
        ),
        (replace(LLAMA, bias="all", window=8192), ("LlamaForCausalLM",), ""),
        (replace(LLAMA, window=None, qk_norm="width"), (), "LlamaForCausalLM is the nearest, with model.qk_norm=false"),
        (replace(preset("qwen3-8b"), bias="qkv"), (), "Qwen2ForCausalLM is the nearest, with model.qk_norm=false"),
        (replace(LLAMA, window=None, nope_every=4, bias="qkv"), (), "SmolLM3ForCausalLM is the nearest, with model.b"),
        (replace(LLAMA, window=None, embedding_norm=True), (), ""),
        (replace(preset("mixtral-8x7b"), window=128), ("MixtralForCausalLM",), ""),
        (
            replace(preset("mixtral-8x7b"), window=128, window_layers="SL"),
            (),
            "MixtralForCausalLM is the nearest, with no model.window_layers",
        ),
        (replace(preset("qwen3-8b"), window=128, window_layers="LLS"), ("Qwen3ForCausalLM",), ""),
    ],
)
def test_a_pattern_that_no_class_has_is_noted(shape, classes, note) -> None:
    assert architectures_of(shape) == classes
    noted = export_notes("ddp", shape)
    assert bool(noted) == (not classes)
    assert "".join(noted).startswith(note and f"{NOTED}: {note}")
    assert not noted or noted[0].startswith(NOTED)


def test_export_is_noted_whenever_no_class_has_the_shape() -> None:
    kinds: dict[str, tuple[Any, ...]] = {
        "mlp": ("gelu", "swiglu"), "norm": ("layernorm", "rmsnorm"), "positions": ("learned", "rope"),
        "bias": ("all", "qkv", "none"), "qk_norm": (False, True, "width"), "nope_every": (None, 4),
        "kv_heads": (None, 2), "window": (None, 16, 64),
    }  # fmt: skip
    for values in itertools.product(*kinds.values()):
        shape = ModelShape(64, 2, 4, seq=64, **dict(zip(kinds, values, strict=True)))
        if not shape_faults(shape):
            assert (export_notes("ddp", shape) == ()) is (architectures_of(shape) != ()), values


def test_letters_for_all_layers_are_those_in_turn() -> None:
    sizes = {"hidden": 64, "layers": 8, "heads": 4, "window": 16}
    for letters, kept in (("SSSLSSSL", "SSSL"), ("SSSL", "SSSL"), ("SSS", None), ("LSSSSSSS", "LSSSSSSS")):
        shape = resolve_shape(Model(**sizes, window_layers=letters))
        assert shape.window_layers == kept
        assert letters_of(shape) == (letters * 8)[:8]
        assert [kind.count for kind in shape.kinds] == [
            count for one in "SL" if (count := letters_of(shape).count(one))
        ]
        assert [shape.kind_of(layer).window for layer in range(8)] == [shape.window_of(layer) for layer in range(8)]
        by_stage = [shape.kind_counts(first, 3) for first in (0, 3)]
        assert by_stage == [tuple(letters_of(shape)[first : first + 3].count(one) for one in "SL"[: len(shape.kinds)])
                            for first in (0, 3)]  # fmt: skip
    for letters in ("SSSSSSSSL", "LL", "sl", ""):
        with pytest.raises(ValueError, match=r"model\.window_layers is"):
            resolve_shape(Model(**sizes, window_layers=letters))
