"""Bytes of a checkpoint: as the newest ones of a run say, else from what an engine keeps of each parameter."""

from __future__ import annotations

from hpc_gpt.runs.lineage import newest_step
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.small_files import read_json

# Bytes a parameter of the optimizer's fp32 moments.
_MOMENTS = {"adamw": 8, "sgd": 0}
# DeepSpeed's files hold the model's weights and the optimizer's own fp32 copy of them; these hold one copy.
_ONE_COPY = ("ddp", "fsdp")


def bytes_a_parameter(resolved: Resolved) -> int:
    """What a checkpoint holds of each parameter. Measured with each engine in fp32 and bf16: 12.1, 12.1 (ddp), 12.8,
    12.8 (fsdp), 16.1, 14.1 (deepspeed-3d), 16.1, 14.1 (deepspeed-zero); not measured with the others."""
    train = resolved.train
    masters = 4 + _MOMENTS[train.optimizer]
    if resolved.engine.name in _ONE_COPY:
        return masters
    return masters + (4 if train.dtype == "fp32" else 2)


def checkpoint_bytes(resolved: Resolved) -> int:
    """The size to come of one checkpoint of a run."""
    return resolved.model.params * bytes_a_parameter(resolved)


def newest_checkpoint_bytes(run: RunFolder) -> int | None:
    """The size of a run's newest complete checkpoint; None where there is none, or it does not say."""
    step = newest_step(run)
    if step is None:
        return None
    files = read_json(run.checkpoints / f"step-{step:08d}" / "complete.json").get("files")
    sizes = [each.get("bytes") for each in files.values() if isinstance(each, dict)] if isinstance(files, dict) else []
    known = [size for size in sizes if isinstance(size, int)]
    return sum(known) or None
