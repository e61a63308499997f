"""The programs of docs/extending.md, put among the others as they stand: each is found, and its lines are read."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.reader import programs
from hpc_gpt.reader.failures.failure_families import failure_family
from tests.cli.command import hpc_gpt
from tests.conftest import REPOSITORY
from tests.docs.pages import blocks
from tests.programs import python
from tests.reader.reading import SPECIMENS

PAGE = (REPOSITORY / "docs/extending.md").read_text(encoding="utf-8")
MODULE, ROW = (
    next(block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if begin in block)
    for begin in ("DIALECT = Dialect(", 'Dialect("acme", ')
)
(SPECIMEN,) = re.findall(r"^```text\n(# seen: .*\n(?:.+\n)+)```", PAGE, re.MULTILINE)
READ = """
import json, sys
from hpc_gpt.reader import programs
programs.__path__.insert(0, sys.argv[1])
from hpc_gpt.report.gather import gather_paths
from pathlib import Path
log = Path(sys.argv[1]) / "train.log"
log.write_text(sys.argv[2] + "step 20: loss 3.1000, 800.0 ms\\nstep 30: loss 3.0000, 820.0 ms\\n")
print(json.dumps(gather_paths([str(log)], Path(sys.argv[1])).records[0].to_tables()))
"""


PLACES = """
import sys
from pathlib import Path
from hpc_gpt.reader import programs
programs.__path__.append(str(Path(__file__).parent / "programs"))
if "pytest" in sys.orig_argv:
    from tests.reader import reading
    reading.SPECIMENS = Path(__file__).parent / "specimens"
"""


def test_the_pages_commands_try_the_dialect_as_they_stand(tmp_path):
    (commands,) = re.findall(r"^```sh\n(python -m pytest .*acme\n(?:.*\n)*?)```", PAGE, re.MULTILINE)
    for folder in ("programs", "specimens"):
        (tmp_path / folder).mkdir()
    for file in SPECIMENS.iterdir():
        (tmp_path / "specimens" / file.name).symlink_to(file)
    (tmp_path / "specimens" / "acme.txt").write_text(SPECIMEN)
    (tmp_path / "programs" / "acme.py").write_text(MODULE)
    (tmp_path / "acme.log").write_text(SPECIMEN.partition("\n")[2])
    (tmp_path / "sitecustomize.py").write_text(PLACES)
    first, second = commands.splitlines()
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "PYTEST_ADDOPTS": "-p no:cacheprovider -q"}
    words, places = [sys.executable, *first.split()[1:]], os.environ | environment
    done = subprocess.run(words, cwd=REPOSITORY, env=places, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    report = hpc_gpt(*second.split()[1:], cwd=tmp_path, environment=environment, code=0)
    assert json.loads(report.stdout)["records"][0]["dialect"] == "acme"


def test_the_pages_family_of_failures_is_read():
    (block,) = [each for each in blocks("docs/extending.md", "python") if each.startswith("failure_family(")]
    patterns = eval(block, {"failure_family": failure_family})
    assert len(patterns) == 3
    for line in ("TooManyFiles: of one rank", "OSError: [Errno 24] Too many open files: 'a.bin'"):
        messages = [re.search(pattern.regex, line) for pattern in patterns if pattern.literal in line]
        assert [each["words"] for each in messages if each] == [line] * len(messages) != []


@pytest.mark.parametrize("as_row", [False, True], ids=["a module", "a row"])
def test_the_pages_program_is_found_and_read(tmp_path, as_row):
    if as_row:
        of_others = Path(programs.__path__[0], "small_programs.py").read_text(encoding="utf-8")
        text = of_others.rstrip().removesuffix(")  # fmt: skip") + ROW + ")\n"
        (tmp_path / "small_programs.py").write_text(text, encoding="utf-8")
    else:
        (tmp_path / "acme.py").write_text(MODULE)
    assert len((ROW if as_row else MODULE).splitlines()) <= 20
    done = python("-c", READ, tmp_path, SPECIMEN.partition("\n")[2], code=0)
    record = json.loads(done.stdout)
    assert (record["dialect"], record["engine"], record["gpus"]) == ("acme", "acme", 8)
    assert (record["global_batch"], record["loss_last"]) == (64, 3.0)
    assert record["step_s"] == 0.81
