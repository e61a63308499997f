"""One rank of two: what deepspeed-3d's switches set going, which right numbers alone would not show."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.trainer.model.gpt import Block
from hpc_gpt.trainer.model.techniques import ActivationOffload
from hpc_gpt.trainer.train.engines.deepspeed_3d import Deepspeed3D
from hpc_gpt.trainer.train.engines.protocol import build_engine
from tests import ALL_TESTS
from tests.distributed.equality_cases import Case, micro_batches
from tests.distributed.groups import finish, meet
from tests.distributed.trainings import everyone

PIPELINE, TENSOR = Layout(1, 2, 1), Layout(2, 1, 1)
# What of each stage is compiled, over two stages or two tensor-parallel ranks; and of them those of `make test`.
HOWS = ("none", "block", "whole", "block over tp", "whole over tp")
SHORT_HOWS = ("block",)
LOGITS = (61, 64)  # the last dimension of logits, without and with padding; no other tensor's


class Wide(TorchDispatchMode):
    """Notes the largest tensor of logits' width that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[-1] in LOGITS:
                self.elements = max(self.elements, leaf.numel())
        return result


def build(layout: Layout, **switches: Any) -> Deepspeed3D:
    engine = build_engine(case(layout, **switches).resolved, torch.device("cpu"))
    assert isinstance(engine, Deepspeed3D)
    return engine


def case(layout: Layout, **switches: Any) -> Case:
    return Case(layout, Engine(zero_stage=1, compile_backend="aot_eager", **switches))


def step(engine: Deepspeed3D, number: int = 0) -> None:
    engine.train_step(iter(micro_batches(engine._resolved, engine.dp_rank, number)))


def blocks(engine: Deepspeed3D) -> list[Block]:
    return [module for module in engine.module.modules() if isinstance(module, Block)]


def stages() -> list[int]:
    """Blocks of this stage by each partition of three layers; the head outweighs one of them."""
    partitions: list[Any] = ["layers", "parameters", (1, 2), (2, 1)]
    return [len(blocks(build(PIPELINE, partition=partition))) for partition in partitions]


def compiled() -> dict[str, list[int]]:
    """Pieces of compiled code after one step and after three."""
    found = {}
    for how in HOWS if ALL_TESTS else SHORT_HOWS:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        engine = build(TENSOR if "tp" in how else PIPELINE, compile=how.split()[0])
        counts = []
        for number in range(3):
            step(engine, number)
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        found[how] = [counts[0], counts[2], sum(torch._dynamo.utils.counters["graph_break"].values())]
    return found


def logits() -> dict[str, int]:
    found = {}
    for chunks in (1, 3):
        engine = build(PIPELINE, loss_chunks=chunks)
        with Wide() as seen:
            step(engine)
        found[str(chunks)] = seen.elements
    return found


def between_blocks() -> dict[str, list[int]]:
    """What a block gets, with sequence parallelism and without."""
    found: dict[str, list[int]] = {}
    for on in (False, True):
        engine = build(TENSOR, sequence_parallel=on)

        def note(module: nn.Module, inputs: tuple[Tensor, ...], on: bool = on) -> None:
            found[str(on)] = list(inputs[0].shape)

        blocks(engine)[0].register_forward_pre_hook(note)
        step(engine)
    return found


def offloaded() -> dict[str, int]:
    """Activations that went to the host, under each recomputation."""
    found: dict[str, int] = {}
    pack = ActivationOffload._pack
    try:
        for recompute in ("none", "selective", "full"):
            found[recompute] = 0

            def count(self: ActivationOffload, tensor: Tensor, recompute: str = recompute) -> Any:
                packed = pack(self, tensor)
                found[recompute] += 0 if isinstance(packed[0], nn.Parameter) else tensor.numel()
                return packed

            ActivationOffload._pack = count
            step(build(PIPELINE, activation_offload=True, recompute=recompute))
    finally:
        ActivationOffload._pack = pack
    return found


def modes() -> dict[str, list[bool]]:
    """Which of torch's kernels the optimizer inside DeepSpeed's runs."""
    found = {}
    for mode in ("fused", "foreach", "for-loop"):
        resolved = replace(case(PIPELINE), optimizer_mode=mode).resolved
        engine = build_engine(resolved, torch.device("cpu"))
        assert isinstance(engine, Deepspeed3D)
        inner = engine._engine.optimizer.optimizer
        found[mode] = [bool(inner.defaults["fused"]), bool(inner.defaults["foreach"])]
    return found


LOOKS: list[Callable[[], Any]] = [stages, compiled, logits, between_blocks, offloaded, modes]


def main(folder: Path) -> None:
    meet(folder, "all")
    finish(folder, everyone({look.__name__: look() for look in LOOKS}), "results")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
