"""The planner's figures on the published rows of ../shared, held close to what is reached. Goals are the issue's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_gpt.plan.calibrate import calibrate_clusters
from hpc_gpt.plan.crossing import without_row, without_source
from hpc_gpt.plan.rows import LeftOut, Rows, read_rows
from hpc_gpt.plan.scores import Scores, score
from hpc_gpt.plan.validate import choosing, predict_rows, predicted_only

pytestmark = pytest.mark.shared


@pytest.fixture
def files(shared: Path) -> tuple[Rows, Rows]:
    return tuple(read_rows(shared / "planner" / f"{name}.json") for name in ("open", "calibration"))


def by_data_sheets(files) -> Scores:
    return score([entry for rows in files for entry in predicted_only(predict_rows(rows, choosing(())))])


def test_every_row_is_predicted_or_left_out_with_a_reason(files):
    reasons = {entry.id: entry.reason for rows in files for entry in rows.entries if isinstance(entry, LeftOut)}
    assert sum(len(rows.entries) for rows in files) == 233
    assert len(reasons) == 29
    # What is not stated: a micro-batch, a sequence length, a shape. What is not modelled: FP8, context parallelism.
    said = (" missing", "FP8", "context parallelism")
    assert all(any(words in reason for words in said) for reason in reasons.values())
    for rows in files:
        assert len(predicted_only(predict_rows(rows, choosing(())))) == len(rows.rows)


def test_memory(files):
    """Goals: 6 %, 90 % of rows within 10 %, and no wrong word on what fits."""
    scores = by_data_sheets(files)
    assert scores.memory.rows == 20
    assert scores.memory.mean < 0.045
    assert scores.memory.within_10 >= 0.95
    assert scores.fits_judged >= 170
    assert scores.said_to_fit == ()
    assert scores.said_not_to == ()


def test_step_time_by_data_sheets(files):
    """Goal: 12 % averaged over sources."""
    scores = by_data_sheets(files)
    assert scores.time.rows == 155
    assert scores.time_mean < 0.085
    assert scores.time.within_15 > 0.88


def test_step_time_of_rows_that_their_cluster_was_not_fitted_to(files):
    """Goals: 8 % averaged over sources, 85 % of rows within 15 %."""
    scores = score(without_row(files[1].rows))
    assert scores.time.rows == 42
    assert scores.time_mean < 0.065
    assert scores.time.within_15 > 0.88
    good = [pick.is_good for pick in scores.picks]
    assert len(good) == 10
    assert sum(good) >= 8


def test_step_time_of_sources_that_nothing_was_fitted_to(files):
    scores = score(without_source([row for rows in files for row in rows.rows]))
    assert scores.time_mean < 0.095


def test_constants_are_of_each_cluster(files):
    clusters = calibrate_clusters(files[1].rows)
    assert [cluster.name for cluster in clusters] == ["vtrain_multi", "vtrain_single", "bloom"]
    assert all(cluster.mean_error < 0.06 for cluster in clusters)
    used = {entry.calibration for entry in predicted_only(predict_rows(files[1], choosing(clusters)))}
    assert used == {"vtrain_multi", "vtrain_single", "bloom"}
