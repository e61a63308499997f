"""A checkpoint is data: a program hidden in one of its files is not run."""

import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_gpt.trainer.checkpoints.folders import load_safely
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.training_state import load_random_state, put_random_state

CPU = torch.device("cpu")


class Program:
    """Makes a folder as soon as it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


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


def test_generators_continue_from_a_checkpoint(tmp_path: Path) -> None:
    files = RankFiles()
    put_random_state(files, 0, CPU)
    files.write(tmp_path)
    expected = torch.rand(3).tolist(), random.random(), np.random.random()
    load_random_state(tmp_path, 0, CPU)
    assert (torch.rand(3).tolist(), random.random(), np.random.random()) == expected
