"""From an experiment to a question, and why a question has no answer."""

from dataclasses import replace

import pytest

from hpc_gpt.errors import ConfigError, LayoutError
from hpc_gpt.plan.machine import Machine, check_dtype
from hpc_gpt.plan.question import check_possible, divisors, question_of, working_counts
from hpc_gpt.plan.search import fewest_gpus, search
from hpc_gpt.plan.training import engine_for, training_of
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.settings.resolve import resolve

PROFILE = ClusterProfile("test", device="v100-32g", gpus_per_node=4)


def experiment(layout=None, engine=None, **train):
    return Experiment(
        model=Model(preset="gpt2-xl"),
        layout=LayoutRequest(**{"gpus": 16, "global_batch": 64, **(layout or {})}),
        engine=Engine(**(engine or {})),
        train=Train(**{"dtype": "fp16", **train}),
    )


def test_nothing_holds_unless_it_is_said_to():
    asked = experiment({"tp": 5, "pp": 2, "micro_batch": 4}, {"recompute": "full", "zero_stage": 1})
    question = question_of(asked, PROFILE)
    assert question.fixed == {}
    assert question.global_batch == 64
    assert question.gpus == 16
    holds = {"layout.tp", "layout.micro_batch", "engine.recompute"}
    assert question_of(asked, PROFILE, holds).fixed == {"tp": 5, "micro_batch": 4, "recompute": "full"}


@pytest.mark.parametrize(
    ("layout", "holds", "batch"),
    [
        ({"global_batch": None, "tp": 1, "pp": 2, "micro_batch": 2, "micro_batches": 4}, (), 64),
        ({"global_batch": None, "micro_batch": 2, "micro_batches": 4}, (), 2 * 4 * 16),
        ({"global_batch": None, "tp": 3, "micro_batch": 2, "micro_batches": 4}, (), 8),  # cannot run here
        ({"micro_batches": 4}, ("layout.micro_batches",), None),
        ({"micro_batches": 4}, ("layout.micro_batches", "layout.global_batch"), 64),
    ],
)
def test_the_batch_is_the_experiments_or_follows(layout, holds, batch):
    asked = experiment(layout)
    if layout.get("global_batch", 0) is None and "tp" not in layout:
        asked = replace(asked, layout=replace(asked.layout, tp=1))
    assert question_of(asked, PROFILE, holds).global_batch == batch


@pytest.mark.parametrize(("layout", "gpus"), [({"gpus": None, "nodes": 3}, 12), ({"gpus": None}, 4), ({"gpus": 2}, 2)])
def test_gpus_are_counted_as_the_launcher_does(layout, gpus):
    assert question_of(experiment(layout), PROFILE).gpus == gpus


def test_one_machine_has_its_own_gpus_alone():
    with pytest.raises(LayoutError, match="this one machine"):
        question_of(experiment(), replace(PROFILE, scheduler="local"))


def test_what_is_said_to_work_works_and_what_is_not_does_not():
    asked = experiment({"gpus": 28, "pp": 8}, {"name": "deepspeed-3d"})
    question = question_of(asked, PROFILE, {"layout.pp"})
    words = "no layout of it can run on 28 GPUs with pp 8: pp does not divide 28"
    with pytest.raises(LayoutError, match=words) as refusal:
        check_possible(question, asked, PROFILE, "it")
    counts = working_counts(question)
    assert counts == [8, 16, 32]
    assert refusal.value.hint == "use --gpus 8 or 16 or 32"
    for count in counts:
        works = replace(asked, layout=replace(asked.layout, gpus=count))
        check_possible(question_of(works, PROFILE, {"layout.pp"}), works, PROFILE, "it")
    for count in set(range(4, 40, 4)) - set(counts):
        fails = replace(asked, layout=replace(asked.layout, gpus=count))
        with pytest.raises(LayoutError):
            check_possible(question_of(fails, PROFILE, {"layout.pp"}), fails, PROFILE, "it")


def test_a_dtype_without_a_unit_is_refused():
    machine = Machine("v100-32g", 31.7, {"fp32": 15.7, "fp16": 125.0}, 900, 4, 150, 50, 12)
    check_dtype("fp16", machine)
    with pytest.raises(ConfigError, match=r"v100-32g has no unit for train\.dtype bf16"):
        check_dtype("bf16", machine)


def test_the_fewest_gpus_fit_and_half_of_them_do_not():
    machine = Machine("v100-32g", 6.0, {"fp16": 125.0}, 900, 4, 150, 50, 12)
    asked = experiment({"gpus": 1}, {"name": "deepspeed-3d"})
    question = question_of(asked, PROFILE, {"engine.name"})
    count = fewest_gpus(question, machine)
    assert count is not None
    assert search(replace(question, gpus=count), machine).candidates
    assert not search(replace(question, gpus=count // 2), machine).candidates
    assert fewest_gpus(question, replace(machine, memory_gib=0.1), most=64) is None


@pytest.mark.parametrize(
    "engine",
    [
        {"zero_stage": 1, "recompute": "full", "partition": "parameters", "attention": "math", "compile": "block"},
        {"name": "deepspeed-zero", "zero_stage": 3, "offload": "full", "tiles": 4, "activation_offload": True},
        {"name": "megatron-lm", "megatron_args": ("--num-layers-per-virtual-pipeline-stage", "6", "--bias")},
        {
            "name": "megatron-lm",
            "sharded_optimizer": True,
            "megatron_args": ("--num-layers-per-virtual-pipeline-stage=4",),
        },
    ],
)
def test_a_training_and_the_engine_that_runs_it_are_each_others(engine):
    pp = 1 if engine.get("name") == "deepspeed-zero" else 4
    asked = experiment({"tp": 1, "pp": pp}, engine)
    resolved = resolve(asked, PROFILE)
    training = training_of(resolved)
    again = engine_for(training, asked.engine)
    assert training_of(resolve(replace(asked, engine=again), PROFILE)) == training
    words = engine.get("megatron_args", ())
    assert training.vp == (1 if not words else 2 if "6" in words else 3)
    assert ("--bias" in words) == ("--bias" in again.megatron_args)


def test_divisors_are_all_of_them():
    for number in range(1, 200):
        assert divisors(number) == tuple(size for size in range(1, number + 1) if number % size == 0)
