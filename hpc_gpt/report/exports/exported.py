"""A run as the tools that draw curves take it: one name over all its restarts, its scalars by step, its settings."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_gpt.errors import RunFolderError
from hpc_gpt.readers.runs.attempts import epoch
from hpc_gpt.readers.runs.run_read import RunRead
from hpc_gpt.readers.steps import Column
from hpc_gpt.report.comparison.compare import tokens_per_step
from hpc_gpt.report.comparison.settings import flat_settings
from hpc_gpt.report.exports.target import ANOTHER

FLOPS = ("tflops_seed", "tflops_hardware", "tflops_model")
TAGS = ("loss", "loss_eval", "step_s", "tokens_per_s", "lr", "grad_norm", "skipped", *FLOPS)
# Figures of the whole run, as report shows them.
FIGURES = ("step_s", "tokens_per_s", *FLOPS, "mfu", "hfu", "loss_eval", "skipped_steps", "nan_steps", "gpu_hours")
_LONGEST = 80
_TEXT_MOST = 1000


@dataclass(frozen=True)
class Exported:
    """`name` and `id` are made of letters, digits, `.`, `_` and `-`: safe as names of files. `id` is one of a kind.

    `step` ascends, each step once, as it was trained last. `at`: epoch seconds. `values`: a column as long as `step`
    for each of TAGS that the run has, NaN where a step has none.
    """

    run: RunRead
    name: str
    id: str
    step: Column
    at: Column
    values: dict[str, Column]

    def rows(self) -> list[tuple[int, float, dict[str, float]]]:
        """(step, epoch seconds, the finite scalars of the step) of every step that has any."""
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


def export_runs(runs: Sequence[RunRead]) -> list[Exported]:
    """Every run once; no two have one id."""
    once = list({id(run): run for run in runs}.values())
    ids = [_id(run) for run in once]
    # Copies of a run folder have one id, so then their places tell them apart; at last their order.
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
    """A name that is safe as a file's: what had to be changed for that has a few digits of the text at its end.

    >>> safe_name("demo"), safe_name("../a b"), safe_name("")
    ('demo', 'a-b-2c2c791a', 'run-e3b0c442')
    """
    safe = re.sub(r"[^A-Za-z0-9._-]{1,1000}", "-", text[:1000]).strip(".-")[:_LONGEST]
    return safe if safe == text and safe else f"{safe or 'run'}-{_digits(text)}"


def folder_within(folder: Path, *names: str) -> Path:
    """The folder of those names under `folder`, made; RunFolderError where a link leads it elsewhere."""
    inner = folder.joinpath(*names)
    try:
        inner.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise RunFolderError(f"{inner}: {fault.strerror}", ANOTHER) from None
    if not inner.resolve().is_relative_to(folder.resolve()):
        raise RunFolderError(f"{inner} leads to {inner.resolve()}", f"an export stays within {folder}")
    return inner


def _id(run: RunRead) -> str:
    """The same after a restart: our own runs' id, and for logs their name and the digits of the first one's path."""
    record = run.record
    name = safe_name(record.run or record.name or "run")
    if run.folder is None:
        return f"{name}-{_digits(_place(run))}"
    # Where plain sbatch named the run it is a job id, which says nothing by itself.
    return f"{safe_name(record.name or 'run')}-{name}" if name.isdecimal() else name


def _place(run: RunRead) -> str:
    """Where a run lies, as it does not change when more is logged."""
    if run.folder is not None:
        return str(run.folder.resolve())
    return str(run.files[0].resolve()) if run.files else str(run.record.name)


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


@np.errstate(over="ignore")
def _scalars(run: RunRead) -> tuple[Column, Column, dict[str, Column]]:
    curve, record = run.steps, run.record
    # Of a step that a log tells of twice the last line counts: unique takes the first of the reversed.
    kept = np.flatnonzero(_whole(curve["step"]) & curve.counts)[::-1]
    trained, first = np.unique(curve["step"][kept], return_index=True)
    kept = kept[first]
    evaluated = _whole(curve.eval_step)
    step = np.union1d(trained, curve.eval_step[evaluated])
    place, place_eval = np.searchsorted(step, trained), np.searchsorted(step, curve.eval_step[evaluated])

    def column(values: Column, where: Any = place) -> Column:
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
            # By every formula a figure is one over the seconds.
            values[formula] = figure * record.step_s / step_s
    at = column(curve["at"][kept])
    present = {tag: values[tag] for tag in TAGS if tag in values and np.isfinite(values[tag]).any()}
    return step, _times(at, step_s, epoch(record.started)), present


def _whole(step: Column) -> Any:
    """Which figures can be the number of a step."""
    return (step >= 0) & (step < 2**53) & (step == np.floor(step))


def _times(at: Column, step_s: Column, started: float | None) -> Column:
    """Epoch seconds of each step: as logged, between two logged ones in between, else counted on from the start."""
    known = np.isfinite(at)
    if known.any():
        return np.interp(np.arange(len(at)), np.flatnonzero(known), at[known])
    return (started or 0.0) + np.cumsum(np.nan_to_num(step_s))


def _simple(value: Any) -> bool | float | str:
    """A setting as both tools take it; what is no plain number becomes text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and abs(value) < 2**53:
        return value
    return plain_text(str(value))[:_TEXT_MOST]


def plain_text(text: str) -> str:
    """The text without what UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
