"""A run that is ready to be submitted, for every verb that needs a run's script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.core.slurm.requeue import requeue_of
from hpc_gpt.planner.prediction import Prediction

if TYPE_CHECKING:
    from hpc_gpt.core.checkpoints.branches import CheckpointHold
    from hpc_gpt.core.runs.snapshot import CodeArchive
    from hpc_gpt.core.runs.work_archive import WorkArchive
    from hpc_gpt.launcher.forecast import Forecast


@dataclass(frozen=True)
class SbatchRequest:
    """The request to sbatch for a job script, beside its own text: the options of SBATCH_ variables and of the command
    line as they are, and the elements of its array. `provenance` are the script's keys in provenance.json."""

    options: tuple[str, ...]
    array: tuple[int, ...]
    provenance: Mapping[str, Any]


class Copies:
    """The copies for the runs of one submission. Each folder and archive is read once, since the rows of a sweep
    run the same code. An object serves one submission only: the next one of the process must see
    files that were edited since. Modules that only a submission needs are imported in the methods."""

    def __init__(self) -> None:
        self._works: dict[str, WorkArchive] = {}
        self._stages: dict[str, dict[str, str]] = {}

    @cached_property
    def code(self) -> CodeArchive:
        """The archive of hpc-gpt's own code."""
        from hpc_gpt.core.runs.snapshot import take_snapshot

        return take_snapshot()

    def work(self, resolved: Resolved) -> WorkArchive | None:
        """The archive of the folder in which a run's program runs; None if the run has none. Raises ConfigError if it
        is too large."""
        if not (runs_program(resolved) and resolved.program.snapshot):
            return None
        folder = resolved.program.workdir
        if folder not in self._works:
            from hpc_gpt.core.runs.work_archive import take_work

            self._works[folder] = take_work(folder)
        return self._works[folder]

    def stage_sum(self, resolved: Resolved) -> dict[str, str]:
        """The checksum of the profile's archive, as `provenance.stage_sum` gives it."""
        archive = resolved.cluster.archive or ""
        if archive not in self._stages:
            from hpc_gpt.core.runs.provenance import stage_sum

            self._stages[archive] = stage_sum(resolved)
        return self._stages[archive]


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to be submitted: its settings, its script, the text and path of its experiment's file, the
    prediction for it, the forecast of its job chain, and `notes` for the user.

    A relative data.path is looked up in the folder `data_beside` first. `faster` has advice on settings that are
    predicted to be faster, if it was requested. `job_script` is set for a script that runs as it is. The runs of one
    request share its `copies`. `force`: it may use the checkpoints of a run that lives.
    """

    resolved: Resolved
    script: str
    text: str
    notes: tuple[str, ...] = ()
    prediction: Prediction | None = None
    forecast: Forecast | None = None
    file: Path | None = None
    data_beside: Path | None = None
    faster: Sequence[str] = ()
    job_script: SbatchRequest | None = None
    hold: CheckpointHold | None = None
    copies: Copies = field(default_factory=Copies, compare=False, repr=False)
    force: bool = False

    @property
    def messages(self) -> tuple[str, ...]:
        """The lines to print for the user, with the predictions last."""
        return (*self.notes, *self.predictions)

    @property
    def predictions(self) -> tuple[str, ...]:
        """The lines on the run's prediction and on the forecast of its job chain."""
        lines = self.forecast.lines if self.forecast else ()
        return (*([str(self.prediction.line)] if self.prediction else []), *lines)

    @property
    def jobs(self) -> int:
        """The number of jobs to submit at once."""
        at_once = requeue_of(self.resolved.cluster).at_once
        return max(1, self.forecast.jobs) if self.forecast is not None and at_once else 1
