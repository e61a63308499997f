"""Constants of a cluster from its rows, whose constants a row takes, and [calibration] in a user's profile."""

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
from hpc_gpt.launcher.plan.calibration import (
    Calibrated,
    calibration_path,
    fit,
    store_calibration,
    without_table,
)
from hpc_gpt.launcher.plan.machine import DEFAULT, Constants, Machine, constants_from
from hpc_gpt.launcher.plan.step_time import predict_step
from tests.plan.machines import machine_named
from tests.plan.published.rows import rows_of
from tests.plan.published.scores import (
    calibrate,
    calibrate_clusters,
    chosen_for,
    fastest,
    without_row,
    without_source,
)
from tests.plan.row_examples import row

TRUE = dataclasses.replace(DEFAULT, gemm=0.66, network=0.5)
SPLITS = [(1, 1, 64), (2, 2, 16), (4, 4, 4), (8, 1, 8), (8, 8, 1), (1, 8, 8), (2, 4, 8), (4, 1, 16)]


def rows(name=None, *, true: Constants = TRUE, **fields):
    """Rows of several layouts, with the times that `true` constants give."""
    made = [
        row(id=f"{tp}-{pp}-{dp}", tp=tp, pp=pp, dp=dp, **{"memory_gib": None, "memory_kind": None, **fields})
        for tp, pp, dp in SPLITS
    ]
    read = rows_of({"rows": made}, "rows").rows
    for fields_of, entry in zip(made, read, strict=True):
        fields_of["sec_per_iter"] = predict_step(entry.training, entry.machine, true).step_s
    content = {"clusters": {name: made}} if name else {"rows": made}
    return rows_of(content, "rows").rows


def test_constants_come_back_near_those_that_made_the_rows():
    found = calibrate("mine", rows())
    assert found.mean_error < 0.03 < _mean_error(rows(), DEFAULT)
    assert abs(found.constants.gemm - TRUE.gemm) < abs(DEFAULT.gemm - TRUE.gemm)
    assert set(found.residuals) == {"-".join(map(str, split)) for split in SPLITS}


def _mean_error(entries, constants):
    return sum(
        abs(predict_step(entry.training, entry.machine, constants).step_s / entry.published.step_s - 1)
        for entry in entries
    ) / len(entries)


def test_noisy_rows_do_not_count_and_a_layouts_fastest_does():
    read = rows_of({"rows": [row(id="a"), row(id="b", sec_per_iter=8.0), row(id="c", sec_per_iter=1.0, noisy=True),
                             row(id="d", sec_per_iter=None)]}, "rows").rows  # fmt: skip
    assert [entry.id for entry in fastest(read)] == ["b"]


def test_clusters_by_name_or_else_by_machine():
    assert [each.name for each in calibrate_clusters(rows("mine"))] == ["mine"]
    mixed = rows() + rows(fabric="omni-path 4x100G")
    found = calibrate_clusters(mixed)
    assert [each.name for each in found] == ["a100-80g-8-infiniband-8x200g", "a100-80g-8-omni-path-4x100g"]
    assert calibrate_clusters(rows_of({"rows": [row(sec_per_iter=None)]}, "rows").rows) == []


def test_a_row_takes_the_cluster_of_its_device_and_node_size():
    ib = calibrate("ib", rows("ib", source="x"))
    opa = calibrate("opa", rows("opa", source="y", fabric="omni-path 4x100G"))
    h100 = dataclasses.replace(ib, name="h100", device="h100-80g")

    def chosen(clusters, **fields):
        (entry,) = rows_of({"rows": [row(**fields)]}, "rows").rows
        return chosen_for(entry, clusters)

    clusters = [opa, ib, h100]
    assert chosen(clusters) is ib
    assert chosen(clusters, source="y") is opa
    assert chosen(clusters, fabric="omni-path 4x100G") is opa
    assert chosen(clusters, device="h100-80g") is h100
    assert chosen(clusters, device="v100-32g") is None
    assert chosen(clusters, gpus_per_node=4) is None
    assert chosen([opa, h100], fabric="infiniband 8x400G") is opa
    between = chosen(clusters, fabric="infiniband 8x400G")
    assert between.name == "the middle of opa, ib"
    for name, value in vars(between.constants).items():
        low, high = sorted([getattr(ib.constants, name), getattr(opa.constants, name)])
        assert low * (1 - 1e-9) <= value <= high * (1 + 1e-9)


def test_constants_as_a_profile_stores_them():
    assert constants_from({"gemm": 0.5, "of a later version": 1.0}) == dataclasses.replace(DEFAULT, gemm=0.5)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="gemm"):
            constants_from({"gemm": wrong})


def test_cross_validation_predicts_rows_its_constants_never_saw():
    slow = rows("a", source="slow", true=dataclasses.replace(DEFAULT, gemm=0.6))
    fast = rows("b", source="fast", true=dataclasses.replace(DEFAULT, gemm=0.9))
    by_source = without_source(slow + fast)
    assert len(by_source) == len(slow) + len(fast)
    signs = {source: [e.time_error < 0 for e in by_source if e.row.source == source] for source in ("slow", "fast")}
    assert all(signs["slow"])  # predicted by the fast source's constants
    assert not any(signs["fast"])
    by_row = without_row(slow + fast)
    assert sum(abs(entry.time_error) for entry in by_row) < sum(abs(entry.time_error) for entry in by_source) / 2
    assert without_row(rows()) == []
    alone = without_source(slow)
    assert {entry.calibration for entry in alone} == {"data sheets"}


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


def test_residuals_are_those_of_the_constants() -> None:
    samples = _samples()
    fitted = fit(samples)
    for (training, machine, measured), residual in zip(samples, fitted.residuals, strict=True):
        assert math.exp(residual) == pytest.approx(predict_step(training, machine, fitted.constants).step_s / measured)


def test_one_row_that_noise_doubled_does_not_carry_the_rest() -> None:
    samples = _samples()
    training, machine, measured = samples[0]
    spoiled = fit([(training, machine, 2 * measured), *samples[1:]])
    assert spoiled.constants.gemm == pytest.approx(TRUE_OF_FIT.gemm, rel=0.06)
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


def test_a_figure_that_is_not_finite_is_not_stored():
    odd = Calibrated("x", Constants(), {"a": float("nan"), "b": 0.5})
    path = store_calibration(NAME, odd)
    assert "nan" not in path.read_text()


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
