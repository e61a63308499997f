"""Resume a run, in its own folder or as a new run with other settings or on another cluster."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from shlex import join
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.checkpoints.find_checkpoints import unwhole_note
from hpc_gpt.core.checkpoints.lineage import (
    ResumePoint,
    resume_point,
)
from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.ends.run_state import done_by
from hpc_gpt.core.errors import ConfigError, RunFolderError, SlurmUnreachable, UserError
from hpc_gpt.core.gone import gone_notes, refuse_gone
from hpc_gpt.core.machine.find_gpus import has_gpus
from hpc_gpt.core.process import Life
from hpc_gpt.core.processes.heartbeats import gpus_of
from hpc_gpt.core.processes.lock import RunLocked, check_free, holder, remove_gone
from hpc_gpt.core.runs.code_archive import CODE_ARCHIVE
from hpc_gpt.core.runs.provenance import check_weights_of
from hpc_gpt.core.runs.run_folder import PREDICTED, RunFolder, check_own
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.stored import experiment_tables
from hpc_gpt.core.slurm.requeue import requeue_of
from hpc_gpt.core.slurm.start_check import check_reachable
from hpc_gpt.launcher.attempts.history import read_history
from hpc_gpt.launcher.attempts.judge import gpu_hours
from hpc_gpt.launcher.attempts.life import ask_life
from hpc_gpt.launcher.branching import NewRun, Way, changed_length, done_fault, prepare_new_run, profile_of
from hpc_gpt.launcher.changes import change_notes
from hpc_gpt.launcher.request import Request
from hpc_gpt.launcher.script_variables import describe_changes
from hpc_gpt.launcher.submission import SubmittedRun, check_inputs, check_shared_checkpoints, start_run
from hpc_gpt.launcher.until import ForecastInputs, Until, forecast_chain, wants_forecast
from hpc_gpt.launcher.watch.status import NO_ANSWER, ask_own_status, await_lost, read_own_status
from hpc_gpt.planner.prediction import Prediction

if TYPE_CHECKING:
    from hpc_gpt.launcher.forecast import Forecast

# The options that may change when the script of a run is started again.
_OPTIONS_ON_RESUME = ("job.time", "job.partition", "job.account", "job.qos", "job.exclude")
# Seconds: more than the controller takes on a busy machine to end after its attempt.
_LEAVING_S = 20.0


@dataclass(frozen=True)
class SameRun:
    """A resumption of a run in its own folder with its own job.sh, as a job chain of so many `jobs`; `where` says from
    which step. A user's own job script, as stored in the run, is started in its `folder`, with these `options` on
    sbatch's command line."""

    run: RunFolder
    resolved: Resolved
    notes: tuple[str, ...] = ()
    where: str = ""
    jobs: int = 1
    folder: str = "."
    options: tuple[str, ...] = ()

    def start(self, now: bool = False) -> SubmittedRun:
        """Submits it. Raises as `start_run` does."""
        with contextlib.suppress(RunLocked):  # the job asks whether it may start
            remove_gone(self.run, lambda other: ask_life(self.run, other)[0])
        run = self.run if self.folder == "." else RunFolder(self.run.path.resolve())
        with contextlib.chdir(self.folder):  # sbatch starts a script where it is called
            return start_run(run, self.resolved, self.jobs, self.options, now)


def choose_resumption(run: RunFolder, request: Request, from_start: bool, dry: bool) -> NewRun | SameRun:
    """The resumption of a run: the run itself, or a new run if the request changes anything; `from_start` makes a new
    run from step 0. `request.cluster` None keeps its cluster; `dry` is as for `check_submission`.

    Raises RunFolderError, ConfigError, LayoutError or DataError if it cannot.
    """
    settings = run.resolved()
    refuse_gone(settings.gone, f"run {run.run_id}")
    chosen = _choose(run, settings, request, from_start, dry)
    if isinstance(chosen, NewRun):
        return chosen
    # On this machine no code of the run's supervises it.
    own_code = settings.cluster.scheduler == "slurm" and (run.path / CODE_ARCHIVE).exists()
    return replace(chosen, notes=(*gone_notes(settings.gone, own_code), *chosen.notes))


def _choose(run: RunFolder, settings: Resolved, request: Request, from_start: bool, dry: bool) -> NewRun | SameRun:
    assert request.until is not None
    if settings.script is not None:
        return _script_resumption(run, request, from_start, dry)
    profile = profile_of(request)
    changed = from_start or request.template or changed_length(settings, request.until, request.given)
    if not changed and _changes_nothing(settings, request.given, profile):
        return _same_resumption(run, request, dry)
    check_not_live(run, request.force, dry)
    return prepare_new_run(run, request, Way.AGAIN if from_start else Way.RESUME)


def _script_resumption(run: RunFolder, request: Request, from_start: bool, dry: bool) -> SameRun:
    """The resumption of a user's own job script, as stored in the run, with the options of _OPTIONS_ON_RESUME that the
    request gives."""
    script = read_stored(run.path / "provenance.json").get("script") or {}
    other = [key for key in request.given if key not in _OPTIONS_ON_RESUME]
    if from_start or other or request.until != Until():
        named = "--from-start" if from_start else other[0] if other else "--until"
        raise ConfigError(
            f"{run.run_id} is the run of a job script: it starts again unchanged, so {named} is refused",
            f"submit a new run; only {', '.join(_OPTIONS_ON_RESUME)} may change",
        )
    options = [f"--{key.removeprefix('job.')}={value}" for key, value in request.given.items() if value is not None]
    resolved, point = check_resumption(run, dry, request.force)
    notes = [f"note: {note}" for note in (point.notes if point else ())]
    if changes := describe_changes(script.get("variables") or {}, os.environ):
        notes.append(f"note: {changes}")
    note = f"starts the script of {run.run_id} again{f', with {join(options)}' if options else ''}"
    return SameRun(run, resolved, (*notes, note), folder=script.get("folder") or ".", options=tuple(options))


