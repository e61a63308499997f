"""Who exchanges with whom: disjoint rounds, every group of the layout, two neighbours a node; and the probe command."""

import re
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.settings.layout import AXES, Layout
from hpc_gpt.trainer.preflight import measurements
from hpc_gpt.trainer.preflight.measurements import ProbeFailed, figures_of_command, probe_device, versions
from hpc_gpt.trainer.preflight.transfers import plan_transfers

SIZES = st.integers(1, 4)


def planned(layout, ranks_per_node, spares=0):
    count = layout.gpus // ranks_per_node + spares
    nodes = [f"n{number}" for number in range(count) for _ in range(ranks_per_node)]
    return nodes, plan_transfers(layout, nodes)


@given(SIZES, SIZES, SIZES, st.sampled_from([1, 2, 4]), st.integers(0, 2))
def test_a_round_has_each_rank_once_at_most(tp, pp, dp, ranks_per_node, spares):
    layout = Layout(tp, pp, dp)
    if layout.gpus % ranks_per_node:
        ranks_per_node = 1
    nodes, rounds = planned(layout, ranks_per_node, spares)
    for exchanges in rounds:
        taking_part = [rank for each in exchanges for rank in each.ranks]
        assert len(taking_part) == len(set(taking_part))
        assert max(taking_part) < len(nodes)


@given(SIZES, SIZES, SIZES, st.sampled_from([1, 2]))
def test_every_group_has_its_ring_and_pairs_that_join_it(tp, pp, dp, cp):
    layout = Layout(tp, pp, dp, cp)
    _, rounds = planned(layout, 1)
    every = [each for exchanges in rounds for each in exchanges]
    for axis in AXES:
        groups = {tuple(group) for group in layout.groups(axis) if len(group) > 1}
        assert {each.ranks for each in every if (each.kind, each.axis) == ("ring", axis)} == groups
        joined = {rank for each in every if (each.kind, each.axis) == ("pair", axis) for rank in each.ranks}
        assert joined == {rank for group in groups for rank in group}


def test_ranks_that_divide_experts_send_to_all_of_them():
    _, rounds = planned(Layout(2, 1, 4, ep=2), 2)
    assert [(each.kind, each.axis, each.ranks) for each in rounds[-1]] == [
        ("all-to-all", "ep", ranks) for ranks in ((0, 2), (4, 6), (1, 3), (5, 7))
    ]
    assert not any(each.axis == "ep" for together in planned(Layout(2, 1, 4), 2)[1] for each in together)


@given(st.integers(1, 40), st.sampled_from([1, 2, 8]), st.integers(0, 3))
def test_every_node_spare_ones_too_has_two_neighbours(count, ranks_per_node, spares):
    nodes, rounds = planned(Layout(1, 1, count * ranks_per_node), ranks_per_node, spares)
    pairs = [each for exchanges in rounds for each in exchanges if (each.kind, each.axis) == ("pair", "nodes")]
    partners = Counter(nodes[rank] for each in pairs for rank in each.ranks)
    of_them = count + spares
    assert partners == {f"n{at}": min(2, of_them - 1) for at in range(of_them)} or of_them == 1
    rings = [each for exchanges in rounds for each in exchanges if (each.kind, each.axis) == ("ring", "node")]
    assert len(rings) == (of_them if ranks_per_node > 1 else 0)


def test_the_seconds_of_an_exchange_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on two seconds with each exchange, and nine with the one that opens the connection."""
    clock, done = [0.0], [0]

    def exchange() -> None:
        clock[0] += 2.0 if done[0] else 9.0
        done[0] += 1

    monkeypatch.setattr(measurements.time, "perf_counter", lambda: clock[0])
    assert measurements._timed(torch.device("cpu"), exchange) == 2.0


def test_a_command_gives_figures_or_none():
    assert (figures_of_command(None), figures_of_command("")) == ({}, {})
    assert figures_of_command("true") == {}
    assert figures_of_command("""echo '{"matmul_tflops": 90.5}'""") == {"matmul_tflops": 90.5}


@pytest.mark.parametrize(("named", "more"), [({"driver": "570"}, {"driver": "570"}), ("2.13", {}), (None, {})])
def test_the_versions_of_a_command_are_laid_over_those_found(tmp_path, named, more):
    figures = ("device", "devices", "memory_free_gib", "matmul_tflops", "host_to_device_gb_s", "write_mb_s", "free_gib")
    given = dict.fromkeys(figures, 1.0) | {"versions": named}
    found = probe_device(None, torch.device("cpu"), tmp_path, "a", given)
    assert found["versions"] == versions() | more


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo first >&2; echo 'Xid 79' >&2; exit 3", "the probe command failed: Xid 79"),
        ("exit 3", "the probe command failed: exit 3"),
        ("echo nonsense", "the probe command does not print a JSON object: 'nonsense\\n'"),
        ("echo '[1]'", "the probe command does not print a JSON object: '[1]\\n'"),
        ("""echo '{"error": "row remapping failed"}'""", "row remapping failed"),
    ],
)
def test_a_command_that_fails_fails_the_probe(command, words):
    with pytest.raises(ProbeFailed, match=f"^{re.escape(words)}$"):
        figures_of_command(command)
