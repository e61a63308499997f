"""Context parallelism in an experiment: what follows from cp, what is refused; 1 leaves all as it was."""

import json
import re
from dataclasses import replace

import pytest

from hpc_gpt.core.errors import ConfigError, LayoutError, UserError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Data, Engine, Experiment, LayoutRequest, Model
from hpc_gpt.core.settings.resolved import Resolved, config_hash
from hpc_gpt.core.settings.stored import experiment_of, experiment_text

EIGHT = ClusterProfile(name="eight", gpus_per_node=8)
QWEN_HEADS = Model(hidden=3584, layers=4, heads=28, kv_heads=4, vocab=1024, seq=4096)


def settle(engine="ddp", model=None, exchange="heads", parallel=False, **layout):
    small = Model(hidden=64, layers=4, heads=4, vocab=256, seq=64)
    switches = Engine(engine, cp_exchange=exchange, sequence_parallel=parallel)
    data = Data(mask_documents=layout.pop("masks", False))
    asked = LayoutRequest(**{"micro_batch": 1, "micro_batches": 2, **layout})
    return resolve(Experiment(model=model or small, data=data, engine=switches, layout=asked), EIGHT)


@pytest.mark.parametrize(
    ("engine", "asked", "layout"),
    [
        ("ddp", {"gpus": 8, "cp": 2}, "tp1-pp1-cp2-dp4"),
        ("fsdp", {"gpus": 8, "cp": 4, "tp": 2}, "tp2-pp1-cp4-dp1"),
        ("deepspeed-3d", {"tp": 2, "pp": 2, "cp": 2, "dp": 1}, "tp2-pp2-cp2-dp1"),
        ("deepspeed-zero", {"gpus": 8, "cp": 2, "dp": 2}, "tp2-pp1-cp2-dp2"),
        ("megatron-lm", {"gpus": 4, "cp": 2, "tp": 1}, "tp1-pp1-cp2-dp2"),
    ],
)
def test_the_rest_follows_from_cp(engine, asked, layout):
    model = Model(hidden=64, layers=4, heads=8, vocab=256, seq=64)
    run = settle(engine, model, **asked)
    assert str(run.layout) == layout
    assert run.gpus == run.layout.gpus
    # dp counts replicas: cp is not in the batch equation.
    assert run.batch.global_batch == 2 * run.layout.dp
    assert resolve(experiment_of(run), run.cluster) == run
    assert Resolved.from_json(run.to_json()) == run


def test_one_is_neither_written_nor_hashed():
    plain, asked, wide = settle(gpus=8), settle(gpus=8, cp=1), settle(gpus=8, cp=2)
    assert asked.to_json() == plain.to_json()
    for text in (plain.to_json(), experiment_text(plain, "")):
        assert not re.search(r"\bcp\b|cp_exchange", text)
    assert config_hash(asked) == config_hash(plain) != config_hash(wide)
    assert json.loads(wide.to_json())["layout"] == {"tp": 1, "pp": 1, "dp": 4, "cp": 2}
    assert "cp = 2" in experiment_text(wide, "")
    keys = settle(gpus=8, cp=2, exchange="keys")
    assert json.loads(keys.to_json())["engine"]["cp_exchange"] == "keys"
    assert config_hash(keys) != config_hash(wide)


