"""The rungs of a published ladder on this machine, prepared as rows of a bench."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import ConfigError, UserError
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.settings.cluster import FALLBACK, load_profile
from hpc_gpt.core.settings.experiment_file import ExperimentFile, cut_warmup, load_experiment, read_experiment
from hpc_gpt.core.settings.requirements import check_requirements
from hpc_gpt.core.settings.resolve import size_run
from hpc_gpt.core.settings.sweep_rows import SweepRow, choose_row
from hpc_gpt.core.tables import read_toml
from hpc_gpt.launcher.bench_rows import BenchCell, BenchRequest, prepare_cell
from hpc_gpt.launcher.this_machine import with_predicted_memory
from hpc_gpt.reader.records.own_run import DIALECT, figures_asked
from hpc_gpt.trainer.tokens.run_data import ensure_data


@dataclass(frozen=True)
class Group:
    """The rungs of one sweep. Savings and costs are relative to rung `base`; the result of the group is that of rung
    `last`."""

    sweep: str
    base: str
    last: str


@dataclass(frozen=True)
class Ladder:
    """A published ladder of ladders.toml; `number` is its name in `bench --json`. It has its rungs, then further rows
    that are measured after them. Its result is the `figure` of a record, which it calls `what` and has in the column
    `published`. A ladder that saves memory has a column for its `time`, too."""

    number: str
    what: str
    figure: str
    published: str
    groups: Sequence[Group]
    time: str | None = None


LADDERS: Mapping[str, Ladder] = {
    name: Ladder(**{**table, "groups": [Group(**group) for group in table["groups"]]})
    for name, table in read_toml(Path(__file__).with_name("ladders.toml")).items()
}


@dataclass(frozen=True)
class Rung:
    sweep: str
    row: SweepRow
    cell: BenchCell


@dataclass(frozen=True)
class PreparedLadder:
    """A ladder with its rungs, the name of the bench, and notes for the user."""

    name: str
    ladder: Ladder
    rungs: Sequence[Rung]
    notes: Sequence[str]


def prepare_ladder(request: BenchRequest, name: str, rows: str | None, gpus: int) -> PreparedLadder:
    """The ladder of that name with all its rungs, or with the rungs in `rows`, separated by commas."""
    ladder = LADDERS[name]
    names = [row.strip() for row in rows.split(",") if row.strip()] if rows is not None else []
    rungs = prepare_rungs(request, ladder, gpus, names)
    prepared = [rung.cell.prepared for rung in rungs if rung.cell.prepared]
    notes = list(dict.fromkeys(note for run in prepared for note in run.notes))
    notes += [f"not {rung.row.name}: {rung.cell.record.cause}" for rung in rungs if rung.cell.record is not None]
    minutes = sum(run.resolved.train.minutes or 0 for run in prepared)
    if minutes:
        notes.append(f"note: {len(prepared)} rungs train for {minutes:g} minutes in all; --steps N for less")
    if not gpus:
        note = "note: no GPU here, so no memory is measured: a process's host memory is a different figure"
        notes.append(note + ("" if request.smoke else "; --smoke runs the same rungs small"))
    return PreparedLadder(ladder.groups[0].sweep + ("-smoke" if request.smoke else ""), ladder, rungs, notes)


def prepare_rungs(request: BenchRequest, ladder: Ladder, gpus: int, rows: Sequence[str] = ()) -> list[Rung]:
    """One rung per row of the ladder, or per row in `rows`. `gpus`: this machine's number of GPUs.

    Raises ConfigError for an unknown row, and for wrong settings of the user.
    """
    files = [read_experiment(group.sweep) for group in ladder.groups]
    every = [row for file in files for row in file.rows or ()]
    for name in rows:
        choose_row(every, name, files[0].path)
    rungs = []
    for group, file in zip(ladder.groups, files, strict=True):
        chosen = [row for row in file.rows or () if not rows or row.name in rows]
        if chosen:
            load_experiment(file, request.overrides, chosen[0].name, request.gives_steps)
        rungs += [_rung(request, group.sweep, file, row, gpus) for row in chosen]
    return rungs


def _rung(request: BenchRequest, sweep: str, file: ExperimentFile, row: SweepRow, gpus: int) -> Rung:
    try:
        if row.impossible is not None:
            raise ConfigError(row.impossible)
        if not request.smoke:
            _check_gpus(load_experiment(file, request.overrides, row.name, request.gives_steps).layout.gpus, gpus)
        cell = prepare_cell(replace(request, experiment=sweep), file, row.name, {}, name=row.name)
        assert cell.prepared is not None
        resolved = cell.prepared.resolved
        _check_gpus(resolved.gpus, gpus)
        check_requirements(resolved, gpus > 0)
        ensure_data(resolved, beside=cell.prepared.data_beside)
    except UserError as fault:
        asked_for: dict[str, Any] = {}
        wanted = None
        with contextlib.suppress(UserError):  # its figures on a cluster with enough GPUs, if it can run there
            experiment = load_experiment(file, request.overrides, row.name, request.gives_steps)
            wanted = size_run(cut_warmup(experiment)[0], load_profile(FALLBACK))
            asked_for = figures_asked(wanted)
        asked_for["settings"] = {"sweep": {"name": sweep, "row": row.name}}
        reason = hide_secrets("; ".join(str(fault).splitlines()))
        record = Record(name=f"{sweep}-{row.name}", dialect=DIALECT, ended="refused", cause=reason, **asked_for)
        cell = BenchCell(row.name, record=with_predicted_memory(record, wanted) if wanted is not None else record)
    return Rung(sweep, row, cell)


def _check_gpus(wanted: int | None, gpus: int) -> None:
    """Raises ConfigError if there are GPUs, but too few; without any, the ranks run on the CPU."""
    if wanted and 0 < gpus < wanted:
        raise ConfigError(f"needs {wanted} GPUs, this machine has {gpus}")
