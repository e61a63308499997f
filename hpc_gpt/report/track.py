"""The tracker: a process beside a run's ranks that sends their curves to TensorBoard and W&B while they train.

python -m hpc_gpt.report.track RUN ATTEMPT [PID]

It follows metrics.jsonl of the run's attempts up to ATTEMPT, beginning with the lines that an earlier attempt's tracker
did not send. When the ranks have ended (`Attempt.ranks_ended`), or the process PID that started it has, it sends the
last lines and ends. If one of the two sinks fails, the log gets a line and the other one continues; on a full disk both
wait for space. The trainer knows nothing of it.
"""

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.files import open_regular, replace_whole
from hpc_gpt.core.format import plain
from hpc_gpt.core.process import is_alive, start_time
from hpc_gpt.core.runs.full_disk import install_patient_output, is_disk_full
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.reader.records import RunRead, add_figures
from hpc_gpt.reader.records.attempts import metrics_of
from hpc_gpt.reader.records.own_run import read_own
from hpc_gpt.reader.steps import StepTable
from hpc_gpt.report.exports import (
    EVENT_FILE,
    CurveRow,
    EventWriter,
    ExportedRun,
    begin_wandb_run,
    curve_of,
    export_runs,
    folder_within,
    need_package,
)

_POLL_S = 1.0
_MOST_BYTES = 1 << 22  # most bytes of lines that are sent at once


@dataclass(frozen=True)
class SentTo:
    """The position up to which lines were sent: attempt, bytes of its metrics.jsonl, and the highest step."""

    attempt: int = 1
    bytes: int = 0
    step: int = 0


class CurveSink(Protocol):
    """A receiver of curves; `at` is the position up to which it has them. Its methods may raise anything."""

    at: SentTo

    def send(self, begins: bool, rows: list[CurveRow]) -> None:
        """Sends rows of one attempt, by ascending step; `begins`: they are the attempt's first rows."""

    def close(self) -> None:
        """Waits until everything that was sent has arrived."""


class TensorBoard:
    """Writes an event file per attempt into `tensorboard/` of the run; a full disk does not damage it."""

    def __init__(self, run: ExportedRun, folder: Path, number: int, at: SentTo) -> None:
        self.at = at
        path = folder_within(folder, "tensorboard") / EVENT_FILE.format(number=number)
        self._file = path.open("xb", buffering=0)
        self._events = io.BytesIO()  # bytes that are not yet appended
        self._writer = EventWriter(self._events, run)

    def send(self, begins: bool, rows: list[CurveRow]) -> None:
        before = self._events.tell()
        if begins:
            self._writer.start_session(*rows[0][:2])
        self._writer.add(rows)
        try:
            self._append()
        except OSError:
            self._events.seek(before)
            self._events.truncate()
            raise

    def _append(self) -> None:
        size, left = self._file.tell(), self._events.getvalue()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(size)
            self._file.seek(size)
            raise
        self._events.seek(0)
        self._events.truncate()

    def close(self) -> None:
        self._append()
        self._file.close()


class Wandb:
    """Sends all attempts as one run of W&B, with files in `wandb/` of the run. It takes rising steps only (wandb#4482),
    so a step that is trained again is not sent again. Online the highest step is the server's, not the last sent."""

    def __init__(self, run: ExportedRun, folder: Path, project: str, at: SentTo) -> None:
        self._run = begin_wandb_run(
            need_package("wandb"), run, str(folder_within(folder, "wandb").parent), project, resume="allow"
        )
        online = not (self._run.offline or self._run.disabled)
        self.at = SentTo(step=self._run.starting_step - 1) if online else at

    def send(self, begins: bool, rows: list[CurveRow]) -> None:
        for step, at, row in rows:
            if step > self.at.step:
                self._run.log({**row, "_timestamp": at}, step=step)

    def close(self) -> None:
        self._run.finish()


