"""The figure that docs/extending.md adds, in a copy of the tree: one row, and its name among Megatron's, are enough."""

import os
import shutil
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.docs.pages import blocks
from tests.programs import python

LINE = (
    " iteration {step:8d}/     100 | elapsed time per iteration (ms): 500.0 | global batch size:     8 |"
    " lm loss: 3.5E+00 | router entropy: 1.25 |\n"
)
READ = """
import sys
from pathlib import Path
import hpc_gpt
assert Path(hpc_gpt.__file__).is_relative_to(Path.cwd()), hpc_gpt.__file__
from hpc_gpt.__main__ import main
sys.argv = ["hpc-gpt", *sys.argv[1:]]
main()
"""


def test_a_row_is_a_figure_in_every_output(tmp_path: Path) -> None:
    (row,) = [block for block in blocks("docs/extending.md", "python") if block.startswith("router_entropy: ")]
    for name in ("hpc_gpt", "templates"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    _replace(
        tmp_path / "hpc_gpt/core/runs/record.py",
        "    expert_load: ",
        "".join(f"    {line}\n" for line in row.splitlines()),
    )
    _replace(tmp_path / "hpc_gpt/reader/programs/megatron.py", "    z_loss expert_load=", "    router_entropy\n")
    (tmp_path / "run.log").write_text("".join(LINE.format(step=step) for step in range(1, 9)))
    for words, begin, figure in (
        (["report", "run.log", "--json"], '"router_entropy"', " 1.25"),
        (["report", "run.log", "--format", "csv"], "router_entropy", "1.25"),
        (["report", "run.log", "--columns", "run,router_entropy"], "Router entropy", "1.25"),
        (["help", "router_entropy"], "router_entropy", "Entropy of the router's choice at the last step."),
    ):
        done = python("-c", READ, *words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, code=0)
        assert begin.lower() in done.stdout.lower(), (words, done.stdout)
        assert figure in done.stdout, (words, done.stdout)


def _replace(path: Path, before: str, text: str) -> None:
    """Puts a text before the only line of a file that begins so."""
    source = path.read_text(encoding="utf-8")
    assert source.count(f"\n{before}") == 1
    path.write_text(source.replace(f"\n{before}", f"\n{text}{before}"), encoding="utf-8")
