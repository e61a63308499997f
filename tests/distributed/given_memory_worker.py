"""One rank of engines that begin from a folder of 260 MB: the memory that it takes to read it, and what each reads.

Run as a module with RANK, WORLD_SIZE, LOCAL_RANK and the results' folder as argument; "large" and "small", folders of
weights of the same architecture, are beside it.
"""

import ctypes
import json
import os
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model.initial_weights import GivenWeights
from hpc_gpt.trainer.train.engines import deepspeed_engine, deepspeed_zero, fsdp
from hpc_gpt.trainer.train.engines.protocol import build_engine
from tests.distributed.equality_cases import Case
from tests.distributed.groups import finish, in_turn

LARGE = ModelShape(512, 12, 8, vocab=16384, seq=64, ffn=2048, kv_heads=4, mlp="swiglu", norm="rmsnorm",
                   positions="rope", bias="none", tied=False)  # fmt: skip
SHAPES = {"small": replace(LARGE, hidden=64, layers=1, vocab=64, ffn=64), "large": LARGE}
ENGINES = {
    "fsdp": Engine(name="fsdp"),
    "deepspeed-zero": Engine(name="deepspeed-zero", zero_stage=3),
    "hf-deepspeed": Engine(name="hf-deepspeed"),
    "zero1 bf16": Engine(name="deepspeed-zero", zero_stage=1),  # no fp32 model, neither of a rank nor of its share
}
# Called when the model is built.
_BUILT: dict[str, tuple[Any, str]] = {
    "fsdp": (fsdp, "build_optimizer"),
    "deepspeed-zero": (deepspeed_zero, "compile_model"),
    "hf-deepspeed": (deepspeed_zero, "compile_model"),
    "zero1 bf16": (deepspeed_zero, "compile_model"),
}


class Most:
    """The most anonymous memory from now on to `stop`, beside what there was."""

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not counted
        self._before = self._most = held()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.is_set():
            self._most = max(self._most, held())
            time.sleep(0.001)

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self._most, held()) - self._before


def held() -> int:
    """Bytes of this process's anonymous memory: pages of mapped files do not count."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def measure(engine: str, folder: Path) -> dict[str, int]:
    """`own` bytes of the rank's weights, the most bytes `beside` them while they were read, and numbers `read`."""
    build(engine, "small", folder)  # what the libraries import and keep is not the weights'
    return build(engine, "large", folder)


def build(engine: str, size: str, folder: Path) -> dict[str, int]:
    """`measure` of one building."""
    count, beside, building = 0, [0, 0], Most()
    module, name = _BUILT[engine]
    read, built, put = GivenWeights.read, getattr(module, name), deepspeed_engine.put_weights

    def counted(self: GivenWeights, name: str, target: Tensor, *at: int) -> None:
        nonlocal count
        count += target.numel()
        read(self, name, target, *at)

    def when_built(*arguments: Any, **named: Any) -> Any:
        beside[0] = building.stop()
        return built(*arguments, **named)

    def watched_put(*arguments: Any) -> None:
        # DeepSpeed's states and buffers are there.
        most = Most()
        put(*arguments)
        beside[1] = most.stop()

    dtype: Any = engine.partition(" ")[2] or "fp32"
    resolved = Case(Layout(1, 1, 2), ENGINES[engine], dtype, optimizer="sgd", model="llama").resolved
    resolved = replace(resolved, model=SHAPES[size], train=replace(resolved.train, init=str(folder.parent / size)))
    with (
        patch.object(GivenWeights, "read", counted),
        patch.object(module, name, when_built),
        patch.object(deepspeed_engine, "put_weights", watched_put),
    ):
        engine_built = build_engine(resolved, torch.device("cpu"))
    own = sum(_share(parameter).nbytes for parameter in engine_built.module.parameters())
    return {"own": own, "beside": max(beside[0] - own, beside[1]), "read": count}


def _share(parameter: Any) -> Tensor:
    """This rank's part of a parameter of FSDP2 or of ZeRO-3, or all of it."""
    part: Tensor = getattr(parameter, "ds_tensor", parameter)
    return part.to_local() if isinstance(part, DTensor) else part


def main(folder: Path) -> None:
    found = in_turn(folder, "run", {engine: partial(measure, engine, folder) for engine in ENGINES})
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    finish(folder, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
