"""Host memory that ZeRO-3 pins when it offloads: nothing while it builds, then what stays, in place."""

from types import SimpleNamespace

import deepspeed
import pytest
import torch

from hpc_gpt.trainer.engines.deepspeed_zero import clear_error, pin_what_stays
from hpc_gpt.trainer.engines.library_patches import pinning_nothing

MIB = 1 << 20


def test_nothing_is_pinned_meanwhile() -> None:
    accelerator = deepspeed.accelerator.get_accelerator()
    tensor, own = torch.zeros(3), accelerator.pin_memory.__func__
    with pinning_nothing(deepspeed):
        assert accelerator.pin_memory(tensor) is tensor
        assert accelerator.pin_memory(tensor, align_bytes=0) is tensor
    assert accelerator.pin_memory.__func__ is own


def states(*sizes: int, sums: int | None = None) -> SimpleNamespace:
    """An optimizer with a group of so many bytes each, its gradient beside it."""
    flats = [torch.zeros(size // 4, requires_grad=True) for size in sizes]
    for flat in flats:
        flat.grad = torch.zeros_like(flat)
    half = [torch.zeros(sum(sizes) // 4, dtype=torch.bfloat16)]
    return SimpleNamespace(
        fp32_partitioned_groups_flat=flats,
        grad_partitions_flat_buffer=None if sums is None else torch.zeros(sums // 4),
        param_groups_fp16_flat_cpu_memory=half,
    )


def test_what_stays_is_pinned_in_place_and_small_buffers_are_not() -> None:
    wrapped, registered = states(4 * MIB, 2 * MIB, 4096, sums=None), {}

    def register(address: int, count: int) -> int:
        registered[address] = count
        return 0

    assert pin_what_stays(wrapped, register, pytest.fail) == 4 * MIB + 2 * MIB + 3 * MIB + 2048
    gradients = [flat.grad for flat in wrapped.fp32_partitioned_groups_flat[:2]]
    stay = [*gradients, *wrapped.param_groups_fp16_flat_cpu_memory]
    assert registered == {one.data_ptr(): one.nbytes for one in stay}


def test_a_host_that_pins_no_more_is_a_line_cleared_once(capfd):
    calls: list[str] = []

    def register(address: int, count: int) -> int:
        calls.append("register")
        return 0 if len(calls) < 2 else 2

    assert pin_what_stays(states(2 * MIB, 2 * MIB), register, lambda: calls.append("clear")) == 2 * MIB
    assert calls == ["register", "register", "clear"]
    said = capfd.readouterr().err
    assert said.startswith("note: 0.0 GiB of the host's memory cannot be pinned (CUDA error 2): ")
    assert said.count("\n") == 1


def test_the_error_is_raised_by_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does on a GPU: the first launch after the failed call raises its error and clears it."""
    last, ones, launches = ["out of memory"], torch.ones, []

    def launch(*size: int, device: torch.device) -> torch.Tensor:
        launches.append(device)
        if last:
            raise RuntimeError(f"CUDA error: {last.pop()}")
        return ones(*size, device=device)

    monkeypatch.setattr(torch, "ones", launch)
    clear_error(torch.device("cpu"))
    assert launches == [torch.device("cpu")]
    assert torch.ones(1, device=torch.device("cpu")).sum() == 1
