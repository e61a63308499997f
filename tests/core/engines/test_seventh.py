"""A seventh engine is the three files in `seventh`, and no edit elsewhere, as docs/extending.md says."""

import shutil
from pathlib import Path

from tests import ALL_TESTS
from tests.conftest import REPOSITORY
from tests.mutations.copies import copy_tree, run_tests

SEVENTH = Path(__file__).parent / "seventh"
# Where each goes.
FILES = {
    "plain_torch_facts.py": "hpc_gpt/core/engines/plain_torch.py",
    "plain_torch_trainer.py": "hpc_gpt/trainer/engines/plain_torch.py",
    "plain_torch_tests.py": "tests/core/engines/test_plain_torch.py",
}
# The equality table's cases of every engine, in `make test-all`: fp32 equals one plain process, bf16 is near, what is
# broken is found.
_CASE = "plain-torch tp1-pp1-dp2"
CASES = (
    f"test_fp32_equals_one_plain_process[{_CASE} fp32 adamw m2 clip0.25]",
    f"test_half_is_near[{_CASE} bf16 adamw m2 clip0.25]",
    f"test_a_missing_collective_or_wrong_scale_fails[{_CASE} fp32 adamw m2, without the right gradient scale]",
)
PAGE = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")


def test_three_files_are_an_engine(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    for name, place in FILES.items():
        assert not (tmp_path / place).exists()
        shutil.copy(SEVENTH / name, tmp_path / place)
    cases = [f"tests/distributed/test_equality.py::{case}" for case in CASES if ALL_TESTS]
    asked = ["-k", "plain_torch or plain-torch or bytes_are_numbers or is_covered", FILES["plain_torch_tests.py"]]
    asked += ["tests/core/engines/test_facts.py", "tests/planner/test_memory.py", *cases]
    code, output = run_tests(tmp_path, asked, long=ALL_TESTS)
    assert code == 0, output[-5000:]
    assert output.count(f"\n{_CASE} ") == len(cases), "the equality table has a line for each case"


def test_the_page_has_the_files_as_they_are() -> None:
    for name in ("plain_torch_facts.py", "plain_torch_trainer.py"):
        assert f"```python\n{(SEVENTH / name).read_text(encoding='utf-8')}```" in PAGE, name
    assert all(f"`{place}`" in PAGE for place in FILES.values())
