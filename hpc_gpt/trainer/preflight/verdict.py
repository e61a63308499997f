"""The verdict on a preflight's figures: which nodes are broken or slow, and which faults do not come from a node. Also
the probe protocol: the lines that the ranks send to the process that judges them.

Each line has the rank's `node`, its number on the node (`local`) and the `time`. A rank sends its first line when it
starts, then its `figures`, the `rates` of its transfers with other ranks, `done`, and `failed` if it cannot continue.
It reads on stdin which nodes take part in the transfers, and every rank makes the same plan from them. `rates` has the
rates of the rank's first transfers; until the rank is `done`, the next transfer has begun but not ended. Slurm carries
the lines, so a verdict needs neither a port nor a shared folder: either may be broken.

The judging functions are pure. A rate is slow if it is more than 15 % below the median of its peers, which have devices
of the same name; without a peer it is not judged. If most nodes fail
in the same way, as with a missing package, or if no two nodes have the same versions, the set-up is at fault and not a
node.
"""

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

from hpc_gpt.core.files import json_object
from hpc_gpt.core.format import counted, show_bytes
from hpc_gpt.core.process import seconds_given
from hpc_gpt.core.processes.heartbeats import SLOW, median_of_others

# A variable of a rank's environment: the command whose JSON replaces figures.
COMMAND = "HPC_GPT_PROBE_COMMAND"
# In the attempt's folder during the preflight: a file that every node must see, and one file from each node.
SHARED = "preflight"
SEEN_BY_ALL = "seen-by-all"
NODE_FILE = "node-"

_MARK = "hpc-gpt-preflight "
# srun cuts lines after 1,024 bytes. A piece of this many characters, quoted in JSON, fits in one line.
_LINE, _PIECE = 1000, 400


def preflight_limit_s() -> float:
    """The seconds that a preflight may take, by HPC_GPT_PREFLIGHT_S. Raises ConfigError if that is not a number of
    seconds."""
    return seconds_given("HPC_GPT_PREFLIGHT_S", "180", "300 where torch loads slowly")


def encode(node: str, local: int, **fields: Any) -> str:
    """Encodes the fields as a line, or as several lines with a `piece` each; all but the last have `more`."""
    origin = {"node": node, "local": local, "time": time.time()}
    line, text = json.dumps(origin | fields), json.dumps(fields)
    if len(line) <= _LINE:
        return f"{_MARK}{line}\n"
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    marks = [{"more": True}] * (len(pieces) - 1) + [{}]
    lines = (json.dumps(origin | {"piece": piece} | mark) for piece, mark in zip(pieces, marks, strict=True))
    return "".join(f"{_MARK}{line}\n" for line in lines)


def decode(line: str) -> dict[str, Any] | None:
    """Decodes the fields of a line; None for any other output."""
    # Ranks share a stream: another rank's unfinished line may come first.
    fields = json_object(line.partition(_MARK)[2]) or {}
    return fields if fields.keys() >= {"node", "local", "time"} else None


# Seconds between a node's clock and the others': from the first on a warning, from the second on a bad node.
SKEW_WARN_S = 2.0
SKEW_BAD_S = 60.0

# Figures of a rank that are compared: the finding's name, its text and unit, and whether it marks a bad node.
_COMPARED = {
    # Another process on a GPU takes its memory and its time.
    "memory_free_gib": ("memory", "{:g} GiB free", "GiB", True),
    "matmul_tflops": ("matmul_tflops", "matmul {:g} TFLOP/s", "TFLOP/s", True),
    "host_to_device_gb_s": ("host_to_device_gb_s", "host to device {:g} GB/s", "GB/s", False),
    "write_mb_s": ("write_mb_s", "shared disk {:g} MB/s", "MB/s", False),
}
_T = TypeVar("_T")
# A finding about several nodes names at most this many.
_NAMED = 8
_SETUP_ERRORS = ("ModuleNotFoundError", "ImportError", "ConfigError")


