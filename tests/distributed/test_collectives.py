"""Engines ddp and fsdp: the collectives of a step, and what the placements of fsdp's parameters say."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_gpt.core.weights.names import size_of
from hpc_gpt.trainer.checkpoints.states import WEIGHT, SavedStates
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.tensor_parallel import Split, full_name, split_of
from tests.distributed.equality_cases import Case, micro_batches
from tests.distributed.ranks import Task, each
from tests.distributed.test_promises import DDP, DP1, DP2, DP4, FSDP, HYBRID, TP2_DP2, ours
from tests.distributed.trainings import build, new_folder, save_now, train

Found = Callable[[Task], Any]
BLOCKS, GROUPS = 2, 3  # two blocks, and the root with what is in none
KEPT = replace(FSDP, reshard=False)


class Calls(TorchDispatchMode):
    """Notes torch's calls of collectives, each with the type of its numbers, and of what reads one from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        # Else what is compiled refuses to run below it.
        return True

    def __torch_dispatch__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if called.namespace == "c10d" or called is torch.ops.aten._local_scalar_dense.default:
            dtype = next(one.dtype for one in tree_leaves(args) if isinstance(one, torch.Tensor))
            self.made.append(f"{called.name().removeprefix('c10d::')} {dtype}".replace("torch.", ""))
        return called(*args, **(kwargs or {}))


def calls(folder: Path, case: Case) -> list[str]:
    """The collectives of the third step, in order, and where it reads a number from the device. (In the second step DDP
    agrees on its buckets.)"""
    engine = build(case.resolved)
    train(engine, case.resolved, range(2))
    with Calls() as calls:
        engine.train_step(iter(micro_batches(case.resolved, engine.dp_rank, 2)))
    return calls.made


@each(calls, [ours(DP1, DDP, "fp16")])
def test_one_rank_calls_no_collective_and_never_waits(task: Task, found: Found) -> None:
    assert found(task) == []


@each(calls, [ours(DP2, DDP, "fp32", 1), ours(DP2, DDP, "bf16", 4)])
def test_ranks_meet_once_a_step_in_fp32_at_any_micro_batches(task: Task, found: Found) -> None:
    # The gradient, in one bucket as it is small, its norm, which on two kinds of GPUs each rank would round by itself,
    # and the loss. No number is read from the device.
    assert found(task) == ["allreduce_ float32", "allreduce_ float64", "allreduce_ float32"]


@each(calls, [ours(DP2, FSDP, micro_batches=4)])
def test_every_micro_batch_gathers_twice_and_reduces_at_once(task: Task, found: Found) -> None:
    assert Counter(found(task)) == {
        "_allgather_base_ float32": 4 * (GROUPS + BLOCKS),
        "_reduce_scatter_base_ float32": 4 * GROUPS,
        "allreduce_ float32": 1,  # the loss
        "allreduce_ float64": 1,  # the norm
    }


@each(calls, [ours(HYBRID, FSDP, micro_batches=4)])
def test_hybrid_replicas_reduce_their_shards_once_a_step(task: Task, found: Found) -> None:
    assert Counter(found(task)) == {
        "_allgather_base_ float32": 4 * (GROUPS + BLOCKS),
        "_reduce_scatter_base_ float32": 4 * GROUPS,
        "allreduce_ float32": GROUPS + 1,  # the shards' gradients, and the loss
        "allreduce_ float64": 1,
    }


@each(calls, [ours(DP2, replace(FSDP, gather_blocks=2))])
def test_fsdp_gathers_small_blocks_together(task: Task, found: Found) -> None:
    assert Counter(found(task))["_allgather_base_ float32"] == 2 * (2 + 1)


@each(calls, [ours(DP1, FSDP, "bf16")])
def test_fsdp_of_one_rank_calls_no_collective(task: Task, found: Found) -> None:
    assert found(task) == []


@each(calls, [ours(DP2, KEPT, micro_batches=4)])
def test_kept_weights_are_gathered_and_gradients_reduced_once(task: Task, found: Found) -> None:
    calls = Counter(found(task))
    assert calls["_allgather_base_ float32"] == GROUPS
    assert calls["_reduce_scatter_base_ float32"] == GROUPS


@each(calls, [ours(DP2, FSDP, "bf16")], [ours(DP2, FSDP, "fp16")])
def test_halves_are_gathered_and_fp32_is_reduced(task: Task, found: Found) -> None:
    half = {"bf16": "bfloat16", "fp16": "float16"}[task.given[0].dtype]
    calls = Counter(found(task))
    gathered = {call for call in calls if "gather" in call}
    # Bytes, as a group of parameters may hold several types.
    assert gathered <= {f"_allgather_base_ {half}", "_allgather_base_ uint8"}, calls
    assert {call for call in calls if "reduce_scatter" in call} == {"_reduce_scatter_base_ float32"}
    assert not any("scalar" in call for call in calls)


