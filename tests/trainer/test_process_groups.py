"""The time limit of the process groups that a rank, DeepSpeed and FSDP make."""

import json
from pathlib import Path

from tests.forked import FORKED


def make_groups(folder: str) -> None:
    """A rank's, in a process of its own: writes the seconds of each group's limit."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from hpc_gpt.core.runs.run_folder import Attempt
    from hpc_gpt.trainer.engines.deepspeed_setup import import_deepspeed
    from hpc_gpt.trainer.ranks import Ranks
    from hpc_gpt.trainer.supervision.meeting import RankIdentity

    cpu, module = torch.device("cpu"), dist.distributed_c10d
    deepspeed = import_deepspeed(cpu)
    Ranks(RankIdentity(0, 1, 0), cpu, Attempt(Path(folder)), 7200.0)
    deepspeed.comm.init_distributed()
    deepspeed.comm.new_group([0])
    DeviceMesh("cpu", [[0]], mesh_dim_names=("tp", "dp"))
    limits = [group._get_backend(cpu).options._timeout.total_seconds() for group in module._world.pg_map]
    limits.append(module._get_default_timeout("nccl").total_seconds())
    (Path(folder) / "limits.json").write_text(json.dumps(limits))


def test_every_process_group_has_the_limit_of_the_run(tmp_path: Path) -> None:
    rank = FORKED.Process(target=make_groups, args=(str(tmp_path),), daemon=True)
    rank.start()
    rank.join()
    limits = json.loads((tmp_path / "limits.json").read_text())
    assert len(limits) >= 4  # all ranks, the hosts, DeepSpeed's; and what NCCL's would get
    assert set(limits) == {7200.0}
