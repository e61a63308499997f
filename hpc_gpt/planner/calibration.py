"""Fits the constants of a cluster to a few measured steps, and stores them.

The constants are kept in `[calibration]` of a user's cluster profile; the rest of that file stays as it is.
"""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.errors import ConfigError, OsErrorAs
from hpc_gpt.core.files import clusters_dir, config_dir, replace_whole
from hpc_gpt.core.tables import toml_lines
from hpc_gpt.planner.machine import DEFAULT, Constants, Machine
from hpc_gpt.planner.measured_steps import MeasuredStep
from hpc_gpt.planner.step_time import predict_step

_FITTED = tuple(entry for entry in fields(Constants) if "spread" in entry.metadata)
NAMES = tuple(entry.name for entry in _FITTED)
# The error of a good prediction of one row, as a logarithm; it weighs the rows against the constants' spread.
_NOISE = 0.05
_TAIL = 2.0  # a residual of so many times the noise has half the weight of a small one
_ROUNDS = 12
_DIFFERENCE = 1e-3
_TABLE = "calibration"
_HEADER = re.compile(r"^[ \t]*\[\[?[ \t]*([^\[\]#]{1,400}?)[ \t]*\]\]?[ \t]*(?:#.*)?$")
_NOTE = (
    "# Written by hpc-gpt plan --calibrate, whole each time: residuals are predicted over measured step time less 1."
)
Row = TypeVar("Row", bound=MeasuredStep)
_Sample = tuple[Training, Machine, float]


@dataclass(frozen=True)
class Fitted:
    """Fitted constants. `residuals`: log(predicted / measured) of each sample with `constants`, in their order."""

    constants: Constants
    residuals: tuple[float, ...]


def fit(samples: Sequence[_Sample]) -> Fitted:
    """The constants that predict the samples (training, machine, measured seconds) best; the defaults without samples.

    Damped Gauss-Newton on log(predicted / measured). Cauchy's weights limit the influence of a row whose time noise has
    doubled. Its spread holds each constant near its default, as a row carries no information on parts that its time
    does not have. Deterministic. ValueError if a measured time is not above 0.
    Source: Holland and Welsch 1977, "Robust regression using iteratively reweighted least-squares"; Levenberg 1944.
    """
    for _, _, measured in samples:
        if not (measured > 0 and math.isfinite(measured)):
            raise ValueError(f"a measured step of {measured} s: must be above 0")
    if not samples:
        return Fitted(DEFAULT, ())
    spread = np.array([entry.metadata["spread"] for entry in _FITTED])
    prior = np.log([getattr(DEFAULT, name) for name in NAMES])
    ceilings = np.log([entry.metadata.get("most", 1e3) for entry in _FITTED])
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
    steps = ((predict_step(training, machine, constants, False), measured) for training, machine, measured in samples)
    return np.array([math.log(step.step_s / measured) for step, measured in steps])


def _cost(residuals: np.ndarray, at: np.ndarray, prior: np.ndarray, spread: np.ndarray) -> float:
    off = np.abs(residuals) / _NOISE
    carried = _TAIL**2 / 2 * np.log1p((off / _TAIL) ** 2)
    return float(carried.sum() + (((at - prior) / spread) ** 2).sum() / 2)


@dataclass(frozen=True)
class Calibrated:
    """One cluster's constants. `residuals`: predicted over measured step time, less 1, by a record's id."""

    name: str
    constants: Constants
    residuals: Mapping[str, float] = field(default_factory=dict)

    @property
    def mean_error(self) -> float | None:
        """The mean absolute residual, as a share; None without residuals."""
        sizes = [abs(residual) for residual in self.residuals.values()]
        return sum(sizes) / len(sizes) if sizes else None

    def to_tables(self) -> dict[str, object]:
        """The tables for JSON and for `[calibration]` of a profile."""
        return {
            "constants": asdict(self.constants),
            "rows": len(self.residuals),
            "mean_error": self.mean_error,
            "residuals": dict(self.residuals),
        }


