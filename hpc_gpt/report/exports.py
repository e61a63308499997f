"""Exports of curves: TensorBoard's event files and W&B's offline runs. A run and its restarts are one run there.

Event files are in `DIR/<experiment>/<run>/`. Offline runs are `DIR/wandb/offline-run-*`, which the user uploads by
`wandb sync`; nothing here uses the network or reads a key. W&B always runs offline, whatever its settings and variables
say, and records neither console, code, git, host nor the machine's figures.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpc_gpt.core.errors import OsErrorAs, RunFolderError
from hpc_gpt.core.files import aside, try_folder
from hpc_gpt.core.runs.record import MIXTURE_FIGURES
from hpc_gpt.core.sinks import FLOPS, CurveRow, ShownRun, need_package, plain_text, shown_settings, source_tags
from hpc_gpt.core.sinks.tensorboard import EVENT_FILE, TensorBoard
from hpc_gpt.core.sinks.wandb import Wandb
from hpc_gpt.reader.runs.attempts import epoch
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.compare import flat_settings, tokens_per_step

_CURVES = ("loss", "step_s", "tokens_per_s", "lr", "grad_norm", *MIXTURE_FIGURES)
TAGS = (*_CURVES, "loss_eval", "bpb", "skipped", *FLOPS)
# Figures of the whole run, as report shows them.
_FIGURES = ("step_s", "tokens_per_s", *FLOPS, "mfu", "hfu", "loss_eval", "bpb", "skipped_steps", "nan_steps",
            "gpu_hours")  # fmt: skip
ANOTHER = "name another folder for the export"
EXPORT_MARK = "hpc-gpt.json"  # in our offline runs: an export replaces only what an earlier one wrote
PROJECT = "hpc-gpt"
_ROWS = 10_000  # that are written at once
_LAST_YEAR_S = 253402300800  # 10000-01-01: from then on a year is too long for the name


@dataclass(frozen=True)
class ExportedRun:
    """A run in the form that is exported, with all its restarts. `name` and the unique `id` are safe as file names.
    `rows` has every step once, as it was last trained, in ascending order."""

    run: RunRead
    name: str
    id: str
    began: float  # epoch seconds of the first step, else of the start
    rows: list[CurveRow]

    @property
    def shown(self) -> ShownRun:
        record = self.run.record
        title = plain_text(f"{record.name or 'run'}/{record.run or self.id}")[:120]
        return ShownRun(self.id, self.name, title, self.began, shown_settings(flat_settings(record)))


def check_export_target(folder: Path, package: str) -> None:
    """Raises UserError if the package cannot be imported, RunFolderError if the folder cannot be made or written. It
    runs before the reading, which may take an hour."""
    need_package(package)
    with OsErrorAs(RunFolderError, str(folder), ANOTHER):
        try_folder(folder.absolute())


def write_events(runs: Sequence[RunRead], folder: Path) -> list[Path]:
    """Writes the event file of every run, in place of an earlier export's, and returns their paths.

    The scalars are TAGS, and `source_tags` of a mixture; settings are on the HPARAMS page. Nothing else in `folder`
    changes. Raises UserError if tensorboard is not installed, RunFolderError if a file cannot be written.
    """
    need_package("tensorboard")
    written = []
    with OsErrorAs(RunFolderError, str(folder), ANOTHER):
        for run in export_runs(runs):
            place = folder_within(folder, run.name, run.id)
            with aside(place / "export") as part:
                sink = TensorBoard(run.shown, part)
                for start in range(0, len(run.rows), _ROWS):
                    sink.add(run.rows[start : start + _ROWS])
                sink.close()
                written.append(part.replace(place / EVENT_FILE.format(number=0)))
    return written


def write_offline_runs(runs: Sequence[RunRead], folder: Path) -> list[Path]:
    """Writes every run as an offline run of W&B, in place of an earlier export's, and returns their folders.

    Raises UserError if wandb is not installed, RunFolderError if a folder cannot be written.
    """
    with OsErrorAs(RunFolderError, str(folder), ANOTHER):
        within, exported = folder_within(folder, "wandb"), export_runs(runs)
        with tempfile.TemporaryDirectory(prefix=".hpc-gpt-", dir=within) as name:
            # The files are complete only after wandb's process has ended.
            with _offline(name):
                made = [_log_run(run, name) for run in exported]
            places = [within / f"offline-run-{started_name(run)}-{run.id}" for run in exported]
            for made_folder, place in zip(made, places, strict=True):
                for inner in ("logs", "tmp"):  # wandb's own logs and temporary files
                    shutil.rmtree(made_folder / inner, ignore_errors=True)
                mark = json.dumps({"written_by": "hpc-gpt report --wandb"}) + "\n"
                (made_folder / EXPORT_MARK).write_text(mark, encoding="utf-8")
                if os.path.lexists(place):
                    if place.is_symlink() or not (place / EXPORT_MARK).is_file():
                        raise RunFolderError(f"{place} exists and is not from an export", ANOTHER)
                    place.rename(Path(name) / f"former-{place.name}")
                made_folder.rename(place)
            return places


@contextlib.contextmanager
def _offline(caches: str) -> Iterator[None]:
    """Lets wandb write without a network and without the user's WANDB_ variables, and ends its process."""
    environment = dict(os.environ)
    for name in [name for name in environment if name.startswith("WANDB_")]:
        del os.environ[name]
    os.environ |= {f"WANDB_{name}_DIR": caches for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    os.environ |= {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    try:
        wandb = need_package("wandb")
        try:
            yield
        finally:
            wandb.teardown()
    finally:
        os.environ.clear()
        os.environ |= environment


def _log_run(run: ExportedRun, folder: str) -> Path:
    """Writes one run by wandb and returns the folder that wandb made."""
    record = run.run.record
    sink = Wandb(run.shown, Path(folder), PROJECT, mode="offline")
    sink.add(run.rows)
    figures = {key: value for key in _FIGURES if (value := getattr(record, key)) is not None}
    figures |= source_tags(record.to_tables())
    sink.summarize({key: value for key, value in figures.items() if np.isfinite(value)} | {"ended": record.ended})
    sink.close()
    return sink.folder


def started_name(run: ExportedRun) -> str:
    """The run's start in UTC in the form of wandb's folder names; the same in every export."""
    start = epoch(run.run.record.started) or run.began
    return time.strftime("%Y%m%d_%H%M%S", time.gmtime(start if 0 <= start < _LAST_YEAR_S else 0))


def export_runs(runs: Sequence[RunRead]) -> list[ExportedRun]:
    """The runs in their exported form, every run once, with unique ids."""
    once = list({id(run): run for run in runs}.values())
    ids, paths = [], []
    for run in once:
        # The path of a run stays the same as it logs more.
        path = next((str(path.resolve()) for path in (run.folder, *run.files) if path), str(run.record.name))
        run_id = safe_name(run.record.run or run.record.name or "run")
        if run.folder is None:
            run_id += f"-{_digits(path)}"
        elif run_id.isdecimal():  # a run that plain sbatch started has only a job id as its id
            run_id = f"{safe_name(run.record.name or 'run')}-{run_id}"
        paths.append(path)
        ids.append(run_id)
    # Copies of a run folder have the same id: their paths tell them apart, and if these are equal their order does.
    ids = [
        one_id if ids.count(one_id) == 1 else f"{one_id}-{_digits(path)}"
        for one_id, path in zip(ids, paths, strict=True)
    ]
    ids = [f"{one_id}-{n + 1}" if (n := ids[:place].count(one_id)) else one_id for place, one_id in enumerate(ids)]
    names = [safe_name(run.record.name or "run") for run in once]
    return [ExportedRun(run, name, run_id, *curve_of(run)) for run, name, run_id in zip(once, names, ids, strict=True)]


def safe_name(text: str) -> str:
    """The text as a safe file name; if that changes it, digits of the text's hash are appended.

    >>> safe_name("demo"), safe_name("../a b"), safe_name("")
    ('demo', 'a-b-2c2c791a', 'run-e3b0c442')
    """
    safe = re.sub(r"[^A-Za-z0-9._-]{1,1000}", "-", text[:1000]).strip(".-")[:80]
    return safe if safe == text and safe else f"{safe or 'run'}-{_digits(text)}"


def folder_within(folder: Path, *names: str) -> Path:
    """Makes `folder/<names>` and returns it; raises RunFolderError if a link leads out of `folder`."""
    inner = folder.joinpath(*names)
    inner.mkdir(parents=True, exist_ok=True)
    if not inner.resolve().is_relative_to(folder.resolve()):
        raise RunFolderError(f"{inner} leads to {inner.resolve()}", f"an export stays in {folder}")
    return inner


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


@np.errstate(over="ignore", invalid="ignore")
def curve_of(run: RunRead) -> tuple[float, list[CurveRow]]:
    """Returns (epoch seconds of the first step, else of the start; the rows of an ExportedRun)."""
    steps, record = run.steps, run.record
    step_s = np.where(steps["step_s"] > 0, steps["step_s"], np.nan)
    columns = {tag: steps[tag] for tag in (*_CURVES, "bpb")}
    rates = (tokens_per_step(record) or np.nan) / step_s
    columns["tokens_per_s"] = np.where(np.isfinite(columns["tokens_per_s"]), columns["tokens_per_s"], rates)
    columns["skipped"] = steps.is_skipped.astype(np.float64)
    for formula in FLOPS:  # a rate is inversely proportional to the seconds
        columns[formula] = (getattr(record, formula) or np.nan) * (record.step_s or np.nan) / step_s
    numbered = (steps["step"] >= 0) & (steps["step"] < 2**53) & (steps["step"] % 1 == 0)
    # If a log has a step twice, its last line counts.
    places = {int(steps["step"][place]): place for place in np.flatnonzero(numbered & steps.counts).tolist()}
    evaluated = zip(steps.eval_step.tolist(), steps.eval_loss.tolist(), strict=True)
    losses = {int(number): loss for number, loss in evaluated if 0 <= number < 2**53 and number % 1 == 0}
    numbers = sorted({*places, *losses})
    # Times are as logged, or interpolated; if no time is logged, the start plus the steps' seconds.
    at = np.array([steps["at"][places[number]] if number in places else np.nan for number in numbers])
    timed = np.isfinite(at)
    if timed.any():
        at = np.interp(np.arange(len(at)), np.flatnonzero(timed), at[timed])
    else:
        seconds = [step_s[places[number]] if number in places else 0.0 for number in numbers]
        at = (epoch(record.started) or 0.0) + np.cumsum(np.nan_to_num(seconds))
    rows = []
    for number, moment in zip(numbers, at.tolist(), strict=True):
        figures = {tag: float(column[places[number]]) for tag, column in columns.items() if number in places}
        figures["loss_eval"] = losses.get(number, np.nan)
        by = source_tags(steps.eval_by.get(number, {}))
        if row := {tag: figure for tag in (*TAGS, *by) if np.isfinite(figure := (figures | by).get(tag, np.nan))}:
            rows.append((number, moment, row))
    return float(at[0]) if len(at) else epoch(record.started) or 0.0, rows
