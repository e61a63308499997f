"""Preparing a run: load its settings, resolve them, take from the plan what is open, predict, render. The one way.

Every verb that needs a run's script comes here: render, submit with its sweeps and resumptions, doctor, rehearse and
bench. What they share is `load_row`, `resolve_full` or `shrunken`, and `finish`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.errors import ConfigError, UserError
from hpc_gpt.launch.foresight import Foresight, foresee, plan_open
from hpc_gpt.launch.render import render_script
from hpc_gpt.launch.slurm import has_sbatch
from hpc_gpt.launch.until import Ahead, Until, forecast_chain, length_settings, short_of_time, wants_forecast
from hpc_gpt.paths import logs_folder
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

# Named as the file if no EXPERIMENT is given and the defaults of every key apply.
_DEFAULTS = Path("the defaults")


@dataclass(frozen=True)
class Request:
    """What the command line and HPC_GPT_* ask for; `given` is the command line's part of `overrides`.

    `sized`: something says how large the run is to be, or which row. `until` is what a verb that submits was told to
    train to, empty if it was told nothing; None for the other verbs.
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
    """A run ready to be submitted: its settings, its script, its file as given and where that is, what is predicted of
    it and of its chain of jobs; and what to print for the user. A relative data.path is looked for in the folder
    `data_beside` first.
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
    def told(self) -> tuple[str, ...]:
        """What to print for the user, what is predicted last."""
        return (*self.notes, *self.foretold)

    @property
    def foretold(self) -> tuple[str, ...]:
        """What is predicted of the run, and of its chain of jobs."""
        lines = self.forecast.lines if self.forecast else ()
        return (*([self.foresight.line] if self.foresight else []), *lines)

    @property
    def links(self) -> int:
        """Jobs to submit at once."""
        singleton = self.resolved.cluster.chain == "singleton"
        return max(1, self.forecast.jobs) if self.forecast is not None and singleton else 1


@dataclass(frozen=True)
class PreparedSweep:
    """Every row of a sweep that can run, ready; those that cannot; and what was refused of those left out."""

    name: str
    rows: list[Prepared]
    impossible: list[Row]
    unfit: dict[str, UserError]

    @property
    def told(self) -> list[str]:
        """What to print of the rows: what is predicted by row, what is true of many of them once."""
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
    """What is wrong with rows of a sweep, of which others may be sound: `faults` by row."""

    def __init__(self, message: str, hint: str, faults: Mapping[str, UserError]) -> None:
        super().__init__(message, hint)
        self.faults = faults

    def offering(self, others: int) -> RowFaults:
        """The same, with the hint that --skip-unfit submits the other rows, if there are any."""
        if others:
            self.hint += f"; --skip-unfit submits the other {others}"
        return self


def faults_of_rows(faults: Mapping[str, UserError]) -> RowFaults:
    """The faults of several rows of a sweep as one: by row, and what is wrong with many of them once."""
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
    """Prepares one run: of a sweep the row asked for, or the first possible one.

    `queueing`: the job would really be submitted, so a guessed profile is refused if there is no sbatch.
    """
    profile = choose_profile(request, queueing)
    file = read_asked(request, profile)
    row = file.row(request.row)
    try:
        return _prepare_row(request, profile, file, row.name if row is not None else None, earlier_runs)
    except UserError as fault:
        if not request.names_experiment and not _are_defaults(file) and "--engine " in fault.hint:
            fault.hint = fault.hint.replace("use --", f"use {request.experiment} --", 1)  # its settings, unless named
        raise


def prepare_sweep(request: Request, queueing: bool = False, skip_unfit: bool = False) -> PreparedSweep:
    """Prepares every row of the sweep, as `prepare` does one. The faults of all rows are raised at once.

    `skip_unfit`: the rows with a fault are left out, as long as there are others.
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
            raise ConfigError("--until says how far to train, and --smoke trains 5 steps", "give one of the two")
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
    if _are_defaults(file):
        text = experiment_text(resolved, NO_EXPERIMENT)
        notes = (_words_of_defaults(request, meant_for, train, resolved), *notes)
    if not can_resume(resolved.engine):
        words = "what is offloaded to NVMe is in no checkpoint: this run cannot be resumed, and is not requeued"
        notes = (*notes, f"note: {words}")
    # A run here is anyone's to try; a smoke run is to show that it starts.
    refuse = not (request.force or request.smoke or profile.scheduler == "local")
    prepared = finish(resolved, profile, text, notes, refuse, request.template, ahead)
    path = None if _are_defaults(file) else file.path
    return replace(prepared, file=path, data_beside=folder_beside(file, resolved, request.overrides, row))


