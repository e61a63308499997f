"""`make test TESTS=…`: a path that does not exist is said before anything is installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def make(folder: Path, target: str, tests: str) -> subprocess.CompletedProcess[str]:
    """`make TARGET TESTS=…` where there is nothing but what that needs before it installs anything."""
    (folder / ".ci").mkdir()
    for name in ("Makefile", ".ci/check-tests"):
        shutil.copy(REPOSITORY / name, folder / name)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_one.py").touch()
    # A make that runs the tests hands its own options on.
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", target, f"TESTS={tests}"], cwd=folder, env=clean, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("target", ["test", "test-all", "test-gpu"])
@pytest.mark.parametrize("tests", ["tests/nosuch", "tests/nosuch.py::test_a", "tests -x nosuch.py", "-k a tests/no"])
def test_a_path_that_does_not_exist_is_exit_2_and_one_line(tmp_path: Path, target: str, tests: str) -> None:
    done = make(tmp_path, target, tests)
    assert done.returncode == 2
    ours = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(ours) == 1
    assert ours[0].startswith("Error: no tests at ")
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    "tests", ["tests", "tests/test_one.py::no_such_test", "tests -k 'one or two'", "--maxfail 3 -x --tb=short tests"]
)
def test_what_follows_colons_and_options_is_pytests_to_check(tmp_path: Path, tests: str) -> None:
    done = make(tmp_path, "test", tests)
    # The next step, which makes .venv, is not there.
    assert "Error: no tests" not in done.stderr
    assert "No rule to make target 'constraints.txt'" in done.stderr
