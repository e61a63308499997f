"""A rank and its peers: the rendezvous, values shared between hosts, agreement at each step, the exit."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpc_gpt.core.ends.end_policy import REASONS
from hpc_gpt.core.errors import LayoutError
from hpc_gpt.core.files import write_once
from hpc_gpt.core.network import LAZY_GLOO, MEETING_S, OF_THE_STORE, without_name_servers
from hpc_gpt.core.process import no_collections
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.core.settings.devices import is_amd
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.directives import hides_gpus
from hpc_gpt.trainer.engines.library_patches import set_group_timeout
from hpc_gpt.trainer.model.context_parallel import ContextParallel, HeadsExchanged, KeysGathered, SequencePart
from hpc_gpt.trainer.model.dispatch import ExpertParallel
from hpc_gpt.trainer.supervision.meeting import RankIdentity, read_rendezvous

T = TypeVar("T")
_FAILED = "hpc-gpt/failed"
# A flight record has the collectives that are not over, and this many of the last ones.
_KEPT_COLLECTIVES = 20
_ANSWER_S = 3.0
_CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
_BUILD = {False: "with CUDA, and does nvidia-smi", True: "for ROCm, and does rocm-smi"}
# If looking up the names of all ranks takes longer, they are left out.
_NAMES_S = 10.0


def choose_device(identity: RankIdentity, resolved: Resolved) -> torch.device:
    """The rank's GPU; or the CPU if a local run has too few GPUs, or a Slurm run has none and its profile names no
    device. The only GPU that a rank sees is its own if srun gives each task one (`hides_gpus`).

    Raises LayoutError in any other case of too few GPUs: a job that silently trains on CPUs wastes its allocation.
    """
    environment = os.environ
    if torch.version.hip is not None and environment.get("ROCR_VISIBLE_DEVICES") == environment.get(_CUDA_VISIBLE):
        # Slurm without a list of AMD's GPUs sets both. HIP would choose among ROCR's by the numbers of the node.
        environment.pop(_CUDA_VISIBLE, None)
    visible = torch.cuda.device_count()
    if visible >= resolved.ranks_per_node:
        torch.cuda.set_device(identity.local_rank)
        return torch.device("cuda", identity.local_rank)
    profile = resolved.cluster
    if visible == 1 and profile.scheduler == "slurm" and any(map(hides_gpus, resolved.job.srun)):
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    if profile.scheduler == "local" or (not visible and profile.device in (None, "cpu")):
        return torch.device("cpu")
    if not visible:
        raise LayoutError(
            f"profile {profile.name} has GPUs ({profile.device}), but rank {identity.rank} sees none",
            f"is torch {torch.__version__} a build {_BUILD[is_amd(profile.device)]} list the GPUs within a job?",
        )
    raise LayoutError(
        f"{resolved.ranks_per_node} ranks on this node, but rank {identity.rank} sees {visible} of its GPUs",
        "request all GPUs of the node: gpu_flag and gpus_per_node in the cluster profile; or give each task its own: "
        'srun = ["--gpus-per-task=1", "--gpu-bind=closest"]',
    )


class Peers:
    """The ranks that share the work on a checkpoint. This class is a single process, as in `hpc-gpt export`."""

    rank = 0
    size = 1
    is_first = True

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on all ranks."""
        return value

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on all ranks."""
        return [value]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on rank 0; empty elsewhere. For values that grow with the ranks."""
        return [value]

    def barrier(self) -> None:
        """Waits until all ranks have called it."""

    def first_text(self, text: str) -> str:
        """The first non-empty `text` of any rank, after that rank's number and host; on all ranks. Empty if none."""
        texts = self.all_gather(text and f"rank {self.rank} of {os.uname().nodename} {text}")
        return next((text for text in texts if text), "")


