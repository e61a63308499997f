"""hpc-gpt from Python: the work of the verbs as functions that return values. docs/python.md has examples.

The functions neither print nor ask, and change no folder, variable or signal handler of the process. Their errors are
classes of `hpc_gpt.core.errors`. Settings have the keys of an experiment (docs/keys.md), with Python values.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.errors import ConfigError, JobRefused
from hpc_gpt.core.files import logs_folder, read_text_end
from hpc_gpt.core.runs.find_runs import find_run
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment_file import DEFAULT_EXPERIMENT
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.slurm.directives import is_job_script
from hpc_gpt.launcher.decide import prepare
from hpc_gpt.launcher.notes import data_rows
from hpc_gpt.launcher.plan_question import PLANNED_TOKENS, read_plan_request, search_plan
from hpc_gpt.launcher.request import Request, ScriptRequest, completed, with_model_file
from hpc_gpt.launcher.submission import submit_run
from hpc_gpt.launcher.until import parse_until
from hpc_gpt.launcher.watch.control import ask_runs, await_answer, await_measurements, cancel_now, check_end, until_over
from hpc_gpt.launcher.watch.logs import log_path
from hpc_gpt.launcher.watch.status import RunStatus, read_status
from hpc_gpt.planner.figures import Figures, figures_of
from hpc_gpt.reader.lines.steps import STEP_COLUMNS
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.gather import gather_paths, read_one, refresh_record
from hpc_gpt.report.loss_curve import runs_html

_Name = str | Path


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that fits: its engine, sizes and techniques (`training`), the GiB on the fullest card, and the predicted
    figures."""

    layout: Layout
    training: Training
    memory_gib: float
    figures: Figures


def plan(
    experiment: _Name | None = None, settings: Mapping[str, Any] | None = None, *, model: _Name | None = None,
    gpus: int | None = None, cluster: _Name | None = None, row: str | None = None, tokens: float = PLANNED_TOKENS,
) -> list[PlannedLayout]:  # fmt: skip
    """The layouts that fit, the fastest first, as `hpc-gpt plan` finds them. `tokens` is the length of the training,
    from which its days and GPU-hours follow. Raises LayoutError if nothing fits, ConfigError."""
    by_parameter = {"model.preset": None if model is None else str(model), "layout.gpus": gpus}
    overrides = {**(settings or {}), **{key: value for key, value in by_parameter.items() if value is not None}}
    question = read_plan_request(_request(experiment, overrides, cluster, row), tokens, None)
    return [
        PlannedLayout(
            fitting.layout, fitting.training, fitting.need_gib,
            figures_of(fitting.training, fitting.step, question.machine, tokens),
        )
        for fitting in search_plan(question, must_fit=True).candidates if fitting.step is not None
    ]  # fmt: skip


def submit(
    experiment: _Name, settings: Mapping[str, Any] | None = None, *, cluster: _Name | None = None,
    row: str | None = None, until: Iterable[str] = (), logs: _Name | None = None,
    args: Iterable[str] = (), sbatch: Iterable[str] = (),
) -> "Run":  # fmt: skip
    """Submits an experiment or a job script to Slurm, or starts it here, as `hpc-gpt submit` does. `until` says how far
    to train, such as ["tokens=30e9"]. For a job script, a file that begins with `#!`, `args` are its arguments and
    `sbatch` further options, such as ["--time=2:00:00"]. Raises UserError."""
    arguments, options, goal = tuple(args), tuple(sbatch), parse_until(tuple(until))
    request = _request(experiment, settings or {}, cluster, row, until=goal)
    if is_job_script(Path(experiment)):
        if row is not None or goal != parse_until(()):
            raise ConfigError(
                f"row and until need an experiment; {experiment} is a job script, which runs as it is",
                "leave them out; args are its arguments, and sbatch its options",
            )
        request = replace(request, script=ScriptRequest(Path(experiment), arguments, options))
    elif arguments or options:
        raise ConfigError(
            f"args and sbatch need a job script; {experiment} does not begin with #!",
            "give options of sbatch as settings, such as job.time",
        )
    prepared = prepare(request, queueing=True)
    if prepared.job_script is not None and prepared.job_script.array:
        raise ConfigError(f"{experiment} is an array of jobs", f"hpc-gpt submit {experiment} submits it")
    run = Run(submit_run(prepared, _logs(logs)).run)
    run.notes = (*prepared.messages, *map(str, data_rows(prepared)))
    return run


def read_runs(*paths: _Name, logs: _Name | None = None) -> "Runs":
    """The runs that `hpc-gpt report` finds: run folders, names of runs and sweeps, logs of any program; without a path
    those of the logs folder. Raises NoSuchRun."""
    gathered = gather_paths([str(path) for path in paths], _logs(logs))
    runs = Runs(map(Run, gathered.runs))
    runs.unread = gathered.unread
    return runs


