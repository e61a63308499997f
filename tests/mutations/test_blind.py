"""Faults that nobody has chosen: what is drawn, which tests are chosen for one, and what is said of it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import coverage
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import examples
from tests.conftest import REPOSITORY
from tests.mutations import blind
from tests.mutations import map as map_module
from tests.mutations.draw import Drawn, draw, files_of, lines_of
from tests.mutations.map import DIFF, Map, Move, map_of, moves_of
from tests.mutations.python_faults import changes_of_python, is_grammatical, lines_of_functions
from tests.mutations.shell_faults import changes_of_shell
from tests.processes import state_of

PYTHON = [
    ("if a < b: f()", {"a >= b", "a <= b", "if False", ": pass"}),
    ("if f(x): y = 1", {"not (f(x))", "if False", "y = 2"}),
    ("if a:\n    y = b\nelse:\n    y = c", {"not (a)", "if False", "    pass"}),
    ("x = a and b or c", {"a or b", "b and c"}),
    ("x = a if b else c", {"x = (a)", "x = (c)"}),
    ("x = f(a, b, c=d)", {"f(a, c=d)", "f(a, b)"}),
    ("x = f(c=d, e=g)", {"f(e=g)", "f(c=d)"}),
    ("raise E(x)", {"pass"}),
    ("try:\n    pass\nexcept E:\n    y = z", {"    pass\nexcept E:\n    pass"}),
    ("x = [True, 3, 0.5, 'ended']", {"False", "4", "1.0", "'endedx'"}),
    ("x = f'{a:.1f} GiB of it'", {"1{a:.1f} GiB", "{a:.1f} GB of"}),
    ("x = sorted(y)", {"x = (y)"}),
    ("x = [a for a in b if c(a)]", {"if (not (c(a)))"}),
    ('def f(a: int = 3) -> "str":\n    """What 3 is for."""', {"= 4"}),
    ("import a\nfrom b import c\n@d(e=True)\ndef f(): pass", set()),
    ("if TYPE_CHECKING:\n    x = 3", set()),
]
SHELL = [
    ("if [ $n -lt 3 ]; then", {"! [", "-le", "4"}),
    ("if ! cmp -s a b; then", {"if cmp", "cmp a"}),
    ("a && b || return 1", {"a || b", "b && return", "|| : ", "return 2", ":"}),
    ("{% if stage and not way %}", {"not (stage and not way)", "stage or not"}),
    ("remove_environment", {":"}),
    ("# if [ $n -lt 3 ]", set()),
    ("{# if [ $n -lt 3 ] #}", set()),
]


def _results(source: str, make) -> list[str]:
    sound = source.encode()
    return [
        Drawn("a", *change).applied(sound).decode()
        for change in make(sound)
        if make is changes_of_shell or is_grammatical(sound, Drawn("a", *change).applied(sound))
    ]


@pytest.mark.parametrize(
    ("source", "wanted", "make"),
    [(*case, changes_of_python) for case in PYTHON] + [(*case, changes_of_shell) for case in SHELL],
)
def test_each_kind_of_fault_is_made(source: str, wanted: set[str], make) -> None:
    results = _results(source, make)
    for text in wanted:
        assert any(text in result for result in results), (text, results)
    assert all(any(text in result for text in wanted) for result in results), results


def test_a_seed_has_its_faults_and_every_line_counts() -> None:
    faults = draw(REPOSITORY, 30, 4)
    assert draw(REPOSITORY, 10, 4) == faults[:10]
    assert draw(REPOSITORY, 10, 5) != faults[:10]
    assert len({(fault.file, fault.line) for fault in faults}) == 30
    for fault in faults:
        assert "\n" not in fault.described(REPOSITORY)
    names = files_of(REPOSITORY)
    assert {"hpc_gpt/core/words.py", "templates/base.sh.j2", "templates/enter.sh"} <= set(names)
    assert not any(name.startswith("templates/report") for name in names)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--random", "0"], "argument --random: 0 is no number from 1"),
        (["--random", "3", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--random", "900000", "--list"], "not of 900,000"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutations", *words], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


SOURCE = """LIMIT = 3


def twice(x):
    if x > LIMIT:
        return 0
    while x < 0:
        x += 1
    return 2 * x
"""
TESTS = """import subprocess
from hpc_gpt.a import twice

def test_a():
    assert twice(1) == 2