@each(calls, [ours(DP2, replace(FSDP, prefetch=prefetch), micro_batches=1) for prefetch in (True, False)])
def test_prefetch_gathers_the_next_block_before_a_gradient_goes(task: Task, found: Found) -> None:
    letters = {"_allgather_base_": "g", "_reduce_scatter_base_": "r"}
    backward = "".join(letters.get(call.split()[0], "") for call in found(task))[GROUPS:]
    assert backward == ("ggrrr" if task.given[0].engine.prefetch else "grgrr")


# Over tp; what is not here is whole on every tp rank. Of that all ranks of dp hold their rows.
SPLIT = {
    "embedding.weight": 0,
    "attention.qkv.weight": 0,
    "attention.qkv.bias": 0,
    "attention.projection.weight": 1,
    "feed_forward.up.weight": 0,
    "feed_forward.up.bias": 0,
    "feed_forward.down.weight": 1,
}


def placements(folder: Path, case: Case) -> dict[str, dict[str, Any]]:
    """Of each parameter of a new engine, by name: its mesh, its and its gradient's placements, and whether the pieces
    of all ranks, put together as the placements say, are the weights as they were drawn."""
    resolved, engine = case.resolved, build(case.resolved)
    drawn = {full_name(one): one.detach() for one in Gpt(resolved.model, resolved.train.seed).parameters()}
    found: dict[str, dict[str, Any]] = {}
    for parameter in engine.module.parameters():
        # Over dp first: to undo both at once it warns of two gatherings.
        share = parameter.detach().redistribute(placements=(parameter.placements[0], Replicate()))
        whole = _in_order(share.full_tensor(), split_of(parameter), resolved.layout.tp)
        found[full_name(parameter)] = _placed(parameter) | {"as drawn": torch.equal(whole, drawn[full_name(parameter)])}
    complete = engine._complete_gradients

    def noted() -> None:
        for parameter in engine.module.parameters():
            found[full_name(parameter)]["gradient"] = _placed(parameter.grad)
        complete()

    engine._complete_gradients = noted
    train(engine, resolved, range(1))
    return found


def _placed(tensor: DTensor) -> dict[str, Any]:
    mesh = tensor.device_mesh
    placed = [str(placement) for placement in tensor.placements]
    return {"mesh": [list(mesh.mesh_dim_names or ()), mesh.mesh.tolist()], "placements": placed}


def _in_order(whole: Tensor, split: Split | None, tp: int) -> Tensor:
    """The tensor in the model's order, from that of the ranks, which differ where it is fused."""
    return whole if split is None else split.merge(list(whole.chunk(tp, split.dim)))


@each(placements, [ours(TP2_DP2, FSDP)])
def test_parameters_and_gradients_are_dtensors_placed_as_split(task: Task, found: Found) -> None:
    described = found(task)
    assert set(described) == set(task.given[0].resolved.model.parameter_names)
    for name, one in described.items():
        dim = SPLIT.get(name.split(".", 2)[-1] if name.startswith("blocks.") else name)
        placed = {"mesh": [["tp", "dp"], [[0, 2], [1, 3]]], "placements": ["R" if dim is None else f"S({dim})", "S(0)"]}
        assert one == placed | {"gradient": placed, "as drawn": True}, name


def keep(folder: Path, case: Case) -> None:
    save_now(build(case.resolved), new_folder(folder / case.name))


@each(keep, [ours(HYBRID, FSDP)], [ours(DP4, FSDP)])
def test_one_of_the_hybrid_replicas_writes(task: Task, found: Found, launch_of: Any) -> None:
    found(task)
    (case,) = task.given
    folder = launch_of(task).folder / case.name
    states = SavedStates(folder)
    pieces = [piece for name in states.names for piece in states.pieces(name, WEIGHT, 0, 0, 10**9)]
    assert len(list(folder.glob("states-*.safetensors"))) == len({file for file, *_ in pieces}) == case.layout.shards
    # Without padding, and without moments before the first step.
    sizes = [size_of(case.resolved.model, name) for name in case.resolved.model.parameter_names]
    assert sum(count for *_, count in pieces) == sum(map(math.prod, sizes))


@each(calls, [ours(DP1, DDP, "fp16"), ours(DP2, FSDP, "bf16")])
def test_nothing_is_printed(task: Task, launch_of: Any) -> None:
    assert launch_of(task).all_output() == ""
