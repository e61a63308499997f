"""A DeepSpeed engine goes on from a checkpoint of another layout, ZeRO stage or engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.runs.lineage import convertible
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.identity import check_identity, read_identity
from hpc_gpt.train.checkpoints.saved_states import WEIGHTS, SavedStates
from hpc_gpt.train.checkpoints.state_pieces import Piece, flat_states, pieces_of, places_of


def find_differences(folder: Path, resolved: Resolved) -> frozenset[str]:
    """In what the checkpoint differs, all of it such that `load_universal` can take it up; CheckpointError else."""
    saved = str(read_identity(folder).get("engine.name"))
    return check_identity(folder, resolved, convertible(saved, resolved.engine.name))


def load_universal(engine: Any, module: nn.Module, folder: Path, resolved: Resolved, tp_rank: int) -> None:
    """Weights, optimizer states and counts into `engine`, which is DeepSpeed's; each rank takes its own part.

    CheckpointError where the checkpoint lacks a parameter or numbers of one.
    """
    saved = SavedStates(folder)
    pieces: dict[str, list[Piece]] = {}
    for piece in pieces_of(engine, module):
        pieces.setdefault(piece.name, []).append(piece)
    # Of the weights that are computed with ZeRO-3 makes its own; the others are every rank's, whole.
    whole = {place.name: (one, place) for one, place in places_of(module).items() if not hasattr(one, "ds_id")}
    flats = flat_states(engine)
    states = [{kind: torch.zeros_like(flat) for kind in saved.kinds()} for flat in flats]
    with torch.no_grad():
        for name in dict.fromkeys([*pieces, *whole]):
            for kind in (WEIGHTS, *saved.kinds()):
                if name not in pieces and kind != WEIGHTS:
                    continue
                share = saved.share(name, kind, tp_rank, resolved.layout.tp).view(-1)
                for piece in pieces.get(name, ()):
                    target = flats[piece.group] if kind == WEIGHTS else states[piece.group][kind]
                    part = share[piece.start : piece.start + piece.count]
                    target.view(-1)[piece.offset : piece.offset + piece.count].copy_(part)
                if kind == WEIGHTS and name in whole:
                    whole[name][0].view(-1).copy_(share)
        _set_states(engine, flats, states, saved.updates())
        if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
            _refresh_partitions(engine.optimizer)
    scaler = saved.loss_scaler()
    if resolved.train.dtype == "fp16" and scaler is not None:
        engine.optimizer.loss_scaler = scaler
    engine.global_steps = int(read_identity(folder)["step"])
    engine.global_samples = engine.global_steps * resolved.batch.global_batch
    if saved.updates() is not None:
        engine.skipped_steps = engine.global_steps - int(saved.updates() or 0)


def _set_states(engine: Any, flats: list[Tensor], states: list[dict[str, Tensor]], updates: float | None) -> None:
    """The base optimizer's states, with its count where torch's kernels want it: on the device for fused ones."""
    base = engine.basic_optimizer
    for flat, state in zip(flats, states, strict=True):
        if updates is not None:
            on_device = base.param_groups[0].get("fused")
            counted = isinstance(base, torch.optim.AdamW)
            count = torch.tensor(updates, dtype=torch.float32, device=flat.device if on_device else "cpu")
            state["step"] = count if counted else int(updates)  # type: ignore[assignment]
        if state:
            base.state[flat] = state


def _refresh_partitions(optimizer: Any) -> None:
    """Of ZeRO-3: the weights that are computed with, from the fp32 ones; the small ones whole on every rank again."""
    for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        optimizer.fp16_partitioned_groups_flat[number].data.copy_(flat.data)
        optimizer._unflatten_partitioned_parameters(number)
    kept = optimizer.persistent_parameters
    if kept:
        kept[0].partition(kept)
        kept[0].all_gather(kept)
