"""Folders of weights: what is damaged, missing or of another model is refused by its headers alone."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.model_keys import RopeScaling
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.config import config_of
from hpc_gpt.core.weights.folder import FREE, check_weights, read_folder
from hpc_gpt.core.weights.names import stored_sizes
from tests.cli.command import error_of, in_process

LLAMA = ModelShape(
    32, 2, 4, vocab=61, seq=16, kv_heads=2, ffn=40, mlp="swiglu", norm="rmsnorm", positions="rope", bias="none"
)
GPT2 = ModelShape(32, 2, 4, vocab=61, seq=16)


def write_file(path: Path, sizes: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> None:
    """A safetensors file of zeros, written by the format's description."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in sizes.items():
        header[name] = {"dtype": dtype, "shape": list(size), "data_offsets": [at, at + 4 * math.prod(size)]}
        at += 4 * math.prod(size)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def write_folder(folder: Path, shape: ModelShape, **changed: tuple[int, ...]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape)))
    write_file(folder / "model.safetensors", stored_sizes(shape) | changed)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "weights", LLAMA)


def refusal(folder: Path, shape: ModelShape = LLAMA) -> str:
    with pytest.raises(ConfigError) as refused:
        check_weights(read_folder(folder), shape)
    assert refused.value.hint
    return f"{refused.value}\n{refused.value.hint}".replace(str(folder), "FOLDER")


def test_the_advice_is_not_what_was_already_done(folder: Path) -> None:
    more_rows = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (64, 32))
    write_file(folder / "model.safetensors", stored_sizes(LLAMA) | more_rows)
    assert "change vocab_size to 64 there" in refusal(folder)
    write_file(folder / "model.safetensors", stored_sizes(LLAMA) | {"model.norm.weight": (40,)})
    assert "change the size that these lines show there" in refusal(folder)
    index = {"weight_map": dict.fromkeys(stored_sizes(LLAMA), "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "move FOLDER/model.safetensors away" in refusal(folder)
    (folder / "model.safetensors").write_bytes(b"x")
    assert "move FOLDER/model.safetensors away" in refusal(folder)
    assert "set model.hf" in refusal(write_folder(folder, LLAMA), replace(LLAMA, vocab=64))


def test_a_folder_of_the_shape_is_taken(folder: Path, tmp_path: Path) -> None:
    check_weights(read_folder(folder), LLAMA)
    check_weights(read_folder(folder), replace(LLAMA, seq=2048))  # a rotation has no length
    check_weights(read_folder(write_folder(tmp_path / "gpt2", GPT2)), GPT2)


def test_older_files_lack_the_class_prefix_and_hold_buffers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "gpt2", GPT2)
    sizes = {name.removeprefix("transformer."): size for name, size in stored_sizes(GPT2).items()}
    write_file(folder / "model.safetensors", sizes | {"h.0.attn.bias": (1, 1, 16, 16)})
    found = read_folder(folder)
    check_weights(found, GPT2)
    assert found.stored["transformer.h.0.attn.c_attn.bias"] == "h.0.attn.c_attn.bias"


def test_what_differs_is_counted_and_five_are_named(folder: Path) -> None:
    wider = {name: (40, *size[1:]) for name, size in stored_sizes(LLAMA).items() if "layernorm" in name}
    sizes = stored_sizes(LLAMA) | wider | {"model.layers.9.more": (3,)}
    del sizes["model.norm.weight"]
    write_file(folder / "model.safetensors", sizes)
    lines = refusal(folder).splitlines()
    assert lines[0] == "FOLDER has the weights of another model, with 6 differences:"
    assert lines[1:3] == ["model.norm.weight is not there",
                          "model.layers.0.input_layernorm.weight is [40] there, [32] here"]  # fmt: skip
    assert (len(lines), lines[-2]) == (8, "and 1 more")


def test_sizes_that_agree_do_not_hide_another_model(folder: Path) -> None:
    assert "rope_theta is 10000.0 there, 500000.0 here" in refusal(folder, replace(LLAMA, rope_theta=5e5))
    assert "norm_eps is 1e-05 there, 1e-06 here" in refusal(folder, replace(LLAMA, norm_eps=1e-6))
    assert "vocab is 61 there, 64 here" in refusal(folder, replace(LLAMA, vocab=64))


MIXTURE = replace(LLAMA, experts=8, experts_per_token=2, expert_ffn=24, dense_layers=1, qk_norm=True)
# {field of a shape: (the run's shape, the value there)} with which the folder differs in this field alone.
OTHER_VALUES: dict[str, tuple[ModelShape, Any]] = {
    **{name: (LLAMA, value) for name, value in {
        "hidden": 64, "layers": 3, "heads": 8, "vocab": 64, "seq": 32, "tied": False, "vocab_multiple": 8,
        "kv_heads": 4, "head_dim": 16, "ffn": 48, "mlp": "gelu", "norm": "layernorm", "positions": "learned",
        "bias": "qkv", "embedding_norm": True, "norm_eps": 1e-6, "rope_theta": 5e5,
        "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8), "qk_norm": True, "nope_every": 2, "pad_token": 7,
        "rotated": 0.5, "q_lora": 8, "kv_lora": 8, "qk_rope": 8, "v_head": 8, "window": 8, "sinks": True,
        "mtp_layers": 1}.items()},
    **{name: (MIXTURE, value) for name, value in {
        "experts": 4, "experts_per_token": 3, "expert_ffn": 16, "shared_ffn": 24, "shared_gate": True,
        "dense_layers": 0, "router": "sigmoid", "router_bias": True, "expert_groups": 2, "groups_per_token": 1,
        "norm_topk": True, "router_scale": 2.5, "router_dtype": "fp32"}.items()},
    "window_layers": (replace(LLAMA, window=8), "SL"),
}  # fmt: skip


@pytest.mark.parametrize("name", [entry.name for entry in fields(ModelShape)])
def test_each_field_is_compared_or_free_for_a_reason(name: str, folder: Path, monkeypatch) -> None:
    ours, value = OTHER_VALUES[name]
    theirs = replace(ours, **{name: value})
    assert theirs != ours
    monkeypatch.setattr("hpc_gpt.core.weights.folder.read_config", lambda path, seq: theirs)
    monkeypatch.setattr("hpc_gpt.core.weights.folder.stored_sizes", lambda shape, fused: {})
    empty = replace(read_folder(folder), weights={})
    if name in FREE:
        check_weights(empty, ours)
        return
    with pytest.raises(ConfigError, match=rf"(?m)^{name} is .* there, .* here") as refused:
        check_weights(empty, ours)
    assert "with 1 difference:" in str(refused.value) or name in ("heads", "hidden"), "the width of a head follows"


def test_a_window_that_the_run_lacks_is_refused(tmp_path: Path) -> None:
    mistral = replace(LLAMA, seq=64, window=16)
    folder = write_folder(tmp_path / "mistral", mistral)
    assert "window is 16 there, none here" in refusal(folder, replace(mistral, window=None))
    check_weights(read_folder(folder), mistral)
    # One of the sequence is none, on either side.
    check_weights(read_folder(folder), replace(mistral, seq=16, window=999))
    assert replace(mistral, window=64, window_layers="SL") == replace(mistral, window=None)


def test_a_tied_file_may_have_the_head_only_as_the_embedding(folder: Path) -> None:
    write_file(folder / "model.safetensors", stored_sizes(LLAMA) | {"lm_head.weight": (61, 32)})
    check_weights(read_folder(folder), LLAMA)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # the head is last
    file.write_bytes(content)
    assert "lm_head.weight is not the embedding" in refusal(folder)


def test_a_damaged_file_is_refused_before_anything_is_read(folder: Path) -> None:
    file = folder / "model.safetensors"
    sound = file.read_bytes()
    for content, words in {
        sound[:-1]: "cut off or damaged",
        sound[:5]: "is damaged",
        b"\xff" * 8 + sound[8:]: "is damaged",
        sound[:8] + b"x" * 40 + sound[48:]: "is not the JSON",
    }.items():
        file.write_bytes(content)
        assert words in refusal(folder)
    write_file(file, stored_sizes(LLAMA), dtype="I32")
    assert "has type I32" in refusal(folder)


def test_pickles_and_missing_files_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin, a pickle" in refusal(folder)
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names model-00002-of-00002.safetensors, which is not there" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a"}}')
    assert "not an index" in refusal(folder)
    (folder / "adapter_config.json").write_text("{}")
    assert "has adapter_config.json: transformers adds" in refusal(folder)
    with pytest.raises(ConfigError, match="no such folder here"):
        read_folder(folder / "nowhere")


