"""The judge's side of the probe protocol: starts a preflight's ranks, reads their figures, sends them the plan of their
exchanges, and reads the rates. The lines are defined in hpc_gpt/preflight_lines.py.

`python -m hpc_gpt.doctor.probe_protocol NODES RANKS_PER_NODE COMMAND…` starts the ranks on this machine, as srun does
on a cluster: the command once for each rank of each node. NODES are names separated by blanks. Its stdin is copied to
every rank, and the ranks write to its stdout.
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from hpc_gpt.doctor.verdict import Measure, NodeReport
from hpc_gpt.preflight_lines import NODE_FILE, decode

# The least time for the slower half of the ranks, after the faster half has answered.
_LATE_S = 10.0
# srun's message about a node that cannot start its part of a step.
_NOT_LAUNCHED = re.compile(r"(?:Task launch for \S+ failed on node|Unable to create step .* on node) (\S+?):? ")


class Probe:
    """The ranks of a preflight, started by one command. `reports`: what each node has sent so far; `measures`: the
    rates of the exchanges; `lost`: why a rank failed in them.

    Nothing waits for ever: `read_figures`, `run_exchanges` and the ranks have time limits, and `close` ends the
    command.
    """

    def __init__(self, command: Sequence[str], nodes: Sequence[str], ranks_per_node: int) -> None:
        self.reports = {name: NodeReport(name) for name in nodes}
        self.measures: dict[tuple[str, str, tuple[int, ...]], Measure] = {}
        self.lost: dict[tuple[str, int], str] = {}
        self._ranks_per_node = ranks_per_node
        self._places: list[tuple[str, int]] = []
        self._done: set[tuple[str, int]] = set()
        self._begun: dict[tuple[str, str, tuple[int, ...]], None] = {}
        self._lines: queue.Queue[tuple[str, float] | None] = queue.Queue()
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            bufsize=1,
        )
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_stdout, args=(self._child.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._child.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def read_figures(self, limit_s: float) -> None:
        """Reads until every rank has sent its figures or its failure, or the limit has passed.

        After half of them have answered, the others get twice that time, and at least 10 s.
        """
        wanted = len(self.reports) * self._ranks_per_node
        began, half = time.monotonic(), 0.0

        def are_enough() -> bool:
            nonlocal half
            answered = sum(len(report.figures.keys() | report.failed.keys()) for report in self.reports.values())
            age = time.monotonic() - began
            if not half and 2 * answered >= wanted > 1:
                half = age
            return answered >= wanted or bool(half and age > half + max(_LATE_S, 2 * half))

        self._read_until(limit_s, are_enough)

    def run_exchanges(self, limit_s: float, plan: dict[str, Any]) -> None:
        """Sends the ranks the plan, and reads until all have made their exchanges or failed, or the limit has
        passed."""
        self._places = [(str(node), int(local)) for node, local in plan["ranks"]]
        self._send(json.dumps(plan) + "\n")
        self._read_until(limit_s, lambda: len(self._done) + len(self.lost) >= len(self._places))

    def close(self) -> None:
        """Closes the ranks' input, after which they end; terminates the command if it does not."""
        self._send("")
        for end in (None, self._child.terminate, self._child.kill):
            if end is not None:
                end()
            try:
                self._child.wait(timeout=3)
                break
            except subprocess.TimeoutExpired:
                continue
        for reader in self._readers:
            reader.join(timeout=2)

    @property
    def silent_nodes(self) -> set[str]:
        """Nodes with a rank that has neither made its exchanges nor reported a failure."""
        return {node for node, local in self._places if (node, local) not in self._done | self.lost.keys()}

    @property
    def silent_exchanges(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """(kind, axis, nodes) of the exchanges that were begun and gave no rate, in the order they began."""
        return [(key[0], key[1], self._nodes_of(key[2])) for key in self._begun if key not in self.measures]

    def _read_until(self, limit_s: float, are_enough: Callable[[], bool]) -> None:
        until = time.monotonic() + limit_s
        while not are_enough():
            if time.monotonic() >= until:
                return
            try:
                line = self._lines.get(timeout=0.5)
            except queue.Empty:
                continue
            if line is None:
                self._lines.put(None)  # for the next reader
                return
            self._take(*line)

    def _take(self, line: str, at: float) -> None:
        fields = decode(line)
        if fields is None:
            sys.stderr.write(f"preflight: {line}")
            return
        report = self.reports.get(str(fields.get("node")))
        local = fields.get("local")
        if report is None or not isinstance(local, int):
            return
        if isinstance(fields.get("time"), int | float):
            # A line arrives late; the one with the least delay measures the clock best.
            ahead = fields["time"] - at
            report.skew_s = ahead if report.skew_s is None else max(report.skew_s, ahead)
        if fields["kind"] == "here":
            report.here.add(local)
        elif fields["kind"] == "device" and isinstance(fields.get("figures"), dict):
            report.figures[local] = fields["figures"]
            if isinstance(fields.get("port"), int):
                report.ports[local] = fields["port"]
        elif fields["kind"] == "failed":
            words = str(fields.get("words"))
            if self._places:
                self.lost[report.node, local] = words
            else:
                report.failed[local] = words
                report.traces[local] = str(fields.get("trace", ""))
        elif fields["kind"] in ("began", "group"):
            self._take_exchange(fields)
        elif fields["kind"] == "done":
            self._done.add((report.node, local))

    def _take_exchange(self, fields: dict[str, Any]) -> None:
        try:
            kind, axis, ranks = fields["exchange"]
            key = (str(kind), str(axis), tuple(int(rank) for rank in ranks))
            nodes = self._nodes_of(key[2])
        except (KeyError, TypeError, ValueError, IndexError):
            return
        self._begun[key] = None
        rate = fields.get("gb_s")
        if isinstance(rate, int | float):
            before = self.measures.get(key)
            slowest = rate if before is None else min(rate, before.gb_s)
            self.measures[key] = Measure(*key, nodes, slowest)

    def _nodes_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._places[rank][0] for rank in ranks))

    def _send(self, text: str) -> None:
        """Sends the text and closes the ranks' input."""
        stdin = self._child.stdin
        if stdin is None or stdin.closed:
            return
        try:
            if text:
                stdin.write(text)
            stdin.close()
        except OSError:
            pass  # the ranks have ended; what they did not report is missing

    def _read_stdout(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put((line, time.time()))
        self._lines.put(None)

    def _read_stderr(self, stream: IO[str]) -> None:
        for line in stream:
            # The log readers must not take srun's messages for ones about the ranks that train.
            sys.stderr.write(f"preflight: {line.replace('task', 'probe')}")
            found = _NOT_LAUNCHED.search(line)
            report = self.reports.get(found[1]) if found else None
            if report is not None:
                report.failed[0] = line.strip()


def in_sight(folder: Path, nodes: Iterable[str], patience_s: float) -> set[str]:
    """The nodes whose file can be seen here, after waiting up to `patience_s` seconds for the file system."""
    left, until = set(nodes), time.monotonic() + patience_s
    found: set[str] = set()
    while left:
        found |= {node for node in left if (folder / f"{NODE_FILE}{node}").is_file()}
        left -= found
        if time.monotonic() > until:
            break
        if left:
            time.sleep(0.1)
    return found


def main(nodes: str, ranks_per_node: str, *command: str) -> int:
    """Starts the ranks here; returns their largest exit code."""
    ranks = []
    for number, node in enumerate(nodes.split()):
        for local in range(int(ranks_per_node)):
            own = {"SLURMD_NODENAME": node, "SLURM_LOCALID": str(local), "SLURM_NODEID": str(number)}
            # One thread each, as in a job that gives no CPUs per task.
            environment = {"OMP_NUM_THREADS": "1", **os.environ, **own}
            ranks.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE))

    def copy_stdin() -> None:
        text = sys.stdin.buffer.read()
        for rank in ranks:
            assert rank.stdin is not None
            try:
                rank.stdin.write(text)
                rank.stdin.close()
            except OSError:
                continue

    threading.Thread(target=copy_stdin, daemon=True).start()
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
