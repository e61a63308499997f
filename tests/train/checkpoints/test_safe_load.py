"""A checkpoint is data: a program hidden in one of its files is not run."""

import os
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.trainer.train.checkpoints.folders import load_metadata, load_safely
from hpc_gpt.trainer.train.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.train.checkpoints.training_state import load_random_state, put_random_state

CPU = torch.device("cpu")


class Program:
    """Makes a folder as soon as it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_program_in_a_file_of_tensors_is_refused(tmp_path: Path, mmap: bool) -> None:
    state = {"weights": torch.ones(3), "more": Program(tmp_path / "ran")}
    torch.save(state, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match=r"bad.pt cannot be read as data alone: .*"):
        load_safely(tmp_path / "bad.pt", mmap=mmap)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "bad.pt", weights_only=False)
    assert (tmp_path / "ran").exists(), "else this proves nothing"


def test_a_program_in_the_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Program(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"as data alone: it names posix\.mkdir"):
        load_metadata(tmp_path / ".metadata")
    assert not (tmp_path / "ran").exists()


def test_deepspeeds_own_classes_are_read(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    scaler = DynamicLossScaler(2.0**16, 2.0, 1000, 1, 2, False, torch.float16)
    state = OrderedDict(a=scaler, b=ZeroStageEnum.weights, c={"w": fragment_address(7, 3)}, d=torch.Size([2, 3]))
    torch.save(state, tmp_path / "sound.pt")
    found = load_safely(tmp_path / "sound.pt")
    assert vars(found["a"]) == vars(scaler)
    assert list(found.values())[1:] == list(state.values())[1:]


def test_generators_go_on_also_from_a_checkpoint_of_before(tmp_path: Path) -> None:
    files = RankFiles()
    put_random_state(files, 0, CPU)
    files.write(tmp_path)
    old = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    torch.save(old, tmp_path / "random-00001.pt")
    expected = torch.rand(3).tolist(), random.random(), np.random.random()
    for rank in (0, 1):
        load_random_state(tmp_path, rank, CPU)
        assert (torch.rand(3).tolist(), random.random(), np.random.random()) == expected
