"""Layout: rank <-> coordinate, groups, the fit to nodes, and refusals with their arithmetic."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.errors import LayoutError
from hpc_gpt.core.settings.layout import AXES, Coordinate, Layout, check_nodes, nodes_for

sizes = st.integers(1, 6)
layouts = st.builds(Layout, tp=sizes, pp=sizes, dp=sizes, cp=st.integers(1, 4), shard=st.sampled_from([None, 2, 16]))


@given(layouts)
def test_ranks_and_coordinates_are_one_to_one(layout):
    coordinates = list(layout.coordinates())
    assert len(set(coordinates)) == layout.gpus
    assert [layout.rank(at) for at in coordinates] == list(range(layout.gpus))


@given(layouts)
def test_tp_is_fastest_then_cp_then_dp_then_pp(layout):
    in_order = sorted(layout.coordinates(), key=lambda at: (at.pp, at.dp, at.cp, at.tp))
    assert in_order == list(layout.coordinates())


@given(layouts, st.sampled_from(AXES))
def test_groups_of_an_axis_partition_the_ranks(layout, axis):
    groups = layout.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.gpus))
    for group in groups:
        assert [getattr(layout.coordinate(rank), axis) for rank in group] == list(range(getattr(layout, axis)))
        others = {layout.coordinate(rank)._replace(**{axis: 0}) for rank in group}
        assert len(others) == 1


@given(layouts)
def test_tensor_parallel_groups_are_neighbouring_ranks(layout):
    for group in layout.groups("tp"):
        assert group == list(range(group[0], group[0] + layout.tp))


@given(layouts)
def test_data_axis_has_the_cp_ranks_of_each_replica_side_by_side(layout):
    for group in layout.groups("data"):
        assert [layout.data_rank(rank) for rank in group] == list(range(layout.data_ranks))
        at = [layout.coordinate(rank) for rank in group]
        assert [(each.dp, each.cp) for each in at] == sorted((each.dp, each.cp) for each in at)
        assert len({(each.tp, each.pp) for each in at}) == 1


@given(layouts)
def test_layout_is_read_as_it_is_printed(layout):
    assert ("cp" in str(layout)) == (layout.cp > 1)
    assert ("shard" in str(layout)) == (layout.shard is not None)
    assert Layout.parse(str(layout)) == layout


@given(layouts, st.integers(1, 8))
def test_no_tensor_parallel_group_spans_nodes_once_accepted(layout, per_node):
    try:
        nodes = nodes_for(layout.gpus, per_node)
        check_nodes(layout, nodes, per_node)
    except LayoutError:
        return
    ranks_per_node = layout.gpus // nodes
    for group in layout.groups("tp"):
        assert len({rank // ranks_per_node for rank in group}) == 1


def test_published_layout_in_numbers():
    layout = Layout(tp=4, pp=16, dp=1)
    assert str(layout) == "tp4-pp16-dp1"
    assert (layout.gpus, layout.coordinate(63)) == (64, Coordinate(tp=3, pp=15, dp=0))
    assert layout.groups("pp")[0] == list(range(0, 64, 4))


def test_context_parallel_layout_in_numbers():
    layout = Layout(tp=2, pp=2, dp=2, cp=2)
    assert str(layout) == "tp2-pp2-cp2-dp2"
    assert (layout.gpus, layout.data_ranks) == (16, 4)
    assert (layout.groups("cp")[:2], layout.groups("dp")[0]) == ([[0, 2], [1, 3]], [0, 4])
    assert (layout.groups("data")[0], layout.groups("pp")[0]) == ([0, 2, 4, 6], [0, 8])


@pytest.mark.parametrize("axis", AXES)
def test_axis_below_one_is_refused_by_name(axis):
    with pytest.raises(LayoutError, match=f"{axis} is 0"):
        Layout(**{"tp": 1, "pp": 1, "dp": 1, axis: 0})


@given(st.integers(1, 200), st.integers(1, 8))
def test_nodes_hold_all_gpus_and_none_stays_empty(gpus, per_node):
    try:
        nodes = nodes_for(gpus, per_node)
    except LayoutError as refusal:
        assert gpus > per_node
        assert gpus % per_node
        assert f"{gpus // per_node} x {per_node} + {gpus % per_node}" in str(refusal)
        return
    assert nodes * per_node >= gpus
    assert (nodes - 1) * per_node < gpus


@given(layouts, st.sampled_from([1, 2, 4, 8]), st.sampled_from([None, 1, 2]))
def test_ep_is_no_axis_and_is_printed_above_one(layout, ep, etp):
    split = replace(layout, ep=ep, etp=etp)
    assert split.gpus == layout.gpus
    same = replace(split, etp=None) if split.expert_tp == split.tp else split
    assert Layout.parse(str(split)) == same
    assert (str(split) == str(layout)) is (ep == 1 and split.expert_tp == split.tp)
    assert split.table() == {**layout.table(), **({"ep": ep} if ep > 1 else {}), **({"etp": etp} if etp else {})}


def test_replicas_of_experts_are_fewer():
    assert Layout(2, 4, 8, ep=4).expert_replicas == 2
    assert Layout(2, 4, 8, cp=2, ep=8, etp=1).expert_replicas == 4
    assert str(Layout(2, 4, 8, cp=2, ep=8, etp=1)) == "tp2-pp4-cp2-dp8-ep8-etp1"
