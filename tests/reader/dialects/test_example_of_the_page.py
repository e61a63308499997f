"""The dialect of docs/extending.md, copied unchanged among the others: it is found, and its lines are read."""

import json
import re

from tests.conftest import REPOSITORY
from tests.programs import python

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
