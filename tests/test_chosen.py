"""Which tests run on which day: each long test once in six days, those marked `always` each time."""

import subprocess
import sys
from collections import Counter
from datetime import date, timedelta
from pathlib import Path

from tests.conftest import REPOSITORY

DAYS = [str(date(2026, 11, 28) + timedelta(days)) for days in range(6)]
# Each kind of mark, in a folder with the hooks of this one.
TESTS = """\
import pytest

@pytest.mark.parametrize("case", range(40))
@pytest.mark.long
def test_long(case): pass

@pytest.mark.long(always=True)
def test_always(): pass

@pytest.mark.parametrize("case", range(3))
@pytest.mark.long(but="first")
def test_but_first(case): pass

@pytest.mark.parametrize("one, other", [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.long(but="each value")
def test_each_value(one, other): pass

@pytest.mark.parametrize("case", range(5))
@pytest.mark.long(launch="together")
def test_together(case): pass

def test_short(): pass
"""


def collected(folder: Path, **choice: str) -> list[str]:
    """The tests that a session there would run, by name."""
    (folder / "test_made.py").write_text(TESTS)
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "tests.session", "--rootdir", str(folder)]
    words += ["-c", str(REPOSITORY / "setup.cfg"), str(folder / "test_made.py")]
    bare = {"PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(words, cwd=REPOSITORY, env=bare | choice, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_six_days_have_each_long_test_once_and_always_each(tmp_path: Path) -> None:
    short = collected(tmp_path)
    assert short == ["test_but_first[0]", "test_each_value[1-1]", "test_each_value[2-2]", "test_short"]
    every = collected(tmp_path, ALL_TESTS="true")
    days = [collected(tmp_path, CI_DAY=day) for day in DAYS]
    count = Counter(name for day in days for name in day)
    assert count.keys() == set(every)
    assert {name for name, times in count.items() if times == 6} == {*short, "test_always"}
    assert {times for name, times in count.items() if name not in (*short, "test_always")} == {1}
    assert sorted(sum("together" in name for name in day) for day in days) == [0, 0, 0, 0, 0, 5]
    # The same day has the same tests again; a long one comes before the short ones.
    assert collected(tmp_path, CI_DAY=DAYS[2]) == days[2]
    assert days[2][-1] == "test_short"
