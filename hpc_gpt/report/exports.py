"""Curves for other tools: TensorBoard's event files and W&B's offline runs. All restarts of a run are one run.

Event files are in `DIR/<experiment>/<run>/`. Offline runs are `DIR/wandb/offline-run-*`, for the user to upload by
`wandb sync`; nothing here uses the network or reads a key. W&B always runs offline, whatever its settings and variables
say, and records neither console, code, git, host nor the machine's figures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hpc_gpt.errors import RunFolderError, UserError
from hpc_gpt.readers.runs import RunRead
from hpc_gpt.readers.runs.attempts import epoch
from hpc_gpt.readers.steps import StepColumn
from hpc_gpt.report.compare import flat_settings, tokens_per_step

FLOPS = ("tflops_seed", "tflops_hardware", "tflops_model")
TAGS = ("loss", "loss_eval", "step_s", "tokens_per_s", "lr", "grad_norm", "skipped", *FLOPS)
# Figures of the whole run, as report shows them.
FIGURES = ("step_s", "tokens_per_s", *FLOPS, "mfu", "hfu", "loss_eval", "skipped_steps", "nan_steps", "gpu_hours")
_LONGEST = 80
_TEXT_MOST = 1000
ANOTHER = "name another folder for the export"
_WRITTEN = {"tensorboard": "event files are", "wandb": "W&B runs are"}
# TensorBoard reads every file with `tfevents` in its name, in the order of names.
EVENT_FILE = "events.out.tfevents.0000000000.hpc-gpt"
# Marks our offline runs, so that an export replaces only what an earlier one wrote.
MARK = "hpc-gpt.json"
PROJECT = "hpc-gpt"
_LAST_YEAR_S = 253402300800  # 10000-01-01, whose year is too long for the name


@dataclass(frozen=True)
class Exported:
    """A run as it is exported, all its restarts together.

    `name` and `id` have only letters, digits, `.`, `_` and `-`, so they are safe as file names; `id` is unique. `step`
    ascends, each step once, as it was last trained. `at`: epoch seconds. `values`: for each of TAGS that the run has, a
    column as long as `step`, NaN for a step without a value.
    """

    run: RunRead
    name: str
    id: str
    step: StepColumn
    at: StepColumn
    values: dict[str, StepColumn]

    def rows(self) -> list[tuple[int, float, dict[str, float]]]:
        """(step, epoch seconds, the finite scalars) of every step that has any."""
        finite = {tag: np.isfinite(column) for tag, column in self.values.items()}
        rows = []
        for place, (step, at) in enumerate(zip(self.step.tolist(), self.at.tolist(), strict=True)):
            found = {tag: float(self.values[tag][place]) for tag in self.values if finite[tag][place]}
            if found:
                rows.append((int(step), at, found))
        return rows

    def settings(self) -> dict[str, bool | float | str]:
        """The run's settings under dotted keys, without secrets."""
        return {plain_text(key): _simple(value) for key, value in flat_settings(self.run.record).items()}

    def figures(self) -> dict[str, float]:
        """The figures of the whole run that are known."""
        found = {key: getattr(self.run.record, key) for key in FIGURES}
        return {key: float(value) for key, value in found.items() if value is not None and abs(value) < np.inf}


def check_target(folder: Path, package: str) -> None:
    """UserError if the package is not installed, RunFolderError if the folder cannot be made or written.

    Cheap, so that it can be done before what may be an hour of reading.
    """
    try:
        there = find_spec(package) is not None
    except (ImportError, ValueError):
        there = False
    if not there:
        raise not_installed(package)
    above = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not above.is_dir():
        raise RunFolderError(f"{above} is not a folder", ANOTHER)
    if not os.access(above, os.W_OK | os.X_OK):
        raise RunFolderError(f"{above} cannot be written to", ANOTHER)


def not_installed(package: str, why: str = "") -> UserError:
    """The error for a package that is missing or incomplete."""
    return UserError(
        f"{_WRITTEN[package]} written by the package {package}, which is not installed{f': {why}' if why else ''}",
        f"pip install 'hpc-gpt[{package}]'",
    )


