"""Published weights of mixtures of experts: each family's class writes a folder, our model has its weights and logits,
and an export is its file again."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.weights.classes import architecture_of
from hpc_gpt.core.weights.config import config_of, init_config_in, read_config
from hpc_gpt.core.weights.folder import read_folder
from hpc_gpt.core.weights.names import CHOICE_BIAS, size_of, stored_sizes
from hpc_gpt.trainer.model.folder_tensors import write_hf
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.initial_weights import FolderWeights
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel, full_name, split_of

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

_LIKE_LLAMA: dict[str, Any] = {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rope", "bias": "none", "tied": False}
_SIZES = {"layers": 2, "heads": 4, "vocab": 61, "seq": 24, "kv_heads": 2, "experts": 8, "experts_per_token": 3}
_PLAIN = ModelShape(32, expert_ffn=24, **_SIZES, **_LIKE_LLAMA)
_SIGMOID = replace(
    _PLAIN, router="sigmoid", router_bias=True, shared_ffn=48, dense_layers=1, ffn=40, qk_norm=True, norm_topk=True,
    router_scale=2.5, layers=3,
)  # fmt: skip
FAMILIES = {
    "Qwen3Moe": replace(_PLAIN, qk_norm=True, norm_topk=True, head_dim=16, tied=True),
    "Qwen3Moe prefix": replace(_PLAIN, qk_norm=True, dense_layers=1, ffn=40),
    "Mixtral": replace(_PLAIN, norm_topk=True),
    "Olmoe": replace(_PLAIN, qk_norm="width", pad_token=1),
    "Qwen2Moe": replace(_PLAIN, bias="qkv", shared_ffn=40, shared_gate=True),
    "Dots1": replace(_SIGMOID, expert_groups=4, groups_per_token=2),
    "Glm4Moe": replace(_SIGMOID, bias="qkv", rotated=0.5, head_dim=16),
}


def made_by_its_class(shape: ModelShape, folder: Path, **how: Any) -> Any:
    """A model of the family's class with weights that matter, saved by its own method."""
    config = config_of(shape)
    kind = getattr(transformers, config.pop("architectures")[0])
    config.pop("model_type")
    generator = torch.Generator().manual_seed(7)
    model = kind(kind.config_class(**config)).eval()
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                drawn = 0.2 * torch.randn(weight.shape, generator=generator)
                weight.copy_(drawn + float("norm" in name))
    model.save_pretrained(folder, **how)
    return model


@cache
def tokens_of(shape: ModelShape) -> Tensor:
    return torch.randint(0, shape.vocab, (2, shape.seq), generator=torch.Generator().manual_seed(3))


def given_model(shape: ModelShape, folder: Path, rank: int = 0, size: int = 1) -> Gpt:
    given = FolderWeights(read_folder(folder), shape)
    model = Gpt(shape, 1, TensorParallel(rank, size, given=given))
    assert given.taken == {*shape.parameter_names, *shape.buffer_names}
    return model


def state(model: Gpt) -> dict[str, Tensor]:
    """The whole weights by our names, without the vocabulary's padding."""
    vocab = model.shape.vocab
    weights = {full_name(one): one.detach() for one in model.parameters()}
    weights |= {name: one for name, one in model.named_buffers() if name in model.shape.buffer_names}
    return {name: one[:vocab] if name in ("embedding.weight", "head.weight") else one for name, one in weights.items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_come_in_and_go_out_bit_for_bit(name: str, tmp_path: Path) -> None:
    shape, stored = FAMILIES[name], tmp_path / "stored"
    assert architecture_of(shape) == f"{name.split()[0]}ForCausalLM"
    theirs = made_by_its_class(shape, stored)
    assert read_config(stored, shape.seq) == shape
    model = given_model(shape, stored)
    with torch.no_grad():
        expected = theirs(tokens_of(shape)).logits
        logits = model.logits(tokens_of(shape))[..., : shape.vocab]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    out = tmp_path / "out"
    write_hf(shape, state(model).items(), out, piece_bytes=50_000, begun=init_config_in(stored))
    written = {key: one for file in out.glob("*.safetensors") for key, one in load_file(file).items()}
    same(written, load_file(stored / "model.safetensors"))
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert type(loaded) is type(theirs)
    same(loaded.state_dict(), theirs.state_dict())
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens_of(shape)).logits, expected)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "Glm4Moe"])
def test_one_tensor_of_all_experts_is_read_alike(name: str, tmp_path: Path) -> None:
    shape = FAMILIES[name]
    made_by_its_class(shape, tmp_path / "each")
    made_by_its_class(shape, tmp_path / "all", save_original_format=False)
    folder = read_folder(tmp_path / "all")
    assert folder.is_fused
    assert not read_folder(tmp_path / "each").is_fused
    assert {name: one.size for name, one in folder.weights.items()} == stored_sizes(shape, fused=True)
    same(state(given_model(shape, tmp_path / "all")), state(given_model(shape, tmp_path / "each")))


