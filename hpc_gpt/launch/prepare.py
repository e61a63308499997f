"""Prepare a run: load its settings, resolve them, plan what is open, predict, render.

Every verb that needs a run's script uses this module: render, submit with its sweeps and resumptions, doctor, rehearse
and bench. They share `load_row`, `resolve`, for a small run `shrunken`, and `finish`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.engines import engine_named
from hpc_gpt.errors import ConfigError, UserError
from hpc_gpt.files import logs_folder
from hpc_gpt.launch.prepare_script import PreparedScript, SbatchRequest, prepare_file, prepare_script
from hpc_gpt.launch.render import render_script
from hpc_gpt.launch.request import (
    DEFAULTS,
    Request,
    choose_profile,
    of_full_size,
    read_asked,
    with_batch,
    words_of_defaults,
)
from hpc_gpt.launch.until import ForecastInputs, Until, forecast_chain, length_settings, short_of_time, wants_forecast
from hpc_gpt.plan.prediction import Prediction, faster_notes, plan_open, predict
from hpc_gpt.runs.find_runs import list_runs
from hpc_gpt.runs.provenance import list_gpus
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.engines import can_resume
from hpc_gpt.settings.experiment import LR_OF_TRAINED, Experiment
from hpc_gpt.settings.experiment_file import ExperimentFile, cut_warmup, folder_of_data, keys_given, load_experiment
from hpc_gpt.settings.resolve import NO_EXPERIMENT, experiment_text, resolve, with_tables
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.settings.smoke import shrink, sizes_beside
from hpc_gpt.slurm.requeue import way_of
from hpc_gpt.weights.config import unread_keys
from hpc_gpt.words import counted

if TYPE_CHECKING:
    from hpc_gpt.launch.forecast import Forecast
    from hpc_gpt.launch.past_timings import Earlier

# How often a run saves that does not say when, and how many of those checkpoints it keeps.
AUTOMATIC_MINUTES, AUTOMATIC_KEPT = 30.0, 3


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to be submitted: its settings, its script, the text and path of its experiment's file, the
    prediction for it, the forecast of its job chain, and `notes` for the user.

    A relative data.path is looked for in the folder `data_beside` first. `given` are the dotted keys that the
    experiment and the options state. `unread` has a line on the keys of config.json that nothing reads. `job_script` is
    of a script that runs as it is.
    """

    resolved: Resolved
    script: str
    text: str
    notes: tuple[str, ...] = ()
    prediction: Prediction | None = None
    forecast: Forecast | None = None
    file: Path | None = None
    data_beside: Path | None = None
    given: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()
    job_script: SbatchRequest | None = None

    @property
    def faster(self) -> list[str]:
        """The lines on what is predicted to be faster."""
        return faster_notes(self.prediction, self.resolved, self.given)

    @property
    def messages(self) -> tuple[str, ...]:
        """The lines to print for the user, with the predictions last."""
        return (*self.notes, *self.predictions)

    @property
    def predictions(self) -> tuple[str, ...]:
        """The lines on the run's prediction and on the forecast of its job chain."""
        lines = self.forecast.lines if self.forecast else ()
        return (*([self.prediction.line] if self.prediction else []), *lines)

    @property
    def jobs(self) -> int:
        """The number of jobs to submit at once."""
        at_once = way_of(self.resolved.cluster).at_once
        return max(1, self.forecast.jobs) if self.forecast is not None and at_once else 1


def prepare(request: Request, queueing: bool = False) -> Prepared:
    """Prepare one run; for a sweep the requested row, or the first possible one.

    `queueing`: the job is to be submitted, so the fallback profile is refused if there is no sbatch.
    """
    profile = choose_profile(request, queueing)
    if request.script is not None:
        return _of_script(prepare_script(request, profile, request.script), request)
    file = read_asked(request, profile)
    row = file.row(request.row)
    try:
        return prepare_row(request, profile, file, row.name if row is not None else None, earlier_runs)
    except UserError as fault:
        if not request.names_experiment and file.path is not DEFAULTS and "--engine " in fault.hint:
            fault.hint = fault.hint.replace("use --", f"use {request.experiment} --", 1)  # which has its settings
        elif not (request.names_experiment or request.sized or file.path is DEFAULTS):
            fault.hint = f"{fault.hint}; no EXPERIMENT is named, so it is {request.experiment}; demo is a small one"
        raise


def _of_script(script: PreparedScript, request: Request) -> Prepared:
    prediction, given = Prediction("not predicted: a script of your own"), frozenset(request.overrides)
    settings = (script.resolved, script.text, script.experiment, script.notes)
    return Prepared(*settings, prediction, given=given, job_script=script.asked)


