"""Light ranks: processes that meet, agree once a step and leave as the trainer's ranks do, and train nothing.

    python -m tests.distributed.light_ranks N [--files SOFT[:HARD]] [--steps S]

All are forked from one process that has imported torch, at 8 MB each, so that a thousand fit on a small machine. stdout
gets one JSON object: exit codes, seconds to meet and for a step, open files of rank 0 and the most of another, memory
that they do not share, CPU seconds. `--files` limits open files first, as `ulimit -n` does.
"""

import argparse
import collections
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.network import check_open_files
from hpc_gpt.core.process import raise_file_limit
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.trainer.supervision.meeting import RankIdentity

PATIENCE_S = 300.0
LIMIT_S = 300


def run_rank(rank: int, size: int, folder: Path, steps: int) -> None:
    """One rank, to its end; rank 0 writes what all have found to the folder."""
    import torch

    from hpc_gpt.trainer.ranks import Agreement, Ranks, StepReport

    raise_file_limit()
    began = time.monotonic()
    ranks = Ranks(RankIdentity(rank, size, rank), torch.device("cpu"), Attempt(folder), PATIENCE_S)
    ranks.barrier()
    met = time.monotonic()
    agreement = Agreement(ranks.control, 1)
    for step in range(steps):
        asked = frozenset({"save"} if rank == size - 1 and step == steps - 2 else ())
        agreed = agreement.all_reduce(StepReport(asked, (rank,), (rank,)))
    assert (*agreed.flags, *agreed.allocated_bytes) == ("save", size - 1)
    stepped = time.monotonic()
    every = ranks.gather((open_files(), private_mib(), time.process_time()))
    if ranks.is_first:
        files, memory, seconds = zip(*every, strict=True)
        found = {
            "meet_s": round(met - began, 2), "step_s": round((stepped - met) / steps, 4),
            "files_of_rank_0": open_files(), "files_of_others": max(files[1:]),
            "memory_mib": round(sum(memory)), "cpu_s": round(sum(seconds), 1),
        }  # fmt: skip
        (folder / "found.json").write_text(json.dumps(found))
    ranks.leave_together(0)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def private_mib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("--files", default="")
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    if asked.files:
        soft, _, hard = asked.files.partition(":")
        limits = (int(soft), int(hard or resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    try:
        check_open_files(asked.ranks)
    except UserError as fault:
        sys.exit(f"Error: {fault}\n\nhint: {fault.hint}")
    os.environ.pop("MASTER_PORT", None)
    # torch asks for the name of each address; a name server that is asked a thousand times at once leaves some out.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1 use-vc"
    __import__("hpc_gpt.trainer.ranks")
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as name:
        pids = []
        for rank in range(asked.ranks):
            if (pid := os.fork()) == 0:
                try:
                    run_rank(rank, asked.ranks, Path(name), asked.steps)
                except BaseException as fault:
                    sys.stderr.write(f"rank {rank}: {type(fault).__name__}: {fault}\n"[:300])
                    os._exit(1)
            pids.append(pid)
        codes: collections.Counter[int] = collections.Counter()

        def end(*_: object) -> None:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        signal.signal(signal.SIGALRM, end)
        signal.alarm(LIMIT_S + 2 * asked.ranks)  # those that never meet wait for 15 minutes
        while pids:
            pid, status = os.wait()
            pids.remove(pid)
            if status and not any(codes):
                end()
            codes[os.waitstatus_to_exitcode(status)] += 1
        found = Path(name) / "found.json"
        print(json.dumps({"codes": codes, **(json.loads(found.read_text()) if found.exists() else {})}))
        sys.exit(int(any(codes)))


if __name__ == "__main__":
    main()
