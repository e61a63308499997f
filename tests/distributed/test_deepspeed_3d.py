"""Engine deepspeed-3d does what its switches say, and not only the right sums: stages, code, memory, kernels.

Each look is at two ranks, the stages or tensor-parallel ranks: what the first saw and what the last saw.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.trainer.model.gpt import Block
from hpc_gpt.trainer.model.techniques import ActivationOffload
from tests.distributed.equality_cases import GLOBAL_BATCH, SEQ, Case
from tests.distributed.ranks import Task, each
from tests.distributed.trainings import build, everyone, train
from tests.trainer.model.test_techniques import EachTensor

Found = Callable[[Task], list[Any]]
ROWS = GLOBAL_BATCH // 2  # of a micro-batch
LOGITS = (61, 64)  # the last dimension of logits, without and with padding; no other tensor's


def on(tp: int = 1, pp: int = 1, mode: str | None = None, **switches: Any) -> Case:
    engine = Engine(zero_stage=1, compile_backend="aot_eager", **switches)
    return Case(Layout(tp, pp, 1), engine, optimizer_mode=mode)


def blocks(engine: Any) -> list[Block]:
    return [module for module in engine.module.modules() if isinstance(module, Block)]


def stages(folder: Path, case: Case) -> list[int]:
    return everyone(len(blocks(build(case.resolved))))


# Evenly; by parameters, the first stage having the positions too; as the user says.
PARTITIONS: dict[Any, list[int]] = {"layers": [2, 1], "parameters": [1, 2], (1, 2): [1, 2]}


@each(stages, [on(pp=2, partition=partition) for partition in PARTITIONS])
def test_the_partition_deals_out_the_blocks(task: Task, found: Found) -> None:
    assert found(task) == PARTITIONS[task.given[0].engine.partition]


def compiled(folder: Path, case: Case) -> list[list[int]]:
    """Pieces of compiled code after one step and after three, and breaks in them."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    engine, counts = build(case.resolved), []
    for number in range(3):
        train(engine, case.resolved, range(number, number + 1))
        counts.append(counters["stats"]["unique_graphs"])
    return everyone([counts[0], counts[2], sum(counters["graph_break"].values())])


@each(compiled, [on(pp=2, compile="block")], [on(pp=2, compile="whole"), on(tp=2, compile="block")])
def test_a_stage_is_compiled_once(task: Task, found: Found) -> None:
    case = task.given[0]
    first, last = (1, 2) if case.layout.pp == 2 else (2, 2)
    # The last stage has its loss beside the blocks, or the forward pass. No break, and nothing new in later steps.
    assert found(task) == [[first, first, 0], [last, last, 0]]


def logits(folder: Path, case: Case) -> list[int]:
    """The size of the largest tensor of logits' width that any operation makes."""
    engine, sizes = build(case.resolved), [0]
    with EachTensor(lambda made: sizes.append(made.numel() if made.ndim and made.shape[-1] in LOGITS else 0)):
        train(engine, case.resolved, range(1))
    return everyone(max(sizes))


@each(logits, [on(pp=2, loss_chunks=3)], [on(pp=2, loss_chunks=1)])
def test_the_last_stage_never_has_a_micro_batchs_whole_logits(task: Task, found: Found) -> None:
    first, last = found(task)
    whole, chunks = ROWS * SEQ * 64, task.given[0].engine.loss_chunks
    assert first == 0
    assert last == whole if chunks == 1 else last <= whole / chunks * 1.02


def between_blocks(folder: Path, case: Case) -> list[list[int]]:
    """The size of what the first block gets."""
    engine, sizes = build(case.resolved), []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sizes.append(list(inputs[0].shape))

    blocks(engine)[0].register_forward_pre_hook(note)
    train(engine, case.resolved, range(1))
    return everyone(sizes[-1])


@each(between_blocks, [on(tp=2), on(tp=2, sequence_parallel=True)])
def test_sequence_parallelism_halves_what_lies_between_blocks(task: Task, found: Found) -> None:
    part = 2 if task.given[0].engine.sequence_parallel else 1
    assert found(task) == [[ROWS, SEQ // part, 32]] * 2


def offloaded(folder: Path, case: Case) -> list[dict[str, int]]:
    """Activations that went to the host, under each recomputation."""
    counted: dict[str, int] = {}
    pack = ActivationOffload._pack
    try:
        for recompute in ("none", "selective", "full"):
            counted[recompute] = 0

            def count(self: ActivationOffload, tensor: Tensor, recompute: str = recompute) -> Any:
                packed = pack(self, tensor)
                counted[recompute] += 0 if isinstance(packed[0], nn.Parameter) else tensor.numel()
                return packed

            ActivationOffload._pack = count  # type: ignore[method-assign]
            resolved = replace(case, engine=replace(case.engine, recompute=recompute)).resolved
            train(build(resolved), resolved, range(1))
    finally:
        ActivationOffload._pack = pack  # type: ignore[method-assign]
    return everyone(counted)


@each(offloaded, [on(pp=2, activation_offload=True)])
def test_activations_go_to_the_host_as_recomputation_leaves_them(task: Task, found: Found) -> None:
    for stage, own_blocks in zip(found(task), (2, 1), strict=True):
        assert stage["full"] == 2 * own_blocks * ROWS * SEQ * 32  # a block's input, of two micro-batches
        assert stage["full"] < stage["selective"] < stage["none"]


def mode(folder: Path, case: Case) -> list[bool]:
    """Which of torch's kernels the optimizer inside DeepSpeed's runs."""
    inner = build(case.resolved)._engine.optimizer.optimizer
    return [bool(inner.defaults["fused"]), bool(inner.defaults["foreach"])]


MODES = {"foreach": [False, True], "for-loop": [False, False]}


@each(mode, [on(pp=2, mode="for-loop")], [on(pp=2, mode="foreach")])
def test_the_optimizer_runs_the_kernels_asked_for(task: Task, found: Found) -> None:
    assert found(task) == MODES[task.given[0].optimizer_mode]


@each(stages, [on(pp=2)])
def test_nothing_is_printed(task: Task, launch_of: Any) -> None:
    assert launch_of(task).all_output() == ""
