"""What tests/session.py says at the end, on pytest sessions of their own, of one process and of two workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest, session
from tests.conftest import REPOSITORY

SHARED = "import pytest\n@pytest.fixture\ndef shared(): pytest.skip('none here')\ndef test_a(shared): pass\n"


WORKERS = ("-n", "2", "--dist", "loadgroup")
ONE_PROCESS, TWO_WORKERS = pytest.param((), id="one process"), pytest.param(WORKERS, id="two workers")


def run_session(folder: Path, source: str, ci: str, *options: str, which: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    shared: real files\n    long: long\n")
    words = ["-m", "pytest", "-q", "-p", "tests.session", "-p", "no:cacheprovider"]
    command = [sys.executable, *words, *options, str(folder)]
    environment = {**os.environ, "CI": ci, "ALL_TESTS": which, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def test_conftest_has_every_hook_of_the_session() -> None:
    """pytest finds hooks by name, and one that is not there is not missed."""
    hooks = {name for name in vars(session) if name.startswith("pytest_")}
    assert hooks <= vars(conftest).keys()


UNRUN = {
    "skip": "import pytest\ndef test_a(): pytest.skip('no')\n",
    "skip_mark": "import pytest\n@pytest.mark.skip(reason='no')\ndef test_a(): pass\n",
    "xfail": "import pytest\n@pytest.mark.xfail\ndef test_a(): assert False\n",
    "xpass": "import pytest\n@pytest.mark.xfail\ndef test_a(): pass\n",
}


@pytest.mark.long(but="first")
@pytest.mark.parametrize("options", [ONE_PROCESS, TWO_WORKERS])
def test_ci_fails_on_what_did_not_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    for name, source in UNRUN.items():
        (tmp_path / f"test_{name}.py").write_text(source)
    strict, lenient = (run_session(tmp_path, "def test_b(): pass\n", ci, *options) for ci in ("true", ""))
    assert strict.returncode == 1
    assert "these must run" in strict.stdout
    assert [strict.stdout.splitlines().count(f"test_{name}.py::test_a") for name in UNRUN] == [1, 1, 1, 1]
    assert "test_it.py::test_b" not in strict.stdout.splitlines()
    assert lenient.returncode == 0
    assert "these must run" not in lenient.stdout


@pytest.mark.long(but="first")
@pytest.mark.parametrize("options", [ONE_PROCESS, TWO_WORKERS])
def test_a_module_skipped_at_import_fails_ci(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_other.py").write_text("def test_b(): pass\n")
    source = "import pytest\npytest.importorskip('no_such_module')\ndef test_a(): pass\n"
    done = run_session(tmp_path, source + "\n", "true", *options)
    assert done.returncode != 0
    assert done.stdout.splitlines().count("test_it.py") == 1


@pytest.mark.long(but="first")
@pytest.mark.parametrize("options", [TWO_WORKERS, ONE_PROCESS])
def test_lines_that_tests_leave_and_seconds_are_printed_once(tmp_path: Path, options: tuple[str, ...]) -> None:
    source = "from tests import session\n"
    for name in "ab":
        source += f"def test_{name}(pytestconfig): session.leave(pytestconfig, 'a title', 'line {name}')\n"
    done = run_session(tmp_path, source, "true", "--durations", "3", *options)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert [lines.count(f"line {name}") for name in "ab"] == [1, 1]
    assert sum(" a title " in line for line in lines) == 1
    assert sum("   2 tests  " in line for line in lines) == 1


@pytest.mark.long(but="first")
@pytest.mark.parametrize("options", [TWO_WORKERS, ONE_PROCESS])
def test_what_failed_is_listed_for_a_second_run(tmp_path, options, monkeypatch):
    file = tmp_path / "failed"
    monkeypatch.setenv("FAILED_TESTS", str(file))
    source = "import pytest\n@pytest.mark.xdist_group('a-group')\n@pytest.mark.parametrize('one', ['a b', 'c@d', 3])\n"
    source += "def test_a(one): assert one == 3\n@pytest.fixture\ndef no(): raise OSError\ndef test_b(no): pass\n"
    run_session(tmp_path, source, "true", *options)
    names = file.read_text().splitlines()
    assert sorted(names) == ["test_it.py::test_a[a b]", "test_it.py::test_a[c@d]", "test_it.py::test_b"]
    again = [f"{tmp_path}/{name}" for name in names[:1]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *again], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"1 failed" in done.stdout


def test_tests_on_the_shared_files_may_be_skipped(tmp_path: Path) -> None:
    assert run_session(tmp_path, SHARED, "true").returncode == 0


def test_one_worker_runs_a_group(tmp_path: Path) -> None:
    """With a pytest too new for it pytest-xdist drops groups silently, and each worker builds what a group shares."""
    source = "import os, pathlib, pytest\n"
    for number in range(12):
        source += f"@pytest.mark.xdist_group('g{number % 3}')\n"
        source += f"def test_{number}(): pathlib.Path('{number}').write_text(os.environ['PYTEST_XDIST_WORKER'])\n"
    done = run_session(tmp_path, source, "true", *WORKERS)
    assert done.returncode == 0, done.stdout
    ran = [(tmp_path / str(number)).read_text() for number in range(12)]
    assert all(len(set(ran[group::3])) == 1 for group in range(3)), ran
    assert len(set(ran)) == 2


LONG = """\
import pytest
@pytest.mark.long
def test_a(): pass
@pytest.mark.long(but="first")
@pytest.mark.parametrize("one", [1, 2, 3])
def test_b(one): pass
@pytest.mark.long(but="each value")
@pytest.mark.parametrize("one", [1, 2, 3])
@pytest.mark.parametrize("other", [1, 2])
def test_c(one, other): pass
def test_d(): pytest.skip("no Slurm here")
"""


@pytest.mark.parametrize(
    ("options", "which", "passed", "last"),
    [
        (WORKERS, "", 4, "left out: 6 long (make test-all); 1 skipped: no Slurm here"),
        pytest.param((), "", 4, "left out: 6 long (make test-all); 1 skipped: no Slurm here", marks=pytest.mark.long),
        ((), "true", 10, "left out: 1 skipped: no Slurm here"),
        ((), "long", 6, "6 passed"),
    ],
    ids=["two workers", "one process", "all", "long"],
)
def test_long_cases_are_left_out_and_the_last_line_says_so(tmp_path, options, which, passed, last):
    done = run_session(tmp_path, LONG, "", *options, which=which)
    assert done.returncode == 0, done.stdout
    assert f"{passed} passed" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(last)
