"""Whose fault it is: the rules by which a node is named, by tables and properties."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.trainer.preflight.verdict import (
    Measure,
    NodeReport,
    choose_nodes,
    judge_devices,
    judge_exchanges,
    judge_space,
    some_of,
)


def cluster(**by_node):
    """Reports of one rank a node, the figures of each laid over those of a sound one."""
    sound = {"device": "NVIDIA H100 80GB HBM3", "devices": 8, "judged": True, "matmul_tflops": 600.0,
             "host_to_device_gb_s": 50.0, "memory_free_gib": 78.0, "write_mb_s": 400.0, "sees_run_folder": True,
             "versions": {"torch": "2.13.0"}}  # fmt: skip
    reports = {}
    for node, own in by_node.items():
        reports[node] = NodeReport({0: {"figures": sound | own}}, skew_s=-0.01)
    return reports


def blamed(findings):
    return {finding.node: finding.words for finding in findings if finding.node}


def beside(own, others=3):
    """A node `b` with such figures, and sound ones."""
    return cluster(a={}, b=own, **{name: {} for name in "cdefg"[: others - 1]})


def with_ranks(**worst):
    """Three nodes of two ranks, of which one has such figures."""
    reports = cluster(a={}, b={}, c={})
    for report in reports.values():
        report.sent[1] = {"figures": dict(report.figures[0])}
    reports["c"].sent[1]["figures"] |= worst
    return reports


def failing(why, nodes="ab"):
    return {name: NodeReport({0: {"failed": why}}) for name in nodes}


ON_TIME, SLOW, BLIND = {"clock_skew_s": 0.0}, "median of its peers 600", {"sees_run_folder": False}
LOST = NodeReport({0: {"failed": "AcceleratorError: CUDA error: out of memory"}})
NO_TORCH = "ModuleNotFoundError: No module named 'torch'"
UNSEEN = "others do not see what it writes in the run folder"
CPU = {"device": "cpu", "judged": False}
# The reports of nodes, and of each finding the node at fault, how the attempt ends, and its words.
JUDGED = [
    (cluster(a={}, b={}, c={}, d={}), []),
    (beside({"matmul_tflops": 510.0}), []),
    (beside({"matmul_tflops": 509.0}), [("b", None, f"matmul 509 TFLOP/s, {SLOW}")]),
    (cluster(a={}, b={}, c={}, d={"matmul_tflops": 500.0}, e={"matmul_tflops": 300.0}),
     [("d", None, f"matmul 500 TFLOP/s, {SLOW}"), ("e", None, f"matmul 300 TFLOP/s, {SLOW}")]),
    (with_ranks(matmul_tflops=100.0), [("c", None, f"matmul 100 TFLOP/s, {SLOW}")]),
    (beside({"memory_free_gib": 70.0}), []),
    (beside({"memory_free_gib": 40.0}), [("b", None, "40 GiB free, median of its peers 78")]),
    (beside({"host_to_device_gb_s": 12.0}), [(None, None, "b: host to device 12 GB/s, median of its peers 50")]),
    (beside({"write_mb_s": 40.0}), [(None, None, "b: shared disk 40 MB/s, median of its peers 400")]),
    (cluster(a=CPU, b=CPU | {"matmul_tflops": 0.01, "memory_free_gib": 1.0}), []),
    (beside({"devices": 7}), [("b", None, "7 devices, 8 on other nodes")]),
    # clocks; of two there is no median
    (cluster(a=ON_TIME, b={"clock_skew_s": 1.99}, c=ON_TIME), []),
    (cluster(a=ON_TIME, b={"clock_skew_s": 2.0}, c=ON_TIME),
     [(None, None, "b: its clock is 2.0 s ahead of the others'")]),
    (cluster(a=ON_TIME, b={"clock_skew_s": 59.9}, c=ON_TIME),
     [(None, None, "b: its clock is 59.9 s ahead of the others'")]),
    (cluster(a=ON_TIME, b={"clock_skew_s": 60.0}, c=ON_TIME),
     [("b", None, "its clock is 60.0 s ahead of the others'")]),
    (cluster(a={}, b={"clock_skew_s": 60.0}), [("b", None, "its clock is 60.0 s ahead of the others'")]),
    (beside({"clock_skew_s": -75.0}), [("b", None, "its clock is 75.0 s behind the others'")]),
    # the run folder
    (cluster(a={}, b=BLIND), [("b", None, UNSEEN)]),
    (cluster(a={}, b=BLIND, c=BLIND),
     [(None, "user_error", "the run folder is not shared: 2 of 3 nodes and this one see different files")]),
    (cluster(a={}, b={}) | {"b": replace(cluster(b={})["b"], seen=False)}, [("b", None, UNSEEN)]),
    # versions
    (beside({"versions": {"torch": "2.12.1"}}), [("b", None, "torch 2.12.1 instead of 2.13.0, as on no other node")]),
    (beside({"versions": {}}), [("b", None, "torch missing instead of 2.13.0, as on no other node")]),
    (beside({"versions": {"torch": "2.13.0", "hf": "5"}}), [("b", None, "hf 5 instead of none, as on no other node")]),
    (cluster(a={}, b={"versions": {"torch": "2.12.1", "python": "3.12"}}),
     [(None, "user_error", "the nodes differ in their versions: a: torch 2.13.0; b: python 3.12, torch 2.12.1")]),
    # nodes without figures
    (cluster(a={}, b={}, e={}, f={}, g={}) | {"b": NodeReport(), "c": NodeReport({0: {}}), "d": LOST}, [
        ("b", None, "it did not answer"), ("c", None, "1 of its 1 ranks gave no figures in time"),
        ("d", None, "rank 0 on it failed: AcceleratorError: CUDA error: out of memory")]),
    (cluster(a={}, b={}) | {"d": NodeReport(), "e": NodeReport()},
     [("d", None, "it did not answer"), ("e", None, "it did not answer")]),
    (cluster(a={}) | {"d": NodeReport(), "e": NodeReport()},
     [(None, "error", "2 of 3 nodes cannot be probed; d: it did not answer")]),
    (failing(NO_TORCH),
     [(None, "user_error", f"2 of 2 nodes cannot be probed; a: rank 0 on it failed: {NO_TORCH}")]),
    (cluster(c={}) | failing(NO_TORCH, "a"), [("a", None, f"rank 0 on it failed: {NO_TORCH}")]),
    (failing("AcceleratorError: CUDA error", "a"), [("a", None, "rank 0 on it failed: AcceleratorError: CUDA error")]),
]  # fmt: skip


@pytest.mark.parametrize(("reports", "findings"), JUDGED, ids=range(len(JUDGED)))
def test_a_node_that_differs_is_named_with_its_figure(reports, findings):
    found = judge_devices(reports, max(len(report.sent) for report in reports.values()))
    assert [(each.node, each.ended, each.words) for each in found] == findings


def pairs(*rates):
    """Exchanges of neighbours in a ring of nodes 0 to n - 1."""
    count = len(rates)
    return [
        Measure("pair", "nodes", (at, (at + 1) % count), (f"n{at}", f"n{(at + 1) % count}"), rate)
        for at, rate in enumerate(rates)
    ]


def test_a_slow_node_is_told_from_neighbours_by_other_exchanges():
    assert blamed(judge_exchanges(pairs(20, 3, 3, 20, 20, 20), {})) == {
        "n2": "exchange of a pair of nodes 3 GB/s, median of its peers 20"
    }


def test_a_slow_link_is_no_nodes_fault():
    assert judge_exchanges(pairs(20, 3, 20, 20, 20, 20), {})[0].node is None


def test_a_slow_group_explained_by_a_slow_node_is_no_finding():
    groups = [
        Measure("ring", "dp", (0, 2), ("n0", "n2"), 3.0),
        Measure("ring", "dp", (1, 3), ("n1", "n3"), 20.0),
        Measure("ring", "dp", (4, 6), ("n4", "n5"), 20.0),
    ]
    (found,) = judge_exchanges([*pairs(20, 3, 3, 20, 20, 20), *groups], {})
    assert found.node == "n2"
    (alone,) = judge_exchanges(groups, {})
    assert alone.node is None
    assert alone.words == "all-reduce of a dp group 3 GB/s, median of its peers 20, between n0, n2"


def test_a_slow_all_to_all_of_experts_is_said():
    rates = enumerate((9, 9, 2))
    groups = [Measure("all-to-all", "ep", (at, at + 3), (f"n{at}", f"n{at + 3}"), rate) for at, rate in rates]
    (found,) = judge_exchanges(groups, {})
    assert found.words == "all-to-all of an ep group 2 GB/s, median of its peers 9, between n2, n5"


def test_a_slow_bus_within_a_node_is_the_nodes():
    rings = [Measure("ring", "node", (2 * at, 2 * at + 1), (f"n{at}",), rate) for at, rate in enumerate((90, 91, 40))]
    assert blamed(judge_exchanges(rings, {})) == {"n2": "all-reduce within the node 40 GB/s, median of its peers 90.5"}


def test_devices_of_another_name_are_no_peers():
    small = {"device": "A100-SXM4-40GB", "memory_free_gib": 39.0, "matmul_tflops": 270.0, "devices": 4}
    assert judge_devices(cluster(a={}, b=small, c={}, d={}), 1) == []
    found = judge_devices(cluster(a={}, b=small, c=small, d=small | {"matmul_tflops": 90.0}), 1)
    assert blamed(found) == {"d": "matmul 90 TFLOP/s, median of its peers 270"}
    assert blamed(judge_devices(cluster(a={}, b=small, c={"device": "cpu", "devices": 0}), 1)).keys() == {"c"}
    rings = [Measure("ring", "node", (2 * at, 2 * at + 1), (f"n{at}",), rate) for at, rate in enumerate((90, 91, 40))]
    assert judge_exchanges(rings, {"n0": "H100", "n1": "H100", "n2": "L40S"}) == []


@given(st.integers(3, 24), st.data())
def test_of_a_ring_with_one_slow_node_that_one_is_named(count, data):
    slow = data.draw(st.integers(0, count - 1))
    rates = [3.0 if slow in (at, (at + 1) % count) else data.draw(st.floats(19, 21)) for at in range(count)]
    named = blamed(judge_exchanges(pairs(*rates), {}))
    # Of three nodes two of three pairs are slow, and then the median itself is.
    assert set(named) == ({f"n{slow}"} if count > 4 else set(named) & {f"n{slow}"})


@given(st.lists(st.floats(0.86, 1.0), min_size=2, max_size=20))
def test_rates_that_differ_by_less_than_15_percent_name_nobody(shares):
    assert judge_exchanges(pairs(*(20 * share for share in shares)), {}) == []


@given(st.sets(st.integers(0, 9)), st.integers(1, 10))
def test_the_first_sound_nodes_are_chosen_in_their_order(bad, needed):
    nodes = [f"n{number}" for number in range(10)]
    out = {f"n{number}" for number in bad}
    chosen = choose_nodes(nodes, out, needed)
    assert chosen == [node for node in nodes if node not in out][:needed]


ALL, NEXT = "the checkpoints to come take about 50.00 GiB", "the next checkpoint takes about"


@pytest.mark.parametrize(
    ("free", "one", "every", "ends"),
    [
        (100, 10, 50, []), (50, 10, 50, []), (None, 10, 50, []), (0, 0, 0, []),
        (20, 10, 50, [(None, None, f"20.00 GiB are free in /x, {ALL}")]),
        (10, 10, 50, [(None, None, f"10.00 GiB are free in /x, {ALL}")]),
        (9.5, 10, 50, [(None, "disk_full", f"9.50 GiB are free in /x, {NEXT} 10.00 GiB")]),
        (2**-20, 2**-15, 1, [(None, "disk_full", f"1.00 KiB are free in /x, {NEXT} 32.00 KiB")]),
    ],
)  # fmt: skip
def test_space_for_the_next_checkpoint_is_needed_for_all_wished(free, one, every, ends):
    assert [(each.node, each.ended, each.words) for each in judge_space(free, one, every, "/x")] == ends


def test_of_many_nodes_eight_are_named():
    assert some_of("abcdefgh") == "a, b, c, d, e, f, g, h"
    assert some_of("abcdefghij") == "a, b, c, d, e, f, g, h and 2 more"