def read_asked(request: Request, profile: ClusterProfile, under: Mapping[str, Any] | None = None) -> ExperimentFile:
    """EXPERIMENT's file. Without one it is the default experiment's, or, with another model or engine, no file but the
    defaults of every key, which none of that file's settings leak into; `under` are a verb's own tables for these.

    ConfigError for another engine without a model: the defaults name none.
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


def _are_defaults(file: ExperimentFile) -> bool:
    """Whether it is no file, but the defaults of every key."""
    return file.path is _DEFAULTS


def _lacks_bf16(profile: ClusterProfile) -> bool:
    """Whether the profile's device is known to have no unit for bf16, but one for fp16."""
    device = DEVICES.get(profile.device or "")
    peaks = (profile.machine and profile.machine.peak_tflops) or (device.peaks if device else {})
    return "fp16" in peaks and "bf16" not in peaks


def _words_of_defaults(request: Request, profile: ClusterProfile, train: Train, resolved: Resolved) -> str:
    """The line that says which defaults apply, as no EXPERIMENT is given."""
    dtype: str = train.dtype
    if _lacks_bf16(profile) and "train.dtype" not in request.overrides:
        dtype += f" as {profile.device} has no bf16"
    batch = "" if request.smoke else f"batch {resolved.batch.global_batch}, "  # a smoke run's own lines say its batch
    return (
        f"no EXPERIMENT: the defaults, not {DEFAULT_EXPERIMENT}'s settings: engine {resolved.engine.name}, {dtype}, "
        f"{batch}{train.steps} steps, lr {train.lr:g}"
    )


def choose_profile(request: Request, queueing: bool) -> ClusterProfile:
    """--cluster or HPC_GPT_CLUSTER, else the user's default, else generic-slurm; this machine for a smoke run."""
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
    """The profile that a run is meant for: of a smoke run on this machine the user's own, else the fallback's nodes."""
    if not request.smoke or profile.scheduler != "local":
        return profile
    own = user_default() if request.cluster is None else None
    meant = load_profile(own or FALLBACK)
    return meant if meant.scheduler != "local" else load_profile(FALLBACK)


def earlier_runs() -> Earlier:
    """What the runs of the logs folder tell of how long things take; read when it is first asked."""
    from hpc_gpt.chain.measured import Earlier  # which needs numpy, and a render does not

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
    """The experiment with `overrides` laid over, as `load_experiment`.

    If it then has all three sizes of a batch, and an override gives one of them, its partner follows from the rest;
    with `batch_follows` in any case.
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
    """The run of full size, and lines on what was decided: by the plan what `given` leaves open, by `until` its length.

    `on_line` is what the command line gives beside `until`. Raises LayoutError or ConfigError as `resolve`.
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
    """(the run as it is meant, the small one on `profile`, what could not stay as it was). `change` has the last word
    on the small experiment."""
    real = resolve(cut_warmup(experiment)[0], meant_for)
    smoke = shrink(experiment, real, has_gpu)
    return real, resolve(change(smoke.experiment), profile), smoke.notes


def as_row(resolved: Resolved, file: ExperimentFile, row: str | None) -> Resolved:
    """The run with the name of its sweep and row, if its file is one."""
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
    """The run with what is predicted of it, the forecast of its chain if there is `ahead`, and its script.

    `refuse`: LayoutError for what is predicted not to fit. Raises ConfigError and RenderError as `render_script`.
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
    """The `data_beside` of a run whose settings come from an experiment's file. DataError if the path names two files,
    one beside that file and one here."""
    folder = folder_of_data(file, overrides, row)
    if folder is None:
        return None
    from hpc_gpt.tokens.run_data import check_beside  # which needs numpy

    return check_beside(resolved.data, folder)
