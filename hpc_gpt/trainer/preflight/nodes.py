"""`python -m hpc_gpt.trainer.preflight.nodes RUN ATTEMPT NODES -- COMMAND…`: probes a job's nodes before the run.

RUN is the run folder, NODES the names of the job's nodes separated by blanks. COMMAND starts
`python -m hpc_gpt.trainer.preflight.rank` for every rank of every node; the word NODES in it stands for srun's options
with the nodes. Needs no torch. Writes `preflight.json` in the attempt's folder and a table on stderr, notes bad nodes,
and prints one line on stdout: `nodes n1,n3 PORT`, the nodes on which the ranks run and where they meet on the first
one, or `end CLASS CAUSE` if the attempt ends here. It takes seconds, at most HPC_GPT_PREFLIGHT_S (180).

At a restart in the job it first ends what the attempts before have left on the nodes, leaves out the nodes that they
name as bad or dead, and finds a port that is free on rank 0's node.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from hpc_gpt.core.checkpoints.disk_space import space_needed_gib
from hpc_gpt.core.columns import Grid
from hpc_gpt.core.ends import bad_nodes
from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import write_once
from hpc_gpt.core.format import NOTHING, counted, plain
from hpc_gpt.core.runs.record import finite
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.secrets import without_secrets
from hpc_gpt.core.slurm.directives import outlives_nodes
from hpc_gpt.core.slurm.environment import ALLOCATION
from hpc_gpt.core.slurm.hosts import first_host
from hpc_gpt.trainer.preflight import script_node
from hpc_gpt.trainer.preflight.left_over import LeftOver
from hpc_gpt.trainer.preflight.probe import Probe, placed
from hpc_gpt.trainer.preflight.verdict import (
    NODE_FILE,
    SEEN_BY_ALL,
    SHARED,
    Finding,
    NodeReport,
    choose_nodes,
    judge_devices,
    judge_exchanges,
    judge_space,
    preflight_limit_s,
    some_of,
    too_few,
)

SCHEMA = 1
# The share of the limit for the measurements of single ranks: most of it is loading torch from a cold shared disk.
_ALONE = 0.65
# How long to wait for another node's file: NFS caches a missing file for up to 30 s, but not in a new folder.
_SIGHT_S = 10.0
# The message of a rank that failed because another one did.
_CONSEQUENCE = re.compile(r"connect|peer|time|socket|abort|store", re.IGNORECASE)
_MOST_NODES = 64
# The finding about a node that an attempt before in the same job has found bad.
LEFT_OUT = "left_out"


class Preflight:
    """One preflight: its findings, the nodes that it chose, and how the attempt ends, if it ends here.

    `host`: the address at which the first rank meets the others, by default its node's name with the profile's suffix.
    `faults`: {node: why it is not probed, and not used}.
    """

    def __init__(
        self,
        run: RunFolder,
        number: int,
        nodes: Sequence[str],
        command: Sequence[str],
        host: str | None = None,
        faults: Mapping[str, str] | None = None,
    ) -> None:
        self.run = run
        self.attempt = run.attempt(number)
        self.resolved = run.resolved()
        self.nodes = list(dict.fromkeys(nodes))
        self.limit_s = preflight_limit_s()
        self._left_out = [Finding(LEFT_OUT, why, node) for node, why in (faults or {}).items()]
        self.findings: list[Finding] = []
        self.chosen: list[str] = []
        self.took_s = 0.0
        self.ended: tuple[str, str] | None = None
        self._host = host or os.environ.get("HPC_GPT_MASTER_ADDR")
        self._shared = self.attempt.folder / SHARED
        self._shared.mkdir(exist_ok=True)
        (self._shared / SEEN_BY_ALL).touch()
        probed, ranks_per_node = (
            [node for node in self.nodes if node not in (faults or {})],
            self.resolved.ranks_per_node,
        )
        self.probe = Probe(placed(command, probed, ranks_per_node), probed, ranks_per_node)

    def judge(self) -> None:
        """Probes and judges the nodes, and chooses those on which the ranks run."""
        began, reports = time.monotonic(), self.probe.reports
        try:
            self.probe.read_figures(self.limit_s * _ALONE)
            until = time.monotonic() + _SIGHT_S
            for name, report in reports.items():
                file = self._shared / f"{NODE_FILE}{name}"
                while report.figures and not file.is_file() and time.monotonic() < until:
                    time.sleep(0.1)
                report.seen = not report.figures or file.is_file()
            self.findings = [
                *self._left_out,
                *judge_devices(reports, self.resolved.ranks_per_node),
                *self._space(reports),
            ]
            # Exchanges cannot help if the attempt ends anyway, or too few nodes are sound.
            sound = choose_nodes(self.nodes, self.bad, len(self.nodes))
            if len(sound) >= self.resolved.nodes and not any(finding.ended for finding in self.findings):
                self._run_exchanges(sound, self.limit_s - (time.monotonic() - began))
        finally:
            self.probe.close()
            shutil.rmtree(self._shared, ignore_errors=True)
        self._choose()
        self.took_s = time.monotonic() - began

    @property
    def bad(self) -> dict[str, Finding]:
        """The first finding of each node that has one."""
        return {finding.node: finding for finding in reversed(self.findings) if finding.node is not None}

    def _space(self, reports: Mapping[str, NodeReport]) -> list[Finding]:
        free = [node_gib for report in reports.values() if (node_gib := report.worst("free_gib")) is not None]
        return judge_space(min(free, default=None), *space_needed_gib(self.resolved, self.run), str(self.run.path))

    def _run_exchanges(self, sound: Sequence[str], limit_s: float) -> None:
        """Measures and judges exchanges among the sound nodes; the layout's groups are placed on the first of them."""
        reports, bad = self.probe.reports, self.bad
        host = self._host or sound[0] + self.resolved.cluster.node_suffix
        self.probe.run_exchanges(limit_s, sound, self.resolved.layout, host, reports[sound[0]].sent[0]["port"])
        every = [figures for report in reports.values() for figures in report.figures]
        # A CPU's rates are not judged, unless the probe command gives them.
        if all(
            {"pair_gb_s", "all_reduce_gb_s"} & rank_figures.keys() or rank_figures.get("judged")
            for rank_figures in every
        ):
            judged = judge_exchanges(self.probe.measures, {name: report.device for name, report in reports.items()})
            self.findings += [finding for finding in judged if finding.node not in bad]
        self.findings += self._broken_exchanges()

    def _broken_exchanges(self) -> list[Finding]:
        """Finds the node at fault for exchanges that did not complete, those of spare nodes included.

        It is the only node with an error that no lost connection explains; else the only silent node while others lost
        their connection; else the one node that all silent exchanges have in common.
        """
        silent, lost = self.probe.silent_exchanges, self.probe.lost
        if not silent and not lost:
            text = "no rank has made its exchanges, so no rate between them is known"
            return [] if self.probe.measures or len(self.probe.places) < 2 else [Finding("exchanges", text)]
        if network := [why for _, why in lost if why.startswith("ConfigError")]:
            return [Finding("network", network[0].partition(": ")[2], None, "user_error")]
        own_faults = {node: why for node, why in lost if not _CONSEQUENCE.search(why)}
        if len(own_faults) == 1:
            return [Finding("exchanges", f"a rank on it failed: {why}", node) for node, why in own_faults.items()]
        why = lost[0][1] if lost else f"no end within {self.limit_s:.0f} s"
        common = set.intersection(*map(set, silent)) if silent else set()
        for suspects in (self.probe.silent_nodes if lost else set(), common):
            if len(suspects) == 1:
                return [Finding("exchanges", f"the others do not reach it: {why}", suspects.pop())]
        among = some_of([*dict.fromkeys(node for nodes in silent for node in nodes)]) or "all nodes"
        return [Finding("exchanges", f"an exchange among {among} broke: {why}", None, "collective_timeout")]

    def _choose(self) -> None:
        """Chooses the nodes on which the ranks run, or notes how the attempt ends."""
        self.chosen = choose_nodes(self.nodes, self.bad, self.resolved.nodes)
        fault = next((finding for finding in self.findings if finding.ended), None)
        if fault is not None and fault.ended:
            self.ended = (fault.ended, f"preflight: {fault.words}")
        elif len(self.chosen) < self.resolved.nodes:
            bad = sorted(self.bad.values(), key=self.findings.index)
            words = too_few({str(finding.node): finding.words for finding in bad}, self.nodes, self.resolved.nodes)
            self.ended = ("node_failure", f"preflight: {words}")

    @property
    def networks(self) -> dict[str, list[str]]:
        """{network interfaces: the nodes whose ranks meet over them}."""
        nodes_by_network: dict[str, list[str]] = {}
        for node, report in self.probe.reports.items():
            if network := next((sent["network"] for sent in report.sent.values() if "network" in sent), None):
                nodes_by_network.setdefault(network, []).append(node)
        return nodes_by_network

    def note_bad_nodes(self) -> None:
        """Excludes the bad nodes from all runs on the cluster for the profile's `bad_node_hours`."""
        profile = self.resolved.cluster
        for node, finding in self.bad.items():
            if finding.what == LEFT_OUT:
                continue  # noted before
            bad_nodes.note(profile.name, node, finding.words, self.run.run_id, profile.bad_node_hours, sure=True)

    def write_figures(self) -> None:
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
            "findings": [asdict(finding) for finding in self.findings],
            "ranks": [
                {
                    "node": name,
                    "local_rank": local,
                    "clock_ahead_s": report.ahead_s,
                    "failed": sent.get("failed"),
                    "traceback": sent.get("trace"),
                    "network": sent.get("network"),
                    **sent.get("figures", {}),
                }
                for name, report in self.probe.reports.items()
                for local in range(self.resolved.ranks_per_node)
                for sent in [report.sent.get(local, {})]
            ],
            "exchanges": [vars(measure) for measure in self.probe.measures],
        }
        text = json.dumps(without_secrets(finite(figures)), indent=1, allow_nan=False)
        write_once(self.attempt.preflight, text + "\n")

    def write_table(self, out: TextIO) -> None:
        """Writes a table for the log: each node with its worst figures, then the findings and their consequences.

        At most 64 nodes are shown, those with a finding first.
        """
        nodes, needed, bad = len(self.nodes), self.resolved.nodes, self.bad
        out.write(f"preflight of {counted(nodes, 'node')} x {self.resolved.ranks_per_node}, {self.took_s:.1f} s\n")
        shown = set(sorted(self.nodes, key=lambda node: node not in bad)[:_MOST_NODES])
        slowest: dict[tuple[str, str], float] = {}
        for measure in self.probe.measures:
            for node in measure.nodes:
                slowest[node, measure.kind] = min(measure.gb_s, slowest.get((node, measure.kind), measure.gb_s))
        reports = self.probe.reports
        kinds = [kind for kind in _EXCHANGES if kind != "all-to-all" or self.resolved.layout.ep > 1]
        headings = [*_HEADINGS, *(f"{_EXCHANGES[kind]} GB/s" for kind in kinds), "clock s"]
        rows = [_row(node, reports.get(node, NodeReport()), slowest, kinds) for node in self.nodes if node in shown]
        right = [heading not in ("node", "device") for heading in headings]
        out.write(textwrap.indent(Grid(headings, right, rows).aligned(), "  "))
        if nodes > len(shown):
            out.write(f"  … {nodes - len(shown)} more nodes in preflight.json\n")
        for network, on in sorted(self.networks.items()):
            out.write(f"  {network}{'' if len(on) == nodes else f' on {some_of(on)}'}\n")
        for finding in self.findings:
            level = f"bad node {finding.node}" if finding.node else "ends" if finding.ended else "warning"
            out.write(f"  {level}: {finding.words}\n")
        spares = [node for node in self.chosen if node in self.nodes[needed:]]
        if spares and not self.ended:
            out.write(f"  {', '.join(spares)} {'takes' if len(spares) == 1 else 'take'} the place of a bad node\n")
        out.flush()


