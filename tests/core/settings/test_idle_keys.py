"""Keys that have no effect beside the others given: each key of [data], [engine], [train], [model], [layout]
and the services' tables has one in each engine, is refused, or is named in a note. And the source that follows from
data.path."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.engines import engine_named, trainers
from hpc_gpt.core.engines.base.megatron_program import megatron_arguments
from hpc_gpt.core.errors import UserError, raise_faults
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Data, Engine, LayoutRequest, Model, Train
from hpc_gpt.core.settings.experiment_file import load_experiment, read_experiment
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.rules.engine import product_faults
from hpc_gpt.core.settings.services import SERVICES
from hpc_gpt.launcher.idle_keys import idle_keys
from tests.conftest import REPOSITORY

TABLES = {"data": Data, "engine": Engine, "train": Train, "model": Model, "layout": LayoutRequest}
TABLES |= {name: type(table) for name, table in SERVICES.items()}
# What a run has of a table of its experiment, if not a table of its name.
OUTCOMES = {"model": ("model",), "layout": ("layout", "batch", "gpus", "nodes")}
# Another value than the default of each key whose type does not say one.
OTHERS: dict[str, Any] = {
    "data.path": "corpus.tokens", "data.source": "random", "data.tokenizer": "char", "data.eval_fraction": 0.1,
    "data.on_bad_shard": "skip", "data.mix": {"web": {"path": "web.tokens", "weight": 1.0}}, "data.phases": [1e6],
    "engine.recompute": "full", "engine.attention": "math", "engine.compile": "block", "engine.offload": "optimizer",
    "engine.compile_backend": "aot_eager", "engine.partition": "parameters",
    "engine.cp_exchange": "keys", "engine.megatron_args": ["--x"], "engine.zero_stage": 1,
    "train.dtype": "bf16", "train.matmul": "fp8-tensor", "train.init": "weights", "train.optimizer": "sgd",
    "train.muon_dtype": "fp32",
    "train.optimizer_mode": "foreach", "train.decay": "constant", "train.decay_shape": "1-sqrt", "train.clip": 0.5,
    "model.preset": "gpt2-xl", "model.hf": "config.json", "model.hidden": 96, "model.layers": 3, "model.heads": 2,
    "model.vocab": 300, "model.seq": 64, "model.tied": False, "model.vocab_multiple": 192, "model.kv_heads": 1,
    "model.head_dim": 64, "model.ffn": 96, "model.mlp": "swiglu", "model.norm": "rmsnorm", "model.norm_eps": 1e-6,
    "model.positions": "rope", "model.rope_theta": 5e5, "model.bias": "none", "model.qk_norm": True,
    "model.rope_scaling": {"kind": "linear", "factor": 8.0}, "model.nope_every": 2, "model.pad_token": 3,
    "layout.gpus": 4, "layout.nodes": 2, "layout.tp": 2, "layout.pp": 2, "layout.cp": 2, "layout.dp": 1,
    "layout.micro_batch": 3, "layout.micro_batches": 5, "layout.global_batch": 24, "notify.command": "mail",
    "notify.on": ["ended"], "track.wandb": "gpt", "plan.like": "ddp",
    "plan.attention": "fa2", "plan.grad_sum": "fp32", "plan.dp_overlap": True, "plan.tp_overlap": True,
    "plan.fused_loss": "jit", "plan.states": "fp32", "plan.dispatcher": "deepep", "plan.routing": "real",
    "plan.ep_overlap": True, "plan.cuda_graphs": ["attn"],
    "train.profile_steps": [2, 3], "train.save_at": [5], "train.eval_every": 10, "train.beta1": 0.8, "train.beta2": 0.9,
}  # fmt: skip
# What reads these of a program's run beside its arguments: our job chain, our data and the record.
OUTSIDE = {"steps", "minutes", "hang_multiple", "hang_floor_s", "keep_last", "keep_every", "max_epochs", "tokenizer"}


def other_value(key: str) -> Any:
    """A value of the key that is not its default."""
    table, _, name = key.partition(".")
    default = getattr(TABLES[table](), name)
    if key in OTHERS:
        return OTHERS[key]
    return not default if isinstance(default, bool) else (default or 0) + 3


@functools.cache
def keys_read() -> frozenset[str]:
    """The names of the attributes that any code reads outside of the settings themselves."""
    files = [
        file for file in (REPOSITORY / "hpc_gpt").rglob("*.py") if "settings" not in file.relative_to(REPOSITORY).parts
    ]
    trees = (ast.walk(ast.parse(file.read_text(encoding="utf-8"))) for file in files)
    return frozenset(node.attr for tree in trees for node in tree if isinstance(node, ast.Attribute))


def has_effect(engine: str, key: str, before: Resolved, after: Resolved) -> bool:
    """Whether the run of a program is started otherwise, or anything reads the key of a run of our trainer."""
    table, _, name = key.partition(".")
    if table in SERVICES:
        return bool(getattr(before, table) != getattr(after, table))
    if table in OUTCOMES:
        return any(getattr(before, each) != getattr(after, each) for each in OUTCOMES[table])
    if not engine_named(engine).is_program:
        return name in keys_read() or key == "engine.name"
    words = [megatron_arguments(run, "checkpoints", "prefix") for run in (before, after)]
    return words[0] != words[1] or name in OUTSIDE or before.data.source != after.data.source


def all_keys() -> Iterator[str]:
    for table, kind in TABLES.items():
        yield from (f"{table}.{entry.name}" for entry in fields(kind) if (table, entry.name) != ("engine", "name"))


def sized(engine: str, more: dict[str, Any]) -> Resolved:
    own = {"engine.name": engine, "layout.tp": 1, "layout.pp": 1, "layout.gpus": 2, **more}
    run = resolve(load_experiment("demo", own), load_profile("generic-slurm"))
    raise_faults(product_faults(run))
    return run


@pytest.mark.parametrize("engine", sorted({*trainers(), "megatron-lm"}))
def test_each_key_has_an_effect_or_is_refused_or_named(engine: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(REPOSITORY)
    before, silent = sized(engine, {}), []
    given = {f"model.{name}" for name in ("hidden", "layers", "heads", "vocab", "seq")}
    for key in all_keys():
        value = other_value(key)
        try:
            after = sized(engine, {key: value})
        except UserError:
            continue
        if not (list(idle_keys(after, given | {key})) or has_effect(engine, key, before, after)):
            silent.append(key)
    assert silent == []


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"data.workers": 2}, 'data.workers has no effect: data.source is "stdlib"; only a stream uses it'),
        ({"train.decay": "constant", "train.min_lr": 1e-4}, 'train.min_lr has no effect: train.decay is "constant"'),
        (
            {"train.optimizer": "sgd", "train.beta1": 0.8, "train.beta2": 0.9, "train.weight_decay": 0.0},
            'train.beta1 and train.beta2 have no effect: train.optimizer is "sgd", which has no such key',
        ),
        ({"train.keep_every": 5}, "train.keep_every has no effect: train.keep_last is 0: every checkpoint stays"),
        ({"train.keep_every": 5, "train.keep_last": 2}, ""),
        (
            {"train.eval_every": 0, "train.eval_batches": 9},
            "train.eval_batches has no effect: train.eval_every is 0: nothing is evaluated",
        ),
        ({"layout.allow_tp_across_nodes": True}, "layout.allow_tp_across_nodes has no effect: tp 1 is within a node"),
        ({"model.preset": "llama3.2-1b", "model.layers": 2, "model.kv_heads": 2}, ""),
        ({"engine.compile_backend": "aot_eager"}, 'engine.compile_backend has no effect: engine.compile is "none"'),
    ],
)  # fmt: skip
def test_a_key_without_an_effect_is_named(keys: dict[str, Any], note: str) -> None:
    assert list(idle_keys(sized("ddp", keys), set(keys))) == [note] * bool(note)


def test_our_experiments_have_none() -> None:
    for path in sorted((REPOSITORY / "experiments").glob("*.toml")):
        file = read_experiment(str(path))
        given = {f"{table}.{key}" for table, own in file.tables.items() if isinstance(own, dict) for key in own}
        profile = load_profile("local" if path.stem == "demo" else "generic-slurm")
        assert not list(idle_keys(resolve(load_experiment(file), profile), given)), path


@pytest.mark.parametrize(
    ("base", "own", "options", "source", "path"),
    [
        ("", 'path = "t.tokens"', {}, "tokens", "t.tokens"),
        ("", "", {"data.path": "t.tokens"}, "tokens", "t.tokens"),
        ('source = "stdlib"', 'path = "t.tokens"', {}, "tokens", "t.tokens"),
        ('source = "random"', "", {"data.path": "texts"}, "stream", "texts"),
        ('source = "stdlib"', "", {"data.path": "texts/a.txt"}, "stream", "texts/a.txt"),
        ("", "", {"data.path": "pair"}, "megatron", "pair"),
        ('source = "tokens"\npath = "t.tokens"', "", {"data.source": "random"}, "random", None),
        ('source = "tokens"\npath = "t.tokens"', "", {"data.path": "u.tokens"}, "tokens", "u.tokens"),
        ("", 'source = "stdlib"\npath = "t.tokens"', {}, 'data.path is t.tokens, but data.source is "stdlib"', None),
        ("", "", {"data.path": "none"}, "data.path is none, but there is nothing at this path", None),
    ],
)
def test_the_source_follows_from_the_path(
    base: str, own: str, options: dict[str, Any], source: str, path: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name, text in (("t.tokens", "HPCGPTTK…"), ("pair.bin", "x"), ("pair.idx", "x"), ("texts/a.txt", "a text")):
        (tmp_path / name).write_text(text)
    model = "[model]\nhidden = 32\nlayers = 2\nheads = 2\n"
    (tmp_path / "base.toml").write_text(f"{model}[data]\n{base}\n")
    (tmp_path / "own.toml").write_text(f'extends = "base"\n[data]\n{own}\n')
    if " " in source:
        with pytest.raises(UserError, match=source):
            load_experiment("own.toml", options)
        return
    data = load_experiment("own.toml", options).data
    assert (data.source, data.path) == (source, path)


def test_a_preset_all_of_whose_sizes_are_given_is_named() -> None:
    sizes = {"model.hidden": 96, "model.layers": 2, "model.heads": 2}
    (note,) = idle_keys(run := sized("ddp", {"model.preset": "gpt2-xl", **sizes}), {"model.preset", *sizes})
    assert note == "model.preset has no effect: every size that it sets is also given"
    assert not list(idle_keys(run, {"model.preset", "model.hidden", "model.layers"}))
    llama = sized("ddp", {"model.preset": "llama3.2-1b", "model.kv_heads": 2, **sizes})
    assert not list(idle_keys(llama, {"model.preset", *sizes}))
