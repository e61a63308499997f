"""The rule of tests/strict_ci.py, on a pytest session of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

SHARED = "import pytest\n@pytest.fixture\ndef shared(): pytest.skip('none here')\ndef test_a(shared): pass\n"


def run_session(folder: Path, source: str, ci: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    shared: real files\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.strict_ci", "-p", "no:cacheprovider", str(folder)]
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "source",
    [
        "import pytest\ndef test_a(): pytest.skip('no')\n",
        "import pytest\n@pytest.mark.skip(reason='no')\ndef test_a(): pass\n",
        "import pytest\n@pytest.mark.xfail\ndef test_a(): assert False\n",
        "import pytest\n@pytest.mark.xfail\ndef test_a(): pass\n",
    ],
    ids=["skip", "skip mark", "xfail", "xpass"],
)
def test_ci_fails_on_what_did_not_run(tmp_path: Path, source: str) -> None:
    strict, lenient = (run_session(tmp_path, source, ci) for ci in ("true", ""))
    assert strict.returncode == 1
    assert "test_it.py::test_a" in strict.stdout
    assert lenient.returncode == 0


def test_a_module_skipped_at_import_fails_ci(tmp_path: Path) -> None:
    source = "import pytest\npytest.importorskip('no_such_module')\ndef test_a(): pass\n"
    done = run_session(tmp_path, source + "\n", "true")
    assert done.returncode != 0
    assert "these must run" in done.stdout


def test_tests_on_the_shared_files_may_be_skipped(tmp_path: Path) -> None:
    assert run_session(tmp_path, SHARED, "true").returncode == 0
