"""[calibration] in a user's profile: replaced whole, all else of the file as it was, shipped files never written."""

from __future__ import annotations

import tomllib

import pytest

from hpc_gpt.errors import ConfigError
from hpc_gpt.paths import clusters_dir, config_dir
from hpc_gpt.plan.calibration import Calibrated, calibration_path, store_calibration, stored_calibration, without_table
from hpc_gpt.plan.rates import Constants
from hpc_gpt.settings.cluster import list_profiles, load_profile

NAME = "jean-zay-v100-32g"
FOUND = Calibrated(
    "x", "v100-32g", 4, frozenset({"omni-path 4x100G"}), frozenset({"s"}), Constants(gemm=0.512345678),
    {"run-1": 0.031, 'odd "id" é = [x]': -0.2},
)  # fmt: skip


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
    assert profile.gpus_per_node == 4
    assert profile.calibration.constants["gemm"] == 0.512346
    assert profile.calibration.rows == 2
    assert profile.calibration.mean_error == pytest.approx(0.1155)
    assert profile.calibration.residuals == FOUND.residuals
    assert stored_calibration(profile).constants.gemm == 0.512346


def test_the_path_of_a_shipped_file_is_not_written_either():
    shipped = clusters_dir() / f"{NAME}.toml"
    assert calibration_path(str(shipped)) == config_dir() / "clusters" / f"{NAME}.toml"


def test_comments_and_order_of_the_users_file_survive_and_the_old_table_goes():
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


def test_a_table_that_cannot_be_told_from_the_rest_is_refused_and_nothing_written():
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
    path = tmp_path / "site.toml"
    path.write_text('device = "v100-32g"\n')
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    assert store_calibration(str(link), FOUND) == path
    assert link.is_symlink()
    assert load_profile(str(path)).calibration.rows == 2


def test_a_figure_that_is_not_finite_is_not_stored():
    odd = Calibrated("x", "d", 1, frozenset(), frozenset(), Constants(), {"a": float("nan"), "b": 0.5})
    path = store_calibration(NAME, odd)
    assert "nan" not in path.read_text()


def test_a_profile_without_a_calibration():
    with pytest.raises(ConfigError, match="no \\[calibration\\]"):
        stored_calibration(load_profile(NAME))


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