def prepare_row(
    request: Request, profile: ClusterProfile, file: ExperimentFile, row: str | None, earlier: Callable[[], Earlier]
) -> Prepared:
    until = request.until
    has_length = until not in (None, Until())
    sets_steps = until is not None and (until.steps or until.tokens) is not None
    experiment = load_row(file, request.overrides, row, steps_elsewhere=request.smoke or sets_steps)
    given = keys_given(file, request.overrides, row)
    facts = engine_named(experiment.engine.name)
    if facts.starts_script(experiment.command):
        prepared = _of_script(prepare_file(request, profile, experiment, given), request)
        return replace(prepared, text=file.text, file=file.path)
    if request.smoke and has_length:
        raise ConfigError("--until says how far to train, but --smoke trains 5 steps", "give one of the two")
    if request.smoke:
        facts.refuse_program("it cannot be made small from here", "give its command smaller sizes")
    if has_length:
        facts.refuse_program("--until cannot tell it when to end", "say so in command.run")
    # 1. The run at full size, with the batch of a run without an experiment.
    meant_for = of_full_size(request, profile)
    short, cut = cut_warmup(experiment)
    real, batch = resolve(short, meant_for), ""
    if file.path is DEFAULTS:
        real, batch = with_batch(real, meant_for, given)
    if file.path is not DEFAULTS or "layout.micro_batches" in given:
        given |= {"layout.micro_batch"}  # the plan chooses it only if the user has said nothing of the batch's parts
    # 2. Made small; or with what the plan chooses, its length, and when it saves.
    inputs = None
    if request.smoke:
        resolved, lines = shrunken(experiment, real, profile, profile.scheduler != "local" or bool(list_gpus()))
        notes = [f"smoke: {experiment.name}", *(f"  {line}" for line in (*sizes_beside(real, resolved), *lines))]
        train = experiment.train
    else:
        resolved, lines = plan_open(real, profile, given)
        notes = [*lines]
        if until is not None and has_length:
            resolved, cut = lengthen(resolved, experiment, until, request.given)
        notes += cut
        train = resolved.train
        if until is not None:
            inputs = ForecastInputs(until, earlier, "job.signal_lead_s" in given)
        resolved = with_automatic_saves(resolved, given)
    resolved = as_row(resolved, file, row)
    # 3. What its user is to know of it.
    text = file.text
    if file.path is DEFAULTS:
        text = experiment_text(resolved, NO_EXPERIMENT)
        notes.insert(0, words_of_defaults(request, meant_for, train, resolved, batch))
    elif not request.names_experiment:
        where = f"{counted(resolved.gpus, 'GPU')} of {profile.name}"
        name = request.experiment if row is None else f"{request.experiment} --row {row}"
        notes.insert(0, f"no EXPERIMENT: takes {name}, {resolved.layout} on {where}")
    unread = unread_of(experiment, real.model.seq)
    notes += [f"note: {line}" for line in (*_cautions(resolved, request.smoke, given), *unread)]
    # A run on this machine may be tried, and a smoke run only shows that it starts.
    refuse = not (request.force or request.smoke or profile.scheduler == "local")
    prepared = finish(resolved, profile, text, tuple(notes), refuse, request.template, inputs)
    path = None if file.path is DEFAULTS else file.path
    beside = folder_beside(file, resolved, request.overrides, row)
    return replace(prepared, file=path, data_beside=beside, given=frozenset(given), unread=unread)


def _cautions(resolved: Resolved, smoke: bool, given: Collection[str]) -> Iterator[str]:
    train = resolved.train
    if not can_resume(resolved.engine):
        yield "what is offloaded to NVMe is in no checkpoint: this run cannot be resumed, and is not requeued"
    if late := [at for at in (*train.save_at, *train.profile_steps[:1]) if at > train.steps]:
        which = f"step {late[0]} of train.save_at or train.profile_steps"
        yield f"{which} is not reached: the run has {train.steps:,} steps"
    if train.init is not None and not smoke and "train.lr" not in given:
        usual = f"usual for trained ones is --set train.lr={LR_OF_TRAINED:g}"
        yield f"train.lr is {train.lr:g}, the default for random weights; {usual}"


def unread_of(experiment: Experiment, seq: int) -> tuple[str, ...]:
    """The lines on keys that nothing reads, of the files that give the shape and the weights, if they are here."""
    lines = []
    for name in dict.fromkeys((experiment.model.hf, experiment.train.init)):
        with contextlib.suppress(ConfigError):
            lines.append(unread_keys(Path(name), seq) if name is not None else "")
    return tuple(filter(None, lines))


