"""The driver's names of GPUs."""

from __future__ import annotations

import pytest

from hpc_gpt.settings.cluster import device_named, peak_tflops
from tests.readers.dialects.reading import facts_of, read_text


@pytest.mark.parametrize(
    ("line", "device"),
    [
        ("GPU 0: Tesla V100-SXM2-32GB (UUID: GPU-00000000-0000-0000-0000-000000000000)", "v100-32g"),
        ("3: GPU 3: NVIDIA A100-SXM4-80GB (UUID: GPU-00000000-0000-0000-0000-000000000000)", "a100-80g"),
        ("|   0  NVIDIA H100 80GB HBM3          On  | 00000000:19:00.0 Off |                    0 |", "h100-80g"),
        ("|   7  NVIDIA H200                    On  |   00000000:DB:00.0 Off |                    0 |", "h200"),
    ],
)
def test_the_name(line: str, device: str) -> None:
    facts = facts_of(read_text(line))
    assert [device_named(name) for name in facts["device"]] == [device]
    assert facts["gpu_index"][0] in (0, 3, 7)


def test_a_table_of_more_than_eight_gpus_is_not_counted() -> None:
    lines = [f"GPU {at}: Tesla V100-SXM3-32GB (UUID: GPU-0000000{at % 10})" for at in range(16)]
    facts = facts_of(read_text("\n".join(lines)))
    assert (facts["gpu_index"], facts["gpu_index_above_7"]) == (list(range(8)), list(range(8, 16)))


def test_a_name_cut_short_is_none() -> None:
    assert not read_text("|   0  Tesla V100-SXM2...  On   | 00000000:1A:00.0 Off |                    0 |").facts


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("Using device: NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("GPU: NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 5090"),
        ("device name: NVIDIA GH200 480GB", "NVIDIA GH200 480GB"),
        ("CUDA device: A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("Device: TPU v5e", "TPU v5e"),
        ("GPU[0]\t\t: Card series: \t\tAMD Instinct MI300X", "AMD Instinct MI300X"),
        ("GPU[7]\t\t: Card Series: \t\tAMD Instinct MI355X", "AMD Instinct MI355X"),
    ],
)
def test_a_name_without_a_published_peak_is_kept_as_printed(line: str, name: str) -> None:
    assert facts_of(read_text(line))["device"] == [name]
    assert peak_tflops(device_named(name) or name, "bf16") is None


@pytest.mark.parametrize("line", ["device: cuda:0", "Using device: cuda", "GPU: 3", "device = torch.device(name)"])
def test_what_names_no_gpu(line: str) -> None:
    assert not read_text(line).facts
