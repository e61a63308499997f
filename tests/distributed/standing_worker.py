"""A rank that stands still in its first launch: see `test_ranks.py`."""

import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
(folder / "left").touch()
seen = folder.parent / f"seen-{os.environ['RANK']}"
if not seen.exists():
    seen.touch()
    time.sleep(1000)
print("done", flush=True)
