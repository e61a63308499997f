"""The judge's side of the probe protocol: starts a preflight's ranks, reads their figures, sends them the nodes that
take part in the transfers, and reads the rates. trainer/preflight/verdict.py describes the lines.

`python -m hpc_gpt.trainer.preflight.probe NODES RANKS_PER_NODE COMMAND…` starts the ranks on this machine, as srun does
on a cluster: the command once for each rank of each node. NODES are names separated by blanks. Its stdin is copied to
every rank, and the ranks write to its stdout.
"""

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from hpc_gpt.core.files import json_object
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.trainer.preflight.transfers import Transfer, plan_transfers
from hpc_gpt.trainer.preflight.verdict import Measure, NodeReport, decode

# The slower half of the ranks gets at least this time after the faster half has answered.
_LATE_S = 10.0
# srun's message about a node that cannot start its part of a step.
_NOT_LAUNCHED = re.compile(r"(?:Task launch for \S+ failed on node|Unable to create step .* on node) (\S+?):? ")


# Stands in a command for srun's options that say where it runs.
_NODES = "NODES"


def placed(command: Sequence[str], nodes: Sequence[str], ranks_per_node: int, *more: str) -> list[str]:
    """The command on these nodes; one without NODES runs where it says itself.

    >>> placed(["srun", "NODES", "hostname"], ["n1", "n3"], 2)
    ['srun', '--nodes=2', '--ntasks=4', '--ntasks-per-node=2', '--nodelist=n1,n3', 'hostname']
    """
    number = len(nodes)
    size = f"--nodes={number}", f"--ntasks={number * ranks_per_node}", f"--ntasks-per-node={ranks_per_node}"
    where = [*size, f"--nodelist={','.join(nodes)}", *more]
    return [part for word in command for part in (where if word == _NODES else [word])]


