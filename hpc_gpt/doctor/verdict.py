"""The verdict on a preflight's figures: which nodes are broken or slow, and which faults are no node's.

Pure functions. A rate is slow if it is more than 15 % below the median of its peers. If most nodes fail in the same
way, as with a missing package or versions of which no two are equal, the set-up is at fault and not a node.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hpc_gpt.runs.heartbeats import SLOW

# Seconds that a node's clock may differ from the others': from the first on a warning, from the second a bad node.
SKEW_TOLD_S = 2.0
SKEW_BAD_S = 60.0

# Figures of a rank that are compared, with their name and unit: those that make a bad node, and those that only warn.
RATES = {"matmul_tflops": ("matmul", "TFLOP/s")}
_TOLD_RATES = {"host_to_device_gb_s": ("host to device", "GB/s"), "write_mb_s": ("shared disk", "MB/s")}
_SETUP_WORDS = ("ModuleNotFoundError", "ImportError", "ConfigError")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `node`: the node at fault, None if it is no node's; then `ended` is the class that the
    attempt ends with, None for a warning. `figure` and the `median` of its peers are in `unit`."""

    what: str
    words: str
    node: str | None = None
    ended: str | None = None
    figure: float | None = None
    median: float | None = None
    unit: str = ""


@dataclass
class NodeReport:
    """What a node's ranks have sent, by their number on the node: figures, and why a rank has failed.

    `skew_s`: seconds that its clock is ahead of the judge's; `seen`: whether its file on the shared disk can be seen.
    """

    node: str
    figures: dict[int, dict[str, Any]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    traces: dict[int, str] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)
    ports: dict[int, int] = field(default_factory=dict)
    skew_s: float | None = None
    seen: bool = True

    @property
    def ahead_s(self) -> float | None:
        """Seconds that the node's clock is ahead: given by its probe command, else as measured."""
        given = self.worst("clock_skew_s")
        return self.skew_s if given is None else given

    def worst(self, name: str) -> float | None:
        """The smallest of a figure over the node's ranks; None if no rank has it."""
        found = [value for each in self.figures.values() if isinstance(value := each.get(name), int | float)]
        return min(found, default=None)


@dataclass(frozen=True)
class Measure:
    """The rate of one exchange, in GB/s, and between which nodes it was."""

    kind: str
    axis: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    gb_s: float


def judge_devices(reports: Mapping[str, NodeReport], ranks_per_node: int) -> list[Finding]:
    """Findings from each node's own figures. Every node of the allocation has a report, empty if it was silent."""
    findings = [*_broken(reports, ranks_per_node)]
    sound = {name: report for name, report in reports.items() if name not in {each.node for each in findings}}
    for judge in (_versions, _skewed, _unseen, _fewer_devices, _less_memory, _slow_devices):
        findings += judge(sound)
    return findings


def judge_exchanges(measures: Sequence[Measure], judged: bool) -> list[Finding]:
    """Nodes that are slow to reach: all their exchanges of a kind are slow, while their partners have others that are
    not. A slow exchange is a warning if it does not show which of its nodes is slow. Rates of CPUs are not `judged`."""
    if not judged:
        return []
    findings: dict[str, Finding] = {}
    unclear: list[Finding] = []
    for kind, axis in dict.fromkeys((each.kind, each.axis) for each in measures):
        alike = [each for each in measures if (each.kind, each.axis) == (kind, axis)]
        for one in alike:
            peers = [each.gb_s for each in alike if each is not one]
            if not peers or one.gb_s >= SLOW * median(peers):
                continue
            well = {node for each in alike if each.gb_s >= SLOW * median(peers) for node in each.nodes}
            suspects = [node for node in dict.fromkeys(one.nodes) if node not in well]
            words = f"{_name_of(one)} {one.gb_s:g} GB/s, median of its peers {median(peers):g}"
            told = {"figure": one.gb_s, "median": median(peers), "unit": "GB/s"}
            if len(suspects) == 1:
                findings.setdefault(suspects[0], Finding("all_reduce", words, suspects[0], None, **told))  # type: ignore[arg-type]
            else:
                among = ", ".join(dict.fromkeys(one.nodes))
                unclear.append(Finding("all_reduce", f"{words}, between {among}", None, None, **told))  # type: ignore[arg-type]
    # A slow exchange that a slow node explains is not a second finding.
    return [*findings.values(), *(each for each in unclear if not _explained(each, findings))]


