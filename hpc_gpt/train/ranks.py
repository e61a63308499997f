"""One rank among the others: who it is, how they meet, how they talk beside the device, how they leave."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpc_gpt.errors import ConfigError, LayoutError
from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.small_files import write_once

T = TypeVar("T")
_MEETING_S = 900
_FAILED = "hpc-gpt/failed"
_IDENTITIES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID"),
)


@dataclass(frozen=True)
class RankIdentity:
    """`rank` of `size`, and its place on its node."""

    rank: int
    size: int
    local_rank: int


def identify(environment: Mapping[str, str]) -> RankIdentity:
    """Who this rank is, from RANK, WORLD_SIZE and LOCAL_RANK, else from Slurm's or submitit's names for them.

    ConfigError where the environment says nothing; the only rank of one where it is started by hand is RANK=0.
    """
    for names in _IDENTITIES:
        values = [environment.get(name, "") for name in names]
        if all(value.isdigit() for value in values):
            return RankIdentity(*map(int, values))
    raise ConfigError(
        "this process is no rank of a run: RANK, WORLD_SIZE and LOCAL_RANK are not set",
        "start runs with hpc-gpt submit, or sbatch job.sh",
    )


def choose_device(identity: RankIdentity, resolved: Resolved) -> torch.device:
    """The rank's GPU; the CPU where a local run has too few, or a Slurm one none and its profile names no device.

    Else too few GPUs are an error: a job that quietly trains on CPUs wastes its allocation.
    """
    found = torch.cuda.device_count()
    if found >= resolved.ranks_per_node:
        torch.cuda.set_device(identity.local_rank)
        return torch.device("cuda", identity.local_rank)
    profile = resolved.cluster
    if profile.scheduler == "local" or (not found and profile.device in (None, "cpu")):
        return torch.device("cpu")
    if not found:
        raise LayoutError(
            f"profile {profile.name} has GPUs ({profile.device}), but rank {identity.rank} sees none",
            f"is torch {torch.__version__} a build with CUDA, and does nvidia-smi list the GPUs within a job?",
        )
    raise LayoutError(
        f"{resolved.ranks_per_node} ranks on this node, but {found} GPUs are visible to rank {identity.rank}",
        "ask for the node's GPUs: gpu_flag and gpus_per_node of the cluster profile",
    )


class Ranks:
    """The ranks of a run, met: the process group of the device, and a gloo group beside it for words between hosts."""

    def __init__(
        self, identity: RankIdentity, device: torch.device, attempt: Attempt, patience_s: float | None = None
    ) -> None:
        """Meets the other ranks; blocks until all are there, 15 minutes at most.

        `patience_s` is how long words between hosts may wait for the slowest, as for one that saves; torch's own half
        hour where it is None.
        """
        self.rank = identity.rank
        self.size = identity.size
        self.is_first = identity.rank == 0
        # DeepSpeed reads these and nothing else.
        os.environ.update(RANK=str(identity.rank), WORLD_SIZE=str(identity.size), LOCAL_RANK=str(identity.local_rank))
        self._store = _meet(identity, attempt)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl", store=self._store, rank=self.rank, world_size=self.size
        )
        self.control = dist.new_group(
            backend="gloo", timeout=None if patience_s is None else timedelta(seconds=patience_s)
        )
        # Opened now: where rank 0 has died, a new connection would be tried for half a minute.
        self._failures = _client()
        self._leaving = False
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def share(self, value: T) -> T:
        """Rank 0's value, on all ranks."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on all ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def collect(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on rank 0; nothing on the others. For what grows with the ranks."""
        values: list[Any] = [None] * self.size if self.is_first else []
        dist.gather_object(value, values if self.is_first else None, dst=0, group=self.control)
        return values

    def deal(self, values: Sequence[T]) -> T:
        """This rank's of rank 0's values, of which it has one for each rank."""
        own: list[T | None] = [None]
        dist.scatter_object_list(own, list(values) if self.is_first else None, src=0, group=self.control)
        return cast(T, own[0])

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def announce_failure(self, code: int) -> None:
        """Tells the others that this rank cannot go on; they leave with the same exit code within seconds."""
        self._leaving = True
        try:
            self._failures.set(_FAILED, f"{code} {self.rank}")
        except RuntimeError:
            return
        if self.is_first:
            # This process holds the store; the others look once a second.
            time.sleep(2.5)

    def _watch(self) -> None:
        """Leaves when another rank has failed: this one may stand in a collective that will never end."""
        store = _client()
        while not self._leaving:
            time.sleep(1)
            try:
                code, rank = store.get(_FAILED).decode().split() if store.check([_FAILED]) else ("", "")
            except RuntimeError:
                # Rank 0 is gone, and its store with it. If that was no orderly end, the launcher and the
                # broken connections have had their chance to say so.
                time.sleep(15)
                code, rank = "1", "0"
            if code and not self._leaving:
                leave(int(code), f"rank {self.rank} leaves: rank {rank} failed")

    def leave_together(self, code: int) -> NoReturn:
        """The orderly end: nobody goes before all are done."""
        self._leaving = True
        self.barrier()
        if self.is_first:
            # The store goes with this process, and the others may still be reading the barrier's last word.
            time.sleep(0.2)
        leave(code)


def leave(code: int, words: str = "") -> NoReturn:
    """Ends the process without the interpreter's own tidying, in which gloo aborts now and then (pytorch#190489)."""
    if words:
        print(words, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _meet(identity: RankIdentity, attempt: Attempt) -> TCPStore:
    """The store that all ranks share: at MASTER_ADDR and MASTER_PORT, else on a free port of this machine.

    In the second case rank 0 takes the port and says so in the attempt's `rendezvous` file, so that two runs at once
    cannot collide.
    """
    if "MASTER_PORT" not in os.environ:
        if identity.rank == 0:
            store = _store("127.0.0.1", 0, identity)
            write_once(attempt.rendezvous, f"127.0.0.1 {store.port}\n")
            host, port = "127.0.0.1", str(store.port)
        else:
            host, port = _read_rendezvous(attempt)
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
        # All ranks are on this machine, whose own name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if identity.rank == 0:
            return store
    return _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), identity)


def _store(host: str, port: int, identity: RankIdentity) -> TCPStore:
    return TCPStore(
        host,
        port,
        identity.size,
        is_master=identity.rank == 0,
        timeout=timedelta(seconds=_MEETING_S),
        wait_for_workers=False,
    )


def _client() -> TCPStore:
    """A connection of one's own: one shared with a blocking call would wait for it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)


def _read_rendezvous(attempt: Attempt) -> tuple[str, str]:
    until = time.monotonic() + _MEETING_S
    while time.monotonic() < until:
        if attempt.ended():
            break
        try:
            host, port = attempt.rendezvous.read_text(encoding="utf-8").split()
        except FileNotFoundError:
            time.sleep(0.05)
        else:
            return host, port
    raise TimeoutError(f"rank 0 has ended, or not written {attempt.rendezvous} in {_MEETING_S} s")