class Probe:
    """The ranks of a preflight, started by one command. `reports`: the lines that each node has sent so far.

    Nothing waits for ever: `read_figures`, `run_exchanges` and the ranks have time limits, and `close` ends the
    command.
    """

    def __init__(self, command: Sequence[str], nodes: Sequence[str], ranks_per_node: int) -> None:
        self.reports = {name: NodeReport() for name in nodes}
        self.places: list[tuple[str, int]] = []
        self._ranks_per_node = ranks_per_node
        self._ranks = len(nodes) * ranks_per_node
        self._answered: set[tuple[str, int]] = set()
        self._pieces: dict[tuple[str, int], str] = {}
        # Ranks that take part in the transfers and have neither finished theirs nor failed.
        self._silent: set[tuple[str, int]] = set()
        # All transfers; each rank's transfers, as indices; and the slowest rate of each transfer that has begun.
        self._transfers: list[Transfer] = []
        self._own: dict[tuple[str, int], list[int]] = {}
        self._rates: dict[int, float | None] = {}
        self._lines: queue.Queue[tuple[str, float] | None] = queue.Queue()
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace", bufsize=1
        )
        self._open = 2
        for stream in (self._child.stdout, self._child.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def read_figures(self, limit_s: float, late_s: float = _LATE_S) -> None:
        """Reads until every rank has sent its figures or its failure, or the limit has passed.

        After half of them have answered, the others get twice that time, and at least `late_s`.
        """
        began, half = time.monotonic(), 0.0

        def are_enough() -> bool:
            nonlocal half
            answered = len(self._answered)
            age = time.monotonic() - began
            if not half and 2 * answered >= self._ranks > 1:
                half = age
            return answered >= self._ranks or bool(half and age > half + max(late_s, 2 * half))

        self._read_until(limit_s, are_enough)

    def run_exchanges(self, limit_s: float, nodes: Sequence[str], layout: Layout, host: str, port: int) -> None:
        """Tells the ranks which nodes take part and where they meet, and reads until every rank has finished its
        transfers or failed, or the limit has passed."""
        self.places = [(node, local) for node in nodes for local in range(self._ranks_per_node)]
        rounds = plan_transfers(layout, [node for node, _ in self.places])
        self._transfers = [transfer for together in rounds for transfer in together]
        for at, transfer in enumerate(self._transfers):
            for rank in transfer.ranks:
                self._own.setdefault(self.places[rank], []).append(at)
        self._silent = set(self.places)
        self._send(json.dumps({"nodes": list(nodes), "host": host, "port": port}) + "\n")
        self._read_until(limit_s, lambda: not self._silent)

    def close(self) -> None:
        """Closes the ranks' input, after which they end; terminates the command if it does not."""
        self._send("")
        for end in (self._child.poll, self._child.terminate, self._child.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=3)
                break
        self._read_until(2, lambda: False)

    @property
    def measures(self) -> list[Measure]:
        """The transfers that have a rate."""
        rates = ((self._transfers[at], rate) for at, rate in sorted(self._rates.items()) if rate is not None)
        return [
            Measure(transfer.kind, transfer.axis, transfer.ranks, self._nodes_of(transfer), rate)
            for transfer, rate in rates
        ]

    @property
    def lost(self) -> list[tuple[str, str]]:
        """Returns (node, why) for each rank that failed in its transfers."""
        failed = [(node, self.reports[node].failed.get(local)) for node, local in self.places]
        return [(node, why) for node, why in failed if why is not None]

    @property
    def silent_nodes(self) -> set[str]:
        """The nodes with a rank that has neither finished its transfers nor reported a failure."""
        return {node for node, _ in self._silent}

    @property
    def silent_exchanges(self) -> list[tuple[str, ...]]:
        """The nodes of each transfer that has begun and has no rate."""
        return [self._nodes_of(self._transfers[at]) for at, rate in sorted(self._rates.items()) if rate is None]

    def _nodes_of(self, transfer: Transfer) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.places[rank][0] for rank in transfer.ranks))

    def _read_until(self, limit_s: float, are_enough: Callable[[], bool]) -> None:
        """Reads until `are_enough`, the limit has passed, or the command has ended and its output is read: a process
        that a rank left behind may hold the streams open."""
        until = time.monotonic() + limit_s
        while self._open and not are_enough() and time.monotonic() < until:
            ended = self._child.poll() is not None
            try:
                line = self._lines.get(timeout=0.5)
            except queue.Empty:
                if ended:
                    return
                continue
            if line is None:
                self._open -= 1
            else:
                self._take(*line)

    def _take(self, line: str, at: float) -> None:
        fields = decode(line)
        if fields is None:
            # The log readers must not mistake srun's messages for messages about the ranks that train.
            sys.stderr.write(f"preflight: {line.replace('task', 'probe')}")
            if (match := _NOT_LAUNCHED.search(line)) and match[1] in self.reports:
                self._note(match[1], 0, {"failed": line.strip()})
            return
        node, local = fields["node"], fields["local"]
        report = self.reports.get(node)
        if report is None:
            return
        # A line arrives late; the one with the least delay measures the clock best.
        ahead = fields["time"] - at
        report.skew_s = ahead if report.skew_s is None else max(report.skew_s, ahead)
        if "piece" in fields:
            text = self._pieces.pop((node, local), "") + fields["piece"]
            if "more" in fields:
                self._pieces[node, local] = text
                return
            fields = json_object(text) or {}
        self._note(node, local, fields)

    def _note(self, node: str, local: int, fields: dict[str, Any]) -> None:
        """Notes the fields that a rank has sent."""
        if "figures" in fields or "failed" in fields:
            self._answered.add((node, local))
        if "done" in fields or "failed" in fields:
            self._silent.discard((node, local))
        places = self._own.get((node, local), [])
        rates = fields.pop("rates", None)
        if rates is not None:
            for at, rate in zip(places, rates, strict=False):
                slowest = self._rates.get(at)
                self._rates[at] = rate if slowest is None else min(slowest, rate)
            if len(rates) < len(places) and "done" not in fields:
                self._rates.setdefault(places[len(rates)], None)
        self.reports[node].sent.setdefault(local, {}).update(fields)

    def _send(self, text: str) -> None:
        """Sends the text and closes the ranks' input."""
        assert self._child.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the ranks have ended, or their input is closed
            self._child.stdin.write(text)
        with contextlib.suppress(OSError):
            self._child.stdin.close()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put((line, time.time()))
        self._lines.put(None)


def main(nodes: str, ranks_per_node: str, *command: str) -> int:
    """Starts the ranks here; returns their largest exit code."""
    ranks = []
    for number, node in enumerate(nodes.split()):
        for local in range(int(ranks_per_node)):
            variables = {"SLURMD_NODENAME": node, "SLURM_LOCALID": str(local), "SLURM_NODEID": str(number)}
            # One thread per rank, as in a job without --cpus-per-task.
            environment = {"OMP_NUM_THREADS": "1", **os.environ, **variables}
            ranks.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE))

    def copy_stdin() -> None:
        text = sys.stdin.buffer.read()
        for rank in ranks:
            assert rank.stdin is not None
            with contextlib.suppress(OSError):
                rank.stdin.write(text)
                rank.stdin.close()

    threading.Thread(target=copy_stdin, daemon=True).start()
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