def judge_space(free_gib: float | None, one_gib: float, all_gib: float, folder: str) -> list[Finding]:
    """Whether there is room for the checkpoints to come: without room for the next one the attempt ends as disk_full.
    Everything in GiB; `free_gib` None if unknown."""
    if free_gib is None or all_gib <= 0 or free_gib >= all_gib:
        return []
    room = f"{free_gib:,.2f} GiB are free in {folder}"
    if free_gib < one_gib:
        words = f"{room}, the next checkpoint takes about {one_gib:,.2f}"
        return [Finding("space", words, None, "disk_full", free_gib, one_gib, "GiB")]
    words = f"{room}, the checkpoints to come take about {all_gib:,.2f}"
    return [Finding("space", words, None, None, free_gib, all_gib, "GiB")]


def choose_nodes(nodes: Sequence[str], bad: Iterable[str], needed: int) -> list[str]:
    """The nodes that the ranks run on: the first sound ones, fewer than `needed` if there are not enough."""
    out = set(bad)
    return [node for node in nodes if node not in out][:needed]


def _broken(reports: Mapping[str, NodeReport], ranks_per_node: int) -> list[Finding]:
    """Nodes that were silent, or on which a probe failed; if most nodes did, the set-up is at fault."""
    found = {}
    for name, report in reports.items():
        silent = ranks_per_node - len(report.figures.keys() | report.failed.keys())
        if report.failed:
            rank, words = min(report.failed.items())
            found[name] = f"rank {rank} on it failed: {words}"
        elif silent and not report.here:
            found[name] = "it did not answer"
        elif silent:
            found[name] = f"{silent} of its {ranks_per_node} ranks gave no figures in time"
    words = " ".join(word for report in reports.values() for word in report.failed.values())
    of_setup = len(reports) == len(found) and any(name in words for name in _SETUP_WORDS)
    if found and (of_setup or 2 * len(found) > len(reports) > 1):
        first = next(iter(found))
        told = f"{len(found)} of {len(reports)} nodes cannot be probed; {first}: {found[first]}"
        return [Finding("probe", told, None, "user_error" if of_setup else "error")]
    return [Finding("probe", words, name) for name, words in found.items()]


def _versions(reports: Mapping[str, NodeReport]) -> list[Finding]:
    of = {
        name: json.dumps(next(iter(report.figures.values())).get("versions"), sort_keys=True)
        for name, report in reports.items()
        if report.figures
    }
    counts = Counter(of.values())
    if len(counts) < 2:
        return []
    usual, times = counts.most_common(1)[0]
    if 2 * times <= len(of):
        sets = "; ".join(f"{name}: {_said(text)}" for name, text in list(of.items())[:4])
        return [Finding("versions", f"the nodes differ in their versions: {sets}", None, "user_error")]
    return [
        Finding("versions", f"{_difference(text, usual)}, as on no other node", name)
        for name, text in of.items()
        if text != usual
    ]


def _difference(text: str, usual: str) -> str:
    own, others = json.loads(text) or {}, json.loads(usual) or {}
    keys = [key for key in sorted({*own, *others}) if own.get(key) != others.get(key)]
    return ", ".join(f"{key} {own.get(key, 'missing')} instead of {others.get(key, 'none')}" for key in keys)


def _said(text: str) -> str:
    return ", ".join(f"{key} {value}" for key, value in (json.loads(text) or {}).items())


