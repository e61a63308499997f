"""A race: a sweep of short visits of its rows, in rounds, which one job runs in turns. The rows are prepared as those
of any sweep. A round begins with another row than the one before, as a machine that grows warm slows all."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, LayoutError
from hpc_gpt.core.files import write_once
from hpc_gpt.core.format import counted, show_duration
from hpc_gpt.core.runs.rounds import ROWS
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import size_run
from hpc_gpt.core.settings.experiment import with_keys
from hpc_gpt.core.settings.experiment_file import ExperimentFile, cut_warmup
from hpc_gpt.core.settings.grid import parse_override
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.services import SERVICES
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.core.settings.stored import experiment_of
from hpc_gpt.core.tables import flat, toml_value
from hpc_gpt.launcher.decide import make_run, predict_run, prepare_row
from hpc_gpt.launcher.past_timings import PastTimings
from hpc_gpt.launcher.prepared import PreparedRun
from hpc_gpt.launcher.render import render_script
from hpc_gpt.launcher.request import DEFAULTS, Request, choose_profile, requested_file
from hpc_gpt.launcher.submission import check_submission
from hpc_gpt.launcher.sweep import SubmittedSweep, write_sweep
from hpc_gpt.planner.prediction import best_layouts

ROUNDS, STEPS, TOP = 3, 20, 5
# The steps of a visit before the measured ones.
_WARM_UP = 5
# Seconds of a start that no earlier run has measured, and of a job's end.
_START_S, _END_S = 120.0, 60.0
# A visit only trains, as many steps as the race says: it saves nothing, and has no end or limit of its own.
_VISIT: Mapping[str, Any] = {
    "train.save_every": 0,
    "train.save_at": (),
    "train.save_last": False,
    "train.eval_every": 0,
    **dict.fromkeys(("train.save_minutes", "train.until_loss", "train.minutes", "job.max_gpu_hours", "job.time")),
    "job.preflight": False,
}
# Keys beside layout and engine that leave the training the same.
_FREE = ("train.optimizer_mode", "train.eval_every", "train.eval_batches", "data.workers", "data.on_bad_shard")
_RACE_KEYS = ("job.time", "job.signal_lead_s", "job.name")


@dataclass(frozen=True)
class PreparedRow:
    """A row of a race: a visit of it, or None if it cannot run and the `cause`; its `keys` over the experiment, by
    dotted key; `submit`: the command that trains with it."""

    name: str
    keys: Mapping[str, Any]
    visit: PreparedRun | None = None
    cause: str | None = None
    place: int | None = None
    submit: str = ""


@dataclass(frozen=True)
class PreparedRace:
    """A race: its rows, the number of rounds, and lines for the user."""

    name: str
    rows: Sequence[PreparedRow]
    rounds: int
    lines: Sequence[str]

    @property
    def visits(self) -> list[tuple[int, PreparedRow, PreparedRun]]:
        """(round from 0, row, its run) of every visit, in the order in which they are made."""
        able = [(row, row.visit) for row in self.rows if row.visit is not None]
        return [
            (number, *able[(number + place) % len(able)]) for number in range(self.rounds) for place in range(len(able))
        ]


def prepare_race(request: Request, queueing: bool, rounds: int, steps: int, top: int) -> PreparedRace:
    """The race of a request. Raises ConfigError or LayoutError for a request that cannot be a race, before anything is
    written."""
    profile = choose_profile(request, queueing)
    file = requested_file(request, profile)
    planned = file.rows is None
    rows = list(_planned(request, profile, file, top) if planned else _rows_of_file(request, profile, file))
    runs = {row.name: row.visit for row in rows if row.visit is not None}
    if len(rows) < 2:
        what = f"{file.name} has one row" if not planned else f"plan finds {counted(len(rows), 'layout')} that fits"
        raise ConfigError(f"{what}, and a race compares several", "give it more rows, or submit it without --race")
    if len(runs) < 2:
        causes = "; ".join(f"{row.name}: {row.cause}" for row in rows if row.cause)
        raise ConfigError(f"only {counted(len(runs), 'row')} can run: {causes}", "a race compares several")
    first = next(iter(runs.values()))
    for name, visit in runs.items():
        _check_same(first.resolved, visit.resolved, name)
    visits = [_as_visit(row, steps, profile, file, request) for row in rows]
    places = _places(visits)
    by_name = not planned and not request.grid
    visits = [replace(row, place=places.get(row.name), submit=_submit_line(request, row, by_name)) for row in visits]
    able = [row.visit for row in visits if row.visit is not None]
    _check_scripts({row.name: row.visit for row in visits if row.visit is not None})
    seconds = [_visit_s(visit, request.past) for visit in able]
    most_s = rounds * sum(seconds)
    hours = most_s * first.resolved.gpus / 3600
    budget = first.resolved.job.max_gpu_hours
    of_forecast = ""
    if first.forecast is not None and first.forecast.total is not None and first.forecast.total.gpu_hours:
        of_forecast = f", {hours / first.forecast.total.gpu_hours:.2%} of the forecast"
    lines = [f"not {row.name}: {row.cause}" for row in visits if row.cause]
    unknown = [row.name for row in visits if row.visit is not None and _step_s(row.visit, request.past) is None]
    if unknown:
        lines.append(f"note: no step time is predicted for {', '.join(unknown)}: only the start of a visit is counted")
    lines.append(
        f"race: {rounds * len(able)} visits at most, {rounds} for each of {counted(len(able), 'row')}, "
        f"{show_duration(most_s)} and {hours:.3g} GPU-hours at most{of_forecast}"
    )
    if budget is not None and hours > budget:
        raise ConfigError(
            f"the race may take {hours:.3g} GPU-hours, more than --max-gpu-hours {budget:g}",
            "use fewer --rounds, --steps or --top, or a larger --max-gpu-hours",
        )
    minutes = math.ceil((most_s + _END_S + (first.resolved.job.signal_lead_s or 0)) / 60)
    time = str(request.overrides.get("job.time") or "") or f"{minutes // 60}:{minutes % 60:02d}:00"
    visits = [row if row.visit is None else replace(row, visit=_timed(row.visit, time, request)) for row in visits]
    return PreparedRace(f"{file.name}-race", visits, rounds, lines)


def _rows_of_file(request: Request, profile: ClusterProfile, file: ExperimentFile) -> Iterator[PreparedRow]:
    for row in file.rows or ():
        keys = {**flat(row.overrides)}
        if row.impossible is not None:
            yield PreparedRow(row.name, keys, cause=row.impossible)
            continue
        try:
            yield PreparedRow(row.name, keys, prepare_row(request, profile, file, row.name))
        except LayoutError as fault:
            yield PreparedRow(row.name, keys, cause="; ".join(str(fault).splitlines()))


def _planned(request: Request, profile: ClusterProfile, file: ExperimentFile, top: int) -> Iterator[PreparedRow]:
    """The planner's best layouts that fit; settings of the command line stay."""
    base = prepare_row(replace(request, force=True), profile, file, None)
    engine_named(base.resolved.engine.name).refuse_program("plan has no layouts for it", "give its rows in [rows]")
    is_open = file.path is DEFAULTS and "engine.name" not in request.overrides
    try:
        layouts = best_layouts(base.resolved, profile, request.overrides, top, is_open)
    except ConfigError as fault:
        fault.hint = f"give the race its [rows], or give plan the missing facts: {fault.hint}"
        raise
    for name, keys in layouts:
        sized = size_run(with_keys(experiment_of(base.resolved), keys), profile)
        visit = make_run(
            sized,
            predict_run(sized, profile),
            file=file,
            template=request.template,
            forecast=base.forecast,
            data_beside=base.data_beside,
            copies=base.copies,
        )
        yield PreparedRow(name, keys, visit)


