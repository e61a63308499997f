"""What the sharded checkpoint knows of its mesh."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.trainer.checkpoints.sharded import ShardedCheckpoint
from hpc_gpt.trainer.engines.fsdp import build_mesh, place
from hpc_gpt.trainer.model.tensor_parallel import Split, full_name, name_parameter


def _parameters(layout: Layout, split: Split) -> tuple[DTensor, nn.Parameter]:
    """(a parameter over the layout's mesh, its shard) of rank 1."""
    mesh = build_mesh(layout, torch.device("cpu"))
    like = DTensor.from_local(torch.zeros(3, 2), mesh["dp"], run_check=False)
    parameter = place(like, split, mesh)
    assert isinstance(parameter, DTensor)
    return parameter, name_parameter(nn.Parameter(parameter.to_local().detach()), "qkv", split)


def test_a_mesh_of_ended_groups_is_not_asked_for_its_ranks() -> None:
    split, layout = Split(0, 3), Layout(1, 1, 2)
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        _parameters(layout, split)
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        for _ in range(3):
            dist.new_group([0, 1])  # they take the names of the groups that have ended
        parameter, shard = _parameters(layout, split)
        assert parameter.device_mesh["tp"].get_local_rank() == 1, "torch keeps it no more: this test shows nothing"
        checkpoint = ShardedCheckpoint([parameter], [shard], torch.optim.SGD([shard]))
        whole = torch.arange(12.0).view(6, 2)
        assert torch.equal(checkpoint._share(full_name(shard), whole), whole[3:])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
