"""`python -m hpc_gpt.trainer.preflight.rank`: one rank of a preflight, on a node of the job. Takes no arguments.

Environment: HPC_GPT_RUN, HPC_GPT_ATTEMPT, SLURMD_NODENAME and SLURM_LOCALID. The rank prints its figures as lines on
stdout, and reads from stdin which nodes take part in the transfers; trainer/preflight/verdict.py describes the probe
protocol. It ends after at most HPC_GPT_PREFLIGHT_S seconds, always with exit code 0.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.network import LAZY_GLOO, choose_interface, describe_interfaces
from hpc_gpt.core.process import no_collections, raise_file_limit
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.preflight.transfers import plan_transfers
from hpc_gpt.trainer.preflight.verdict import COMMAND, encode, preflight_limit_s
from hpc_gpt.trainer.supervision.meeting import RankIdentity

if TYPE_CHECKING:
    import torch

Say = Callable[..., None]
# A transfer that takes longer is reported while it runs.
_LATE_S = 5.0


def main() -> None:
    node = os.environ.get("SLURMD_NODENAME") or platform.node()
    local = int(os.environ.get("SLURM_LOCALID", "0"))
    # A collective cannot be interrupted, so the whole process ends.
    last = threading.Timer(preflight_limit_s(), lambda: os._exit(0))
    last.daemon = True
    last.start()
    raise_file_limit()

    def say(**fields: Any) -> None:
        # One write for each line, because several ranks share a stream.
        for line in encode(node, local, **fields).splitlines(keepends=True):
            os.write(1, line.encode())

    say()
    try:
        _probe(node, local, say)
    except BaseException as fault:
        # No traceback in the log: a spare node may replace this one, and then the attempt has no fault.
        lines, name = str(fault).strip().splitlines()[:1], type(fault).__name__
        message = ": ".join(lines if name == "ProbeFailed" and lines else [name, *lines])
        say(failed=message, trace=traceback.format_exc()[-4000:])


def _probe(node: str, local: int, say: Say) -> None:
    run = RunFolder(Path(os.environ["HPC_GPT_RUN"]))
    attempt = run.attempt(int(os.environ["HPC_GPT_ATTEMPT"])).folder
    resolved = run.resolved()
    # The node of rank 0 is chosen later; until then each node holds a port for it.
    listener = None
    if local == 0:
        listener = socket.create_server(("", 0), backlog=4096)
        listener.set_inheritable(False)

    with no_collections():  # torch loads after the first line
        from hpc_gpt.trainer.preflight.measurements import figures_of_command, probe_device
        from hpc_gpt.trainer.ranks import choose_device

    replaced = figures_of_command(os.environ.get(COMMAND))
    device = choose_device(RankIdentity(local, resolved.gpus, local), resolved)
    figures = probe_device(resolved, device, attempt, node if local == 0 else None, replaced)
    say(figures=figures, port=listener.getsockname()[1] if listener else None)
    line = sys.stdin.readline()
    if not line:
        return
    plan = json.loads(line)
    if node in plan["nodes"]:
        os.environ.update(choose_interface(plan["host"], resolved.nodes))
        say(network=describe_interfaces())
        _measure_transfers(plan, node, local, resolved, device, replaced, listener, say)


class Tally:
    """The rates of a rank's transfers so far. They are sent at the end, and when a transfer takes long or fails."""

    def __init__(self, say: Say) -> None:
        self.rates: list[float] = []
        self._say = say
        self._late = threading.Timer(0, self.say)

    def begin(self) -> None:
        self._late = threading.Timer(_LATE_S, self.say)
        self._late.daemon = True
        self._late.start()

    def end(self, rate: float) -> None:
        self._late.cancel()
        self.rates.append(rate)

    def say(self) -> None:
        self._late.cancel()
        self._say(rates=self.rates)


def _measure_transfers(
    plan: dict[str, Any],
    node: str,
    local: int,
    resolved: Resolved,
    device: torch.device,
    replaced: dict[str, Any],
    listener: socket.socket | None,
    say: Say,
) -> None:
    # With this variable NCCL reports a lost rank after the timeout.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    os.environ.setdefault(*LAZY_GLOO)
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from hpc_gpt.trainer.preflight.measurements import PATIENCE_S, run_transfers
    from hpc_gpt.trainer.ranks import leave_out_slow_names

    places = [name for name in plan["nodes"] for _ in range(resolved.ranks_per_node)]
    rank, world = places.index(node) + local, len(places)
    patience = timedelta(seconds=PATIENCE_S)
    if rank == 0:
        leave_out_slow_names(plan["host"], world)
    store = TCPStore(
        plan["host"],
        plan["port"],
        world,
        is_master=rank == 0,
        timeout=patience,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if rank == 0 and listener is not None else None,
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
    # All ranks must make NCCL's first call together; afterwards some may use it without the others.
    dist.all_reduce(torch.ones(1, device=device))
    rounds = plan_transfers(resolved.layout, places)
    transfers = [transfer for together in rounds for transfer in together if rank in transfer.ranks]
    tally = Tally(say)
    try:
        run_transfers(transfers, rank, device, replaced, tally.begin, tally.end)
    except Exception:
        tally.say()
        raise
    say(rates=tally.rates, done=True)
    # Rank 0 holds the store, and the others may still be reading from it.
    store.set(f"done-{rank}", "1")
    if rank == 0:
        store.wait([f"done-{other}" for other in range(world)], patience)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an exit code of its own would make srun name this rank in the attempt's log
