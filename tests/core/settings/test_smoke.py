"""A smoke run is always small, always resolves, and keeps the engine with every switch."""

from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hpc_gpt.core.engines import engine_named, engines
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.settings.cluster import ClusterProfile, load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Command, Data, Engine, Experiment, Job, LayoutRequest, Model, Train
from hpc_gpt.core.settings.experiment_file import find_sweep, list_experiments, load_experiment
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model import resolve_shape
from hpc_gpt.core.settings.presets import PRESETS
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.shape_split import check_split
from hpc_gpt.core.slurm.directives import job_faults
from hpc_gpt.core.weights.classes import architecture_of
from hpc_gpt.launcher.smoke import shrink

SITE = ClusterProfile(name="site", gpus_per_node=8)
HERE = load_profile("local")
# What a small layout or model cannot keep as it is.
ADAPTED = {"partition", "loss_chunks", "attention", "recompute"}

SIZES = st.sampled_from([1, 2, 3, 4, 8])
SWITCHES = {
    "recompute": st.sampled_from(["selective", "full", "1/2"]),
    "attention": st.sampled_from(["flash", "cudnn", "efficient", "math"]),
    "compile": st.sampled_from(["block", "edges", "whole"]),
    "compile_backend": st.just("aot_eager"),
    "sequence_parallel": st.just(True),
    "offload": st.sampled_from(["optimizer", "full"]),
    "tiles": st.sampled_from([2, 4]),
    "activation_offload": st.just(True),
    "loss_chunks": st.sampled_from([8, 1000]),
    "keep_residuals": st.just(True),
    "one_pass_loss": st.just(True),
    "sharded_optimizer": st.just(True),
    "cp_exchange": st.sampled_from(["heads", "keys", "ring"]),
    "prefetch": st.just(False),
    "reshard": st.just(False),
    "gather_blocks": st.just(2),
    "megatron_args": st.sampled_from([(), ("--transformer-impl", "local")]),
}


@st.composite
def tables(draw, layers: int, pp: int, name: str) -> Engine:
    """An engine with a few of the switches that it takes, which may still contradict each other."""
    offer = engine_named(name)
    chosen = draw(st.sets(st.sampled_from(sorted(offer.switches - {"partition"})), max_size=4))
    values = {key: draw(SWITCHES[key]) for key in sorted(chosen)}
    if "partition" in offer.switches and pp > 1:
        cuts = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=pp - 1, max_size=pp - 1)))
        blocks = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
        values["partition"] = draw(st.sampled_from(["layers", "parameters", blocks]))
    return Engine(name=name, zero_stage=draw(st.sampled_from([None, *offer.zero_stages])), **values)


@st.composite
def experiments(draw) -> Experiment:
    name = draw(st.sampled_from(sorted(engines())))
    tp = draw(st.sampled_from([1, 2, 4, 8])) if "tp" in engine_named(name).axes else 1
    pp = draw(SIZES) if "pp" in engine_named(name).axes else 1
    layers = pp * draw(st.integers(1, 5)) + draw(st.integers(0, pp - 1))
    cp = draw(st.sampled_from([1, 2, 4])) if "cp" in engine_named(name).axes else 1
    heads = tp * cp * draw(st.integers(1, 4))
    shard = draw(st.sampled_from([None, 2])) if name == "fsdp" else None
    return Experiment(
        name="real",
        model=Model(hidden=heads * draw(st.sampled_from([1, 8, 64])), layers=layers, heads=heads,
                    seq=draw(st.integers(1, 64)) * tp * (2 * cp if cp > 1 else 1), tied=draw(st.booleans()),
                    vocab=draw(st.sampled_from([3, 65, 50257])), vocab_multiple=tp * draw(st.sampled_from([1, 5, 64]))),
        data=Data(source=draw(st.sampled_from(["stdlib", "random"]))),
        engine=draw(tables(layers, pp, name)),
        # dp 8: on nodes of 8 GPUs every product of the others with it fills whole nodes.
        layout=LayoutRequest(tp=tp, pp=pp, cp=cp, dp=draw(st.sampled_from([1, 8])), micro_batch=draw(SIZES),
                             micro_batches=draw(SIZES), shard=shard),
        train=Train(steps=draw(st.integers(1, 10**6)), dtype=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
                    minutes=draw(st.sampled_from([None, 5.0])), log_every=draw(st.integers(1, 100)),
                    eval_every=draw(st.sampled_from([0, 100])), save_every=draw(st.sampled_from([0, 500]))),
        job=Job(time=draw(st.sampled_from([None, "20:00:00"])), signal_lead_s=draw(st.sampled_from([None, 900]))),
    )  # fmt: skip


def real_of(experiment: Experiment, profile: ClusterProfile = SITE) -> Resolved:
    try:
        return resolve(experiment, profile)
    except UserError:
        assume(False)
        raise


