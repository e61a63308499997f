"""Starts the ranks of a preflight, hears their figures, tells them who exchanges with whom, and hears the rates."""

from __future__ import annotations

import json
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

_LATE_S = 10.0
# srun says so where a node cannot start its part of a step.
_NOT_LAUNCHED = re.compile(r"(?:Task launch for \S+ failed on node|Unable to create step .* on node) (\S+?):? ")


class Conversation:
    """The ranks, started by one command; what each node has said so far is in `reports`.

    Everything is bounded: `hear_devices` and `hear_exchanges` by their own limits, the ranks by theirs, and `close`
    ends what is left of the command.
    """

    def __init__(self, command: Sequence[str], nodes: Sequence[str], ranks_per_node: int) -> None:
        self.reports = {name: NodeReport(name) for name in nodes}
        self.measures: dict[tuple[str, str, tuple[int, ...]], Measure] = {}
        self.begun: dict[tuple[str, str, tuple[int, ...]], set[str]] = {}
        self.lost: dict[tuple[str, int], str] = {}
        self._ranks_per_node = ranks_per_node
        self._places: list[tuple[str, int]] = []
        self._done: set[tuple[str, int]] = set()
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
            threading.Thread(target=self._read, args=(self._child.stdout,), daemon=True),
            threading.Thread(target=self._repeat, args=(self._child.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def hear_devices(self, limit_s: float) -> None:
        """Until every rank has given its figures, or said why it cannot, or the limit has passed.

        Once half of them have, the others get three times as long as that took, and 10 s more at least.
        """
        wanted = len(self.reports) * self._ranks_per_node
        began, half = time.monotonic(), 0.0

        def enough() -> bool:
            nonlocal half
            if not half and 2 * self._answered() >= wanted > 1:
                half = time.monotonic() - began
            late = half and time.monotonic() - began > half + max(_LATE_S, 2 * half)
            return self._answered() >= wanted or bool(late)

        self._hear(limit_s, enough)

    def hear_exchanges(self, limit_s: float, plan: dict[str, Any]) -> None:
        """Tells the ranks the plan, and hears until each has made its exchanges."""
        self._places = [(str(node), int(local)) for node, local in plan["ranks"]]
        self._tell(json.dumps(plan) + "\n")
        self._hear(limit_s, lambda: len(self._done) + len(self.lost) >= len(self._places))

    def dismiss(self) -> None:
        """Lets the ranks go without exchanges."""
        self._tell("")

    def close(self) -> None:
        """The ranks end by themselves; a command that does not is ended."""
        self.dismiss()
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
        """Nodes with a rank that has neither made its exchanges nor said why it cannot."""
        return {node for node, local in self._places if (node, local) not in self._done | self.lost.keys()}

    @property
    def silent_exchanges(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """(kind, axis, nodes) of the exchanges that were begun and gave no rate, in the order they began."""
        found = []
        for (kind, axis, ranks), _ in self.begun.items():
            if (kind, axis, ranks) not in self.measures:
                found.append((kind, axis, self._nodes_of(ranks)))
        return found

    def _answered(self) -> int:
        return sum(len(report.figures.keys() | report.failed.keys()) for report in self.reports.values())

    def _hear(self, limit_s: float, enough: Callable[[], bool]) -> None:
        until = time.monotonic() + limit_s
        while not enough():
            if time.monotonic() >= until:
                return
            try:
                line = self._lines.get(timeout=0.5)
            except queue.Empty:
                continue
            if line is None:
                self._lines.put(None)
                return
            self._take(*line)

    def _take(self, line: str, at: float) -> None:
        said = decode(line)
        if said is None:
            sys.stderr.write(f"preflight: {line}")
            return
        report = self.reports.get(str(said.get("node")))
        local = said.get("local")
        if report is None or not isinstance(local, int):
            return
        if isinstance(said.get("time"), int | float):
            # The line was under way for a while: the least late one tells the clock best.
            ahead = said["time"] - at
            report.skew_s = ahead if report.skew_s is None else max(report.skew_s, ahead)
        if said["kind"] == "here":
            report.here.add(local)
        elif said["kind"] == "device" and isinstance(said.get("figures"), dict):
            report.figures[local] = said["figures"]
            if isinstance(said.get("port"), int):
                report.ports[local] = said["port"]
        elif said["kind"] == "failed":
            words = str(said.get("words"))
            if self._places:
                self.lost[report.node, local] = words
            else:
                report.failed[local] = words
                report.traces[local] = str(said.get("trace", ""))
        elif said["kind"] in ("began", "group"):
            self._exchange(said, report.node)
        elif said["kind"] == "done":
            self._done.add((report.node, local))

    def _exchange(self, said: dict[str, Any], node: str) -> None:
        try:
            kind, axis, ranks = said["exchange"]
            key = (str(kind), str(axis), tuple(int(rank) for rank in ranks))
            nodes = self._nodes_of(key[2])
        except (KeyError, TypeError, ValueError, IndexError):
            return
        self.begun.setdefault(key, set()).add(node)
        rate = said.get("gb_s")
        if isinstance(rate, int | float):
            before = self.measures.get(key)
            slowest = rate if before is None else min(rate, before.gb_s)
            self.measures[key] = Measure(key[0], key[1], key[2], nodes, slowest)

    def _nodes_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._places[rank][0] for rank in ranks))

    def _tell(self, text: str) -> None:
        stdin = self._child.stdin
        if stdin is None or stdin.closed:
            return
        try:
            if text:
                stdin.write(text)
            stdin.close()
        except OSError:
            pass  # the ranks are gone: what they did not say is seen from what is missing

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put((line, time.time()))
        self._lines.put(None)

    def _repeat(self, stream: IO[str]) -> None:
        for line in stream:
            # As srun's own words they would be read as those on the ranks that train.
            sys.stderr.write(f"preflight: {line.replace('task', 'probe')}")
            found = _NOT_LAUNCHED.search(line)
            report = self.reports.get(found[1]) if found else None
            if report is not None:
                report.failed[0] = line.strip()


def in_sight(folder: Path, nodes: Iterable[str], patience_s: float) -> set[str]:
    """The nodes whose file has come into sight: over a network another node's may take a while."""
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
