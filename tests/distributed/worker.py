"""One rank of a launch: its tasks one after the other, each from a clean start; rank 0 writes what they give.

Run as a module with RANK, WORLD_SIZE, LOCAL_RANK and the launch's folder as argument. What to run lies there as
`tasks.pickle`, and `begin` says where in it; each result is written when it is there, so that a rank that dies takes
no other result with it.
"""

import json
import os
import pickle
import sys
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from tests.distributed.groups import forget, leave, meet

_ALL_FAIL_S = 20.0  # ranks that fail of one cause do so at about the same time
# A group of gloo's that outlives its task keeps two threads.
_THREADS_LEFT = 10  # by a task, on average; fsdp with tensor parallelism leaves 4


def redirect(file: Path) -> None:
    """Sends all that is printed from here on to `file`."""
    sys.stdout.flush()
    sys.stderr.flush()
    with file.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tasks = pickle.loads((folder / "tasks.pickle").read_bytes())
    first = int((folder / "begin").read_text())
    for number in range(first, len(tasks)):
        redirect(folder / f"{number}.output-{rank}")
        meet(folder, str(number))
        function, given = tasks[number]
        try:
            found = function(folder, *given)
            if rank == 0:
                (folder / f"{number}.json").write_text(json.dumps(found))
            dist.barrier()
        except Exception:
            (folder / f"{number}.failed-{rank}").write_text(traceback.format_exc())
            deadline = time.monotonic() + _ALL_FAIL_S
            while len(list(folder.glob(f"{number}.failed-*"))) < world:
                if time.monotonic() > deadline:
                    os._exit(1)
                time.sleep(0.1)
        forget()
        threads = len(os.listdir("/proc/self/task"))
        if threads > 30 + _THREADS_LEFT * (number - first):
            (folder / f"{number}.failed-{rank}").write_text(f"{threads} threads are left: engines outlive their cases")
    (folder / f"done-{rank}").touch()
    while len(list(folder.glob("done-*"))) < world:
        time.sleep(0.02)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