def _request(
    experiment: _Name | None, settings: Mapping[str, Any], cluster: _Name | None, row: str | None, **others: Any
) -> Request:
    keys, name = with_model_file(settings), DEFAULT_EXPERIMENT if experiment is None else str(experiment)
    named, profile = experiment is not None, None if cluster is None else str(cluster)
    return Request(name, profile, None, completed(keys, named), row, given=keys, names_experiment=named, **others)


def _logs(logs: _Name | None) -> Path:
    return logs_folder() if logs is None else Path(os.path.abspath(logs))


class RunMetrics(dict[str, NDArray[np.float64]]):
    """The columns of a run's steps, such as `step`, `loss` and `step_s`; NaN if a step lacks it."""

    def to_pandas(self) -> Any:
        """A DataFrame. Raises ConfigError without pandas."""
        try:
            import pandas  # type: ignore[import-untyped]
        except ModuleNotFoundError:
            raise ConfigError("pandas is not installed here", "pip install pandas") from None
        return pandas.DataFrame(dict(self))


class Run:
    """A run by its id, its job or its folder. `notes` are the lines that `submit` would print about it. Raises
    NoSuchRun. A run of another program, from `read_runs`, has only `id`, `record` and `metrics`; the other members
    raise ConfigError."""

    notes: tuple[str, ...] = ()

    def __init__(self, name: _Name | RunFolder | RunRead, logs: _Name | None = None) -> None:
        self._read = name if isinstance(name, RunRead) else None
        if isinstance(name, RunRead):
            self._folder = None if name.folder is None else RunFolder(name.folder)
        else:
            self._folder = name if isinstance(name, RunFolder) else find_run(str(name), _logs(logs))

    @property
    def id(self) -> str:
        return str(self._read.record.run) if self._read is not None else self._own.run_id

    @property
    def _own(self) -> RunFolder:
        if self._folder is None:
            raise ConfigError(f"{self.id} is known by its log alone", "record() and metrics() give its contents")
        return self._folder

    @property
    def folder(self) -> Path:
        return self._own.path

    def status(self) -> RunStatus:
        """State, step, loss and the other fields that `hpc-gpt status` shows."""
        return read_status([self._own])[0]

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.status().is_over

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Its status when it has ended, well or not. Raises TimeoutError after `timeout_s` seconds."""
        began = time.monotonic()
        for (status,) in until_over([self._own]):
            if timeout_s is not None and not status.is_over and time.monotonic() - began > timeout_s:
                raise TimeoutError(f"run {self.id} is {status.state} after {timeout_s:g} s")
        return status

    def result(self) -> Record:
        """Its record when it has ended. Raises JobFailed if it has failed."""
        check_end(self._own, self.wait())
        await_measurements(self._own)
        return self.record()

    def stop(self, wait: bool = False) -> str:
        """Asks it to save and end; returns the request, or with `wait` the outcome, as text. Raises JobRefused."""
        return self._ask("stop", wait)

    def save(self, wait: bool = False) -> str:
        """Asks it to save and continue; returns and raises as `stop` does."""
        return self._ask("save", wait)

    def _ask(self, verb: str, wait: bool) -> str:
        (answer,) = ask_runs([self._own], verb)
        good, message = (not answer.refused, answer.message) if answer.refused or not wait else await_answer(answer)
        if not good:
            raise JobRefused(f"run {self.id}: {message}", f"hpc-gpt status {self.id}")
        return message

    def cancel(self) -> bool:
        """Cancels it; False if it was neither queued nor running. Raises SlurmUnreachable, JobRefused."""
        return cancel_now(self._own, self.status()) is not None

    def stdout(self) -> str:
        """The output of all ranks of its last attempt; above 64 MiB its end, after a line that says how much is cut.
        Raises NoSuchRun before there is any."""
        return read_text_end(log_path(self._own))

    def record(self) -> Record:
        """Its figures, as `hpc-gpt report` prints them."""
        return self._now.record if self._folder is None else refresh_record(self._folder)

    def metrics(self) -> RunMetrics:
        """The columns of its steps, without steps that a later attempt trained again. Without steps they are empty."""
        steps = self._now.steps
        if not steps.columns:
            return RunMetrics(dict.fromkeys(STEP_COLUMNS, np.zeros(0)))
        return RunMetrics({name: values[steps.counts] for name, values in steps.columns.items()})

    @property
    def _now(self) -> RunRead:
        return self._read if self._folder is None and self._read else read_one(str(self.folder), self.folder)

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    def _repr_html_(self) -> str:
        return runs_html([self._now])


class Runs(list[Run]):
    """Runs, which a notebook shows as a table with their curves. `unread` has a line per file that could not be
    read."""

    unread: list[str] = []

    def _repr_html_(self) -> str:
        return runs_html([run._now for run in self])
