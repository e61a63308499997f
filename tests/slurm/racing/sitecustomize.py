"""Python imports this at its start: rows of a race that fail, by their names.

A rank of row `oom` says that its memory ran out. One of row `hang` stands still from its second visit on. With
`WAIT_AT="ROW"` one of that row waits, until the folder of the race has a file `go`; so a test comes in time.
"""

import json
import os
import sys
import time
from pathlib import Path


def _row():
    run = Path(os.environ["HPC_GPT_RUN"])
    tables = json.loads((run / "resolved.json").read_text())
    return run.parents[1], tables["row"], tables.get("race")


if sys.orig_argv[1:3] == ["-m", "hpc_gpt.trainer.train"]:
    _race, _name, _ = _row()
    if _name == "oom":
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", file=sys.stderr, flush=True)
        sys.exit(1)
    if _name == "hang" and len(list(_race.glob("*-hang/*"))) > 1:
        time.sleep(10**6)
    if os.environ.get("WAIT_AT") == _name and (_race / "visits.jsonl").exists():
        (_race / f"waits-{os.environ.get('SLURM_PROCID', 0)}").touch()
        while not (_race / "go").exists():
            time.sleep(0.1)
