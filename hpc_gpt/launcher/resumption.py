"""Resume a run, in its own folder or as a new run with other settings or on another cluster."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from shlex import join
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.ends.history import read_history
from hpc_gpt.core.ends.judge import gpu_hours
from hpc_gpt.core.ends.life import ask_life
from hpc_gpt.core.ends.run_state import done_by
from hpc_gpt.core.errors import ConfigError, RunFolderError, SlurmUnreachable, UserError
from hpc_gpt.core.format import counted
from hpc_gpt.core.gone import gone_notes, refuse_gone
from hpc_gpt.core.process import Life
from hpc_gpt.core.runs.branches import ResumptionHold
from hpc_gpt.core.runs.checkpoints import checkpoint_folder_name, newest_step, unwhole_note
from hpc_gpt.core.runs.code_archive import CODE_ARCHIVE
from hpc_gpt.core.runs.descent import descend
from hpc_gpt.core.runs.heartbeats import gpus_of
from hpc_gpt.core.runs.lineage import (
    Parent,
    ResumePoint,
    branched_at,
    checkpoint_sources,
    find_ancestors,
    parent_of,
    resume_point,
    saved_steps,
)
from hpc_gpt.core.runs.lock import RunLocked, check_free, holder, remove_gone
from hpc_gpt.core.runs.provenance import check_weights_of, has_gpus
from hpc_gpt.core.runs.race import measured, read_visits
from hpc_gpt.core.runs.run_folder import PREDICTED, RunFolder, check_own
from hpc_gpt.core.runs.script_variables import describe_changes
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.settings.cluster import ClusterProfile, load_profile
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.schedule import decay_steps_of, describe_schedule, first_difference, learning_rate
from hpc_gpt.core.settings.stored import experiment_tables
from hpc_gpt.core.slurm.requeue import requeue_of
from hpc_gpt.core.slurm.start_check import check_reachable
from hpc_gpt.launcher.changes import change_notes
from hpc_gpt.launcher.decide import make_run, predict_run
from hpc_gpt.launcher.prepared import PreparedRun
from hpc_gpt.launcher.request import Request
from hpc_gpt.launcher.submission import SubmittedRun, check_inputs, check_shared_checkpoints, start_run
from hpc_gpt.launcher.until import ForecastInputs, Until, forecast_chain, length_settings, wants_forecast
from hpc_gpt.launcher.watch.status import NO_ANSWER, ask_own_status, await_lost, read_own_status
from hpc_gpt.planner.prediction import Prediction

if TYPE_CHECKING:
    from hpc_gpt.launcher.forecast import Forecast

# The options that may change when the script of a run is started again.
_OPTIONS_ON_RESUME = ("job.time", "job.partition", "job.account", "job.qos", "job.exclude")
# Seconds: more than the controller takes on a busy machine to end after its attempt.
_LEAVING_S = 20.0


@dataclass(frozen=True)
class NewRun:
    """A resumption as a new run: from the checkpoint of `parent`, or from step 0 without one."""

    prepared: PreparedRun
    parent: Parent | None
    notes: tuple[str, ...]


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
    # On this machine no code of the run's supervises it.
    of_slurm = isinstance(chosen, SameRun) and settings.cluster.scheduler == "slurm"
    notes = gone_notes(settings.gone, own_code=of_slurm and (run.path / CODE_ARCHIVE).exists())
    return replace(chosen, notes=(*notes, *chosen.notes))


def _choose(run: RunFolder, settings: Resolved, request: Request, from_start: bool, dry: bool) -> NewRun | SameRun:
    assert request.until is not None
    if settings.script is not None:
        return _script_resumption(run, request, from_start, dry)
    profile = profile_of(settings, request)
    changed = from_start or request.template or changed_length(settings, request.until, request.given)
    if not changed and _changes_nothing(settings, request.given, profile):
        return _same_resumption(run, request, dry)
    if settings.race:
        raise ConfigError(
            f"{run.run_id} is a race, which resumes as it is",
            "submit another --race; report RACE prints how to train with its winner",
        )
    prepared, parent = prepare_resumption(run, request, profile, from_start, dry)
    action = f"resumes {parent.run} after step {parent.step}" if parent else f"trains {run.run_id} again from step 0"
    return NewRun(prepared, parent, (*prepared.notes, f"{action}, as {prepared.resolved.layout}"))


def profile_of(settings: Resolved, request: Request) -> ClusterProfile | None:
    """The profile of a new run that continues one with these settings; None for its own."""
    return load_profile(request.cluster) if request.cluster is not None else None


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
    if resolved.race:
        where = f" after {counted(measured(read_visits(run)), 'visit')} of {resolved.race}"
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


def check_unfinished(run: RunFolder, resolved: Resolved | None = None, reached: int = 0) -> None:
    """Raises ConfigError if the job would end at once: the run is done, or `resolved`, the settings of a run that is to
    resume from it after step `reached`, has no further steps."""
    before = run.resolved().train
    if resolved is not None and resolved.train.steps > reached:
        return
    if resolved is not None and resolved.train.steps != before.steps:
        raise ConfigError(
            f"train.steps is {resolved.train.steps}, but the newest checkpoint is from step {reached}: the job would "
            "end at once",
            f"give more than {counted(reached, 'step')}",
        )
    last = done_by(run.attempts())
    if last is None and resolved is None:
        return
    cause = last.ended().get("cause") if last is not None else None
    trained = [attempt.ended().get("step") or 0 for attempt in run.attempts()]
    by_steps = not cause or max(trained, default=0) >= before.steps
    why = f"it has trained its {counted(before.steps, 'step')}" if by_steps else cause
    if not before.steps:
        raise ConfigError(f"run {run.run_id} is done: its program has ended", "submit a new run")
    options = [f"--until steps={2 * before.steps}", f"--set train.steps={2 * before.steps}"]
    flat = [step for step in saved_steps(run) if step <= before.steps - decay_steps_of(before)]
    if by_steps and before.decay == "wsd" and flat:  # it has decayed
        options = [f"hpc-gpt submit --branch {run.run_id}@{flat[-1]} --until steps={2 * before.steps}"]
    if not by_steps:
        options = [f"--set train.minutes={before.minutes:g}"] if before.minutes is not None else []
        options += [f"--until loss={0.9 * before.until_loss:.4g}"] if before.until_loss is not None else []
    hint = f"to train on, as a new run: {', or '.join(options)}" if options else "submit a new run"
    marked = any(newest_step(source) for source in (run, *find_ancestors(run)))
    if not marked:
        hint = "it has no checkpoint to resume from: submit a new run that trains further"
    raise ConfigError(f"run {run.run_id} is done: {why}; its job would end at once", hint)


def _check_rates(run: RunFolder, settings: Resolved, resolved: Resolved, reached: int) -> None:
    """Raises ConfigError if the new wsd schedule would have had another rate in a step that `run` has trained."""
    if resolved.train.decay != "wsd":
        return
    step = first_difference(settings.train, resolved.train, range(branched_at(run), reached))
    if step is None:
        return
    steps = [saved for saved in saved_steps(run) if saved <= step]
    raise ConfigError(
        f"step {step + 1} of run {run.run_id} was trained at a rate of {learning_rate(settings.train, step):.4g}, but "
        f"the new schedule has {learning_rate(resolved.train, step):.4g} there: the run's schedule is "
        f"{describe_schedule(settings.train)}; the new one is {describe_schedule(resolved.train)}",
        f"hpc-gpt submit --branch {run.run_id}@{max(steps, default=reached)} --set train.steps={resolved.train.steps} "
        f"begins {'before that step' if steps else 'after the decay: no earlier checkpoint is left'}",
    )


def prepare_resumption(
    run: RunFolder,
    request: Request,
    profile: ClusterProfile | None = None,
    from_start: bool = False,
    dry: bool = False,
) -> tuple[PreparedRun, Parent | None]:
    """A new run that resumes from `run` with the keys that the request gives; `profile` None keeps its profile.

    `from_start`: it begins at step 0, without a parent. Raises RunFolderError as `check_not_live` does; LayoutError or
    ConfigError if it cannot resume with these settings.
    """
    changes, until = request.given, request.until or Until()
    check_not_live(run, request.force, dry)
    settings = run.resolved()
    parent, point = (None, ResumePoint(0)) if from_start else parent_of(run)
    length = changed_length(settings, until, changes)
    resolved = descend(settings, changes, profile or settings.cluster, point.step, length)
    title = f"Trains run {run.run_id} again from step 0."
    if parent is not None:
        check_unfinished(run, resolved, point.step)
        _check_rates(run, settings, resolved, point.step)
        title = f"Resumes run {run.run_id} after step {point.step}."
    notes = [*(f"note: {note}" for note in point.notes), *until.notes(resolved.batch, resolved.model.seq)]
    if parent is None:
        try:
            check_weights_of(run.path, resolved)
        except ConfigError as fault:
            notes.append(f"note: {fault}; the new run begins from the weights that are there now")
    steps, before = resolved.train.steps, settings.train.steps
    if point.step and steps != before and (fall := resolved.train.decay) in ("cosine", "linear"):
        notes.append(
            f"note: the learning rate falls ({fall}) to the end of {before} steps until step {point.step}, and of "
            f"{steps} steps after it: no unbroken run of either length has this rate"
        )
    inputs = ForecastInputs(until, request.past, "job.signal_lead_s" in changes, run, point.step)
    hold = None
    if parent is not None:
        name = checkpoint_folder_name(point.step)
        owners = [source for source, _ in checkpoint_sources(run) if (source.checkpoints / name).is_dir()]
        hold = ResumptionHold(owners[0], point.step, lambda: False) if owners else None
    fields = {"notes": notes, "data_beside": run.data_beside, "hold": hold}
    return prepare_child(run, resolved, title, inputs, profile, request, **fields), parent


def prepare_child(
    run: RunFolder,
    resolved: Resolved,
    title: str,
    inputs: ForecastInputs,
    profile: ClusterProfile | None,
    request: Request,
    **others: Any,
) -> PreparedRun:
    """A new run with settings that descend from those of `run`. `others` are further fields of a PreparedRun; the other
    parameters are as in `prepare_resumption`."""
    planner = profile or run.resolved().cluster
    if profile is None:
        with contextlib.suppress(UserError):  # the present one has the planner's keys, which a run does not store
            planner = load_profile(planner.name, of_a_run=True)
    inputs = replace(inputs, data_from=resolved.data_from)
    prediction = predict_run(resolved, planner, refuse=not request.force)
    return make_run(resolved, prediction, title=title, template=request.template, inputs=inputs, **others)


def changed_length(settings: Resolved, until: Until, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [train] that `until` changes in a run that resumes. Raises ConfigError."""
    length = length_settings(until, settings, changes)
    return {key: value for key, value in length.items() if value != getattr(settings.train, key)}


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
    inputs = ForecastInputs(until, request.past, True, run, step, spent)
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
    check_unfinished(run)
    point = resume_point(run)
    if resolved.cluster.scheduler == "slurm" and not dry:
        check_reachable(keep=True)
    # A relative path may be another file in another folder.
    check_inputs(resolved, run.data_beside, has_gpus(), make=not dry, begins=point is None)
    if point is None:
        check_weights_of(run.path, resolved)  # now, before it waits in a queue
    return resolved, point
