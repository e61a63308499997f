"""Reads the checkpoints that hpc-gpt 0.3 wrote; until 0.5.

ddp:       weights.pt, optimizer-00000.pt of each rank with moments, experts-00000.pt of each with experts, progress.pt
fsdp:      dcp/, torch's distributed checkpoint, and progress.json
DeepSpeed: deepspeed/, its own files, and states-00000.json of each rank: where each parameter's elements are in them
All:       model.json, random-00000.pt of a rank, data-00003.json of a data-parallel one, balance-00000.pt of a stage

These files are pickles, and a pickle is a program. Here it makes only tensors, containers and `_Fields`.
"""

import io
import math
import pickle
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.names import parts_of
from hpc_gpt.trainer.checkpoints.folders import IT_IS_DAMAGED, REMOVE_IT, load_json, unread
from hpc_gpt.trainer.checkpoints.states import WEIGHT, SavedStates, Share, kept_rows
from hpc_gpt.trainer.model.tensor_parallel import Split

IDENTITY = "model.json"
# DeepSpeed's classes in its files.
_DEEPSPEED = ("runtime.fp16.loss_scaler.LossScaler", "runtime.fp16.loss_scaler.DynamicLossScaler",
              "runtime.zero.config.ZeroStageEnum", "utils.tensor_fragment.fragment_address")  # fmt: skip


