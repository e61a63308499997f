"""`python -m hpc_gpt.doctor.preflight RUN ATTEMPT NODES -- COMMAND…`: probes a job's nodes before its ranks start.

RUN is the run folder, NODES the names of the job's nodes separated by blanks. COMMAND starts
`python -m hpc_gpt.train.preflight` for every rank of every node. Needs no torch. Writes `preflight.json` in the
attempt's folder and a table on stderr, notes bad nodes, and prints one line on stdout: `nodes n1,n3`, the nodes that
the ranks run on, or `end CLASS CAUSE` if the attempt ends here. It takes seconds, at most HPC_GPT_PREFLIGHT_S (180).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from hpc_gpt.columns import Column, grid
from hpc_gpt.ends import bad_nodes
from hpc_gpt.errors import RunFolderError
from hpc_gpt.files import write_once
from hpc_gpt.preflight.lines import NODE_FILE, PREFLIGHT, SEEN_BY_ALL, SHARED, preflight_limit_s
from hpc_gpt.preflight.probe import Probe
from hpc_gpt.preflight.verdict import Finding, choose_nodes, judge_devices, judge_exchanges, judge_space
from hpc_gpt.runs.record import finite
from hpc_gpt.runs.room import room_needed_gib
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.secrets import hide_secrets
from hpc_gpt.words import counted, plain

SCHEMA = 1
# The share of the limit for what each rank measures alone: most of it is loading torch from a cold shared disk.
_ALONE = 0.65
# How long to wait for another node's file: NFS caches a missing file for up to 30 s, but not in a new folder.
_SIGHT_S = 10.0
# The message of a rank that failed because another one did.
_CONSEQUENCE = re.compile(r"connect|peer|time|socket|abort|store", re.IGNORECASE)
_MOST_NODES = 64


class Preflight:
    """One preflight: its findings, the nodes it chose, and how the attempt ends if it does."""

    def __init__(
        self, run: RunFolder, number: int, nodes: Sequence[str], command: Sequence[str], host: str | None = None
    ) -> None:
        """`host`: the address of the first rank for the others, by default its node's name with the profile's
        suffix."""
        self.run = run
        self._host = host or os.environ.get("HPC_GPT_MASTER_ADDR")
        self.attempt = run.attempt(number)
        self.resolved = run.resolved()
        self.nodes = list(dict.fromkeys(nodes))
        self.command = list(command)
        self.limit_s = preflight_limit_s()
        self.findings: list[Finding] = []
        self.chosen: list[str] = []
        self.took_s = 0.0
        self.ended: tuple[str, str] | None = None

    def run_probe(self) -> Probe:
        """Probes and judges the nodes, and chooses those to run on."""
        began = time.monotonic()
        shared = self.attempt.folder / SHARED
        shared.mkdir(exist_ok=True)
        (shared / SEEN_BY_ALL).touch()
        probe = Probe(self.command, self.nodes, self.resolved.ranks_per_node)
        try:
            probe.read_figures(self.limit_s * _ALONE)
            until = time.monotonic() + _SIGHT_S
            for name, report in probe.reports.items():
                file = shared / f"{NODE_FILE}{name}"
                while report.figures and not file.is_file() and time.monotonic() < until:
                    time.sleep(0.1)
                report.seen = not report.figures or file.is_file()
            self.findings = judge_devices(probe.reports, self.resolved.ranks_per_node)
            self._judge_space(probe)
            # Exchanges cannot help if the attempt ends anyway, or too few nodes are sound.
            sound = choose_nodes(self.nodes, self._bad(), len(self.nodes))
            if len(sound) >= self.resolved.nodes and not any(each.ended for each in self.findings):
                self._run_exchanges(probe, sound, self.limit_s - (time.monotonic() - began))
        finally:
            probe.close()
            shutil.rmtree(shared, ignore_errors=True)
        self._choose()
        self.took_s = time.monotonic() - began
        return probe

    def _run_exchanges(self, probe: Probe, sound: Sequence[str], limit_s: float) -> None:
        """Measures and judges exchanges among the sound nodes; the groups of the layout are on the first of them."""
        plan = {
            "ranks": [(node, local) for node in sound for local in range(self.resolved.ranks_per_node)],
            "host": self._host or sound[0] + self.resolved.cluster.node_suffix,
            "port": probe.reports[sound[0]].sent[0]["port"],
        }
        probe.run_exchanges(limit_s, plan)
        bad = self._bad()
        every = [figures for report in probe.reports.values() for figures in report.figures]
        # A CPU's rates are not judged, unless they are given.
        if all({"pair_gb_s", "all_reduce_gb_s"} & each.keys() or each.get("judged") for each in every):
            self.findings += [each for each in judge_exchanges(probe.measures) if each.node not in bad]
        self.findings += self._broken_exchanges(probe, plan["ranks"])

    def _broken_exchanges(self, probe: Probe, asked: Sequence[tuple[str, int]]) -> list[Finding]:
        """Findings from exchanges of the asked ranks, spares' included, that did not complete.

        The bad node is the only one with an error that no lost connection explains; else the only silent one while
        others lost their connection; else the one that all silent exchanges have in common.
        """
        silent, lost = probe.silent_exchanges, probe.lost
        if not silent and not lost:
            if not probe.measures and len(asked) > 1:
                return [Finding("exchanges", "no rank has made its exchanges, so no rate between them is known")]
            return []
        own = {node: error for (node, _), error in lost.items() if not _CONSEQUENCE.search(error)}
        if len(own) == 1:
            ((node, why),) = own.items()
            return [Finding("exchanges", f"a rank on it failed: {why}", node)]
        why = next(iter(lost.values()), f"no end within {self.limit_s:.0f} s")
        common = set.intersection(*map(set, silent)) if silent else set()
        for suspects in (probe.silent_nodes if lost else set(), common):
            if len(suspects) == 1:
                return [Finding("exchanges", f"the others do not reach it: {why}", suspects.pop())]
        among = ", ".join(dict.fromkeys(node for nodes in silent for node in nodes)) or "all nodes"
        return [Finding("exchanges", f"an exchange among {among} broke: {why}", None, "collective_timeout")]

    def _judge_space(self, probe: Probe) -> None:
        free = [found for report in probe.reports.values() if (found := report.worst("free_gib")) is not None]
        one, every = room_needed_gib(self.resolved, self.run)
        self.findings += judge_space(min(free, default=None), one, every, str(self.run.path))

    def _bad(self) -> dict[str, Finding]:
        """The first finding of each node that has one."""
        bad: dict[str, Finding] = {}
        for finding in self.findings:
            if finding.node is not None:
                bad.setdefault(finding.node, finding)
        return bad

    def _choose(self) -> None:
        """Chooses the nodes to run on, or notes how the attempt ends."""
        bad = self._bad()
        self.chosen = choose_nodes(self.nodes, bad, self.resolved.nodes)
        fault = next((each for each in self.findings if each.ended), None)
        if fault is not None and fault.ended:
            self.ended = (fault.ended, f"preflight: {fault.words}")
        elif len(self.chosen) < self.resolved.nodes:
            named = "; ".join(f"{node}: {finding.words}" for node, finding in bad.items())
            spares = len(self.nodes) - self.resolved.nodes
            left = f", and {counted(spares, 'spare')}" if spares else ""
            self.ended = ("node_failure", f"preflight: bad node {named}{left}")

    def note_bad_nodes(self) -> None:
        """Excludes the bad nodes from all runs on the cluster, for the profile's `bad_node_hours`."""
        profile = self.resolved.cluster
        for node, finding in self._bad().items():
            bad_nodes.note(profile.name, node, finding.words, self.run.run_id, profile.bad_node_hours, sure=True)

    def write_figures(self, probe: Probe) -> None:
        """Writes preflight.json. Raises RunFolderError."""
        ended, cause = self.ended or (None, None)
        figures = {
            "schema": SCHEMA,
            "time": time.time(),
            "took_s": round(self.took_s, 3),
            "limit_s": self.limit_s,
            "allocated": self.nodes,
            "nodes": self.chosen,
            "ended": ended,
            "cause": cause,
            "findings": [asdict(each) for each in self.findings],
            "ranks": [
                {
                    "node": name,
                    "local_rank": local,
                    "clock_ahead_s": report.ahead_s,
                    "failed": sent.get("failed"),
                    "traceback": sent.get("trace"),
                    **sent.get("figures", {}),
                }
                for name, report in probe.reports.items()
                for local in range(self.resolved.ranks_per_node)
                for sent in [report.sent.get(local, {})]
            ],
            "exchanges": [asdict(each) for each in probe.measures],
        }
        text = json.dumps(_without_secrets(finite(figures)), indent=1, allow_nan=False)
        write_once(self.attempt.folder / PREFLIGHT, text + "\n")


