"""What the choice of a device and of an engine refuses before anything is built."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpc_gpt.core.errors import ConfigError, LayoutError, UserError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.trainer.supervision.meeting import RankIdentity
from hpc_gpt.trainer.train.engines.protocol import allow_tf32, build_engine, check_dtype_on
from hpc_gpt.trainer.train.ranks import choose_device
from tests.train.launch import LOCAL, settings

FOUR_RANKS = settings(Path("none.tokens"), {"tp": 1, "pp": 1, "dp": 4})
SITE = ClusterProfile(name="site")
V100 = ClusterProfile(name="jean-zay", device="v100-32g")


@pytest.mark.parametrize("engine", ["deepspeed-3d", "deepspeed-zero", "hf-deepspeed"])
def test_deepspeed_has_no_fp16_on_a_cpu(engine: str) -> None:
    with pytest.raises(UserError, match=r"train\.dtype is fp16, but DeepSpeed does not train in fp16") as refused:
        check_dtype_on("fp16", torch.device("cpu"), engine)
    assert "bf16" in refused.value.hint
    assert "ddp" in refused.value.hint


@pytest.mark.parametrize(
    ("dtype", "engine"), [("fp32", "deepspeed-3d"), ("bf16", "deepspeed-3d"), ("fp16", "ddp"), ("fp16", "fsdp")]
)
def test_a_cpu_has_the_others(dtype: str, engine: str) -> None:
    check_dtype_on(dtype, torch.device("cpu"), engine)


def test_a_v100_has_no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(UserError, match=r"Tesla V100 \(compute capability 7\.0\) has no bf16") as refused:
        check_dtype_on("bf16", torch.device("cuda", 0), "ddp")
    assert "fp16" in refused.value.hint
    check_dtype_on("fp16", torch.device("cuda", 0), "deepspeed-3d")


@pytest.mark.parametrize(
    ("switches", "named"),
    [
        ({"one_pass_loss": True}, "engine.one_pass_loss is true"),
        ({"fused_bias_gradients": True}, "engine.fused_bias_gradients is true"),
        ({"compile": "block"}, 'engine.compile_backend is "inductor"'),
    ],
    ids=["one pass", "bias gradients", "inductor"],
)
@pytest.mark.parametrize(
    "engine",
    [
        Engine("ddp"),
        Engine("fsdp", offload="full"),
        Engine("deepspeed-zero", 3, offload="full"),
        Engine("deepspeed-3d", 1),
    ],
    ids=lambda engine: f"{engine.name} {engine.offload}",
)
def test_a_gpu_without_triton_is_noticed_before_building(monkeypatch, engine, switches, named):
    """Offloaded parameters are on the host, where Triton is not needed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    resolved = replace(FOUR_RANKS, engine=replace(engine, **switches), train=replace(FOUR_RANKS.train, dtype="bf16"))
    with pytest.raises(ConfigError, match=f"{named}, which needs Triton for a GPU") as refused:
        build_engine(resolved, torch.device("cuda", 0))
    assert "install torch's CUDA wheel" in refused.value.hint


@pytest.mark.parametrize(
    ("found", "profile", "device"),
    [
        (4, V100, "cuda:3"),
        (4, LOCAL, "cuda:3"),
        (1, LOCAL, "cpu"),
        (0, LOCAL, "cpu"),
        (0, SITE, "cpu"),
        (0, V100, None),
        (1, V100, None),
        (1, SITE, None),
    ],
)
def test_a_job_on_gpus_does_not_quietly_train_on_cpus(monkeypatch, found, profile, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    rank, resolved = RankIdentity(3, 4, 3), replace(FOUR_RANKS, cluster=profile)
    if device:
        assert str(choose_device(rank, resolved)) == device
        return
    with pytest.raises(LayoutError, match=r"rank 3 sees none|but 1 GPUs are visible to rank 3") as refused:
        choose_device(rank, resolved)
    assert ("nvidia-smi" if not found else "gpus_per_node") in refused.value.hint


def test_tf32_is_what_was_asked_for_in_every_switch_that_is_read() -> None:
    try:
        for asked in (True, False):
            allow_tf32(asked)
            assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if asked else "ieee")
            assert torch.get_float32_matmul_precision() == ("high" if asked else "highest")
            assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is asked
    finally:
        allow_tf32(False)
