"""Which attention kernel is taken: tried when an engine is built, and read from what ran."""

import gc
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines import attention
from hpc_gpt.trainer.engines.attention import AttentionKernels, AttentionRead, _allowed, _Trial
from hpc_gpt.trainer.engines.kernels import compile_model
from hpc_gpt.trainer.model.context_parallel import ContextParallel, HeadsExchanged, KeysGathered, SequencePart
from hpc_gpt.trainer.model.gpt import Gpt
from tests.distributed.equality_cases import Case, micro_batches
from tests.trainer.launch import settings
from tests.trainer.model.flash_on_cpu import flash_on_cpu
from tests.trainer.model.test_gpt import SMALL, tokens_of

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
    assert (kernels := AttentionKernels(resolved, CPU)).chosen == used
    assert kernel_that_ran(kernels) == used


def test_the_choice_ends_with_the_context() -> None:
    with AttentionKernels(asking("math"), CPU)():
        pass
    assert AttentionKernels(asking("auto"), CPU).chosen == "flash"


@pytest.mark.parametrize(
    ("card", "cudnn", "place"),
    [
        ((9, 0), 91501, 0), ((9, 0), 91500, 1), ((10, 3), 92600, 0), ((8, 0), 92600, 1), ((12, 0), 92600, 1),
        ((9, 0), None, 1),
    ],
)  # fmt: skip
def test_cudnn_is_first_where_torch_puts_it_first(monkeypatch, card, cudnn, place):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    names = [kernel.name for kernel in _allowed(asking("auto"), torch.device("cuda", 0))]
    assert (names.index("CUDNN_ATTENTION"), names.index("FLASH_ATTENTION")) == (place, 1 - place)


SDPA = F.scaled_dot_product_attention


class Broken(torch.autograd.Function):
    """Fails in the backward pass, as a kernel does on a card that it was not built for."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor) -> Tensor:
        return mixed.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("cuDNN Frontend error: no valid engine\nwith a second line")


class Breakable:
    """scaled_dot_product_attention whose kernels in `broken` fail in the way of `how`; it draws numbers, too."""

    def __init__(self, how: str, *broken: str) -> None:
        self.how, self.broken = how, broken
        self.shapes: list[tuple[int, ...]] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.shapes.append(tuple(query.shape))
        torch.rand(3)
        mixed = SDPA(query, key, value, attn_mask=attn_mask, is_causal=is_causal)
        running = "flash" if torch.backends.cuda.flash_sdp_enabled() else "math"
        if running not in self.broken:
            return mixed
        if self.how == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self.how == "forward":
            raise RuntimeError("CUDA error: no kernel image is available\nCompile with more")
        return mixed * torch.inf if self.how == "values" else Broken.apply(mixed)


REASONS = {
    "forward": "CUDA error: no kernel image is available",
    "backward": "cuDNN Frontend error: no valid engine",
    "values": "it computes values that are not finite",
    "memory": "the GPU has not enough memory for it",
}


@pytest.mark.parametrize(
    ("context", "heads", "queries"),
    [(HeadsExchanged(SequencePart(1, 2)), 2, 32), (KeysGathered(SequencePart(1, 2, True)), 4, 8)],
)
def test_the_trial_has_the_shape_of_a_rank_with_sequence_parts(monkeypatch, context, heads, queries):
    counting = Breakable("none")
    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    resolved = asking("auto")
    assert AttentionKernels(resolved, CPU, context).chosen == "flash"
    assert (resolved.model.heads, resolved.model.seq) == (4, 32)
    assert set(counting.shapes) == {(resolved.batch.micro_batch, heads, queries, resolved.model.head_width)}


@pytest.mark.parametrize("how", REASONS)
def test_a_kernel_that_fails_in_its_trial_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    broken = Breakable(how, "flash")
    monkeypatch.setattr(F, "scaled_dot_product_attention", broken)
    resolved = asking("auto")
    kernels = AttentionKernels(resolved, CPU)
    assert (kernels.chosen, kernels.failed) == ("math", {"flash": REASONS[how]})
    # The run's own shape, not a smaller one.
    shape = resolved.model
    assert set(broken.shapes) == {(resolved.batch.micro_batch, shape.heads, shape.seq, shape.head_width)}
    monkeypatch.undo()
    assert kernel_that_ran(kernels) == "math"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_trial_leaves_generators_and_memory_as_they_were(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", Breakable("backward", "flash"))
    resolved = asking("auto")
    resolved = replace(resolved, train=replace(resolved.train, dtype=dtype))

    def tensors() -> int:
        gc.collect()
        return sum(1 for one in gc.get_objects() if type(one) is Tensor)

    torch.manual_seed(5)
    before = torch.get_rng_state()
    alive = tensors()
    kernels = AttentionKernels(resolved, CPU)
    assert kernels.chosen == "math"
    assert torch.equal(torch.get_rng_state(), before)
    assert tensors() == alive


def test_a_gpu_too_small_for_any_of_them_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", Breakable("memory", "flash", "math"))
    with pytest.raises(torch.OutOfMemoryError):
        AttentionKernels(asking("auto"), CPU)


def kernel_read(asked: str, mode: str = "none") -> list[str | None]:
    """What is read before a model's first and after its first, second and third training forward pass."""
    model, (tokens, targets) = Gpt(SMALL, 1), tokens_of(SMALL)
    compile_model(model, Engine(compile=mode, compile_backend="aot_eager"))
    read = AttentionRead(model)
    with torch.no_grad():
        model(tokens, targets)
    found = [read.kernel]
    context = AttentionKernels(asking(asked), CPU)
    for _ in range(3):
        with context():
            model(tokens, targets)
        found.append(read.kernel)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    return found


