"""Each kind of fault is made; a draw follows from its seed; a fault is caught, survives, or is unclear."""

import time
from pathlib import Path

import pytest

from bench.mutations.__main__ import Fault, draw, judge, nearest_tests
from bench.mutations.python_faults import changes_of_python, is_grammatical
from tests.conftest import REPOSITORY
from tests.processes import state_of

PYTHON = [
    ("if a < b: f()", {"a >= b", "a <= b", "if False", ": pass"}),
    ("if f(x): y = 1", {"not (f(x))", "if False", "y = 2"}),
    ("if a:\n    y = b\nelif c:\n    y = d\nelse:\n    y = e", {"not (a)", "if False", "    pass", "not (c)"}),
    ("x = a and b or c", {"a or b", "b and c"}),
    ("x = a if b else c", {"x = (a)", "x = (c)"}),
    ("x = f(a, b, c=d)", {"f(a, c=d)", "f(a, b)"}),
    ("x = f(c=d, e=g)", {"f(e=g)", "f(c=d)"}),
    ("raise E(x)", {"pass"}),
    ("try:\n    pass\nexcept E:\n    y = z", {"    pass\nexcept E:\n    pass"}),
    ("x = [True, 3, 0.5, 'ended']", {"False", "4", "1.0", "'endedx'"}),
    ("x = sorted(y)", {"x = (y)"}),
    ("x = [a for a in b if c(a)]", {"if (not (c(a)))"}),
    ('def f(a: "int" = 3) -> "str":\n    """What 3 is for."""', {"= 4"}),
    ("import a\nfrom b import c\n@d(e=True)\ndef f(): pass\nif TYPE_CHECKING:\n    x = 3", set()),
]
SOURCE = "def twice(x):\n    while x < 0:\n        x += 1\n    return 2 * x\n"
TESTS = """import subprocess
from hpc_gpt.kind.a import twice

def test_a():
    started = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open("started", "w") as file:
        file.write(str(started.pid))
    assert twice(1) == 2
    assert twice(-2) == 0
"""


@pytest.mark.parametrize(("source", "wanted"), PYTHON)
def test_each_kind_of_fault_is_made(source: str, wanted: set[str]) -> None:
    faults = [Fault("a", *change).applied(source.encode()) for change in changes_of_python(source.encode())]
    texts = [fault.decode() for fault in faults if is_grammatical(source.encode(), fault)]
    assert all(any(part in text for text in texts) for part in wanted), texts
    assert all(any(part in text for part in wanted) for text in texts), texts


def test_a_seed_has_its_faults_and_no_more_than_there_are() -> None:
    part = "hpc_gpt/core/files"
    faults = draw(REPOSITORY, 30, 4, part)
    assert draw(REPOSITORY, 10, 4, part) == faults[:10] != draw(REPOSITORY, 10, 5, part)
    assert len({(fault.file, fault.line) for fault in faults}) == 30
    with pytest.raises(ValueError, match="lines, not of 900"):
        draw(REPOSITORY, 900, 4, "hpc_gpt/__init__.py")


@pytest.mark.long(but="first")
@pytest.mark.parametrize(
    ("before", "after", "limit", "verdict", "reason"),
    [
        ("2 * x", "3 * x", 90.0, "caught", "tests/kind/test_a.py::test_a"),
        ("x < 0", "x <= -1", 90.0, "survived", "1 files of tests passed"),
        ("x += 1", "x += 0", 12.0, "survived", "not all of its tests ended within 12 s"),
    ],
)
def test_a_fault_has_its_verdict(tmp_path: Path, before, after, limit, verdict, reason) -> None:
    files = {"hpc_gpt/kind/a.py": SOURCE, "tests/kind/test_a.py": TESTS,
             "tests/kind/test_b.py": "import hpc_gpt.kind.b", "setup.cfg": "[tool:pytest]\nmarkers = gpu"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert nearest_tests(tmp_path, "hpc_gpt/kind/a.py") == ["tests/kind/test_a.py", "tests/kind/test_b.py"]
    (tmp_path / "tests/kind/test_b.py").unlink()
    start = SOURCE.index(before)
    fault = Fault("hpc_gpt/kind/a.py", 2, "a kind", start, start + len(before), after)
    assert judge(tmp_path, fault, limit) == (verdict, reason)
    assert (tmp_path / "hpc_gpt/kind/a.py").read_text() == SOURCE
    while state_of(int((tmp_path / "started").read_text())) not in ("X", "Z"):  # what its test started is killed
        time.sleep(0.05)
