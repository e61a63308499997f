"""Prepare a run: load its settings, resolve them, plan what is open, predict, render.

Every verb that needs a run's script uses this module: render, submit with its sweeps and resumptions, doctor, rehearse
and bench. They share `load_row`, `resolve_full` or `shrunken`, and `finish`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.errors import ConfigError, UserError
from hpc_gpt.files import logs_folder
from hpc_gpt.launch.foresight import Foresight, foresee, plan_open
from hpc_gpt.launch.render import render_script
from hpc_gpt.launch.slurm import has_sbatch
from hpc_gpt.launch.until import Ahead, Until, forecast_chain, length_settings, short_of_time, wants_forecast
from hpc_gpt.runs.provenance import list_gpus
from hpc_gpt.runs.run_folder import list_runs
from hpc_gpt.settings.cluster import DEVICES, FALLBACK, ClusterProfile, list_profiles, load_profile, user_default
from hpc_gpt.settings.engines import can_resume
from hpc_gpt.settings.experiment import Experiment, Train
from hpc_gpt.settings.experiment_file import (
    DEFAULT_EXPERIMENT,
    ExperimentFile,
    Row,
    cut_warmup,
    folder_of_data,
    keys_given,
    load_experiment,
    read_experiment,
)
from hpc_gpt.settings.resolve import NO_EXPERIMENT, Resolved, experiment_text, resolve, with_train
from hpc_gpt.settings.smoke import compare, shrink

if TYPE_CHECKING:
    from hpc_gpt.chain.forecast import Forecast
    from hpc_gpt.chain.measured import Earlier

# In place of a file's path, if no EXPERIMENT is given and the default of every key applies.
_DEFAULTS = Path("the defaults")


@dataclass(frozen=True)
class Request:
    """What the command line and HPC_GPT_* ask for; `given` is the command line's part of `overrides`.

    `sized`: the size of the run, or a sweep's row, is given. `until` is how far a verb that submits is to train, empty
    if that is not given; None for the other verbs.
    """

    experiment: str
    cluster: str | None
    template: Path | None
    overrides: dict[str, Any]
    row: str | None = None
    sweep: bool = False
    smoke: bool = False
    force: bool = False
    given: dict[str, Any] = field(default_factory=dict)
    names_experiment: bool = True
    sized: bool = True
    until: Until | None = None


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to be submitted: its settings, its script, the text and path of its experiment's file, the
    prediction for it, the forecast of its job chain, and `notes` for the user.

    A relative data.path is looked for in the folder `data_beside` first.
    """

    resolved: Resolved
    script: str
    text: str
    notes: tuple[str, ...] = ()
    foresight: Foresight | None = None
    forecast: Forecast | None = None
    file: Path | None = None
    data_beside: Path | None = None

    @property
    def messages(self) -> tuple[str, ...]:
        """The lines to print for the user, with the predictions last."""
        return (*self.notes, *self.predictions)

    @property
    def predictions(self) -> tuple[str, ...]:
        """The lines on the run's prediction and on the forecast of its job chain."""
        lines = self.forecast.lines if self.forecast else ()
        return (*([self.foresight.line] if self.foresight else []), *lines)

    @property
    def jobs(self) -> int:
        """The number of jobs to submit at once."""
        singleton = self.resolved.cluster.chain == "singleton"
        return max(1, self.forecast.jobs) if self.forecast is not None and singleton else 1


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep: the prepared rows, those that can never run, and {row: error} of those that were skipped."""

    name: str
    rows: list[Prepared]
    impossible: list[Row]
    unfit: dict[str, UserError]

    @property
    def messages(self) -> list[str]:
        """The lines to print: predictions by row, and a note or warning that holds for several rows only once."""
        lines: list[str] = []
        for row in self.rows:
            lines += [note for note in row.notes if not (note in lines and note.startswith(("note:", "warning:")))]
            if row.foresight and row.foresight.tables is not None:
                lines.append(f"{row.resolved.row}: {row.foresight.line}")
            elif row.foresight and row.foresight.line not in lines:
                lines.append(row.foresight.line)
            if row.forecast:
                lines.append(f"{row.resolved.row}: {row.forecast.lines[0]}")
        hours = [row.forecast.total.gpu_hours for row in self.rows if row.forecast and row.forecast.total]
        if len(hours) > 1:
            unknown = f", {len(self.rows) - len(hours)} of them not known" if len(hours) < len(self.rows) else ""
            lines.append(f"forecast: {sum(hours):,.4g} GPU-hours for {len(self.rows)} rows{unknown}")
        return lines


class RowFaults(ConfigError):
    """The faults of some rows of a sweep, `faults` by row; other rows may have none."""

    def __init__(self, message: str, hint: str, faults: Mapping[str, UserError]) -> None:
        super().__init__(message, hint)
        self.faults = faults

    def offering(self, others: int) -> RowFaults:
        """This error, with a hint to --skip-unfit if there are other rows."""
        if others:
            self.hint += f"; --skip-unfit submits the other {others}"
        return self


def faults_of_rows(faults: Mapping[str, UserError]) -> RowFaults:
    """The faults of several rows as one error; a fault that several rows have is printed once."""
    rows: dict[str, list[str]] = {}
    for row, fault in faults.items():
        for line in str(fault).splitlines():
            rows.setdefault(line, []).append(repr(row))
    lines = []
    for line, named in rows.items():
        others = f" and {len(named) - 3} more" if len(named) > 3 else ""
        lines.append(f"row{'s' if len(named) > 1 else ''} {', '.join(named[:3])}{others}: {line}")
    hints = dict.fromkeys(fault.hint for fault in faults.values() if fault.hint)
    return RowFaults("\n".join(lines), "; ".join(hints), faults)


# --- what was asked for


def prepare(request: Request, queueing: bool = False) -> Prepared:
    """Prepare one run; for a sweep the requested row, or the first possible one.

    `queueing`: the job is to be submitted, so the fallback profile is refused if there is no sbatch.
    """
    profile = choose_profile(request, queueing)
    file = read_asked(request, profile)
    row = file.row(request.row)
    try:
        return _prepare_row(request, profile, file, row.name if row is not None else None, earlier_runs)
    except UserError as fault:
        if not request.names_experiment and file.path is not _DEFAULTS and "--engine " in fault.hint:
            fault.hint = fault.hint.replace("use --", f"use {request.experiment} --", 1)  # which has its settings
        raise


def prepare_sweep(request: Request, queueing: bool = False, skip_unfit: bool = False) -> PreparedSweep:
    """Prepare every row of a sweep, as `prepare` does one. Raises the faults of all rows at once.

    `skip_unfit`: rows with a fault are skipped, if there are others.
    """
    profile = choose_profile(request, queueing)
    file = read_asked(request, profile)
    if file.rows is None:
        raise ConfigError(f"{request.experiment} is no sweep: its file has no [rows]", "leave --sweep out")
    if request.row is not None:
        raise ConfigError("--row asks for one row and --sweep for all of them", "give one of the two")
    if not file.possible:
        raise ConfigError(f"{file.path}: no row can run", "add a row that can")
    prepared: list[Prepared] = []
    faults: dict[str, UserError] = {}
    earlier = functools.cache(earlier_runs)
    for row in file.possible:
        try:
            prepared.append(_prepare_row(request, profile, file, row.name, earlier))
        except UserError as fault:
            faults[row.name] = fault
    if faults and not (skip_unfit and prepared):
        raise faults_of_rows(faults).offering(len(prepared))
    return PreparedSweep(file.name, prepared, [row for row in file.rows if row.impossible is not None], faults)


def _prepare_row(
    request: Request, profile: ClusterProfile, file: ExperimentFile, row: str | None, earlier: Callable[[], Earlier]
) -> Prepared:
    until = request.until
    sets_length = until is not None and (until.steps or until.tokens) is not None
    experiment = load_row(file, request.overrides, row, steps_elsewhere=request.smoke or sets_length)
    given = keys_given(file, request.overrides, row)
    meant_for = of_full_size(request, profile)
    ahead = None
    if request.smoke:
        if until is not None and until != Until():
            raise ConfigError("--until says how far to train, but --smoke trains 5 steps", "give one of the two")
        has_gpu = profile.scheduler != "local" or bool(list_gpus())
        real, resolved, lines = shrunken(experiment, profile, meant_for, has_gpu)
        notes = (f"smoke: {experiment.name}", *(f"  {line}" for line in (*compare(real, resolved), *lines)))
        train = experiment.train
    else:
        resolved, notes = resolve_full(experiment, profile, given, until, request.given)
        train = resolved.train
        if until is not None:
            ahead = Ahead(until, earlier, "job.signal_lead_s" in given)
    resolved = as_row(resolved, file, row)
    text = file.text
    if file.path is _DEFAULTS:
        text = experiment_text(resolved, NO_EXPERIMENT)
        notes = (_words_of_defaults(request, meant_for, train, resolved), *notes)
    if not can_resume(resolved.engine):
        words = "what is offloaded to NVMe is in no checkpoint: this run cannot be resumed, and is not requeued"
        notes = (*notes, f"note: {words}")
    # A run on this machine may be tried, and a smoke run only shows that it starts.
    refuse = not (request.force or request.smoke or profile.scheduler == "local")
    prepared = finish(resolved, profile, text, notes, refuse, request.template, ahead)
    path = None if file.path is _DEFAULTS else file.path
    return replace(prepared, file=path, data_beside=folder_beside(file, resolved, request.overrides, row))


def read_asked(request: Request, profile: ClusterProfile, under: Mapping[str, Any] | None = None) -> ExperimentFile:
    """The file of EXPERIMENT.

    If no EXPERIMENT is named, it is the default experiment's file. With another model or engine it stands for no file:
    the default of every key applies, with a verb's own tables `under` laid over them, and none of that file's settings.
    Raises ConfigError for another engine without a model, which has no default.
    """
    file = read_experiment(request.experiment)
    if request.names_experiment:
        return file
    asked = request.overrides
    sizes = [asked.get(f"model.{name}") for name in ("hidden", "layers", "heads")]
    name = asked.get("model.preset") or (None if None in sizes else f"{sizes[1]}x{sizes[0]}")
    engine, own = asked.get("engine.name"), file.tables["engine"]["name"]
    if name is None and engine in (None, own):
        return file
    if name is None and "model" not in (under or {}):
        raise ConfigError(
            f"no EXPERIMENT: {DEFAULT_EXPERIMENT} is of engine {own}, and with {engine} the defaults name no model",
            "add --model, for example --model gpt2, or name an EXPERIMENT",
        )
    if request.row is not None or request.sweep:
        words = "--sweep" if request.row is None else f"--row {request.row}"
        raise ConfigError(
            f"{words} is of an EXPERIMENT, and with --model there is none", f"name it, as {DEFAULT_EXPERIMENT}"
        )
    tables = {"name": str(name or "default"), **(under or {})}
    if _lacks_bf16(of_full_size(request, profile)) and "train.dtype" not in asked:
        tables["train"] = {"dtype": "fp16"}
    return ExperimentFile(_DEFAULTS, "", tables, None, ((_DEFAULTS, tables),))


def _lacks_bf16(profile: ClusterProfile) -> bool:
    """Whether the profile's device is known to compute in fp16 but not in bf16."""
    device = DEVICES.get(profile.device or "")
    peaks = (profile.machine and profile.machine.peak_tflops) or (device.peaks if device else {})
    return "fp16" in peaks and "bf16" not in peaks


