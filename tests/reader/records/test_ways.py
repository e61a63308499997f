"""The ways to each field of layout and batch, and that what they give is true."""

import pytest

from hpc_gpt.reader.records.draft import Draft
from hpc_gpt.reader.records.inferred import INFERENCES, infer_fields

# A run of 96 GPUs, as its log could state all of it.
TRUE = {
    "nodes": 12, "gpus_per_node": 8, "gpus": 96, "tp": 4, "pp": 3, "cp": 2, "dp": 4, "micro_batch": 2,
    "micro_batches": 6, "global_batch": 48, "seq": 1024, "global_batch_tokens": 49152,
}  # fmt: skip


def drafted(names):
    found = Draft()
    for name in names:
        found.set(name, TRUE[name], "a.log:1")
    infer_fields(found, [], {})
    return found


def test_every_field_has_its_ways_by_preference():
    ways = {}
    for way in INFERENCES:
        formula = " x ".join(way.of) + (f" / {' x '.join(way.over)}" if way.over else "")
        ways.setdefault(way.field, []).append(formula or way.says)
    one, alone, dump = "one GPU", "{engine} splits only the batch", "the dump of arguments names none"
    assert ways == {
        "gpus": ["nodes x gpus_per_node", "tp x pp x cp x dp"],
        "nodes": ["gpus / gpus_per_node"],
        "tp": [one, alone, dump],
        "pp": [one, alone, dump, "gpus / tp x dp x cp"],
        "cp": [one],
        "dp": [one, "gpus / tp x pp x cp", "global_batch / micro_batch x micro_batches"],
        "global_batch": ["global_batch_tokens / seq", "micro_batch x micro_batches x dp"],
        "micro_batches": ["global_batch / micro_batch x dp"],
        "micro_batch": ["global_batch / micro_batches x dp"],
    }


# What is said of each way, in their order.
HOW = "nodes 12 x gpus_per_node 8 | global_batch_tokens 49152 / seq 1024 | gpus 96 / (tp x pp x cp) | "
HOW += "gpus 96 / (tp x dp x cp) | global_batch 48 / (micro_batch 2 x micro_batches 6) | tp x pp x cp x dp | "
HOW += "micro_batch 2 x micro_batches 6 x dp 4 | global_batch 48 / (micro_batch 2 x dp 4) | "
HOW += "global_batch 48 / (micro_batches 6 x dp 4) | gpus 96 / gpus_per_node 8"


@pytest.mark.parametrize(
    ("way", "how"), zip([way for way in INFERENCES if way.of], HOW.split(" | "), strict=True), ids=HOW.split(" | ")
)
def test_each_way_gives_what_is_true(way, how):
    found = drafted((*way.of, *way.over))
    assert (found.get(way.field), found.sources[way.field]) == (TRUE[way.field], f"inferred: {how}")
    assert all(found.get(name) in (None, value) for name, value in TRUE.items()), found.values


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
    found = Draft()
    for name, value in stated.items():
        found.set(name, value, "a.log:1")
    infer_fields(found, [], arguments)
    assert {name: found.get(name) for name in axes} == axes
    assert {found.sources.get(name) for name, size in axes.items() if size} <= {f"inferred: {how}"}


def test_what_follows_is_used_in_turn():
    """Tokens of a batch give samples, these the ranks that share them, and these the GPUs."""
    found = drafted(("tp", "pp", "cp", "micro_batch", "micro_batches", "seq", "global_batch_tokens", "gpus_per_node"))
    assert {name: found.get(name) for name in TRUE} == TRUE
    assert not found.flags


def test_a_quotient_that_is_not_whole_gives_nothing():
    found = Draft()
    for name, value in {"gpus": 10, "tp": 4, "pp": 1}.items():
        found.set(name, value, "a.log:1")
    infer_fields(found, [], {})
    assert found.get("dp") is None
    assert found.flags == ["10 GPUs are not a multiple of tp x pp = 4: the layout is impossible"]