_HEADINGS = ("node", "device", "free GiB", "matmul TFLOP/s", "to device GB/s", "disk MB/s")
# Of the kinds of exchanges; the last one is measured where ranks divide experts.
_EXCHANGES = {"pair": "pairs", "ring": "all-reduce", "all-to-all": "all-to-all"}


def _row(node: str, report: NodeReport, slowest: Mapping[tuple[str, str], float], kinds: Sequence[str]) -> list[str]:
    """A node's row: its worst figures, and its slowest exchange of each kind."""
    device = next((str(figures.get("device")) for figures in report.figures), "?" if report.sent else "no answer")
    rates = [report.worst(name) for name in ("memory_free_gib", "matmul_tflops", "host_to_device_gb_s", "write_mb_s")]
    rates += [slowest.get((node, kind)) for kind in kinds]
    clock = NOTHING if report.ahead_s is None else f"{report.ahead_s:+.1f}"
    return [node, device, *(NOTHING if rate is None else f"{rate:.3g}" for rate in rates), clock]


def main(arguments: Sequence[str]) -> int:
    at = list(arguments).index("--")
    (folder, number, names), command = arguments[:at], arguments[at + 1 :]
    try:
        line = _nodes_line(RunFolder(Path(folder)), int(number), names.split(), command)
    except Exception as fault:  # whatever the fault is, the run starts without a preflight
        sys.stderr.write(f"warning: no preflight: {type(fault).__name__}: {fault}\n")
        return 1
    print(line)
    return 0


