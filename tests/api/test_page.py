"""The examples of docs/python.md, run whole, in the order of the page, in one process of their own; then that of
docs/how-do-i.md."""

import os
import re
import subprocess
import sys

import pytest

from tests.docs.pages import blocks


@pytest.mark.long  # each function is in test_api.py
def test_the_page_runs_from_top_to_bottom(tmp_path):
    examples = blocks("docs/python.md", "python") + blocks("docs/how-do-i.md", "python")
    environment = {name: value for name, value in os.environ.items() if name != "HPC_GPT_LOGS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(examples)],
        cwd=tmp_path, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert re.match(r"tp\d+-pp\d+-dp\d+ \S+ \d+\n[\d,]+ tokens/s, \d+%, [\d.]+ GiB of a GPU\n", done.stdout), (
        done.stdout
    )
    assert "\ndone " in done.stdout
    assert "does not fit on 1 " in done.stdout
