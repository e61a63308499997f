"""A seed's ladder on this machine: each of its rungs a cell, or the record that says why it cannot run here."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_gpt.bench.cell import Cell
from hpc_gpt.bench.predicted import with_predicted_memory
from hpc_gpt.bench.preparation import Asked, prepare_cell
from hpc_gpt.errors import ConfigError, UserError
from hpc_gpt.readers.runs.own_run import DIALECT, figures_asked
from hpc_gpt.runs.record import Record
from hpc_gpt.secrets import hide_secrets
from hpc_gpt.settings.cluster import FALLBACK, load_profile
from hpc_gpt.settings.experiment import ExperimentFile, load_experiment, read_experiment
from hpc_gpt.settings.requirements import check_requirements
from hpc_gpt.settings.resolve import Resolved, resolve
from hpc_gpt.settings.schedule import cut_warmup
from hpc_gpt.settings.sweep import Row, choose_row
from hpc_gpt.tokens.run_data import ensure_data, located


@dataclass(frozen=True)
class Group:
    """Rungs of one sweep. What a rung saves and costs is told against `base`, what the group comes to by `last`."""

    sweep: str
    base: str
    last: str


@dataclass(frozen=True)
class Ladder:
    """One seed's ladder: its rungs, in the seed's own columns; `techniques` are further rows, measured behind them.

    `seed`: its number, as people call it.
    """

    seed: str
    rungs: Group
    techniques: Group | None = None

    @property
    def groups(self) -> list[Group]:
        return [self.rungs, *([self.techniques] if self.techniques else [])]


# Seed 004 judges its rungs by the plain run of the same batch, 128 (0.52 of its memory at 1.5 times its time); the last
# one, on two GPUs, is none of a single one's.
LADDERS: Mapping[str, Ladder] = {
    "colab": Ladder("002", Group("colab-ladder", "baseline", "workers")),
    "memory": Ladder(
        "004",
        Group("memory-ladder", "batch128", "for-loop"),
        Group("memory-techniques", "base", "all-of-these"),
    ),
    "mingpt": Ladder("000", Group("mingpt-fsdp", "b1", "ckpt-prefetch-b64")),
}


@dataclass(frozen=True)
class Rung:
    """One row of a group and its cell."""

    sweep: str
    row: Row
    cell: Cell


def prepare_ladder(asked: Asked, ladder: Ladder, gpus: int, rows: Sequence[str] = ()) -> list[Rung]:
    """A rung for each row of the ladder, or of those that `rows` names. `gpus`: how many this machine has.

    Raises ConfigError for a name that is no row's, and where the user's own settings are wrong.
    """
    files = [read_experiment(group.sweep) for group in ladder.groups]
    _check_names(files, rows)
    rungs = []
    for group, file in zip(ladder.groups, files, strict=True):
        chosen = [row for row in file.rows or () if not rows or row.name in rows]
        if chosen:
            load_experiment(file, asked.overrides, chosen[0].name, asked.gives_steps)
        rungs += [_rung(asked, group.sweep, file, row, gpus) for row in chosen]
    return rungs


def _check_names(files: Sequence[ExperimentFile], names: Sequence[str]) -> None:
    every = [row for file in files for row in file.rows or ()]
    for name in names:
        choose_row(every, name, files[0].path)


def _rung(asked: Asked, sweep: str, file: ExperimentFile, row: Row, gpus: int) -> Rung:
    try:
        if row.impossible is not None:
            raise ConfigError(row.impossible)
        if not asked.smoke:
            _check_gpus(load_experiment(file, asked.overrides, row.name, asked.gives_steps).layout.gpus, gpus)
        cell = prepare_cell(replace(asked, experiment=sweep), file, row.name, {}, name=row.name)
        assert cell.prepared is not None
        resolved = cell.prepared.resolved
        _check_gpus(resolved.gpus, gpus)
        check_requirements(resolved, gpus > 0)
        ensure_data(located(resolved, cell.prepared.data_beside))
    except UserError as fault:
        reason = hide_secrets("; ".join(str(fault).splitlines()))
        wanted = _as_wanted(asked, file, row)
        record = _refused(f"{sweep}-{row.name}", reason, wanted)
        record = replace(record, settings={"sweep": {"name": sweep, "row": row.name}})
        return Rung(sweep, row, Cell(row.name, record=record))
    return Rung(sweep, row, cell)


def _check_gpus(wanted: int | None, gpus: int) -> None:
    """ConfigError where there are GPUs, but too few; without any, ranks run on the CPU."""
    if wanted and 0 < gpus < wanted:
        raise ConfigError(f"needs {wanted} GPUs, this machine has {gpus}")


def _as_wanted(asked: Asked, file: ExperimentFile, row: Row) -> Resolved | None:
    """What the row asks for, on a cluster that has it; None where that cannot be either."""
    with contextlib.suppress(UserError):
        experiment = load_experiment(file, asked.overrides, row.name, asked.gives_steps)
        return resolve(cut_warmup(experiment)[0], load_profile(FALLBACK))
    return None


def _refused(name: str, reason: str, resolved: Resolved | None) -> Record:
    """The record of a run that cannot be on this machine."""
    asked = figures_asked(resolved) if resolved is not None else {}
    record = Record(name=name, dialect=DIALECT, ended="refused", cause=reason, **asked)
    return with_predicted_memory(record, resolved) if resolved is not None else record
