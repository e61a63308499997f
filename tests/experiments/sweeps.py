"""The sources' sweeps and their rows, resolved as a cluster would have them."""

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import ExperimentFile, find_sweep, load_experiment
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sweep_rows import SweepRow

# Rows of each folder: as many as its published tables have, and those that the source names without a figure.
COUNTS = {
    "gpt2-meg": 29,
    "gpt2-meg-ds-3d": 1,
    "gpt2-meg-ds-zero": 8 + 2,
    "gpt2-hf-ds": 6,
    "mingpt-fsdp": 11,
    "colab-ladder": 9 + 3,
    "training-parallelism": 3 + 4,
    "memory-ladder": 7,
}
# Clusters of nodes with 4 GPUs, as the sources' were.
PROFILES = ("generic-slurm", "jean-zay-v100-32g")


def sweep(name: str) -> ExperimentFile:
    """The sweep of that folder."""
    found = find_sweep(name)
    assert found is not None
    return found


def settle(name: str, row: str, profile: str = PROFILES[0]) -> Resolved:
    """One row as it would run."""
    return resolve(load_experiment(name, row=row), load_profile(profile))


def possible_rows() -> list[tuple[str, SweepRow]]:
    """(folder, row) of every row that can run."""
    return [(name, row) for name in COUNTS for row in sweep(name).possible]
