"""Published rows become trainings; what cannot be used is left out with the field named."""

import json

import pytest

from hpc_gpt.errors import ConfigError
from tests.plan.published.files import read_rows
from tests.plan.published.programs import PROGRAMS
from tests.plan.published.rows import LeftOut, PublishedRow, row_of
from tests.plan.row_examples import row


def read(**fields) -> PublishedRow:
    found = row_of(row(**fields), 1, None)
    assert isinstance(found, PublishedRow), found.reason
    return found


def reason(**fields) -> str:
    found = row_of(row(**fields), 1, None)
    assert isinstance(found, LeftOut), found
    return found.reason


def test_a_plain_row():
    found = read()
    training = found.training
    assert (training.tp, training.pp, training.dp, training.micro_batch, training.micro_batches) == (4, 4, 4, 2, 32)
    assert (training.engine, training.recompute) == ("megatron-lm", "full")
    assert training.program_states is PROGRAMS["megatron-2021-fp16"]
    assert training.shape.padded_vocab == 50688  # 99 times 128 x tp 4
    assert str(found.training.layout) == "tp4-pp4-dp4"
    assert (found.published.step_s, found.published.memory_gib, found.published.fits) == (9.0, 22.0, True)
    assert found.assumed == ()


def test_a_field_that_nothing_replaces_is_named():
    for field in ("hidden", "layers", "heads", "seq", "micro_bs", "device", "gpus_per_node"):
        assert f"{field} is missing" in reason(**{field: None})


def test_several_missing_fields_are_all_named():
    assert reason(hidden=None, seq=None) == "hidden and seq are missing"


FOLLOWS = [
    ({"dp": None}, "dp", 4),
    ({"tp": None}, "tp", 4),
    ({"gpus": None}, "gpus", 64),
    ({"global_bs": None, "grad_accum": 5}, "micro_batches", 5),
    ({"micro_bs": None, "grad_accum": 16}, "micro_batch", 4),
    ({"global_bs": None, "tokens_per_batch": 2048 * 256}, "global_batch", 256),
    ({"global_bs": None, "tokens_per_batch": 16e6, "seq": 8192}, "global_batch", 2048),
    ({"zero_stage": None}, "zero_stage", 0),
    ({"recompute": "full (config use_checkpoint=true)"}, "recompute", "full"),
    ({"recompute": "none"}, "recompute", "none"),
    ({"recompute": "selective"}, "recompute", "selective"),
    ({"schedule": "1F1B interleaved (scatter/gather)"}, "vp", 2),
    ({"schedule": "1F1B interleaved (scatter/gather)", "layers": 60}, "vp", 3),
    ({"schedule": "1F1B"}, "vp", 1),
    ({"partition": "transformer|embedding balanced", "layers": 30}, "stage_layers", (7, 8, 8, 7)),
    ({"partition": "uniform"}, "stage_layers", None),
    ({"partition": "parameters", "layers": 14, "hidden": 1024}, "stage_layers", (1, 6, 6, 1)),
    ({"partition": [5, 9, 9, 9]}, "stage_layers", (5, 9, 9, 9)),
    ({"micro_bs": None, "global_bs": 4}, "micro_batch", 1),
    ({"zero_stage": 1, "stack": "Megatron-Core"}, "sharded_optimizer", True),
    ({"optimizer": "distributed Adam"}, "sharded_optimizer", True),
    ({"fsdp": 1}, "engine", "megatron-lm"),
    ({"stack": "Megatron-DeepSpeed"}, "engine", "deepspeed-3d"),
    ({"stack": "Megatron 2.4 (jeffra/DSE)"}, "engine", "megatron-lm"),
    (
        {"stack": "Megatron-DeepSpeed", "dtype": "bf16 (BF16Optimizer)"},
        "program_states",
        PROGRAMS["bf16-optimizer"],
    ),
    ({"sequence_parallel": True}, "sequence_parallel", True),
    ({"device": "h100-80g", "dtype": "bf16"}, "flash", True),
    ({"dtype": "bf16"}, "flash", False),
    ({"dtype": "bf16", "stack": "Megatron-Core, Transformer Engine"}, "flash", True),
    ({"dtype": "bf16", "flash_attention": True}, "flash", True),
    ({"dtype": None}, "dtype", "bf16"),
    ({"dtype": None, "device": "v100-32g"}, "dtype", "fp16"),
    ({"dtype": "bf16 mixed"}, "dtype", "bf16"),
    ({"offload": "optimizer"}, "offload", "optimizer"),
    ({"distributed_optimizer": True}, "program_states", PROGRAMS["megatron"]),
]


