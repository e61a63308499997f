"""What is known of a cluster's nodes: the list of bad ones, and the slow ones that its runs have met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.errors import UserError
from hpc_gpt.preflight_lines import PREFLIGHT
from hpc_gpt.runs.beats import read_beats, slow_nodes
from hpc_gpt.runs.find import list_runs
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.small_files import read_json

_NEWEST_RUNS = 20


@dataclass(frozen=True)
class SlowNode:
    """A node that a run has found slow or broken, and where that is written."""

    node: str
    run: str
    words: str


def slow_nodes_of_runs(logs: Path, cluster: str) -> list[SlowNode]:
    """Of the newest runs on a cluster, what their ranks' beats and their preflights say; each node's newest word."""
    found: dict[str, SlowNode] = {}
    for run in _runs_on(logs, cluster):
        for attempt in run.attempts():
            for slow in slow_nodes(read_beats(attempt.beats)):
                found[slow.node] = SlowNode(slow.node, run.run_id, str(slow))
            findings = read_json(attempt.folder / PREFLIGHT).get("findings")
            for finding in findings if isinstance(findings, list) else []:
                if isinstance(finding, dict) and finding.get("node"):
                    node = str(finding["node"])
                    found[node] = SlowNode(node, run.run_id, f"preflight: {finding.get('words')}")
    return sorted(found.values(), key=lambda each: each.node)


def _runs_on(logs: Path, cluster: str) -> Sequence[RunFolder]:
    """The newest runs on a cluster, oldest first."""
    chosen: list[RunFolder] = []
    for run in reversed(list_runs(logs)):
        try:
            if run.resolved().cluster.name == cluster:
                chosen.append(run)
        except UserError:
            continue
        if len(chosen) == _NEWEST_RUNS:
            break
    return chosen[::-1]