@pytest.mark.long(but="first")
@pytest.mark.parametrize(("asked", "mode"), [("flash", "none"), ("math", "block"), ("flash", "whole")])
def test_the_kernel_of_the_second_pass_is_read(capfd: pytest.CaptureFixture[str], asked: str, mode: str) -> None:
    assert kernel_read(asked, mode) == [None, None, asked, asked]
    assert capfd.readouterr() == ("", "")


@pytest.mark.long
def test_a_graph_of_another_kernel_is_not_taken_from_the_cache(tmp_path, monkeypatch):
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler for Inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tokens, targets = tokens_of(SMALL)
    hits = []
    for asked in ("math", "flash", "math"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = Gpt(SMALL, 1)
        compile_model(model, Engine(compile="block", compile_backend="inductor"))
        read = AttentionRead(model)
        context = AttentionKernels(asking(asked), CPU)
        for _ in range(2):
            # A graph is cached once its backward is compiled as well.
            with context():
                model(tokens, targets).sum().backward()
        assert read.kernel == asked
        hits.append(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] > 0)
    assert hits == [False, False, True]  # the third model found the first one's graphs


def test_the_users_own_cache_key_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "mine")
    tags = []
    for asked in ("math", "flash", "math"):
        AttentionKernels(asking(asked), CPU)
        tags.append(torch.compiler.config.cache_key_tag)
    assert tags == [f"mine hpc-gpt attention={kernel}" for kernel in ("math", "flash", "math")]


def test_before_torch_2_10_documents_are_kept_apart_by_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: torch 2.9 has no kernel for documents in a row, and flash takes no mask there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    resolved = Case(Layout(1, 1, 1), Engine("ddp"), documents=True, dtype="bf16").resolved
    kernels = AttentionKernels(resolved, CPU)
    assert SDPBackend.FLASH_ATTENTION in kernels._kernels
    kernels._pack(_Trial(resolved, CPU, ContextParallel()), resolved, torch.device("cuda", 0))
    assert (SDPBackend.FLASH_ATTENTION in kernels._kernels, kernels._packed) == (False, None)
    only_flash = replace(resolved, engine=replace(resolved.engine, attention="flash"))
    kernels._kernels = [SDPBackend.FLASH_ATTENTION]
    with pytest.raises(
        ConfigError, match=rf"cannot keep documents apart here: torch {re.escape(torch.__version__)} does"
    ):
        kernels._pack(_Trial(only_flash, CPU, ContextParallel()), only_flash, torch.device("cuda", 0))


@pytest.mark.long
@pytest.mark.parametrize(("model", "how"), [("gpt2", "block"), ("llama", "none"), ("llama", "block")])
def test_documents_in_a_row_are_what_the_mask_gives(model: str, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own function, with a CPU's kernel, chosen as on a GPU; other documents compile nothing again."""
    monkeypatch.setattr(attention, "_why_not_packed", lambda resolved, device: "")
    engine = Engine("ddp", compile=how, compile_backend="aot_eager")
    resolved = Case(Layout(1, 1, 1), engine, model=model, documents=True).resolved
    by_mask, in_row = AttentionKernels(resolved, CPU), AttentionKernels(resolved, CPU)
    plain, packed = Gpt(resolved.model, 1), Gpt(resolved.model, 1)
    compile_model(packed, engine)
    with flash_on_cpu():
        in_row._pack(_Trial(resolved, CPU, ContextParallel()), resolved, torch.device("cuda", 0))
        assert (in_row.failed, in_row.expands) == ({}, False)
        for step in range(3):
            tokens, targets, boundaries = micro_batches(resolved, 0, step)[0]
            documents = in_row.documents(boundaries)
            assert documents.mask is None
            loss, other = packed(tokens, targets, documents), plain(tokens, targets, by_mask.documents(boundaries))
            assert loss.item() == pytest.approx(other.item(), abs=2e-6)
            for one in (loss, other):
                one.backward()
    for own, usual in zip(packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, usual.grad, atol=2e-6, rtol=0)
    if how == "block":
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
