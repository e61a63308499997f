"""Adapts DeepSpeed to our engines: imports it for the right device, silently, and changes some of what it does.

Its checkpoints go through a checkpoint engine of our own, which adds the files to `RankFiles` instead of writing them,
and reads them as data alone. So the files are the same, but no rank can find the disk full between two barriers. The
other changes save memory; `private_parts` lists the names that they need.
"""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hpc_gpt.core.process import no_collections
from hpc_gpt.trainer.train.checkpoints.folders import load_safely
from hpc_gpt.trainer.train.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.train.engines import private_parts

# The folder of DeepSpeed's part of a checkpoint.
TAG = "deepspeed"


def import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed for the device, silently, and so that it compiles nothing.

    Raises ConfigError if this version would compile something.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    with quiet():
        with no_collections():
            import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # DeepSpeed calls collectives by names that torch has deprecated.
        warnings.filterwarnings("ignore", message=".*torch.distributed.*deprecated", category=FutureWarning)
        if device.type == "cpu":
            # Its shared-memory all-reduce needs a compiler and leaks 69 MB of /dev/shm a rank; gloo is used instead.
            private_parts.require(private_parts.CPU_SETUP)
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context that discards what DeepSpeed prints during set-up, saves and loads; its errors are exceptions."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


class NamedFiles:
    """A checkpoint engine for DeepSpeed that adds files to `RankFiles` instead of writing them; see `plug_in`."""

    files: RankFiles | None = None
    root = ""

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """`RankFiles` makes the folders."""

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed should copy a state before it saves it. `RankFiles` writes no more than a tensor needs."""
        return False

    def save(self, state_dict: Any, path: str) -> None:
        """Adds one file."""
        assert self.files is not None, "save by save_deepspeed"
        self.files.put(os.path.relpath(path, self.root), state_dict)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads one file as data alone."""
        return load_safely(path, map_location=map_location or "cpu")

    def commit(self, info: Any) -> bool:
        """The checkpoint is complete when all ranks have written."""
        return True


def plug_in(engine: Any) -> None:
    """Gives DeepSpeed's `engine` our checkpoint engine.

    Leaves DeepSpeed's recovery script out of the checkpoint, because it unpickles what it reads.
    """
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    engine.checkpoint_engine = type("NamedFiles", (NamedFiles, CheckpointEngine), {})()
    engine._copy_recovery_script = lambda save_path: None


def save_deepspeed(engine: Any, files: RankFiles) -> None:
    """Adds the files of DeepSpeed's own checkpoint. Collective."""
    plug: NamedFiles = engine.checkpoint_engine
    plug.files, plug.root = files, "/checkpoint"
    try:
        with quiet():
            engine.save_checkpoint(plug.root, tag=TAG, save_latest=False)
    finally:
        plug.files = None


def forget_logits(engine: Any) -> None:
    """Makes the last stage of DeepSpeed's pipeline `engine` free a micro-batch's logits once it has their loss.

    Otherwise it keeps them until it has the next ones, two bytes a logit or four in every pass. It needs them no more:
    its backward pass begins at the loss.
    """
    if not private_parts.can_use(private_parts.LOGITS):
        return
    from deepspeed.runtime.pipe.schedule import ForwardPass

    forward = engine._INSTRUCTION_MAP[ForwardPass]

    def forward_pass(self: Any, buffer_id: int) -> None:
        forward(self, buffer_id)
        if self.is_last_stage():
            self.pipe_buffers["outputs"][buffer_id] = None

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, ForwardPass: forward_pass}


def forget_evaluation(engine: Any) -> None:
    """Frees the outputs of its stage that DeepSpeed's pipeline `engine` keeps after an evaluation."""
    if private_parts.can_use(private_parts.LOGITS):
        outputs = engine.pipe_buffers["outputs"]
        outputs[:] = [None] * len(outputs)


def average_nothing(engine: Any) -> None:
    """Turns off the averaging over a single data-parallel rank, which copies every gradient twice.

    For engines without ZeRO and with BF16_Optimizer; ZeRO's other optimizers need the call.
    """
    if private_parts.can_use(private_parts.NO_REDUCTION):
        name = "pipeline_enable_backward_allreduce"
        setattr(engine, name if hasattr(engine, name) else "enable_backward_allreduce", False)


@contextlib.contextmanager
def split_as_built(deepspeed: Any, config: dict[str, Any], groups: Any) -> Iterator[None]:
    """A context in which a module is split over the ranks as soon as it becomes part of a larger module.

    So no rank ever holds more than one layer whole, which has no values yet: they are not sent, as DeepSpeed would.
    Its own context, `zero.Init()`, replaces torch's constructors.
    """
    if not private_parts.can_use(private_parts.BUILT_IN_PARTS):
        yield
        return
    from torch.nn.modules.module import register_module_module_registration_hook

    init = deepspeed.zero.Init(
        config_dict_or_path=config, data_parallel_group=groups.get_data_parallel_group(), mpu=groups
    )

    def convert(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        for parameter in module.parameters() if module is not None else ():
            if not hasattr(parameter, "ds_id") and not parameter.is_meta:
                send, deepspeed.comm.broadcast = deepspeed.comm.broadcast, lambda *_: None
                try:
                    init._convert_to_zero_parameters([parameter])
                finally:
                    deepspeed.comm.broadcast = send

    hook = register_module_module_registration_hook(convert)
    try:
        yield
    finally:
        hook.remove()
