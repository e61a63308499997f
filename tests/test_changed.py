"""`make test-gpu CHANGED=main` has the tests that a change concerns, by what they import."""

import subprocess
from pathlib import Path

import pytest

from tests.changed import changed_files, concerned

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
def test_a_test_is_concerned_by_what_it_reaches(tmp_path: Path, changed: str, wanted: list[str]) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    assert changed_files("main", tmp_path) == set()
    (tmp_path / changed).write_text(FILES[changed] + "\n# changed\n")
    assert changed_files("main", tmp_path) == {tmp_path / changed}
    assert [path.name for path in concerned(changed_files("main", tmp_path), tmp_path)] == wanted
