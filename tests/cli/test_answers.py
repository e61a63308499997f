"""What verbs print when they succeed, whole. A block of `answers/*.txt` is as in `refused/*.txt`, but below a command
stand its lines of stdout, after `1 `, and of stderr, after `2 `; below `@ FILE` the text of a file that it wrote.
No Slurm is there. A dry run writes nothing. These files are changed by hand.
"""

import contextlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.cli.command import in_process, without_slurm
from tests.cli.test_refused import all_files, made_run, write_files
from tests.conftest import REPOSITORY

FILES = sorted((Path(__file__).parent / "answers").glob("*.txt"))
# What differs from one machine or day to the next, beside the space for checkpoints.
VARIES = {r"[\d.,]+ [GT]iB free": "N GiB free", r"done by [\d-]+ [\d:]+ [A-Z]+": "done by DATE"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_is_answered_so(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_gpt.core.checkpoints.disk_space.free_gib", lambda _: 57.0)
    here, tools = tmp_path / "here", without_slurm(tmp_path) | {"HPC_GPT_DATA": str(tmp_path / "data")}
    here.mkdir()
    places = {str(here): "HERE", str(tmp_path): "ABOVE", sys.executable: "PYTHON", str(REPOSITORY): "REPOSITORY"}
    for block in file.read_text(encoding="utf-8").strip().split("\n\n"):
        given = [line for line in block.split("\n") if not re.match(r"[12]( |$)", line)]
        write_files(given, here)
        with contextlib.chdir(here):
            ids = {name: made_run(words) for name, *words in (line[2:].split() for line in given if line[0] == "&")}
        lines = []
        for line in given:
            lines.append(line)
            if line[0] == "@":
                lines += [f"1 {each}".rstrip() for each in (here / line[2:]).read_text(encoding="utf-8").splitlines()]
            elif line[0] in "!$":
                words = [ids.get(word, word) for word in shlex.split(line[2:])]
                before = all_files(here)
                done = in_process(*words, cwd=here, environment=tools, code=0)
                assert "--dry-run" not in words or all_files(here) == before, line
                for stream, printed in ((1, done.stdout), (2, done.stderr)) if line[0] == "$" else ():
                    lines += [f"{stream} {each}".rstrip() for each in printed.splitlines()]
        text = "\n".join(lines)
        for place, name in (places | {run_id: name for name, run_id in ids.items()}).items():
            text = text.replace(place, name)
        for pattern, word in VARIES.items():
            text = re.sub(pattern, word, text)
        assert text.split("\n") == block.split("\n")
