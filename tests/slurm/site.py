"""The cluster for checks: every node, feature, account, qos and partition that a shipped profile asks for."""

from hpc_gpt.core.files import clusters_dir
from hpc_gpt.core.settings.cluster import ClusterProfile, load_profile
from tests.slurm.cluster import ClusterSpec, Nodes

FOUR_GPU_NODES = 64
EIGHT_GPU_NODES = 8
MEMORY_MIB = 512 * 1024  # at least what a profile asks for each node


def slurm_profiles() -> list[ClusterProfile]:
    """The shipped profiles whose scheduler is Slurm; a user's own of the same name does not count here."""
    profiles = [load_profile(str(path)) for path in sorted(clusters_dir().glob("*.toml"))]
    return [profile for profile in profiles if profile.scheduler == "slurm"]


def checks_spec() -> ClusterSpec:
    """A cluster on which what a profile asks for exists and anything else does not."""
    profiles = slurm_profiles()
    shapes: dict[tuple[int, tuple[str, ...]], int] = {}
    for profile in profiles:
        features = tuple(profile.constraint.split("&")) if profile.constraint else ()
        shape = (profile.gpus_per_node, features)
        shapes[shape] = max(shapes.get(shape, 0), profile.cpus_per_node or 8)
    nodes = tuple(
        Nodes(
            f"{chr(ord('a') + number)}",
            FOUR_GPU_NODES if gpus <= 4 else EIGHT_GPU_NODES,
            gpus,
            cpus,
            features,
            MEMORY_MIB,
        )
        for number, ((gpus, features), cpus) in enumerate(sorted(shapes.items()))
    )
    named = sorted({profile.partition for profile in profiles if profile.partition})
    partitions = ["PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]
    partitions += [f"PartitionName={name} Nodes=ALL MaxTime=INFINITE State=UP" for name in named]
    return ClusterSpec(
        "checks",
        nodes,
        tuple(partitions),
        qos=tuple(sorted({profile.qos for profile in profiles if profile.qos})),
        accounts=("research", *sorted({profile.account for profile in profiles if profile.account})),
        powered=False,
        options=("AccountingStorageEnforce=associations,qos",),
    )
