"""Prepare a run: load its settings, resolve them, plan the open ones, predict, render.

Every verb that needs the script of a run uses this module: render, submit with its sweeps, races and resumptions, and
doctor. They share `load_row`, `predict_run` and `finish`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.engines.base.facts import EngineFacts
from hpc_gpt.core.errors import ConfigError, UserError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.engines import check_products
from hpc_gpt.core.settings.experiment import Data, Experiment, with_keys
from hpc_gpt.core.settings.experiment_file import (
    ExperimentFile,
    cut_warmup,
    find_experiment,
    folder_of_data,
    keys_given,
    load_experiment,
)
from hpc_gpt.core.settings.resolve import NO_EXPERIMENT, experiment_text, size_run
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import Sized
from hpc_gpt.launcher.notes import Decided, notes_of, notes_on_time
from hpc_gpt.launcher.prepared import PreparedRun
from hpc_gpt.launcher.render import render_script
from hpc_gpt.launcher.request import (
    DEFAULTS,
    Request,
    choose_profile,
    is_fast,
    of_full_size,
    requested_file,
    with_defaults,
)
from hpc_gpt.launcher.until import (
    ForecastInputs,
    Until,
    forecast_chain,
    length_settings,
    wants_forecast,
)
from hpc_gpt.planner.prediction import PlanChoice, Prediction, faster_notes, plan_open, predict

if TYPE_CHECKING:
    from hpc_gpt.core.settings.smoke import SmallExperiment
    from hpc_gpt.launcher.forecast import Forecast

# The minutes between saves of a run that does not say when to save, and the number of checkpoints that it keeps.
AUTOMATIC_MINUTES, AUTOMATIC_KEPT = 30.0, 3
# A run that only measures saves nothing, and has no end or limit of its own.
ONLY_MEASURES: Mapping[str, Any] = {
    "train.save_every": 0,
    "train.save_minutes": None,
    "train.save_at": (),
    "train.save_last": False,
    "train.until_loss": None,
    "job.max_gpu_hours": None,
    "job.time": None,
}
# A row that a race measures only trains, as many steps as that says.
MEASURED: Mapping[str, Any] = {**ONLY_MEASURES, "train.eval_every": 0, "train.minutes": None}


def prepare(request: Request, queueing: bool = False, faster: bool = False) -> PreparedRun:
    """Prepares one run; for a sweep the requested row, or the first possible one.

    `queueing`: the job is to be submitted, so the fallback profile is refused if there is no sbatch. `faster`: adds
    advice on settings that would make it faster, and on another layout if the plan is searched and the layout is open.
    """
    if request.names_experiment and request.script is None:
        find_experiment(request.experiment)  # a name that nothing has is the first thing to say
    profile = choose_profile(request, queueing)
    if request.script is not None:
        from hpc_gpt.launcher.prepare_script import prepare_script  # like prepare_file, for job scripts alone

        return prepare_script(request, profile, request.script)
    file = requested_file(request, profile)
    row = file.row(request.row)
    try:
        return prepare_row(request, profile, file, row.name if row is not None else None, faster)
    except UserError as fault:
        if not (request.names_experiment or request.sized or file.path is DEFAULTS):
            none_named = f"no EXPERIMENT is named, so it is the default, {request.experiment}; demo is a small one"
            fault.hint = f"{fault.hint}; {none_named}" if fault.hint else none_named
        raise


def prepare_row(
    request: Request,
    profile: ClusterProfile,
    file: ExperimentFile,
    row: str | None,
    faster: bool = False,
) -> PreparedRun:
    """The run of a file, or of one of its rows. The numbered stages decide keys of the experiment, which is sized
    before and after the plan's choice."""
    # 1. The request.
    until = request.until or Until()
    steps_elsewhere = request.smoke or (until.steps or until.tokens) is not None
    experiment = load_row(file, request.overrides, row, steps_elsewhere)
    given_keys = keys_given(file, request.overrides, row)
    if engine_named(experiment.engine.name).starts_script(experiment.command):
        from hpc_gpt.launcher.prepare_script import prepare_file

        return prepare_file(request, profile, file, experiment, given_keys)
    _check_request(request, engine_named(experiment.engine.name), until)
    # 2. Its sizes on the intended cluster, and its batch if there is no experiment.
    meant_for, batch, chosen = of_full_size(request, profile), "", ""
    if file.path is DEFAULTS:
        open_keys = {"engine.compile"} - {*request.overrides}  # it is by default, too
        from hpc_gpt.launcher.plan_question import with_best  # loads all of the planner

        fast = is_fast(meant_for, request.overrides)
        experiment, chosen = with_best(experiment, meant_for, given_keys - open_keys, fast)
        experiment, batch = with_defaults(experiment, meant_for, request.overrides, given_keys)
        given_keys -= open_keys
    sized = size_run(cut_warmup(experiment)[0], meant_for)
    if file.path is not DEFAULTS or "layout.micro_batches" in given_keys:
        given_keys |= {"layout.micro_batch"}  # the plan chooses it only if the user has given no part of the batch
    # 3. Made small for a smoke run; else with the plan's choice, its length, and the times of its saves.
    plan, length, inputs = PlanChoice(lines=(chosen,) if chosen else ()), tuple[str, ...](), None
    faster = faster and not request.smoke  # nobody waits for five steps
    if request.smoke:
        small = _shrunk(experiment, sized, profile, request.overrides)
        last, profile = small.experiment, replace(profile, stage=None)
    else:
        small = None
        if not chosen:
            plan = plan_open(sized, profile, given_keys, all_layouts=faster)
        experiment, length = lengthen(experiment, until, sized, request.given, given_keys)
        last = experiment
        lead_is_given = "job.signal_lead_s" in given_keys
        inputs = ForecastInputs(until, request.past, lead_is_given) if request.until is not None else None
    run, plan = _size_planned(last, profile, plan)
    # 4. Its prediction. A run on this machine, or a smoke run, need not fit by it.
    may_not_fit = request.force or request.smoke or profile.scheduler == "local"
    prediction = predict_run(run, profile, refuse=not may_not_fit)
    # 5. The notes for the user.
    decided = Decided(
        request=request,
        file=file,
        row=row,
        experiment=experiment,
        full=sized,
        full_profile=meant_for,
        run=run,
        profile=profile,
        given_keys=frozenset(given_keys),
        planned=plan.lines,
        length=length,
        batch=batch,
        small=small,
    )
    # 6. The run, with the signal's lead by its forecast.
    return finish(
        run,
        prediction,
        file=file,
        row=row,
        template=request.template,
        inputs=inputs,
        notes=[*notes_of(decided)],
        data_beside=folder_beside(file, run.data, request.overrides, row),
        faster=faster_notes(prediction, run, given_keys, plan.best) if faster else (),
        copies=request.copies,
    )