def _submit_line(request: Request, row: PreparedRow, by_name: bool) -> str:
    """The command that trains with a row, quoted for a shell: what was requested, without the race's own time and
    budget, and the row by its name or by its keys."""
    words = ["hpc-gpt", "submit", *([request.experiment] if request.names_experiment else [])]
    named = row.name if by_name else request.row
    for option, value in (("--row", named), ("--cluster", request.cluster), ("--template", request.template)):
        words += [option, str(value)] if value is not None else []
    words += ["--smoke"] * request.smoke + ["--force"] * request.force
    of_race = ("job.time", "job.max_gpu_hours")
    settings = {key: value for key, value in request.given.items() if key not in of_race}
    for key, value in {**settings, **({} if by_name else row.keys)}.items():
        text = "" if value is None else value if isinstance(value, str) else toml_value(value)
        if parse_override(f"{key}={text}") != (key, value):
            text = toml_value(value)  # quoted, as the text would be read as a number
        words += ["--set", f"{key}={text}"]
    return hide_secrets(shlex.join(words))


def _as_visit(
    row: PreparedRow, steps: int, profile: ClusterProfile, file: ExperimentFile, request: Request
) -> PreparedRow:
    if row.visit is None:
        return row
    resolved = row.visit.resolved
    experiment = replace(experiment_of(resolved), **SERVICES, name=f"{file.name}-race")
    whole = _WARM_UP + steps
    ours = not runs_program(resolved)
    keys = {key: value for key, value in _VISIT.items() if ours or not key.startswith("train.")}
    keys |= {"train.steps": whole} | ({"train.log_every": whole} if ours else {})
    experiment, _ = cut_warmup(with_keys(experiment, keys))
    # The job starts the visits by itself: where the chain is made of other jobs, none follows it.
    alone = replace(profile, chain="none") if profile.scheduler == "slurm" and profile.chain != "requeue" else profile
    local = profile.scheduler == "local" or request.force
    try:
        sized = size_run(experiment, alone)
        prediction = predict_run(sized, profile, refuse=not local)
    except LayoutError as fault:
        return replace(row, visit=None, cause="; ".join(str(fault).splitlines()))
    visit = make_run(
        sized,
        prediction,
        file=file,
        row=row.name,
        template=request.template,
        data_beside=row.visit.data_beside,
        copies=row.visit.copies,
    )
    return replace(row, visit=visit)


