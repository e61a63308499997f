"""What the placements of engine fsdp's parameters say, held against what the ranks hold."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.tensor_parallel import Split, full_name, split_of
from tests.distributed.equality_cases import micro_batches


def describe_placements(engine: Any) -> dict[str, dict[str, Any]]:
    """Of each parameter of a new engine, by name: its mesh, its and its gradient's placements, and whether the pieces
    of all ranks, put together as the placements say, are the weights as they were drawn."""
    resolved = engine._resolved
    drawn = {full_name(one): one.detach() for one in Gpt(resolved.model, resolved.train.seed).parameters()}
    found: dict[str, dict[str, Any]] = {}
    for parameter in engine.module.parameters():
        # Over dp first: to undo both at once it warns of two gatherings.
        share = parameter.detach().redistribute(placements=(parameter.placements[0], Replicate()))
        whole = _in_order(share.full_tensor(), split_of(parameter), resolved.layout.tp)
        found[full_name(parameter)] = {
            "mesh": _mesh_of(parameter),
            "placements": _placements_of(parameter),
            "as drawn": torch.equal(whole, drawn[full_name(parameter)]),
        }
    apply = engine._update.apply

    def noted(lr: float) -> Any:
        for parameter in engine.module.parameters():
            entry = found[full_name(parameter)]
            entry["gradient"] = _placements_of(parameter.grad) if _mesh_of(parameter.grad) == entry["mesh"] else []
        return apply(lr)

    engine._update.apply = noted
    engine.train_step(iter(micro_batches(resolved, engine.dp_rank, 0)))
    return found


def _mesh_of(tensor: DTensor) -> list[Any]:
    return [list(tensor.device_mesh.mesh_dim_names or ()), tensor.device_mesh.mesh.tolist()]


def _placements_of(tensor: DTensor) -> list[str]:
    return [str(placement) for placement in tensor.placements]


def _in_order(whole: Tensor, split: Split | None, tp: int) -> Tensor:
    """The tensor in the model's order, from that of the ranks, which differ where it is fused."""
    return whole if split is None else split.merge(list(whole.chunk(tp, split.dim)))
