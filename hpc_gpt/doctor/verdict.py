"""The verdict on a preflight's figures: which nodes are broken or slow, and which faults are not a node's.

Pure functions. A rate is slow if it is more than 15 % below the median of its peers. If most nodes fail in the same
way, as with a missing package, or if no two nodes have the same versions, the set-up is at fault and not a node.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from hpc_gpt.runs.live import SLOW
from hpc_gpt.words import show_bytes

# Seconds by which a node's clock differs from the others': the first gives a warning, the second a bad node.
SKEW_WARN_S = 2.0
SKEW_BAD_S = 60.0

# Figures of a rank that are compared, with name and unit: those that mark a bad node, and those that only warn.
RATES = {"matmul_tflops": ("matmul", "TFLOP/s")}
_WARN_RATES = {"host_to_device_gb_s": ("host to device", "GB/s"), "write_mb_s": ("shared disk", "MB/s")}
_SETUP_ERRORS = ("ModuleNotFoundError", "ImportError", "ConfigError")


@dataclass(frozen=True)
class Finding:
    """One fault. `node`: the node at fault, or None; then `ended` is the class that the attempt ends with, None for a
    warning. `figure` and the `median` of its peers are in `unit`."""

    what: str
    words: str
    node: str | None = None
    ended: str | None = None
    figure: float | None = None
    median: float | None = None
    unit: str = ""


@dataclass
class NodeReport:
    """What a node's ranks have sent, by local rank: figures, and why a rank has failed.

    `skew_s`: seconds that its clock is ahead of the judge's. `seen`: whether its file on the shared disk can be seen.
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
        """Seconds that the node's clock is ahead: from its probe command, else as measured."""
        given = self.worst("clock_skew_s")
        return self.skew_s if given is None else given

    def worst(self, name: str) -> float | None:
        """The smallest value of a figure over the node's ranks; None if no rank has it."""
        found = [value for each in self.figures.values() if isinstance(value := each.get(name), int | float)]
        return min(found, default=None)


@dataclass(frozen=True)
class Measure:
    """The rate of one exchange in GB/s, and the nodes that took part."""

    kind: str
    axis: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    gb_s: float


def judge_devices(reports: Mapping[str, NodeReport], ranks_per_node: int) -> list[Finding]:
    """Findings from each node's own figures. Every node of the allocation has a report; a silent one's is empty."""
    findings = [*_broken(reports, ranks_per_node)]
    sound = {name: report for name, report in reports.items() if name not in {each.node for each in findings}}
    for judge in (_versions, _skewed, _unseen, _fewer_devices, _less_memory, _slow_devices):
        findings += judge(sound)
    return findings


def judge_exchanges(measures: Sequence[Measure], judged: bool) -> list[Finding]:
    """Findings from the exchanges' rates. Those of CPUs are not `judged`.

    A node is slow if all its exchanges of a kind are slow, while its partners have others that are not. If a slow
    exchange does not show which of its nodes is slow, it is a warning.
    """
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
            text = f"{_name_of(one)} {one.gb_s:g} GB/s, median of its peers {median(peers):g}"
            finding = Finding("all_reduce", text, None, None, one.gb_s, median(peers), "GB/s")
            if len(suspects) == 1:
                findings.setdefault(suspects[0], replace(finding, node=suspects[0]))
            else:
                unclear.append(replace(finding, words=f"{text}, between {', '.join(dict.fromkeys(one.nodes))}"))
    # If a slow node explains a slow exchange, the exchange is not a second finding.
    return [*findings.values(), *(each for each in unclear if not _explained(each, findings))]


def judge_space(free_gib: float | None, one_gib: float, all_gib: float, folder: str) -> list[Finding]:
    """A finding if the checkpoints to come need more room than is free; without room for the next one the attempt ends
    as disk_full. All in GiB; `free_gib` is None if unknown."""
    if free_gib is None or all_gib <= 0 or free_gib >= all_gib:
        return []
    room = f"{show_bytes(free_gib * 2**30)} are free in {folder}"
    if free_gib < one_gib:
        text = f"{room}, the next checkpoint takes about {show_bytes(one_gib * 2**30)}"
        return [Finding("space", text, None, "disk_full", free_gib, one_gib, "GiB")]
    text = f"{room}, the checkpoints to come take about {show_bytes(all_gib * 2**30)}"
    return [Finding("space", text, None, None, free_gib, all_gib, "GiB")]


def choose_nodes(nodes: Sequence[str], bad: Iterable[str], needed: int) -> list[str]:
    """The nodes that the ranks run on: the first sound ones, fewer than `needed` if there are not enough."""
    excluded = set(bad)
    return [node for node in nodes if node not in excluded][:needed]