def _skewed(reports: Mapping[str, NodeReport]) -> list[Finding]:
    clocks = {name: ahead for name, report in reports.items() if (ahead := report.ahead_s) is not None}
    findings = []
    for name, skew in clocks.items():
        # Two clocks have no majority: then the judge's counts, which runs on the first node.
        off = skew - (median(clocks.values()) if len(clocks) > 2 else 0.0)
        if abs(off) >= SKEW_TOLD_S:
            bad = abs(off) >= SKEW_BAD_S
            words = f"its clock is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} the others'"
            told = words if bad else f"{name}: {words}"
            findings.append(Finding("clock", told, name if bad else None, None, off, 0.0, "s"))
    return findings


def _unseen(reports: Mapping[str, NodeReport]) -> list[Finding]:
    blind = [
        name
        for name, report in reports.items()
        if not report.seen or any(each.get("sees_run_folder") is False for each in report.figures.values())
    ]
    if 2 * len(blind) > len(reports):
        words = f"the run folder is not shared: {len(blind)} of {len(reports)} nodes and this one see different files"
        return [Finding("shared_disk", words, None, "user_error")]
    return [Finding("shared_disk", "what it writes in the run folder, others do not see", name) for name in blind]


def _fewer_devices(reports: Mapping[str, NodeReport]) -> list[Finding]:
    counts = {name: report.worst("devices") for name, report in reports.items()}
    usual = Counter(count for count in counts.values() if count is not None).most_common(1)
    return [
        Finding("devices", f"{count:g} devices, {usual[0][0]:g} on other nodes", name, None, count, usual[0][0])
        for name, count in counts.items()
        if count is not None and count < usual[0][0]
    ]


def _less_memory(reports: Mapping[str, NodeReport]) -> list[Finding]:
    """Nodes with less free memory: somebody else's process on a GPU takes its memory, and its time."""
    judged = {name: report for name, report in reports.items() if _is_judged(report, "memory_free_gib")}
    return [
        Finding("memory", f"{own:g} GiB free, median of its peers {peers:g}", name, None, own, peers, "GiB")
        for name, own, peers in _below_peers(judged, "memory_free_gib")
    ]


def _slow_devices(reports: Mapping[str, NodeReport]) -> list[Finding]:
    findings = []
    for figure, (name, unit) in (RATES | _TOLD_RATES).items():
        judged = {node: report for node, report in reports.items() if _is_judged(report, figure)}
        for node, own, peers in _below_peers(judged, figure):
            words = f"{name} {own:g} {unit}, median of its peers {peers:g}"
            if figure in RATES:
                findings.append(Finding(figure, words, node, None, own, peers, unit))
            else:
                findings.append(Finding(figure, f"{node}: {words}", None, None, own, peers, unit))
    return findings


def _is_judged(report: NodeReport, figure: str) -> bool:
    """Whether a node's rates can be compared: those of a GPU, or of a probe command; a CPU's depend on its load."""
    every = report.figures.values()
    return bool(every) and all(
        each.get("judged") and (figure in RATES or each.get("device") != "cpu") for each in every
    )


def _below_peers(reports: Mapping[str, NodeReport], figure: str) -> list[tuple[str, float, float]]:
    """(node, its figure, the median of the others') of each node that is more than 15 % below that."""
    values = {name: value for name, report in reports.items() if (value := report.worst(figure)) is not None}
    found = []
    for name, value in values.items():
        peers = [other for node, other in values.items() if node != name]
        if peers and value < SLOW * median(peers):
            found.append((name, value, median(peers)))
    return found


def _name_of(measure: Measure) -> str:
    if measure.kind == "ring":
        return f"all-reduce of a {measure.axis} group" if measure.axis != "node" else "all-reduce within the node"
    return f"exchange of a pair of {measure.axis}"


def _explained(finding: Finding, bad: Mapping[str, Finding]) -> bool:
    return any(name in finding.words.rpartition(", between ")[2].split(", ") for name in bad)
