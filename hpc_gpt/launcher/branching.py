"""Branch a run: a new run from one of its checkpoints, with another schedule or other data."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, RunFolderError
from hpc_gpt.core.files import data_dir
from hpc_gpt.core.format import counted
from hpc_gpt.core.gone import gone_notes
from hpc_gpt.core.runs.branches import CheckpointHold
from hpc_gpt.core.runs.checkpoints import checkpoint_folder_name, read_marker
from hpc_gpt.core.runs.descent import descend, reads_other_data
from hpc_gpt.core.runs.lineage import branch_of, checkpoint_sources
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.data_source import STDLIB, WITHOUT_PATH, refuse_both, source_at
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.schedule import describe_schedule, learning_rate
from hpc_gpt.launcher.request import Request
from hpc_gpt.launcher.resumption import NewRun, changed_length, prepare_child, profile_of
from hpc_gpt.launcher.until import ForecastInputs
from hpc_gpt.launcher.watch.status import read_own_status


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


def prepare_branch(run: RunFolder, step: int | None, request: Request) -> NewRun:
    """A new run that begins from the checkpoint of `run` after `step`; None means its newest. `run` may be training.

    `request.cluster` None keeps its cluster. Raises ConfigError or LayoutError if such a run is not possible.
    """
    assert request.until is not None
    settings, until = run.resolved(), request.until
    engine_named(settings.engine.name).check_branch(run.run_id)
    profile = profile_of(settings, request)
    parent, point = branch_of(run, step)
    length = changed_length(settings, until, request.given)
    followed = {**_tokenizer_beside(run, settings, request.given), **_source_of(settings, request.given)}
    resolved = descend(
        settings, {**followed, **request.given}, profile or settings.cluster, point.step, length, branch=True
    )
    checkpoint = checkpoint_folder_name(point.step)
    sources = (source for source, _ in checkpoint_sources(run))
    owner = next(source for source in sources if (source.checkpoints / checkpoint).is_dir())
    _check_further(owner.checkpoints / checkpoint, resolved, point.step)
    title = f"Branches from run {run.run_id} after step {point.step}."
    inputs = ForecastInputs(until, request.past, "job.signal_lead_s" in request.given, run, point.step)
    fields = {
        "data_beside": None if "data.path" in request.given else run.data_beside,
        "hold": CheckpointHold(owner, point.step, lambda: _is_live(owner)),
    }
    prepared = prepare_child(run, resolved, title, inputs, profile, request, **fields)
    notes = (
        *gone_notes(settings.gone),
        *branch_lines(settings, resolved, run, point.step),
        *(f"note: {note}" for note in point.notes),
        *until.notes(resolved.batch, resolved.model.seq),
        *prepared.notes,
        f"branches from {run.run_id} after step {point.step}, as {resolved.layout}",
    )
    return NewRun(prepared, parent, notes)


def _tokenizer_beside(run: RunFolder, settings: Resolved, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The key of the tokenizer's file that the run found beside its experiment, by its whole path, if the overrides
    have a `data.path`: then no file is looked for there any more."""
    if "data.path" not in overrides:
        return {}
    from hpc_gpt.trainer.tokens.run_data import located  # needs numpy

    path = located(settings, run.data_beside).data.tokenizer
    return {} if path == settings.data.tokenizer else {"data.tokenizer": path}


def _source_of(settings: Resolved, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The key of the source that follows from a data.path in the overrides, if they have no source and the run's own
    reads no path."""
    path, mixed = overrides.get("data.path"), any(key.startswith("data.mix") for key in overrides)
    if path in (None, STDLIB) or mixed or overrides.get("data.source", settings.data.source) not in WITHOUT_PATH:
        return {}
    if "data.source" in overrides:
        raise refuse_both(path, overrides["data.source"])
    return {"data.source": source_at(path, (Path.cwd(), data_dir()))}


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


def _check_further(checkpoint: Path, resolved: Resolved, step: int) -> None:
    """Raises ConfigError if the branch would end at once."""
    train = resolved.train
    if train.steps <= step:
        raise ConfigError(
            f"train.steps is {train.steps}, and the branch begins after step {step}: its job would end at once",
            f"give more than {counted(step, 'step')}, as in --until steps={2 * step}",
        )
    trained = float(read_marker(checkpoint).get("train_s") or 0.0) / 60
    if train.minutes is not None and trained >= train.minutes:
        raise ConfigError(
            f"train.minutes is {train.minutes:g}, and step {step} came after {trained:.4g} minutes, which count: the "
            "branch would end at once",
            f"--set train.minutes={max(2 * trained, 1.0):.0f}, or --set train.minutes= for no limit",
        )


def _is_live(run: RunFolder) -> bool:
    try:
        return read_own_status(run).state in (*LIVE, "unknown")
    except RunFolderError:  # it runs on another machine
        return True