@pytest.mark.parametrize(("name", "form"), [("Glm4Moe", {}), ("Qwen2Moe", {"save_original_format": False})])
def test_a_rank_reads_its_share_of_every_expert(name: str, form: dict[str, Any], tmp_path: Path) -> None:
    shape = FAMILIES[name]
    made_by_its_class(shape, tmp_path / "out", **form)
    whole = given_model(shape, tmp_path / "out")
    for rank in range(2):
        share = given_model(shape, tmp_path / "out", rank, 2)
        for parameter, full in zip(share.parameters(), whole.parameters(), strict=True):
            split = split_of(parameter)
            assert torch.equal(parameter, full if split is None else split.shard(full, rank, 2)), full_name(parameter)


def test_any_part_of_experts_can_be_read(tmp_path: Path) -> None:
    shape = FAMILIES["Mixtral"]
    for form in ({}, {"save_original_format": False}):
        made_by_its_class(shape, folder := tmp_path / f"{len(form)}", **form)
        given = FolderWeights(read_folder(folder), shape)
        for name, whole in state(given_model(shape, folder)).items():
            if "experts" in name:
                assert whole.shape == size_of(shape, name)
                rows = whole.flatten(0, 1)
                for begin, end, column in ((0, 1, 0), (5, 77, 3), (47, 49, 1), (len(rows) - 30, len(rows), 2)):
                    target = torch.empty(end - begin, 20)
                    given.read(name, target, begin, column)
                    assert torch.equal(target, rows[begin:end, column : column + 20]), (name, begin)


def test_the_bias_of_the_choice_stays_fp32_in_bf16(tmp_path: Path) -> None:
    shape = FAMILIES["Dots1"]
    made_by_its_class(shape, tmp_path / "in")
    model = given_model(shape, tmp_path / "in")
    write_hf(shape, state(model).items(), tmp_path / "out", dtype="bf16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    wanted = load_file(tmp_path / "in" / "model.safetensors")
    biases = [key for key in written if key.endswith(CHOICE_BIAS)]
    assert len(biases) == 2
    for key, weight in written.items():
        assert torch.equal(weight, wanted[key] if key in biases else wanted[key].bfloat16()), key
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.state_dict()[biases[0]].dtype == torch.float32
    same(dict(model.named_buffers()), dict(given_model(shape, tmp_path / "out").named_buffers()))


BAD: dict[str, tuple[str, Tensor | None, str]] = {
    "an expert lacks": ("experts.5.gate_proj.weight", None, " is not there"),
    "an expert is wider": ("experts.7.down_proj.weight", torch.ones(32, 25), r" is \[32, 25\] there, \[32, 24\] here"),
    "one more expert": ("experts.8.up_proj.weight", torch.ones(24, 32), " is not a weight of this model"),
    "NaN in the router": ("gate.weight", torch.full((8, 32), torch.nan), " has NaN or infinity"),
    "an infinite bias": ("gate.e_score_correction_bias", torch.full((8,), torch.inf), " has NaN or infinity"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_line_names_the_tensor_of_experts_that_is_wrong(case: str, tmp_path: Path) -> None:
    shape, (name, weight, words) = FAMILIES["Dots1"], BAD[case]
    made_by_its_class(shape, tmp_path)
    full = f"model.layers.2.mlp.{name}"
    weights = {key: one for key, one in load_file(tmp_path / "model.safetensors").items() if key != full}
    weights |= {} if weight is None else {full: weight}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=re.escape(full) + words):
        given_model(shape, tmp_path)


def test_another_router_of_the_same_sizes_is_another_model(tmp_path: Path) -> None:
    shape = FAMILIES["Dots1"]
    made_by_its_class(shape, tmp_path)
    with pytest.raises(ConfigError, match=r"router_scale is 2\.5 there, 1\.0 here"):
        given_model(replace(shape, router_scale=1.0), tmp_path)


def test_layers_for_later_tokens_are_left_out(tmp_path: Path) -> None:
    shape = FAMILIES["Glm4Moe"]
    made_by_its_class(shape, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    later = {f"model.layers.3.{name}.weight": torch.ones(3) for name in ("eh_proj", "shared_head.norm")}
    save_file(weights | later, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.eh_proj\.weight is not a weight of this model"):
        given_model(shape, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    same(state(given_model(shape, tmp_path)), state(given_model(shape, tmp_path)))


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b"])
def test_weights_of_other_experts_are_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    kind = {"deepseek-v3": "deepseek_v3", "gpt-oss-20b": "gpt_oss"}[name]
    assert architecture_of(preset(name)) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"cannot be trained here: (keys and values of low rank|sinks)"):
        read_folder(tmp_path)


def test_a_large_mixture_has_a_name_for_each_matrix_of_experts() -> None:
    shape = preset("qwen3-235b-a22b")
    sizes = stored_sizes(shape)
    assert sum(".experts." in name for name in sizes) == 36_096
    assert sum(rows[0] * (rows[1] if len(rows) > 1 else 1) for rows in sizes.values()) == shape.params
    assert len(stored_sizes(shape, fused=True)) == len(sizes) - 36_096 + 2 * 94
