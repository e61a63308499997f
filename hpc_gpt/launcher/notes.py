"""Every line on a run that its user reads before the submission, in the order of printing.

First come what was taken and chosen, then the cautions, which begin with `note: `; then, once the run is submitted or
would be, its copies, data, checkpoints and prediction. What the last submission of the experiment said is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, UserError
from hpc_gpt.core.files import read_json
from hpc_gpt.core.format import Line, counted, show_bytes, some
from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.network import MEETING_S
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.settings.decide import size_run
from hpc_gpt.core.settings.experiment import LR_OF_TRAINED, Data, Engine, limit_s
from hpc_gpt.core.settings.experiment_file import DEFAULT_EXPERIMENT, cut_warmup, load_experiment
from hpc_gpt.core.settings.rules.engine import export_notes
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.core.slurm.directives import restarts_in_job
from hpc_gpt.core.slurm.requeue import cannot_continue, restart_need
from hpc_gpt.launcher.idle_keys import idle_keys
from hpc_gpt.launcher.request import DEFAULTS, lacks_bf16
from hpc_gpt.planner.fast import FAST_SETTINGS
from hpc_gpt.planner.prediction import PlanChoice

if TYPE_CHECKING:
    from hpc_gpt.core.settings.cluster import ClusterProfile
    from hpc_gpt.core.settings.experiment import Experiment
    from hpc_gpt.core.settings.experiment_file import ExperimentFile
    from hpc_gpt.core.settings.resolved import Resolved
    from hpc_gpt.core.settings.sized import Sized
    from hpc_gpt.launcher.past_timings import PastTimings
    from hpc_gpt.launcher.prepared import PreparedRun
    from hpc_gpt.launcher.request import Request
    from hpc_gpt.launcher.smoke import SmallExperiment

# How the lines begin that are the same at each submission, called standing below, and their key in provenance.json.
_STANDING = ("note: ", "not predicted: ")
NOTES = "notes"
_BATCH = ("micro_batches", "global_batch")
# Files that an import of torch looks up, and lookups per second of a shared disk's metadata server. A node counts once:
# its ranks find in its memory the files that one of them has looked up.
_OPENS_OF_TORCH, _OPENS_S = 27_000, 50_000


@dataclass
class Decided:
    """What is decided about a run, as far as its notes tell of it.

    `experiment` is at full size, and `full` its sizes on `full_profile`; a smoke run has the sizes of `small` instead.
    `run`: the sizes of the run on `profile`. `given_keys`: the dotted keys that the user gives. `plan` has the lines on
    its choice, `length` those on how far it trains; `batch` is the reason for the batch of a run without a file.
    """

    request: Request
    profile: ClusterProfile
    file: ExperimentFile
    row: str | None
    experiment: Experiment
    given_keys: frozenset[str]
    full_profile: ClusterProfile
    full: Sized = field(init=False)
    run: Sized = field(init=False)
    plan: PlanChoice = field(default_factory=PlanChoice)
    length: tuple[str, ...] = ()
    batch: str = ""
    small: SmallExperiment | None = None


def notes_of(run: Decided) -> Iterator[str]:
    """The lines on a run that was decided, in the order of printing."""
    for lines in (_taken, _planned, _made_small):
        yield from lines(run)
    for cautions in (_followed_source, _unusual, _idle, _other_batch, _unfollowed, _lacking):
        yield from (f"note: {line}" for line in cautions(run))


def notes_on_time(resolved: Resolved, past: PastTimings) -> Iterator[str]:
    """The lines on a time limit that is short, and on what follows a failure."""
    from hpc_gpt.launcher.until import short_of_time

    yield from short_of_time(resolved, past)
    yield from after_failure(resolved, past)


def after_failure(resolved: Resolved, past: PastTimings) -> Iterator[str]:
    """The note on what follows a failure, if that is not the usual restart in the job."""
    limit = limit_s(resolved.job.time)
    if resolved.cluster.scheduler != "slurm" or not restarts_in_job(resolved):
        return
    alone, alike = cannot_continue(resolved), past.newest_alike(resolved) if limit is not None else None
    start_s, save_s = (alike.start_s, alike.save_s) if alike else (None, None)
    need = restart_need(resolved, start_s, save_s)
    if limit is not None and need.total_s > limit:
        then = "a failure ends the run" if alone else "after a failure the job goes back to the queue"
        yield f"note: {then}: a restart in the job needs {need}, and its limit is {limit} s"
    elif alone:
        yield "note: no job follows this one: a failure is retried in the job, or not at all"


# --- what was taken and chosen


def _taken(run: Decided) -> Iterator[str]:
    """The line on a file, a row or defaults that are taken although the command line does not name them."""
    if run.file.path is DEFAULTS:
        yield _defaults(run)
        return
    file, row, request = run.file, run.row, run.request
    if not request.names_experiment:
        name = request.experiment if row is None else f"{request.experiment} --row {row}"
        where = f"{counted(run.run.gpus, 'GPU')} of {run.run.cluster.name}"
        yield f"no EXPERIMENT: takes {name}, {run.run.layout} on {where}"
        return
    path = f"{file.path}" if Path(request.experiment).is_dir() else ""
    if row is None and path:
        yield f"takes {path}"
    elif row is not None and not (request.row is not None or request.sweep or request.grid):
        first = f"the first of {len(file.possible)} rows that can run; --row NAME takes another, --sweep all"
        first = first if len(file.possible) > 1 else "the only one that can run"
        yield f"takes row {row}{f' of {path}' if path else ''}, {first}"


def _defaults(run: Decided) -> str:
    """The line on the defaults that apply without an EXPERIMENT."""
    dtype: str = run.experiment.train.dtype
    if lacks_bf16(run.full_profile) and "train.dtype" not in run.request.overrides:
        dtype += f" as {run.full_profile.device} has no bf16"
    # The lines of a smoke run have its batch.
    batch = "" if run.request.smoke else f"batch {run.run.batch.global_batch}{run.batch}, "
    train = run.experiment.train
    return (
        f"no EXPERIMENT: the defaults, not {DEFAULT_EXPERIMENT}'s settings: engine {run.run.engine.name}, {dtype}, "
        f"{_compiled_text(run.run.engine)}"
        f"{batch}{counted(train.steps, 'step')}, lr {train.lr:g}"
    )


def _compiled_text(engine: Engine) -> str:
    """The text on compilation and the other fast settings, each followed by a comma."""
    if engine.compile == "none":
        return ""
    settings = [setting for setting in FAST_SETTINGS if setting.key != "compile"]
    others = [setting.key for setting in settings if getattr(engine, setting.key) == setting.value]
    return "".join(f"{setting}, " for setting in (f"compiled by {engine.compile}", *others))


def _planned(run: Decided) -> Iterator[str]:
    yield from run.plan.lines
    yield from run.length


def _made_small(run: Decided) -> Iterator[str]:
    """The lines that describe a smoke run of an experiment."""
    if run.small is None:
        return
    from hpc_gpt.launcher.smoke import sizes_beside

    yield f"smoke: {run.experiment.name}"
    yield from (f"  {line}" for line in (*sizes_beside(run.full, run.run), *run.small.notes))


# --- cautions


def _followed_source(run: Decided) -> Iterator[str]:
    """The note on a source that follows from data.path, as no key gives it."""
    data, tables = run.experiment.data, run.file.overridden(run.request.overrides, run.row)
    stated = tables.get("data", {}).get("source") or Data.source
    if data.mix is None and data.path is not None and data.source != stated:
        yield f'data.source is "{data.source}", as data.path is {data.path}'


def _unusual(run: Decided) -> Iterator[str]:
    """The notes on values that are allowed and rarely meant."""
    resolved = run.run
    train = resolved.train
    if late := [at for at in (*train.save_at, *train.profile_steps[:1]) if at > train.steps]:
        late_step = f"step {late[0]} of train.save_at or train.profile_steps"
        yield f"{late_step} is not reached: the run has {train.steps:,} steps"
    mem = resolved.job.mem
    if mem is not None and resolved.cluster.scheduler == "slurm" and mem.isdecimal() and 0 < int(mem) < 1024:
        yield f"job.mem {mem} is {mem} MiB a node, as sbatch counts; {mem}G is {mem} GiB"
    if train.init is not None and run.small is None and "train.lr" not in run.given_keys:
        usual = f"usual for trained weights is --set train.lr={LR_OF_TRAINED:g}"
        yield f"train.lr is {train.lr:g}, the default for random weights; {usual}"
    if train.balance == "none" and train.init is None and engine_named(resolved.engine.name).trains_our_model:
        yield 'train.balance is none: from random weights a few experts may take most tokens; "loss" keeps them even'
    yield from export_notes(resolved.engine.name, resolved.model)
    yield from engine_named(resolved.engine.name).notes(resolved)
    archive = resolved.cluster.archive
    if archive is not None and resolved.cluster.scheduler == "slurm" and not Path(archive).is_file():
        yield f"stage {archive} is not a file here; if a node cannot read it either, the attempt ends as user_error"
    if archive is None and resolved.cluster.scheduler == "slurm" and resolved.cluster.container is None:
        import_s = resolved.nodes * _OPENS_OF_TORCH / _OPENS_S
        if import_s > MEETING_S / 5 and not runs_program(resolved):
            yield (
                f"{resolved.nodes:,} nodes import torch: from a shared disk about {import_s / 60:.0f} min on paper, "
                f"and ranks wait {MEETING_S // 60} min for each other; set the profile's stage to a tar"
            )


def _idle(run: Decided) -> Iterator[str]:
    if run.small is None:
        yield from idle_keys(run.run, run.given_keys)


def _other_batch(run: Decided) -> Iterator[str]:
    """The note on options that change how many samples a step has, although none of them gives that number."""
    keys = [key for key in run.request.given if key.startswith("layout.")]
    of_batch = {"layout.global_batch", "layout.micro_batches"} & {*keys}
    if not keys or of_batch or run.file.path is DEFAULTS or run.small is not None:
        return
    with contextlib.suppress(UserError):
        experiment = load_experiment(run.file, {}, run.row, steps_elsewhere=True)
        own = size_run(cut_warmup(experiment)[0], run.run.cluster).batch.global_batch
        batch, dp = run.run.batch, run.run.layout.dp
        if own != batch.global_batch:
            micro = math.gcd(own // dp, batch.micro_batch)
            smaller = f"--mbs {micro} " if micro != batch.micro_batch else ""
            hint = f"; {smaller}--gbs {own} keeps them" if own % dp == 0 else ""
            yield f"a step has {batch.global_batch:,} samples, that of the file {own:,}{hint}"


def _unfollowed(run: Decided) -> Iterator[str]:
    """The lines on keys that are not followed, in the files of the shape and the weights, if this machine has them."""
    experiment = run.experiment
    files = [Path(name) for name in dict.fromkeys((experiment.model.hf, experiment.train.init)) if name is not None]
    if not files:
        return
    from hpc_gpt.core.weights.config import unfollowed_keys

    names = engine_named(experiment.engine.name).unfollowed
    if experiment.train.init is not None:
        names -= {"initializer_range"}  # nothing is drawn
    for file in files:
        with contextlib.suppress(ConfigError):
            yield from unfollowed_keys(file, run.full.model.seq, names)


def _lacking(run: Decided) -> Iterator[str]:
    """The note on the keys that a profile from documentation leaves to its user, if some are still to be given."""
    if lacking := run.profile.lacks(run.experiment.job):
        keys, name = ", ".join(f"{key} ({text})" for key, text in lacking.items()), run.profile.name
        yield (
            f"profile {name} is from documentation, not tried there, and leaves to you: {keys}; give options of "
            f'submit, or keys in a profile of your own with extends = "{name}"'
        )


# --- what the run reads, writes and is predicted to take


def prediction_lines(prepared: PreparedRun, logs: Path) -> list[str]:
    """The lines on a run's copies, data, checkpoints and predictions."""
    lines = [*data_rows(prepared), *checkpoint_lines(prepared.resolved, logs)]
    return [*map(str, lines), *prepared.predictions]


