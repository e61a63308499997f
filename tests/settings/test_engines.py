"""What each engine takes, and what is refused with the nearest setting that works."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.engines import engines
from hpc_gpt.errors import UserError
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.settings.resolve import resolve
from hpc_gpt.settings.resolved import Resolved

EIGHT = ClusterProfile(name="eight", gpus_per_node=8)


def settle(engine: Engine, layout: LayoutRequest | None = None, train: Train | None = None) -> Resolved:
    layout = layout or LayoutRequest(gpus=4)
    layout = replace(layout, global_batch=64, micro_batch=1)
    model = Model(hidden=64, layers=4, heads=4, vocab=256, seq=32)
    return resolve(Experiment(model=model, engine=engine, layout=layout, train=train or Train()), EIGHT)


PIPELINE = LayoutRequest(gpus=4, tp=1, pp=2, dp=2)
TENSOR = LayoutRequest(gpus=4, tp=2, pp=1, dp=2)
ALONE = LayoutRequest(gpus=1)


@pytest.mark.parametrize(
    ("engine", "layout", "train", "words", "hint"),
    [
        (Engine(zero_stage=2), PIPELINE, None, "pp 2 with ZeRO-2 cannot run", "--zero-stage 1"),
        (Engine(zero_stage=2), TENSOR, None, "deepspeed-3d runs ZeRO 0, 1, not 2", "--zero-stage 1"),
        (Engine("deepspeed-zero"), PIPELINE, None, "pp 2 cannot run on engine deepspeed-zero", "--pp 1"),
        (Engine("hf-deepspeed"), TENSOR, None, "tp 2 cannot run on engine hf-deepspeed", "--tp 1"),
        (Engine("ddp"), TENSOR, None, "tp 2 cannot run on engine ddp", "fsdp"),
        (Engine("fsdp", zero_stage=3), None, None, "fsdp takes no engine.zero_stage", "as ZeRO-3 does"),
        (Engine("hf-deepspeed", zero_stage=0), None, None, "hf-deepspeed runs ZeRO 1, 2, 3, not 0", "--zero-stage 1"),
        (Engine("deepspeed-zero", zero_stage=5), None, None, "but must be 0, 1, 2 or 3", "use 1"),
        (Engine("ddp", offload="full"), None, None, "engine.offload is full, which engine ddp", "deepspeed-zero"),
        (Engine("fsdp", offload="optimizer"), None, None, "not the optimizer alone", '"full"'),
        (Engine("deepspeed-zero", offload="full"), None, None, "only ZeRO-3 can; engine.zero_stage is 1", "stage 3"),
        (Engine("deepspeed-zero", zero_stage=0, offload="optimizer"), None, None, "offloads none", "--zero-stage 1"),
        (
            Engine("deepspeed-zero", zero_stage=2, offload="optimizer", offload_path="/nvme"),
            None,
            None,
            "offloads to NVMe, which only ZeRO-3 can",
            "leave the path out",
        ),
        (Engine("deepspeed-zero", offload_path="/nvme"), None, None, "engine.offload is none", '"optimizer"'),
        (
            Engine("deepspeed-zero", zero_stage=3, offload="optimizer", offload_ratio=0.0),
            None,
            None,
            "offload_ratio is 0.0, but must be above 0",
            "1.0",
        ),
        (
            Engine("deepspeed-zero", zero_stage=2, offload="optimizer", offload_ratio=0.5),
            None,
            None,
            "ZeRO-2 offloads all or nothing",
            "1.0",
        ),
        (
            Engine("deepspeed-zero", offload="optimizer"),
            None,
            Train(optimizer_mode="fused"),
            "optimizer_mode is fused, but the host updates what is offloaded",
            "leave train.optimizer_mode out",
        ),
        (
            Engine("deepspeed-zero", offload="optimizer"),
            None,
            Train(optimizer_mode="foreach"),
            "optimizer_mode is foreach, but the host updates what is offloaded",
            "leave train.optimizer_mode out",
        ),
        (
            Engine("deepspeed-zero", zero_stage=3, offload="optimizer", offload_path="/nvme", offload_ratio=0.5),
            None,
            None,
            "NVMe offloads all or nothing",
            "without a path",
        ),
        (
            Engine("fsdp"),
            None,
            Train(optimizer_mode="compiled"),
            "optimizer_mode is compiled, which engine fsdp does not have",
            "leave train.optimizer_mode out, or use --engine ddp",
        ),
        (
            Engine("deepspeed-zero", offload="optimizer"),
            None,
            Train(optimizer_mode="compiled"),
            "optimizer_mode is compiled, which engine deepspeed-zero does not have",
            "leave train.optimizer_mode out",
        ),
        (
            Engine("ddp"),
            None,
            Train(optimizer_mode="compiled", dtype="fp32"),
            "but train.dtype is fp32, which has no masters",
            '"bf16" or "fp16"',
        ),
        (
            Engine("ddp"),
            None,
            Train(optimizer_mode="compiled", optimizer="sgd"),
            "which is AdamW, but train.optimizer is sgd",
            'train.optimizer = "adamw"',
        ),
        (
            Engine("ddp", sharded_optimizer=True),
            None,
            Train(optimizer_mode="compiled"),
            "engine.sharded_optimizer gives each rank a share",
            "leave train.optimizer_mode or engine.sharded_optimizer out",
        ),
        (Engine("megatron-lm", sharded_optimizer=True), LayoutRequest(gpus=2, tp=2), None, "but dp is 1", "--dp 2"),
        (Engine("deepspeed-zero", zero_stage=3, tiles=33), TENSOR, None, "tp 2 has 32 outputs", "32 or less"),
        (Engine("hf-deepspeed", attention="flash"), None, None, "attention is flash, which engine hf", "math"),
        (Engine("deepspeed-zero", zero_stage=2, tiles=4), None, None, "only ZeRO-3 gathers weights tile", "stage 3"),
        (Engine("deepspeed-zero", zero_stage=3, tiles=65), None, None, "tp 1 has 64 outputs", "64 or less"),
        (Engine("hf-deepspeed", compile="whole"), None, None, "whole with ZeRO-3 is compiled anew", '"block"'),
        (Engine(tiles=0), None, None, "engine.tiles is 0, but must be at least 1", "use 1"),
        (Engine("ddp", loss_chunks=0), None, None, "engine.loss_chunks is 0", "use 1"),
        (Engine("ddp", sharded_optimizer=True), ALONE, None, "but dp is 1", "--dp 2"),
        (Engine(sequence_parallel=True), PIPELINE, None, "but tp is 1", "--tp 2"),
        (Engine(partition=(1, 1)), PIPELINE, None, "[1, 1], 2 stages with 2 layers, but pp is 2", "add up to 4"),
        (Engine(partition=(4, 0)), PIPELINE, None, "every stage needs one", "add up to 4"),
        (Engine(partition="parameters"), TENSOR, None, "there is one stage", "leave it out"),
        (Engine("ddp", prefetch=False), None, None, "engine.prefetch is False, which engine ddp", "fsdp"),
        (Engine("hf-deepspeed", recompute="selective"), None, None, "transformers' model does not have", "full"),
        (Engine("megatron-lm", compile="block"), None, None, "engine.compile is block, which engine megatron", "ddp"),
    ],
)
def test_what_cannot_run_is_refused_with_the_nearest_that_can(engine, layout, train, words, hint):
    with pytest.raises(UserError) as refusal:
        settle(engine, layout, train)
    assert words in str(refusal.value)
    assert hint in refusal.value.hint


def test_what_is_next_to_those_can_run():
    assert settle(Engine("ddp", sharded_optimizer=True)).layout.tp == 1
    assert settle(Engine("deepspeed-zero", zero_stage=3, tiles=32), TENSOR).engine.tiles == 32


def test_an_engine_without_offload_is_not_told_of_zero_stages():
    with pytest.raises(UserError) as refusal:
        settle(Engine("ddp", offload="optimizer"))
    assert str(refusal.value) == "engine.offload is optimizer, which engine ddp does not have"


def test_every_fault_is_said_at_once():
    with pytest.raises(UserError) as refusal:
        settle(Engine("ddp", zero_stage=2, tiles=2, offload="full"), TENSOR)
    assert len(str(refusal.value).splitlines()) >= 4


@pytest.mark.parametrize(
    ("name", "stage"), [("deepspeed-3d", 1), ("deepspeed-zero", 1), ("hf-deepspeed", 3), ("ddp", 0), ("fsdp", 0)]
)
def test_each_engine_has_its_own_zero_stage(name, stage):
    assert settle(Engine(name)).engine.zero_stage == stage


def test_only_an_engine_with_a_pipeline_splits_over_tp_unasked():
    def layout_of(name):
        asked = Experiment(model=Model(preset="7.5b"), engine=Engine(name), layout=LayoutRequest(gpus=8))
        return str(resolve(asked, ClusterProfile("x", gpus_per_node=4)).layout)

    assert layout_of("deepspeed-3d") == "tp4-pp1-dp2"
    for name in ("deepspeed-zero", "fsdp", "ddp", "hf-deepspeed"):
        assert layout_of(name) == "tp1-pp1-dp8"


def test_the_optimizers_mode_follows_from_offload():
    assert settle(Engine()).train.optimizer_mode == "fused"
    assert settle(Engine("deepspeed-zero", offload="optimizer")).train.optimizer_mode == "host"
    assert settle(Engine("ddp"), train=Train(optimizer_mode="for-loop")).train.optimizer_mode == "for-loop"
    compiled = Train(optimizer_mode="compiled", dtype="fp16")
    assert settle(Engine("ddp", compile_backend="aot_eager"), train=compiled).train.optimizer_mode == "compiled"


SWITCHES = {
    "recompute": ["none", "selective", "full"],
    "attention": ["auto", "math"],
    "compile": ["none", "block", "edges", "whole"],
    "sequence_parallel": [False, True],
    "offload": ["none", "optimizer", "full"],
    "tiles": [1, 2],
    "activation_offload": [False, True],
    "loss_chunks": [1, 4],
    "sharded_optimizer": [False, True],
    "prefetch": [True, False],
    "reshard": [True, False],
    "zero_stage": [None, 0, 1, 2, 3],
}


@given(
    st.sampled_from(sorted(engines())),
    st.fixed_dictionaries({key: st.sampled_from(values) for key, values in SWITCHES.items()}),
    st.sampled_from([ALONE, PIPELINE, TENSOR, LayoutRequest(gpus=2)]),
)
def test_what_is_accepted_lies_within_the_offer(name, switches, layout):
    try:
        settled = settle(Engine(name, **switches), layout).engine
    except UserError as refusal:
        assert refusal.hint
        return
    offer = engines()[name]
    assert settled.zero_stage in offer.zero_stages
    changed = {entry.name for entry in fields(Engine) if getattr(settled, entry.name) != getattr(Engine(), entry.name)}
    assert changed <= offer.switches | {"name", "zero_stage"}


LLAMA = {
    "hidden": 64,
    "layers": 4,
    "heads": 8,
    "kv_heads": 2,
    "ffn": 96,
    "seq": 64,
    "vocab": 256,
    "mlp": "swiglu",
    "norm": "rmsnorm",
    "positions": "rope",
    "bias": "none",
}


@pytest.mark.parametrize(
    ("engine", "sizes", "tp", "words", "hint"),
    [
        ({"fused_bias_gradients": True}, {}, 1, "needs GELU, and biases .* swiglu, bias none", "leave engine.fused"),
        ({"zero_stage": 3, "tiles": 2}, {}, 4, "tp 4 gathers each of 2 kv_heads", "--tp 2 or less"),
        ({"name": "hf-deepspeed"}, {"mlp": "gelu"}, 1, "no class of its shape", "--engine deepspeed-3d or deepspeed-z"),
    ],
)
def test_what_another_shape_cannot_have_is_refused(engine, sizes, tp, words, hint):
    def ask(**model):
        engine_ = Engine(**{"name": "deepspeed-zero", **engine})
        layout = LayoutRequest(gpus=tp, tp=tp, pp=1, micro_batch=1)
        experiment = Experiment(model=Model(**model), engine=engine_, layout=layout)
        return resolve(experiment, ClusterProfile(name="test", gpus_per_node=8))

    with pytest.raises(UserError, match=words) as refusal:
        ask(**LLAMA | sizes)
    assert hint in refusal.value.hint
    assert ask(hidden=64, layers=4, heads=8, seq=64, vocab=256).model.is_gpt2
