"""The time limit of the process groups that a rank, DeepSpeed and FSDP make."""

import json
import subprocess
import sys
from pathlib import Path

RANK = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.trainer.engines.deepspeed_setup import import_deepspeed
from hpc_gpt.trainer.supervision.meeting import RankIdentity
from hpc_gpt.trainer.ranks import Ranks

deepspeed = import_deepspeed(torch.device("cpu"))

Ranks(RankIdentity(0, 1, 0), torch.device("cpu"), Attempt(Path(sys.argv[1])), 7200.0)
deepspeed.comm.init_distributed()
deepspeed.comm.new_group([0])
DeviceMesh("cpu", [[0]], mesh_dim_names=("tp", "dp"))
module = dist.distributed_c10d
limits = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in module._world.pg_map]
print(json.dumps([*limits, module._get_default_timeout("nccl").total_seconds()]))
sys.stdout.flush()
os._exit(0)
"""


def test_every_process_group_has_the_limit_of_the_run(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RANK, str(tmp_path)], capture_output=True, text=True, check=True)
    limits = json.loads(done.stdout.splitlines()[-1])
    assert len(limits) >= 4  # all ranks, the hosts, DeepSpeed's; and what NCCL's would get
    assert set(limits) == {7200.0}
