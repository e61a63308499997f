"""Python imports this at its start: with `WAIT_AT="ROW"` a rank of that row of a race waits, until the folder of the
race's runs has a file `go`; so a test comes in time."""

import json
import os
import sys
import time
from pathlib import Path

if sys.orig_argv[1:3] == ["-m", "hpc_gpt.trainer"]:
    _run = Path(os.environ["HPC_GPT_RUN"])
    _runs, _name = _run.parent, json.loads((_run / "resolved.json").read_text())["row"]
    if os.environ.get("WAIT_AT") == _name:
        (_runs / f"waits-{os.environ.get('SLURM_PROCID', 0)}").touch()
        while not (_runs / "go").exists():
            time.sleep(0.1)
