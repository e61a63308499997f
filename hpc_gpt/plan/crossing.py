"""The figures that will hold for rows nobody has seen: constants fitted without them."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_gpt.plan.calibrate import calibrate, fastest
from hpc_gpt.plan.constants import DEFAULT, Constants
from hpc_gpt.plan.rows import LeftOut, Row
from hpc_gpt.plan.validate import Chosen, Predicted, predict_row

FOLDS = 50


def without_source(rows: Sequence[Row]) -> list[Predicted]:
    """Every source's rows with constants fitted to the other sources': of the same device where there are such.

    Sources that tell no time are left out.
    """
    predicted: list[Predicted] = []
    for source in dict.fromkeys(row.source for row in fastest(rows)):
        own = [row for row in rows if row.source == source]
        others = [row for row in rows if row.source != source]
        for device in dict.fromkeys(row.machine.device for row in own):
            alike = [row for row in others if row.machine.device == device]
            fitted, name = _fitted(alike if fastest(alike) else others)
            predicted += _predict([row for row in own if row.machine.device == device], fitted, name)
    return predicted


def without_row(rows: Sequence[Row]) -> list[Predicted]:
    """Every row of each cluster with constants fitted to the cluster's other rows.

    A cluster of many rows is dealt into FOLDS parts, and each part predicted with constants of the others.
    """
    predicted: list[Predicted] = []
    for cluster in dict.fromkeys(row.cluster for row in rows if row.cluster is not None):
        own = fastest(row for row in rows if row.cluster == cluster)
        folds = min(len(own), FOLDS)
        for fold in range(folds):
            kept = [row for place, row in enumerate(own) if place % folds != fold]
            predicted += _predict(own[fold::folds], *_fitted(kept))
    return predicted


def _fitted(rows: Sequence[Row]) -> Chosen:
    if not fastest(rows):
        return DEFAULT, "data sheets"
    return calibrate("others", rows).constants, "others"


def _predict(rows: Sequence[Row], constants: Constants, name: str) -> list[Predicted]:
    entries = [predict_row(row, lambda _: (constants, name)) for row in rows]
    return [entry for entry in entries if not isinstance(entry, LeftOut)]
