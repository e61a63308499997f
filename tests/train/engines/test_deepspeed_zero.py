"""What torch is told of pinned memory, and what it then takes."""

from __future__ import annotations

import pytest
import torch

from hpc_gpt.train.engines.deepspeed_zero import allocator_settings, pin_exact_sizes

OURS = "pinned_max_cached_size_mb:64"


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, OURS),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, f"expandable_segments:True,{OURS}"),
        ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"}, f"a:1,{OURS}"),
        ({"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "b:2"}, f"b:2,{OURS}"),
        ({"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1"}, None),
    ],
)
def test_the_users_own_settings_stay(environment: dict[str, str], settings: str | None) -> None:
    assert allocator_settings(environment) == settings


@pytest.mark.gpu
def test_a_large_buffer_takes_what_it_has_and_gives_it_back() -> None:
    pin_exact_sizes(torch.device("cuda"))
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    buffer = torch.empty(150 << 20, dtype=torch.uint8, pin_memory=True)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - before == 150 << 20
    del buffer
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before
