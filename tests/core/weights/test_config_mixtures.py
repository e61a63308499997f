"""Mixtures of experts: published config.json files give the presets, and any file of their families the parameters that
transformers' class counts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from hpc_gpt.core.engines.base.facts import EngineFacts
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.settings.model_keys import RopeScaling
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.weights.classes import architecture_of, architectures_of
from hpc_gpt.core.weights.config import InitConfig, config_of, read_config, unfollowed_keys
from hpc_gpt.core.weights.config_keys import MIXTURES, PLAN_ONLY
from hpc_gpt.core.weights.names import stored_sizes

# Keys of the published files that sizes depend on, or that read_config must not refuse.
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "norm_topk_prob": True,
    "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936, "output_router_logits": False,
}  # fmt: skip
_MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "num_experts_per_tok": 2, "num_key_value_heads": 8, "num_local_experts": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_jitter_noise": 0.0, "sliding_window": None, "vocab_size": 32000,
    "tie_word_embeddings": False, "max_position_embeddings": 32768, "pad_token_id": None,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8"}, "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0},
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "v_head_dim": 128, "tie_word_embeddings": False, "ep_size": 1,
}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "num_experts_per_tok": 4, "head_dim": 64,
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
    "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-5, "sliding_window": 128, "vocab_size": 201088,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "rope_theta": 150000, "swiglu_limit": 7.0, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN2: dict[str, Any] = {
    "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
    "num_hidden_layers": 2, "vocab_size": 151936,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _QWEN3 | {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_hidden_layers": 48},
    "qwen3-235b-a22b": _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_attention_heads": 64,
        "num_hidden_layers": 94},
    "mixtral-8x7b": _MIXTRAL | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "mixtral-8x22b": _MIXTRAL | {
        "hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48, "num_hidden_layers": 56},
    "olmoe-1b-7b": {
        "model_type": "olmoe", "attention_bias": False, "clip_qkv": None, "hidden_size": 2048,
        "intermediate_size": 1024, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 50304, "pad_token_id": 1},
    "glm-4.5": {
        "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 3, "head_dim": 128,
        "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 1,
        "n_routed_experts": 160, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": True,
        "vocab_size": 151552, "max_position_embeddings": 131072, "pad_token_id": 151329},
    "deepseek-v3": _DEEPSEEK | {
        "model_type": "deepseek_v3", "first_k_dense_replace": 3, "n_group": 8, "n_routed_experts": 256,
        "num_attention_heads": 128, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "rope_theta": 10000,
        "routed_scaling_factor": 2.5, "topk_group": 4, "vocab_size": 129280, "max_position_embeddings": 163840},
    "kimi-k2": _DEEPSEEK | {
        "model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "n_routed_experts": 384,
        "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840, "pad_token_id": 163839},
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32, "pad_token_id": 199999},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128, "pad_token_id": 199999},
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(config: dict[str, Any]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def counted(config: dict[str, Any], kind: str) -> int:
    """The parameters of transformers' class."""
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, MIXTURES[kind])
    keys = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    with torch.device("meta"):
        return sum(part.numel() for part in model(model.config_class(**keys)).parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_the_preset(name, write):
    shape = preset(name)
    assert replace(read_config(write(PUBLISHED[name]), shape.seq), pad_token=None) == shape


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_counts_as_many_parameters(name):
    kind = PUBLISHED[name]["model_type"].replace("kimi_k2", "deepseek_v3")
    assert counted(PUBLISHED[name], kind) == preset(name).params


SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
         "vocab_size": 64, "intermediate_size": 48, "pad_token_id": None, "sliding_window": None,
         "num_experts_per_tok": 2, "max_position_embeddings": 64}  # fmt: skip
