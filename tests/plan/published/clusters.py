"""The clusters of published rows: a name in `{"clusters": {name: rows}}`, else rows of one device, node and fabric."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.tables import close_matches
from hpc_gpt.launcher.plan import calibration
from hpc_gpt.launcher.plan.calibration import Calibrated
from hpc_gpt.launcher.plan.machine import Constants, constants_from
from tests.plan.published.rows import PublishedRow

DATA_SHEET = "data sheets"


@dataclass(frozen=True)
class Cluster(Calibrated):
    """Constants, and whose rows may take them."""

    device: str = ""
    gpus_per_node: int = 0
    fabrics: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()


def fastest(rows: Iterable[PublishedRow]) -> list[PublishedRow]:
    """The rows whose time counts: of a source's several times for one layout only the shortest, and no noisy one."""
    groups: dict[tuple[str, str], list[PublishedRow]] = {}
    every = list(rows)
    for row in every:
        groups.setdefault((row.source, row.fabric), []).append(row)
    kept = {id(row) for group in groups.values() for row in calibration.fastest(group)}
    return [row for row in every if id(row) in kept]


def calibrate(name: str, rows: Sequence[PublishedRow]) -> Cluster:
    """The constants of one cluster; the defaults if no row has a time."""
    fitted, machine = calibration.calibrate(name, fastest(rows)), rows[0].machine
    return Cluster(
        **vars(fitted),
        device=machine.device,
        gpus_per_node=machine.gpus_per_node,
        fabrics=frozenset(row.fabric for row in rows),
        sources=frozenset(row.source for row in rows),
    )


def calibrate_clusters(rows: Sequence[PublishedRow]) -> list[Cluster]:
    """Every cluster that has a time, in the file's order."""
    groups: dict[str, list[PublishedRow]] = {}
    for row in rows:
        groups.setdefault(row.cluster or cluster_name(row), []).append(row)
    return [calibrate(name, group) for name, group in groups.items() if fastest(group)]


def cluster_name(row: PublishedRow) -> str:
    """A name from a row's machine, for rows that name no cluster: `a100-80g-8-infiniband-4x200g`."""
    name = f"{row.machine.device}-{row.machine.gpus_per_node}-{row.fabric}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def named(clusters: Sequence[Cluster], name: str) -> Cluster:
    """The cluster of that name. ConfigError, with the known names, if there is none."""
    for cluster in clusters:
        if cluster.name == name:
            return cluster
    known = [cluster.name for cluster in clusters]
    raise ConfigError(
        f"no cluster {name!r:.60} in the calibration; it has {', '.join(known[:20]) or 'none'}",
        close_matches(name, known) or "--calibration takes one of these names",
    )


def stored_calibration(profile: ClusterProfile) -> Calibrated:
    """The profile's [calibration] as `store_calibration` wrote it. ConfigError if it has none."""
    stored = profile.calibration
    if stored is None or not stored.constants:
        raise ConfigError(
            f"profile {profile.name} has no [calibration]",
            f"hpc-gpt plan --calibrate RECORDS --cluster {profile.name} writes one",
        )
    return Calibrated(profile.name, constants_from(stored.constants), stored.residuals)


def chosen_for(row: PublishedRow, clusters: Sequence[Cluster]) -> Cluster | None:
    """The cluster whose constants predict a row: one of the same device and node size; None if there is none.

    Of several, those with rows of the same source, else of the same fabric, else all. If several are left, their
    geometric mean: the row's cluster is as likely to be above as below each.
    """
    machine = (row.machine.device, row.machine.gpus_per_node)
    alike = [cluster for cluster in clusters if (cluster.device, cluster.gpus_per_node) == machine]
    nearest = (
        [cluster for cluster in alike if row.source in cluster.sources]
        or [cluster for cluster in alike if row.fabric in cluster.fabrics]
        or alike
    )
    if len(nearest) < 2:
        return nearest[0] if nearest else None
    logarithms = [[math.log(value) for value in vars(cluster.constants).values()] for cluster in nearest]
    return Cluster(
        "the middle of " + ", ".join(cluster.name for cluster in nearest),
        device=machine[0],
        gpus_per_node=machine[1],
        fabrics=frozenset().union(*(cluster.fabrics for cluster in nearest)),
        sources=frozenset().union(*(cluster.sources for cluster in nearest)),
        constants=Constants(*(math.exp(sum(column) / len(nearest)) for column in zip(*logarithms, strict=True))),
    )
