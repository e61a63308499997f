"""Curves as TensorBoard's event files: `DIR/<experiment>/<run>/`, one file a run over all its restarts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_gpt.errors import RunFolderError
from hpc_gpt.readers.runs.attempts import epoch
from hpc_gpt.readers.runs.run_read import RunRead
from hpc_gpt.report.exports.exported import Exported, export_runs, folder_within
from hpc_gpt.report.exports.target import ANOTHER, not_installed

# The one file of ours in a run's folder. TensorBoard reads every file with `tfevents` in its name, in their order.
EVENT_FILE = "events.out.tfevents.0000000000.hpc-gpt"


def write_events(runs: Sequence[RunRead], folder: Path) -> list[Path]:
    """Writes each run's event file, in place of the one an earlier export wrote, and returns their paths.

    Scalars are those of exported.TAGS, settings go to the HPARAMS page. Nothing else in `folder` is touched. UserError
    where tensorboard is not installed, RunFolderError where a file cannot be written.
    """
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as fault:
        raise not_installed("tensorboard", str(fault)) from None

    def event(at: float, step: int = 0, **content: Any) -> bytes:
        text = event_pb2.Event(wall_time=at, step=step, **content).SerializeToString()
        assert isinstance(text, bytes)
        return text

    def write(run: Exported, path: Path) -> None:
        start = float(run.at[0]) if len(run.at) else epoch(run.run.record.started) or 0.0
        with open(path, "wb") as file:
            writer = RecordWriter(file)
            writer.write(event(start, file_version="brain.Event:2"))
            writer.write(event(start, summary=hparams_pb(run.settings(), trial_id=run.id, start_time_secs=start)))
            for step, at, scalars in run.rows():
                values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
                writer.write(event(at, step, summary=summary_pb2.Summary(value=values)))

    written = []
    for run in export_runs(runs):
        path = folder_within(folder, run.name, run.id) / EVENT_FILE
        aside = path.with_name(f".{os.getpid()}.part")
        try:
            write(run, aside)
            os.replace(aside, path)
        except OSError as fault:
            aside.unlink(missing_ok=True)
            raise RunFolderError(f"{path}: {fault.strerror}", ANOTHER) from None
        written.append(path)
    return written
