"""On a GPU: which attention kernel runs, that all compute the same, documents in a row, and ranks that gather keys."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Data, Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines.attention import AttentionKernels
from hpc_gpt.trainer.engines.build import build_engine
from hpc_gpt.trainer.model.attention import attention_core
from hpc_gpt.trainer.model.context_parallel import KeysGathered, SequencePart
from hpc_gpt.trainer.model.documents import Boundaries
from tests.distributed.equality_cases import END, Case
from tests.trainer.engines.test_attention import kernel_of
from tests.trainer.gpu import NEAR, ON_GPU, train

pytestmark = ON_GPU
ONE = Layout(1, 1, 1)
USUAL_DATA = Data()


@pytest.mark.parametrize(
    ("kernel", "dtype"), [("flash", "bf16"), ("cudnn", "bf16"), ("efficient", "fp32"), ("math", "fp32")]
)
@pytest.mark.parametrize("mode", ["none", "block"])
def test_the_attention_kernel_that_ran_is_the_one_asked_for(kernel, dtype, mode, device, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    resolved = Case(ONE, Engine("ddp", attention=kernel, compile=mode), dtype).resolved
    engine = build_engine(resolved, device)
    train(engine, resolved, range(1))
    assert (kernel_of(lambda: train(engine, resolved, range(1))), engine.attention.chosen) == (kernel, kernel)


def long_sequences(
    attention: Any, dtype: Any, head: int, groups: int = 2, data: Data = USUAL_DATA, cp: int = 1, **shape: Any
) -> Resolved:
    """Two heads of this size at 1,024 positions, a batch of two; `groups`: heads of keys and values."""
    sizes = {"layers": 1, "vocab": 61, "seq": 1024} | shape
    experiment = Experiment(
        name="attention",
        model=Model(hidden=2 * head, heads=2, kv_heads=groups, **sizes),
        data=data,
        engine=Engine("ddp", attention=attention, cp_exchange="keys"),
        layout=LayoutRequest(gpus=cp, tp=1, pp=1, cp=cp, micro_batch=2, micro_batches=1),
        train=Train(steps=3, dtype=dtype, warmup_steps=0, decay="constant", lr=1e-3),
    )
    return resolve(experiment, ClusterProfile(name="test", scheduler="local", gpus_per_node=cp))


def train_long(resolved: Resolved, device: torch.device) -> tuple[list[float], str]:
    """The losses of three steps, and the kernel that ran."""
    engine = build_engine(resolved, device)
    losses = []

    def take(step: int) -> None:
        tokens = torch.randint(0, 61, (2, 1025), generator=torch.Generator().manual_seed(step))
        marks = [Boundaries.of(tokens[:, :-1], END).to(device)] if resolved.data.mask_documents else []
        tokens = tokens.to(device)
        losses.append(float(engine.train_step(iter([(tokens[:, :-1], tokens[:, 1:], *marks)])).loss))

    take(0)
    ran = kernel_of(lambda: take(1))
    take(2)
    return losses, ran


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *((kernel, dtype) for kernel in ("flash", "cudnn", "efficient", "math") for dtype in ("bf16", "fp16")),
        *((kernel, "fp32") for kernel in ("efficient", "math")),
    ],
)
@pytest.mark.parametrize("groups", [2, 1])
def test_every_kernel_computes_the_same_at_1024_positions(kernel, dtype, head, groups, device):
    """With grouped queries as well, which a kernel takes or gets expanded."""
    losses, ran = train_long(long_sequences(kernel, dtype, head, groups), device)
    assert ran == kernel
    exact, _ = train_long(long_sequences("math", "fp32", head, groups), device)
    assert losses == pytest.approx(exact, abs=NEAR[dtype])


@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("flash", "bf16"), ("flash", "fp16"), ("efficient", "bf16"), ("auto", "bf16")]
)
@pytest.mark.parametrize("groups", [2, 1])
def test_documents_in_a_row_are_what_the_mask_gives(kernel, dtype, head, groups, device):
    masked = Data(mask_documents=True, end_token=END)
    losses, ran = train_long(long_sequences(kernel, dtype, head, groups, masked), device)
    assert ran == ("efficient" if kernel == "efficient" else "flash")
    exact, how = train_long(long_sequences("math", "fp32", head, groups, masked), device)
    assert how == "math"
    assert losses == pytest.approx(exact, abs=NEAR[dtype])


@pytest.mark.parametrize("window", [1, 100, 1023])
@pytest.mark.parametrize(
    ("kernel", "dtype", "name"),
    [
        ("flash", "bf16", "flash"),
        ("auto", "fp16", "flash"),
        ("auto", "fp32", "flex"),
        ("efficient", "bf16", "efficient"),
    ],
)
@pytest.mark.parametrize("groups", [2, 1])
@pytest.mark.parametrize("data", [USUAL_DATA, Data(mask_documents=True, end_token=END)], ids=["samples", "documents"])
def test_a_window_is_what_the_mask_gives(kernel, dtype, name, window, groups, data, device):
    """Not run on a GPU so far: none was lent to the session that wrote it."""
    shape = {"layers": 2, "window": window, "window_layers": "SL"}
    resolved = long_sequences(kernel, dtype, 64, groups, data, **shape)
    assert AttentionKernels(resolved, device).chosen.removesuffix(" in windows").endswith(name)
    exact, _ = train_long(long_sequences("math", "fp32", 64, groups, data, **shape), device)
    assert train_long(resolved, device)[0] == pytest.approx(exact, abs=NEAR[dtype])


@pytest.mark.parametrize("mode", ["block", "whole"])
def test_compiled_windows_are_those_of_eager_mode(mode, device):
    resolved = long_sequences("auto", "fp32", 64, layers=2, window=100, window_layers="SL")
    compiled = dataclasses.replace(resolved, engine=dataclasses.replace(resolved.engine, compile=mode))
    losses = [train_long(one, device)[0] for one in (resolved, compiled)]
    assert losses[0] == pytest.approx(losses[1], abs=NEAR["fp32"])


def test_flash_is_refused_where_documents_need_a_mask(device):
    resolved = long_sequences("flash", "fp32", 64, 2, Data(mask_documents=True, end_token=END))
    with pytest.raises(ConfigError, match=r"cannot keep documents apart here: .*train\.dtype is fp32"):
        AttentionKernels(resolved, device)


def test_the_host_does_not_wait_for_the_device_to_find_documents(device):
    resolved = long_sequences("auto", "bf16", 64, 2, Data(mask_documents=True, end_token=END))
    kernels = AttentionKernels(resolved, device)
    tokens = torch.randint(0, 61, (2, 1024)).pin_memory()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.documents(Boundaries.of(tokens, END).to(device))
    finally:
        torch.cuda.set_sync_debug_mode("default")


class InTurn(KeysGathered):
    """One process in the place of each rank of a group, one after the other: it has the keys and values of all, and
    adds up their gradients."""

    def __init__(self, part: SequencePart, whole: torch.Tensor) -> None:
        super().__init__(part)
        self.whole, self.slope = whole, torch.zeros_like(whole, dtype=torch.float32)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return self.whole

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        self.slope += partial
        return self.part.of(partial, 1)


@pytest.mark.parametrize(
    ("kernel", "ran", "dtype", "head"),
    [
        *(("auto", "flash", dtype, head) for dtype in ("bf16", "fp16") for head in (64, 128)),
        ("auto", "flash", "bf16", 20),  # the kernel's widths are multiples of 8
        ("efficient", "efficient", "bf16", 64),
        ("auto", "efficient", "fp32", 64),
    ],
)
@pytest.mark.parametrize("groups", [2, 1])
def test_ranks_that_gather_keys_attend_as_one_process_does(kernel, ran, dtype, head, groups, device):
    cp, kind = 2, getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype])
    resolved = long_sequences(kernel, dtype, head, groups, cp=cp)
    whole = [torch.randn(2, 1024, count, head, device=device, dtype=kind) for count in (2, groups, groups)]
    slope = torch.randn(2, 1024, 2 * head, device=device)
    exact = [part.float().clone().requires_grad_() for part in whole]
    expected = attention_core(*exact, expands=True)
    expected.backward(slope)
    ranks = [InTurn(SequencePart(rank, cp, True), torch.cat(whole[1:], 2)) for rank in range(cp)]
    for own in ranks:
        kernels = AttentionKernels(resolved, device, own)
        assert kernels.chosen == ran
        query, key, value = (own.part.of(part, 1).requires_grad_() for part in whole)
        with kernels():
            mixed = own.attend(query, key, value, partial(attention_core, expands=kernels.expands, last=kernels.last))
            mixed.backward(own.part.of(slope, 1).to(kind))
        near(mixed, own.part.of(expected.detach(), 1), dtype)
        near(query.grad, own.part.of(exact[0].grad, 1), dtype)
    of_keys, of_values = sum(own.slope for own in ranks).chunk(2, 2)
    near(of_keys, exact[1].grad, dtype)
    near(of_values, exact[2].grad, dtype)


def near(found: torch.Tensor, exact: torch.Tensor, dtype: str) -> None:
    """Within some units in the last place of the largest number."""
    limit = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 2e-5}[dtype] * float(exact.abs().max())
    torch.testing.assert_close(found.float(), exact, atol=limit, rtol=0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head", [64, 128])
def test_autos_choice_keeps_no_memory_and_no_random_numbers(head, deterministic, device):
    resolved = long_sequences("auto", "bf16", head)
    resolved = dataclasses.replace(resolved, train=dataclasses.replace(resolved.train, deterministic=deterministic))
    AttentionKernels(resolved, device)  # what a library keeps from its first use on
    torch.cuda.empty_cache()
    states = torch.get_rng_state(), torch.cuda.get_rng_state(device)
    held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    kernels = AttentionKernels(resolved, device)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == held
    for before, after in zip(states, (torch.get_rng_state(), torch.cuda.get_rng_state(device)), strict=True):
        assert torch.equal(before, after)
    assert kernels.chosen in (("flash", "efficient") if deterministic else ("cudnn", "flash"))