def _without_secrets(value: Any) -> Any:
    """The value without secrets in texts that programs printed."""
    if isinstance(value, dict):
        return {key: _without_secrets(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_secrets(part) for part in value]
    return "\n".join(map(hide_secrets, value.splitlines())) if isinstance(value, str) else value


def write_table(preflight: Preflight, probe: Probe, out: TextIO) -> None:
    """Writes a table for the log: each node with its worst figures, then the findings and the consequences.

    At most 64 nodes are shown, those with a finding first.
    """
    nodes, ranks = len(preflight.nodes), preflight.resolved.ranks_per_node
    out.write(f"preflight of {counted(nodes, 'node')} x {ranks}, {preflight.took_s:.1f} s\n")
    wrong = {finding.node for finding in preflight.findings}
    shown = sorted(preflight.nodes, key=lambda node: node not in wrong)[:_MOST_NODES]
    rows = [(node, probe) for node in preflight.nodes if node in shown]
    out.write(textwrap.indent(grid(_COLUMNS, rows).aligned(), "  "))
    if nodes > len(shown):
        out.write(f"  … {nodes - len(shown)} more nodes in preflight.json\n")
    for finding in preflight.findings:
        level = f"bad node {finding.node}" if finding.node else "ends" if finding.ended else "warning"
        out.write(f"  {level}: {finding.words}\n")
    spares = [node for node in preflight.chosen if node in preflight.nodes[preflight.resolved.nodes :]]
    if spares and not preflight.ended:
        out.write(f"  {', '.join(spares)} {'takes' if len(spares) == 1 else 'take'} the place of a bad node\n")
    out.flush()


def _device(row: tuple[str, Probe]) -> str:
    report = row[1].reports[row[0]]
    return next((str(each.get("device")) for each in report.figures), "?" if report.sent else "no answer")


def _worst(heading: str, figure: str) -> Column:
    """A column of the worst figure of a node's ranks."""
    return Column(heading, (figure,), lambda row: row[1].reports[row[0]].worst(figure), "{:.3g}".format)


def _slowest(heading: str, kind: str) -> Column:
    """A column of the slowest exchange of a kind that a node took part in."""

    def rate(row: tuple[str, Probe]) -> float | None:
        node, probe = row
        return min((each.gb_s for each in probe.measures if each.kind == kind and node in each.nodes), default=None)

    return Column(heading, (kind,), rate, "{:.3g}".format)


_COLUMNS = (
    Column("node", ("node",), lambda row: row[0], right=False),
    Column("device", ("device",), _device, right=False),
    _worst("free GiB", "memory_free_gib"),
    _worst("matmul TFLOP/s", "matmul_tflops"),
    _worst("to device GB/s", "host_to_device_gb_s"),
    _worst("disk MB/s", "write_mb_s"),
    _slowest("pairs GB/s", "pair"),
    _slowest("all-reduce GB/s", "ring"),
    Column("clock s", ("ahead_s",), lambda row: row[1].reports[row[0]].ahead_s, "{:+.1f}".format),
)


def main(arguments: Sequence[str]) -> int:
    at = list(arguments).index("--")
    folder, number, nodes = arguments[:at]
    try:
        preflight = Preflight(RunFolder(Path(folder)), int(number), nodes.split(), arguments[at + 1 :])
        probe = preflight.run_probe()
        write_table(preflight, probe, sys.stderr)
        preflight.note_bad_nodes()
        try:
            preflight.write_figures(probe)
        except RunFolderError as fault:
            sys.stderr.write(f"warning: {fault}\n")
    except Exception as fault:  # whatever it is, the run starts without a preflight
        sys.stderr.write(f"warning: no preflight: {type(fault).__name__}: {fault}\n")
        return 1
    if preflight.ended:
        ended, cause = preflight.ended
        print(f"end {ended} {' '.join(plain(cause, ' ').split())}")  # job.sh writes it as JSON
    else:
        print(f"nodes {','.join(preflight.chosen)}")
    return 0
