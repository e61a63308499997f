"""What the choice of a device and of an engine refuses before anything is built."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpc_gpt.core.errors import LayoutError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.trainer.engines.build import allow_tf32, check_dtype_on, check_matmul_on
from hpc_gpt.trainer.ranks import choose_device
from hpc_gpt.trainer.supervision.meeting import RankIdentity
from tests.trainer.launch import LOCAL, settings

FOUR_RANKS = settings(Path("none.tokens"), {"tp": 1, "pp": 1, "dp": 4})
SITE = ClusterProfile(name="site")
V100 = ClusterProfile(name="jean-zay", device="v100-32g")


def test_a_cpu_and_the_oldest_card_have_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, engine in (("fp32", "deepspeed-3d"), ("bf16", "deepspeed-3d"), ("fp16", "ddp"), ("fp16", "fsdp")):
        check_dtype_on(dtype, torch.device("cpu"), engine)
    for card, check in (
        ((7, 0), lambda device: check_dtype_on("fp16", device, "deepspeed-3d")),
        ((8, 0), lambda device: check_dtype_on("bf16", device, "ddp")),
        ((8, 9), lambda device: check_matmul_on("fp8-tensor", device)),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, card=card: card)
        check(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("found", "profile", "device"),
    [
        (4, V100, "cuda:3"), (4, LOCAL, "cuda:3"), (1, LOCAL, "cpu"), (0, LOCAL, "cpu"), (0, SITE, "cpu"),
        (1, SITE, None),
    ],
)  # fmt: skip
def test_a_job_on_gpus_does_not_quietly_train_on_cpus(monkeypatch, found, profile, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    rank, resolved = RankIdentity(3, 4, 3), replace(FOUR_RANKS, cluster=profile)
    if device:
        assert str(choose_device(rank, resolved)) == device
        return
    with pytest.raises(LayoutError):
        choose_device(rank, resolved)


@pytest.mark.parametrize(
    ("srun", "found", "device"),
    [
        (("--gpus-per-task=1",), 1, "cuda:0"),
        (("--mpi=none", "--gpu-bind=closest"), 1, "cuda:0"),
        (("--gpu-bind=closest",), 4, "cuda:3"),
        (("--gpu-bind=closest",), 2, None),
        (("--gpu-bind=none",), 1, None),
    ],
)
def test_a_rank_takes_the_one_gpu_that_srun_gave_it(monkeypatch, srun, found, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    resolved = replace(FOUR_RANKS, cluster=V100, job=replace(FOUR_RANKS.job, srun=srun))
    if device:
        assert str(choose_device(RankIdentity(3, 4, 3), resolved)) == device
        return
    with pytest.raises(LayoutError):
        choose_device(RankIdentity(3, 4, 3), resolved)


@pytest.mark.parametrize(
    ("hip", "cuda", "rocr", "left"),
    [("7.1", "3", "3", None), ("7.1", "0", "3", "0"), ("7.1", "3", None, "3"), (None, "3", "3", "3")],
)
def test_under_hip_a_gpu_is_not_chosen_twice(monkeypatch, hip, cuda, rocr, left):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, value in (("CUDA_VISIBLE_DEVICES", cuda), ("ROCR_VISIBLE_DEVICES", rocr)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    choose_device(RankIdentity(3, 4, 3), replace(FOUR_RANKS, cluster=LOCAL))
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == left


def test_tf32_is_what_was_asked_for_in_every_switch_that_is_read() -> None:
    try:
        for asked in (True, False):
            allow_tf32(asked)
            assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if asked else "ieee")
            assert torch.get_float32_matmul_precision() == ("high" if asked else "highest")
            assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is asked
    finally:
        allow_tf32(False)