def write_events(runs: Sequence[RunRead], folder: Path) -> list[Path]:
    """Writes each run's event file, replacing that of an earlier export, and returns their paths.

    The scalars are TAGS; settings are on the HPARAMS page. Nothing else in `folder` changes. UserError if tensorboard
    is not installed, RunFolderError if a file cannot be written.
    """
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as fault:
        raise not_installed("tensorboard", str(fault)) from None

    def event(at: float, step: int = 0, **content: Any) -> bytes:
        text = event_pb2.Event(wall_time=at, step=step, **content).SerializeToString()
        assert isinstance(text, bytes)
        return text

    def write(run: Exported, path: Path) -> None:
        start = float(run.at[0]) if len(run.at) else epoch(run.run.record.started) or 0.0
        with open(path, "wb") as file:
            writer = RecordWriter(file)
            writer.write(event(start, file_version="brain.Event:2"))
            writer.write(event(start, summary=hparams_pb(run.settings(), trial_id=run.id, start_time_secs=start)))
            for step, at, scalars in run.rows():
                values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
                writer.write(event(at, step, summary=summary_pb2.Summary(value=values)))

    written = []
    for run in export_runs(runs):
        path = folder_within(folder, run.name, run.id) / EVENT_FILE
        aside = path.with_name(f".{os.getpid()}.part")
        try:
            write(run, aside)
            os.replace(aside, path)
        except OSError as fault:
            aside.unlink(missing_ok=True)
            raise RunFolderError(f"{path}: {fault.strerror}", ANOTHER) from None
        written.append(path)
    return written


def write_offline_runs(runs: Sequence[RunRead], folder: Path) -> list[Path]:
    """Writes each run as an offline run, replacing that of an earlier export, and returns their folders.

    All restarts of a run have one id, and each step is there once. UserError if wandb is not installed, RunFolderError
    if a folder cannot be written.
    """
    place = folder_within(folder, "wandb")
    exported = export_runs(runs)
    try:
        with tempfile.TemporaryDirectory(prefix=".hpc-gpt-", dir=place) as name:
            aside = Path(name)
            with _offline(aside) as wandb:
                made = [_write(wandb, run, aside) for run in exported]
            # The files are complete only after wandb's process has ended.
            places = [place / f"offline-run-{started_name(run)}-{run.id}" for run in exported]
            return [_put(own, at, aside) for own, at in zip(made, places, strict=True)]
    except OSError as fault:
        raise RunFolderError(f"{place}: {fault.strerror or fault}", ANOTHER) from None


