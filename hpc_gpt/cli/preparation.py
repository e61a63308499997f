"""From a request to scripts: every row that is asked for loaded, resolved and rendered, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_gpt.cli.experiment_options import Request, logs_folder
from hpc_gpt.errors import ConfigError, UserError

if TYPE_CHECKING:
    from hpc_gpt.chain.measured import Earlier
    from hpc_gpt.launch.submission import Prepared
    from hpc_gpt.settings.cluster import ClusterProfile
    from hpc_gpt.settings.experiment import Experiment, ExperimentFile
    from hpc_gpt.settings.resolve import Resolved
    from hpc_gpt.settings.sweep import Row


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
    from hpc_gpt.settings.experiment import read_experiment
    from hpc_gpt.settings.sweep import choose_row

    profile = choose_profile(request, queueing)
    file = read_experiment(request.experiment)
    row = choose_row(file.rows, request.row, file.path) if file.rows is not None else None
    return _prepare_row(request, profile, file, row.name if row is not None else request.row, earlier_runs)


def prepare_sweep(request: Request, queueing: bool = False, skip_unfit: bool = False) -> PreparedSweep:
    """Every row of the sweep, as `prepare` does one. The faults of all rows are told at once.

    `skip_unfit`: the rows with a fault are left out, as long as there are others.
    """
    from hpc_gpt.settings.experiment import read_experiment
    from hpc_gpt.settings.sweep import sweep_of

    file = read_experiment(request.experiment)
    sweep = sweep_of(file)
    if sweep is None:
        raise ConfigError(f"{request.experiment} is no sweep: its file has no [rows]", "leave --sweep out")
    if request.row is not None:
        raise ConfigError("--row asks for one row and --sweep for all of them", "give one of the two")
    if not sweep.possible:
        raise ConfigError(f"{sweep.path}: no row can run", "add a row that can")
    profile = choose_profile(request, queueing)
    prepared: list[Prepared] = []
    faults: dict[str, UserError] = {}
    earlier = functools.cache(earlier_runs)
    for row in sweep.possible:
        try:
            prepared.append(_prepare_row(request, profile, file, row.name, earlier))
        except UserError as fault:
            faults[row.name] = fault
    if faults and not (skip_unfit and prepared):
        from hpc_gpt.launch.submission import faults_of_rows

        refusal = faults_of_rows(faults)
        if prepared:
            refusal.hint += f"; --skip-unfit submits the other {len(prepared)}"
        raise refusal
    return PreparedSweep(sweep.name, prepared, [row for row in sweep.rows if row.impossible is not None], faults)


def _prepare_row(
    request: Request, profile: ClusterProfile, file: ExperimentFile, row: str | None, earlier: Callable[[], Earlier]
) -> Prepared:
    from hpc_gpt.launch.chain_ahead import refuse_with_smoke, settle_until, wants_outlook, with_outlook
    from hpc_gpt.launch.foresight import foresee, settle_open
    from hpc_gpt.launch.render import render_script
    from hpc_gpt.launch.submission import Prepared, folder_beside
    from hpc_gpt.settings.engines import can_resume
    from hpc_gpt.settings.resolve import resolve

    experiment, given = _load(request, file, row)
    if request.smoke:
        refuse_with_smoke(request.until)
        resolved, notes = _shrunken(experiment, profile)
    else:
        experiment, notes = settle_open(experiment, profile, given)
        resolved = resolve(experiment, profile)
        experiment, far = settle_until(experiment, resolved, request.until, request.given)
        resolved, notes = resolve(experiment, profile) if far else resolved, (*notes, *far)
    if file.rows is not None:
        resolved = replace(resolved, sweep=str(file.tables["name"]), row=row)
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
    return Prepared(resolved, script, file.text, notes, foresight, outlook, beside)


def earlier_runs() -> Earlier:
    """What the runs of the logs folder tell of how long things take; read when it is first asked."""
    from hpc_gpt.chain.measured import Earlier
    from hpc_gpt.runs.find import list_runs

    logs = logs_folder()
    return Earlier(lambda: list_runs(logs))


def _load(request: Request, file: ExperimentFile, row: str | None) -> tuple[Experiment, frozenset[str]]:
    """(the experiment, the keys that it and the flags give)."""
    from hpc_gpt.settings.experiment import keys_given, load_experiment

    experiment = load_experiment(file, request.overrides, row)
    given = keys_given(file, request.overrides, row)
    sizes = experiment.layout
    if None not in (sizes.micro_batch, sizes.micro_batches, sizes.global_batch):
        # Two of the three are the experiment's; the flag's own partner follows from the rest.
        asked = {"layout.global_batch", "layout.micro_batches"} & set(request.overrides)
        if len(asked) == 1:
            follows = "layout.micro_batches" if "layout.global_batch" in asked else "layout.global_batch"
            experiment = load_experiment(file, {**request.overrides, follows: None}, row)
    return experiment, given


def _shrunken(experiment: Experiment, profile: ClusterProfile) -> tuple[Resolved, tuple[str, ...]]:
    """The small run on the profile, and the lines that show it beside the real one.

    The real layout is that of a cluster: on a profile that is this one machine, of the fallback's nodes.
    """
    from hpc_gpt.runs.provenance import list_gpus
    from hpc_gpt.settings.cluster import FALLBACK, load_profile
    from hpc_gpt.settings.resolve import resolve
    from hpc_gpt.settings.smoke import compare, shrink

    here = profile.scheduler == "local"
    real = resolve(experiment, load_profile(FALLBACK) if here else profile)
    smoke = shrink(experiment, real, has_gpu=not here or bool(list_gpus()))
    small = resolve(smoke.experiment, profile)
    return small, (f"smoke: {experiment.name}", *(f"  {line}" for line in (*compare(real, small), *smoke.notes)))


def choose_profile(request: Request, queueing: bool) -> Any:
    """--cluster or HPC_GPT_CLUSTER, else the user's default, else generic-slurm; this machine for a smoke run."""
    from hpc_gpt.settings.cluster import FALLBACK, list_profiles, load_profile, user_default

    chosen = request.cluster or user_default()
    if chosen is None and request.smoke:
        return load_profile("local")
    if chosen is None and queueing:
        from hpc_gpt.launch.slurm.scheduler import has_sbatch

        if not has_sbatch():
            raise ConfigError(
                f"no cluster profile chosen, and no sbatch here for the fallback {FALLBACK}",
                f"use --cluster with one of: {', '.join(list_profiles())}",
            )
    return load_profile(chosen or FALLBACK)
