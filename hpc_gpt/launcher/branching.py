"""A new run from a checkpoint of another: `--resume` with changes trains on, `--branch` may begin another training."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hpc_gpt.core.checkpoints.branches import CheckpointHold
from hpc_gpt.core.checkpoints.find_checkpoints import checkpoint_folder_name, newest_step, read_marker
from hpc_gpt.core.checkpoints.lineage import (
    Parent,
    ResumePoint,
    branched_at,
    checkpoint_sources,
    find_ancestors,
    parent_of,
    saved_steps,
)
from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.ends.run_state import done_by
from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, RunFolderError, UserError
from hpc_gpt.core.files import data_dir
from hpc_gpt.core.format import counted
from hpc_gpt.core.gone import gone_notes
from hpc_gpt.core.runs.provenance import check_weights_of
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.cluster import ClusterProfile, load_profile
from hpc_gpt.core.settings.data_source import STDLIB, WITHOUT_PATH, refuse_both, source_at
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.schedule import (
    SCHEDULES,
    decay_steps_of,
    describe_schedule,
    first_difference,
    learning_rate,
)
from hpc_gpt.launcher.decide import make_run, predict_run
from hpc_gpt.launcher.descent import descend, reads_other_data
from hpc_gpt.launcher.prepared import PreparedRun
from hpc_gpt.launcher.request import Request
from hpc_gpt.launcher.until import ForecastInputs, Until, length_settings
from hpc_gpt.launcher.watch.status import read_own_status


class Way(Enum):
    """The way in which a new run continues another: it goes on with its training, branches from it, which may be
    another training, or trains it again from step 0."""

    RESUME, BRANCH, AGAIN = "resumes", "branches from", "trains again"


@dataclass(frozen=True)
class NewRun:
    """A new run: from the checkpoint of `parent`, or from step 0 without one."""

    prepared: PreparedRun
    parent: Parent | None
    notes: tuple[str, ...]


def split_branch(text: str) -> tuple[str, int | None]:
    """Returns (RUN, STEP) of `RUN@STEP`; STEP is None for the newest. Raises ConfigError if STEP is not a whole number.

    >>> split_branch("20261125-1042@8000"), split_branch("20261125-1042")
    (('20261125-1042', 8000), ('20261125-1042', None))
    """
    run, at, step = text.rpartition("@")
    if not at or "/" in step:  # a folder may have an @ in its path
        return text, None
    if not step.isdecimal():
        raise ConfigError(f"--branch {text}: {step!r} is not a step", "for example --branch RUN@8000")
    return run, int(step)


def prepare_new_run(run: RunFolder, request: Request, way: Way, step: int | None = None) -> NewRun:
    """A new run that continues `run` with the keys that the request gives, after `step`; None means its newest
    checkpoint. `request.cluster` None keeps its cluster.

    Raises ConfigError or LayoutError if such a run is not possible.
    """
    settings, until, given = run.resolved(), request.until or Until(), request.given
    is_branch = way is Way.BRANCH
    if is_branch:
        engine_named(settings.engine.name).check_branch(run.run_id)
    profile = profile_of(request)
    parent, point = (None, ResumePoint(0)) if way is Way.AGAIN else parent_of(run, is_branch, step)
    keys = {**_data_keys(run, settings, given), **given} if is_branch else given
    length = changed_length(settings, until, given)
    resolved = descend(settings, keys, profile or settings.cluster, point.step, length, is_branch)
    if parent is not None:
        _check_further(run, settings, resolved, point.step, way)
    if way is Way.RESUME:
        _check_rates(run, settings, resolved, point.step)

    planner = profile or settings.cluster
    if profile is None:
        with contextlib.suppress(UserError):  # the present one has the planner's keys, which a run does not store
            planner = load_profile(planner.name, of_a_run=True)
    prediction = predict_run(resolved, planner, refuse=not request.force)
    lead_is_given = "job.signal_lead_s" in given
    inputs = ForecastInputs(until, request.past, lead_is_given, point.step, data_from=resolved.data_from)
    did = f"{way.value} {run.run_id} after step {point.step}"
    did = f"trains {run.run_id} again from step 0" if parent is None else did
    prepared = make_run(
        resolved,
        prediction,
        title=f"{did[0].upper()}{did[1:]}.",
        template=request.template,
        inputs=inputs,
        notes=[
            *_notes_of_way(run, settings, resolved, way, point.step),
            *(f"note: {note}" for note in point.notes),
            *until.notes(resolved.batch, resolved.model.seq),
        ],
        data_beside=None if is_branch and "data.path" in given else run.data_beside,
        hold=None if parent is None else _hold_of(run, point.step),
    )
    return NewRun(prepared, parent, (*gone_notes(settings.gone), *prepared.notes, f"{did}, as {resolved.layout}"))


def profile_of(request: Request) -> ClusterProfile | None:
    """The profile of a run that continues another; None for that one's."""
    return load_profile(request.cluster) if request.cluster is not None else None