@contextlib.contextmanager
def _offline(aside: Path) -> Iterator[Any]:
    """The package wandb, without the user's WANDB_ variables and with its caches in `aside`."""
    kept = {key: value for key, value in os.environ.items() if key.startswith("WANDB_")}
    folders = {f"WANDB_{name}_DIR": str(aside / name.lower()) for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    for key in kept:
        del os.environ[key]
    os.environ |= {**folders, "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    try:
        try:
            import wandb
        except ImportError as fault:
            raise not_installed("wandb", str(fault)) from None
        try:
            yield wandb
        finally:
            wandb.teardown()
    finally:
        for key in [key for key in os.environ if key.startswith("WANDB_")]:
            del os.environ[key]
        os.environ |= kept


def _write(wandb: Any, run: Exported, aside: Path) -> Path:
    """Writes one run through wandb, and returns the folder that wandb made."""
    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        silent=True,
        host="",
        username="",
        program="hpc-gpt",
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_viewer=True,
        x_save_requirements=False,
    )
    record = run.run.record
    made = wandb.init(
        mode="offline",
        dir=str(aside),
        project=PROJECT,
        group=run.name,
        name=plain_text(f"{record.name or 'run'}/{record.run or run.id}")[:120],
        id=run.id,
        config=run.settings(),
        settings=settings,
    )
    folder = Path(made.settings.sync_dir)
    for step, at, scalars in run.rows():
        made.log({**scalars, "_timestamp": at}, step=step)
    made.summary.update({**run.figures(), "ended": record.ended})
    made.finish()
    return folder


def started_name(run: Exported) -> str:
    """The run's start in UTC as in the name of wandb's folder; the same for each export."""
    start = epoch(run.run.record.started) or (float(run.at[0]) if len(run.at) else 0.0)
    return time.strftime("%Y%m%d_%H%M%S", time.gmtime(start if 0 <= start < _LAST_YEAR_S else 0))


def _put(made: Path, place: Path, aside: Path) -> Path:
    """Moves what wandb wrote to its place, without wandb's logs. RunFolderError if the place is taken and not ours."""
    for inner in ("logs", "tmp"):
        shutil.rmtree(made / inner, ignore_errors=True)
    (made / MARK).write_text(json.dumps({"written_by": "hpc-gpt report --wandb"}) + "\n", encoding="utf-8")
    if os.path.lexists(place):
        if place.is_symlink() or not (place / MARK).is_file():
            raise RunFolderError(f"{place} exists and is not from an export", ANOTHER)
        place.rename(aside / f"former-{place.name}")
    made.rename(place)
    return place


def export_runs(runs: Sequence[RunRead]) -> list[Exported]:
    """Every run once, with unique ids."""
    once = list({id(run): run for run in runs}.values())
    ids = [_id(run) for run in once]
    # Copies of a run folder have the same id: their paths distinguish them, and if those are equal their order.
    shared = Counter(ids)
    ids = [own if shared[own] == 1 else f"{own}-{_digits(_place(run))}" for run, own in zip(once, ids, strict=True)]
    times: Counter[str] = Counter()
    made = []
    for run, own in zip(once, ids, strict=True):
        times[own] += 1
        unique = own if times[own] == 1 else f"{own}-{times[own]}"
        step, at, values = _scalars(run)
        made.append(Exported(run, safe_name(run.record.name or "run"), unique, step, at, values))
    return made


def safe_name(text: str) -> str:
    """The text as a safe file name; if that changes it, digits of the text's hash are appended.

    >>> safe_name("demo"), safe_name("../a b"), safe_name("")
    ('demo', 'a-b-2c2c791a', 'run-e3b0c442')
    """
    safe = re.sub(r"[^A-Za-z0-9._-]{1,1000}", "-", text[:1000]).strip(".-")[:_LONGEST]
    return safe if safe == text and safe else f"{safe or 'run'}-{_digits(text)}"


def folder_within(folder: Path, *names: str) -> Path:
    """Makes `folder/<names>` and returns it; RunFolderError if a link leads out of `folder`."""
    inner = folder.joinpath(*names)
    try:
        inner.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise RunFolderError(f"{inner}: {fault.strerror}", ANOTHER) from None
    if not inner.resolve().is_relative_to(folder.resolve()):
        raise RunFolderError(f"{inner} leads to {inner.resolve()}", f"an export stays in {folder}")
    return inner


def _id(run: RunRead) -> str:
    """An id that stays the same after a restart: that of our own run, or a log's name and a hash of its path."""
    record = run.record
    name = safe_name(record.run or record.name or "run")
    if run.folder is None:
        return f"{name}-{_digits(_place(run))}"
    # The id of a run started by plain sbatch is only a job id.
    return f"{safe_name(record.name or 'run')}-{name}" if name.isdecimal() else name


def _place(run: RunRead) -> str:
    """The path of a run, which stays the same when more is logged."""
    if run.folder is not None:
        return str(run.folder.resolve())
    return str(run.files[0].resolve()) if run.files else str(run.record.name)


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


@np.errstate(over="ignore")
def _scalars(run: RunRead) -> tuple[StepColumn, StepColumn, dict[str, StepColumn]]:
    curve, record = run.steps, run.record
    # If a log has a step twice, its last line counts: unique takes the first of the reversed lines.
    kept = np.flatnonzero(_whole(curve["step"]) & curve.counts)[::-1]
    trained, first = np.unique(curve["step"][kept], return_index=True)
    kept = kept[first]
    evaluated = _whole(curve.eval_step)
    step = np.union1d(trained, curve.eval_step[evaluated])
    place, place_eval = np.searchsorted(step, trained), np.searchsorted(step, curve.eval_step[evaluated])

    def column(values: StepColumn, where: Any = place) -> StepColumn:
        spread = np.full(len(step), np.nan)
        spread[where] = values
        return spread

    values = {tag: column(curve[tag][kept]) for tag in ("loss", "step_s", "lr", "grad_norm")}
    values["loss_eval"] = column(curve.eval_loss[evaluated], place_eval)
    values["skipped"] = column(curve.is_skipped[kept].astype(np.float64))
    step_s = np.where(values["step_s"] > 0, values["step_s"], np.nan)
    if tokens := tokens_per_step(record):
        values["tokens_per_s"] = tokens / step_s
    printed = column(curve["tokens_per_s"][kept])
    values["tokens_per_s"] = np.where(np.isfinite(printed), printed, values.get("tokens_per_s", printed))
    for formula in FLOPS:
        figure = getattr(record, formula)
        if figure is not None and record.step_s:
            # Every formula is inversely proportional to the seconds.
            values[formula] = figure * record.step_s / step_s
    at = column(curve["at"][kept])
    present = {tag: values[tag] for tag in TAGS if tag in values and np.isfinite(values[tag]).any()}
    return step, _times(at, step_s, epoch(record.started)), present


def _whole(step: StepColumn) -> Any:
    """Which figures are valid step numbers."""
    return (step >= 0) & (step < 2**53) & (step == np.floor(step))


def _times(at: StepColumn, step_s: StepColumn, started: float | None) -> StepColumn:
    """Epoch seconds of each step: logged or interpolated; if none is logged, the start plus the steps' seconds."""
    known = np.isfinite(at)
    if known.any():
        return np.interp(np.arange(len(at)), np.flatnonzero(known), at[known])
    return (started or 0.0) + np.cumsum(np.nan_to_num(step_s))


def _simple(value: Any) -> bool | float | str:
    """A setting as both tools accept it: a plain number, else text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and abs(value) < 2**53:
        return value
    return plain_text(str(value))[:_TEXT_MOST]


def plain_text(text: str) -> str:
    """The text without what UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")
