from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.plan_memory import Score, left_out, mean, rows_of, score

pytestmark = pytest.mark.shared


@pytest.fixture
def files(shared: Path) -> list[Path]:
    return [shared / "planner" / name for name in ("open.json", "calibration.json")]


@pytest.fixture
def found(files: list[Path]) -> Score:
    return score(rows_of(files))


def test_memory_is_within_the_goal(found: Score) -> None:
    assert len(found.all) >= 20
    assert mean(found.all) <= 0.045
    assert sum(abs(error) <= 0.1 for error in found.all) >= 0.95 * len(found.all)
    assert max(mean(errors) for errors in found.errors.values()) <= 0.065


def test_what_ran_fits_and_what_ran_out_does_not(found: Score) -> None:
    assert found.fits_asked >= 176
    assert found.wrong_fits == []


def test_a_source_is_predicted_as_well_with_constants_chosen_without_it(files: list[Path]) -> None:
    errors = {source: error for source, (error, _) in left_out(rows_of(files)).items()}
    assert len(errors) >= 3
    assert max(errors.values()) <= 0.07
    assert mean(list(errors.values())) <= 0.045
