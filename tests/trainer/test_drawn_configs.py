"""config.json files drawn from a seed: what a file says is what trains, as its class of transformers does it, or the
file is refused by a key that it changed."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.weights.config import read_config
from hpc_gpt.core.weights.config_keys import ARCHITECTURES, MIXTURES, PLAN_ONLY
from hpc_gpt.trainer.compare_init import distance
from hpc_gpt.trainer.model.gpt import Gpt
from tests.trainer.test_experts_folders import given_model

pytest.importorskip("safetensors")
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers")

SEQ, FILES, LIMIT = 24, 200, 2e-5
_TRAINED = [kind for kind in MIXTURES if kind not in PLAN_ONLY]
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 61,
    "intermediate_size": 40, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
_OF_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": 61, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mistral": {"sliding_window": None},
    "qwen2": {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 3},
    "qwen3": {"head_dim": 16, "use_sliding_window": False, "max_window_layers": 3},
    "qwen3_moe": {"num_experts": 8, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 1,
                  "mlp_only_layers": [], "sliding_window": None, "use_sliding_window": False, "max_window_layers": 3},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1,
                  "sliding_window": 64, "use_sliding_window": False, "max_window_layers": 3},
    "mixtral": {"num_local_experts": 8, "sliding_window": None},
    "olmoe": {"num_experts": 8, "norm_topk_prob": False, "clip_qkv": None},
    "glm4_moe": {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
                 "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "partial_rotary_factor": 0.5,
                 "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
              "routed_scaling_factor": 1.5, "norm_topk_prob": True, "sliding_window": None, "head_dim": 16},
}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_WHOLE = _LLAMA3 | {"original_max_position_embeddings": 16}
_ROTATIONS = [
    _WHOLE, _LLAMA3, _WHOLE | {"rope_theta": 300.0}, {"rope_theta": 300.0},
    {"rope_theta": 300.0, "rope_type": "default"},
    {"type": "llama3"} | {key: one for key, one in _WHOLE.items() if key != "rope_type"},
    {"type": "yarn", "factor": 4.0}, {"rope_theta": 300.0, "partial_rotary_factor": 0.25},
    {"partial_rotary_factor": 1.0}, {}, {"rope_type": "linear", "factor": 2.0}, {"rope_theta": None},
    {"rope_type": None}, {"full_attention": {"rope_theta": 300.0}}, _WHOLE | {"partial_rotary_factor": 0.5},
    {"type": "default", "rope_theta": 50},
]  # fmt: skip
# fmt: off
# {key: values that a file gets for it}, besides null and no such key.
_VALUES: dict[str, list[Any]] = {
    "num_key_value_heads": [1, 2, 4], "head_dim": [8, 12, 16], "intermediate_size": [24, 40], "n_inner": [24, 128],
    "rms_norm_eps": [1e-3, 1e-5, 1e-6, 1], "layer_norm_epsilon": [1e-3], "tie_word_embeddings": [True, False],
    "hidden_act": ["silu", "swish", "gelu"], "activation_function": ["gelu_new", "gelu_pytorch_tanh", "gelu", "relu"],
    "attention_bias": [True, False], "mlp_bias": [True, False], "qkv_bias": [True, False],
    "attention_dropout": [0.0, 0.1], "pad_token_id": [0, 7, -1, 61], "rope_theta": [500.0, 1000000, 10000],
    "rope_scaling": _ROTATIONS, "rope_parameters": _ROTATIONS, "original_max_position_embeddings": [16, 32],
    "partial_rotary_factor": [0.25, 0.5, 1.0], "max_position_embeddings": [16, 64, 128], "sliding_window": [4, 8, 64],
    "use_sliding_window": [True, False], "max_window_layers": [0, 1, 2, 3, 8],
    "layer_types": [["full_attention"] * 3, ["sliding_attention"] * 3,
                    ["sliding_attention", "full_attention", "full_attention"],
                    ["full_attention"] * 2, ["full_attention", "chunked_attention", "full_attention"]],
    "num_experts": [4, 8], "num_local_experts": [4, 8], "n_routed_experts": [4, 8], "num_experts_per_tok": [1, 3, 8],
    "moe_intermediate_size": [16, 24], "shared_expert_intermediate_size": [0, 16, 40], "n_shared_experts": [0, 1, 2],
    "first_k_dense_replace": [0, 1, 3], "mlp_only_layers": [[], [0], [1], [0, 1]], "decoder_sparse_step": [0, 1, 2, 3],
    "n_group": [1, 2, 4], "topk_group": [1, 2], "topk_method": ["greedy", "noaux_tc", "group_limited_greedy"],
    "routed_scaling_factor": [1.0, 2.5, 16], "norm_topk_prob": [True, False], "scoring_func": ["softmax", "sigmoid"],
    "router_jitter_noise": [0.0, 0.1], "output_router_logits": [True, False], "router_aux_loss_coef": [0.1],
    "clip_qkv": [0.5, 8.0, None], "use_qk_norm": [True, False], "moe_layer_freq": [1, 2],
    "num_nextn_predict_layers": [0, 1], "num_mtp_layers": [0, 1],
    "no_rope_layers": [[1, 1, 0], [1, 0, 1], [1, 1, 1], [0, 0, 0], []], "no_rope_layer_interval": [2, 3, 4],
    "scale_attn_weights": [True, False], "scale_attn_by_inverse_layer_idx": [True, False],
    "reorder_and_upcast_attn": [True, False], "is_causal": [True, False], "kv_lora_rank": [8], "logit_scale": [0.5],
    "attention_multiplier": [0.5], "query_pre_attn_scalar": [64], "final_logit_softcapping": [30.0],
    "shared_expert_gate": [False], "norm_topk": [True], "experts_per_token": [3], "num_experts_per_token": [3],
    "qk_layernorm": [True], "n_ctx": [32], "n_positions": [64, 128], "n_head": [2, 4], "num_attention_heads": [2, 4],
    "hidden_size": [32, 64], "pretraining_tp": [1, 2], "dtype": ["float32"], "torch_dtype": ["bfloat16"],
    "attn_implementation": ["eager"], "initializer_range": [0.1], "bos_token_id": [1], "eos_token_id": [2, [2, 3]],
    "use_cache": [False], "num_hidden_layers": [2, 3], "cross_attention_hidden_size": [32],
    "add_cross_attention": [True, False], "is_decoder": [True, False], "is_encoder_decoder": [True, False],
    "chunk_size_feed_forward": [0, 8], "pruned_heads": [{}, {"0": [1]}], "tie_encoder_decoder": [True],
    "quantization_config": [{"quant_method": "fp8"}], "auto_map": [{"AutoConfig": "a.B"}], "rope_type": ["llama3"],
    "attn_logit_softcapping": [30.0], "router_dtype": ["float32"], "rope_interleaved": [True],
    "rope_interleave": [True], "output_hidden_states": [True], "sinks": [True], "moe_k": [3], "embd_pdrop": [0.0],
    "vocab_size": [61, 96],
}  # fmt: skip


def _base(kind: str, five: bool) -> dict[str, Any]:
    """A file of a family, as published or as transformers 5 writes it."""
    config = {**_SIZES, **(_OF_EXPERTS if kind in MIXTURES else {}), "rope_theta": 10000.0} if kind != "gpt2" else {}
    config |= _OWN.get(kind, {})
    if not five:
        return {"model_type": kind, "torch_dtype": "bfloat16", **config}
    name = (ARCHITECTURES | MIXTURES)[kind]
    of_class = getattr(transformers, name).config_class(**config)
    return {"architectures": [name], **json.loads(of_class.to_json_string(use_diff=False))}


def drawn(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file of a number, and its changed keys; a key that is left out has the value "absent" there."""
    draw = random.Random(number)
    config = _base(draw.choice([*ARCHITECTURES, *_TRAINED, *_TRAINED]), draw.random() < 0.5)
    near = [key for key in _VALUES if key in config]
    changed: dict[str, Any] = {}
    for _ in range(draw.randint(1, 3)):
        key = draw.choice(near if draw.random() < 0.5 else [*_VALUES])
        how = draw.random()
        if how < 0.15 and key in config:
            del config[key]
            changed[key] = "absent"
        else:
            changed[key] = config[key] = None if how < 0.35 else json.loads(json.dumps(draw.choice(_VALUES[key])))
    return config, changed