def _broken(reports: Mapping[str, NodeReport], ranks_per_node: int) -> list[Finding]:
    """Nodes that were silent, or on which a probe failed; if most of them, the set-up is at fault."""
    found = {}
    for name, report in reports.items():
        silent = ranks_per_node - len(report.figures.keys() | report.failed.keys())
        if report.failed:
            rank, why = min(report.failed.items())
            found[name] = f"rank {rank} on it failed: {why}"
        elif silent and not report.here:
            found[name] = "it did not answer"
        elif silent:
            found[name] = f"{silent} of its {ranks_per_node} ranks gave no figures in time"
    errors = " ".join(error for report in reports.values() for error in report.failed.values())
    of_setup = len(reports) == len(found) and any(name in errors for name in _SETUP_ERRORS)
    if found and (of_setup or 2 * len(found) > len(reports) > 1):
        first = next(iter(found))
        text = f"{len(found)} of {len(reports)} nodes cannot be probed; {first}: {found[first]}"
        return [Finding("probe", text, None, "user_error" if of_setup else "error")]
    return [Finding("probe", text, name) for name, text in found.items()]


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
        sets = "; ".join(f"{name}: {_listed(text)}" for name, text in list(of.items())[:4])
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


def _listed(text: str) -> str:
    return ", ".join(f"{key} {value}" for key, value in (json.loads(text) or {}).items())


def _skewed(reports: Mapping[str, NodeReport]) -> list[Finding]:
    clocks = {name: ahead for name, report in reports.items() if (ahead := report.ahead_s) is not None}
    findings = []
    for name, skew in clocks.items():
        # Two clocks have no majority: then the clock of the judge counts, which runs on the first node.
        off = skew - (median(clocks.values()) if len(clocks) > 2 else 0.0)
        if abs(off) >= SKEW_WARN_S:
            bad = abs(off) >= SKEW_BAD_S
            text = f"its clock is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} the others'"
            text = text if bad else f"{name}: {text}"
            findings.append(Finding("clock", text, name if bad else None, None, off, 0.0, "s"))
    return findings


def _unseen(reports: Mapping[str, NodeReport]) -> list[Finding]:
    blind = [
        name
        for name, report in reports.items()
        if not report.seen or any(each.get("sees_run_folder") is False for each in report.figures.values())
    ]
    if 2 * len(blind) > len(reports):
        text = f"the run folder is not shared: {len(blind)} of {len(reports)} nodes and this one see different files"
        return [Finding("shared_disk", text, None, "user_error")]
    return [Finding("shared_disk", "others do not see what it writes in the run folder", name) for name in blind]


def _fewer_devices(reports: Mapping[str, NodeReport]) -> list[Finding]:
    counts = {name: report.worst("devices") for name, report in reports.items()}
    usual = Counter(count for count in counts.values() if count is not None).most_common(1)
    return [
        Finding("devices", f"{count:g} devices, {usual[0][0]:g} on other nodes", name, None, count, usual[0][0])
        for name, count in counts.items()
        if count is not None and count < usual[0][0]
    ]


def _less_memory(reports: Mapping[str, NodeReport]) -> list[Finding]:
    """Nodes with less free memory: another process on a GPU takes its memory and its time."""
    judged = {name: report for name, report in reports.items() if _is_judged(report, "memory_free_gib")}
    return [
        Finding("memory", f"{own:g} GiB free, median of its peers {peers:g}", name, None, own, peers, "GiB")
        for name, own, peers in _below_peers(judged, "memory_free_gib")
    ]


def _slow_devices(reports: Mapping[str, NodeReport]) -> list[Finding]:
    findings = []
    for figure, (name, unit) in (RATES | _WARN_RATES).items():
        judged = {node: report for node, report in reports.items() if _is_judged(report, figure)}
        for node, own, peers in _below_peers(judged, figure):
            text = f"{name} {own:g} {unit}, median of its peers {peers:g}"
            if figure in RATES:
                findings.append(Finding(figure, text, node, None, own, peers, unit))
            else:
                findings.append(Finding(figure, f"{node}: {text}", None, None, own, peers, unit))
    return findings


def _is_judged(report: NodeReport, figure: str) -> bool:
    """Whether a node's figure can be compared: a GPU's, or a probe command's; a CPU's depends on its load."""
    every = report.figures.values()
    return bool(every) and all(
        each.get("judged") and (figure in RATES or each.get("device") != "cpu") for each in every
    )


def _below_peers(reports: Mapping[str, NodeReport], figure: str) -> list[tuple[str, float, float]]:
    """(node, its figure, the median of the others') for each node that is more than 15 % below that median."""
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
