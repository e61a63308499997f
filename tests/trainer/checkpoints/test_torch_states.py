"""What an engine without DeepSpeed holds: the memory that a load takes, and a mesh whose groups have ended."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.states import SavedIndex, SavedStates, put_states
from hpc_gpt.trainer.checkpoints.torch_states import TorchStates, whole_share
from hpc_gpt.trainer.engines.fsdp import build_mesh, mesh_share, place
from hpc_gpt.trainer.model.tensor_parallel import Split, name_parameter
from tests.distributed.host_memory import Most

ROWS, NUMBERS = 4, 1 << 22  # 67 MB of weights, and twice that of moments
SHAPE = ModelShape(hidden=8, layers=1, heads=1)


def made(
    device: str, value: float, numbers: int = NUMBERS
) -> tuple[TorchStates, list[nn.Parameter], torch.optim.Optimizer]:
    weights = [torch.full((1, numbers), value + number, device=device) for number in range(ROWS)]
    parameters = [name_parameter(nn.Parameter(one), f"weight {number}") for number, one in enumerate(weights)]
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    shares = [whole_share(one, SHAPE) for one in parameters]
    return TorchStates(parameters, shares, optimizer, lambda share: True), parameters, optimizer


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "meta"])  # what is on "meta" takes no memory of the host, as on a GPU
def test_a_load_holds_nothing_beside_what_it_fills(device: str, tmp_path: Path) -> None:
    ours, parameters, optimizer = made("cpu", 1.0)
    for one in parameters:
        optimizer.state[one] = {"step": torch.tensor(3.0), "exp_avg": 2 * one.detach(), "exp_avg_sq": 3 * one.detach()}
    files = RankFiles()
    about = {"settings": {"layout.tp": 1}, "optimizer": ours.numbers()}
    put_states(files, ours.held(), about, SavedIndex())
    files.write(tmp_path)
    other, loaded, states = made(device, 0.0)
    most = Most()
    other.load(SavedStates(tmp_path))
    beside = most.stop() - (2 * ROWS * NUMBERS * 4 if device == "cpu" else 0)
    assert beside < 16e6, f"{beside / 1e6:.0f} MB"
    if device == "cpu":
        for path in tmp_path.iterdir():
            path.unlink()
        assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "a file that is deleted stays on the disk"
        for one, then in zip(loaded, parameters, strict=True):
            assert torch.equal(one, then)
            assert states.state[one].keys() == optimizer.state[then].keys()
            assert all(torch.equal(states.state[one][key], value) for key, value in optimizer.state[then].items())


def test_an_optimizer_may_keep_other_states_of_each_parameter(tmp_path: Path) -> None:
    """As one does that moves matrices by one moment and the others by two."""
    ours, parameters, optimizer = made("cpu", 1.0, 8)
    optimizer.state[parameters[0]] = {"momentum": 2 * parameters[0].detach()}
    optimizer.state[parameters[1]] = {"step": torch.tensor(3.0), "exp_avg": 3 * parameters[1].detach()}
    assert ours.numbers() == {"step": 3.0}
    put_states(files := RankFiles(), ours.held(), {"settings": {"layout.tp": 1}, "optimizer": {}}, SavedIndex())
    files.write(tmp_path)
    saved = SavedStates(tmp_path)
    assert [saved.kinds(f"weight {number}") for number in range(3)] == [["momentum"], ["exp_avg"], []]
    assert torch.equal(saved.whole("weight 0", "momentum"), 2 * parameters[0])


def _shard(layout: Layout, split: Split) -> tuple[DTensor, nn.Parameter]:
    """(a parameter over the layout's mesh, its shard) of rank 1."""
    mesh = build_mesh(layout, torch.device("cpu"))
    like = DTensor.from_local(torch.zeros(3, 2), mesh["dp"], [Shard(0)], run_check=False)
    parameter = place(like, split, mesh)
    assert isinstance(parameter, DTensor)
    return parameter, name_parameter(nn.Parameter(parameter.to_local().detach()), "qkv", split)


def test_a_mesh_of_ended_groups_is_not_asked_for_its_ranks() -> None:
    split, layout = Split(0, 3), Layout(1, 1, 2)
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        _shard(layout, split)
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        for _ in range(3):
            dist.new_group([0, 1])  # they take the names of the groups that have ended
        parameter, shard = _shard(layout, split)
        assert parameter.device_mesh["tp"].get_local_rank() == 1, "torch keeps it no more: this test shows nothing"
        share = mesh_share(parameter, shard, SHAPE)
        assert (share.tp_rank, share.first, share.count) == (0, 6, 6)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