class Tracker:
    """Follows a run's metrics for the sinks that its `[track]` names."""

    def __init__(self, run: RunFolder, number: int) -> None:
        self.run, self.attempt = run, run.attempt(number)
        self._sinks: dict[str, CurveSink] = {}
        self._unopened: dict[str, Callable[[], CurveSink]] = {}
        self._waiting: set[str] = set()  # for space on the disk
        self._step = 0
        earlier = [run.attempt(attempt.number).track for attempt in run.attempts() if attempt.number < number]
        self._sent: dict[str, Any] = next(
            (sent for path in reversed(earlier) if (sent := read_stored(path).get("sent"))), {}
        )
        self._note()
        track, self._exported = run.resolved().track, _exported(run)
        at = {name: _position(self._sent.get(name)) for name in ("tensorboard", "wandb")}
        if track.tensorboard:
            self._unopened["tensorboard"] = lambda: TensorBoard(self._exported, run.path, number, at["tensorboard"])
            self.send()  # W&B may take its time
        if track.wandb is not None:
            project = track.wandb
            self._unopened["wandb"] = lambda: Wandb(self._exported, run.path, project, at["wandb"])
            self._open()

    @property
    def runs(self) -> bool:
        """Whether a sink is left to send to."""
        return bool(self._sinks or self._unopened)

    def _open(self) -> None:
        for name, opened in list(self._unopened.items()):
            with self._reported(name):
                self._sinks[name] = opened()
                del self._unopened[name]

    @contextlib.contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        """Prints a sink's failure in one line and drops the sink; on a full disk it is tried again later."""
        try:
            yield
            self._waiting.discard(name)
        except Exception as fault:  # the sinks' packages may raise anything
            if is_disk_full(fault):
                if name not in self._waiting:
                    print(f"track: {name}: waits for space on the disk: {_fault_text(fault)}", flush=True)
                self._waiting.add(name)
                return
            self._sinks.pop(name, None)
            self._unopened.pop(name, None)
            print(f"track: {name}: {_fault_text(fault)}; the run goes on without it", flush=True)

    def send(self) -> None:
        """Sends all lines that are complete by now."""
        self._open()
        for name, sink in list(self._sinks.items()):
            with self._reported(name):
                for begins, rows, at in _new_rows(self.run, self._exported, sink.at, self.attempt.number):
                    if rows:
                        sink.send(begins, rows)
                        self._step = rows[-1][0]
                    sink.at = replace(at, step=max(sink.at.step, at.step))
                    self._sent[name] = asdict(sink.at)
                    self._note()

    def close(self) -> None:
        """Waits until all sinks have everything that was sent."""
        for name, sink in list(self._sinks.items()):
            with self._reported(name):
                sink.close()
        self._note()

    def _note(self) -> None:
        """Writes track.json: `pid`, the last `step` sent, and `sent`, the SentTo per sink. On a full disk the note is
        skipped: the next one has its content."""
        note = {"pid": os.getpid(), "step": self._step, "sent": self._sent}
        try:
            replace_whole(self.attempt.track, json.dumps(note) + "\n")
        except UserError as fault:
            if not is_disk_full(fault):
                raise


def _position(stored: Mapping[str, int] | None) -> SentTo:
    return SentTo(**{key: value for key, value in (stored or {}).items() if key in SentTo.__annotations__})


def _exported(run: RunFolder) -> ExportedRun:
    """The run in its exported form, without rows. Its rates are for steps of one second: `curve_of` scales them to each
    step's own time."""
    read = read_own(run)
    record = add_figures(replace(read.record, step_s=1.0, step_s_mean=None))
    return export_runs([replace(read, record=record, steps=StepTable())])[0]


def _new_rows(
    run: RunFolder, exported: ExportedRun, at: SentTo, last: int
) -> Iterator[tuple[bool, list[CurveRow], SentTo]]:
    """Yields the rows of complete lines after a position: (whether the attempt begins with them, rows, the position
    after them with their highest step)."""
    for attempt in run.attempts():
        if not at.attempt <= attempt.number <= last:
            continue
        offset = at.bytes if attempt.number == at.attempt else 0
        begins = offset == 0
        while lines := _whole_lines(attempt, offset):
            offset += sum(map(len, lines))
            steps = metrics_of(lines, attempt.number).steps
            steps.eval_step, steps.eval_loss = steps["step"], steps["loss_eval"]
            rows = curve_of(RunRead(exported.run.record, steps))[1]
            yield begins, rows, SentTo(attempt.number, offset, max((step for step, _, _ in rows), default=0))
            begins = begins and not rows


def _whole_lines(attempt: Attempt, offset: int) -> list[bytes]:
    """The next complete lines of an attempt's metrics; empty without the file."""
    try:
        with open_regular(attempt.metrics) as file:
            file.seek(offset)
            lines = file.readlines(_MOST_BYTES)
    except FileNotFoundError:
        return []
    return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def _fault_text(fault: BaseException) -> str:
    text = " ".join(f"{fault}".split()) or type(fault).__name__
    hint = f" ({fault.hint})" if isinstance(fault, UserError) and fault.hint else ""
    return hide_secrets(plain(text, " "))[:400] + hint


def main(arguments: list[str]) -> int:
    run, number = RunFolder(Path(arguments[0])), int(arguments[1])
    starter = int(arguments[2]) if arguments[2:] else None
    started = start_time(starter) if starter is not None else None
    attempt = run.attempt(number)
    install_patient_output()  # the log may be on the disk that is full
    try:
        tracker = Tracker(run, number)
        while tracker.runs:
            ended = attempt.ranks_ended.exists() or (started is not None and not is_alive(starter, started))
            tracker.send()
            if ended:
                break
            time.sleep(_POLL_S)
        tracker.close()
    except Exception as fault:  # the run is worth more than its curves
        print(f"track: {_fault_text(fault)}; the run goes on without it", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
