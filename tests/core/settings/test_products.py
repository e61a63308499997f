"""What a run with `train.matmul` is refused for before it is queued; `plan` may know it all the same."""

from dataclasses import replace
from typing import Any

import pytest

from hpc_gpt.core.errors import ConfigError, raise_faults
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.rules.engine import product_faults


def check(
    cluster: str = "h100-80g-8", engine: str = "ddp", dtype: Any = "bf16", matmul: Any = "fp8-tensor",
    layout: dict[str, int] | None = None, device: str | None = None, **sizes: int,
) -> None:  # fmt: skip
    model = {"hidden": 64, "layers": 2, "heads": 4, "seq": 64} | sizes
    request = LayoutRequest(**{"gpus": 1, "micro_batch": 1, "micro_batches": 1} | (layout or {}))
    train = Train(steps=10, dtype=dtype, matmul=matmul)
    experiment = Experiment(model=Model(**model), engine=Engine(engine), layout=request, train=train)
    profile = load_profile(cluster)
    raise_faults(product_faults(resolve(experiment, replace(profile, device=device or profile.device))))


def test_what_trains_is_accepted():
    check()
    check("generic-slurm")
    check(engine="fsdp", layout={"gpus": 2, "tp": 2})
    check(layout={"gpus": 4, "cp": 4})
    check("a100-80g-8", engine="deepspeed-zero", dtype="fp16", matmul="none")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"matmul": "fp8-row"}, "train.matmul is fp8-row, but no engine trains with such products"),
        ({"matmul": "nvfp4"}, "train.matmul is nvfp4, but no engine trains with such products"),
        ({"engine": "deepspeed-zero"}, "which engine deepspeed-zero does not have"),
        ({"cluster": "a100-80g-8"}, "a100-80g has no FP8 units"),
        ({"cluster": "jean-zay-v100-16g", "dtype": "fp16"}, "v100-16g has no FP8 units"),
        ({"device": "mi250x"}, "mi250x has no FP8 units"),
        ({"device": "max-1550"}, "max-1550 has no FP8 units"),
        ({"device": "mi300a"}, "mi300a has FP8 in a format of its own"),
        ({"dtype": "fp16"}, "train.dtype is fp16"),
        ({"dtype": "fp32"}, "train.dtype is fp32"),
        ({"hidden": 72}, "model.hidden 72 is 72 on a rank"),
        ({"ffn": 200}, "ffn 200 is 200 on a rank"),
        ({"engine": "fsdp", "layout": {"gpus": 2, "tp": 2}, "ffn": 288}, None),
        ({"engine": "fsdp", "layout": {"gpus": 2, "tp": 2}, "ffn": 304}, "ffn 304 over tp 2 is 152"),
        ({"layout": {"gpus": 4, "cp": 4}, "seq": 32}, "32 tokens over cp 4 are 8 on a rank"),
        ({"seq": 24}, "24 tokens are 24 on a rank"),
    ],
)
def test_what_cannot_train_is_refused_with_a_hint(asked: dict[str, Any], words: str | None):
    if words is None:
        check(**asked)
        return
    with pytest.raises(ConfigError) as refused:
        check(**asked)
    assert words in str(refused.value)
    assert "leave" in refused.value.hint