@dataclass(frozen=True)
class Finding:
    """One fault. `node`: the node at fault. If no node is, `ended` is the class with which the attempt ends, None for a
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
    """The lines that a node's ranks have sent, as {local rank: the fields of all its lines}.

    `skew_s`: seconds by which the node's clock is ahead of the judge's. `seen`: its file on the shared disk is visible
    to the judge.
    """

    sent: dict[int, dict[str, Any]] = field(default_factory=dict)
    skew_s: float | None = None
    seen: bool = True

    @property
    def figures(self) -> list[dict[str, Any]]:
        return [sent["figures"] for sent in self.sent.values() if "figures" in sent]

    @property
    def device(self) -> str:
        """The names of the node's devices, by which it has peers; empty if they are not known."""
        return ", ".join(sorted({str(figures.get("device") or "") for figures in self.figures}))

    @property
    def failed(self) -> dict[int, str]:
        """{local rank: why it failed}."""
        return {local: sent["failed"] for local, sent in self.sent.items() if "failed" in sent}

    @property
    def answered(self) -> int:
        """The number of ranks that have sent figures or a failure."""
        return sum("figures" in sent or "failed" in sent for sent in self.sent.values())

    @property
    def ahead_s(self) -> float | None:
        """The seconds by which the node's clock is ahead: from its probe command, else as measured."""
        skew_s = self.worst("clock_skew_s")
        return self.skew_s if skew_s is None else skew_s

    def worst(self, name: str) -> float | None:
        """The smallest value of a figure over the node's ranks; None if no rank has it."""
        values = [value for figures in self.figures if isinstance(value := figures.get(name), int | float)]
        return min(values, default=None)


@dataclass(frozen=True)
class Measure:
    """The rate of one exchange in GB/s, and the nodes that took part."""

    kind: str
    axis: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    gb_s: float


def judge_devices(reports: Mapping[str, NodeReport], ranks_per_node: int) -> list[Finding]:
    """Judges each node's own figures. Every node of the allocation has a report; a silent node's report is empty."""
    findings = [*_broken(reports, ranks_per_node)]
    sound = {name: report for name, report in reports.items() if name not in {finding.node for finding in findings}}
    for judge in (_versions, _skewed, _unseen, _fewer_devices, _below_peers):
        findings += judge(sound)
    return findings


def judge_exchanges(measures: Sequence[Measure], devices: Mapping[str, str]) -> list[Finding]:
    """Judges the rates of the exchanges. `devices`: {node: the names of its devices}.

    A node is slow if all its exchanges of a kind are slow, while its partners have others that are not. If a slow
    exchange does not show which of its nodes is slow, it gives a warning, unless a slow node explains it.
    """
    findings: dict[str, Finding] = {}
    unclear: list[tuple[Measure, Finding]] = []
    by_kind: dict[tuple[str, str, frozenset[str]], list[Measure]] = {}
    for measure in measures:
        of_nodes = frozenset(devices.get(node, "") for node in measure.nodes)
        by_kind.setdefault((measure.kind, measure.axis, of_nodes), []).append(measure)
    for (kind, axis, _), alike in by_kind.items():
        of = "within the node" if axis == "node" else f"of {'an' if axis == 'ep' else 'a'} {axis} group"
        name = f"exchange of a pair of {axis}" if kind == "pair" else f"{'all-reduce' if kind == 'ring' else kind} {of}"
        well: dict[float, set[str]] = {}
        for at, rate, peers in _slow({at: measure.gb_s for at, measure in enumerate(alike)}):
            if peers not in well:
                well[peers] = {node for measure in alike if measure.gb_s >= SLOW * peers for node in measure.nodes}
            one = alike[at]
            suspects = [node for node in dict.fromkeys(one.nodes) if node not in well[peers]]
            text = f"{name} {rate:g} GB/s, median of its peers {peers:g}"
            if len(suspects) == 1:
                findings.setdefault(suspects[0], Finding("all_reduce", text, suspects[0], None, rate, peers, "GB/s"))
            else:
                text = f"{text}, between {some_of(one.nodes)}"
                unclear.append((one, Finding("all_reduce", text, None, None, rate, peers, "GB/s")))
    return [*findings.values(), *(finding for one, finding in unclear if findings.keys().isdisjoint(one.nodes))]


