"""The parts of every checkpoint besides weights and optimizer states.

settings               its model, layout and arithmetic, compared before anything is loaded: in states.json
generators-00003.bin   the states of a rank's random generators, if something has drawn from them
positions.json         how far each data-parallel rank has read a stream of data, if it does
"""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.folders import load_json
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.states import SavedStates

GENERATORS = "generators.bin"  # of 0.4.0: a record for each rank
POSITIONS = "positions.json"
# The ends of the plain numbers in a record: numpy's words and numbers, Python's words and number.
_PLAIN = (624, 627, 1252, 1253)
# What the settings leave out (`ModelShape.table`).
_OF_A_PLAIN_SHAPE = {
    f"model.{entry.name}": entry.default for entry in fields(ModelShape) if entry.default is not MISSING
}


def identity(resolved: Resolved) -> dict[str, Any]:
    """The settings that must agree for a checkpoint to be loaded, by the keys of an experiment."""
    engine = resolved.engine
    partition = engine.partition
    return {
        **{f"model.{key}": value for key, value in resolved.model.table().items()},
        **{f"layout.{key}": value for key, value in resolved.layout.table().items()},
        "engine.name": engine.name,
        "engine.zero_stage": engine.zero_stage,
        "engine.partition": list(partition) if isinstance(partition, tuple) else partition,
        "engine.tiles": engine.tiles,
        "train.dtype": resolved.train.dtype,
        "train.optimizer": resolved.train.optimizer,
    }


def open_checkpoint(folder: Path, resolved: Resolved) -> tuple[SavedStates, bool]:
    """Returns a checkpoint's elements, and whether engine and layout are this run's.

    Of another optimizer's, which a branch may have, there are no states of it. Raises CheckpointError, which names
    every difference, for a checkpoint of another model or arithmetic.
    """
    states = SavedStates(folder)
    saved, wanted = (_OF_A_PLAIN_SHAPE | one for one in (states.about["settings"], identity(resolved)))
    # The saved keys of the model count, too: either may have left out a default.
    keys = [*wanted, *(key for key in saved if key.startswith("model.") and key not in wanted)]
    differences = {key: wanted.get(key) for key in keys if saved.get(key) != wanted.get(key)}
    states.has_optimizer = differences.pop("train.optimizer", None) is None
    if refused := {key: value for key, value in differences.items() if not key.startswith(("layout.", "engine."))}:
        of_model = any(key.startswith("model.") for key in refused)
        texts = (f"{key} is {saved.get(key)} in it and {value} in this run" for key, value in refused.items())
        raise CheckpointError(
            f"{folder} is a checkpoint of another {'model' if of_model else 'arithmetic'}: " + "; ".join(texts),
            "resume with the settings it was saved with, or start a new run",
        )
    return states, not differences


class Generators:
    """This rank's random generators: Python's, numpy's, torch's, and on a GPU the device's.

    Nothing draws from them in a training of ours, and then nothing is saved. A rank on which something has drawn, since
    the object was made or the states were restored, saves its own.

    A record has numpy's 624 words and 3 numbers, Python's 625 words and 1 number, as fp64; then the bytes of torch's
    generators.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unused: bytes | None = self._record()

    def _record(self) -> bytes:
        _, keys, *numbers = np.random.get_state()
        _, words, gauss = random.getstate()
        plain = np.array([*keys, *numbers, *words, math.nan if gauss is None else gauss])
        states = [torch.get_rng_state()]
        states += [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return plain.tobytes() + b"".join(state.numpy().tobytes() for state in states)

    def put(self, files: RankFiles) -> None:
        """Adds this rank's states, if something has drawn."""
        if (record := self._record()) != self._unused:
            files.put_bytes(generators_file(files.peers.rank), record)

    def load(self, folder: Path, rank: int, ranks: int) -> None:
        """Restores the states of this rank of `ranks`, if they were saved. 0.4.0 always saved them."""
        if (own := folder / generators_file(rank)).is_file():
            self._restore(own.read_bytes())
        elif (path := folder / GENERATORS).is_file():
            size = path.stat().st_size // ranks
            with path.open("rb") as file:
                file.seek(rank * size)
                self._restore(file.read(size))
        else:
            return
        self._unused = None

    def _restore(self, record: bytes) -> None:
        keys, numbers, words, gauss = np.split(np.frombuffer(record[: 8 * _PLAIN[-1]]), _PLAIN[:-1])
        np.random.set_state(("MT19937", keys.astype(np.uint32), int(numbers[0]), int(numbers[1]), float(numbers[2])))
        random.setstate((3, tuple(map(int, words)), None if math.isnan(gauss[0]) else float(gauss[0])))
        states = torch.frombuffer(bytearray(record[8 * _PLAIN[-1] :]), dtype=torch.uint8)
        size = len(torch.get_rng_state())
        torch.set_rng_state(states[:size])
        if self._device.type == "cuda" and len(states) > size:
            torch.cuda.set_rng_state(states[size:], self._device)


def generators_file(rank: int) -> str:
    """The file of a rank's generators."""
    return f"generators-{rank:05d}.bin"


def put_positions(files: RankFiles, positions: Mapping[int, Mapping[str, Any]]) -> None:
    """Adds the positions of all data-parallel ranks, on rank 0, if there are any. Collective."""
    everyones = {dp_rank: one for part in files.peers.gather(positions) for dp_rank, one in part.items()}
    if everyones:
        files.put_bytes(POSITIONS, json.dumps(everyones).encode() + b"\n")


def read_positions(folder: Path) -> dict[int, dict[str, Any]]:
    """The positions of all data-parallel ranks; empty for data whose samples depend on the step alone."""
    if not (folder / POSITIONS).is_file():
        return {}
    return {int(dp_rank): position for dp_rank, position in load_json(folder / POSITIONS).items()}