def _words_of_defaults(request: Request, profile: ClusterProfile, train: Train, resolved: Resolved) -> str:
    """The line on the defaults that apply without an EXPERIMENT."""
    dtype: str = train.dtype
    if _lacks_bf16(profile) and "train.dtype" not in request.overrides:
        dtype += f" as {profile.device} has no bf16"
    batch = "" if request.smoke else f"batch {resolved.batch.global_batch}, "  # the lines of a smoke run have its batch
    return (
        f"no EXPERIMENT: the defaults, not {DEFAULT_EXPERIMENT}'s settings: engine {resolved.engine.name}, {dtype}, "
        f"{batch}{train.steps} steps, lr {train.lr:g}"
    )


def choose_profile(request: Request, queueing: bool) -> ClusterProfile:
    """The profile of --cluster or HPC_GPT_CLUSTER, else `local` for a smoke run, else the user's default, else the
    fallback."""
    if request.cluster is None and request.smoke:
        return load_profile("local")
    chosen = request.cluster or user_default()
    if chosen is None and queueing and not has_sbatch():
        raise ConfigError(
            f"no cluster profile chosen, and no sbatch here for the fallback {FALLBACK}",
            f"use --cluster with one of: {', '.join(list_profiles())}",
        )
    return load_profile(chosen or FALLBACK)


