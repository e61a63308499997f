"""ep and a mixture's keys in a resolved run: its text, hash, split and record."""

from typing import Any

import pytest

from hpc_gpt.core.formulas import tflops_hardware, tflops_model, tflops_seed
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, LayoutRequest
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.resolved import Resolved, config_hash
from hpc_gpt.core.settings.shape_split import (
    expert_params,
    kind_params,
    layers_params,
    outer_params,
    partition_layers,
    stage_kinds,
)
from hpc_gpt.core.settings.stored import experiment_of
from hpc_gpt.reader.runs.figures import add_figures
from hpc_gpt.reader.runs.own_run import figures_asked

PROFILE = ClusterProfile(name="test", gpus_per_node=8)


def run(name: str = "qwen3-30b-a3b", **layout: Any) -> Resolved:
    request = LayoutRequest(**({"gpus": 16, "tp": 1, "pp": 1} | layout))
    program = Experiment(
        model=Model(preset=name), engine=Engine(name="command"), layout=request, command=Command(run="train")
    )
    return resolve(program, PROFILE)


def test_ep_of_one_changes_neither_text_nor_hash():
    plain, one, eight = run(), run(ep=1), run(ep=8)
    assert plain.to_json() == one.to_json()
    assert '"ep"' not in plain.to_json()
    assert config_hash(plain) == config_hash(one) != config_hash(eight)
    assert str(eight.layout) == "tp1-pp1-dp16-ep8"
    assert config_hash(run(tp=2, ep=4, etp=2)) == config_hash(run(tp=2, ep=4)) != config_hash(run(tp=2, ep=4, etp=1))


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "olmoe-1b-7b", "deepseek-v3", "gpt-oss-20b", "glm-4.5"])
def test_a_mixture_is_read_again_as_it_was_resolved(name):
    resolved = run(name, ep=4)
    assert Resolved.from_json(resolved.to_json()) == resolved
    assert resolve(experiment_of(resolved), PROFILE) == resolved


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"])
@pytest.mark.parametrize(("tp", "pp", "ep", "etp"), [(1, 1, 1, None), (2, 4, 4, None), (4, 2, 8, 1)])
def test_the_stages_of_all_ranks_have_all_parameters(name, tp, pp, ep, etp):
    shape = preset(name)
    stages = stage_kinds(shape, partition_layers(shape, pp))
    assert [sum(counts) for counts in zip(*stages, strict=True)] == [kind.count for kind in shape.kinds]
    experts = sum(counts[-1] * expert_params(shape.kinds[-1], tp, ep, etp) * ep * (etp or tp) for counts in stages)
    assert experts == pytest.approx(shape.expert_params)
    for kind in shape.kinds:
        assert kind_params(kind, 1) == kind.params
    if (tp, ep) == (1, 1):
        outside = sum(outer_params(shape, 1, pp, stage) for stage in range(pp))
        assert sum(layers_params(shape, counts, 1) for counts in stages) + outside == shape.params


def test_stages_by_parameters_give_a_dense_prefix_fewer_experts():
    shape = preset("deepseek-v3")
    dense, whole = partition_layers(shape, 8, "parameters"), partition_layers(shape, 8)
    assert sum(dense) == sum(whole) == shape.layers
    assert dense[0] > whole[0]  # dense layers are small


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b"])
def test_a_record_counts_what_a_token_uses(name):
    resolved, shape = run(name, ep=4), preset(name)
    figures = figures_asked(resolved)
    assert (figures["ep"], figures["params"], figures["params_active"]) == (4, shape.params, shape.params_active)
    batch = {"global_batch": 64, "step_s": 2.0}
    model = {key: value for key, value in shape.table().items() if key not in figures}
    record = add_figures(Record(**figures | batch, settings={"model": model}))  # type: ignore[arg-type]
    counted: dict[str, Any] = {"seq": shape.seq, "gpus": 16, **batch}
    attention: dict[str, Any] = {"layers": shape.attention_layers, "attention_keys": shape.attention_keys}
    expected = tflops_model(params=shape.multiplied, hidden=shape.attention_width, **attention, **counted)
    assert record.tflops_model == pytest.approx(expected)
    hardware = tflops_hardware(
        hidden=shape.hidden, vocab=shape.padded_vocab * (1 + shape.mtp_layers), recompute="none",
        layer_weights=shape.layer_weights, attention_width=shape.attention_width, **attention, **counted,
    )  # fmt: skip
    assert record.tflops_hardware == pytest.approx(hardware)
    assert record.tflops_seed == pytest.approx(tflops_seed(params=shape.params_active, recompute="none", **counted))
    assert not record.flags