def their_model(folder: Path) -> Any:
    """Its class with drawn weights that matter."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator) + float("norm" in name))
    return model.eval()


def in_our_names(folder: Path, shape: Any, tensors: Iterable[tuple[str, Tensor]]) -> Gpt:
    """Our model with tensors that have the names of transformers' parameters, or gradients of theirs."""
    stored = {name: one.detach().clone() for name, one in tensors if not name.endswith(("inv_freq", ".attn.bias"))}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return given_model(shape, folder)


def compared(ours: Gpt, theirs: Any, folder: Path, seed: int) -> dict[str, float]:
    """The largest differences of the loss, logits and gradients."""
    shape = ours.shape
    tokens = torch.randint(0, shape.vocab, (2, SEQ), generator=torch.Generator().manual_seed(seed))
    both = theirs(tokens, use_cache=False, return_dict=True).logits, ours.logits(tokens)[..., : shape.vocab]
    losses = [F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for logits in both]
    for model, loss in zip((theirs, ours), losses, strict=True):
        model.zero_grad()
        loss.backward()
    gradients = ((name, _gradient(one)) for name, one in theirs.named_parameters())
    expected = in_our_names(folder, shape, (*gradients, *theirs.named_buffers()))
    scale = max(float(one.detach().abs().max()) for one in expected.parameters())
    pairs = zip(ours.parameters(), expected.parameters(), strict=True)
    off = max(float((_gradient(mine) - one.detach()).abs().max()) / scale for mine, one in pairs)
    return {
        "loss": abs(float((losses[0] - losses[1]).detach())),
        "logits": distance(both[1], both[0]),
        "gradients": off,
    }


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def judge(number: int, folder: Path) -> tuple[str, str]:
    """(what came of a file, details): refused, equal, or why it is neither."""
    config, changed = drawn(number)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        shape = read_config(folder, SEQ)
    except UserError as fault:
        named = any(key in str(fault) for key in changed)
        return "refused" if named else "refused without a changed key", f"{fault}"
    try:
        theirs = their_model(folder)
        with torch.no_grad():
            theirs(torch.zeros(1, SEQ, dtype=torch.int64), use_cache=False)
    except Exception as fault:
        return "only transformers refuses it", f"{type(fault).__name__}: {fault}"
    try:
        ours = in_our_names(folder, shape, (*theirs.named_parameters(), *theirs.named_buffers()))
    except UserError as fault:
        return "its weights are refused", f"{fault}"
    for seed in range(3):  # a decision that rounding turns is another one with other tokens
        far = compared(ours, theirs, folder, seed)
        if max(far.values()) <= LIMIT:
            return "equal", f"{far}"
    return "differs", f"{far}"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_drawn_file_is_read_as_its_class_or_refused(tmp_path: Path) -> None:
    counts, wrong = Counter[str](), []
    for number in range(FILES):
        (folder := tmp_path / str(number)).mkdir()
        what, words = judge(number, folder)
        counts[what] += 1
        if what not in ("refused", "equal"):
            wrong.append(f"{number}: {drawn(number)[0]['model_type']} with {drawn(number)[1]}: {what}: {words}")
        shutil.rmtree(folder)
    print(f"{FILES} files: {dict(counts)}")
    assert not wrong, "\n".join(wrong)
    assert counts["refused"] <= FILES / 2
