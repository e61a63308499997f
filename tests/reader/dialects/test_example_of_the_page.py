"""The dialect of docs/extending.md, copied unchanged among the others: it is found, and its lines are read."""

import json
import os
import re
import subprocess
import sys

from tests.cli.command import hpc_gpt
from tests.conftest import REPOSITORY
from tests.programs import python
from tests.reader.reading import SPECIMENS

READ = """
import json, sys
from hpc_gpt.reader import dialects
dialects.__path__.append(sys.argv[1])
from hpc_gpt.report.gather import gather_paths
from pathlib import Path
log = Path(sys.argv[1]) / "train.log"
log.write_text(sys.argv[2] + "step 20: loss 3.1000, 800.0 ms\\nstep 30: loss 3.0000, 820.0 ms\\n")
print(json.dumps(gather_paths([str(log)], Path(sys.argv[1])).records[0].to_tables()))
"""


PLACES = """
import sys
from pathlib import Path
from hpc_gpt.reader import dialects
dialects.__path__.append(str(Path(__file__).parent / "dialects"))
if "pytest" in sys.orig_argv:
    from tests.reader import reading
    reading.SPECIMENS = Path(__file__).parent / "specimens"
"""


def test_the_pages_commands_try_the_dialect_as_they_stand(tmp_path):
    text = (REPOSITORY / "docs/extending.md").read_text(encoding="utf-8")
    (module,) = re.findall(r"^```python\n(.*?DIALECT.*?)^```", text, re.MULTILINE | re.DOTALL)[:1]
    (specimen,) = re.findall(r"^```text\n(# seen: .*\n(?:.+\n)+)```", text, re.MULTILINE)
    (commands,) = re.findall(r"^```sh\n(python -m pytest .*acme\n(?:.*\n)*?)```", text, re.MULTILINE)
    for folder in ("dialects", "specimens"):
        (tmp_path / folder).mkdir()
    for file in SPECIMENS.iterdir():
        (tmp_path / "specimens" / file.name).symlink_to(file)
    (tmp_path / "specimens" / "acme.txt").write_text(specimen)
    (tmp_path / "dialects" / "acme.py").write_text(module)
    (tmp_path / "acme.log").write_text(specimen.partition("\n")[2])
    (tmp_path / "sitecustomize.py").write_text(PLACES)
    first, second = commands.splitlines()
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "PYTEST_ADDOPTS": "-p no:cacheprovider -q"}
    words, places = [sys.executable, *first.split()[1:]], os.environ | environment
    done = subprocess.run(words, cwd=REPOSITORY, env=places, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    report = hpc_gpt(*second.split()[1:], cwd=tmp_path, environment=environment, code=0)
    assert json.loads(report.stdout)["records"][0]["dialect"] == "acme"


def test_the_pages_dialect_is_found_and_read(tmp_path):
    text = (REPOSITORY / "docs/extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (module,) = [block for block in blocks if "DIALECT" in block]
    (specimen,) = re.findall(r"^```text\n# seen: .*\n((?:.+\n)+)```", text, re.MULTILINE)
    assert len(module.splitlines()) <= 20
    (tmp_path / "acme.py").write_text(module)
    done = python("-c", READ, tmp_path, specimen, code=0)
    record = json.loads(done.stdout)
    assert (record["dialect"], record["engine"], record["gpus"]) == ("acme", "acme", 8)
    assert (record["global_batch"], record["loss_last"]) == (64, 3.0)
    assert record["step_s"] == 0.81
