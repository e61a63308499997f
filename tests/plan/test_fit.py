"""Constants come back from steps that were made with them; a row that noise doubled does not carry the rest."""

import math
from dataclasses import asdict, replace

import pytest

from hpc_gpt.plan.calibration import fit
from hpc_gpt.plan.machine import Machine, machine_named
from hpc_gpt.plan.rates import DEFAULT, Constants
from hpc_gpt.plan.step_time import predict_step
from hpc_gpt.plan.training import Training
from hpc_gpt.settings.model_shape import ModelShape

MACHINE = machine_named("a100-80g", 8, "infiniband 4x200G")
TRUE = replace(DEFAULT, gemm=0.68, host_s=2e-3, network=0.5)
Sample = tuple[Training, Machine, float]


def _trainings() -> list[Training]:
    large, middle, small = (
        ModelShape(12288, 48, 96, seq=2048),
        ModelShape(6144, 40, 48, seq=2048),
        ModelShape(1024, 24, 16),
    )
    out = [
        Training(large, tp=8, pp=pp, micro_batch=micro, micro_batches=32, recompute="full", dtype="fp16")
        for pp in (4, 8)
        for micro in (1, 2)
    ]
    out += [
        Training(middle, tp=16, micro_batch=micro, micro_batches=8, recompute="full", dtype="fp16") for micro in (1, 4)
    ]
    out += [Training(small, tp=tp, micro_batches=16, recompute="full", dtype="fp16") for tp in (1, 2, 4)]
    return out


def _samples(constants: Constants = TRUE) -> list[Sample]:
    return [(training, MACHINE, predict_step(training, MACHINE, constants).step_s) for training in _trainings()]


def test_a_fit_finds_the_constants_of_made_up_steps() -> None:
    fitted = fit(_samples())
    assert fitted.constants.gemm == pytest.approx(TRUE.gemm, rel=0.06)
    assert fitted.constants.host_s == pytest.approx(TRUE.host_s, rel=0.03)
    assert fitted.constants.network == pytest.approx(TRUE.network, rel=0.1)
    assert max(map(abs, fitted.residuals)) < 0.03
    assert max(abs(math.log(predict_step(t, MACHINE).step_s / s)) for t, _, s in _samples()) > 0.3


def test_residuals_are_those_of_the_constants() -> None:
    samples = _samples()
    fitted = fit(samples)
    for (training, machine, measured), residual in zip(samples, fitted.residuals, strict=True):
        assert math.exp(residual) == pytest.approx(predict_step(training, machine, fitted.constants).step_s / measured)


def test_one_row_that_noise_doubled_does_not_carry_the_rest() -> None:
    samples = _samples()
    training, machine, measured = samples[0]
    spoiled = fit([(training, machine, 2 * measured), *samples[1:]])
    assert spoiled.constants.gemm == pytest.approx(TRUE.gemm, rel=0.06)
    assert spoiled.residuals[0] == pytest.approx(-math.log(2), abs=0.1)


def test_one_row_moves_no_constant_far_and_none_moves_nothing() -> None:
    assert fit([]).constants == DEFAULT
    training = _trainings()[0]
    fitted = fit([(training, MACHINE, 10 * predict_step(training, MACHINE).step_s)])
    assert 0.5 < fitted.constants.gemm / DEFAULT.gemm <= 1
    unmoved = fit(_samples(DEFAULT)).constants
    assert all(getattr(unmoved, name) == pytest.approx(value) for name, value in asdict(DEFAULT).items())


def test_the_same_rows_give_the_same_constants() -> None:
    assert fit(_samples()) == fit(_samples())


@pytest.mark.parametrize("measured", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(measured: float) -> None:
    with pytest.raises(ValueError, match="measured step"):
        fit([(_trainings()[0], MACHINE, measured)])
