"""`python -m hpc_gpt.doctor.preflight RUN ATTEMPT NODES -- COMMAND…`: probes a job's nodes before its ranks start.

RUN is the run folder, NODES the names of the job's nodes with blanks between, COMMAND what starts
`python -m hpc_gpt.train.preflight` for every rank of every node. Needs no torch. It leaves `preflight.json` in the
attempt's folder, a table on stderr, notes bad nodes, and says one line on stdout: `nodes n1,n3` for those that the
ranks run on, or `end CLASS CAUSE` where the attempt ends here. It takes seconds, and HPC_GPT_PREFLIGHT_S (180) at most.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_gpt.doctor.checkpoint_room import room_needed_gib
from hpc_gpt.doctor.conversation import Conversation, in_sight
from hpc_gpt.doctor.preflight_table import write_table
from hpc_gpt.doctor.verdict import Finding, choose_nodes, judge_devices, judge_exchanges, judge_space
from hpc_gpt.errors import RunFolderError
from hpc_gpt.preflight_lines import LIMIT, PREFLIGHT, SEEN_BY_ALL, SHARED
from hpc_gpt.runs import bad_nodes
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.secrets import hide_secrets
from hpc_gpt.small_files import write_once

SCHEMA = 1
_LIMIT_S = 180.0
# Of the limit, for what each rank finds alone: torch from a cold shared disk is the longest of it.
_ALONE = 0.65
# A file of another node: NFS caches what was not there for up to 30 s, of which a fresh folder has none.
_SIGHT_S = 10.0
# What a rank says when it was another one that failed.
_CONSEQUENCE = re.compile(r"connect|peer|time|socket|abort|store", re.IGNORECASE)


class Preflight:
    """One preflight: its findings, the nodes it chose, and how the attempt ends if it does."""

    def __init__(
        self, run: RunFolder, number: int, nodes: Sequence[str], command: Sequence[str], host: str | None = None
    ) -> None:
        """`host` is where the ranks reach the first of them, by default its node's name with the profile's suffix."""
        self.run = run
        self._host = host or os.environ.get("HPC_GPT_MASTER_ADDR")
        self.attempt = run.attempt(number)
        self.resolved = run.resolved()
        self.nodes = list(dict.fromkeys(nodes))
        self.command = list(command)
        self.limit_s = float(os.environ.get(LIMIT) or _LIMIT_S)
        self.findings: list[Finding] = []
        self.chosen: list[str] = []
        self.took_s = 0.0
        self.ended: tuple[str, str] | None = None

    def hold(self) -> Conversation:
        """Probes, judges and chooses."""
        began = time.monotonic()
        shared = self.attempt.folder / SHARED
        shared.mkdir(exist_ok=True)
        (shared / SEEN_BY_ALL).touch()
        talk = Conversation(self.command, self.nodes, self.resolved.ranks_per_node)
        try:
            talk.hear_devices(self.limit_s * _ALONE)
            wrote = [name for name, report in talk.reports.items() if report.figures]
            seen = in_sight(shared, wrote, _SIGHT_S)
            for name in wrote:
                talk.reports[name].seen = name in seen
            self.findings = judge_devices(talk.reports, self.resolved.ranks_per_node)
            self._judge_space(talk)
            if not self._ends():
                self._exchange(talk, self.limit_s - (time.monotonic() - began))
        finally:
            talk.close()
            shutil.rmtree(shared, ignore_errors=True)
        self._settle()
        self.took_s = time.monotonic() - began
        return talk

    def _exchange(self, talk: Conversation, limit_s: float) -> None:
        """The exchanges among all sound nodes; the layout is on the first of them."""
        sound = choose_nodes(self.nodes, self._bad(), len(self.nodes))
        ranks = [(node, local) for node in sound for local in range(self.resolved.ranks_per_node)]
        plan: dict[str, Any] = {
            "ranks": ranks,
            "host": self._host or sound[0] + self.resolved.cluster.node_suffix,
            "port": talk.reports[sound[0]].ports.get(0),
        }
        talk.hear_exchanges(limit_s, plan)
        known = {finding.node for finding in self.findings if finding.node}
        every = [figures for report in talk.reports.values() for figures in report.figures.values()]
        judged = all(each.get("judged") or "pair_gb_s" in each or "all_reduce_gb_s" in each for each in every)
        self.findings += [
            each
            for each in judge_exchanges(list(talk.measures.values()), judged and bool(every))
            if each.node is None or each.node not in known
        ]
        self.findings += self._broken_exchanges(talk, ranks)

    def _broken_exchanges(self, talk: Conversation, ranks: Sequence[tuple[str, int]]) -> list[Finding]:
        """What did not come to its end. To blame is the one node with an error that no lost connection explains, else
        the one that said nothing while others lost it, else the one that all silent exchanges have in common."""
        silent = talk.silent_exchanges
        if not silent and not talk.lost:
            if not talk.measures and len(ranks) > 1:
                return [Finding("exchanges", "no rank has made its exchanges, so no rate between them is known")]
            return []
        words = next(iter(talk.lost.values()), f"no end within {self.limit_s:.0f} s")
        own = {node: said for (node, _), said in talk.lost.items() if not _CONSEQUENCE.search(said)}
        if len(own) == 1:
            node, words = next(iter(own.items()))
            return [Finding("exchanges", f"a rank on it failed: {words}", node)]
        common = set.intersection(*(set(nodes) for _, _, nodes in silent)) if silent else set()
        for suspects in (talk.silent_nodes if talk.lost else set(), common):
            if len(suspects) == 1:
                return [Finding("exchanges", f"the others do not reach it: {words}", next(iter(suspects)))]
        among = ", ".join(dict.fromkeys(node for _, _, nodes in silent for node in nodes)) or "all nodes"
        return [Finding("exchanges", f"an exchange among {among} broke: {words}", None, "collective_timeout")]

    def _judge_space(self, talk: Conversation) -> None:
        free = [found for report in talk.reports.values() if (found := report.worst("free_gib")) is not None]
        one, every = room_needed_gib(self.resolved, self.run)
        self.findings += judge_space(min(free, default=None), one, every, str(self.run.path))

    def _bad(self) -> dict[str, Finding]:
        """The first finding of each node that has one."""
        bad: dict[str, Finding] = {}
        for finding in self.findings:
            if finding.node is not None:
                bad.setdefault(finding.node, finding)
        return bad

    def _ends(self) -> bool:
        """Whether the attempt ends whatever else is found."""
        if any(each.ended for each in self.findings):
            return True
        return len(choose_nodes(self.nodes, self._bad(), self.resolved.nodes)) < self.resolved.nodes

    def _settle(self) -> None:
        bad = self._bad()
        self.chosen = choose_nodes(self.nodes, bad, self.resolved.nodes)
        fault = next((each for each in self.findings if each.ended), None)
        if fault is not None and fault.ended:
            self.ended = (fault.ended, f"preflight: {fault.words}")
        elif len(self.chosen) < self.resolved.nodes:
            named = "; ".join(f"{node}: {finding.words}" for node, finding in bad.items())
            spares = len(self.nodes) - self.resolved.nodes
            left = f", and {spares} spare{'s' * (spares != 1)}" if spares else ""
            self.ended = ("node_failure", f"preflight: bad node {named}{left}")

    def note_bad_nodes(self) -> None:
        """Keeps every run off the nodes that were found bad, for the profile's hours."""
        profile = self.resolved.cluster
        for node, finding in self._bad().items():
            bad_nodes.note(profile.name, node, finding.words, self.run.run_id, profile.bad_node_hours, sure=True)

    def leave_figures(self, talk: Conversation) -> None:
        """preflight.json, whole."""
        told = {
            "schema": SCHEMA,
            "time": time.time(),
            "took_s": round(self.took_s, 3),
            "limit_s": self.limit_s,
            "allocated": self.nodes,
            "nodes": self.chosen,
            "ended": self.ended[0] if self.ended else None,
            "cause": self.ended[1] if self.ended else None,
            "findings": [asdict(each) for each in self.findings],
            "ranks": [
                {
                    "node": name,
                    "local_rank": local,
                    "clock_ahead_s": report.ahead_s,
                    "failed": report.failed.get(local),
                    "traceback": report.traces.get(local),
                    **report.figures.get(local, {}),
                }
                for name, report in talk.reports.items()
                for local in range(self.resolved.ranks_per_node)
            ],
            "exchanges": [asdict(each) for each in talk.measures.values()],
        }
        write_once(self.attempt.folder / PREFLIGHT, json.dumps(_fit_to_keep(told), indent=1, allow_nan=False) + "\n")