def some_of(nodes: Sequence[str]) -> str:
    """Names the first nodes, and the number of the others."""
    return ", ".join(nodes[:_NAMED]) + (f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else "")


def _slow(values: Mapping[_T, float]) -> list[tuple[_T, float, float]]:
    """Lists (key, its value, the median of the others) for each value that is more than 15 % below that median."""
    ordered = sorted(values.values())
    pairs = ((what, value, median_of_others(ordered, value)) for what, value in values.items())
    return [(what, value, peers) for what, value, peers in pairs if peers is not None and value < SLOW * peers]


def judge_space(free_gib: float | None, one_gib: float, all_gib: float, folder: str) -> list[Finding]:
    """Gives a finding if the checkpoints to come need more space than is free; without space for the next one the
    attempt ends as disk_full. All sizes in GiB; `free_gib` is None if unknown."""
    if free_gib is None or all_gib <= 0 or free_gib >= all_gib:
        return []
    label, needed = ("next checkpoint takes", one_gib) if free_gib < one_gib else ("checkpoints to come take", all_gib)
    text = f"{show_bytes(free_gib * 2**30)} are free in {folder}, the {label} about {show_bytes(needed * 2**30)}"
    return [Finding("space", text, None, "disk_full" if free_gib < one_gib else None, free_gib, needed, "GiB")]


def choose_nodes(nodes: Sequence[str], bad: Iterable[str], needed: int) -> list[str]:
    """The nodes on which the ranks run: the first sound ones, fewer than `needed` if there are not enough."""
    excluded = set(bad)
    return [node for node in nodes if node not in excluded][:needed]


def too_few(bad: Mapping[str, str], nodes: Sequence[str], needed: int) -> str:
    """The cause of an attempt's end for which too few nodes are sound."""
    named = "; ".join(f"{node}: {why}" for node, why in bad.items())
    return f"bad node {named}" + (f", and {counted(len(nodes) - needed, 'spare')}" if len(nodes) > needed else "")


def _broken(reports: Mapping[str, NodeReport], ranks_per_node: int) -> list[Finding]:
    """Finds nodes that were silent, or on which a probe failed; if most nodes are broken, the set-up is at fault."""
    causes = {}
    for name, report in reports.items():
        silent = ranks_per_node - report.answered
        if report.failed:
            rank, why = min(report.failed.items())
            causes[name] = f"rank {rank} on it failed: {why}"
        elif silent:
            missing = f"{silent} of its {ranks_per_node} ranks gave no figures in time"
            causes[name] = missing if report.sent else "it did not answer"
    errors = " ".join(error for report in reports.values() for error in report.failed.values())
    of_setup = len(reports) == len(causes) and any(name in errors for name in _SETUP_ERRORS)
    if causes and (of_setup or 2 * len(causes) > len(reports) > 1):
        first = next(iter(causes))
        text = f"{len(causes)} of {len(reports)} nodes cannot be probed; {first}: {causes[first]}"
        return [Finding("probe", text, None, "user_error" if of_setup else "error")]
    return [Finding("probe", text, name) for name, text in causes.items()]


