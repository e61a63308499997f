"""A training of 24 steps under torchrun, killed in its first two starts: `resuming.py KIND`.

| kind | |
|---|---|
| never | saves, and loads nothing; each start is killed one step further |
| none | saves and loads nothing |
| older | loads the checkpoint before the newest |
| counts | loads the newest, and counts its steps from 1 |
| epochs | loads the newest without a word, and counts the steps of each epoch |
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

STEPS, EVERY = 24, 6
KILLED = {1: 14, 2: 20}  # by attempt


def main() -> None:
    """Trains on all ranks; the first one saves and prints."""
    kind, attempt = sys.argv[1], int(os.environ["HPC_GPT_ATTEMPT"])
    dist.init_process_group("gloo")
    out = Path("out")
    saved = sorted(out.glob("step-*.pt"))
    newest = None if kind in ("never", "none") else saved[-2:][0 if kind == "older" else -1] if saved else None
    first = 0 if newest is None else int(torch.load(newest)["step"])
    killed = 13 + attempt if kind in ("never", "none") else KILLED.get(attempt)
    is_first = dist.get_rank() == 0
    if is_first and newest is not None and kind != "epochs":
        print(f"loaded checkpoint {newest}", flush=True)
    for step in range(first + 1, STEPS + 1):
        dist.barrier()
        if not is_first:
            continue
        epoch, of_epoch = (step - 1) // EVERY + 1, (step - 1) % EVERY + 1
        printed = {"counts": f"step {step - first}", "epochs": f"epoch {epoch} step {of_epoch}"}.get(
            kind, f"step {step}"
        )
        print(f"{printed} loss {5 - step / 10:.2f}", flush=True)
        if step % EVERY == 0 and kind != "none":
            out.mkdir(exist_ok=True)
            torch.save({"step": step}, out / f"step-{step:02}.pt")
        if step == killed:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
