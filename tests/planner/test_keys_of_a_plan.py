"""Each key of [train], [engine] and [model] changes a plan's memory or time, or is listed here with the reason."""

import functools
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.settings.cluster import ClusterProfile, load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Model, Train
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.planner.machine import machine_of
from hpc_gpt.planner.memory import predict_memory
from hpc_gpt.planner.step_time import predict_step
from hpc_gpt.planner.training import training_of
from tests.core.settings.test_idle_keys import other_value

LLAMA = {"model.preset": "llama3.2-1b", "model.seq": 2048}
MIXTURE = {"model.preset": "qwen3-30b-a3b", "model.seq": 2048}
_BATCH = {"layout.gpus": 8, "layout.micro_batch": 8, "layout.micro_batches": 8}
BASES: dict[str, dict[str, Any]] = {
    "ddp": {"engine.name": "ddp", "model.preset": "gpt2", "layout.dp": 8},
    "sharded muon": {"engine.name": "ddp", "layout.dp": 8, "train.optimizer": "muon", **LLAMA},
    "fsdp": {"engine.name": "fsdp", "layout.tp": 2, "layout.dp": 4, "train.optimizer": "muon", **LLAMA},
    "fp32": {"engine.name": "fsdp", "layout.dp": 8, "train.dtype": "fp32", **LLAMA},
    "compiled": {"engine.name": "ddp", "layout.dp": 8, "engine.compile": "block", "model.preset": "gpt2-xl"},
    "zero": {"engine.name": "deepspeed-zero", "engine.zero_stage": 3, "layout.dp": 8, **LLAMA},
    "stages": {"engine.name": "deepspeed-3d", "layout.tp": 2, "layout.pp": 4, **LLAMA},
    "over cp": {"engine.name": "fsdp", "layout.cp": 2, "layout.dp": 4, **LLAMA},
    "megatron": {"engine.name": "megatron-lm", "layout.tp": 2, "layout.pp": 2, "layout.dp": 2, **LLAMA},
    "experts": {"engine.name": "fsdp", "layout.ep": 8, "layout.dp": 8, **MIXTURE},
    "windows": {"engine.name": "fsdp", "layout.dp": 8, "model.window": 512, **LLAMA},
}
OTHERS: dict[str, tuple[Any, ...]] = {
    "train.optimizer": ("adamw", "muon", "sgd"),
    "train.dtype": ("fp32", "bf16"),
    "engine.name": ("ddp", "fsdp"),
    "engine.zero_stage": (1, 2),
    "engine.offload": ("optimizer", "full"),
    "engine.compile": ("block", "whole"),
    "engine.megatron_args": (["--overlap-grad-reduce"],),
    "engine.partition": ("parameters", [3, 4, 5, 4]),
    "model.bias": ("all", "none", "qkv"),
    "model.window": (256,),
    "model.window_layers": ("SL",),
    "model.kv_heads": (4,),
    "model.hidden": (4096,),
    "model.head_dim": (128,),
    "model.heads": (16,),
    "model.vocab": (100352,),
    "model.seq": (4096,),
    "model.layers": (20,),
    "model.ffn": (4096,),
    "model.tied": (True, False),
    "model.preset": ("gpt2",),
    "model.qk_norm": (True, "width"),
    "model.positions": ("rope", "learned"),
    "model.mlp": ("gelu", "swiglu"),
    "model.norm": ("layernorm", "rmsnorm"),
    "model.experts": (64,),
    "model.experts_per_token": (4,),
    "model.expert_ffn": (1024,),
    "model.shared_ffn": (1024,),
    "model.dense_layers": (2,),
    "engine.gather_blocks": (4,),
}
IN_THE_LOOP = "the loop does it between steps; `launcher.forecast` has its time"
NO_ARITHMETIC = "numbers that the step computes with; as many bytes and FLOPs"
FEW = "as many products; a few numbers of a token or of a layer, less than a percent of its time"
RULES = "when the run stops, or what it keeps"
NOT_TRAINED = "of models that no engine of ours trains; `plan --model` takes them together"
STILL = {
    **dict.fromkeys(("train.steps", "train.minutes", "train.until_loss", "train.max_bad_steps", "train.keep_last",
                     "train.keep_every", "train.hang_multiple", "train.hang_floor_s"), RULES),
    **dict.fromkeys(("train.log_every", "train.eval_every", "train.eval_batches", "train.save_every",
                     "train.save_minutes", "train.save_at", "train.save_last", "train.save_in_background",
                     "train.profile_steps"), IN_THE_LOOP),
    **dict.fromkeys(("train.seed", "train.init", "train.lr", "train.muon_lr", "train.muon_momentum", "train.min_lr",
                     "train.warmup_steps", "train.decay", "train.decay_steps", "train.decay_shape",
                     "train.weight_decay", "train.beta1", "train.beta2", "train.eps", "train.balance_coef",
                     "train.balance_rate", "train.z_loss", "train.balance", "model.norm_eps", "model.rope_theta",
                     "model.rope_scaling", "model.pad_token", "model.router_scale"), NO_ARITHMETIC),
    **dict.fromkeys(("model.nope_every", "model.rotated", "model.norm_topk", "model.router", "model.router_bias",
                     "model.router_dtype", "model.expert_groups", "model.groups_per_token"), FEW),
    **dict.fromkeys(("model.kv_lora", "model.q_lora", "model.qk_rope", "model.v_head", "model.sinks"), NOT_TRAINED),
    "model.hf": "the path of a config.json, whose keys are those of [model]",
    "model.shared_gate": FEW + "; alone it is refused without model.shared_ffn",
    "train.clip": "the norm is measured without it, too, and divides as the gradient is read",
    "train.deterministic": "slower kernels of some operations; nobody has measured by how much",
    "engine.compile_backend": "a plan is for inductor; the other one is for tests without a compiler",
    "engine.prefetch": "nobody has measured a run without it; a plan is for the default",
    "engine.tiles": "DeepSpeed keeps a billion gathered elements (stage3_max_live_parameters), in tiles or not",
}  # fmt: skip


@functools.cache
def profile() -> ClusterProfile:
    return load_profile("h100-80g-8")


def figures_of(folder: Path, keys: dict[str, Any]) -> list[dict[str, Any]]:
    """All parts of the plan's memory and time."""
    path = folder / "empty.toml"
    path.touch()
    training, machine = training_of(resolve(load_experiment(str(path), keys), profile())), machine_of(profile())
    parts = [*predict_memory(training, machine).stages, predict_step(training, machine)]
    return [asdict(part) for part in parts]


def moves(folder: Path, key: str) -> list[str]:
    """The bases of which the plan changes with another value of the key."""
    found = []
    for name, base in BASES.items():
        try:
            before = figures_of(folder, base | _BATCH)
        except UserError as fault:
            pytest.fail(f"{name}: {fault}")
        for value in OTHERS.get(key) or (other_value(key),):
            try:
                after = figures_of(folder, base | _BATCH | {key: value})
            except UserError:
                continue
            if after != before:
                found.append(name)
    return found


KEYS = [
    f"{table}.{entry.name}"
    for table, kind in (("train", Train), ("engine", Engine), ("model", Model))
    for entry in fields(kind)
]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_moves_the_plan_or_is_listed_with_the_reason(key: str, tmp_path: Path) -> None:
    assert (moves(tmp_path, key) == []) is (key in STILL), STILL.get(key)
