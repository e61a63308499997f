"""Constants of a cluster from measured steps, and [calibration] in a user's profile."""

import dataclasses
import math
import tomllib
from dataclasses import asdict, replace

import pytest

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import clusters_dir, config_dir
from hpc_gpt.core.settings.cluster import list_profiles, load_profile
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.planner.calibration import (
    Calibrated,
    calibrate,
    calibration_path,
    fastest,
    fit,
    store_calibration,
    without_table,
)
from hpc_gpt.planner.machine import DEFAULT, Constants, Machine, constants_from
from hpc_gpt.planner.measured_steps import MeasuredStep
from hpc_gpt.planner.step_time import predict_step
from tests.planner.machines import machine_named


def test_constants_as_a_profile_stores_them():
    assert constants_from({"gemm": 0.5, "of a later version": 1.0}) == dataclasses.replace(DEFAULT, gemm=0.5)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="gemm"):
            constants_from({"gemm": wrong})


MACHINE = machine_named("a100-80g", 8, "infiniband 4x200G")
TRUE_OF_FIT = replace(DEFAULT, gemm=0.68, host_s=2e-3, network=0.5)
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


def _samples(constants: Constants = TRUE_OF_FIT) -> list[Sample]:
    return [(training, MACHINE, predict_step(training, MACHINE, constants).step_s) for training in _trainings()]


def test_a_fit_finds_the_constants_of_made_up_steps() -> None:
    fitted = fit(_samples())
    assert fitted.constants.gemm == pytest.approx(TRUE_OF_FIT.gemm, rel=0.06)
    assert fitted.constants.host_s == pytest.approx(TRUE_OF_FIT.host_s, rel=0.03)
    assert fitted.constants.network == pytest.approx(TRUE_OF_FIT.network, rel=0.1)
    assert max(map(abs, fitted.residuals)) < 0.03
    assert max(abs(math.log(predict_step(t, MACHINE).step_s / s)) for t, _, s in _samples()) > 0.3


def test_one_row_moves_no_constant_far_and_none_moves_nothing() -> None:
    assert fit([]).constants == DEFAULT
    training = _trainings()[0]
    fitted = fit([(training, MACHINE, 10 * predict_step(training, MACHINE).step_s)])
    assert 0.5 < fitted.constants.gemm / DEFAULT.gemm <= 1
    unmoved = fit(_samples(DEFAULT)).constants
    assert all(getattr(unmoved, name) == pytest.approx(value) for name, value in asdict(DEFAULT).items())


def test_of_one_training_on_one_machine_the_shortest_step_counts() -> None:
    (one, other), slow = _trainings()[:2], replace(MACHINE, gpus_per_node=4)
    steps = [("a", one, MACHINE, 9.0), ("b", one, MACHINE, 8.0), ("b", one, MACHINE, 8.5), ("c", one, MACHINE, None),
             ("b", other, MACHINE, 7.0), ("d", one, slow, 9.5)]  # fmt: skip
    rows = [MeasuredStep(*each) for each in steps]
    assert [(row.id, row.step_s) for row in fastest(rows)] == [("b", 8.0), ("b", 7.0), ("d", 9.5)]
    found = calibrate("mine", rows)
    counted = [(one, MACHINE, 8.0), (other, MACHINE, 7.0), (one, slow, 9.5)]
    shares = [predict_step(*each[:2], found.constants).step_s / each[2] - 1 for each in counted]
    assert found.name == "mine"
    assert dict(found.residuals) == pytest.approx(dict(zip(("b", "b 2", "d"), shares, strict=True)))
    assert found.mean_error == pytest.approx(sum(map(abs, shares)) / 3)
    assert calibrate("none", [rows[3]]) == Calibrated("none", DEFAULT, {})


@pytest.mark.parametrize("measured", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(measured: float) -> None:
    with pytest.raises(ValueError, match="measured step"):
        fit([(_trainings()[0], MACHINE, measured)])


NAME = "jean-zay-v100-32g"
FOUND = Calibrated("x", Constants(gemm=0.512345678), {"run-1": 0.031, 'odd "id" é = [x]': -0.2})


def own(text: str):
    path = config_dir() / "clusters" / f"{NAME}.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def test_a_shipped_profile_gets_a_copy_that_extends_it():
    shipped = list_profiles()[NAME]
    before = shipped.read_bytes()
    path = store_calibration(NAME, FOUND)
    assert path == config_dir() / "clusters" / f"{NAME}.toml"
    assert shipped.read_bytes() == before
    profile = load_profile(NAME)
    assert (profile.gpus_per_node, profile.calibration.constants["gemm"]) == (4, 0.512346)
    assert (profile.calibration.rows, profile.calibration.mean_error) == (2, pytest.approx(0.1155))
    assert profile.calibration.residuals == FOUND.residuals
    assert constants_from(profile.calibration.constants).gemm == 0.512346


def test_the_path_of_a_shipped_file_is_not_written_either():
    shipped = clusters_dir() / f"{NAME}.toml"
    assert calibration_path(str(shipped)) == config_dir() / "clusters" / f"{NAME}.toml"


def test_comments_and_order_survive_and_the_old_table_goes():
    path = own(
        f'# mine\nextends = "{NAME}"  # so\n\n[calibration]\nrows = 3 # old\n[calibration.constants]\ngemm = 1.0\n'
        '# of the environment\n[environment]\nA = "[calibration]"\n'
    )
    store_calibration(NAME, FOUND)
    first = path.read_text()
    assert first.startswith(f'# mine\nextends = "{NAME}"  # so\n')
    assert '[environment]\nA = "[calibration]"\n' in first
    assert "# old" not in first
    assert tomllib.loads(first)["calibration"]["rows"] == 2
    store_calibration(NAME, FOUND)
    assert path.read_text() == first


def test_an_inseparable_table_is_refused_and_nothing_written():
    for text in ("calibration = { rows = 3 }\n", "calibration.rows = 3\n", 'description = """\n[calibration]\n"""\n'):
        path = config_dir() / "clusters" / f"{NAME}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'extends = "{NAME}"\n{text}')
        with pytest.raises(ConfigError, match="calibration"):
            store_calibration(NAME, FOUND)
        assert path.read_text() == f'extends = "{NAME}"\n{text}'


def test_a_file_that_is_no_toml_is_refused():
    path = own("extends = \n")
    with pytest.raises(ConfigError):
        store_calibration(NAME, FOUND)
    assert path.read_text() == "extends = \n"


def test_a_profile_by_path_is_written_where_it_is(tmp_path):
    (path := tmp_path / "site.toml").write_text('device = "v100-32g"\n')
    (link := tmp_path / "link.toml").symlink_to(path)
    assert store_calibration(str(link), FOUND) == path
    assert link.is_symlink()
    assert load_profile(str(path)).calibration.rows == 2


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a = 1\n[calibration]\nb = 2\n", "a = 1\n"),
        ("[ calibration . x ]\nb = 2\n[[other]]\nc = 3\n", "[[other]]\nc = 3\n"),
        ('["calibration"]\nb = 2\n[calibrations]\n', "[calibrations]\n"),
        ("a = 1\r\n[calibration] # note\r\nb = 2\r\n[z]\r\n", "a = 1\r\n[z]\r\n"),
    ],
)
def test_a_table_is_taken_out_of_the_text(text, left):
    assert without_table(text, "calibration") == left
