"""The tracker: a process beside a run's ranks that sends their curves to TensorBoard and W&B while they train.

python -m hpc_gpt.report.track RUN ATTEMPT [PID]

It follows metrics.jsonl of the run's attempts up to ATTEMPT, first what an earlier attempt's tracker has not sent. It
sends the rest and ends when the ranks have ended (`Attempt.ranks_ended`), or the process PID, which started it, has.
A fault of one of the two is a line of the log, and the other goes on; on a full disk each waits for space. The trainer
knows nothing of it.
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
_MOST_BYTES = 1 << 22  # of lines that are sent at once


@dataclass(frozen=True)
class SentTo:
    """How far something was sent: attempt, the bytes of its metrics.jsonl, and the highest step."""

    attempt: int = 1
    bytes: int = 0
    step: int = 0


class CurveSink(Protocol):
    """Where curves go; `at` is how far they went. Each may raise anything."""

    at: SentTo

    def send(self, begins: bool, rows: list[CurveRow]) -> None:
        """Sends rows of one attempt, by ascending step; `begins`: they are the first of the attempt."""

    def close(self) -> None:
        """Returns when all that was sent has arrived."""


class TensorBoard:
    """An event file of the attempt's own in `tensorboard/` of the run, which a full disk leaves whole."""

    def __init__(self, run: ExportedRun, folder: Path, number: int, at: SentTo) -> None:
        self.at = at
        path = folder_within(folder, "tensorboard") / EVENT_FILE.format(number=number)
        self._file = path.open("xb", buffering=0)
        self._events = io.BytesIO()  # what is yet to be appended
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
    """One run of W&B over all attempts, in `wandb/` of the run. It takes rising steps only (wandb#4482), so a step that
    is trained again is not sent again. Online the highest step is what the server has, not what was sent."""

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
        earlier = [run.attempt(each.number).track for each in run.attempts() if each.number < number]
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
        """Whether it has anywhere to send to."""
        return bool(self._sinks or self._unopened)

    def _open(self) -> None:
        for name, opened in list(self._unopened.items()):
            with self._reported(name):
                self._sinks[name] = opened()
                del self._unopened[name]

    @contextlib.contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        """Prints what goes wrong with a sink, in one line, and drops it; on a full disk it is tried again later."""
        try:
            yield
            self._waiting.discard(name)
        except Exception as fault:  # of a package that is not ours
            if is_disk_full(fault):
                if name not in self._waiting:
                    print(f"track: {name}: waits for space on the disk: {_words(fault)}", flush=True)
                self._waiting.add(name)
                return
            self._sinks.pop(name, None)
            self._unopened.pop(name, None)
            print(f"track: {name}: {_words(fault)}; the run goes on without it", flush=True)

    def send(self) -> None:
        """Sends all lines that are whole now."""
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
        """Waits until all that was sent has arrived."""
        for name, sink in list(self._sinks.items()):
            with self._reported(name):
                sink.close()
        self._note()

    def _note(self) -> None:
        """Writes track.json: `pid, step`, the last one sent, and `sent`, the SentTo of each sink. What a full disk
        refuses, the next one has."""
        note = {"pid": os.getpid(), "step": self._step, "sent": self._sent}
        try:
            replace_whole(self.attempt.track, json.dumps(note) + "\n")
        except UserError as fault:
            if not is_disk_full(fault):
                raise


def _position(stored: Mapping[str, int] | None) -> SentTo:
    return SentTo(**{key: value for key, value in (stored or {}).items() if key in SentTo.__annotations__})


def _exported(run: RunFolder) -> ExportedRun:
    """The run under the names of its exports, without rows. Its rates are those of a step of one second, by which
    `curve_of` gives every step its own."""
    read = read_own(run)
    record = add_figures(replace(read.record, step_s=1.0, step_s_mean=None))
    return export_runs([replace(read, record=record, steps=StepTable())])[0]


def _new_rows(
    run: RunFolder, exported: ExportedRun, at: SentTo, last: int
) -> Iterator[tuple[bool, list[CurveRow], SentTo]]:
    """(whether an attempt begins, its next rows, the position after them with their highest step) of the whole lines
    beyond a position."""
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
    """The next lines that are complete; none if there is no such file."""
    try:
        with open_regular(attempt.metrics) as file:
            file.seek(offset)
            lines = file.readlines(_MOST_BYTES)
    except FileNotFoundError:
        return []
    return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def _words(fault: BaseException) -> str:
    text = " ".join(f"{fault}".split()) or type(fault).__name__
    hint = f" ({fault.hint})" if isinstance(fault, UserError) and fault.hint else ""
    return hide_secrets(plain(text, " "))[:400] + hint


def main(arguments: list[str]) -> int:
    run, number = RunFolder(Path(arguments[0])), int(arguments[1])
    starter = int(arguments[2]) if arguments[2:] else None
    started = start_time(starter) if starter is not None else None
    own = run.attempt(number)
    install_patient_output()  # the log may be on the disk that is full
    try:
        tracker = Tracker(run, number)
        while tracker.runs:
            ended = own.ranks_ended.exists() or (started is not None and not is_alive(starter, started))
            tracker.send()
            if ended:
                break
            time.sleep(_POLL_S)
        tracker.close()
    except Exception as fault:  # the run is more than its curves
        print(f"track: {_words(fault)}; the run goes on without it", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