class OlderStates(SavedStates):
    """The elements in such a checkpoint, of a model of this shape. A file is opened when it is needed."""

    def __init__(self, folder: Path, model: ModelShape) -> None:
        self.folder, self._model, self._tp = folder, model, 1
        self.about = {"settings": load_json(folder / IDENTITY), "optimizer": {}, "loss_scale": {}}
        self.about["step"] = int(self.about["settings"]["step"])
        self._parameters: dict[str, Any] = {}
        # (first, count, place in the source, source of all elements of a share) by name, kind and tp rank.
        self._runs: dict[tuple[str, str, int], list[tuple[int, int, int, Callable[[], Tensor]]]] = {}
        self._open = cache(lambda name: _load(folder / name))
        if (folder / "weights.pt").is_file():
            self._add_replicated()
        elif (folder / "dcp" / ".metadata").is_file():
            self._add_sharded()
        elif (folder / "deepspeed").is_dir():
            self._add_deepspeed()
        else:
            raise CheckpointError(f"{folder} holds no weights", REMOVE_IT)
        for path in sorted(folder.glob("balance-*.pt")):
            for name, bias in self._open(path.name).items():
                self._add_whole(name, WEIGHT, [bias])

    def _add(self, share: Share, kind: str, dtype: torch.dtype, source: Callable[[], Tensor]) -> None:
        """Adds the elements of a share, which `source` gives."""
        split = None if share.is_by_rows or share.split is None else share.split.stored()
        shape = [share.kept, *share.shape[1:]]
        entry = self._parameters.setdefault(share.name, {"shape": shape, "split": split, "kinds": {}})
        if share.transposed:
            entry |= {"shape": shape[::-1], "transposed": True}
        entry["kinds"][kind] = {"dtype": str(dtype).removeprefix("torch.")}
        runs = self._runs.setdefault((share.name, kind, 0 if split is None else share.tp_rank), [])
        runs += [(first, count, begin, source) for first, begin, count in share.places()]

    def _elements(self, name: str, kind: str, tp_rank: int, first: int, end: int) -> Iterator[tuple[int, Tensor]]:
        for begin, count, place, source in self._runs.get((name, kind, tp_rank), ()):
            low, high = max(first, begin), min(end, begin + count)
            if low < high:
                yield low, source().detach().reshape(-1)[place + low - begin : place + high - begin]

    def _add_whole(self, name: str, kind: str, pieces: list[Tensor]) -> None:
        """Adds a whole tensor, whose `pieces` follow each other."""
        if not pieces[0].ndim:
            self.about["optimizer"][kind] = float(pieces[0])
            return
        shape, first = (sum(map(len, pieces)), *pieces[0].shape[1:]), 0
        for piece in pieces:
            share = Share(name, shape, None, 0, 1, first, piece.numel(), kept_rows(self._model, name, shape[0]))
            self._add(share, kind, piece.dtype, partial(torch.detach, piece))
            first += piece.numel()

    def _add_replicated(self) -> None:
        """Adds what ddp wrote: a tensor is in one file, or some of its experts are in each of several."""
        files: list[tuple[Any, Any]] = [(self._open("weights.pt"), {})]
        files += [({}, self._open(path.name)) for path in sorted(self.folder.glob("optimizer-*.pt"))]
        experts = [self._open(path.name) for path in sorted(self.folder.glob("experts-*.pt"))]
        files += [(one["weights"], one["states"]) for one in experts]
        found: dict[tuple[str, str], list[Tensor]] = {}
        for weights, states in files:
            for name, state in [*((name, {WEIGHT: weight}) for name, weight in weights.items()), *states.items()]:
                for kind, value in state.items():
                    found.setdefault((name, kind), []).append(value)
        for (name, kind), pieces in found.items():
            self._add_whole(name, kind, pieces)
        self._set_scale(self._open("progress.pt")["scale"])

    def _set_scale(self, scale: Mapping[str, Any]) -> None:
        self.about["loss_scale"] = scale and {"scale": scale["scale"], "good_steps": scale["_growth_tracker"]}

    def _add_sharded(self) -> None:
        """Adds what fsdp wrote. A chunk is rows of a tensor, or rows of a tp rank's columns. If tp ranks hold rows of
        several parts of it (`fused`), the chunks of each tp rank follow those of the one before."""
        progress = load_json(self.folder / "progress.json")
        self._tp, path = int(progress["tp"]), self.folder / "dcp" / ".metadata"
        with _plain(path), path.open("rb") as file:
            metadata = _Metadata(file).load()
        for index, place in metadata.storage_data.items():
            tensor = metadata.state_dict_metadata[index.fqn]
            _, name, *kinds = index.fqn.split("/")
            kind, dtype = "".join(kinds) or WEIGHT, tensor.properties.values[0]
            source = partial(self._in_sharded, place)
            if not tensor.size:
                self.about["optimizer"][kind] = float(source())
                continue
            whole, at = tuple(tensor.size), tuple(index.offset)
            size = next(tuple(chunk.sizes) for chunk in tensor.chunks if tuple(chunk.offsets) == at)
            fused = progress["fused"].get(name) if self._tp > 1 else None
            parted = [dim for dim in range(1, len(whole)) if size[dim] < whole[dim]]
            split = Split.of_stored(fused) if fused else Split(parted[0]) if parted else None
            share = Share(name, whole, split, 0, self._tp, 0, 0, kept_rows(self._model, name, whole[0]))
            tp_rank = 0 if split is None else at[split.dim] // share.tp_shape[split.dim]
            rows = at[0] - tp_rank * (share.tp_shape[0] if split is not None and split.dim == 0 else 0)
            share = replace(share, tp_rank=tp_rank, first=rows * math.prod(size[1:]), count=math.prod(size))
            self._add(share, kind, dtype, source)
        self._set_scale(progress["scale"])

    def _in_sharded(self, place: Any) -> Tensor:
        """The chunk at a place of torch's distributed checkpoint."""
        path = self.folder / "dcp" / place.relative_path
        with path.open("rb") as file:
            file.seek(place.offset)
            return _load(path, io.BytesIO(file.read(place.length)))  # type: ignore[no-any-return]

    def _add_deepspeed(self) -> None:
        """Adds what an engine with DeepSpeed wrote."""
        lists = [load_json(path) for path in sorted(self.folder.glob("states-*.json"))]
        if not lists or any(listed["schema"] != 1 or listed.get("swapped") for listed in lists):
            raise CheckpointError(f"{self.folder} lacks the lists of its states, or states on NVMe", REMOVE_IT)
        is_ours = engine_named(self.about["settings"]["engine.name"]).trains_our_model
        self._tp = 1 + max(listed["at"][0] for listed in lists)
        stages: dict[str, int] = {}  # the first one with the parameter: two stages hold a tied one
        states = self._optimizer_of(lists[0]["file"])
        first_state = next(iter(_base_of(states).values()), {})
        kinds = [kind for kind, value in first_state.items() if isinstance(value, Tensor) and value.ndim]
        self.about["optimizer"] = {kind: float(value) for kind, value in first_state.items() if kind not in kinds}
        for listed in lists:
            tp_rank, stage, _ = listed["at"]
            for name, size, stored, group, offset, first, count in listed["pieces"]:
                split = Split.of_stored(stored) if stored else None
                if stages.setdefault(name, stage) != stage or (split is None and tp_rank):
                    continue
                if split is not None:
                    size[split.dim] *= self._tp
                kept = kept_rows(self._model, name, size[0])
                turned = not is_ours and len(size) == 2 and parts_of(self._model, name)[0].transposed
                share = Share(name, tuple(size), split, tp_rank, self._tp, first, count, kept, turned)
                for kind in (WEIGHT, *kinds):
                    source = partial(self._in_deepspeed, listed, name, group, offset, count, kind)
                    self._add(share, kind, torch.float32, source)
        if getattr(scaler := states.get("loss_scaler"), "dynamic", False):
            since = scaler.cur_iter - scaler.last_overflow_iter - 1
            since -= max(since - 1, 0) // scaler.scale_window * scaler.scale_window
            scale = {"scale": scaler.cur_scale, "good_steps": since, "hysteresis": scaler.cur_hysteresis}
            self.about["loss_scale"] = scale

    def _in_deepspeed(self, listed: Any, name: str, group: int, offset: int, count: int, kind: str) -> Tensor:
        """`count` elements of a parameter, from `offset` on in a flat tensor."""
        states = self._optimizer_of(listed["file"])
        if kind != WEIGHT:
            flat: Tensor = _base_of(states)[group][kind]
        elif listed["weights"] is not None:
            file, key = listed["weights"][name]
            state = self._open(file)
            flat = state.get("module", state)[key]
        else:
            flat = states.get("fp32_flat_groups", states.get("single_partition_of_fp32_groups"))[group]
        return flat.detach().view(-1)[offset : offset + count]

    def _optimizer_of(self, file: str) -> Any:
        state = self._open(file)
        return state.get("optimizer_state_dict") or state["optimizer"]


