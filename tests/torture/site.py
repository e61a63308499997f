"""The cluster that is tortured, the profile and the experiment: tp2 x pp2 x dp2 of a tiny GPT on 2 or 4 nodes."""

from pathlib import Path

from tests.slurm.cluster import Cluster, ClusterSpec, Nodes
from tests.slurm.launcher import TINY, Launcher
from tests.torture.order import SAVE_EVERY, STEPS

# Of each lane's nodes a run takes two or four; the others replace one that is dead.
NODES_A_LANE = 6
FOLDER = Path(__file__).resolve().parents[2] / "build" / "torture"

_PROFILE = """
gpus_per_node = {gpus_per_node}
cpus_per_node = 4
partition = "{partition}"
time = "01:00:00"
exclusive = true
signal_lead_s = 5
retry_pause_s = 1
chain = "requeue"

[environment]
HPC_GPT_MASTER_ADDR = "127.0.0.1"
GLOO_SOCKET_IFNAME = "lo"
OMP_NUM_THREADS = "1"
"""

_EXPERIMENT = (
    f'name = "tiny"{TINY}'
    + """
engine = {{ name = "deepspeed-3d", zero_stage = 1 }}
layout = {{ gpus = {gpus}, tp = 2, pp = 2, micro_batch = 2, micro_batches = 2 }}
train = {{ steps = {steps}, dtype = "fp32", deterministic = true, lr = 1e-3, warmup_steps = 4, log_every = 1,\
 save_every = {save_every} }}
"""
)


def cluster_spec(lanes: int) -> ClusterSpec:
    """A partition for each lane, so that runs at once have disjoint nodes, and one above them all that preempts."""
    count = lanes * NODES_A_LANE
    partitions = [
        f"PartitionName={lane_name(lane)} Nodes=t[{first}-{first + NODES_A_LANE - 1}] "
        f"{'Default=YES ' if lane == 0 else ''}PriorityTier=1 GraceTime=25 MaxTime=INFINITE State=UP"
        for lane, first in enumerate(range(1, count + 1, NODES_A_LANE))
    ]
    high = "PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP PreemptMode=OFF"
    return ClusterSpec("torture", (Nodes("t", count),), (high, *partitions), unkillable_s=200)


def lane_name(lane: int) -> str:
    """The partition of a lane."""
    return f"lane{lane + 1}"


def make_launcher(cluster: Cluster, folder: Path, partition: str, nodes: int, ranks: int = 8) -> Launcher:
    """hpc-gpt with all its folders under `folder`, for runs of `ranks` ranks on `nodes` nodes of a partition."""
    nodes = min(nodes, ranks // 2)  # tp2 stays within a node
    folder.mkdir(parents=True)
    launcher = Launcher(cluster, folder)
    profile = _PROFILE.format(gpus_per_node=ranks // nodes, partition=partition)
    (folder / "config" / "clusters" / "site.toml").write_text(profile)
    experiment = _EXPERIMENT.format(tokens=folder / "some.tokens", gpus=ranks, steps=STEPS, save_every=SAVE_EVERY)
    launcher.experiment.write_text(experiment)
    return launcher