REFUSED = {
    "heads": (
        {"model": QWEN_HEADS, "cp": 8, "gpus": 8},
        "28 heads / tp 1 is not a multiple of cp 8",
        'use --cp 4, or engine.cp_exchange = "keys"',
    ),
    "heads of a tensor-parallel rank": (
        {"model": QWEN_HEADS, "engine": "fsdp", "cp": 4, "tp": 2, "gpus": 8},
        "28 heads / tp 2 = 14 is not a multiple of cp 4",
        'use --cp 2, or engine.cp_exchange = "keys"',
    ),
    "kv_heads": (
        {"model": replace(QWEN_HEADS, hidden=3072, heads=24, kv_heads=6), "cp": 4, "gpus": 8},
        "cp 4 and 6 kv_heads / tp 1: neither divides the other",
        'use --cp 2, or engine.cp_exchange = "keys"',
    ),
    "heads that a smaller tp leaves": (
        {"model": QWEN_HEADS, "engine": "fsdp", "cp": 2, "tp": 4, "gpus": 8},
        "28 heads / tp 4 = 7 is not a multiple of cp 2",
        'use --tp 2, or engine.cp_exchange = "keys"',
    ),
    "heads that nothing divides": (
        {"model": replace(QWEN_HEADS, hidden=1600, heads=25, kv_heads=25), "cp": 2, "gpus": 8},
        "25 heads / tp 1 is not a multiple of cp 2",
        'use engine.cp_exchange = "keys"',
    ),
    "sequence": (
        {"model": replace(QWEN_HEADS, seq=4098), "cp": 4, "gpus": 8},
        "cp 4 does not divide model.seq 4098: 4098 / 4 = 1024.50",
        "use --seq 4096",
    ),
    "sequence by chunks": (
        {"model": replace(QWEN_HEADS, seq=4100), "cp": 4, "gpus": 8, "exchange": "keys"},
        "2 x cp 4 = 8 does not divide model.seq 4100: 4100 / 8 = 512.50",
        "use --seq 4096",
    ),
    "sequence with sequence parallelism": (
        {"model": replace(QWEN_HEADS, seq=4098), "engine": "deepspeed-3d", "cp": 2, "tp": 2, "gpus": 8,
         "parallel": True},
        "cp 2 x tp 2 = 4, with sequence parallelism, does not divide model.seq 4098: 4098 / 4 = 1024.50",
        "use --seq 4096",
    ),
    "masks of documents with keys": (
        {"cp": 2, "gpus": 8, "exchange": "keys", "masks": True},
        "data.mask_documents is true, but cp is 2 and engine.cp_exchange is keys",
        'use engine.cp_exchange = "heads", or data.mask_documents = false',
    ),
    "no ring of ours": (
        {"cp": 2, "gpus": 8, "exchange": "ring"},
        "engine.cp_exchange is ring, which engine ddp does not have",
        'use engine.cp_exchange = "heads" or "keys"',
    ),
    "transformers' model": (
        {"engine": "hf-deepspeed", "cp": 2, "gpus": 8},
        "cp 2 cannot run on engine hf-deepspeed, which does not split over cp",
        "use --cp 1, or --engine deepspeed-3d or deepspeed-zero or fsdp or ddp or megatron-lm",
    ),
    "too few GPUs": (
        {"cp": 4, "gpus": 2},
        "layout tp1-pp1-cp4-dp1 needs 4 GPUs (1 x 1 x 4 x 1 = 4), but there are 2",
        "use --gpus 4",
    ),
    "no size": ({"cp": 0, "gpus": 2}, "layout.cp is 0, but must be at least 1", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_with_the_nearest_that_can(case):
    asked, message, hint = REFUSED[case]
    with pytest.raises(UserError) as refusal:
        settle(**asked)
    assert message in str(refusal.value)
    assert hint in refusal.value.hint
    of_switches = case in ("no ring of ours", "masks of documents with keys")
    assert isinstance(refusal.value, ConfigError if of_switches else LayoutError)


@pytest.mark.parametrize("seq", [64, 96, 60])
@pytest.mark.parametrize(("heads", "keys"), [(4, 4), (12, 4), (24, 6)])
@pytest.mark.parametrize(("gpus", "cp", "tp"), [(3, 3, 1), (4, 4, 1), (6, 3, 1), (8, 8, 1), (8, 2, 4), (6, 3, 2)])
def test_a_hint_names_only_what_is_taken(gpus, cp, tp, heads, keys, seq):
    asked = {"engine": "fsdp", "gpus": gpus, "cp": cp, "tp": tp}
    model = Model(hidden=heads * 8, layers=2, heads=heads, kv_heads=keys, vocab=256, seq=seq)
    try:
        settle(model=model, **asked)
    except LayoutError as refusal:
        if "heads / tp" not in str(refusal) and "kv_heads" not in str(refusal):
            return
        for axis, size in re.findall(r"--(cp|tp) (\d+)", refusal.hint):
            settle(model=model, **asked | {axis: int(size)})
        if "cp_exchange" in refusal.hint:
            settle(model=model, **asked, exchange="keys")
