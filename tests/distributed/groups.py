"""The process groups of a launch that trains several engines: each begins with new ones, and the last one's end."""

import functools
import gc
import inspect
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class _OneLoop(dist.ProcessGroupGloo):
    """A group of gloo's that shares the thread of all groups of this process.

    By itself each group has a thread that looks for work 100 times a second, also a group that a library or a compiled
    function keeps after its case: of 200 such in a launch each rank takes 0.15 of a core, and more on some machines.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [_device()]
        options._threads = 2  # as by itself
        options._timeout = timeout
        super().__init__(store, rank, size, options)


@functools.cache
def _device() -> Any:
    return dist.ProcessGroupGloo.create_device(interface="lo")


def meet(folder: Path, name: str, world: int | None = None) -> None:
    """Makes the group of all ranks, or of the first `world`; `name` is new in the launch's folder each time."""
    distributed_c10d.ProcessGroupGloo = _OneLoop
    rank, world = int(os.environ["RANK"]), world or int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{name}", rank=rank, world_size=world)


def leave() -> NoReturn:
    """Ends the process."""
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then when the interpreter ends in the usual way


def forget() -> None:
    """Drops what engines keep in their modules and ends every process group, so that the next case finds nothing."""
    if "deepspeed" in sys.modules:
        _drop_deepspeed_engines()
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)
    # The engines go before the groups they use. A group whose last user is garbage ends within the collection, which
    # has Python's lock, and waits for a thread that may need the lock: ranks stood still, now and then, for good.
    gc.collect()
    if dist.is_initialized():
        _destroy_groups()
    # What is left stays: modules, and what libraries keep. Looking at it again took as long as a small case.
    gc.freeze()


def _destroy_groups() -> None:
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and deepspeed.comm.comm.cdb is not None:
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()


def _drop_deepspeed_engines() -> None:
    """Lets go of DeepSpeed's engines.

    They keep themselves alive by hooks in C++, and those of ZeRO-3 by a list and a cache of DeepSpeed's modules. Each
    would keep its tensors, its groups and their threads.
    """
    import deepspeed
    from deepspeed.runtime.zero import parameter_offload, partition_parameters, partitioned_param_coordinator

    # By type: isinstance asks what a weak reference points to, which may be gone.
    for engine in [one for one in gc.get_objects() if issubclass(type(one), deepspeed.DeepSpeedEngine)]:
        engine.destroy()
        vars(engine).clear()  # such as the loss, whose graph has a hook with the engine
    parameter_offload.FWD_MODULE_STACK.clear()
    coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
    releases = vars(coordinator)["_PartitionedParameterCoordinator__params_to_release"]
    inspect.getclosurevars(releases).nonlocals["func"].cache_clear()
    # Ranks that stood aside would count other modules and parameters.
    parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    partition_parameters.Init.param_id = 0
