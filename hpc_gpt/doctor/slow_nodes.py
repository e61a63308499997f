"""Nodes that earlier runs found slow or broken."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hpc_gpt.errors import UserError
from hpc_gpt.preflight.lines import PREFLIGHT
from hpc_gpt.runs.find_runs import list_runs
from hpc_gpt.runs.heartbeats import read_heartbeats, slow_nodes
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.runs.stored import read_stored

_NEWEST_RUNS = 20


@dataclass(frozen=True)
class SlowNodeOfRun:
    """A node that a run has found slow or broken."""

    node: str
    run: str
    words: str


def slow_nodes_of_runs(logs: Path, cluster: str) -> list[SlowNodeOfRun]:
    """The slow nodes in heartbeats and preflights of the newest 20 runs on a cluster, each with its newest finding."""
    found: dict[str, SlowNodeOfRun] = {}
    for run in _runs_on(logs, cluster):
        for attempt in run.attempts():
            for slow in slow_nodes(read_heartbeats(attempt.heartbeats)):
                found[slow.node] = SlowNodeOfRun(slow.node, run.run_id, str(slow))
            for finding in read_stored(attempt.folder / PREFLIGHT).get("findings") or []:
                if node := finding.get("node"):
                    found[node] = SlowNodeOfRun(node, run.run_id, f"preflight: {finding.get('words')}")
    return sorted(found.values(), key=lambda each: each.node)


def _runs_on(logs: Path, cluster: str) -> list[RunFolder]:
    """The newest runs on a cluster, oldest first."""

    def is_on(run: RunFolder) -> bool:
        try:
            return run.resolved().cluster.name == cluster
        except UserError:
            return False

    return [*islice(filter(is_on, reversed(list_runs(logs))), _NEWEST_RUNS)][::-1]
