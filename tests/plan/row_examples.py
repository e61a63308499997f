"""Rows made up for tests, in the format of the published ones."""

from typing import Any

PLAIN: dict[str, Any] = {
    "id": "made-1",
    "source": "made",
    "device": "a100-80g",
    "gpus_per_node": 8,
    "fabric": "infiniband 8x200G",
    "gpus": 64,
    "model": "GPT",
    "hidden": 4096,
    "layers": 32,
    "heads": 32,
    "vocab": 50257,
    "seq": 2048,
    "tp": 4,
    "pp": 4,
    "dp": 4,
    "micro_bs": 2,
    "global_bs": 256,
    "recompute": "full",
    "zero_stage": 0,
    "dtype": "fp16",
    "sec_per_iter": 9.0,
    "memory_gib": 22.0,
    "memory_kind": "nvidia_smi",
    "fits": True,
    "noisy": False,
}


def row(**fields: Any) -> dict[str, Any]:
    """The plain row with other fields; None takes one out."""
    return {name: value for name, value in {**PLAIN, **fields}.items() if value is not None}