def test_what_follows_or_is_said_in_the_sources_words():
    found = [(fields, name, getattr(read(**fields).training, name)) for fields, name, _ in FOLLOWS]
    assert found == FOLLOWS


SHARDED = [
    ({"sharding": "FULL_SHARD"}, "fsdp", 3, "none"),
    ({"sharding": "SHARD_GRAD_OP"}, "fsdp", 2, "none"),
    ({"sharding": "NO_SHARD"}, "ddp", 0, "none"),
    ({"stack": "nanoGPT (PyTorch DDP)"}, "ddp", 0, "none"),
    ({"stack": "torchtitan", "zero_stage": 3}, "fsdp", 3, "none"),
    ({"fsdp": 64, "zero_stage": 3, "options": "FSDP"}, "fsdp", 3, "none"),
    ({"zero_stage": 3}, "deepspeed-zero", 3, "none"),
    ({"zero_stage": 3, "stack": "HF + DeepSpeed"}, "hf-deepspeed", 3, "none"),
    ({"stack": "Megatron-v1.1.5-ZeRO3", "zero_stage": None}, "deepspeed-zero", 3, "none"),
    ({"parallelism": "zero2(dp64)", "tp": None, "pp": None, "dp": None, "zero_stage": None}, "deepspeed-zero", 2,
     "none"),
    ({"zero_stage": 3, "options": {"Opt Offl": "Y", "Par Offl": "N"}}, "deepspeed-zero", 3, "optimizer"),
    ({"zero_stage": 3, "options": {"Opt Offl": "Y", "Par Offl": "Y"}}, "deepspeed-zero", 3, "full"),
    ({"zero_stage": 3, "citation": "Full Offload", "options": {"Opt Offl": "N"}}, "deepspeed-zero", 3, "none"),
]  # fmt: skip


def test_sharded_stacks():
    for fields, *expected in SHARDED:
        training = read(**{"tp": 1, "pp": 1, "dp": 64, "global_bs": 256, **fields}).training
        assert [training.engine, training.zero_stage, training.offload] == expected, fields
        assert (training.tp, training.pp, training.dp) == (1, 1, 64), fields


def test_parallelism_in_words():
    training = read(parallelism="zero1(dp2)+tp2+pp4", tp=None, pp=None, dp=None, zero_stage=None, gpus=16).training
    assert (training.tp, training.pp, training.dp, training.zero_stage) == (2, 4, 2, 1)


def test_llama():
    shape = read(kv_heads=8, ffn=14336, vocab=128256, tp=1, pp=1, dp=64, sharding="FULL_SHARD").training.shape
    assert (shape.mlp, shape.tied, shape.bias, shape.positions, shape.mlp_width) == (
        "swiglu",
        False,
        "none",
        "rope",
        14336,
    )
    assert shape.padded_vocab == 128256  # FSDP pads nothing
    shape = read(model="Llama-like 7B").training.shape
    assert shape.mlp_width == 11008
    assert read(swiglu=False, untied=True, ffn=1024).training.shape.mlp == "gelu"


def test_vocab_that_is_not_stated():
    assert read(vocab=None).training.shape.padded_vocab == 51200


def test_memory_without_a_batch_fills_the_pipeline():
    found = read(global_bs=None, sec_per_iter=None)
    assert found.training.micro_batches == 4
    assert found.assumed == ("4 micro-batches",)
    assert reason(global_bs=None, memory_gib=None) == "global_bs is missing beside a time"
    assert read(global_bs=None).published.step_s is None