def check(real: Resolved, small: Resolved, has_gpu: bool) -> None:
    for axis in ("tp", "pp", "cp"):
        assert getattr(small.layout, axis) == min(2, getattr(real.layout, axis))
    if real.layout.shard is None:
        assert small.layout.dp == min(2, real.layout.dp) or small.gpus == 8
    else:
        assert (small.layout.shard, small.layout.data_ranks) == (2, 4)
    assert small.gpus <= 8
    assert small.model.hidden <= 64 or small.model.hidden == real.model.hidden <= 64
    assert small.model.layers <= 2 * small.layout.pp
    assert small.model.seq <= 64
    assert small.batch.micro_batch <= 2
    assert small.batch.micro_batches <= (4 if small.layout.pp > 1 else 2)
    assert small.engine.loss_chunks <= 64
    assert (small.model.tied, small.model.vocab) == (real.model.tied, 256)
    assert (small.train.steps, small.train.minutes) == (5, None)
    for key, value in asdict(real.engine).items():
        if key not in ADAPTED:
            assert getattr(small.engine, key) == value, key
    assert (small.engine.partition == "layers") == (real.engine.partition == "layers")
    assert (small.engine.loss_chunks > 1) == (real.engine.loss_chunks > 1)
    assert (small.batch.micro_batches > 1) == (real.batch.micro_batches > 1)
    if has_gpu:
        assert (small.engine.attention, small.train.dtype) == (real.engine.attention, real.train.dtype)
    assert bool(small.train.eval_every) == bool(real.train.eval_every)
    assert bool(small.train.save_every) == bool(real.train.save_every)
    assert not [*job_faults(small.job, small.cluster)]
    engine_named(small.engine.name).config_files(small)


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(experiments(), st.booleans())
def test_a_shrunken_run_always_resolves_and_keeps_every_switch(experiment, has_gpu):
    real = real_of(experiment)
    small = shrink(experiment, real, has_gpu)
    for profile in (HERE, SITE):
        check(real, resolve(small.experiment, profile), has_gpu)


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(experiments())
def test_shrinking_twice_changes_nothing_more(experiment):
    once = shrink(experiment, real_of(experiment), has_gpu=False).experiment
    again = shrink(once, resolve(once, HERE), has_gpu=False)
    assert replace(again.experiment, name=once.name) == once
    assert again.notes == ()


@pytest.mark.parametrize("name", [name for name in list_experiments() if find_sweep(name)])
def test_every_row_of_every_published_table_shrinks(name):
    sweep = find_sweep(name)
    assert sweep is not None
    for row in sweep.possible:
        experiment = load_experiment(name, {}, row.name)
        real = resolve(experiment, load_profile("generic-slurm"))
        small = shrink(experiment, real, has_gpu=False)
        check(real, resolve(small.experiment, HERE), has_gpu=False)
        assert (small.experiment.data.source, small.experiment.data.path) in (
            ("stdlib", None), ("random", None), (real.data.source, "stdlib"),
        ), row.name  # fmt: skip


def test_what_cannot_stay_is_said():
    experiment = Experiment(
        model=Model(preset="gpt2"), engine=Engine(attention="cudnn"), layout=LayoutRequest(gpus=4),
        train=Train(dtype="fp16"),
    )  # fmt: skip
    smoke = shrink(experiment, resolve(experiment, SITE), has_gpu=False)
    assert smoke.notes == (
        "DeepSpeed does not train in fp16 on a CPU: bf16 here",
        "engine.attention cudnn needs a GPU: auto here",
    )
    assert (smoke.experiment.train.dtype, smoke.experiment.engine.attention) == ("bf16", "auto")
    assert shrink(experiment, resolve(experiment, SITE), has_gpu=True).notes == ()


def test_stated_steps_saves_and_time_stay():
    stated = {"train.steps": 1000, "train.save_every": 50, "job.time": "00:05:00"}
    experiment = load_experiment("demo", stated)
    real = resolve(experiment, load_profile("generic-slurm"))
    small = shrink(experiment, real, has_gpu=False, stated=stated).experiment
    assert (small.train.steps, small.train.save_every, small.job.time) == (1000, 50, "00:05:00")
    small = shrink(experiment, real, has_gpu=False, stated=("train.steps",)).experiment
    assert (small.train.steps, small.train.save_every, small.job.time) == (1000, 1000, "00:10:00")
    small = shrink(experiment, real, has_gpu=False).experiment
    assert (small.train.steps, small.train.save_every, small.job.time) == (5, 5, "00:10:00")


@pytest.mark.parametrize(
    ("name", "tp"), [("llama3.1-8b", 2), ("qwen3-0.6b", 1), ("qwen2.5-7b", 2), ("smollm3-3b", 1), ("smollm2-135m", 2)]
)
def test_another_shape_stays_of_its_kind(name, tp):
    engine, layout = Engine(name="deepspeed-3d"), LayoutRequest(gpus=8 * tp, tp=tp, pp=1, micro_batch=1)
    experiment = Experiment(model=Model(preset=name), engine=engine, layout=layout)
    if PRESETS[name].heads % tp:
        experiment = replace(experiment, model=Model(preset=name, heads=8, kv_heads=4, hidden=512, ffn=1024))
    profile = ClusterProfile(name="test", gpus_per_node=8)
    real = resolve(experiment, profile)
    small = resolve(shrink(experiment, real, has_gpu=False).experiment, ClusterProfile(name="here", gpus_per_node=8))
    assert architecture_of(small.model) == architecture_of(real.model)
    assert small.model.is_grouped is real.model.is_grouped
    assert (small.model.query_width == small.model.hidden) is (real.model.query_width == real.model.hidden)
    assert small.model.params < 500_000
    if real.model.rope_scaling is not None:
        assert small.model.rope_scaling.original_max_position_embeddings < small.model.seq


@pytest.mark.parametrize("name", [name for name, shape in PRESETS.items() if shape.is_mixture])
def test_a_mixture_stays_one(name):
    profile, layout = ClusterProfile(name="test", gpus_per_node=8), LayoutRequest(gpus=16, tp=2, ep=4, pp=1)
    model = Model(preset=name)
    program = Experiment(model=model, engine=Engine(name="command"), layout=layout, command=Command(run="train"))
    small = shrink(program, resolve(program, profile), has_gpu=False).experiment
    shape, real = resolve_shape(small.model), PRESETS[name]
    assert shape.special_keys == real.special_keys
    assert (shape.expert_groups is None) is (real.expert_groups is None)
    assert (shape.shared_ffn is None) is (real.shared_ffn is None)
    assert shape.params < 500_000
    assert small.layout.ep == 2
    check_split(shape, Layout(2, 1, 2, ep=2))
