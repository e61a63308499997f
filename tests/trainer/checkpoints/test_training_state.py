"""Of which model, layout and arithmetic a checkpoint is; its generators; and that it is data: no program is run."""

import os
import random
import re
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.folders import load_safely
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.training_state import (
    check_identity,
    load_generators,
    put_generators,
    put_identity,
    read_identity,
)
from tests.trainer.launch import settings

CPU = torch.device("cpu")
RESOLVED = settings(Path("none.tokens"), {"tp": 2, "pp": 1, "dp": 2})
DP_AND_STAGE = frozenset({"layout.dp", "engine.zero_stage"})


def write(folder: Path, resolved: Resolved) -> None:
    files = RankFiles()
    put_identity(files, resolved, 20)
    files.write(folder)


def test_the_same_run_differs_in_nothing_convertibles_are_told(tmp_path: Path) -> None:
    write(tmp_path, RESOLVED)
    assert read_identity(tmp_path)["step"] == 20
    assert check_identity(tmp_path, read_identity(tmp_path), RESOLVED) == frozenset()
    wider = replace(RESOLVED, layout=Layout(2, 1, 4))
    assert check_identity(tmp_path, read_identity(tmp_path), wider, DP_AND_STAGE) == {"layout.dp"}


def test_cp_may_be_converted(tmp_path: Path) -> None:
    plain, wide = (replace(RESOLVED, layout=Layout(2, 1, 2, cp)) for cp in (1, 2))
    for saved, resumed, words in (
        (plain, wide, "is 1 in it and 2 in this run"),
        (wide, plain, "is 2 in it and 1 in this run"),
    ):
        (folder := tmp_path / str(saved.layout)).mkdir()
        write(folder, saved)
        assert check_identity(folder, read_identity(folder), saved) == frozenset()
        assert check_identity(folder, read_identity(folder), resumed, frozenset({"layout.cp"})) == {"layout.cp"}
        with pytest.raises(CheckpointError, match=rf"layout\.cp {words}"):
            check_identity(folder, read_identity(folder), resumed)


def test_a_models_keys_are_compared_both_ways(tmp_path: Path) -> None:
    """A default is in neither file, so a key may be in the checkpoint's alone."""
    plain = replace(RESOLVED.model, mlp="swiglu", norm="rmsnorm", positions="rope", bias="none")
    plain = replace(plain, experts=4, experts_per_token=2, expert_ffn=8)
    for key, value in {
        "norm_topk": True, "router": "sigmoid", "router_scale": 2.5, "expert_groups": 2, "rotated": 0.5,
        "rope_theta": 5e5, "norm_eps": 1e-6, "nope_every": 2, "pad_token": 3,
    }.items():  # fmt: skip
        other = replace(plain, **{key: value})
        default = getattr(plain, key)
        for saved, resumed, words in (
            (other, plain, f"{value} in it and {default}"),
            (plain, other, f"{default} in it and {value}"),
        ):
            (tmp_path / "model.json").unlink(missing_ok=True)
            write(tmp_path, replace(RESOLVED, model=saved))
            assert check_identity(tmp_path, read_identity(tmp_path), replace(RESOLVED, model=saved)) == frozenset()
            with pytest.raises(CheckpointError, match=re.escape(f"model.{key} is {words} in this run")):
                check_identity(tmp_path, read_identity(tmp_path), replace(RESOLVED, model=resumed))


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
    put_generators(files, CPU)
    files.write(tmp_path)
    expected = torch.rand(3).tolist(), random.random(), np.random.random()
    load_generators(tmp_path, 0, 1, CPU)
    assert (torch.rand(3).tolist(), random.random(), np.random.random()) == expected