def test_a_folder_of_another_format_is_refused_with_its_content(tmp_path: Path) -> None:
    for name in ("consolidated.00.pth", "params.json"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"has no config\.json, but consolidated\.00\.pth, params\.json$") as refused:
        read_folder(tmp_path)
    assert "convert_llama_weights_to_hf.py" in refused.value.hint


def test_a_single_file_goes_before_an_index_as_in_transformers(folder: Path) -> None:
    weight_map = dict.fromkeys(stored_sizes(LLAMA), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = read_folder(folder)  # whose index names a file that is not there
    assert {weight.file.name for weight in found.weights.values()} == {"model.safetensors"}
    assert found.identity["index"] is None


def test_a_shorter_sequence_takes_the_first_learned_positions(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "gpt2", GPT2)
    check_weights(read_folder(folder), replace(GPT2, seq=8))
    with pytest.raises(ConfigError, match=r"has 16 learned positions, but model\.seq is 32") as refused:
        check_weights(read_folder(folder), replace(GPT2, seq=32))
    assert refused.value.hint.startswith("use --seq 16 or less")
    assert "transformer.wpe.weight is [16, 40] there, [16, 32] here" in refusal(
        write_folder(tmp_path / "wider", GPT2, **{"transformer.wpe.weight": (16, 40)}), GPT2
    )


def test_a_folder_that_is_none_is_said_so_before_its_config(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for name, words in {"nowhere": "there is no such folder here", "mine.toml": "that is a file"}.items():
        file.write_text(f'[train]\ninit = "{name}"\n')
        with pytest.raises(ConfigError, match=f"train.init is .*/{name}, but {words}") as refused:
            load_experiment(str(file))
        assert "nothing is downloaded" in refused.value.hint
        done = in_process("submit", "--set", f"train.init={name}", "--cluster", "local", cwd=tmp_path)
        assert words in error_of(done)[0]