def _fit_to_keep(told: Any) -> Any:
    """The same without secrets in its words, which are a program's, and null for what is no finite number."""
    if isinstance(told, dict):
        return {key: _fit_to_keep(value) for key, value in told.items()}
    if isinstance(told, list | tuple):
        return [_fit_to_keep(value) for value in told]
    if isinstance(told, str):
        return "\n".join(hide_secrets(line) for line in told.splitlines())
    return None if isinstance(told, float) and not math.isfinite(told) else told


def main(arguments: Sequence[str]) -> int:
    at = list(arguments).index("--")
    folder, number, nodes = arguments[:at]
    try:
        preflight = Preflight(RunFolder(Path(folder)), int(number), nodes.split(), arguments[at + 1 :])
        talk = preflight.hold()
        write_table(preflight, talk, sys.stderr)
        preflight.note_bad_nodes()
        try:
            preflight.leave_figures(talk)
        except RunFolderError as fault:
            sys.stderr.write(f"warning: {fault}\n")
    except Exception as fault:  # of our own or of the machine: the ranks that train are to have their chance
        sys.stderr.write(f"warning: no preflight: {type(fault).__name__}: {fault}\n")
        return 1
    if preflight.ended:
        ended, cause = preflight.ended
        plain = "".join(letter if letter.isprintable() else " " for letter in cause)  # job.sh writes it as JSON
        print(f"end {ended} {' '.join(plain.split())}")
    else:
        print(f"nodes {','.join(preflight.chosen)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