def data_rows(prepared: PreparedRun) -> list[Line]:
    """The lines on the files that a run copies and reads, for the user after its submission."""
    run, lines = prepared.resolved, list[Line]()
    if (work := prepared.copies.work(run)) is not None:
        from hpc_gpt.core.runs.work_archive import describe_copy

        lines = [Line("copy", text) for text in describe_copy(run, work)]
    return [*lines, *data_lines(run, prepared.data_beside)]


def data_lines(resolved: Resolved, data_beside: Path | None) -> tuple[Line, ...]:
    """The lines on a run's data. Relative paths are looked up in the folder `data_beside` first."""
    from hpc_gpt.trainer.tokens.description import describe_data  # needs numpy, which a render does not
    from hpc_gpt.trainer.tokens.run_data import located

    return describe_data(located(resolved, data_beside))


def checkpoint_lines(run: Resolved, logs: Path) -> list[Line]:
    """The lines on the times of a run's saves, the kept checkpoints and their space; empty if another program saves."""
    train = run.train
    if runs_program(run):
        return []
    when = [f"every {train.save_minutes:g} min"] if train.save_minutes else []
    when += [f"every {counted(train.save_every, 'step')}"] if train.save_every else []
    when += [f"after step {', '.join(map(str, sorted(set(train.save_at))))}"] if train.save_at else []
    when += ["at the end"] if train.save_last else []
    if not when:
        return [Line("checkpoints", "none: train.save_last is false")]
    from hpc_gpt.core.checkpoints.disk_space import checkpoint_bytes, checkpoints_to_come, free_gib

    keeping = f", the newest {train.keep_last} kept" if train.keep_last else ""
    one, count = checkpoint_bytes(run), checkpoints_to_come(run)
    sizes = f"about {show_bytes(one)} each, {show_bytes(count * one)} in all"
    free = free_gib(logs)
    room = f", {show_bytes(free * GIB)} free" if free is not None else ""
    lines = [Line("checkpoints", f"{' and '.join(when)}{keeping}: {sizes}{room}")]
    if train.save_minutes and free is not None and free * GIB < 2 * one:
        text = "two do not fit in the free space: saves by train.save_minutes are left out until they do"
        lines.append(Line("checkpoints", text))
    if free is not None and free * GIB < count * one:
        fit = int(free * GIB // one) if one else 0
        means = "the next one does not fit" if not fit else f"{counted(fit, 'checkpoint')} fit"
        way = "train.keep_last = 3 keeps the newest three" if not train.keep_last else "save less often"
        text = f"all checkpoints take more than is free: {means}; {way}, HPC_GPT_LOGS names another disk"
        lines.append(Line("warning", text))
    return lines


# --- the rows of a sweep


def notes_of_rows(rows: Sequence[PreparedRun], varied: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The lines on a sweep: predictions by row, and a note or warning of several rows only once. `varied` has the keys
    that each row sets."""
    lines: list[str] = []
    for row in rows:
        lines += [note for note in row.notes if not (note in lines and note.startswith(("note:", "warning:")))]
        if row.prediction and row.prediction.is_known:
            lines.append(f"{row.resolved.row}: {row.prediction.line}")
        elif row.prediction and str(row.prediction.line) not in lines:
            lines.append(str(row.prediction.line))
        if row.forecast:
            lines.append(f"{row.resolved.row}: {row.forecast.lines[0]}")
    lines += _batches(rows, varied)
    hours = [row.forecast.total.gpu_hours for row in rows if row.forecast and row.forecast.total]
    if not hours:
        lines += _predicted(rows)
    if len(hours) > 1:
        unknown = f", {len(rows) - len(hours)} of them not known" if len(hours) < len(rows) else ""
        lines.append(f"forecast: {sum(hours):,.4g} GPU-hours for {counted(len(rows), 'row')}{unknown}")
    return lines


def _batches(rows: Sequence[PreparedRun], varied: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The note on rows with different numbers of samples a step, although the sweep does not vary the batch."""
    if any(key.removeprefix("layout.") in _BATCH for keys in varied.values() for key in keys):
        return []
    by_batch: dict[int, list[str]] = {}
    for row in rows:
        by_batch.setdefault(row.resolved.batch.global_batch, []).append(str(row.resolved.row))
    if len(by_batch) < 2:
        return []
    batches = "; ".join(f"{size:,} in {some(names, 3)}" for size, names in by_batch.items())
    return [
        f"note: the rows also differ in the number of samples a step: {batches}; --gbs {max(by_batch)} makes them equal"
    ]


def _predicted(rows: Sequence[PreparedRun]) -> list[str]:
    """The line on the GPU-hours of all rows at the predicted paces; none if no pace is known."""
    hours = []
    for row in rows:
        step = (row.prediction.tables or {}).get("step") if row.prediction else None
        if step and step.get("step_s"):
            hours.append(step["step_s"] * row.resolved.train.steps * row.resolved.gpus / 3600)
    if len(rows) < 2 or not hours:
        return []
    unknown = f", {len(rows) - len(hours)} of them not predicted" if len(hours) < len(rows) else ""
    return [f"predicted: {sum(hours):,.4g} GPU-hours of steps for {counted(len(rows), 'row')}{unknown}"]


# --- what the last submission said


def standing_lines(prepared: PreparedRun) -> list[str]:
    """The lines for the user that are the same at each submission, as long as nothing changes. The provenance.json of
    the run has them, so that the next submission need not print them again."""
    lines = (*prepared.messages, *prepared.faster)
    return [hide_secrets(line) for line in lines if line.startswith(_STANDING)]


def notes_said(resolved: Resolved, logs: Path, runs: int = 1) -> frozenset[str]:
    """The standing lines that the newest `runs` runs of the same experiment printed."""
    folder = logs / resolved.slug
    try:
        newest = sorted(os.listdir(folder), reverse=True)  # a run's id begins with its time
    except OSError:
        return frozenset()
    files = (path for name in newest if (path := folder / name / "provenance.json").exists())  # a sweep has none
    return frozenset(str(line) for path in itertools.islice(files, runs) for line in read_json(path).get(NOTES) or ())


def without_said(lines: Iterable[str], earlier: frozenset[str]) -> list[str]:
    """Leaves out of `lines` the standing ones that are in `earlier`: the user has read them."""
    return [line for line in lines if not (line.startswith(_STANDING) and hide_secrets(line) in earlier)]