def _base_of(states: Any) -> dict[int, dict[str, Any]]:
    """{number of the flat tensor: states of the base optimizer} in DeepSpeed's file."""
    base: Any = states.get("base_optimizer_state") or states.get("optimizer_state_dict") or states
    return base["state"]  # type: ignore[no-any-return]


def read_positions(folder: Path) -> dict[int, dict[str, Any]]:
    """How far each data-parallel rank has read a stream of data."""
    return {int(path.stem.removeprefix("data-")): load_json(path) for path in sorted(folder.glob("data-*.json"))}


def load_generators(folder: Path, rank: int, device: torch.device) -> None:
    """Restores the states of this rank's random generators."""
    path = folder / f"random-{rank:05d}.pt"
    if not path.is_file():
        raise CheckpointError(f"{folder}: {path.name} is missing", IT_IS_DAMAGED)
    state = _load(path)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *numbers = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *numbers))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


class _Fields:
    """An object of any class in a pickle, by its fields."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"values": state})


@contextmanager
def _plain(path: Path) -> Iterator[None]:
    """Raises CheckpointError for a file that cannot be read, or is not plain data; without torch's advice to run it."""
    try:
        yield
    except OSError as fault:
        raise unread(path, fault) from None
    except (pickle.UnpicklingError, EOFError, AttributeError, RuntimeError) as fault:
        refused = re.search(r"\bGLOBAL ([\w.]+)", str(fault))
        line = f"it names {refused[1]}" if refused else next(iter(str(fault).splitlines()), type(fault).__name__)
        raise CheckpointError(f"{path} cannot be read: {line}", REMOVE_IT) from None


def _load(path: Path, content: io.BytesIO | None = None) -> Any:
    """Reads a file of torch.save, mapped, or its `content`."""
    classes: Any = [(_Fields, f"deepspeed.{name}") for name in _DEEPSPEED]
    with _plain(path), torch.serialization.safe_globals(classes):
        return torch.load(content or path, map_location="cpu", mmap=content is None, weights_only=True)


class _Metadata(pickle.Unpickler):
    """Reads the `.metadata` of torch's distributed checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module.partition(".")[0] not in ("torch", "pathlib"):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _Fields
