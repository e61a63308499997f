"""What a preflight writes, to the letter: its table and preflight.json."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_gpt.core.ends.bad_nodes import listed
from hpc_gpt.trainer.preflight import measurements
from hpc_gpt.trainer.preflight.nodes import Preflight
from hpc_gpt.trainer.preflight.transfers import Transfer
from hpc_gpt.trainer.preflight.verdict import encode
from tests.trainer.preflight.test_nodes import new_run

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


def judged(folder: Path, lines: list[str], names: str = "abc", **asked: int) -> Preflight:
    """A preflight whose ranks have said these lines."""
    run = new_run(folder, **{"nodes": 2, "spares": 1, **asked})
    run.new_attempt()
    (folder / "lines").write_text("".join(lines))
    preflight = Preflight(run, 1, list(names), ["cat", str(folder / "lines")])
    for name in names:
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


def test_where_ranks_divide_experts_the_table_has_an_all_to_all(tmp_path: Path) -> None:
    lines = [encode(node, 0, figures=FIGURES, port=1) for node in "ab"]
    lines += [encode(node, 0, rates=[19.5, 21.0, 18.0, 9.5], done=True) for node in "ab"]
    preflight = judged(tmp_path, lines, "ab", spares=0, ep=2)
    preflight.write_table(out := io.StringIO())
    assert "  pairs GB/s  all-reduce GB/s  all-to-all GB/s  clock s\n" in out.getvalue()
    assert out.getvalue().count("        19.5               18              9.5     +0.2\n") == 2


def test_of_many_nodes_those_with_a_fault_are_shown_first(tmp_path: Path) -> None:
    nodes = "".join(map(chr, range(200, 270)))
    preflight = judged(tmp_path, [encode(node, 0, figures=FIGURES, port=1) for node in nodes[:-1]], nodes)
    preflight.write_table(out := io.StringIO())
    assert f"\n  {nodes[-1]}     no answer " in out.getvalue()
    assert "  … 6 more nodes in preflight.json\n" in out.getvalue()


RESET, BROKEN = "RuntimeError: Connection reset by peer", "AcceleratorError: CUDA error: unspecified launch failure"
SLOW = "exchange of a pair of nodes 3 GB/s, median of its peers 20"
PLAIN = {"devices": 1, "judged": True}
# Two nodes each, b with a and with c: b is the slow one.
RATES = dict(zip("abcde", ([3.0, 20.0], [3.0, 3.0], [20.0, 3.0], [20.0, 20.0], [20.0, 20.0]), strict=True))
RATES_SAID: dict[str, dict[str, Any]] = {node: {"rates": rates, "done": True} for node, rates in RATES.items()}
# Nodes, of which one is a spare; what ranks say after their figures; the nodes that run, or how the attempt ends; the
# node and the words of each finding.
EXCHANGED = {
    # c waits for b in its own pair, while a and b wait in theirs.
    "a link that swallows all": ("abc", {}, {node: {"rates": []} for node in "abc"}, "ac",
        [("b", "the others do not reach it: no end within 180 s")]),
    "a rank that was killed": ("abc", {}, {node: {"failed": RESET} for node in "ac"}, "ac",
        [("b", f"the others do not reach it: {RESET}")]),
    "a rank with an error": ("abc", {}, {"a": {"failed": RESET}, "b": {"failed": BROKEN}}, "ac",
        [("b", f"a rank on it failed: {BROKEN}")]),
    "an exchange among all": ("ab", {}, {node: {"failed": RESET} for node in "ab"},
        ("collective_timeout", f"preflight: an exchange among all nodes broke: {RESET}"),
        [(None, f"an exchange among all nodes broke: {RESET}")]),
    "a network that is not there": ("ab", {}, {"a": {"failed": "ConfigError: no interface ib7 on a"}},
        ("user_error", "preflight: no interface ib7 on a"), [(None, "no interface ib7 on a")]),
    "a slow node": ("abcde", {}, RATES_SAID, "ac", [("b", SLOW)]),
    "a slow node and no spare": ("abcde", {"nodes": 5}, RATES_SAID,
        ("node_failure", f"preflight: bad node b: {SLOW}"), [("b", SLOW)]),
    "a spare too few": ("abcde", {"nodes": 4, "missing": "ab"}, {},
        ("node_failure", "preflight: bad node a: it did not answer; b: it did not answer, and 1 spare"),
        [("a", "it did not answer"), ("b", "it did not answer")]),
    "rates of CPUs": ("abcde", {"judged": False, "device": "cpu"}, RATES_SAID, "ab", []),
    "rates of CPUs that are given": ("abcde", {"judged": False, "pair_gb_s": 20.0}, RATES_SAID, "ac", [("b", SLOW)]),
    "no exchange of two": ("ab", {"nodes": 1}, {node: {"done": True} for node in "ab"}, "a",
        [(None, "no rank has made its exchanges, so no rate between them is known")]),
    "no exchange of one": ("a", {"nodes": 1}, {"a": {"done": True}}, "a", []),
    "no room": ("ab", {"free_gib": 0.0}, {}, ("disk_full", "preflight: 0 bytes are free in RUN, the next checkpoint "
        "takes about 0.40 MiB"), [(None, "0 bytes are free in RUN, the next checkpoint takes about 0.40 MiB")]),
    "a folder that is not shared": ("ab", {"sees_run_folder": False}, {}, ("user_error", "preflight: the run folder is "
        "not shared: 2 of 2 nodes and this one see different files"),
        [(None, "the run folder is not shared: 2 of 2 nodes and this one see different files")]),
}  # fmt: skip


@pytest.mark.parametrize("name", EXCHANGED)
def test_who_breaks_an_exchange_is_named_and_left_out(tmp_path: Path, name: str) -> None:
    nodes, given, said, ends, findings = EXCHANGED[name]
    figures = PLAIN | given
    asked, missing = figures.pop("nodes", 2), figures.pop("missing", "")
    lines = [encode(node, 0, figures=figures, port=1) for node in nodes if node not in missing]
    lines += [encode(node, 0, **fields) for node, fields in said.items() if node not in missing]
    preflight = judged(tmp_path, lines, nodes, nodes=asked, spares=len(nodes) - asked)
    found = preflight.ended or "".join(preflight.chosen), [(each.node, each.words) for each in preflight.findings]
    assert repr(found).replace(str(preflight.run.path), "RUN") == repr((ends, findings))
    preflight.note_bad_nodes()
    assert list(listed("site")) == [node for node, _ in findings if node]


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
    each = [Transfer(kind, "dp", (0, 1, 2, 3)) for kind in ("pair", "ring", "all-to-all")]
    measurements.run_transfers(each, 1, cpu, {}, lambda: None, rates.append)
    assert rates == [0.002097, 0.003146, 0.001573]  # of 1 MiB: the whole, 2 x 3/4, 3/4
