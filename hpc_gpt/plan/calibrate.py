"""Constants of a cluster from a few rows of it, and which cluster's constants a row is predicted with.

A cluster is a name of `{"clusters": {name: rows}}`; rows of a plain list are clusters by device, node and fabric.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

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
    """Whose constants a row is predicted with: the cluster of the same device and node size; None where there is none.

    Of several, the one that has rows of its source, else of its fabric. Where that leaves several, or none of these
    holds, the middle of them: a cluster that is like none of them is as likely to be above as below each.
    """
    alike = [
        cluster
        for cluster in clusters
        if cluster.device == row.machine.device and cluster.gpus_per_node == row.machine.gpus_per_node
    ]
    nearest = (
        [cluster for cluster in alike if row.source in cluster.sources]
        or [cluster for cluster in alike if row.fabric in cluster.fabrics]
        or alike
    )
    return middle(nearest) if nearest else None


def middle(clusters: Sequence[Calibrated]) -> Calibrated:
    """One cluster as it is; of several the geometric means of their constants."""
    if len(clusters) == 1:
        return clusters[0]
    names = [entry.name for entry in fields(Constants)]
    means = {
        name: math.exp(sum(math.log(getattr(cluster.constants, name)) for cluster in clusters) / len(clusters))
        for name in names
    }
    first = clusters[0]
    return Calibrated(
        name="the middle of " + ", ".join(cluster.name for cluster in clusters),
        device=first.device,
        gpus_per_node=first.gpus_per_node,
        fabrics=frozenset().union(*(cluster.fabrics for cluster in clusters)),
        sources=frozenset().union(*(cluster.sources for cluster in clusters)),
        constants=Constants(**means),
    )


def _shares(rows: Sequence[Row], logarithms: Sequence[float]) -> dict[str, float]:
    """Predicted over published less 1, by id; rows of one id are told apart by a number."""
    shares: dict[str, float] = {}
    for row, logarithm in zip(rows, logarithms, strict=True):
        name, count = row.id, 2
        while name in shares:
            name, count = f"{row.id} {count}", count + 1
        shares[name] = math.exp(min(logarithm, 50.0)) - 1
    return shares
