"""TensorBoard: an event file of one attempt, or of an export."""

import io
from collections.abc import Sequence
from pathlib import Path

from hpc_gpt.core.sinks import CurveRow, ShownRun, need_package

# TensorBoard reads every file with `tfevents` in its name, in the order of names.
EVENT_FILE = "events.out.tfevents.{number:010d}.hpc-gpt"


class TensorBoard:
    """A new event file at `path`. Rows that a full disk refuses are not in it."""

    def __init__(self, run: ShownRun, path: Path) -> None:
        need_package("tensorboard")
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        settings = hparams_pb(dict(run.settings), trial_id=run.id, start_time_secs=run.began)
        first = Event(wall_time=run.began, file_version="brain.Event:2")
        self._waiting = [first, Event(wall_time=run.began, summary=settings)]
        self._begins = True
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("xb", buffering=0)

    def add(self, rows: Sequence[CurveRow]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        writer = RecordWriter(records := io.BytesIO())
        events = list(self._waiting)
        if rows and self._begins:
            # TensorBoard drops this step and all later ones that it has read, of earlier attempts.
            step, at, _ = rows[0]
            events.append(Event(wall_time=at, step=step, session_log=SessionLog(status=SessionLog.START)))
        for step, at, row in rows:
            values = [Summary.Value(tag=tag, simple_value=figure) for tag, figure in row.items()]
            events.append(Event(wall_time=at, step=step, summary=Summary(value=values)))
        for event in events:
            writer.write(event.SerializeToString())
        size, left = self._file.tell(), records.getvalue()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(size)
            self._file.seek(size)
            raise
        self._waiting, self._begins = [], self._begins and not rows

    def close(self) -> None:
        self.add(())
        self._file.close()
