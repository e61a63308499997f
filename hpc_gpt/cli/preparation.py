"""From a request to scripts: every row that is asked for loaded, resolved and rendered, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.cli.experiment_options import Request, logs_folder
from hpc_gpt.errors import ConfigError, UserError

if TYPE_CHECKING:
    from hpc_gpt.chain.measured import Earlier
    from hpc_gpt.launch.submission import Prepared
    from hpc_gpt.settings.cluster import ClusterProfile
    from hpc_gpt.settings.experiment import Experiment
    from hpc_gpt.settings.experiment_file import ExperimentFile, Row
    from hpc_gpt.settings.resolve import Resolved


# Named as the file where no EXPERIMENT is given and the defaults of every key apply.
_DEFAULTS = Path("the defaults")


@dataclass(frozen=True)
class PreparedSweep:
    """Every row of a sweep that can run, ready; those that cannot; and what was refused of those left out."""

    name: str
    rows: list[Prepared]
    impossible: list[Row]
    unfit: dict[str, UserError]


def prepare(request: Request, queueing: bool = False) -> Prepared:
    """Loads, resolves and renders one experiment: of a sweep the row asked for, or the first possible one.

    `queueing`: the job would really be submitted, so a guessed profile is refused where there is no sbatch.
    """
    profile = choose_profile(request, queueing)
    file = read_asked(request, profile)
    row = file.row(request.row)
    try:
        return _prepare_row(request, profile, file, row.name if row is not None else request.row, earlier_runs)
    except UserError as fault:
        if not request.names_experiment and not are_defaults(file) and "--engine " in fault.hint:
            fault.hint = fault.hint.replace("use --", f"use {request.experiment} --", 1)  # its settings, unless named
        raise


def prepare_sweep(request: Request, queueing: bool = False, skip_unfit: bool = False) -> PreparedSweep:
    """Every row of the sweep, as `prepare` does one. The faults of all rows are told at once.

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
        from hpc_gpt.launch.submission import faults_of_rows

        raise faults_of_rows(faults).offering(len(prepared))
    return PreparedSweep(file.name, prepared, [row for row in file.rows if row.impossible is not None], faults)


def read_asked(request: Request, profile: ClusterProfile, under: Mapping[str, Any] | None = None) -> ExperimentFile:
    """EXPERIMENT's file. Without one the default experiment's, or, with another model or engine, no file but the
    defaults of every key, which none of its settings leak into; `under` are tables of a verb's own for these.

    ConfigError for another engine without a model: the defaults name none.
    """
    from hpc_gpt.settings.experiment_file import DEFAULT_EXPERIMENT, ExperimentFile, read_experiment

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
    if lacks_bf16(of_full_size(request, profile)) and "train.dtype" not in asked:
        tables["train"] = {"dtype": "fp16"}
    return ExperimentFile(_DEFAULTS, "", tables, None, ((_DEFAULTS, tables),))


def are_defaults(file: ExperimentFile) -> bool:
    """Whether it is no file, but the defaults of every key."""
    return file.path is _DEFAULTS


def lacks_bf16(profile: ClusterProfile) -> bool:
    """Whether the profile's device is known to have no unit for bf16, but one for fp16."""
    from hpc_gpt.settings.devices import DEVICES

    device = DEVICES.get(profile.device or "")
    peaks = (profile.machine and profile.machine.peak_tflops) or (device.peaks if device else {})
    return "fp16" in peaks and "bf16" not in peaks


def _words_of_defaults(request: Request, profile: ClusterProfile, run: Experiment, resolved: Resolved) -> str:
    """The line that says which defaults apply, as no EXPERIMENT is given."""
    from hpc_gpt.settings.experiment_file import DEFAULT_EXPERIMENT

    dtype: str = run.train.dtype
    if lacks_bf16(profile) and "train.dtype" not in request.overrides:
        dtype += f" as {profile.device} has no bf16"
    batch = "" if request.smoke else f"batch {resolved.batch.global_batch}, "  # a smoke run's own lines say its batch
    return (
        f"no EXPERIMENT: the defaults, not {DEFAULT_EXPERIMENT}'s settings: engine {run.engine.name}, {dtype}, {batch}"
        f"{run.train.steps} steps, lr {run.train.lr:g}"
    )