def _same_resumption(run: RunFolder, request: Request, dry: bool) -> SameRun:
    """The resumption of a run with its own settings, and the forecast of its job chain."""
    resolved, point = check_resumption(run, dry, request.force)
    forecast = _forecast_same(run, point.step if point else 0, request)
    where = f" after step {point.step}" if point else f" at step 0: {unwhole_note(run) or 'it has no checkpoint'}"
    changes = change_notes(run, resolved) if dry else ()
    notes = [f"note: {note}" for note in (*(point.notes if point else ()), *changes)]
    lines = (*notes, *(forecast.lines if forecast else ()), f"resumes {run.run_id}{where}")
    jobs = forecast.jobs if forecast and requeue_of(resolved.cluster).at_once else 1
    return SameRun(run, resolved, lines, where, jobs)


def check_not_live(run: RunFolder, force: bool = False, dry: bool = False) -> None:
    """Raises RunFolderError if a job of the run is queued or running. Raises SlurmUnreachable, or RunFolderError for a
    process, if that is not known; `force` declares that job gone, unless `dry`.

    The end of a run is known before the process that started it has left; the function waits until that has left.
    """

    def doubt(job: str, fault: UserError) -> None:
        if not force:
            raise fault
        if job and not dry:
            run.declare_gone(job)

    try:
        await_lost(run)
    except SlurmUnreachable as fault:
        doubt("", fault)
    until = time.monotonic() + _LEAVING_S
    while (owner := holder(run)) is not None:
        life, why = ask_life(run, owner)
        if owner.slurm_job is not None:  # if it runs, the state says so
            if life is Life.UNKNOWN:
                doubt(owner.job, _not_known(run, owner.slurm_job, why))
            break
        try:
            check_free(run)
            break
        except RunLocked as fault:
            if fault.life is Life.UNKNOWN:
                doubt(owner.job, fault)
                break
            if life is not Life.LIVES or read_own_status(run).state in LIVE or time.monotonic() > until:
                raise
            time.sleep(0.05)
    status, silence = ask_own_status(run)
    if status.state in LIVE:
        hint = f"hpc-gpt cancel {run.run_id} first, or wait for its end"
        raise RunFolderError(f"run {run.run_id} is {status.state}", hint)
    if silence and status.cause == NO_ANSWER:
        doubt(status.job_id or "", _not_known(run, status.job_id or "", silence))


def _not_known(run: RunFolder, job_id: str, why: str) -> SlurmUnreachable:
    return SlurmUnreachable(
        f"it is not known whether job {job_id} of run {run.run_id} has ended: {why}",
        f"try again once Slurm answers; if job {job_id} has ended for sure, --force declares that it is gone",
    )


def _changes_nothing(settings: Resolved, changes: Mapping[str, Any], profile: ClusterProfile | None) -> bool:
    """Whether a run that resumes with `changes` is the same run; `profile` is its new cluster's, None for its own."""
    if profile is not None and profile.of_a_run != settings.cluster:
        return False
    tables = experiment_tables(settings)
    missing = object()
    return all(
        tables.get(table, {}).get(key, missing) == value
        for (table, _, key), value in ((name.partition("."), value) for name, value in changes.items())
    )


def _forecast_same(run: RunFolder, step: int, request: Request) -> Forecast | None:
    """The forecast of a run that resumes unchanged after `step`, with its own job.sh; None if it is not needed.

    Raises ConfigError.
    """
    resolved = run.resolved()
    until = request.until or Until()
    if not wants_forecast(resolved, until):
        return None
    prediction = Prediction("", tables=read_stored(run.path / PREDICTED) or None)
    spent = gpu_hours(read_history(run, gpus_of(resolved), time.time()))
    inputs = ForecastInputs(until, request.past, True, step, spent)
    return forecast_chain(resolved, prediction, inputs)


def check_resumption(run: RunFolder, dry: bool = False, force: bool = False) -> tuple[Resolved, ResumePoint | None]:
    """Returns (the settings of a run that may be submitted again, the point where it resumes; None at step 0).

    Raises as `check_not_live`, with its `force`; ConfigError if the run is done; DataError. `dry` is as for
    check_submission.
    """
    check_own(run)  # its job would end at its start, and sbatch's answer could not be noted
    check_not_live(run, force, dry)
    resolved = run.resolved()
    if not force:
        check_shared_checkpoints(resolved, run.path.parents[1], run)
    if not run.job_script.is_file():
        raise ConfigError(f"{run.path} has no job.sh", "the run folder is damaged; submit the experiment again")
    if done_by(run.attempts()) is not None:
        raise done_fault(run)
    point = resume_point(run)
    if resolved.cluster.scheduler == "slurm" and not dry:
        check_reachable(keep=True)
    # A relative path may be another file in another folder.
    check_inputs(resolved, run.data_beside, has_gpus(), make=not dry, begins=point is None)
    if point is None:
        check_weights_of(run.path, resolved)  # now, before it waits in a queue
    return resolved, point