def _size_planned(experiment: Experiment, profile: ClusterProfile, plan: PlanChoice) -> tuple[Sized, PlanChoice]:
    """(the sizes with the plan's choice, that choice). If a switch that is given refuses the plan's keys, they are left
    out."""
    if plan.keys:
        with contextlib.suppress(UserError):
            return size_run(with_keys(experiment, plan.keys), profile), plan
        plan = PlanChoice(best=plan.best)
    return size_run(experiment, profile), plan


def _shrunk(experiment: Experiment, sized: Sized, profile: ClusterProfile, stated: Collection[str]) -> SmallExperiment:
    from hpc_gpt.core.runs.provenance import has_gpus  # loads much that a job script does not need
    from hpc_gpt.core.settings.smoke import shrink

    return shrink(experiment, sized, profile.scheduler != "local" or has_gpus(), stated)


def _check_request(request: Request, facts: EngineFacts, until: Until) -> None:
    if request.smoke and until != Until():
        raise ConfigError("--until says how far to train, but --smoke trains 5 steps", "give one of the two")
    if request.smoke:
        facts.refuse_program("it cannot be made small from here", "give its command smaller sizes")
    if until != Until():
        facts.refuse_program("--until cannot tell it when to end", "say so in command.run")


def _automatic_saves(experiment: Experiment, given_keys: Collection[str]) -> dict[str, Any]:
    """{dotted key: value} for a checkpoint every AUTOMATIC_MINUTES, with the newest AUTOMATIC_KEPT kept. Empty if one
    of the `given_keys` says when to save, or if the engine cannot save by the clock."""
    says = {"train.save_every", "train.save_minutes"} & set(given_keys) or not experiment.train.save_last
    facts = engine_named(experiment.engine.name)
    if says or not facts.follows("save_minutes"):
        return {}
    keep = {} if "train.keep_last" in given_keys else {"train.keep_last": AUTOMATIC_KEPT}
    return {"train.save_minutes": AUTOMATIC_MINUTES, **keep}