def with_automatic_saves(resolved: Resolved, given: Collection[str]) -> Resolved:
    """The run with a checkpoint every AUTOMATIC_MINUTES, of which the newest AUTOMATIC_KEPT stay; unless one of the
    keys `given` says when to save, or its engine cannot save by the clock or resume."""
    train = resolved.train
    says = {"train.save_every", "train.save_minutes"} & set(given) or not train.save_last
    if says or not engine_named(resolved.engine.name).follows("save_minutes") or not can_resume(resolved.engine):
        return resolved
    kept = train.keep_last if "train.keep_last" in given else AUTOMATIC_KEPT
    return replace(resolved, train=replace(train, save_minutes=AUTOMATIC_MINUTES, keep_last=kept))


def earlier_runs() -> Earlier:
    """The measurements of the runs in the logs folder; read on first use."""
    from hpc_gpt.launch.past_timings import Earlier  # needs numpy, which a render does not

    logs = logs_folder()
    return Earlier(lambda: list_runs(logs))


# --- the steps of every preparation


def load_row(
    file: ExperimentFile,
    overrides: Mapping[str, Any],
    row: str | None,
    steps_elsewhere: bool = False,
    batch_follows: bool = False,
) -> Experiment:
    """The experiment with `overrides` laid over it, as in `load_experiment`.

    If it then has all three sizes of a batch, and an override gave global_batch or micro_batches, the other of the two
    is dropped and follows. `batch_follows`: global_batch is dropped even without an override.
    """
    experiment = load_experiment(file, overrides, row, steps_elsewhere)
    sizes = experiment.layout
    asked = {"layout.global_batch", "layout.micro_batches"} & set(overrides)
    if None in (sizes.micro_batch, sizes.micro_batches, sizes.global_batch) or not (batch_follows or len(asked) == 1):
        return experiment
    follows = "layout.micro_batches" if "layout.global_batch" in asked else "layout.global_batch"
    return load_experiment(file, {**overrides, follows: None}, row, steps_elsewhere)


def lengthen(
    resolved: Resolved, experiment: Experiment, until: Until, on_line: Mapping[str, Any]
) -> tuple[Resolved, tuple[str, ...]]:
    """(the run with the length that `until` asks for, notes), its warm-up being the experiment's as far as it fits.

    `on_line` is what the command line gives beside `until`. Raises LayoutError or ConfigError as `resolve` does.
    """
    length = length_settings(until, resolved, on_line)
    whole, cut = cut_warmup(replace(experiment, train=replace(experiment.train, **length)))
    words = until.words(resolved.batch, resolved.model.seq)
    return with_tables(resolved, train=whole.train), (f"until: {words}", *cut)


def shrunken(
    experiment: Experiment,
    real: Resolved,
    profile: ClusterProfile,
    has_gpu: bool,
    change: Callable[[Experiment], Experiment] = lambda small: small,
) -> tuple[Resolved, tuple[str, ...]]:
    """(the small run on `profile`, notes on what had to change), `real` being the run at full size. `change` may change
    the small experiment further."""
    smoke = shrink(experiment, real, has_gpu)
    return resolve(change(smoke.experiment), profile), smoke.notes


def as_row(resolved: Resolved, file: ExperimentFile, row: str | None) -> Resolved:
    """The run with the names of its sweep and row, if its file is a sweep."""
    return replace(resolved, sweep=file.name, row=row) if file.rows is not None else resolved


def finish(
    resolved: Resolved,
    profile: ClusterProfile,
    text: str,
    notes: tuple[str, ...],
    refuse: bool = False,
    template: Path | None = None,
    inputs: ForecastInputs | None = None,
) -> Prepared:
    """The run with its prediction, its script and, if `inputs` is given, the forecast of its job chain.

    `refuse`: LayoutError if it is predicted not to fit. Raises ConfigError and RenderError as `render_script` does.
    """
    prediction = predict(resolved, profile, refuse)
    forecast = None
    if inputs is not None and wants_forecast(resolved, inputs.until):
        resolved, forecast = forecast_chain(resolved, prediction, inputs)
    script = render_script(resolved, template)
    if inputs is not None:
        notes = (*notes, *short_of_time(resolved, inputs.earlier))
    return Prepared(resolved, script, text, notes, prediction, forecast)


def folder_beside(
    file: ExperimentFile, resolved: Resolved, overrides: Mapping[str, Any] | None, row: str | None
) -> Path | None:
    """The `data_beside` of a run from an experiment's file. DataError if the path matches two files: beside
    that file and in the current folder."""
    folder = folder_of_data(file, overrides, row)
    if folder is None:
        return None
    from hpc_gpt.tokens.run_data import check_beside  # needs numpy

    return check_beside(resolved.data, folder)
