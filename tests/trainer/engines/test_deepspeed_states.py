"""The places of parameters in DeepSpeed's flat tensors; fp16's loss scale as numbers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpc_gpt.core.settings.layout import Coordinate
from hpc_gpt.trainer.engines.deepspeed_engine import read_scaler, restore_scaler
from hpc_gpt.trainer.engines.deepspeed_states import DeepspeedStates
from hpc_gpt.trainer.model.tensor_parallel import Split, Tile, name_parameter
from tests.trainer.launch import settings

MODEL = settings(Path("none.tokens"), {"tp": 1, "pp": 1, "dp": 4}).model


def states_of(*parameters: Any, tp: int = 1, **optimizer: Any) -> DeepspeedStates:
    """The states of a module with these parameters, on tp rank 0; `optimizer`: what DeepSpeed's one has."""
    engine = SimpleNamespace(optimizer=SimpleNamespace(**optimizer))
    module: Any = SimpleNamespace(parameters=lambda: parameters)
    return DeepspeedStates(engine, module, MODEL, Coordinate(0, 0, 0), tp)


def test_tiles_follow_each_other_whatever_the_models_order() -> None:
    def tile(number: int, rows: int) -> nn.Parameter:
        return name_parameter(nn.Parameter(torch.zeros(rows, 5)), "up", Split(0), Tile(number, 3))

    parts = {"c": tile(2, 2), "a": tile(0, 4), "norm": name_parameter(nn.Parameter(torch.zeros(7)), "norm"),
             "b": tile(1, 4)}  # fmt: skip
    shares = states_of(*parts.values(), tp=2, bf16_groups=[]).shares
    assert {name: (shares[part].first, shares[part].count) for name, part in parts.items()} == {
        "a": (0, 20), "b": (20, 20), "c": (40, 10), "norm": (0, 7)
    }  # fmt: skip
    assert (shares[parts["b"]].shape, shares[parts["b"]].tp_shape, shares[parts["norm"]].shape) == (
        (20, 5), [10, 5], (7,)
    )  # fmt: skip


def test_the_pieces_of_stage_3_are_equal_but_for_what_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """10, 3 and 3 numbers over 3 ranks: the last pieces are short, or of nothing. No rank has whole parameters."""
    parameters: list[Any] = []
    for name, numel, size in (("a", 10, 4), ("b", 3, 2), ("c", 3, 1)):
        one: Any = name_parameter(nn.Parameter(torch.zeros(0)), name)
        one.ds_shape, one.ds_numel, one.ds_process_group = torch.Size((numel,)), numel, None
        one.partition_numel = lambda size=size: size
        parameters.append(one)
    found = []
    for rank in range(3):
        monkeypatch.setattr("torch.distributed.get_rank", lambda group, rank=rank: rank)
        pieces = states_of(*parameters, fp32_partitioned_groups_flat=[None], fp16_groups=[parameters]).pieces
        found.append([(one.share.name, one.offset, one.share.first, one.share.count) for one in pieces])
    assert found == [
        [("a", 0, 0, 4), ("b", 4, 0, 2), ("c", 6, 0, 1)],
        [("a", 0, 4, 4), ("b", 4, 2, 1), ("c", 6, 1, 1)],
        [("a", 0, 8, 2), ("c", 6, 2, 1)],
    ]


def test_a_loss_scale_goes_on_from_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved after any step of three windows, with overflows and without."""
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)

    def scaler() -> Any:
        return SimpleNamespace(optimizer=SimpleNamespace(
            loss_scaler=DynamicLossScaler(2.0**16, 4, 1, 2, False, dtype=torch.half)
        ))  # fmt: skip

    for saved_after in range(13):
        plain, before, after = scaler(), scaler(), scaler()
        for step in range(20):
            engines = [plain, before if step < saved_after else after]
            if step == saved_after:
                restore_scaler(after, read_scaler(before))
            for engine in engines:
                engine.optimizer.loss_scaler.update_scale(step in (1, 2, 3))
            assert engines[1].optimizer.loss_scaler.cur_scale == plain.optimizer.loss_scaler.cur_scale