def test_b():
    started = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open("started", "w") as file:
        file.write(str(started.pid))
    assert twice(-2) == 0
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A program of one function with two tests, and what they are run by."""
    files = {
        "setup.cfg": "[tool:pytest]\n",
        "hpc_gpt/__init__.py": "",
        "hpc_gpt/a.py": SOURCE,
        "tests/test_a.py": TESTS,
    }
    for name, text in {**files, "tests/__init__.py": "", "tests/mutations/__init__.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(REPOSITORY / "tests/mutations/chosen.py", tmp_path / "tests/mutations/chosen.py")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "before", "after", "tests", "said"),
    [
        (9, "2 * x", "3 * x", ["test_a"], ("caught", "tests/test_a.py::test_a")),
        (5, "x > LIMIT", "x >= LIMIT", ["test_a", "test_b"], ("survived", "")),
        (9, "2 * x", "3 * x", ["test_b"], ("survived", "")),
        (8, "x += 1", "x += 0", ["test_b"], ("caught", "tests/test_a.py::test_b hangs")),
        (1, "LIMIT = 3", "LIMIT = nosuch", ["test_a"], ("caught", "tests/test_a.py")),
    ],
)
def test_what_is_said_of_a_fault(tree: Path, monkeypatch, line, before, after, tests, said) -> None:
    if said[1].endswith("hangs"):
        monkeypatch.setattr(blind, "_START_S", 2.0)
    place = SOURCE.index(before)
    fault = Drawn("hpc_gpt/a.py", line, line, "a kind", place, place + len(before), after)
    choice = blind.Choice(["tests/test_a.py"], {f"tests/test_a.py::{test}": 0.1 for test in tests})
    found = blind.judge(tree, fault, choice, 60)
    assert (found.name, found.by) == said
    assert (tree / "hpc_gpt/a.py").read_text() == SOURCE
    if said[1].endswith("hangs"):
        process = int((tree / "started").read_text())
        assert state_of(process) in ("X", "Z"), "a run that a test started goes on"


def test_a_line_has_the_tests_that_execute_it() -> None:
    known = Map(
        {"hpc_gpt/a.py": {"first": {1, 4, 5, 9}, "slow": {5, 7, 8}, "other": {1, 4}}},
        {"first": 0.1, "slow": 2.0, "other": 0.1},
    )
    source = SOURCE.encode()
    assert lines_of_functions(source) == {5, 6, 7, 8, 9}
    assert known.tests_that_use("hpc_gpt/a.py", [8], source) == ["slow"]
    assert known.tests_that_use("hpc_gpt/a.py", [5], source) == ["first", "slow"]
    assert known.tests_that_use("hpc_gpt/a.py", [1], source) == ["first", "other", "slow"]
    assert known.tests_that_use("hpc_gpt/a.py", [6], source) == []


def test_a_tables_fault_has_its_packages_tests_nearest_first(tmp_path: Path) -> None:
    """What is read as a module is imported is recorded of whichever test came first."""
    (tmp_path / "hpc_gpt/kind").mkdir(parents=True)
    (tmp_path / "hpc_gpt/kind/a.py").write_text(SOURCE)
    seconds = {"tests/kind/test_b.py::of[a]": 5.0, "tests/kind/test_b.py::of[b]": 1.0, "tests/other/test_c.py::c": 0.1,
               "tests/kind/test_a.py::slow": 90.0}  # fmt: skip
    known = Map({"hpc_gpt/kind/a.py": {"tests/other/test_c.py::c": {1, 4}}}, seconds)
    table, called = (Drawn("hpc_gpt/kind/a.py", line, line, "a kind", 0, 0, "") for line in (1, 5))
    assert list(blind.choose(table, known, 6.5, tmp_path).tests or ()) == [
        "tests/kind/test_b.py::of[a]", "tests/kind/test_b.py::of[b]", "tests/other/test_c.py::c",
    ]  # fmt: skip
    assert blind.choose(table, known, 6.5, tmp_path).left == 1
    assert blind.choose(called, known, 6.5, tmp_path).tests is None


@given(st.lists(st.integers(0, 9), max_size=30), st.data())
@settings(max_examples=examples(50), deadline=None)
def test_lines_of_a_map_move_with_the_program(each: list[int], data: st.DataObject) -> None:
    """What stays has its tests, what came has those of what it replaces or of the lines around it."""
    old = [f"line {number}" for number in range(len(each))]
    new = [
        text
        for text, fate in zip(old, each, strict=True)
        for text in {0: [], 1: ["x", text], 2: ["y"]}.get(fate, [text])
    ]
    with tempfile.TemporaryDirectory() as name:
        for file, lines in (("a", old), ("b", new)):
            Path(name, file).write_text("".join(f"{line}\n" for line in lines))
        done = subprocess.run(
            ["git", *DIFF, "--no-index", "a", "b"], cwd=name, capture_output=True, text=True, check=False
        )
    move = moves_of(done.stdout).get("a", Move("b"))
    assert move.name == "b"
    kept = {line for line, text in enumerate(old, 1) if text in new}
    chosen = data.draw(st.sets(st.sampled_from(sorted(kept)))) if kept else set()
    moved = move.lines(chosen)
    assert {new.index(old[line - 1]) + 1 for line in chosen} <= moved
    others = {line for line, text in enumerate(new, 1) if text in old and old.index(text) + 1 not in chosen}
    assert moved.isdisjoint(others)
    for place, text in enumerate(new[1:-1], 1):
        around = [old.index(each) + 1 for each in (new[place - 1], new[place + 1]) if each in old]
        if text == "x" and len(around) == 2 and around[1] == around[0] + 1:
            assert all(place + 1 in move.lines({line}) for line in around)
    replaced = {line for line, text in enumerate(old, 1) if text not in new}
    if "y" in new:
        assert "y" in {new[line - 1] for line in move.lines(replaced)}


def test_a_piece_of_another_commit_counts_at_its_lines_now(tmp_path: Path, monkeypatch) -> None:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", tmp_path, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit() -> str:
        git("add", "-A")
        git("-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a")
        return git("rev-parse", "HEAD")[:12]

    monkeypatch.setattr(map_module, "ROOT", tmp_path)
    monkeypatch.setattr(map_module, "MAPS", tmp_path / ".map")
    git("init", "-q")
    files = {"hpc_gpt/a.py": SOURCE, "hpc_gpt/gone.py": SOURCE, "tests/test_a.py": TESTS, ".gitignore": ".map"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    first = commit()
    seconds = {"tests/test_a.py::test_b": 1.0, "tests/test_gone.py::test_c": 1.0}
    lines = {name: {"tests/test_a.py::test_b": [8, 9]} for name in ("hpc_gpt/a.py", "hpc_gpt/gone.py")}
    for name, of in ((first, seconds), ("0123456789ab", {"tests/test_a.py::unknown": 1.0})):
        (tmp_path / ".map" / name).mkdir(parents=True)
        piece = {"piece": f"tests/{name}", "seconds": of, "lines": lines}
        (tmp_path / ".map" / name / f"{name}.json").write_text(json.dumps(piece))
    git("mv", "hpc_gpt/a.py", "hpc_gpt/b.py")
    git("rm", "-q", "hpc_gpt/gone.py")
    (tmp_path / "hpc_gpt/b.py").write_text(SOURCE.replace("LIMIT = 3", "LIMIT = 3\nOTHER = 4"))
    second = commit()
    map_module._moves.cache_clear()
    known = map_of(second)
    assert known is not None
    assert (known.seconds, known.lines) == (
        {"tests/test_a.py::test_b": 1.0},
        {"hpc_gpt/b.py": {"tests/test_a.py::test_b": {9, 10}}},
    )
    was = map_of(first)
    assert was is not None
    assert set(was.lines) == {"hpc_gpt/a.py", "hpc_gpt/gone.py"}


def test_a_fault_that_changes_nothing_can_still_be_made() -> None:
    files = {fault.partition(" ")[0] for fault in blind.equivalent()}
    faults = [each for (file, _), of_line in lines_of(REPOSITORY).items() if file in files for each in of_line]
    assert blind.equivalent().keys() <= {fault.without_line(REPOSITORY) for fault in faults}
    assert all(blind.equivalent().values())


RECORDER = REPOSITORY / "tests/mutations/recorder.py"
ENDS = {
    "returns": "",
    "killed": "import os, signal, time; time.sleep(2.5); os.kill(os.getpid(), signal.SIGKILL)",
    "leaves at once": "import os; os._exit(0)",
}


@pytest.mark.parametrize("forked", [False, True], ids=["itself", "its fork"])
@pytest.mark.parametrize("end", ENDS)
def test_a_process_is_recorded_however_it_ends(tmp_path: Path, end: str, forked: bool) -> None:
    (tmp_path / "hpc_gpt").mkdir()
    (tmp_path / "hpc_gpt/__init__.py").touch()
    (tmp_path / "hpc_gpt/a.py").write_text(SOURCE)
    (tmp_path / "current").write_text("tests/test_a.py::test_one")
    fork = "import os\nif os.fork(): raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))" if forked else ""
    program = f"exec(open({str(RECORDER)!r}).read(), {{}})\n{fork}\nfrom hpc_gpt.a import twice; twice(-1)\n{ENDS[end]}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {[str(tmp_path), *sys.path]}\n{program}"],
        env={**os.environ, "TESTS_MAP": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.stderr
    assert done.returncode == (-signal.SIGKILL if end == "killed" and not forked else done.returncode)
    lines = set()
    for path in tmp_path.glob("lines.*"):
        data = coverage.CoverageData(str(path))
        data.read()
        for file in data.measured_files():
            by_line = data.contexts_by_lineno(file)
            lines |= {line for line, tests in by_line.items() if tests == ["tests/test_a.py::test_one"]}
    assert {5, 7, 8, 9} <= lines
    assert 6 not in lines
