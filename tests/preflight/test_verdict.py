"""Whose fault it is: the rules by which a node is named, by tables and properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.trainer.preflight.verdict import (
    Finding,
    Measure,
    NodeReport,
    choose_nodes,
    judge_devices,
    judge_exchanges,
    judge_space,
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


def test_sound_nodes_have_no_findings():
    assert judge_devices(cluster(a={}, b={}, c={}, d={}), 1) == []


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"matmul_tflops": 509.0}, "matmul 509 TFLOP/s, median of its peers 600"),
        ({"memory_free_gib": 40.0}, "40 GiB free, median of its peers 78"),
        ({"devices": 7}, "7 devices, 8 on other nodes"),
        ({"clock_skew_s": 75.0}, "its clock is 75.0 s ahead of the others'"),
        ({"sees_run_folder": False}, "others do not see what it writes in the run folder"),
        ({"versions": {"torch": "2.12.1"}}, "torch 2.12.1 instead of 2.13.0, as on no other node"),
    ],
)
def test_one_node_that_differs_is_named_with_its_figure(own, words):
    assert blamed(judge_devices(cluster(a={}, b=own, c={}, d={}), 1)) == {"b": words}


@pytest.mark.parametrize("own", [{"matmul_tflops": 511.0}, {"memory_free_gib": 70.0}, {"clock_skew_s": 1.0}])
def test_within_15_percent_nobody_is_named(own):
    assert judge_devices(cluster(a={}, b=own, c={}, d={}), 1) == []


def test_a_slow_copy_or_disk_and_a_clock_off_are_warnings():
    (found,) = judge_devices(cluster(a={}, b={"host_to_device_gb_s": 12.0}, c={}), 1)
    assert (found.node, found.ended, found.words) == (None, None, "b: host to device 12 GB/s, median of its peers 50")
    (found,) = judge_devices(cluster(a={}, b={"clock_skew_s": -5.0}, c={}), 1)
    assert (found.node, found.ended, found.words) == (None, None, "b: its clock is 5.0 s behind the others'")


def test_a_cpus_rates_are_reported_and_not_judged():
    slow = {"device": "cpu", "judged": False, "matmul_tflops": 0.01, "memory_free_gib": 1.0}
    assert judge_devices(cluster(a={"device": "cpu", "judged": False}, b=slow), 1) == []


def test_every_rank_of_a_node_counts_and_the_worst_decides():
    reports = cluster(a={}, b={}, c={})
    for report in reports.values():
        report.sent[1] = {"figures": dict(report.figures[0])}
    reports["c"].sent[1]["figures"]["matmul_tflops"] = 100.0
    assert blamed(judge_devices(reports, 2)) == {"c": "matmul 100 TFLOP/s, median of its peers 600"}


def test_silent_and_failed_nodes_are_named():
    reports = cluster(a={}, b={}, c={}, d={}, e={}, f={}, g={})
    reports["b"] = NodeReport()
    reports["c"] = NodeReport({0: {}})
    reports["d"] = NodeReport({0: {"failed": "AcceleratorError: CUDA error: out of memory"}})
    assert blamed(judge_devices(reports, 1)) == {
        "b": "it did not answer",
        "c": "1 of its 1 ranks gave no figures in time",
        "d": "rank 0 on it failed: AcceleratorError: CUDA error: out of memory",
    }


def test_what_all_nodes_fail_in_is_the_set_ups_fault():
    reports = {name: NodeReport({0: {"failed": "ModuleNotFoundError: No module named 'torch'"}}) for name in "ab"}
    (found,) = judge_devices(reports, 1)
    assert (found.node, found.ended) == (None, "user_error")
    assert "2 of 2 nodes cannot be probed; a: rank 0 on it failed: ModuleNotFoundError" in found.words
    (found,) = judge_devices({name: NodeReport() for name in "abc"}, 1)
    assert (found.node, found.ended) == (None, "error")


def test_the_only_node_of_a_job_can_be_bad():
    (found,) = judge_devices({"a": NodeReport({0: {"failed": "AcceleratorError: CUDA error"}})}, 1)
    assert (found.node, found.ended) == ("a", None)


def test_versions_of_which_no_two_are_usual_are_nobodys_fault():
    (found,) = judge_devices(cluster(a={}, b={"versions": {"torch": "2.12.1"}}), 1)
    assert (found.node, found.ended) == (None, "user_error")
    assert found.words == "the nodes differ in their versions: a: torch 2.13.0; b: torch 2.12.1"


def pairs(*rates):
    """Exchanges of neighbours in a ring of nodes 0 to n - 1."""
    count = len(rates)
    return [
        Measure("pair", "nodes", (at, (at + 1) % count), (f"n{at}", f"n{(at + 1) % count}"), rate)
        for at, rate in enumerate(rates)
    ]


def test_a_slow_node_is_told_from_neighbours_by_other_exchanges():
    assert blamed(judge_exchanges(pairs(20, 3, 3, 20, 20, 20))) == {
        "n2": "exchange of a pair of nodes 3 GB/s, median of its peers 20"
    }


def test_a_slow_link_is_no_nodes_fault():
    assert judge_exchanges(pairs(20, 3, 20, 20, 20, 20))[0].node is None


def test_a_slow_group_explained_by_a_slow_node_is_no_finding():
    groups = [
        Measure("ring", "dp", (0, 2), ("n0", "n2"), 3.0),
        Measure("ring", "dp", (1, 3), ("n1", "n3"), 20.0),
        Measure("ring", "dp", (4, 6), ("n4", "n5"), 20.0),
    ]
    (found,) = judge_exchanges([*pairs(20, 3, 3, 20, 20, 20), *groups])
    assert found.node == "n2"
    (alone,) = judge_exchanges(groups)
    assert alone.node is None
    assert alone.words == "all-reduce of a dp group 3 GB/s, median of its peers 20, between n0, n2"


def test_a_slow_bus_within_a_node_is_the_nodes():
    rings = [Measure("ring", "node", (2 * at, 2 * at + 1), (f"n{at}",), rate) for at, rate in enumerate((90, 91, 40))]
    assert blamed(judge_exchanges(rings)) == {"n2": "all-reduce within the node 40 GB/s, median of its peers 90.5"}


@given(st.integers(3, 24), st.data())
def test_of_a_ring_with_one_slow_node_that_one_is_named(count, data):
    slow = data.draw(st.integers(0, count - 1))
    rates = [3.0 if slow in (at, (at + 1) % count) else data.draw(st.floats(19, 21)) for at in range(count)]
    named = blamed(judge_exchanges(pairs(*rates)))
    # Of three nodes two of three pairs are slow, and then the median itself is.
    assert set(named) == ({f"n{slow}"} if count > 4 else set(named) & {f"n{slow}"})


@given(st.lists(st.floats(0.86, 1.0), min_size=2, max_size=20))
def test_rates_that_differ_by_less_than_15_percent_name_nobody(shares):
    assert judge_exchanges(pairs(*(20 * share for share in shares))) == []


@given(st.sets(st.integers(0, 9)), st.integers(1, 10))
def test_the_first_sound_nodes_are_chosen_in_their_order(bad, needed):
    nodes = [f"n{number}" for number in range(10)]
    out = {f"n{number}" for number in bad}
    chosen = choose_nodes(nodes, out, needed)
    assert chosen == [node for node in nodes if node not in out][:needed]


@pytest.mark.parametrize(
    ("free", "one", "every", "ended"),
    [(100, 10, 50, []), (20, 10, 50, [None]), (5, 10, 50, ["disk_full"]), (None, 10, 50, []), (0, 0, 0, [])],
)
def test_space_for_the_next_checkpoint_is_needed_for_all_wished(free, one, every, ended):
    found = judge_space(free, one, every, "/scratch")
    assert [finding.ended for finding in found] == ended
    assert all(isinstance(finding, Finding) and finding.node is None for finding in found)


def test_a_clock_a_minute_behind_is_named_as_one_ahead_is():
    found = judge_devices(cluster(a={}, b={"clock_skew_s": -75.0}, c={}, d={}), 1)
    assert blamed(found) == {"b": "its clock is 75.0 s behind the others'"}


def test_a_worse_node_does_not_hide_a_bad_one():
    found = judge_devices(cluster(a={}, b={}, c={}, d={"matmul_tflops": 500.0}, e={"matmul_tflops": 300.0}), 1)
    assert set(blamed(found)) == {"d", "e"}


def test_a_little_space_is_told_in_a_unit_that_shows_it():
    (finding,) = judge_space(2**-20, 2**-15, 1.0, "/scratch")
    assert finding.words == "1.00 KiB are free in /scratch, the next checkpoint takes about 32.00 KiB"
