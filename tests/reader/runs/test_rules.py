"""The ways to each field of layout and batch, and that what they give is true."""

import pytest

from hpc_gpt.reader.runs.facts import LIBRARY, SAID, Facts
from hpc_gpt.reader.runs.rules import RULES, Known, flag_contradictions, outdated, solve

# A run of 96 GPUs, as its log could state all of it.
TRUE = {
    "nodes": 12, "gpus_per_node": 8, "gpus": 96, "tp": 4, "pp": 3, "cp": 2, "dp": 4, "micro_batch": 2,
    "micro_batches": 6, "global_batch": 48, "seq": 1024, "global_batch_tokens": 49152,
}  # fmt: skip


def solved(stated, arguments=None):
    """The draft of what a log says, after the rules."""
    facts = Facts()
    for name, value in stated.items():
        facts.add(name, value, SAID, "a.log:1")
    draft = facts.draft()
    solve(Known(draft, arguments or {}, facts))
    flag_contradictions(draft)
    return draft


WAYS = {
    "gpus": ["nodes x gpus_per_node", "tp x pp x cp x dp"],
    "nodes": ["gpus / gpus_per_node"],
    "pp": ["gpus / tp x cp x dp"],
    "dp": ["gpus / tp x pp x cp", "global_batch / micro_batch x micro_batches"],
    "global_batch": ["global_batch_tokens / seq", "micro_batch x micro_batches x dp"],
    "global_batch_tokens": ["global_batch x seq"],
    "micro_batches": ["global_batch / micro_batch x dp"],
    "micro_batch": ["global_batch / micro_batches x dp"],
    "step_s": ["runtime_s / steps_of_runtime"],
    "tokens_per_s": ["tokens_per_s_gpu x gpus", "global_batch_tokens / step_s"],
    "tokens_total": ["steps_trained x global_batch_tokens"],
}
OF_SIZES = [
    (name, way) for name, ways in WAYS.items() for way in ways if name not in ("step_s", "tokens_per_s", "tokens_total")
]


def test_every_field_has_its_ways_by_preference():
    ways = {}
    for rule in RULES:
        for name in rule.solves if rule.factors else ():
            others = " x ".join(each for each in rule.factors if each != name)
            ways.setdefault(name, []).append(others if name == rule.whole else f"{rule.whole} / {others}")
    assert ways == WAYS
    ones = {
        name: [rule.says for rule in RULES if rule.whole == name and rule.says] for name in ("cp", "dp", "tp", "pp")
    }
    one, alone, dump = "one GPU", "{engine} splits only the batch", "the dump of arguments names none"
    assert ones == {"cp": [one], "dp": [one], "tp": [one, alone, dump], "pp": [one, alone, dump]}


@pytest.mark.parametrize(("name", "way"), OF_SIZES, ids=[f"{name}: {way}" for name, way in OF_SIZES])
def test_each_way_gives_what_is_true(name, way):
    found = solved({each: TRUE[each] for each in way.replace("/", "x").split(" x ") if each in TRUE})
    assert found.get(name) == TRUE[name]
    words = found.sources[name].removeprefix("inferred: ").replace("(", "").replace(")", "")
    assert " ".join(word for word in words.split(" ") if not word.isdigit()).split() == way.split()
    assert all(found.get(each) in (None, value) for each, value in TRUE.items()), found.values


@pytest.mark.parametrize(
    ("stated", "arguments", "axes", "how"),
    [
        ({"gpus": 1}, {}, {"tp": 1, "pp": 1, "cp": 1, "dp": 1}, "one GPU"),
        ({"engine": "hf"}, {}, {"tp": 1, "pp": 1, "cp": None}, "hf splits only the batch"),
        ({"tp": 4}, {"lr": "1e-4"}, {"pp": 1, "dp": None}, "the dump of arguments names none"),
        ({}, {"lr": "1e-4"}, {"tp": None, "pp": None}, ""),
    ],
    ids=("one GPU", "only the batch", "a dump with tp", "a dump without an axis"),
)
def test_an_unnamed_axis_is_one_if_nothing_else_can_be(stated, arguments, axes, how):
    found = solved(stated, arguments)
    assert {name: found.get(name) for name in axes} == axes
    assert {found.sources.get(name) for name, size in axes.items() if size and name not in stated} <= {
        f"inferred: {how}"
    }


def test_what_follows_is_used_in_turn():
    """Tokens of a batch give samples, these the ranks that share them, and these the GPUs."""
    stated = ("tp", "pp", "cp", "micro_batch", "micro_batches", "seq", "global_batch_tokens", "gpus_per_node")
    found = solved({name: TRUE[name] for name in stated})
    assert {name: found.get(name) for name in TRUE} == TRUE
    assert not found.flags


@pytest.mark.parametrize(
    ("stated", "flags"),
    [
        ({"gpus": 10, "tp": 4, "pp": 1}, ["tp 4 x pp 1 = 4, but gpus is 10 (a.log:1), which is no multiple of it"]),
        ({"gpus": 8, "tp": 2, "pp": 2, "dp": 4}, ["tp 2 x pp 2 x dp 4 = 16, but gpus is 8 (a.log:1)"]),
        ({"gpus": 8, "tp": 2, "pp": 2, "dp": 2}, []),
        (
            {"micro_batch": 2, "micro_batches": 2, "dp": 2, "global_batch": 16},
            ["micro_batch 2 x micro_batches 2 x dp 2 = 8, but global_batch is 16 (a.log:1)"],
        ),
        # What a rule gave is not held against what it comes from.
        ({"tp": 2, "pp": 2, "dp": 4}, []),
    ],
)
def test_a_product_that_contradicts_another_figure_has_one_flag(stated, flags):
    assert solved(stated).flags == flags


def test_a_librarys_size_gives_way_to_the_programs():
    facts = Facts()
    for name, value in {"micro_batch": 2, "dp": 2, "global_batch": 16}.items():
        facts.add(name, value, SAID, "a.log:1")
    facts.add("micro_batches", 1, LIBRARY, "a.log:9")
    draft = facts.draft(*outdated(facts))
    solve(Known(draft, {}, facts))
    flag_contradictions(draft)
    assert (draft.get("micro_batches"), draft.flags) == (4, [])
