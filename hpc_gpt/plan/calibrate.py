"""Constants of a cluster from a few rows of it, and which cluster's constants a row is predicted with.

A cluster is a name of `{"clusters": {name: rows}}`; rows of a plain list are clusters by device, node and fabric.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from hpc_gpt.errors import ConfigError
from hpc_gpt.plan.constants import DEFAULT, Constants
from hpc_gpt.plan.fit import fit
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.rows import Row
from hpc_gpt.plan.training import Training
from hpc_gpt.tables import close_matches

DATA_SHEET = "data sheets"


@dataclass(frozen=True)
class Calibrated:
    """One cluster's constants. `residuals` are predicted over published step times less 1, by the rows' ids."""

    name: str
    device: str
    gpus_per_node: int
    fabrics: frozenset[str]
    network_gb_s: float
    sources: frozenset[str]
    constants: Constants
    residuals: Mapping[str, float] = field(default_factory=dict)

    @property
    def mean_error(self) -> float | None:
        """The mean of the residuals' sizes, as a share."""
        sizes = [abs(residual) for residual in self.residuals.values()]
        return sum(sizes) / len(sizes) if sizes else None

    def to_tables(self) -> dict[str, object]:
        """As JSON's own kinds, and as `[calibration]` of a profile has it but for the name."""
        return {
            "constants": asdict(self.constants),
            "rows": len(self.residuals),
            "mean_error": self.mean_error,
            "residuals": dict(self.residuals),
        }


def layout_key(row: Row) -> tuple[object, ...]:
    """What makes rows of one source the same layout, published twice."""
    training = row.training
    return row.source, row.machine.device, row.machine.gpus_per_node, row.fabric, training


def fastest(rows: Iterable[Row]) -> list[Row]:
    """The rows whose time counts: not noisy, and of several times for one layout the shortest."""
    best: dict[tuple[object, ...], Row] = {}
    for row in rows:
        seconds = row.published.step_s
        if seconds is None or row.published.noisy:
            continue
        key = layout_key(row)
        known = best.get(key)
        if known is None or seconds < (known.published.step_s or math.inf):
            best[key] = row
    return list(best.values())


def samples_of(rows: Iterable[Row]) -> list[tuple[Training, Machine, float]]:
    """What `fit` takes."""
    return [(row.training, row.machine, row.published.step_s) for row in fastest(rows) if row.published.step_s]


def calibrate(name: str, rows: Sequence[Row], start: Constants = DEFAULT) -> Calibrated:
    """The constants of one cluster. Without a single time they are those of `start`."""
    counted = fastest(rows)
    fitted = fit(samples_of(counted), start) if counted else None
    machine = rows[0].machine
    return Calibrated(
        name=name,
        device=machine.device,
        gpus_per_node=machine.gpus_per_node,
        fabrics=frozenset(row.fabric for row in rows),
        network_gb_s=machine.network_gb_s,
        sources=frozenset(row.source for row in rows),
        constants=fitted.constants if fitted else start,
        residuals=_shares(counted, fitted.residuals) if fitted else {},
    )


def calibrate_clusters(rows: Sequence[Row], start: Constants = DEFAULT) -> list[Calibrated]:
    """Every cluster of a file that has a time, in the file's order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.cluster or cluster_name(row), []).append(row)
    return [calibrate(name, group, start) for name, group in groups.items() if fastest(group)]


def cluster_name(row: Row) -> str:
    """The name of the machines like a row's, for rows that name no cluster: `a100-80g-8-infiniband-4x200g`."""
    said = f"{row.machine.device}-{row.machine.gpus_per_node}-{row.fabric}"
    return re.sub(r"[^a-z0-9]+", "-", said.lower()).strip("-")


def named(clusters: Sequence[Calibrated], name: str) -> Calibrated:
    """The cluster of that name; ConfigError with those there are."""
    for cluster in clusters:
        if cluster.name == name:
            return cluster
    known = [cluster.name for cluster in clusters]
    raise ConfigError(
        f"no cluster {name!r:.60} in the calibration; it has {', '.join(known[:20]) or 'none'}",
        close_matches(name, known) or "--calibration takes one of these names",
    )


def chosen_for(row: Row, clusters: Sequence[Calibrated]) -> Calibrated | None:
    """The cluster whose constants a row is predicted with: of the same device and node size; None where there is none.

    Of several: the one that has rows of its source, then of its fabric, then one of a single node for a row of a
    single node, then the one whose network is nearest in rate.
    """
    alike = [
        cluster
        for cluster in clusters
        if cluster.device == row.machine.device and cluster.gpus_per_node == row.machine.gpus_per_node
    ]
    single = row.training.gpus <= row.machine.gpus_per_node

    def distance(cluster: Calibrated) -> tuple[bool, bool, bool, float]:
        return (
            row.source not in cluster.sources,
            row.fabric not in cluster.fabrics,
            single != (cluster.network_gb_s <= 0),
            _ratio(cluster.network_gb_s, row.machine.network_gb_s),
        )

    return min(alike, key=distance, default=None)


def _shares(rows: Sequence[Row], logarithms: Sequence[float]) -> dict[str, float]:
    """Predicted over published less 1, by id; rows of one id are told apart by a number."""
    shares: dict[str, float] = {}
    for row, logarithm in zip(rows, logarithms, strict=True):
        name, count = row.id, 2
        while name in shares:
            name, count = f"{row.id} {count}", count + 1
        shares[name] = math.exp(min(logarithm, 50.0)) - 1
    return shares


def _ratio(one: float, other: float) -> float:
    if one <= 0 or other <= 0:
        return 0.0 if one == other else 100.0
    return abs(math.log(one / other))
