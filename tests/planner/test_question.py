"""From an experiment to a question, and why a question has no answer."""

import re
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.core.errors import LayoutError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.planner.best_plan import usual_batch
from hpc_gpt.planner.machine import Machine
from hpc_gpt.planner.nearest import (
    check_possible,
    fewest_gpus,
    larger_batch,
    without_offload,
    working_counts,
)
from hpc_gpt.planner.question import Question, question_of
from hpc_gpt.planner.search import search
from tests.planner.machines import machine_named

PROFILE = ClusterProfile("test", device="v100-32g", gpus_per_node=4)


def experiment(layout=None, engine=None, **train):
    return Experiment(
        model=Model(preset="gpt2-xl"),
        layout=LayoutRequest(**{"gpus": 16, "global_batch": 64, **(layout or {})}),
        engine=Engine(**(engine or {})),
        train=Train(**{"dtype": "fp16", **train}),
    )


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


@given(st.integers(1, 19), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=10, deadline=None)
def test_more_steps_of_muon_are_slower(steps: int, gpus: int) -> None:
    layout, machine = {"gpus": gpus, "global_batch": 8 * gpus}, machine_named("h100-80g", 8, "infiniband 8x400G")
    asked = (experiment(layout, optimizer="muon", muon_steps=steps) for steps in (steps, steps + 1))
    few, more = (search(question_of(one, PROFILE, engines=("fsdp",)), machine, keep=1).best for one in asked)
    assert few.step.optimizer_s < more.step.optimizer_s


def test_what_is_said_to_work_works_and_what_is_not_does_not():
    asked = experiment({"gpus": 28, "pp": 8}, {"name": "deepspeed-3d"})
    question = question_of(asked, PROFILE, {"layout.pp"})
    words = "no layout of it can run on 28 GPUs with pp 8: pp does not divide 28"
    with pytest.raises(LayoutError, match=words) as refusal:
        check_possible(question, asked, PROFILE, "it")
    counts = working_counts(question)
    assert counts == [8, 16, 32]
    assert refusal.value.hint == "use --pp 7 or 14 or 28"
    for pp in (7, 14, 28):
        works = replace(asked, layout=replace(asked.layout, pp=pp))
        check_possible(question_of(works, PROFILE, {"layout.pp"}), works, PROFILE, "it")
    for count in counts:
        works = replace(asked, layout=replace(asked.layout, gpus=count))
        check_possible(question_of(works, PROFILE, {"layout.pp"}), works, PROFILE, "it")
    for count in set(range(4, 40, 4)) - set(counts):
        fails = replace(asked, layout=replace(asked.layout, gpus=count))
        with pytest.raises(LayoutError):
            check_possible(question_of(fails, PROFILE, {"layout.pp"}), fails, PROFILE, "it")


def test_numbers_of_gpus_that_work_may_be_far():
    asked = experiment({"gpus": 4, "dp": 1024, "global_batch": 1024}, {"name": "deepspeed-3d"})
    assert working_counts(question_of(asked, PROFILE, {"layout.dp", "engine.name"})) == [1024, 2048, 4096]


def test_a_batch_nobody_gave_is_divided_and_does_not_grow():
    batches = {
        (1024, 3): 1023,
        (1024, 24): 1032,
        (1024, 600): 1200,
        (1024, 64): 1024,
        (8192, 16384): 512,
        (8192, 96): 480,
    }
    assert {(seq, gpus): usual_batch(seq, gpus) for seq, gpus in batches} == batches
    assert usual_batch(1024, 1536) == 768  # as many replicas as have a sample each


def test_a_bubble_over_half_the_step_names_a_better_batch():
    machine = machine_named("h100-80g", 8, "infiniband 8x400G")
    traits = {"megatron-lm": {"flash": True}}
    asked = Question(preset("llama3.1-405b"), 16384, 8, "bf16", 512, ("megatron-lm",), traits=traits)
    found = search(asked, machine)
    words = r"the bubble is (\d+)% of the step: with --gbs (\d+) it is (\d+)%, and (\S+) has ([\d.]+) times .*"
    said = re.fullmatch(words, larger_batch(found))
    before, batch, after = (int(said[part]) for part in (1, 2, 3))
    assert before > 50 >= after
    assert (batch % 512, float(said[5]) > 1.5, said[4]) == (0, True, str(found.best.layout))
    assert larger_batch(search(replace(asked, global_batch=8192), machine)) == ""
    # What is fixed stays so, but for the micro-batch, of which a larger batch may want another.
    fixed = {"recompute": "full", "micro_batch": 1}
    best = search(replace(asked, fixed=fixed), machine).best
    said = re.fullmatch(words, larger_batch(search(replace(asked, fixed=fixed), machine)))
    free = {"recompute": "full", **vars(best.layout)}
    other = search(replace(asked, fixed=free, global_batch=int(said[2])), machine, keep=1).best
    assert said[5] == f"{other.tokens_per_s / best.tokens_per_s:.1f}"


def test_what_must_be_offloaded_on_few_gpus_need_not_be_on_more():
    machine = replace(machine_named("h100-80g", 8, "infiniband 8x400G"), host_memory_gib=1862)
    traits = {name: {"flash": True, "compiled": True, "compiled_loss": True} for name in ("fsdp", "deepspeed-zero")}
    asked = Question(preset("llama3.1-70b"), 8, 8, "bf16", 512, (*traits,), traits=traits)
    asked = replace(
        asked, savings=frozenset({"loss_chunks", "activation_offload"}), usual_batch=partial(usual_batch, 8192)
    )
    assert (
        without_offload(search(asked, machine)) == "nothing needs to be offloaded on 24 GPUs: --gpus 24 --offload none"
    )
    there = search(replace(asked.on(24), fixed={"offload": "none"}), machine).best
    assert not there.is_tight
    assert without_offload(search(asked.on(64), machine)) == ""


def test_the_fewest_gpus_fit_and_half_of_them_do_not():
    machine = Machine("v100-32g", 6.0, {"fp16": 125.0}, 900, 4, 150, 50, 12)
    asked = experiment({"gpus": 1}, {"name": "deepspeed-3d"})
    question = question_of(asked, PROFILE, {"engine.name"})
    count = fewest_gpus(question, machine)
    assert count is not None
    assert search(replace(question, gpus=count), machine).candidates
    assert count > 4
    assert not search(replace(question, gpus=count - 4), machine).candidates
    assert fewest_gpus(question, replace(machine, memory_gib=0.1), most=64) is None