class Ranks(Peers):
    """The ranks of a run after the rendezvous: the device's process group, and a gloo group between the hosts."""

    def __init__(self, identity: RankIdentity, device: torch.device, attempt: Attempt, patience_s: float) -> None:
        """Waits for the other ranks, at most 15 minutes.

        `patience_s` is the time limit of a collective in this group and in the groups that engines make. torch's limit
        for NCCL, 10 minutes, is too short: ranks wait for another one that starts, compiles or saves.
        """
        self.rank = identity.rank
        self.size = identity.size
        self.is_first = identity.rank == 0
        # DeepSpeed reads these names only, and takes the GPU with the number LOCAL_RANK.
        os.environ.update(identity.variables)
        if device.type == "cuda":
            os.environ["LOCAL_RANK"] = str(device.index or 0)
        os.environ.setdefault(*LAZY_GLOO)
        self._store = _meet(identity, attempt)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=self._store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=patience_s),
        )
        set_group_timeout(patience_s)
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))
        # One connection for all uses but collectives, because each is an open file on rank 0. Opened now: connecting
        # to a rank 0 that has died would take half a minute.
        self._failures = _client()
        self._asks = threading.Lock()
        self._leaving = False
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def broadcast(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control, device=torch.device("cpu"))
        return box[0]

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size if self.is_first else []
        with no_collections():
            dist.gather_object(value, values if self.is_first else None, dst=0, group=self.control)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def announce_failure(self, code: int) -> None:
        """Announces to the others that this rank has failed; they leave with the same exit code within seconds."""
        self._leaving = True
        if not self._asks.acquire(timeout=_ANSWER_S):
            return  # rank 0 does not answer `_watch`, so the others could not read the failure there either
        try:
            self._failures.set(_FAILED, f"{code} {self.rank}")
        except RuntimeError:
            return
        finally:
            self._asks.release()
        if self.is_first:
            # This process holds the store, and the others read it once per second.
            time.sleep(2.5)

    def _watch(self) -> None:
        """Ends this rank after another one has failed: it may be in a collective that will never end."""
        store = self._failures
        while not self._leaving:
            time.sleep(1)
            try:
                with self._asks:
                    code, rank = store.get(_FAILED).decode().split() if store.check([_FAILED]) else ("", "")
            except RuntimeError:
                # Rank 0 and its store are gone. If that was a failure, the launcher or a broken connection has this
                # time to report it.
                time.sleep(15)
                code, rank = "1", "0"
            if code and not self._leaving:
                leave(int(code), f"rank {self.rank} leaves: rank {rank} failed")

    def leave_together(self, code: int) -> NoReturn:
        """Ends the process in order: no rank leaves before all are done."""
        self._leaving = True
        self.barrier()
        if self.is_first:
            # The store ends with this process, and the others may still read from it in the barrier.
            time.sleep(0.2)
        leave(code)


@dataclass(frozen=True)
class StepReport:
    """The report of one rank at the end of a step; after the all-reduce, the reports of all ranks in one.

    `flags` are some of FLAGS: the reasons to end (`end_policy.REASONS`), `save` if a user has requested one, `save_due`
    by train.save_minutes, and `writing` while this rank writes its part of a checkpoint. `allocated_bytes` and
    `reserved_bytes` are peaks of device memory, one per pipeline stage; a rank sets those of its own stage and leaves
    the others 0.
    """

    flags: frozenset[str] = frozenset()
    allocated_bytes: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()


FLAGS = (*REASONS, "save", "save_due", "writing")


class Agreement:
    """Lets all ranks agree on their next action without waiting.

    At the end of each step every rank begins a small all-reduce of its `StepReport` over `group`, between the hosts,
    and reads the result of the all-reduce that it began one step before, which is complete by then. So no rank waits,
    and all ranks have the same result at the same step.
    """

    def __init__(self, group: dist.ProcessGroup, stages: int) -> None:
        self._group = group
        self._stages = stages
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def all_reduce(self, report: StepReport) -> StepReport:
        """Begins the all-reduce of this step's report, and returns the result of the one begun before."""
        agreed = self.finish()
        empty = (0,) * self._stages
        flags = [int(name in report.flags) for name in FLAGS]
        tensor = torch.tensor(
            [*flags, *(report.allocated_bytes or empty), *(report.reserved_bytes or empty)], dtype=torch.int64
        )
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = work, tensor
        return agreed

    def finish(self) -> StepReport:
        """Waits for the all-reduce that was begun last; an empty report if there is none."""
        if self._pending is None:
            return StepReport()
        work, tensor = self._pending
        self._pending = None
        work.wait()
        numbers = [int(number) for number in tensor.tolist()]
        flags = frozenset(name for name, number in zip(FLAGS, numbers, strict=False) if number > 0)
        peaks = numbers[len(FLAGS) :]
        return StepReport(flags, tuple(peaks[: self._stages]), tuple(peaks[self._stages :]))


def own_group(layout: Layout, axis: str, rank: int, alone: bool = False) -> dist.ProcessGroup | None:
    """This rank's process group along `axis` (see `Layout.groups`); None for a group of one rank, unless `alone`.
    Collective."""
    joined = None
    for ranks in layout.groups(axis):
        if len(ranks) > 1 or alone:
            group = dist.new_group(ranks, group_desc=axis)  # a flight record has its name
            joined = group if rank in ranks else joined
    return joined


