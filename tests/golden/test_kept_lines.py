"""What Slurm reads of each script stays as it was: the directives, and the step of the ranks, to the last character.

python -m tests.golden.test_kept_lines        after a change of one that is meant
"""

import hashlib
import re
from pathlib import Path

import pytest

from tests.golden.test_scripts import SCRIPTS

SUMS = Path(__file__).with_name("kept_lines.txt")
_RANKS = re.compile(r"^  run_ranks srun .*?-m hpc_gpt\.trainer\.train$", re.MULTILINE | re.DOTALL)


def kept_lines(name: str) -> str:
    """The directives and the ranks' srun line of a script."""
    script = SCRIPTS[name]()
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    return "\n".join([*directives, *_RANKS.findall(script)]) + "\n"


def _sum(name: str) -> str:
    return hashlib.sha256(kept_lines(name).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", SCRIPTS)
def test_slurm_reads_what_it_has_read(name: str) -> None:
    assert f"{name} {_sum(name)}" in SUMS.read_text().splitlines(), kept_lines(name)


def test_each_script_of_ranks_has_one_step_of_theirs() -> None:
    without = {name for name in SCRIPTS if name.startswith(("array", "job-script")) or name.endswith("local")}
    without |= {"stage-warm"}  # of this machine
    assert {name for name in SCRIPTS if len(_RANKS.findall(SCRIPTS[name]())) != 1} == without


if __name__ == "__main__":
    SUMS.write_text("".join(f"{name} {_sum(name)}\n" for name in SCRIPTS))
