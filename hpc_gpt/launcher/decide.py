"""Decide a run: read its experiment, choose what is open, size it, predict it, note what its user should know, render.

Every verb that needs the script of a run uses this module: render, submit with its sweeps and resumptions, and
doctor. They share `predict_run` and `make_run`. A script of the user's own takes the steps of `decide_script`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.engines.base.facts import EngineFacts
from hpc_gpt.core.errors import ConfigError, Fault, UserError, raise_faults
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import job_over_profile, size_run
from hpc_gpt.core.settings.experiment import Experiment, with_keys
from hpc_gpt.core.settings.experiment_file import (
    ExperimentFile,
    cut_warmup,
    find_experiment,
    folder_of_data,
    keys_given,
    load_experiment,
)
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.rules.engine import product_faults
from hpc_gpt.core.settings.rules.walk import faults_before
from hpc_gpt.core.settings.sized import Sized
from hpc_gpt.core.slurm.directives import job_faults
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
from hpc_gpt.launcher.until import ForecastInputs, Until, forecast_chain, length_settings, wants_forecast
from hpc_gpt.planner.prediction import PlanChoice, Prediction, faster_notes, plan_open, predict

if TYPE_CHECKING:
    from hpc_gpt.launcher.forecast import Forecast

# The minutes between saves of a run that does not say when to save, and the number of checkpoints that it keeps.
AUTOMATIC_MINUTES, AUTOMATIC_KEPT = 30.0, 3
_NO_EXPERIMENT = "No EXPERIMENT was named: the defaults, and the options of the command line."


def prepare(request: Request, queueing: bool = False, faster: bool = False) -> PreparedRun:
    """Prepares one run; for a sweep the requested row, or the first possible one.

    `queueing`: the job is to be submitted, so the fallback profile is refused if there is no sbatch. `faster`: adds
    advice on settings that would make it faster, and on another layout if the plan is searched and the layout is open.
    """
    if request.names_experiment and request.script is None:
        find_experiment(request.experiment)  # a name that nothing has is the first thing to say
    profile = choose_profile(request, queueing)
    if request.script is not None:
        from hpc_gpt.launcher.decide_script import prepare_script_of_line  # for job scripts alone

        return prepare_script_of_line(request, profile, request.script)
    file = requested_file(request, profile)
    row = file.row(request.row)
    try:
        return prepare_row(request, profile, file, row.name if row is not None else None, faster)
    except UserError as fault:
        if not (request.names_experiment or request.sized or file.path is DEFAULTS):
            none_named = f"no EXPERIMENT is named, so it is the default, {request.experiment}; demo is a small one"
            fault.add_hint(none_named)
        raise


@dataclass
class _Draft(Decided):
    """A run while it is decided: each step fills in what the later ones read. `faults`: those of its keys, before
    anything is decided."""

    until: Until = field(default_factory=Until)
    wants_faster: bool = False
    faults: list[Fault] = field(default_factory=list)
    inputs: ForecastInputs | None = None


def prepare_row(
    request: Request, profile: ClusterProfile, file: ExperimentFile, row: str | None, faster: bool = False
) -> PreparedRun:
    """The run of a file, or of one of its rows."""
    draft = _read(request, profile, file, row, faster)
    facts = engine_named(draft.experiment.engine.name)
    if facts.takes_command and draft.experiment.command.script is not None:
        raise_faults(draft.faults)
        from hpc_gpt.launcher.decide_script import prepare_script_of_file

        return prepare_script_of_file(request, profile, file, draft.experiment, draft.given_keys)
    _check_request(request, facts, draft.until)
    _plan(draft)
    if request.smoke:
        _shrink(draft)
    else:
        _lengthen(draft)
    _size(draft)
    # A run on this machine, or a smoke run, need not fit by the prediction.
    may_not_fit = request.force or request.smoke or draft.profile.scheduler == "local"
    prediction = predict_run(draft.run, draft.profile, refuse=not may_not_fit)
    return make_run(
        draft.run,
        prediction,
        file=file,
        row=row,
        template=request.template,
        inputs=draft.inputs,
        notes=[*notes_of(draft)],
        data_beside=_data_beside(draft),
        faster=faster_notes(prediction, draft.run, draft.given_keys, draft.plan.best) if draft.wants_faster else (),
        copies=request.copies,
        force=request.force,
    )


def _read(request: Request, profile: ClusterProfile, file: ExperimentFile, row: str | None, faster: bool) -> _Draft:
    """1. The experiment, with the keys that the user gives, and the faults of keys and of the job."""
    until = request.until or Until()
    steps_elsewhere = request.smoke or (until.steps or until.tokens) is not None
    faults, full_profile = list[Fault](), of_full_size(request, profile)
    experiment = load_row(file, request.overrides, row, steps_elsewhere, faults)
    faults += job_faults(job_over_profile(experiment, full_profile), full_profile, has_forecast=False)
    return _Draft(
        request=request,
        profile=profile,
        file=file,
        row=row,
        experiment=experiment,
        given_keys=keys_given(file, request.overrides, row),
        full_profile=full_profile,
        until=until,
        faults=faults,
        wants_faster=faster and not request.smoke,  # the speed of a smoke run does not matter
    )


def _plan(draft: _Draft) -> None:
    """2. The plan's choice of every key that is open, and the sizes on the intended cluster. Without a file, engine,
    layout and batch are open; else what the file and the rules for a layout leave open."""
    overrides, has_file = draft.request.overrides, draft.file.path is not DEFAULTS
    if not has_file:
        if faults_before(draft.experiment, draft.full_profile, draft.faults):
            size_run(draft.experiment, draft.full_profile, faults=draft.faults)  # raises them before the plan
        open_keys = {"engine.compile"} - {*overrides}  # it is by default, too
        fast = is_fast(draft.full_profile, overrides)
        from hpc_gpt.planner.best_plan import best_plan  # loads all of the planner

        draft.plan = best_plan(draft.experiment, draft.full_profile, draft.given_keys - open_keys, fast)
        planned = with_keys(draft.experiment, draft.plan.keys)
        draft.experiment, draft.batch = with_defaults(planned, draft.full_profile, overrides, draft.given_keys)
        draft.given_keys -= open_keys
    whole = cut_warmup(draft.experiment)[0]
    draft.full = size_run(whole, draft.full_profile, faults=draft.faults, to_train=True)
    if has_file or "layout.micro_batches" in draft.given_keys:
        draft.given_keys |= {"layout.micro_batch"}  # the plan chooses it only if the user gives no part of the batch
    draft.plan = PlanChoice(lines=draft.plan.lines)
    if not (draft.plan.lines or draft.request.smoke):
        draft.plan = plan_open(draft.full, draft.profile, draft.given_keys, all_layouts=draft.wants_faster)


def _shrink(draft: _Draft) -> None:
    """3. Makes it small for a smoke run."""
    from hpc_gpt.core.machine.find_gpus import has_gpus  # loads much that a job script does not need
    from hpc_gpt.launcher.smoke import shrink

    on_gpus = draft.profile.scheduler != "local" or has_gpus()
    draft.small = shrink(draft.experiment, draft.full, on_gpus, draft.request.overrides)
    draft.profile = replace(draft.profile, stage=None)


def _lengthen(draft: _Draft) -> None:
    """3. How far it trains, with a warm-up that fits, when it saves, and what its forecast needs. Raises ConfigError if
    the command line says another length."""
    request, sizes, goal = draft.request, draft.full, list[str]()
    if draft.until != Until():
        length = length_settings(draft.until, sizes, request.given)
        draft.experiment = with_keys(draft.experiment, {f"train.{key}": value for key, value in length.items()})
        goal = draft.until.notes(sizes.batch, sizes.model.seq)
    whole, cut = cut_warmup(draft.experiment)
    draft.experiment, draft.length = with_keys(whole, _automatic_saves(whole, draft.given_keys)), (*goal, *cut)
    if request.until is not None:
        draft.inputs = ForecastInputs(request.until, request.past, "job.signal_lead_s" in draft.given_keys)


def _size(draft: _Draft) -> None:
    """4. Its sizes with the plan's choice. If a switch that is given refuses the plan's keys, they are left out."""
    experiment = draft.small.experiment if draft.small is not None else draft.experiment
    if draft.plan.keys:
        with contextlib.suppress(UserError):
            draft.run = size_run(with_keys(experiment, draft.plan.keys), draft.profile)
            return
        draft.plan = PlanChoice(best=draft.plan.best)
    draft.run = size_run(experiment, draft.profile)


def _data_beside(draft: _Draft) -> Path | None:
    """The `data_beside` of the run. Raises DataError if the path matches two files, one beside the experiment's file
    and one in the current folder."""
    data = draft.run.data
    if data.path is None and data.mix is None:
        return None
    folder = folder_of_data(draft.file, draft.request.overrides, draft.row)
    if folder is None:
        return None
    from hpc_gpt.trainer.tokens.run_data import check_beside  # needs numpy

    return check_beside(data, folder)


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
    file: ExperimentFile,
    overrides: Mapping[str, Any],
    row: str | None,
    steps_elsewhere: bool = False,
    faults: list[Fault] | None = None,
) -> Experiment:
    """The experiment with the overrides applied, whose faults are raised or added as by `load_experiment`.

    If it then has all three sizes of a batch, and an override gave global_batch or micro_batches, the other of the two
    is dropped, and follows from the rest.
    """
    experiment = load_experiment(file, overrides, row, steps_elsewhere, faults)
    sizes = experiment.layout
    overridden = {"layout.global_batch", "layout.micro_batches"} & set(overrides)
    is_open = None in (sizes.micro_batch, sizes.micro_batches, sizes.global_batch)
    if is_open or len(overridden) != 1:
        return experiment
    follows = "layout.micro_batches" if "layout.global_batch" in overridden else "layout.global_batch"
    return with_keys(experiment, {follows: None})


def predict_run(sized: Sized, planner: ClusterProfile, refuse: bool = False) -> Prediction:
    """The prediction for a run with all keys decided, by the planner's keys of a profile. Raises LayoutError if
    `refuse` and it is predicted not to fit; ConfigError for a format of its products with which it cannot train."""
    raise_faults(product_faults(sized))
    return predict(sized, planner, refuse)


def make_run(
    sized: Sized,
    prediction: Prediction,
    *,
    file: ExperimentFile | None = None,
    row: str | None = None,
    title: str = _NO_EXPERIMENT,
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
    if file is None or file.path is DEFAULTS:
        from hpc_gpt.core.settings.stored import experiment_text

        text, path = experiment_text(resolved, title), None
    else:
        text, path = file.text, file.path
    return PreparedRun(
        resolved,
        render_script(resolved, template),
        text,
        (*notes, *(notes_on_time(resolved, inputs.past) if inputs is not None else ())),
        prediction,
        forecast,
        file=path,
        **others,
    )