_SOME = {
    "moe_intermediate_size": st.sampled_from([8, 24]),
    "n_routed_experts": st.sampled_from([4, 6]),
    "num_experts": st.sampled_from([4, 6]),
    "num_local_experts": st.sampled_from([4, 6]),
    "n_shared_experts": st.sampled_from([1, 2]),
    "shared_expert_intermediate_size": st.sampled_from([16, 40]),
    "first_k_dense_replace": st.sampled_from([0, 1, 2]),
    "mlp_only_layers": st.sampled_from([[], [0], [0, 1]]),
    "decoder_sparse_step": st.sampled_from([1, 3]),
    "head_dim": st.sampled_from([8, 16]),
    "attention_bias": st.booleans(),
    "use_qk_norm": st.booleans(),
    "tie_word_embeddings": st.booleans(),
    "num_key_value_heads": st.sampled_from([1, 2, 4]),
    "q_lora_rank": st.sampled_from([None, 12]),
    "kv_lora_rank": st.just(10),
    "qk_nope_head_dim": st.just(8),
    "qk_rope_head_dim": st.sampled_from([4, 8]),
    "v_head_dim": st.sampled_from([6, 8]),
    "n_group": st.sampled_from([1, 2]),
    "topk_group": st.just(1),
}
_OF = {
    "qwen3_moe": "moe_intermediate_size num_experts mlp_only_layers decoder_sparse_step head_dim",
    "qwen2_moe": "moe_intermediate_size num_experts mlp_only_layers shared_expert_intermediate_size",
    "mixtral": "num_local_experts head_dim",
    "olmoe": "num_experts",
    "glm4_moe": "moe_intermediate_size n_routed_experts n_shared_experts first_k_dense_replace head_dim "
    "attention_bias use_qk_norm n_group topk_group",
    "dots1": "moe_intermediate_size n_routed_experts n_shared_experts first_k_dense_replace head_dim n_group "
    "topk_group",
    "deepseek_v2": "moe_intermediate_size n_routed_experts n_shared_experts first_k_dense_replace q_lora_rank "
    "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    "deepseek_v3": "moe_intermediate_size n_routed_experts n_shared_experts first_k_dense_replace q_lora_rank "
    "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_group topk_group",
    "gpt_oss": "num_local_experts head_dim",
}


