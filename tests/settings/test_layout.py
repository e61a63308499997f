"""Layout: rank <-> coordinate, groups, the fit to nodes, and refusals with their arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.errors import LayoutError
from hpc_gpt.settings.layout import Coordinate, Layout, check_nodes, nodes_for

sizes = st.integers(1, 6)
layouts = st.builds(Layout, tp=sizes, pp=sizes, dp=sizes)


@given(layouts)
def test_ranks_and_coordinates_are_one_to_one(layout):
    coordinates = list(layout.coordinates())
    assert len(set(coordinates)) == layout.gpus
    assert [layout.rank(at) for at in coordinates] == list(range(layout.gpus))


@given(layouts)
def test_tp_is_fastest_then_dp_then_pp(layout):
    in_order = sorted(layout.coordinates(), key=lambda at: (at.pp, at.dp, at.tp))
    assert in_order == list(layout.coordinates())


@given(layouts, st.sampled_from(["tp", "pp", "dp"]))
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


@given(layouts, st.integers(1, 8))
def test_no_tensor_parallel_group_spans_nodes_once_it_is_accepted(layout, per_node):
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
    assert layout.gpus == 64
    assert layout.coordinate(63) == Coordinate(tp=3, pp=15, dp=0)
    assert layout.groups("pp")[0] == list(range(0, 64, 4))


@pytest.mark.parametrize("rank", [-1, 8])
def test_rank_outside_is_an_index_error(rank):
    with pytest.raises(IndexError, match=r"outside 0\.\.7"):
        Layout(2, 2, 2).coordinate(rank)


def test_coordinate_outside_is_an_index_error():
    with pytest.raises(IndexError, match=r"tp 2 is outside 0\.\.1"):
        Layout(2, 2, 2).rank(Coordinate(2, 0, 0))


@pytest.mark.parametrize("axis", ["tp", "pp", "dp"])
def test_axis_below_one_is_refused_by_name(axis):
    with pytest.raises(LayoutError, match=f"{axis} is 0"):
        Layout(**{"tp": 1, "pp": 1, "dp": 1, axis: 0})


def test_tp_across_nodes_needs_a_flag_that_says_so():
    with pytest.raises(LayoutError, match="tp 8 does not divide the 4 ranks of a node"):
        check_nodes(Layout(8, 1, 1), 2, 4)
    check_nodes(Layout(8, 1, 1), 2, 4, allow_tp_across_nodes=True)


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
