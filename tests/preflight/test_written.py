"""What a preflight writes, to the letter: its table and preflight.json; and on which side of each bound a value is."""

import io
import json
from pathlib import Path

import pytest
import torch

from hpc_gpt.trainer.preflight import measurements
from hpc_gpt.trainer.preflight.nodes import Preflight
from hpc_gpt.trainer.preflight.transfers import Transfer
from hpc_gpt.trainer.preflight.verdict import NodeReport, encode, judge_devices, judge_space, some_of
from tests.preflight.test_nodes import new_run
from tests.preflight.test_verdict import cluster

FIGURES = {"device": "H100", "devices": 1, "memory_free_gib": 78.125, "matmul_tflops": 600.0, "write_mb_s": 412.0,
           "host_to_device_gb_s": 50.25, "free_gib": 900.0, "clock_skew_s": 0.25, "judged": True,
           "versions": {"torch": "2.13.0"}}  # fmt: skip
TABLE = """\
preflight of 3 nodes x 1, 0.1 s
  node  device  free GiB  matmul TFLOP/s  to device GB/s  disk MB/s  pairs GB/s  all-reduce GB/s  clock s
  a     H100        78.1             600            50.2        412        19.5               18     +0.2
  b     H100        78.1             400            50.2        412           -                -     +0.2
  c     H100        78.1             600            50.2        412        19.5               18     +3.8
  rdma mlx5_0
  warning: c: its clock is 3.5 s ahead of the others'
  bad node b: matmul 400 TFLOP/s, median of its peers 600
  c takes the place of a bad node
"""


def judged(folder: Path, lines: list[str], nodes: str = "abc", **asked: int) -> Preflight:
    """A preflight whose ranks have said these lines."""
    run = new_run(folder, **{"nodes": 2, "spares": 1, **asked})
    run.new_attempt()
    (folder / "lines").write_text("".join(lines))
    preflight = Preflight(run, 1, list(nodes), ["cat", str(folder / "lines")])
    for name in nodes:
        (preflight.attempt.folder / "preflight" / f"node-{name}").touch()
    preflight.judge()
    preflight.took_s = 0.1234
    return preflight


def test_what_is_measured_is_in_the_table_and_in_the_file(tmp_path: Path) -> None:
    own = {"b": {"matmul_tflops": 400.0}, "c": {"clock_skew_s": 3.75}}
    lines = [encode(node, 0, figures=FIGURES | own.get(node, {}), network="rdma mlx5_0", port=4711) for node in "abc"]
    lines += [encode(node, 0, rates=[19.5, 21.0, 18.0], done=True) for node in "ac"]
    preflight = judged(tmp_path, lines)
    preflight.write_table(out := io.StringIO())
    assert out.getvalue() == TABLE
    preflight.write_figures()
    found = json.loads((preflight.attempt.folder / "preflight.json").read_text())
    assert abs(found.pop("time") - found["took_s"]) > 1e9
    blame = {"what": "matmul_tflops", "words": "matmul 400 TFLOP/s, median of its peers 600", "node": "b"}
    warning = {"what": "clock", "words": "c: its clock is 3.5 s ahead of the others'", "node": None}
    rest = {"local_rank": 0, "failed": None, "traceback": None, "network": "rdma mlx5_0"}
    ranks = [FIGURES | own.get(node, {}) | rest | {"node": node} for node in "abc"]
    assert found == {
        "schema": 1, "took_s": 0.123, "limit_s": 180.0, "allocated": ["a", "b", "c"], "nodes": ["a", "c"],
        "ended": None, "cause": None,
        "findings": [warning | {"ended": None, "figure": 3.5, "median": 0.0, "unit": "s"},
                     blame | {"ended": None, "figure": 400.0, "median": 600.0, "unit": "TFLOP/s"}],
        "ranks": [rank | {"clock_ahead_s": rank["clock_skew_s"]} for rank in ranks],
        "exchanges": [{"kind": kind, "axis": axis, "ranks": [0, 1], "nodes": ["a", "c"], "gb_s": rate}
                      for kind, axis, rate in (("pair", "nodes", 19.5), ("pair", "dp", 21.0), ("ring", "dp", 18.0))],
    }  # fmt: skip


