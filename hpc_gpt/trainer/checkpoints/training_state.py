"""The parts of every checkpoint besides weights and optimizer states.

model.json         its model, layout and arithmetic, compared before anything is loaded
random-00000.pt    the states of a rank's random generators
data-00003.json    how far a data-parallel rank has read a stream of data
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hpc_gpt.core.engines.base.ds_config import sub_group_elements, zero_stage
from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.folders import IT_IS_DAMAGED, REMOVE_IT, load_json, load_safely
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.model.tensor_parallel import full_name

NAME = "model.json"
# For ZeRO-3 only: its states are saved in groups of this many elements.
SUB_GROUP = "engine.sub_group_elements"

# What model.json leaves out (`ModelShape.table`).
_OF_A_PLAIN_SHAPE = {
    f"model.{entry.name}": entry.default for entry in fields(ModelShape) if entry.default is not MISSING
}


def identity(resolved: Resolved) -> dict[str, Any]:
    """The settings that must agree for a checkpoint to be loaded, by the keys of an experiment."""
    engine = resolved.engine
    partition = engine.partition
    partitioned = zero_stage(resolved) == 3
    groups = {SUB_GROUP: sub_group_elements(resolved)} if partitioned else {}
    return {
        **{f"model.{key}": value for key, value in resolved.model.table().items()},
        **{f"layout.{key}": value for key, value in resolved.layout.table().items()},
        "engine.name": engine.name,
        "engine.zero_stage": engine.zero_stage,
        "engine.partition": list(partition) if isinstance(partition, tuple) else partition,
        "engine.tiles": engine.tiles,
        "train.dtype": resolved.train.dtype,
        "train.optimizer": resolved.train.optimizer,
        **groups,
    }


def put_identity(files: RankFiles, resolved: Resolved, step: int) -> None:
    """Adds model.json to the checkpoint; called on one rank."""
    files.put_text(NAME, json.dumps({"step": step, **identity(resolved)}, indent=1) + "\n")


def read_identity(folder: Path) -> dict[str, Any]:
    """Reads model.json: the keys of `identity`, and `step`. Raises CheckpointError if it cannot be read."""
    return load_json(folder / NAME)


def check_identity(folder: Path, resolved: Resolved, convertible: frozenset[str] = frozenset()) -> frozenset[str]:
    """Returns the keys in which the checkpoint differs from this run; all of them are `convertible`.

    Raises CheckpointError, which names every difference, for a checkpoint of another model or arithmetic, or of a
    layout that the engine cannot convert.
    """
    saved, wanted = (_OF_A_PLAIN_SHAPE | one for one in (read_identity(folder), identity(resolved)))
    # The saved keys of the model count, too: either may have left out a default.
    keys = [*wanted, *(key for key in saved if key.startswith("model.") and key not in wanted)]
    differences = {key: wanted.get(key) for key in keys if saved.get(key) != wanted.get(key)}
    if not differences.keys() <= convertible:
        of_model = any(key.startswith("model.") for key in differences)
        texts = (f"{key} is {saved.get(key)} in it and {value} in this run" for key, value in differences.items())
        raise CheckpointError(
            f"{folder} is a checkpoint of another {'model' if of_model else 'layout or arithmetic'}: "
            + "; ".join(texts),
            "resume with the settings it was saved with, or start a new run",
        )
    return frozenset(differences)


def put_random_state(files: RankFiles, rank: int, device: torch.device) -> None:
    """Adds the states of this rank's generators, as tensors and plain numbers."""
    kind, keys, *numbers = np.random.get_state()
    numpy = (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *numbers)
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    files.put(f"random-{rank:05d}.pt", state)


def load_random_state(folder: Path, rank: int, device: torch.device) -> None:
    """Restores the states of this rank's generators. Raises CheckpointError if they were not saved."""
    path = folder / f"random-{rank:05d}.pt"
    if not path.is_file():
        raise CheckpointError(f"{folder}: {path.name} is missing", IT_IS_DAMAGED)
    state = load_safely(path)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *numbers = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *numbers))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def put_positions(files: RankFiles, positions: Mapping[int, Mapping[str, Any]]) -> None:
    """Adds one file per data-parallel rank in `positions`."""
    for dp_rank, position in positions.items():
        files.put_text(f"data-{dp_rank:05d}.json", json.dumps(position) + "\n")


def owned_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of the optimizer, in its order."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def set_states(optimizer: torch.optim.Optimizer, states: Mapping[str, Any]) -> None:
    """Gives the optimizer the states of its parameters, found by full name. SGD without momentum has no states."""
    names = [full_name(one) for one in owned_by(optimizer)]
    numbered = {number: states[name] for number, name in enumerate(names) if name in states}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})


class Whole(NamedTuple):
    """A checkpoint of ddp or fsdp for the other one: its step, its loss scale, and (full name, moment, tensor) of each
    weight, whose moment is "", and of each optimizer state, whole and in the model's order."""

    step: int
    scale: dict[str, Any]
    tensors: Iterator[tuple[str, str, Tensor]]


@torch.no_grad()
def take_whole(
    whole: Whole,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    share: Callable[[str, Tensor], Tensor],
) -> tuple[int, dict[str, Any]]:
    """Fills fp32 `parameters`, by full name, and the states of the `optimizer` with this rank's `share` of each tensor;
    returns (step, loss scale). Raises CheckpointError if a parameter is missing."""
    missing, owned = set(parameters), {full_name(one) for one in owned_by(optimizer)}
    states: dict[str, dict[str, Tensor]] = {}
    for name, moment, tensor in whole.tensors:
        if not moment:
            parameters[name].copy_(share(name, tensor))
            missing.discard(name)
        elif name in owned:
            states.setdefault(name, {})[moment] = (share(name, tensor) if tensor.ndim else tensor).clone()
    if missing:
        raise CheckpointError(f"the checkpoint holds no {min(missing)}", REMOVE_IT)
    set_states(optimizer, states)
    return whole.step, whole.scale


def read_positions(folder: Path) -> dict[int, dict[str, Any]]:
    """The positions of all data-parallel ranks; empty for data whose samples depend on the step alone."""
    return {int(path.stem.removeprefix("data-")): load_json(path) for path in sorted(folder.glob("data-*.json"))}