def _nodes_line(run: RunFolder, number: int, nodes: Sequence[str], command: Sequence[str]) -> str:
    """The line for the script."""
    resolved, faults, ports = run.resolved(), dict[str, str](), dict[str, int]()
    if run.attempt(number).started().get("in_job"):
        left = LeftOver(run, number, nodes)
        left.end(command)
        nodes, faults, ports = left.nodes, left.faults, left.ports
        if cause := left.why_none_starts(resolved.nodes):
            return _end_line("node_failure", cause)
    preflight = Preflight(run, number, nodes, command, faults=faults)
    preflight.judge()
    preflight.write_table(sys.stderr)
    preflight.note_bad_nodes()
    try:
        preflight.write_figures()
    except RunFolderError as fault:
        sys.stderr.write(f"warning: {fault}\n")
    if preflight.ended:
        return _end_line(*preflight.ended)
    chosen = preflight.chosen
    if outlives_nodes(resolved) and ALLOCATION not in os.environ:
        _watch_script_node(run.attempt(number), nodes, chosen, command)
    return f"nodes {','.join(chosen)} {ports.get(chosen[0]) or os.environ.get('MASTER_PORT', '')}"


def _watch_script_node(attempt: Attempt, nodes: Sequence[str], chosen: Sequence[str], command: Sequence[str]) -> None:
    """Starts script_node, which watches the node of the script, on another node: if possible on one with ranks.

    Every attempt starts it again.
    """
    script = first_host(attempt.started().get("node_list"))
    others = [node for node in (*chosen, *nodes) if node != script]
    where = placed(command, others[:1], 1, "--overlap")
    null = subprocess.DEVNULL
    # In a session of its own: signals to the script's processes, as its node dies, must not end it.
    subprocess.Popen([*where[:-1], script_node.MODULE], stdin=null, stdout=null, stderr=null, start_new_session=True)


def _end_line(ended: str, cause: str) -> str:
    return f"end {ended} {' '.join(plain(cause, ' ').split())}"  # job.sh writes it as JSON


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