@pytest.mark.parametrize("kind", MIXTURES)
@hypothesis.given(st.data())
@hypothesis.settings(
    max_examples=6, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_any_file_of_a_family_has_the_parameters_of_its_class(kind, write, data):
    names = ["tie_word_embeddings", "num_key_value_heads", *_OF[kind].split()]
    config = {"model_type": kind, **SIZES, **{name: data.draw(_SOME[name], name) for name in names}}
    if kind.startswith("deepseek"):
        config["num_key_value_heads"] = config["num_attention_heads"]
    assert read_config(write(config)).params == counted(config, kind)


@pytest.mark.parametrize("kind", [kind for kind in MIXTURES if kind not in PLAN_ONLY])
@hypothesis.given(st.data())
@hypothesis.settings(
    max_examples=6, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_a_file_of_experts_is_written_again(kind, write, data):
    transformers = pytest.importorskip("transformers")
    names = ["tie_word_embeddings", "num_key_value_heads", *_OF[kind].split()]
    config = {"model_type": kind, **SIZES, **{name: data.draw(_SOME[name], name) for name in names}}
    shape = read_config(write(config), 32)
    assert MIXTURES[kind] in architectures_of(shape)
    written = config_of(shape, begun=InitConfig(MIXTURES[kind]))
    assert written["model_type"] == kind
    assert replace(read_config(write(written), 32), pad_token=shape.pad_token) == shape
    model = getattr(transformers, MIXTURES[kind])
    with torch.device("meta"):
        built = model(model.config_class(**{key: one for key, one in written.items() if key != "architectures"}))
    sizes = {name: tuple(one.shape) for name, one in [*built.named_parameters(), *built.named_buffers()]}
    assert {name: size for name, size in sizes.items() if "inv_freq" not in name} == stored_sizes(shape, fused=True)


def test_shapes_of_no_class_are_not_exported():
    qwen3, glm = preset("qwen3-30b-a3b"), preset("glm-4.5")
    assert architecture_of(replace(glm, mtp_layers=0)) == "Glm4MoeForCausalLM"
    for shape in (
        *(preset(name) for name in ("deepseek-v3", "kimi-k2", "gpt-oss-20b", "glm-4.5")),
        *(replace(qwen3, **changed) for changed in (
            {"router": "topk-softmax"}, {"router_bias": True}, {"router_scale": 2.0}, {"rotated": 0.5},
            {"bias": "qkv"}, {"shared_ffn": 64}, {"nope_every": 4}, {"qk_norm": False, "dense_layers": 1},
            {"expert_groups": 4, "groups_per_token": 2})),
        replace(glm, mtp_layers=0, shared_ffn=None), replace(glm, mtp_layers=0, shared_ffn=1000),
        replace(glm, mtp_layers=0, expert_groups=160, groups_per_token=8),
    ):  # fmt: skip
        assert architecture_of(shape) is None


def test_a_file_that_balances_experts_gets_a_line(write):
    named = EngineFacts.unfollowed
    assert unfollowed_keys(write(PUBLISHED["qwen3-30b-a3b"]), 512, named) == []
    [line] = unfollowed_keys(write(PUBLISHED["qwen3-30b-a3b"] | {"output_router_logits": True}), 512, named)
    assert "output_router_logits is true: its class adds a balance loss; here train.balance does" in line


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
READ = [
    # Keys that the class does not read.
    ("qwen3-30b-a3b", {"routed_scaling_factor": 2.5}, {"router_scale": 1.0}),
    ("mixtral-8x7b", {"routed_scaling_factor": 2.5, "n_shared_experts": 1}, {"router_scale": 1.0, "shared_ffn": None}),
    ("glm-4.5", {"n_group": 2, "topk_method": "greedy"}, {"expert_groups": 2}),
    ("deepseek-v3", {"topk_method": "greedy"}, {"expert_groups": 8}),
    # The rotation's dict precedes the file, where null is all.
    ("glm-4.5", {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}, {"rotated": 0.25}),
    ("glm-4.5", {"partial_rotary_factor": None}, {"rotated": 1.0}),
    ("mixtral-8x7b", {"rope_scaling": _LLAMA3}, {"rope_scaling": RopeScaling("llama3", 8, 1, 4, 32768)}),
]


@pytest.mark.parametrize(("name", "changed", "read"), READ)
def test_a_key_is_taken_where_its_class_reads_it(name, changed, read, write):
    shape = read_config(write(PUBLISHED[name] | changed), 4096)
    assert {key: getattr(shape, key) for key in read} == read


REFUSED = [
    ("qwen3-30b-a3b", {"mlp_only_layers": [3]}, "mlp_only_layers is .3., so layers 3 of the 48 layers have no experts"),
    ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, so layers 0, 2, 4, 6 of the 48 layers"),
    ("qwen3-30b-a3b", {"num_local_experts": 64}, "num_local_experts is 64, but num_experts, which means the same, is"),
    ("qwen3-30b-a3b", {"attention_bias": True}, "attention_bias is true"),
    ("qwen3-30b-a3b", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling is .* another kind"),
    ("qwen3-30b-a3b", {"num_experts_per_tok": 200}, "num_experts_per_tok 200 is above the 128 experts"),
    ("mixtral-8x7b", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
    ("qwen3-30b-a3b", {"use_sliding_window": None}, "use_sliding_window is null, which its class does not take"),
    ("qwen2-moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0, but its class"),
    ("glm-4.5", {"topk_group": 2}, "topk_group is 2, but n_group is 1"),
    ("olmoe-1b-7b", {"clip_qkv": 8.0}, "clip_qkv is 8.0, but no model here clips"),
    ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    ("gpt-oss-20b", {"attention_bias": False}, "attention_bias is false"),
]


@pytest.mark.parametrize(("name", "changed", "words"), REFUSED)
def test_layers_that_cannot_be_said_are_refused_by_their_key(name, changed, words, write):
    folder = write((PUBLISHED | {"qwen2-moe": _QWEN2})[name] | changed)
    with pytest.raises(UserError, match=words):
        read_config(folder, 8192)
