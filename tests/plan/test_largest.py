"""The largest model that fits: as the family goes, as the search says, and as the seed found by hand."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from hpc_gpt.errors import LayoutError
from hpc_gpt.plan.machine import Machine, machine_named
from hpc_gpt.plan.question import Question
from hpc_gpt.plan.search import TIGHT, family, largest, search
from hpc_gpt.settings.presets import preset

SMALLEST = {"micro_batch": 1, "micro_batches": 1, "offload": "none"}


def question(gpus, engines=("deepspeed-3d",), **settled):
    model = preset("gpt2")
    return Question(model, gpus, 4, "fp16", None, engines, {**SMALLEST, **settled}), model


def v100(gib):
    return machine_named(f"v100-{gib}g", 4, "omni-path 4x100G")


def test_the_family_has_the_published_depths_and_widths():
    shapes = family(preset("gpt2"))
    sizes = {(shape.layers, shape.hidden) for shape in shapes}
    assert {(40, 5120), (96, 12288), (128, 25600), (64, 16384), (64, 8192), (40, 6144)} <= sizes
    assert all(96 <= shape.hidden / shape.layers <= 256 for shape in shapes)
    assert all(shape.hidden == 128 * shape.heads and shape.layers % 4 == 0 for shape in shapes)
    params = [shape.params for shape in shapes]
    assert params == sorted(params)
    # Neighbours are near enough for an answer to mean something.
    assert max(large / small for small, large in itertools.pairwise(params) if small > 3e9) < 1.3


def test_nothing_larger_of_the_family_has_room():
    asked, model = question(16)
    card = v100(32)
    found = largest(asked, model, card)
    with_room = replace(card, memory_gib=TIGHT * card.memory_gib)
    shapes = family(model)
    fitting = [
        shape
        for shape in shapes
        if shape.params > found.model.params / 2
        and shape.params < 2 * found.model.params
        and search(replace(asked, shape=shape), with_room, first=True).candidates
    ]
    assert max(fitting, key=lambda shape: shape.params) == found.model
    assert found.searched.candidates
    assert found.tried <= 100
    assert found.next_larger is not None
    assert found.next_larger.params > found.model.params


def test_more_gpus_and_larger_cards_hold_more():
    sizes = [largest(*question(gpus), v100(gib)).model.params for gpus, gib in ((4, 16), (16, 16), (16, 32), (64, 32))]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 8 * sizes[0]


def test_sharding_and_offload_hold_more_than_neither():
    plain = largest(*question(16, ("deepspeed-zero",), zero_stage=1), v100(32)).model.params
    sharded = largest(*question(16, ("deepspeed-zero",), zero_stage=3), v100(32)).model.params
    moved = largest(*question(16, ("deepspeed-zero",), zero_stage=3, offload="full"), v100(32)).model.params
    assert plain < sharded < moved


def test_no_model_at_all():
    tiny = Machine("none", 0.5, {"fp16": 1.0}, 1, 4, 1, 1, 1)
    with pytest.raises(LayoutError, match="no model of the family fits on 4 none"):
        largest(*question(4), tiny)


@pytest.mark.shared
def test_as_seed_001_found_by_hand(shared):
    """`Max model size`, dp 1: sizes in 2^30, in steps of up to 1.8 x; one below is what its authors had tried."""
    text = next((shared / "seeds").glob("001_*.txt")).read_text(encoding="utf-8", errors="replace")
    part = text.partition("**Max model size**")[2].partition("**Performance**")[0]
    tables = [re.findall(r"\|\s+(\d+) \| (\S+)B\s+\|\s+1 \|", piece) for piece in part.split("32GB nodes:")]
    assert [len(rows) for rows in tables] == [4, 5]
    for gib, rows in zip((16, 32), tables, strict=True):
        for gpus, size in rows:
            found = largest(*question(int(gpus), ("megatron-lm",), recompute="full"), v100(gib)).model.params
            assert 1 / 1.5 < found / (float(size) * 2**30) < 1.9, (gib, gpus, size, found)
