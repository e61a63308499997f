"""Constants of a cluster from a few of its published or recorded steps, and which cluster's constants a row takes.

A cluster is a name of `{"clusters": {name: rows}}`; rows of a plain list are clusters by device, node and fabric. The
constants are kept in `[calibration]` of a user's cluster profile; nothing else of that file is touched.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpc_gpt.errors import ConfigError
from hpc_gpt.paths import clusters_dir, config_dir
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.rates import DEFAULT, SPREAD, Constants, constants_from
from hpc_gpt.plan.rows import Row
from hpc_gpt.plan.step_time import predict_step
from hpc_gpt.plan.training import Training
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.small_files import replace_whole
from hpc_gpt.tables import close_matches

DATA_SHEET = "data sheets"
# Steps hardly say what is hidden from how fast it goes: the part that is not hidden is not fitted.
NAMES = tuple(field.name for field in fields(Constants) if field.name != "exposed")
# What a good prediction of one row misses by, as a logarithm: the rows' weight against the constants' spread.
_NOISE = 0.05
_TAIL = 2.0  # a residual of so many times the noise weighs half, of more ever less
_SHARES = {"gemm": 0.98, "memory": 1.0, "attention": 1.5, "node": 1.2, "network": 1.2, "reduction": 1.2}
_ROUNDS = 12
_DIFFERENCE = 1e-3
_TABLE = "calibration"
_HEADER = re.compile(r"^[ \t]*\[\[?[ \t]*([^\[\]#]{1,400}?)[ \t]*\]\]?[ \t]*(?:#.*)?$")
_NOTE = (
    "# Written by hpc-gpt plan --calibrate, whole each time: residuals are predicted over measured step time less 1."
)
_Sample = tuple[Training, Machine, float]


@dataclass(frozen=True)
class Fitted:
    """`residuals` are log(predicted / measured), one a sample, in the order given, under `constants`."""

    constants: Constants
    residuals: tuple[float, ...]


def fit(samples: Sequence[_Sample]) -> Fitted:
    """Constants under which the samples' steps (training, machine, measured seconds) are predicted best.

    Damped Gauss-Newton on log(predicted / measured), with Cauchy's weights so that a row that noise doubled does not
    carry the rest, and every constant held to its default by `SPREAD`: a row says something only of what its time
    is made of. Deterministic. ValueError if a measured time is not above 0. Without samples the defaults come back.
    Source: Holland and Welsch 1977, "Robust regression using iteratively reweighted least-squares"; Levenberg 1944.
    """
    for _, _, measured in samples:
        if not (measured > 0 and math.isfinite(measured)):
            raise ValueError(f"a measured step of {measured} s: must be above 0")
    if not samples:
        return Fitted(DEFAULT, ())
    spread = np.array([getattr(SPREAD, name) for name in NAMES])
    prior = np.log([getattr(DEFAULT, name) for name in NAMES])
    ceilings = np.log([_SHARES.get(name, 1e3) for name in NAMES])
    at = prior.copy()
    residuals = _residuals(samples, at)
    cost = _cost(residuals, at, prior, spread)
    damping = 1e-3
    for _ in range(_ROUNDS):
        slopes = np.empty((len(samples), len(NAMES)))
        for column in range(len(NAMES)):
            moved = at.copy()
            moved[column] += _DIFFERENCE
            slopes[:, column] = (_residuals(samples, moved) - residuals) / _DIFFERENCE
        off = np.abs(residuals) / _NOISE
        weights = 1 / (1 + (off / _TAIL) ** 2) / _NOISE**2
        normal = slopes.T @ (slopes * weights[:, None]) + np.diag(1 / spread**2)
        downhill = slopes.T @ (weights * residuals) + (at - prior) / spread**2
        while damping < 1e6:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            tried = np.asarray(np.minimum(at - step, ceilings))
            tried_residuals = _residuals(samples, tried)
            tried_cost = _cost(tried_residuals, tried, prior, spread)
            if tried_cost < cost:
                break
            damping *= 10
        else:
            break
        gained = cost - tried_cost
        at, residuals, cost, damping = tried, tried_residuals, tried_cost, max(damping / 10, 1e-6)
        if gained < 1e-6 * cost:
            break
    return Fitted(_constants(at), tuple(float(residual) for residual in residuals))


def _constants(at: np.ndarray) -> Constants:
    return replace(DEFAULT, **{name: float(math.exp(value)) for name, value in zip(NAMES, at, strict=True)})


def _residuals(samples: Sequence[_Sample], at: np.ndarray) -> np.ndarray:
    constants = _constants(at)
    steps = ((predict_step(training, machine, constants), measured) for training, machine, measured in samples)
    return np.array([math.log(step.step_s / measured) for step, measured in steps])


def _cost(residuals: np.ndarray, at: np.ndarray, prior: np.ndarray, spread: np.ndarray) -> float:
    off = np.abs(residuals) / _NOISE
    carried = _TAIL**2 / 2 * np.log1p((off / _TAIL) ** 2)
    return float(carried.sum() + (((at - prior) / spread) ** 2).sum() / 2)


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


def fastest(rows: Iterable[Row]) -> list[Row]:
    """The rows whose time counts: not noisy, and of several times that one source gives one layout the shortest."""
    best: dict[tuple[object, ...], Row] = {}
    for row in rows:
        seconds = row.published.step_s
        if seconds is None or row.published.noisy:
            continue
        key = (row.source, row.machine.device, row.machine.gpus_per_node, row.fabric, row.training)
        known = best.get(key)
        if known is None or seconds < (known.published.step_s or math.inf):
            best[key] = row
    return list(best.values())


def samples_of(rows: Iterable[Row]) -> list[_Sample]:
    """What `fit` takes."""
    return [(row.training, row.machine, row.published.step_s) for row in fastest(rows) if row.published.step_s]


def calibrate(name: str, rows: Sequence[Row]) -> Calibrated:
    """The constants of one cluster. Without a single time they are the defaults."""
    counted = fastest(rows)
    fitted = fit(samples_of(counted))
    machine = rows[0].machine
    return Calibrated(
        name=name,
        device=machine.device,
        gpus_per_node=machine.gpus_per_node,
        fabrics=frozenset(row.fabric for row in rows),
        sources=frozenset(row.source for row in rows),
        constants=fitted.constants,
        residuals=_shares(counted, fitted.residuals),
    )


def calibrate_clusters(rows: Sequence[Row]) -> list[Calibrated]:
    """Every cluster of a file that has a time, in the file's order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.cluster or cluster_name(row), []).append(row)
    return [calibrate(name, group) for name, group in groups.items() if fastest(group)]


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
    """Whose constants a row is predicted with: the cluster of the same device and node size; None if there is none.

    Of several, the one that has rows of its source, else of its fabric. If that leaves several, or neither holds, the
    middle of them: a cluster that is like none of them is as likely to be above as below each.
    """
    machine = (row.machine.device, row.machine.gpus_per_node)
    alike = [cluster for cluster in clusters if (cluster.device, cluster.gpus_per_node) == machine]
    nearest = (
        [cluster for cluster in alike if row.source in cluster.sources]
        or [cluster for cluster in alike if row.fabric in cluster.fabrics]
        or alike
    )
    return _middle(nearest) if nearest else None


