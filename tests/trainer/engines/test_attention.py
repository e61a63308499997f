"""The attention kernel is the first one that torch accepts for the run's shape."""

import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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
from hpc_gpt.trainer.engines.attention import AttentionKernels, _allowed, prepare_attention
from hpc_gpt.trainer.engines.kernels import compile_model
from hpc_gpt.trainer.model.context_parallel import ContextParallel
from hpc_gpt.trainer.model.gpt import Gpt
from tests import marked
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


@pytest.mark.parametrize("asked", ["cudnn", "efficient"])
def test_a_kernel_that_torch_does_not_accept_is_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.attention is {asked}, but that kernel cannot run here: a CPU does"):
        AttentionKernels(asking(asked), CPU)


CARD = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("accepted", "groups", "used", "expands"),
    [
        (("flash", "cudnn", "efficient"), None, ["flash", "cudnn", "efficient", "math"], False),
        (("efficient",), None, ["efficient", "math"], False),
        ((), None, ["math"], False),
        (("flash", "cudnn", "efficient"), 2, ["flash", "cudnn"], False),
        (("efficient",), 2, ["efficient", "math"], True),
    ],
)
def test_those_that_torch_accepts_on_a_gpu_stay_in_order(monkeypatch, accepted, groups, used, expands) -> None:
    """By what torch would answer: there is no GPU here."""
    taken = [attention._KERNELS[name] for name in (*accepted, "math")]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(attention, "_why_not", lambda kernel, *inputs: "" if kernel in taken else "not here")
    resolved = asking("auto")
    kernels = AttentionKernels(replace(resolved, model=replace(resolved.model, kv_heads=groups)), CPU)
    kernels._kernels = _allowed(resolved, CARD)
    kernels._accept(replace(resolved, model=replace(resolved.model, kv_heads=groups)), CPU, ContextParallel())
    assert ([attention._NAMES[kernel.value] for kernel in kernels._kernels], kernels.expands) == (used, expands)


@pytest.mark.parametrize("mask", [None, torch.zeros(1, 1, 8, 8)])
def test_the_reason_is_torchs_own_warning(monkeypatch: pytest.MonkeyPatch, mask: Tensor | None) -> None:
    asked: list[Any] = []

    def refuse(inputs: Any, debug: bool) -> bool:
        asked.append(inputs)
        warnings.warn("head_dim should be a multiple of 8 (Triggered internally at sdp_utils.cpp)", stacklevel=1)
        return False

    query, key = (torch.empty(2, heads, 8, 8, device="meta") for heads in (4, 2))
    on_card = SimpleNamespace(device=CARD, shape=query.shape)
    monkeypatch.setitem(attention._ACCEPTS, SDPBackend.CUDNN_ATTENTION, refuse)
    monkeypatch.setattr(attention.cuda, "SDPAParams", lambda *given: given)
    assert attention._why_not(SDPBackend.CUDNN_ATTENTION, on_card, key, mask) == "head_dim should be a multiple of 8"
    assert asked == [(on_card, key, key, mask, 0.0, mask is None, True)]
    assert attention._why_not(SDPBackend.MATH, on_card, key, mask) == ""


# The names of the kernels' operators, without the suffix for a device. (The shorter name is part of the longer one.)
OPERATORS = {
    "flash": "_flash_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
}


def kernel_of(work: Callable[[], Any]) -> str:
    """The kernel that a profile shows. The math kernel is not one operator: compiled, it is fused with others."""
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        work()
    names = {event.name for event in profile.function_events or ()}
    return next((kernel for kernel, operator in OPERATORS.items() if any(operator in name for name in names)), "math")


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
        context = AttentionKernels(asking(asked), CPU)

        def train(model: Gpt = model, context: AttentionKernels = context) -> None:
            with context():
                model(tokens, targets).sum().backward()

        train()  # A graph is cached once its backward is compiled as well.
        assert kernel_of(train) == asked
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
    assert kernels._pack(resolved, CARD).kernel is None
    assert SDPBackend.FLASH_ATTENTION not in kernels._kernels
    only_flash = replace(resolved, engine=replace(resolved.engine, attention="flash"))
    kernels._kernels = [SDPBackend.FLASH_ATTENTION]
    with pytest.raises(
        ConfigError, match=rf"cannot keep documents apart here: torch {re.escape(torch.__version__)} does"
    ):
        kernels._pack(only_flash, CARD)


@pytest.mark.parametrize(
    ("model", "how", "window", "documents"),
    marked(
        [
            *(("gpt2", "block", None, True), ("llama", "none", None, True), ("llama", "block", None, True)),
            *(("qwen3", "none", 5, False), ("qwen3", "none", 1, True), ("qwen3", "block", 5, True)),
        ],
        [
            *(("gpt2", "block", None, True), ("llama", "none", None, True), ("llama", "block", None, True)),
            *(("qwen3", "none", 1, True), ("qwen3", "block", 5, True)),
        ],
    ),
)
def test_what_is_in_a_row_is_what_the_mask_gives(model, how, window, documents, monkeypatch) -> None:
    """By torch's own function, with a CPU's kernel, chosen as on a GPU; other documents compile nothing again, and
    layers of a kind are one graph."""
    monkeypatch.setattr(attention, "_why_not_packed", lambda resolved, device, window: "")
    engine = Engine("ddp", compile=how, compile_backend="aot_eager")
    letters = window and "SL"
    resolved = Case(
        Layout(1, 1, 1), engine, model=model, documents=documents, window=window, window_layers=letters
    ).resolved
    by_mask, in_row = AttentionKernels(resolved, CPU), AttentionKernels(resolved, CPU)
    plain, packed = Gpt(resolved.model, 1), Gpt(resolved.model, 1)
    with flash_on_cpu():
        in_row._forms = {one: in_row._pack(resolved, CARD, one) for one in (None, window)}
        assert not in_row._forms[window].expands
        prepare_attention(plain, by_mask, CPU)
        prepare_attention(packed, in_row, CPU)
        compile_model(packed, engine)
        for step in range(3):
            batch = micro_batches(resolved, 0, step)[0]
            tokens, targets = batch[:2]
            theirs = [kernels.documents(batch[2]) for kernels in (in_row, by_mask) if documents] or [None, None]
            assert not documents or not theirs[0].sight.masks
            loss, other = packed(tokens, targets, theirs[0]), plain(tokens, targets, theirs[1])
            assert loss.item() == pytest.approx(other.item(), abs=2e-6)
            for one in (loss, other):
                one.backward()
    for own, usual in zip(packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, usual.grad, atol=2e-6, rtol=0)
    if how == "block":
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (3 if window else 2)
