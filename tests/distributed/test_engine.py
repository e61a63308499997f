"""The engine beyond the table: resume to the last digit, steps that are not finite, fp16's loss scale, split layers."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from hpc_gpt.core.settings.layout import Layout
from tests import marked
from tests.distributed.equality_cases import CLIP, STEPS, Case
from tests.distributed.reference import reference
from tests.distributed.scenarios import MOVED_MODELS, MOVES, SHORT_MOVES, part_moves
from tests.distributed.trainings import SAVED

Launches = Callable[[int], Any]
KINDS = marked(("fp32 zero0", "fp32 zero1", "bf16"), too_long=("fp32 zero0", "fp32 zero1"))
WORLDS = [4, *(pytest.param(world, marks=pytest.mark.long) for world in (1, 2))]  # four, as tp2 x pp2


@pytest.mark.scenario("resume {kind}")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_an_unbroken_one_to_the_last_digit(launches: Launches, world: int, kind: str) -> None:
    found = launches(world).figures(f"resume {kind}")
    assert (found["step"], found["resumed"]) == (SAVED, found["unbroken"])
    assert found["same_weights"]
    assert found["same_random"]


@pytest.mark.long(but="each value")
@pytest.mark.scenario("{model} {move}", world=2)
@pytest.mark.parametrize("move", marked(MOVES, [move for move in MOVES if move not in SHORT_MOVES]))
@pytest.mark.parametrize("model", MOVED_MODELS)
def test_another_shape_in_another_layout_equals_an_unbroken_run(launches, model, move):
    _check_moved(launches(2).figures(f"{model} {move}"))


@pytest.mark.long
@pytest.mark.scenario("parts {move}")
@pytest.mark.parametrize(("world", "move"), [(world, move) for world in (2, 4) for move in part_moves(world)])
def test_a_run_with_other_sequence_parts_equals_an_unbroken_one(launches, world, move):
    _check_moved(launches(world).figures(f"parts {move}"))


def _check_moved(found: dict[str, Any]) -> None:
    for (loss, norm, skipped), (expected, expected_norm, _) in zip(found["moved"], found["unbroken"], strict=True):
        assert not skipped
        assert abs(loss - expected) <= 2e-6
        assert abs(norm / expected_norm - 1) <= 1e-5


@pytest.mark.scenario("not finite {kind}")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_changes_nothing(launches: Launches, world: int, kind: str) -> None:
    _check_skipped(launches(world).figures(f"not finite {kind}"))


@pytest.mark.scenario("not finite sgd", world=1)
def test_sgd_skips_it_too(launches: Launches) -> None:
    _check_skipped(launches(1).figures("not finite sgd"))


def _check_skipped(found: dict[str, Any]) -> None:
    (loss, norm, skipped) = found["bad"][0]
    assert skipped
    assert not math.isfinite(loss)
    assert not math.isfinite(norm)
    assert found["weights_kept"]
    assert found["step"] == 5
    for loss, norm, skipped in found["good"] + found["then"]:
        assert math.isfinite(loss)
        assert math.isfinite(norm)
        assert not skipped


@pytest.mark.scenario("fp16 overflow")
@pytest.mark.parametrize("world", WORLDS)
def test_fp16_halves_its_scale_after_overflows_and_skips(launches: Launches, world: int) -> None:
    found = launches(world).figures("fp16 overflow")
    # Steps 1 and 2 overflow. Hysteresis 2 forgives the first; the second halves.
    assert found["scales"] == [65536.0] * 3 + [32768.0] * (STEPS - 2)
    skipped = [step for step, result in enumerate(found["results"]) if result[2]]
    kept = [step for step, result in enumerate(found["results"]) if result[3]]
    assert skipped == kept == [1, 2]
    assert (found["skipped"], found["step"]) == (2, STEPS)


@pytest.mark.scenario("fp16")
@pytest.mark.parametrize("world", WORLDS)
def test_fp16_is_near(launches: Launches, world: int) -> None:
    plain = reference(Case(Layout(1, 1, 1), clip=CLIP).resolved)
    losses, norms, skipped = zip(*launches(world).figures("fp16"), strict=True)
    assert losses == pytest.approx(plain.losses, abs=1e-2)
    assert norms == pytest.approx(plain.norms, rel=1e-2)
    assert not any(skipped)


@pytest.mark.scenario("deterministic", world=1)
def test_deterministic_kernels_are_asked_for_and_agree(launches: Launches) -> None:
    found = launches(1).figures("deterministic")
    assert found["on"]
    assert found["exact"] == found["usual"]


@pytest.mark.scenario("padding", world=2)
def test_a_rank_may_hold_nothing_but_padding(launches: Launches) -> None:
    found = launches(2).figures("padding")
    assert (found["loss"], found["padding_gradient"]) == (pytest.approx(found["plain"], abs=1e-6), 0.0)


@pytest.mark.scenario("other checkpoints", world=4)
def test_a_checkpoint_of_another_model_is_refused(launches: Launches) -> None:
    said = launches(4).figures("other checkpoints")
    assert said["same"] == ""
    assert "another model: model.hidden is 32 there and 64 here" in said["model"]
    assert "train.dtype is fp32 there and bf16 here" in said["dtype"]
    assert "train.optimizer is adamw there and sgd here" in said["optimizer"]
    assert "model.json cannot be read" in said["missing"]
    assert "holds no weights" in said["lost"]
