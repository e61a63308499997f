"""fp32 master weights of a half model, by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_gpt.model.tensor_parallel import Split, full_name, name_parameter, split_of
from hpc_gpt.train.engines.master_weights import MasterWeights


def weights() -> list[nn.Parameter]:
    return [
        name_parameter(nn.Parameter(torch.full((4, 4), 1.0)), "one.weight", Split(0, 3)),
        name_parameter(nn.Parameter(torch.full((4,), 2.0)), "two.bias"),
    ]


def test_masters_are_what_the_weights_were() -> None:
    given = weights()
    given[0].data += 1e-4  # too little for bf16
    masters = MasterWeights(given, torch.bfloat16)
    assert [one.dtype for one in given] == [torch.bfloat16] * 2
    assert torch.equal(masters.masters[0], torch.full((4, 4), 1.0 + 1e-4))
    assert [full_name(one) for one in masters.masters] == ["one.weight", "two.bias"]
    assert [split_of(one) for one in masters.masters] == [Split(0, 3), None]
    assert masters.master_of(given[1]) is masters.masters[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_add_up_in_fp32_and_the_halves_are_dropped(dtype: torch.dtype) -> None:
    given = weights()
    masters = MasterWeights(given, dtype)
    small = 2.0**-11  # what 1 + small loses in either half
    for factor in (1.0, small, small, small):
        (given[0] * torch.tensor(factor, dtype=dtype)).sum().backward()
        assert given[0].grad is None
    gradient = masters.masters[0].grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full((4, 4), 1.0 + 3 * small))
    assert masters.masters[1].grad is None


def test_what_others_collect_stays() -> None:
    given = weights()
    masters = MasterWeights(given, torch.bfloat16)
    masters.collects = False
    given[0].sum().backward()
    assert given[0].grad is not None
    assert masters.masters[0].grad is None


def test_small_updates_reach_the_weights_through_the_masters() -> None:
    given = weights()
    masters = MasterWeights(given, torch.bfloat16)
    for _ in range(64):
        masters.masters[0].data += 2.0**-14
        masters.copy_back()
    # Not one of them by itself would have moved a bf16 of 1.
    assert torch.equal(given[0].float(), torch.full((4, 4), 1.0 + 2.0**-8).bfloat16().float())
    assert torch.equal(masters.masters[0], torch.full((4, 4), 1.0 + 2.0**-8))