def of_full_size(request: Request, profile: ClusterProfile) -> ClusterProfile:
    """The profile of the run at full size; for a smoke run on this machine the user's default or the fallback."""
    if not request.smoke or profile.scheduler != "local":
        return profile
    own = user_default() if request.cluster is None else None
    meant = load_profile(own or FALLBACK)
    return meant if meant.scheduler != "local" else load_profile(FALLBACK)


def earlier_runs() -> Earlier:
    """The measurements of the runs in the logs folder; read on first use."""
    from hpc_gpt.chain.measured import Earlier  # needs numpy, which a render does not

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


def resolve_full(
    experiment: Experiment,
    profile: ClusterProfile,
    given: frozenset[str],
    until: Until | None = None,
    on_line: Mapping[str, Any] | None = None,
) -> tuple[Resolved, tuple[str, ...]]:
    """(the run at full size, notes). The plan decides what is not in `given`, and `until` the length.

    `on_line` is what the command line gives beside `until`. Raises LayoutError or ConfigError as `resolve` does.
    """
    short, cut = cut_warmup(experiment)
    resolved, notes = plan_open(short, profile, given)
    if until is None or until == Until():
        return resolved, (*notes, *cut)
    length = length_settings(until, resolved, on_line or {})
    whole, cut = cut_warmup(replace(experiment, train=replace(experiment.train, **length)))
    words = until.words(resolved.batch, resolved.model.seq)
    return with_train(resolved, whole.train), (*notes, f"until: {words}", *cut)


def shrunken(
    experiment: Experiment,
    profile: ClusterProfile,
    meant_for: ClusterProfile,
    has_gpu: bool,
    change: Callable[[Experiment], Experiment] = lambda small: small,
) -> tuple[Resolved, Resolved, tuple[str, ...]]:
    """(the run at full size, the small one on `profile`, notes on what had to change). `change` may change the small
    experiment further."""
    real = resolve(cut_warmup(experiment)[0], meant_for)
    smoke = shrink(experiment, real, has_gpu)
    return real, resolve(change(smoke.experiment), profile), smoke.notes


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
    ahead: Ahead | None = None,
) -> Prepared:
    """The run with its prediction, its script and, if `ahead` is given, the forecast of its job chain.

    `refuse`: LayoutError if it is predicted not to fit. Raises ConfigError and RenderError as `render_script` does.
    """
    foresight = foresee(resolved, profile, refuse)
    forecast = None
    if ahead is not None and wants_forecast(resolved, ahead.until):
        resolved, forecast = forecast_chain(resolved, foresight, ahead)
    script = render_script(resolved, template)
    if ahead is not None:
        notes = (*notes, *short_of_time(resolved, ahead.earlier))
    return Prepared(resolved, script, text, notes, foresight, forecast)


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
