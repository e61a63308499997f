"""Which attention kernel is taken, and what is said of one that cannot run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.engines.attention import attention_kernels, attention_used
from tests.train.launch import settings

CPU = torch.device("cpu")


def asking(attention: str) -> Resolved:
    resolved = settings(Path("none.tokens"), {"tp": 1, "pp": 1, "dp": 1})
    return replace(resolved, engine=replace(resolved.engine, attention=attention))


def kernel_that_ran(context: Any) -> str:
    """The kernel of a call's autograd node."""
    query, key, value = torch.randn(2, 32, 3, 4, 8, requires_grad=True).permute(2, 0, 3, 1, 4)
    with context():
        node = F.scaled_dot_product_attention(query, key, value, is_causal=True).grad_fn
    names = []
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return "flash" if any("FlashAttention" in name for name in names) else "math"


@pytest.mark.parametrize(("asked", "used"), [("auto", "flash"), ("flash", "flash"), ("math", "math")])
def test_the_kernel_asked_for_runs_and_is_the_one_named(asked: str, used: str) -> None:
    resolved = asking(asked)
    assert attention_used(resolved, CPU) == used
    assert kernel_that_ran(attention_kernels(resolved, CPU)) == used


@pytest.mark.parametrize("asked", ["cudnn", "efficient"])
def test_a_kernel_that_a_cpu_lacks_is_refused_with_those_it_has(asked: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.attention is {asked}, but that kernel cannot run here") as refused:
        attention_kernels(asking(asked), CPU)
    assert refused.value.hint == 'use engine.attention = "auto", or flash or math'
    assert "\n" not in str(refused.value)


def test_the_choice_ends_with_the_context() -> None:
    with attention_kernels(asking("math"), CPU)():
        pass
    assert attention_used(asking("auto"), CPU) == "flash"