def fastest(rows: Iterable[Row]) -> list[Row]:
    """The steps that count: for one training on one machine only the shortest of several."""
    best: dict[tuple[str, int, Training], Row] = {}
    for row in rows:
        key = (row.machine.device, row.machine.gpus_per_node, row.training)
        shortest = best.get(key)
        if row.step_s is not None and (shortest is None or row.step_s < (shortest.step_s or math.inf)):
            best[key] = row
    return list(best.values())


def calibrate(name: str, rows: Sequence[MeasuredStep]) -> Calibrated:
    """The constants of one cluster; the defaults if no row has a time."""
    counted = fastest(rows)
    fitted = fit([(row.training, row.machine, row.step_s) for row in counted if row.step_s])
    return Calibrated(name, fitted.constants, _shares(counted, fitted.residuals))


def _shares(rows: Sequence[MeasuredStep], logarithms: Sequence[float]) -> dict[str, float]:
    """{id: predicted over measured, less 1}; rows that share an id get a number."""
    shares: dict[str, float] = {}
    for row, logarithm in zip(rows, logarithms, strict=True):
        name, count = row.id, 2
        while name in shares:
            name, count = f"{row.id} {count}", count + 1
        shares[name] = math.exp(min(logarithm, 50.0)) - 1
    return shares


def calibration_path(cluster: str) -> Path:
    """The user's file of a profile, which may not exist yet; if `cluster` is the path of a file, that file.

    Shipped profiles are never written: a user's file of the same name extends them.
    """
    if cluster.endswith(".toml") and Path(cluster).is_file():
        file = Path(cluster).resolve()
        if file.parent != clusters_dir().resolve():
            return file
        cluster = file.stem
    return config_dir() / "clusters" / f"{cluster}.toml"


def store_calibration(cluster: str, calibrated: Calibrated) -> Path:
    """Writes the constants and residuals into the user's file of the profile, whole or not at all. Returns the file.

    ConfigError if the file cannot be read or written, or if its [calibration] cannot be separated from the rest.
    """
    path = calibration_path(cluster)
    path = path.resolve() if path.is_symlink() else path
    try:
        before = path.read_text(encoding="utf-8-sig") if path.exists() else f'extends = "{path.stem}"\n'
        tables = tomllib.loads(before)
    except (OSError, ValueError) as fault:
        raise ConfigError(f"{path}: {' '.join(str(fault).split())[:300]}", "correct the file first") from None
    wanted = _finite(calibrated.to_tables())
    text = without_table(before, _TABLE).rstrip("\n") + "\n\n" + _block(wanted)
    others = {key: value for key, value in tables.items() if key != _TABLE}
    try:
        sound = tomllib.loads(text) == {**others, _TABLE: wanted}
    except tomllib.TOMLDecodeError:
        sound = False
    if not sound:
        raise ConfigError(
            f"{path}: its [{_TABLE}] cannot be replaced without touching the rest", f"remove [{_TABLE}] by hand"
        )
    with OsErrorAs(ConfigError, str(path.parent), "set HPC_GPT_CONFIG to a folder that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_whole(path, text)
    return path


def without_table(text: str, name: str) -> str:
    """TOML text without the table `name` and its sub-tables; everything else stays, also comments."""
    remaining: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        header = _HEADER.match(line.rstrip("\r\n"))
        if header:
            inside = header.group(1).split(".")[0].strip(" \t\"'") == name
        if not inside and line.rstrip() != _NOTE:
            remaining.append(line)
    return "".join(remaining)


def _block(tables: Mapping[str, Any]) -> str:
    """The TOML of [calibration], with its sub-tables last."""
    lines = [_NOTE, f"[{_TABLE}]"]
    lines += toml_lines({key: value for key, value in tables.items() if not isinstance(value, Mapping)})
    for key, value in tables.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_TABLE}.{key}]", *toml_lines(value)]
    return "\n".join(lines) + "\n"


def _finite(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables without None and infinite or NaN numbers, which TOML cannot hold; rounded to six digits."""
    finite: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            finite[key] = _finite(value)
        elif isinstance(value, float) and math.isfinite(value):
            finite[key] = float(f"{value:.6g}")
        elif value is not None and not isinstance(value, float):
            finite[key] = value
    return finite
