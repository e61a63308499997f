"""`make test-gpu CHANGED=main` has the tests that a change concerns, by what they import."""

import subprocess
from pathlib import Path

import pytest

from tests.changed import UnknownCommit, base_of, changed_files, changed_lines, chosen, concerned
from tests.mutations.map import Map

MARK = "pytest.mark." + "gpu"
FILES = {
    "hpc_gpt/__init__.py": "",
    "hpc_gpt/kernel.py": "",
    "hpc_gpt/loop.py": "from hpc_gpt import kernel",
    "hpc_gpt/apart.py": "",
    "tests/__init__.py": "",
    "tests/marks.py": f"marks = [{MARK}]",
    "tests/worker.py": "import hpc_gpt.apart",
    "tests/test_loop.py": f"import pytest\nimport hpc_gpt.loop\npytestmark = {MARK}",
    "tests/test_started.py": "from tests.marks import marks\nCOMMAND = ['-m', 'tests.worker']",
    "tests/test_cpu.py": "import hpc_gpt.kernel",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ("tests/test_loop.py", ["test_loop.py"]),
        ("hpc_gpt/kernel.py", ["test_loop.py"]),
        ("hpc_gpt/apart.py", ["test_started.py"]),
        ("tests/marks.py", ["test_started.py"]),
        ("tests/test_cpu.py", []),
    ],
)
def test_a_test_is_concerned_by_what_it_reaches(repository: Path, changed: str, wanted: list[str]) -> None:
    assert changed_files("main", repository) == set()
    (repository / changed).write_text(FILES[changed] + "\n# changed\n")
    assert changed_files("main", repository) == {repository / changed}
    assert [path.name for path in concerned(changed_files("main", repository), repository)] == wanted


LINES = {"hpc_gpt/kernel.py": {"tests/test_loop.py::test_a": {2, 3}, "tests/test_loop.py::test_b": {3, 4},
                               "tests/test_cpu.py::test_c": {6}}}  # fmt: skip
KERNEL = "\n".join(["def f(x):", *(f"    x += {number}" for number in range(2, 7)), "    return x", ""])


@pytest.mark.parametrize(
    ("file", "before", "after", "tests", "files"),
    [
        ("hpc_gpt/kernel.py", "x += 2", "x += 5", {"loop.py::test_a"}, set()),
        ("hpc_gpt/kernel.py", "x += 3", "x += 5\n    x += 7", {"loop.py::test_a", "loop.py::test_b"}, set()),
        ("hpc_gpt/kernel.py", "    x += 5\n", "    x += 5\n    x += 7\n", {"cpu.py::test_c"}, set()),  # between
        ("hpc_gpt/kernel.py", "return x", "return 2", set(), {"loop.py", "cpu.py"}),  # no test known: by imports
        ("hpc_gpt/apart.py", "", "x = 3", set(), {"started.py"}),
        ("tests/worker.py", "import", "import sys\nimport", set(), {"started.py"}),
        ("tests/test_cpu.py", "import", "import sys\nimport", set(), {"cpu.py"}),
        ("templates/a.sh.j2", "a", "b", set(), {"all"}),
        ("setup.cfg", "a", "b", set(), {"all"}),
        ("docs/a.md", "a", "b", set(), {"docs"}),
        ("tests/cli/a.toml", "a", "b", set(), {"cli"}),
        ("Makefile", "a", "b", set(), set()),
    ],
)
def test_a_change_has_the_tests_of_its_lines_and_in_doubt_all(
    repository: Path, file: str, before: str, after: str, tests: set[str], files: set[str]
) -> None:
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    path = repository / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(KERNEL if file == "hpc_gpt/kernel.py" else FILES.get(file, "a") + "\n")
    for words in (["add", "-A"], ["commit", "-q", "--allow-empty", "-m", "map"]):
        subprocess.run([*git, *words], check=True)
    seconds = {test: 1.0 for each in LINES.values() for test in each}
    known = Map(LINES, seconds, {"tests/test_loop.py", "tests/test_cpu.py"})
    path.write_text(path.read_text().replace(before, after, 1) if before else after)
    wanted = {"all": "tests", "docs": "tests/docs", "cli": "tests/cli"}
    found = {wanted.get(name, f"tests/test_{name}") for name in files}
    assert chosen("main", known, repository) == ({f"tests/test_{test}" for test in tests}, found)
    assert "tests" in chosen("main", None, repository)[1] or not chosen("main", None, repository)[0]


def test_only_what_this_branch_changed_counts(repository: Path) -> None:
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "checkout", "-q", "-b", "mine"], check=True)
    subprocess.run([*git, "checkout", "-q", "main"], check=True)
    (repository / "hpc_gpt/loop.py").write_text("theirs = 1\n")
    subprocess.run([*git, "commit", "-q", "-a", "-m", "theirs"], check=True)
    subprocess.run([*git, "checkout", "-q", "mine"], check=True)
    assert changed_files("main", repository) == set()
    assert changed_lines(base_of("main", repository), "hpc_gpt/loop.py", repository) == set()
    with pytest.raises(UnknownCommit, match="CHANGED=nosuch is no commit"):
        changed_files("nosuch", repository)