LEFT_OUT = [
    ({"dtype": "bf16 + float8"}, "FP8"),
    ({"dtype": "fp8"}, "FP8"),
    ({"dtype": "MXFP8 hybrid"}, "FP8"),
    ({"cp": 2}, "context parallelism"),
    ({"moe": True}, "MoE"),
    ({"ep": 8}, "MoE"),
    ({"model": "Mixtral 8x7B"}, "MoE"),
    ({"moe": {"experts": 8}}, "MoE"),
    ({"partition": [8, 8, 8, 9]}, "partition is [8, 8, 8, 9]"),
    ({"schedule": "ZB-H1 zero bubble"}, "schedule 'ZB-H1"),
    ({"sharding": "HYBRID_SHARD"}, "hybrid sharding"),
    ({"fsdp": 8, "tp": 1, "pp": 1, "dp": 64}, "hybrid sharding"),
    ({"zero_stage": 2}, "zero_stage 2 with pp 4"),
    ({"gpus": 63}, "gpus is 63"),
    ({"global_bs": 4}, "global_bs 4 is less than micro_bs 2 x dp 4"),
    ({"heads": 24}, "hidden 4096 is not a multiple of heads 24"),
    ({"heads": 2}, "tp 4 does not divide"),
    ({"kv_heads": 5}, "kv_heads 5"),
    ({"layers": 2}, "pp 4"),
    ({"hidden": -4096}, "hidden is -4096"),
    ({"layers": "32"}, "layers is '32'"),
    ({"sec_per_iter": 0}, "sec_per_iter is 0"),
    ({"memory_gib": -3}, "memory_gib is -3"),
    ({"memory_kind": "guessed"}, "memory_kind is 'guessed'"),
    ({"memory_kind": None}, "memory_kind is missing"),
    ({"zero_stage": 4}, "zero_stage is 4"),
    ({"device": "abacus"}, "abacus"),
    ({"fabric": None}, "fabric is missing"),
    ({"fabric": "string"}, "string"),
    ({"fits": "maybe"}, "fits is 'maybe'"),
    ({"dtype": "int3"}, "dtype is 'int3'"),
    ({"recompute": "sometimes"}, "recompute is 'sometimes'"),
    ({"memory_by_stage_gib": {"9": [1, 2, 3]}}, "stage '9'"),
    ({"memory_by_stage_gib": {"0": [1, 2]}}, "stage 0"),
    ({"device": "v100-32g", "dtype": "bf16"}, "bf16"),
]


def test_left_out_with_the_field_named():
    wrong = [(fields, words, found) for fields, words in LEFT_OUT if words not in (found := reason(**fields))]
    assert not wrong


def test_what_joins_nodes_matters_only_between_nodes():
    one_node = {"gpus": 8, "tp": 4, "pp": 2, "dp": 1}
    assert read(fabric="some switch", **one_node).machine.network_gb_s == 0
    assert read(fabric=None, **one_node).machine.network_gb_s == 0
    assert "some switch" in reason(fabric="some switch")
    assert "fabric 'nvlink' joins no nodes, but gpus 64" in reason(fabric="nvlink", memory_gib=None)
    assert read(fabric="nvlink").published.step_s is None
    assert read(fabric="nvlink").published.memory_gib == 22.0


def test_ep_of_one_is_dense_and_cp_of_one_is_none():
    assert read(ep=1, cp=1, moe=False).training == read().training


def test_both_shapes_of_file(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"note": "x", "rows": [row(), row(hidden=None), 5]}))
    rows = read_rows(path)
    assert [type(entry) for entry in rows.entries] == [PublishedRow, LeftOut, LeftOut]
    path.write_text(json.dumps({"clusters": {"a": [row()], "b": [row(), row(id=None, source=None)]}}))
    rows = read_rows(path)
    assert [(entry.cluster, entry.id, entry.source) for entry in rows.rows] == [
        ("a", "made-1", "made"), ("b", "made-1", "made"), ("b", "row 2", "b"),
    ]  # fmt: skip
    assert rows.rows[0].machine is rows.rows[1].machine


def test_a_file_of_neither_shape_or_none_is_refused_in_words(tmp_path):
    path = tmp_path / "rows.json"
    for text in ("", "{", "[]", '{"rows": 3}', '{"clusters": []}', '{"clusters": {"a": 3}}', "{}"):
        path.write_text(text)
        with pytest.raises(ConfigError) as raised:
            read_rows(path)
        assert '"rows"' in raised.value.hint
    with pytest.raises(ConfigError):
        read_rows(tmp_path / "none.json")