def test_of_many_nodes_those_with_a_fault_are_shown_first(tmp_path: Path) -> None:
    nodes = "".join(map(chr, range(200, 270)))
    preflight = judged(tmp_path, [encode(node, 0, figures=FIGURES, port=1) for node in nodes[:-1]], nodes)
    preflight.write_table(out := io.StringIO())
    assert f"\n  {nodes[-1]}     no answer " in out.getvalue()
    assert "  … 6 more nodes in preflight.json\n" in out.getvalue()


ON_TIME, LATE, SLOW = {"clock_skew_s": 0.0}, {"clock_skew_s": 60.0}, {"matmul_tflops": 510.0}
BLIND, SILENT = {"sees_run_folder": False}, {"d": NodeReport(), "e": NodeReport()}


@pytest.mark.parametrize(
    ("reports", "found"),
    [
        (cluster(a=ON_TIME, b={"clock_skew_s": 1.99}, c=ON_TIME), []),
        (cluster(a=ON_TIME, b={"clock_skew_s": 2.0}, c=ON_TIME), [(None, None)]),
        (cluster(a=ON_TIME, b={"clock_skew_s": 59.99}, c=ON_TIME), [(None, None)]),
        (cluster(a=ON_TIME, b=LATE, c=ON_TIME), [("b", None)]),
        (cluster(a={}, b=LATE), [("b", None)]),  # of two there is no median
        (cluster(a={}, b=SLOW, c={}), []),
        (cluster(a={}, b={"matmul_tflops": 509.9}, c={}), [("b", None)]),
        (cluster(a={}, b=BLIND), [("b", None)]),
        (cluster(a={}, b=BLIND, c=BLIND), [(None, "user_error")]),
        (cluster(a={}, b={}) | SILENT, [("d", None), ("e", None)]),
        (cluster(a={}) | SILENT, [(None, "error")]),
        (cluster(a={}, b={}, c={"versions": {}}), [("c", None)]),
        (cluster(a={}, b={"versions": {}}), [(None, "user_error")]),
    ],
)
def test_on_which_side_of_its_bound_a_node_is(reports: dict[str, NodeReport], found: list[object]) -> None:
    assert [(each.node, each.ended) for each in judge_devices(reports, 1)] == found


def test_room_and_names_have_their_bounds() -> None:
    words = "{} are free in /x, the {} about {} GiB"
    assert judge_space(50, 10, 50, "/x") == []
    for free, ended, said in ((10, None, ("10.00 GiB", "checkpoints to come take", "50.00")),
                              (9.5, "disk_full", ("9.50 GiB", "next checkpoint takes", "10.00"))):  # fmt: skip
        (finding,) = judge_space(free, 10, 50, "/x")
        assert (finding.ended, finding.words) == (ended, words.format(*said))
    assert (some_of("abcdefgh"), some_of("abcdefghij")) == (
        "a, b, c, d, e, f, g, h",
        "a, b, c, d, e, f, g, h and 2 more",
    )


def test_a_rate_is_what_is_moved_by_the_seconds_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on half a second with each look, and with seconds of one that are given."""
    cpu, clock = torch.device("cpu"), iter(range(100))
    monkeypatch.setattr(measurements.time, "perf_counter", lambda: next(clock) / 2)
    assert measurements.write_mb_s(tmp_path / "node-a") == 16.78  # 8 MiB in half a second
    assert (tmp_path / "node-a").stat().st_size == 8 << 20
    monkeypatch.setattr(measurements, "seconds_each", lambda device, work: work() is None or 0.25)
    assert measurements.host_to_device_gb_s(cpu) == 0.03355
    assert measurements.matmul_tflops(cpu, "fp32", 10) == 8e-9
    monkeypatch.setattr(measurements, "_timed", lambda device, work: 0.5)
    monkeypatch.setattr(measurements.dist, "new_group", lambda *ranks, **others: None)
    monkeypatch.setattr(measurements.dist, "P2POp", lambda *operation: operation)
    rates: list[float] = []
    each = [Transfer(kind, "dp", (0, 1, 2, 3)) for kind in ("pair", "ring", "gather")]
    measurements.run_transfers(each, 1, cpu, {}, lambda: None, rates.append)
    assert rates == [0.002097, 0.003146, 0.001573]  # of 1 MiB: the whole, 2 x 3/4, 3/4
