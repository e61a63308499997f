"""The groups in which runs are shown: the runs of a model, of a sweep, of an experiment.

A run can be in several groups. A group with the same runs as an earlier group is left out.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_gpt.core.format import show_params
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.layout import AXES
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.published_tables import only_sweep, sweep_of
from hpc_gpt.report.svg import number, safe

UNKNOWN_MODEL = "runs of an unknown model"
VARIED = 3  # a sweep has a column for at most so many keys
# Settings that name a run and change nothing in it.
_NAMES = ("sweep.", "name", "resumed_from", "data_from", "environment")


@dataclass(frozen=True)
class RunGroup:
    """Runs that are shown together, by their places in the report. `varied`: the keys that differ in a sweep's runs."""

    kind: str
    title: str
    places: tuple[int, ...]
    varied: tuple[str, ...] = ()


def model_of(record: Record) -> tuple[str, int] | None:
    """The model of a run as (size as text, sequence length); None if one of them is not known."""
    size, seq = number(record.params), number(record.seq)
    return None if size is None or seq is None else (show_params(size) if size < 1e18 else f"{size:.3g}", int(seq))


def groups_of(runs: Sequence[RunRead]) -> list[RunGroup]:
    """The groups by model, then by sweep, then by experiment, in each kind the one with most runs first, then the one
    with the newest run; last the group of all runs."""
    by_kind: dict[str, dict[Any, list[int]]] = {kind: defaultdict(list) for kind in ("model", "sweep", "experiment")}
    for place, run in enumerate(runs):
        by_kind["model"][model_of(run.record)].append(place)
        if (sweep := sweep_of(run.record)) is not None:
            by_kind["sweep"][sweep[0]].append(place)
        if run.record.name:
            by_kind["experiment"][run.record.name].append(place)
    groups = []
    for kind, of_kind in by_kind.items():
        newest = sorted(of_kind.items(), key=lambda item: max(_start(runs[place]) for place in item[1]), reverse=True)
        for key, places in sorted(newest, key=lambda item: -len(item[1])):
            title = f"{kind} {safe(key, 60)}"
            if kind == "model":
                title = f"{key[0]} parameters, sequence {key[1]:,}" if key else UNKNOWN_MODEL
            records = [runs[place].record for place in places]
            groups.append(RunGroup(kind, title, tuple(places), varied_keys(records) if only_sweep(records) else ()))
    groups.append(RunGroup("all", "all runs", tuple(range(len(runs)))))
    # A sweep that has all runs of its model is named as a sweep.
    swept = {group.places: group for group in groups if group.kind == "sweep"}
    first = dict.fromkeys(group.places for group in groups)
    named = [swept.get(places) or next(group for group in groups if group.places == places) for places in first]
    return [group for group in named if len(group.places) > 1 or group.kind == "model"]


def varied_keys(records: Sequence[Record]) -> tuple[str, ...]:
    """The dotted keys of settings in which the records differ, those with most values first; at most VARIED."""
    values: dict[str, set[str]] = defaultdict(set)
    flat = [switches_of(record) for record in records]
    for key in dict.fromkeys(key for settings in flat for key in settings):
        values[key] = {str(settings.get(key)) for settings in flat}
    different = [key for key, distinct in values.items() if len(distinct) > 1 and not key.startswith(_NAMES)]
    return tuple(sorted(different, key=lambda key: -len(values[key]))[:VARIED])


def switches_of(record: Record) -> dict[str, Any]:
    """The settings of a record by dotted key, with its layout, batch and sizes; lists are left out."""
    switches: dict[str, Any] = {}

    def add(table: dict[str, Any], before: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                add(value, f"{before}{key}.")
            elif isinstance(value, str | int | float | bool):
                switches[f"{before}{key}"] = value

    add(record.settings, "")
    layout = {f"layout.{key}": getattr(record, key) for key in (*AXES, "ep", "micro_batch", "global_batch")}
    sizes = {f"model.{key}": getattr(record, key) for key in ("hidden", "layers", "heads", "seq")}
    return switches | {key: value for key, value in (layout | sizes).items() if value is not None}


def _start(run: RunRead) -> str:
    return run.record.started or ""