def _middle(clusters: Sequence[Calibrated]) -> Calibrated:
    """One cluster as it is; of several the geometric means of their constants."""
    first = clusters[0]
    if len(clusters) == 1:
        return first
    means = {
        entry.name: math.exp(sum(math.log(getattr(each.constants, entry.name)) for each in clusters) / len(clusters))
        for entry in fields(Constants)
    }
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


def calibration_path(cluster: str) -> Path:
    """The user's file of a profile, which need not be there yet; the file itself if `cluster` is the path of one.

    Shipped profiles are never written: the user's copy of the name extends them.
    """
    if cluster.endswith(".toml") and Path(cluster).is_file():
        given = Path(cluster).resolve()
        if given.parent != clusters_dir().resolve():
            return given
        cluster = given.stem
    return config_dir() / "clusters" / f"{cluster}.toml"


def store_calibration(cluster: str, calibrated: Calibrated) -> Path:
    """Write the constants and residuals into the user's copy of the profile, whole or not at all. Returns the file.

    ConfigError if the file's own [calibration] cannot be told from the rest of its text.
    """
    path = calibration_path(cluster)
    path = path.resolve() if path.is_symlink() else path
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else f'extends = "{path.stem}"\n'
        tables = tomllib.loads(before)
    except (OSError, ValueError) as fault:
        raise ConfigError(f"{path}: {' '.join(str(fault).split())[:300]}", "mend the file first") from None
    wanted = _finite(calibrated.to_tables())
    text = without_table(before, _TABLE).rstrip("\n") + "\n\n" + _block(wanted)
    rest = {key: value for key, value in tables.items() if key != _TABLE}
    try:
        sound = tomllib.loads(text) == {**rest, _TABLE: wanted}
    except tomllib.TOMLDecodeError:
        sound = False
    if not sound:
        raise ConfigError(
            f"{path}: its [{_TABLE}] cannot be replaced without touching the rest", f"take [{_TABLE}] out of it by hand"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise ConfigError(
            f"{path.parent}: {fault.strerror}", "set HPC_GPT_CONFIG to a folder that can be written"
        ) from None
    replace_whole(path, text)
    return path


def stored_calibration(profile: ClusterProfile) -> Calibrated:
    """The profile's [calibration] as `store_calibration` wrote it. ConfigError if it has none."""
    stored = profile.calibration
    if stored is None or not stored.constants:
        raise ConfigError(
            f"profile {profile.name} has no [calibration]",
            f"hpc-gpt plan --calibrate RECORDS --cluster {profile.name} writes one",
        )
    return Calibrated(
        name=profile.name,
        device=profile.device or "",
        gpus_per_node=profile.gpus_per_node,
        fabrics=frozenset({profile.fabric or ""}),
        sources=frozenset(),
        constants=constants_from(stored.constants),
        residuals=stored.residuals,
    )


def without_table(text: str, name: str) -> str:
    """TOML text without the table `name` and those within it; comments and all else stay as they are."""
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        header = _HEADER.match(line.rstrip("\r\n"))
        if header:
            inside = header.group(1).split(".")[0].strip(" \t\"'") == name
        if not inside and line.rstrip() != _NOTE:
            kept.append(line)
    return "".join(kept)


def _block(tables: Mapping[str, Any]) -> str:
    """The table's TOML, tables within it last."""
    lines = [_NOTE, f"[{_TABLE}]"]
    lines += [f"{key} = {_value(value)}" for key, value in tables.items() if not isinstance(value, Mapping)]
    for key, value in tables.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_TABLE}.{key}]", *(f"{_key(name)} = {_value(part)}" for name, part in value.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _value(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _finite(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Without what TOML cannot hold: None and numbers that are not finite. Rounded to six digits."""
    kept: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            kept[key] = _finite(value)
        elif isinstance(value, float):
            if math.isfinite(value):
                kept[key] = float(f"{value:.6g}")
        elif value is not None:
            kept[key] = value
    return kept
