"""One cell in one round: an ordinary run on this machine, started, waited for and read."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.bench.cell import Cell
from hpc_gpt.bench.predicted import with_predicted_memory
from hpc_gpt.launch.prepare import Prepared
from hpc_gpt.launch.status import RunStatus
from hpc_gpt.launch.submission import start_run, write_run
from hpc_gpt.launch.waiting import GOOD_ENDS, follow
from hpc_gpt.process import is_alive, send
from hpc_gpt.report.gather import leave_record
from hpc_gpt.runs.beats import read_beats
from hpc_gpt.runs.record import Record
from hpc_gpt.runs.run_folder import RunFolder, newest_submission
from hpc_gpt.terminal import ProgressLine, width

# Ends that tell of a cell which is too large for the machine.
OUT_OF_MEMORY = ("gpu_memory", "host_memory")
_GONE_S = 45.0  # longer than ranks are given between SIGTERM and SIGKILL
_POLL_S = 0.05


@dataclass(frozen=True)
class Measured:
    """A cell's record of one round, and where all there is about it lies: its run folder, or a peer's log."""

    record: Record
    place: Path

    @property
    def is_good(self) -> bool:
        """Whether it ended well and tells a speed."""
        return self.record.ended in GOOD_ENDS and bool(self.record.tokens_per_s)


def measure(cell: Cell, number: int, folder: Path, provenance: Mapping[str, Any], label: str) -> Measured:
    """The cell's round `number`, from 1, under the bench's `folder`, shown on stderr behind `label`.

    However it ends it has a record. Ctrl-C ends the run, and then goes on as KeyboardInterrupt. Raises RunFolderError
    where the disk refuses.
    """
    if cell.record is not None:
        return Measured(cell.record, folder)
    if cell.command is not None:
        return _measure_peer(cell, number, folder, label)
    assert cell.prepared is not None
    return _measure_ours(cell.prepared, folder, provenance, label)


def _measure_ours(prepared: Prepared, folder: Path, provenance: Mapping[str, Any], label: str) -> Measured:
    run = write_run(prepared, folder, provenance)
    interrupts = 0
    try:
        start_run(run, prepared.resolved)
    except KeyboardInterrupt:  # it may have been started
        interrupts = 1
    try:
        follow([run], lambda statuses: f"{label}  {_words(run, statuses)}", interrupts)
    finally:
        _wait_until_gone(run)
    return Measured(with_predicted_memory(leave_record(run), prepared.resolved), run.path)


def _wait_until_gone(run: RunFolder) -> None:
    """Waits for the last process of a run that has had its last word: until then the next one would share the machine
    with it. One that does not go is told to end; the process that stands over its ranks then kills them."""
    line = newest_submission(run)
    pid, started = line.get("pid"), line.get("pid_start")
    for what in (signal.SIGTERM, None):
        until = time.monotonic() + _GONE_S
        while is_alive(pid, started) and time.monotonic() < until:
            time.sleep(_POLL_S)
        if what is not None:
            send(pid, started, what)


def _measure_peer(cell: Cell, number: int, folder: Path, label: str) -> Measured:
    from hpc_gpt.bench.peer_log import measure_peer

    log = folder / f"{cell.slug}-round{number}.log"
    line = ProgressLine()
    line.show(f"{label}  running, its output in {log}")
    try:
        return Measured(measure_peer(cell, log, number), log)
    finally:
        line.end()


def _words(run: RunFolder, statuses: Sequence[RunStatus]) -> str:
    """How it stands. Its metrics come at its end alone, so the step is its ranks' own word; for a terminal, not for a
    file that gets a line for each."""
    state = statuses[0].state
    if state != "running" or width(stderr=True) is None:
        return state
    attempts = run.attempts()
    beats = read_beats(attempts[-1].beats) if attempts else {}
    step = max((beat.step for beat in beats.values()), default=0)
    return f"{state}  step {step}/{statuses[0].steps}" if step else state