def _predicted_step(visit: PreparedRun | None) -> dict[str, Any]:
    """The predicted step of a visit, as in predicted.json; empty if there is no prediction."""
    tables = visit.prediction.tables if visit is not None and visit.prediction is not None else None
    return (tables or {}).get("step") or {}


def _places(rows: Sequence[PreparedRow]) -> dict[str, int]:
    """{name: place by predicted step time} of the rows that have a prediction."""
    step_s = {row.name: step["step_s"] for row in rows if (step := _predicted_step(row.visit))}
    return {name: place for place, name in enumerate(sorted(step_s, key=step_s.__getitem__), 1)}


def _check_same(first: Resolved, other: Resolved, name: str) -> None:
    """Raises ConfigError if a row is another training, or needs another environment."""
    ours, theirs = _fixed(first), _fixed(other)
    for key in {**ours, **theirs}:
        if ours.get(key) != theirs.get(key):
            raise ConfigError(
                f"row {name!r}: {key} is {theirs.get(key)}, but {ours.get(key)} in the first row: a race compares ways "
                "to run one training",
                "rows may differ in layout, micro-batch, engine and its switches; submit others as a --sweep",
            )


def _fixed(resolved: Resolved) -> dict[str, Any]:
    """{dotted key: value} of the settings that the rows of a race share."""
    fixed: dict[str, Any] = {"engine.name of our trainers": not runs_program(resolved)}
    fixed |= {"gpus": resolved.gpus, "nodes": resolved.nodes, "command.per": resolved.tasks}
    fixed["batch.global_batch"] = resolved.batch.global_batch
    if runs_program(resolved):
        fixed["train.steps"] = None  # a visit ends after its own steps
    for table in ("model", "data", "train"):
        rules = resolved.key_rules(table)
        for key, value in asdict(getattr(resolved, table)).items():
            if key not in rules or rules[key].affects:
                fixed[f"{table}.{key}"] = value
    fixed |= {f"job.{key}": value for key, value in asdict(resolved.job).items()}
    fixed |= {f"cluster.{key}": value for key, value in asdict(resolved.cluster).items()}
    return {key: value for key, value in fixed.items() if key not in (*_FREE, *_RACE_KEYS)}


def _check_scripts(visits: Mapping[str, PreparedRun]) -> None:
    """Raises ConfigError if the script of a row differs from the first row's in the lines before its ranks start."""
    first: list[str] = []
    for name, visit in visits.items():
        head = visit.script.partition("<<'HPC_GPT_RESOLVED'")[0].replace(visit.resolved.slug, "").splitlines()
        lines = [line for line in head if not line.startswith("#")]
        first = first or lines
        if lines != first:
            different = next((line for line in lines if line not in first), "it lacks a line of the first row's")
            raise ConfigError(
                f"row {name!r} needs another environment than the first row: its job would have {different.strip()!r}",
                "submit it as a --sweep",
            )


def _timed(visit: PreparedRun, time: str, request: Request) -> PreparedRun:
    """The visit with the time limit of the job, which all visits share."""
    resolved = replace(visit.resolved, job=replace(visit.resolved.job, time=time))
    return replace(visit, resolved=resolved, script=render_script(resolved, request.template))


def _visit_s(visit: PreparedRun, past: PastTimings) -> float:
    """Seconds that a visit may take: a start, and its steps as in earlier runs or as predicted."""
    alike = past.newest_alike(visit.resolved)
    start_s = alike.start_s if alike is not None and alike.start_s is not None else _START_S
    return start_s + visit.resolved.train.steps * (_step_s(visit, past) or 0.0)


def _step_s(visit: PreparedRun, past: PastTimings) -> float | None:
    if (alike := past.newest_alike(visit.resolved)) is not None:
        return alike.step_s
    step = _predicted_step(visit)
    return step["step_s"] * (1 + step["band"]) if step else None


# --- submitted


def check_race(race: PreparedRace, logs: Path, dry: bool = False) -> dict[str, Any]:
    """Checks each row once, as check_submission does for a sweep, and returns the provenance."""
    return check_submission([row.visit for row in race.rows if row.visit is not None], logs, dry)


def write_race(race: PreparedRace, logs: Path) -> SubmittedSweep:
    """Writes the folder of each visit, after `check_submission`, and the file that lists the rows. Raises as
    write_sweep does."""
    visits = [visit for _, _, visit in race.visits]
    provenance = check_race(race, logs)
    varied = {row.name: row.keys for row in race.rows}
    sweep = write_sweep(race.name, visits, logs, provenance, varied, [number for number, _, _ in race.visits])
    rows = [
        {
            "name": row.name,
            "cause": row.cause,
            "place": row.place,
            "submit": row.submit,
            "predicted_step_s": _predicted_step(row.visit).get("step_s"),
        }
        for row in race.rows
    ]
    write_once(sweep.folder / ROWS, json.dumps({"rounds": race.rounds, "rows": rows}, indent=1) + "\n")
    return sweep
