"""A further optimizer is the three files in `fourth`, and no edit elsewhere, as docs/extending.md says."""

import shutil
from pathlib import Path

import pytest

from bench.mutations.copies import copy_tree, run_tests

FOURTH = Path(__file__).parent / "fourth"
# Where each goes.
FILES = {
    "sign_sgd_facts.py": "hpc_gpt/core/optimizers/sign_sgd.py",
    "sign_sgd_trainer.py": "hpc_gpt/trainer/optimizers/sign_sgd.py",
    "sign_sgd_tests.py": "tests/core/optimizers/test_sign_sgd.py",
}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_three_files_are_an_optimizer(tmp_path: Path) -> None:
    """It is in the help and in plans, and trains in engines of each kind."""
    copy_tree(tmp_path)
    for name, place in FILES.items():
        assert not (tmp_path / place).exists()
        shutil.copy(FOURTH / name, tmp_path / place)
    code, output = run_tests(tmp_path, [FILES["sign_sgd_tests.py"], "tests/core/optimizers/test_facts.py"], long=True)
    assert code == 0, output[-5000:]