def changed_length(settings: Resolved, until: Until, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [train] that `until` changes in a run that continues. Raises ConfigError."""
    length = length_settings(until, settings, changes)
    return {key: value for key, value in length.items() if value != getattr(settings.train, key)}


def _data_keys(run: RunFolder, settings: Resolved, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [data] that follow from a data.path that a branch is given: its source, if the run's own reads no
    path, and the tokenizer that the run found beside its experiment, since no file is looked for there any more."""
    path = given.get("data.path")
    if "data.path" not in given:
        return {}
    from hpc_gpt.trainer.tokens.run_data import located  # needs numpy

    tokenizer = located(settings, run.data_beside).data.tokenizer
    keys = {} if tokenizer == settings.data.tokenizer else {"data.tokenizer": tokenizer}
    mixed = any(key.startswith("data.mix") for key in given)
    if path in (None, STDLIB) or mixed or given.get("data.source", settings.data.source) not in WITHOUT_PATH:
        return keys
    if "data.source" in given:
        raise refuse_both(path, given["data.source"])
    return {**keys, "data.source": source_at(path, (Path.cwd(), data_dir()))}


def _notes_of_way(run: RunFolder, before: Resolved, resolved: Resolved, way: Way, step: int) -> Iterator[str]:
    """The lines on what is new in a run that continues `run` after `step`."""
    if way is Way.BRANCH:
        yield from branch_lines(before, resolved, run, step)
    elif way is Way.AGAIN:
        try:
            check_weights_of(run.path, resolved)
        except ConfigError as fault:
            yield f"note: {fault}; the new run begins from the weights that are there now"
    elif resolved.train.steps != before.train.steps and SCHEDULES[fall := resolved.train.decay].by_length:
        yield (
            f"note: the learning rate falls ({fall}) to the end of {before.train.steps} steps until step {step}, and "
            f"of {resolved.train.steps} steps after it: no unbroken run of either length has this rate"
        )


def branch_lines(before: Resolved, resolved: Resolved, run: RunFolder, step: int) -> Iterator[str]:
    """The lines on both schedules, with the rate in the first step of the branch, and on the begin of its data."""
    for name, train in ((f"run {run.run_id}", before.train), ("the branch", resolved.train)):
        rate = learning_rate(train, step)
        yield f"schedule of {name}: {describe_schedule(train)}; {rate:.4g} in step {step + 1}"
    if (old := before.train.optimizer) != (new := resolved.train.optimizer):
        yield f"train.optimizer {old} -> {new}: its states begin at zero"
    keys = ("balance", "balance_coef", "balance_rate", "z_loss")
    if changed := [f"train.{key} {old} -> {new}" for key in keys
                   if (old := getattr(before.train, key)) != (new := getattr(resolved.train, key))]:  # fmt: skip
        yield f"balance of the experts: {', '.join(changed)}"
    if reads_other_data(before, resolved.data):
        yield "other data: they begin at their first sample"
    elif resolved.data.source != "random":
        yield f"the same data: their order continues after {counted(step - resolved.data_from, 'step')}"


def _owner_of(run: RunFolder, step: int) -> RunFolder | None:
    """The run, it or an ancestor, that has the checkpoint of `step`."""
    name = checkpoint_folder_name(step)
    return next((source for source, _ in checkpoint_sources(run) if (source.checkpoints / name).is_dir()), None)


def _hold_of(run: RunFolder, step: int) -> CheckpointHold | None:
    owner = _owner_of(run, step)
    return None if owner is None else CheckpointHold(owner, step, lambda: _is_live(owner))


def _check_further(run: RunFolder, before: Resolved, resolved: Resolved, step: int, way: Way) -> None:
    """Raises ConfigError if the new run would end at once."""
    train = resolved.train
    if train.steps <= step:
        if way is Way.RESUME and train.steps == before.train.steps:
            raise done_fault(run)
        raise ConfigError(
            f"train.steps is {train.steps}, and the new run begins after step {step}: its job would end at once",
            f"give more than {counted(step, 'step')}, as in --until steps={2 * step}",
        )
    owner = _owner_of(run, step)
    marker = {} if owner is None else read_marker(owner.checkpoints / checkpoint_folder_name(step))
    trained = float(marker.get("train_s") or 0.0) / 60
    if train.minutes is not None and trained >= train.minutes:
        raise ConfigError(
            f"train.minutes is {train.minutes:g}, and step {step} came after {trained:.4g} minutes, which count: the "
            "new run would end at once",
            f"--set train.minutes={max(2 * trained, 1.0):.0f}, or --set train.minutes= for no limit",
        )


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


def done_fault(run: RunFolder) -> ConfigError:
    """The refusal of a run that is done, with the ways to train on."""
    attempts, before = run.attempts(), run.resolved().train
    last = done_by(attempts)
    cause = last.ended().get("cause") if last is not None else None
    trained = [attempt.ended().get("step") or 0 for attempt in attempts]
    by_steps = not cause or max(trained, default=0) >= before.steps
    why = f"it has trained its {counted(before.steps, 'step')}" if by_steps else cause
    if not before.steps:
        return ConfigError(f"run {run.run_id} is done: its program has ended", "submit a new run")
    options = [f"--until steps={2 * before.steps}", f"--set train.steps={2 * before.steps}"]
    flat = [step for step in saved_steps(run) if step <= before.steps - decay_steps_of(before)]
    if by_steps and before.decay == "wsd" and flat:  # it has decayed
        options = [f"hpc-gpt submit --branch {run.run_id}@{flat[-1]} --until steps={2 * before.steps}"]
    if not by_steps:
        options = [f"--set train.minutes={2 * before.minutes:g}"] if before.minutes is not None else []
        options += [f"--until loss={0.9 * before.until_loss:.4g}"] if before.until_loss is not None else []
    hint = f"to train on, as a new run: {', or '.join(options)}" if options else "submit a new run"
    marked = any(newest_step(source) for source in (run, *find_ancestors(run)))
    if not marked:
        hint = "it has no checkpoint to resume from: submit a new run that trains further"
    return ConfigError(f"run {run.run_id} is done: {why}; its job would end at once", hint)


def _is_live(run: RunFolder) -> bool:
    try:
        return read_own_status(run).state in (*LIVE, "unknown")
    except RunFolderError:  # it runs on another machine
        return True