def _versions(reports: Mapping[str, NodeReport]) -> list[Finding]:
    of = {name: report.figures[0].get("versions") or {} for name, report in reports.items() if report.figures}
    counts = Counter(json.dumps(node_versions, sort_keys=True) for node_versions in of.values()).most_common()
    if len(counts) < 2:
        return []
    if 2 * counts[0][1] <= len(of):
        sets = "; ".join(
            f"{name}: {', '.join(f'{key} {node_versions[key]}' for key in sorted(node_versions))}"
            for name, node_versions in list(of.items())[:4]
        )
        return [Finding("versions", f"the nodes differ in their versions: {sets}", None, "user_error")]
    usual, findings = json.loads(counts[0][0]), []
    for name, node_versions in of.items():
        keys = [key for key in sorted({*node_versions, *usual}) if node_versions.get(key) != usual.get(key)]
        text = ", ".join(
            f"{key} {node_versions.get(key, 'missing')} instead of {usual.get(key, 'none')}" for key in keys
        )
        findings += [Finding("versions", f"{text}, as on no other node", name)] if keys else []
    return findings


def _skewed(reports: Mapping[str, NodeReport]) -> list[Finding]:
    clocks = {name: ahead for name, report in reports.items() if (ahead := report.ahead_s) is not None}
    # Two clocks have no majority. Then the clock of the judge counts, which runs on the first node.
    usual = median(clocks.values()) if len(clocks) > 2 else 0.0
    findings = []
    for name, off in ((name, skew - usual) for name, skew in clocks.items()):
        if abs(off) >= SKEW_WARN_S:
            bad = abs(off) >= SKEW_BAD_S
            text = f"its clock is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} the others'"
            findings.append(_of_node("clock", text, name, bad, off, 0.0, "s"))
    return findings


def _of_node(what: str, text: str, node: str, bad: bool, figure: float, usual: float, unit: str) -> Finding:
    """A finding that makes a node bad, or a warning about the node."""
    return Finding(what, text if bad else f"{node}: {text}", node if bad else None, None, figure, usual, unit)


def _unseen(reports: Mapping[str, NodeReport]) -> list[Finding]:
    blind = [
        name
        for name, report in reports.items()
        if not report.seen or any(figures.get("sees_run_folder") is False for figures in report.figures)
    ]
    if 2 * len(blind) > len(reports):
        text = f"the run folder is not shared: {len(blind)} of {len(reports)} nodes and this one see different files"
        return [Finding("shared_disk", text, None, "user_error")]
    return [Finding("shared_disk", "others do not see what it writes in the run folder", name) for name in blind]


def _fewer_devices(reports: Mapping[str, NodeReport]) -> list[Finding]:
    counts = {name: count for name, report in reports.items() if (count := report.worst("devices")) is not None}
    findings = []
    for name, count in counts.items():
        # A node that shows none has no name of a device, either.
        peers = [other for at, other in counts.items() if not count or reports[at].device == reports[name].device]
        usual = Counter(peers).most_common(1)[0][0]
        if count < usual:
            findings.append(
                Finding("devices", f"{count:g} devices, {usual:g} on other nodes", name, None, count, usual)
            )
    return findings


def _below_peers(reports: Mapping[str, NodeReport]) -> list[Finding]:
    findings = []
    for figure, (what, text, unit, bad) in _COMPARED.items():
        rates = {
            name: rate
            for name, report in reports.items()
            if (rate := report.worst(figure)) is not None
            and all(_is_judged(figures, figure) for figures in report.figures)
        }
        by_device: dict[str, dict[str, float]] = {}
        for name, rate in rates.items():
            by_device.setdefault(reports[name].device, {})[name] = rate
        for name, value, peers in itertools.chain.from_iterable(map(_slow, by_device.values())):
            message = f"{text.format(value)}, median of its peers {peers:g}"
            findings.append(_of_node(what, message, name, bad, value, peers, unit))
    return findings


def _is_judged(figures: Mapping[str, Any], figure: str) -> bool:
    """Whether a rank's figure can be compared: a GPU's, or the matmul of a probe command; a CPU's depends on its
    load."""
    return bool(figures.get("judged")) and (figure == "matmul_tflops" or figures.get("device") != "cpu")
