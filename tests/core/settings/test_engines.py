"""What each engine takes, and what is refused with the nearest setting that works."""

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.engines import engines
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.resolved import Resolved

EIGHT = ClusterProfile(name="eight", gpus_per_node=8)


def settle(engine: Engine, layout: LayoutRequest | None = None, train: Train | None = None) -> Resolved:
    layout = layout or LayoutRequest(gpus=4)
    layout = replace(layout, global_batch=64, micro_batch=1)
    model = Model(hidden=64, layers=4, heads=4, vocab=256, seq=32)
    return resolve(Experiment(model=model, engine=engine, layout=layout, train=train or Train()), EIGHT)


PIPELINE = LayoutRequest(gpus=4, tp=1, pp=2, dp=2)
TENSOR = LayoutRequest(gpus=4, tp=2, pp=1, dp=2)
ALONE = LayoutRequest(gpus=1)


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
    "gather_blocks": [None, 2],
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
