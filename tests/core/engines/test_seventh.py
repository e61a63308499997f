"""A seventh engine is the three files in `seventh`, and no edit elsewhere, as docs/extending.md says."""

import re
import shutil
from pathlib import Path

import pytest

from bench.mutations.copies import copy_tree, run_tests
from tests.conftest import REPOSITORY

SEVENTH = Path(__file__).parent / "seventh"
# Where each goes.
FILES = {
    "plain_torch_facts.py": "hpc_gpt/core/engines/plain_torch.py",
    "plain_torch_trainer.py": "hpc_gpt/trainer/engines/plain_torch.py",
    "plain_torch_tests.py": "tests/core/engines/test_plain_torch.py",
}
PAGE = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_three_files_are_an_engine(tmp_path: Path) -> None:
    """The tests of all engines take it, and the equality table has its cases: fp32 equals one plain process, bf16 is
    near, what is broken is found."""
    copy_tree(tmp_path)
    for name, place in FILES.items():
        assert not (tmp_path / place).exists()
        shutil.copy(SEVENTH / name, tmp_path / place)
    # The pairs of its values are none of the table's yet.
    chosen = "(plain_torch or plain-torch or bytes_are_numbers) and not every_pair_of_values"
    asked = ["-k", chosen, FILES["plain_torch_tests.py"]]
    asked += ["tests/core/engines/test_facts.py", "tests/planner/test_memory.py", "tests/distributed/test_equality.py"]
    code, output = run_tests(tmp_path, asked, long=True)
    assert code == 0, output[-5000:]
    assert re.search("^plain-torch tp1-pp1-dp2 fp32 ", output, re.MULTILINE), "the equality table has a line for it"


def test_the_page_has_the_files_as_they_are() -> None:
    for name in ("plain_torch_facts.py", "plain_torch_trainer.py"):
        assert f"```python\n{(SEVENTH / name).read_text(encoding='utf-8')}```" in PAGE, name
    assert all(f"`{place}`" in PAGE for place in FILES.values())