def context_of(resolved: Resolved, rank: int) -> ContextParallel:
    """The rank's place in context parallelism. Collective."""
    layout = resolved.layout
    if layout.cp == 1:
        return ContextParallel()
    keys = resolved.engine.cp_exchange == "keys"
    part = SequencePart(layout.coordinate(rank).cp, layout.cp, paired=keys)
    return (KeysGathered if keys else HeadsExchanged)(part, own_group(layout, "cp", rank))


def experts_of(layout: Layout, rank: int) -> ExpertParallel:
    """The rank's place among those that divide the experts. Collective."""
    if layout.ep == 1:
        return ExpertParallel()
    return ExpertParallel(layout.data_rank(rank) % layout.ep, layout.ep, own_group(layout, "ep", rank))


def leave(code: int, message: str = "") -> NoReturn:
    """Ends the process without the interpreter's own clean-up, in which gloo sometimes aborts (pytorch#190489)."""
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _meet(identity: RankIdentity, attempt: Attempt) -> TCPStore:
    """Connects to the store of all ranks: at MASTER_ADDR and MASTER_PORT, or else on a free port of this machine.

    In the second case rank 0 takes a port and writes it to the attempt's `rendezvous` file, so that two runs at the
    same time cannot collide.
    """
    if "MASTER_PORT" not in os.environ:
        if identity.rank == 0:
            store = _store("127.0.0.1", 0, identity)
            write_once(attempt.rendezvous, f"127.0.0.1 {store.port}\n")
            host, port = "127.0.0.1", str(store.port)
        else:
            host, port = read_rendezvous(attempt)
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
        # All ranks are on this machine, whose own name may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if identity.rank == 0:
            return store
    return _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), identity)


def leave_out_slow_names(host: str, ranks: int) -> None:
    """Prepares this process to be the store of `ranks` ranks at `host`: if names are slow to look up, makes torch leave
    them out.

    For its own log torch looks up the name of each connection's other end, one after another. /etc/hosts does not help,
    because it has no IPv6 addresses that contain an IPv4 one. After a look-up that failed torch tries no further one
    (pytorch#159596), so one fails here on purpose.
    """
    try:
        mapped = socket.AI_V4MAPPED | socket.AI_ALL
        address = socket.getaddrinfo(host, 0, socket.AF_INET6, socket.SOCK_STREAM, 0, mapped)[0][4]
        began = time.monotonic()
        socket.getnameinfo(address, socket.NI_NUMERICSERV)
    except OSError:
        return  # torch will meet the same fault
    each_s = time.monotonic() - began
    if each_s * OF_THE_STORE * ranks > _NAMES_S:
        print(
            f"note: looking up the name of {address[0]} took {each_s:.2g} s: rank 0 leaves out the names of "
            f"{OF_THE_STORE * ranks:,} connections, which would take {each_s * OF_THE_STORE * ranks:,.0f} s",
            flush=True,
        )
        with without_name_servers():
            TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


def _store(host: str, port: int, identity: RankIdentity) -> TCPStore:
    if identity.rank == 0:
        leave_out_slow_names(host, identity.size)
    return TCPStore(
        host,
        port,
        identity.size,
        is_master=identity.rank == 0,
        timeout=timedelta(seconds=MEETING_S),
        wait_for_workers=False,
    )


def _client() -> TCPStore:
    """A connection of its own to the store: a shared one would wait for a blocking call of another thread."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=MEETING_S), wait_for_workers=False)
    # The long limit was for connecting, which many ranks do at the same time; later they ask one by one.
    store.set_timeout(timedelta(seconds=30))
    return store


def write_flight_record(attempt: Attempt, rank: int) -> None:
    """Writes this rank's flight record into the attempt's folder, if torch has one."""
    from torch._C import _distributed_c10d as c10d

    folder = attempt.folder / "flight"
    # A build without NCCL lacks its function. They are private: without them no record is written.
    dumps = [getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    for dump in filter(None, dumps):
        with contextlib.suppress(RuntimeError, ValueError, TypeError, OSError):
            record = json.loads(dump())
            if entries := record.get("entries"):
                open_ = [entry for entry in entries[:-_KEPT_COLLECTIVES] if not entry.get("retired")]
                record["entries"] = open_ + entries[-_KEPT_COLLECTIVES:]
                folder.mkdir(exist_ok=True)
                (folder / f"{rank}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
                return
