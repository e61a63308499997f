"""Parts of torch and DeepSpeed that are replaced: the tested versions, and names that another version lacks."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.trainer.engines import library_patches
from hpc_gpt.trainer.engines.deepspeed_3d import Deepspeed3D
from hpc_gpt.trainer.engines.deepspeed_zero import DeepspeedZero
from hpc_gpt.trainer.engines.library_patches import PINNED, TESTED, note_untested, set_existing
from hpc_gpt.trainer.engines.torch_engine import LossScaler, is_fused
from tests.conftest import REPOSITORY
from tests.trainer.engines.updates import CPU, Update


def test_the_pinned_versions_are_tested_ones() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = dict(line.split("==") for line in lines if "==" in line)
    assert {name: constraints[name] for name in PINNED} == PINNED
    for package, version in PINNED.items():
        assert any(f"{version}.".startswith(f"{tested}.") for tested in TESTED[package])


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("2.13.0+cu130", True), ("2.11.0", True), ("2.13.1", True), ("2.14.0a0+git1", False), ("3.0", False),
        ("2.9.1", True), ("2.90.0", False), ("2.10.0+rocm7.1", False),
    ],
)  # fmt: skip
def test_an_untested_version_is_a_line(monkeypatch: Any, capsys: Any, version: str, is_tested: bool) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    note_untested("torch")
    note = (
        f"note: torch {version} is not among the tested versions, 2.9, 2.11, 2.13, 2.15. If the run fails in it: "
        "pip install 'torch==2.13.0'\n"
    )
    assert capsys.readouterr().err == ("" if is_tested else note)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    note_untested("torch")
    assert capsys.readouterr().err == ""


def test_a_name_that_a_version_lacks_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = SimpleNamespace(kept=1)
    assert set_existing("torch", owner, "kept", 2) == 1
    assert owner.kept == 2
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(
        ConfigError, match=r"^torch 2\.99\.0 has no SimpleNamespace\.renamed, which the trainer sets$"
    ) as refused:
        set_existing("torch", owner, "renamed", 2)
    assert refused.value.hint == "install the tested version: pip install 'torch==2.13.0'"
    assert not hasattr(owner, "renamed")


def test_a_fused_optimizer_without_torchs_mark_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that calls `found_inf` and `grad_scale` something else would ignore them without an error."""
    moved = []
    for has_mark in (True, False):
        weight = nn.Parameter(torch.ones(1))
        optimizer: Any = torch.optim.SGD([weight], lr=0.5, fused=True)
        if not has_mark:
            del optimizer._step_supports_amp_scaling
        assert is_fused(optimizer) is has_mark
        update = Update(optimizer, [weight], None, 2.0, LossScaler("fp32", CPU))
        for gradient in (8.0, torch.inf):
            weight.grad = torch.full((1,), gradient)
            update.apply(0.5)
        moved.append(weight.item())
    assert moved == [pytest.approx(0.0, abs=1e-6)] * 2


@pytest.mark.parametrize("engine", [DeepspeedZero, Deepspeed3D])
def test_a_step_lists_the_replaced_parts_that_are_there(engine: type) -> None:
    listed = re.findall(r"^ +- `(\w+)`", engine.train_step.__doc__ or "", re.MULTILINE)
    assert "skip_gradient_average" in listed
    assert [name for name in listed if not hasattr(library_patches, name)] == []
