"""The cluster that is tortured, the profile and the experiment: a tiny GPT at tp2 x pp2 x dp2 on 2 or 4 nodes, or one
of experts that are divided over ranks, at tp2 x dp4; for tests/slurm two ranks of fsdp, on two nodes."""

from pathlib import Path

from bench.torture.order import SAVE_EVERY, STEPS
from tests.slurm.cluster import Cluster, ClusterSpec, Nodes
from tests.slurm.launcher import TINY, Launcher

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

_DENSE = (
    f'name = "tiny"{TINY}'
    + """
engine = {{ name = "deepspeed-3d", zero_stage = 1 }}
layout = {{ gpus = {gpus}, tp = 2, pp = 2, micro_batch = 2, micro_batches = 2 }}
"""
)
_TWO_RANKS = (
    f'name = "tiny"{TINY}'
    + """
engine = {{ name = "fsdp" }}
layout = {{ gpus = {gpus}, micro_batch = 2, micro_batches = 2 }}
"""
)
# A bias chooses the experts and moves after each step: a run that resumes with another one has other losses.
_MIXTURE = """
name = "tiny"
model = {{ hidden = 32, layers = 4, heads = 4, vocab = 256, seq = 32, mlp = "swiglu", norm = "rmsnorm",\
 positions = "rope", bias = "none", experts = 8, experts_per_token = 2, expert_ffn = 32, router = "sigmoid",\
 router_bias = true, norm_topk = true }}
data = {{ source = "tokens", path = "{tokens}" }}
engine = {{ name = "fsdp" }}
layout = {{ gpus = {gpus}, tp = 2, ep = {ep}, micro_batch = 2, micro_batches = 2 }}
"""
_TRAIN = """
train = {{ steps = {steps}, dtype = "fp32", deterministic = true, lr = 1e-3, warmup_steps = 4, log_every = 1,\
 save_every = {save_every}{balance} }}
"""


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


def make_launcher(cluster: Cluster, folder: Path, partition: str, nodes: int, ranks: int = 8, ep: int = 1) -> Launcher:
    """hpc-gpt with all its folders under `folder`, for runs of `ranks` ranks on `nodes` nodes of a partition."""
    nodes = min(nodes, max(2, ranks // 2))  # tp2 stays within a node
    folder.mkdir(parents=True)
    launcher = Launcher(cluster, folder)
    profile = _PROFILE.format(gpus_per_node=ranks // nodes, partition=partition)
    (folder / "config" / "clusters" / "site.toml").write_text(profile)
    experiment = (_MIXTURE if ep > 1 else _TWO_RANKS if ranks == 2 else _DENSE) + _TRAIN
    balance = ", balance_rate = 0.02" if ep > 1 else ""
    values = {"gpus": ranks, "ep": ep, "steps": STEPS, "save_every": SAVE_EVERY, "balance": balance}
    launcher.experiment.write_text(experiment.format(tokens=folder / "some.tokens", **values))
    return launcher