# --- the steps of every preparation


def load_row(
    file: ExperimentFile, overrides: Mapping[str, Any], row: str | None, steps_elsewhere: bool = False
) -> Experiment:
    """The experiment with the overrides applied, as in `load_experiment`.

    If it then has all three sizes of a batch, and an override gave global_batch or micro_batches, the other of the two
    is dropped, and follows from the rest.
    """
    experiment = load_experiment(file, overrides, row, steps_elsewhere)
    sizes = experiment.layout
    overridden = {"layout.global_batch", "layout.micro_batches"} & set(overrides)
    is_open = None in (sizes.micro_batch, sizes.micro_batches, sizes.global_batch)
    if is_open or len(overridden) != 1:
        return experiment
    follows = "layout.micro_batches" if "layout.global_batch" in overridden else "layout.global_batch"
    return with_keys(experiment, {follows: None})


def lengthen(
    experiment: Experiment, until: Until, sized: Sized, on_line: Mapping[str, Any], given_keys: Collection[str]
) -> tuple[Experiment, tuple[str, ...]]:
    """(the experiment with the length that `until` requests, a warm-up that fits it, and times of saves; notes).

    `sized` has its batch. `on_line` are the settings that the command line gives beside `until`; `given_keys` are given
    there or in the file. Raises ConfigError.
    """
    length = length_settings(until, sized, on_line)
    whole, cut = cut_warmup(with_keys(experiment, {f"train.{key}": value for key, value in length.items()}))
    return with_keys(whole, _automatic_saves(whole, given_keys)), (*until.notes(sized.batch, sized.model.seq), *cut)


def predict_run(sized: Sized, planner: ClusterProfile, refuse: bool = False) -> Prediction:
    """The prediction for a run with all keys decided, by the planner's keys of a profile. Raises LayoutError if
    `refuse` and it is predicted not to fit; ConfigError for a format of its products with which it cannot train."""
    check_products(sized)
    return predict(sized, planner, refuse)


def finish(
    sized: Sized,
    prediction: Prediction,
    *,
    file: ExperimentFile | None = None,
    row: str | None = None,
    title: str = NO_EXPERIMENT,
    template: Path | None = None,
    inputs: ForecastInputs | None = None,
    forecast: Forecast | None = None,
    notes: Sequence[str] = (),
    **others: Any,
) -> PreparedRun:
    """The prepared run of a sized experiment and its prediction. With `inputs` it has a forecast of its job chain,
    which decides the signal's lead. Then its settings and its script are made, and nothing changes them.

    `file` has the experiment's text, and the `row`. Without a file, or with DEFAULTS, the settings are written as text
    under a `title`. `others` are further fields of a PreparedRun. Raises ConfigError and RenderError.
    """
    job, data_from = sized.job, 0
    if inputs is not None:
        data_from = inputs.data_from
        if wants_forecast(sized, inputs.until):
            forecast = forecast_chain(replace(sized, data_from=data_from), prediction, inputs)
            job = job if forecast.lead_s is None else replace(job, signal_lead_s=forecast.lead_s)
    sweep = file.name if file is not None and row is not None else None
    resolved = Resolved.of(sized, job=job, sweep=sweep, row=row, data_from=data_from)
    file = None if file is None or file.path is DEFAULTS else file
    return PreparedRun(
        resolved,
        render_script(resolved, template),
        file.text if file is not None else experiment_text(resolved, title),
        (*notes, *(notes_on_time(resolved, inputs.past) if inputs is not None else ())),
        prediction,
        forecast,
        file=file.path if file is not None else None,
        **others,
    )


def folder_beside(
    file: ExperimentFile, data: Data, overrides: Mapping[str, Any] | None, row: str | None
) -> Path | None:
    """The `data_beside` of a run from an experiment's file. Raises DataError if the path matches two files, one beside
    that file and one in the current folder."""
    folder = folder_of_data(file, overrides, row)
    if folder is None:
        return None
    from hpc_gpt.trainer.tokens.run_data import check_beside  # needs numpy

    return check_beside(data, folder)
