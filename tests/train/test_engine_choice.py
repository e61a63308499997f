"""What the choice of an engine refuses before it builds one."""

from __future__ import annotations

import pytest
import torch

from hpc_gpt.errors import UserError
from hpc_gpt.train.engine import check_dtype


def test_a_cpu_has_no_fp16() -> None:
    with pytest.raises(UserError, match=r"train\.dtype is fp16, but a CPU does not train in fp16") as refused:
        check_dtype("fp16", torch.device("cpu"))
    assert "bf16" in refused.value.hint


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_cpu_has_the_others(dtype: str) -> None:
    check_dtype(dtype, torch.device("cpu"))


def test_a_v100_has_no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(UserError, match=r"Tesla V100 \(compute capability 7\.0\) has no bf16") as refused:
        check_dtype("bf16", torch.device("cuda", 0))
    assert "fp16" in refused.value.hint
    check_dtype("fp16", torch.device("cuda", 0))