def _prepare_row(
    request: Request, profile: ClusterProfile, file: ExperimentFile, row: str | None, earlier: Callable[[], Earlier]
) -> Prepared:
    from hpc_gpt.launch.chain_ahead import (
        refuse_with_smoke,
        settle_until,
        short_of_time,
        wants_outlook,
        with_outlook,
    )
    from hpc_gpt.launch.foresight import foresee, settle_open
    from hpc_gpt.launch.render import render_script
    from hpc_gpt.launch.submission import Prepared, folder_beside
    from hpc_gpt.settings.engines import can_resume
    from hpc_gpt.settings.experiment_file import cut_warmup
    from hpc_gpt.settings.resolve import NO_EXPERIMENT, experiment_text, resolve

    experiment, given = _load(request, file, row)
    if request.smoke:
        refuse_with_smoke(request.until)
        resolved, notes = _shrunken(experiment, profile, of_full_size(request, profile))
    else:
        warmup_steps = experiment.train.warmup_steps
        experiment, cut = cut_warmup(experiment)
        experiment, notes = settle_open(experiment, profile, given)
        resolved = resolve(experiment, profile)
        experiment, far = settle_until(experiment, resolved, request.until, request.given)
        if far:
            whole = replace(experiment, train=replace(experiment.train, warmup_steps=warmup_steps))
            experiment, cut = cut_warmup(whole)
            resolved = resolve(experiment, profile)
        notes = (*notes, *far, *cut)
    if file.rows is not None:
        resolved = replace(resolved, sweep=str(file.tables["name"]), row=row)
    text = file.text
    if are_defaults(file):
        text = experiment_text(resolved, NO_EXPERIMENT)
        notes = (_words_of_defaults(request, of_full_size(request, profile), experiment, resolved), *notes)
    if not can_resume(resolved.engine):
        words = "what is offloaded to NVMe is in no checkpoint: this run cannot be resumed, and is not requeued"
        notes = (*notes, f"note: {words}")
    # A run here is anyone's to try; a smoke run is to show that it starts.
    refuse = not (request.force or request.smoke or profile.scheduler == "local")
    foresight = foresee(resolved, profile, refuse)
    outlook = None
    if not request.smoke and wants_outlook(resolved, request.until):
        resolved, outlook = with_outlook(resolved, foresight, earlier(), "job.signal_lead_s" in given)
    beside = folder_beside(file, resolved, request.overrides, row)
    script = render_script(resolved, request.template)
    if not request.smoke and request.until is not None:
        notes = (*notes, *short_of_time(resolved, earlier))
    path = None if are_defaults(file) else file.path
    return Prepared(resolved, script, text, notes, foresight, outlook, path, beside)


def earlier_runs() -> Earlier:
    """What the runs of the logs folder tell of how long things take; read when it is first asked."""
    from hpc_gpt.chain.measured import Earlier
    from hpc_gpt.runs.find import list_runs

    logs = logs_folder()
    return Earlier(lambda: list_runs(logs))


def _load(request: Request, file: ExperimentFile, row: str | None) -> tuple[Experiment, frozenset[str]]:
    """(the experiment, the keys that it and the flags give)."""
    from hpc_gpt.settings.experiment_file import keys_given, load_experiment

    until = request.until
    elsewhere = request.smoke or (until is not None and (until.steps or until.tokens) is not None)
    experiment = load_experiment(file, request.overrides, row, elsewhere)
    given = keys_given(file, request.overrides, row)
    sizes = experiment.layout
    if None not in (sizes.micro_batch, sizes.micro_batches, sizes.global_batch):
        # Two of the three are the experiment's; the flag's own partner follows from the rest.
        asked = {"layout.global_batch", "layout.micro_batches"} & set(request.overrides)
        if len(asked) == 1:
            follows = "layout.micro_batches" if "layout.global_batch" in asked else "layout.global_batch"
            experiment = load_experiment(file, {**request.overrides, follows: None}, row, elsewhere)
    return experiment, given


def of_full_size(request: Request, profile: ClusterProfile) -> ClusterProfile:
    """The profile that a run is meant for: of a smoke run on this machine the user's own, else the fallback's nodes."""
    from hpc_gpt.settings.cluster import FALLBACK, load_profile, user_default

    if not request.smoke or profile.scheduler != "local":
        return profile
    own = user_default() if request.cluster is None else None
    meant = load_profile(own or FALLBACK)
    return meant if meant.scheduler != "local" else load_profile(FALLBACK)


def _shrunken(
    experiment: Experiment, profile: ClusterProfile, meant_for: ClusterProfile
) -> tuple[Resolved, tuple[str, ...]]:
    """The small run on the profile, and the lines that show it beside the real one."""
    from hpc_gpt.runs.provenance import list_gpus
    from hpc_gpt.settings.experiment_file import cut_warmup
    from hpc_gpt.settings.resolve import resolve
    from hpc_gpt.settings.smoke import compare, shrink

    here = profile.scheduler == "local"
    real = resolve(cut_warmup(experiment)[0], meant_for)
    smoke = shrink(experiment, real, has_gpu=not here or bool(list_gpus()))
    small = resolve(smoke.experiment, profile)
    return small, (f"smoke: {experiment.name}", *(f"  {line}" for line in (*compare(real, small), *smoke.notes)))


def choose_profile(request: Request, queueing: bool) -> Any:
    """--cluster or HPC_GPT_CLUSTER, else the user's default, else generic-slurm; this machine for a smoke run."""
    from hpc_gpt.settings.cluster import FALLBACK, list_profiles, load_profile, user_default

    if request.cluster is None and request.smoke:
        return load_profile("local")
    chosen = request.cluster or user_default()
    if chosen is None and queueing:
        from hpc_gpt.launch.slurm.scheduler import has_sbatch

        if not has_sbatch():
            raise ConfigError(
                f"no cluster profile chosen, and no sbatch here for the fallback {FALLBACK}",
                f"use --cluster with one of: {', '.join(list_profiles())}",
            )
    return load_profile(chosen or FALLBACK)
