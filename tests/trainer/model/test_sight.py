"""Windows: their masks whole and in blocks, FlexAttention's keys, and that one of the sequence is no window."""

import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.trainer.engines import attention, library_patches
from hpc_gpt.trainer.engines.attention import AttentionKernels, prepare_attention
from hpc_gpt.trainer.model import sight
from hpc_gpt.trainer.model.attention import attention_core
from hpc_gpt.trainer.model.documents import Boundaries
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.sight import Sight, blocks_of, masks_of
from hpc_gpt.trainer.model.techniques import ActivationOffload, Techniques
from tests.distributed.equality_cases import VOCAB
from tests.limits import lower_limit
from tests.trainer.engines.test_attention import asking
from tests.trainer.model.test_documents import END, SEQ, SHAPES, sample

CPU, FP32 = torch.device("cpu"), torch.float32


def heads(seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values of half as many heads."""
    drawn = torch.Generator().manual_seed(seed)
    query, *others = (torch.randn(3, SEQ, count, 16, generator=drawn).requires_grad_() for count in (4, 2, 2))
    return query, others[0], others[1]


def by_hand(query: Tensor, key: Tensor, value: Tensor, window: int, starts: Tensor | None) -> Tensor:
    """Each query on its own."""
    rows = []
    for row in range(len(query)):
        for place in range(SEQ):
            first = max(place - window + 1, 0 if starts is None else int(starts[row, place]))
            keys, values = (part[row, first : place + 1].repeat_interleave(2, 1) for part in (key, value))
            weights = (query[row, place] * keys / 4).sum(-1).softmax(0)
            rows.append((weights[..., None] * values).sum(0))
    return torch.stack(rows).view(3, SEQ, -1)


@pytest.mark.parametrize("window", [1, 2, 5, SEQ - 1])
@pytest.mark.parametrize("starts", [None, Boundaries.of(sample(), END).starts], ids=["samples", "documents"])
def test_in_blocks_of_queries_each_sees_the_same_keys(window, starts, monkeypatch) -> None:
    inputs, results = heads(), []
    for largest in (2**30, 4 * 40):
        monkeypatch.setattr(sight, "LARGEST_MASK", largest)
        masks = masks_of(SEQ, window, FP32, CPU, starts)
        assert all(mask[0].nbytes <= largest or mask.shape[-2] == 1 for mask in masks)
        assert (len(masks) == 1) == (largest == 2**30)
        mixed = attention_core(*inputs, sight=Sight(masks))
        results.append([mixed, *torch.autograd.grad(mixed.square().sum(), inputs)])
    torch.testing.assert_close(*results)
    torch.testing.assert_close(results[0][0], by_hand(*inputs, window, starts))


def test_blocks_without_documents_share_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sight, "LARGEST_MASK", 4 * 40)
    assert len({mask.untyped_storage().data_ptr() for mask in masks_of(SEQ, 3, FP32, CPU)}) == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("starts", [None, Boundaries.of(sample(), END).starts], ids=["samples", "documents"])
def test_flex_attention_is_asked_for_the_same_keys(starts: Tensor | None) -> None:
    """On a CPU it has no backward pass, and here no compiler."""
    flex = Sight(kernel=flex_attention, blocks=blocks_of(SEQ, 5, CPU, starts))
    inputs = [part.detach() for part in heads()]
    masks = Sight(masks_of(SEQ, 5, FP32, CPU, starts))
    torch.testing.assert_close(attention_core(*inputs, sight=flex), attention_core(*inputs, sight=masks))
    assert flex.tensors


def starts_of(seq: int, share: float) -> Tensor:
    tokens = (torch.rand(2, seq, generator=torch.Generator().manual_seed(seq)) < share).long()
    return Boundaries.of(tokens, 1).starts


@pytest.mark.parametrize("seq", [5, 127, 128, 129, 300, 1024])
@pytest.mark.parametrize("share", [None, 0, 0.01, 0.1])
def test_the_block_mask_is_torchs_own(seq: int, share: float | None) -> None:
    starts = None if share is None else starts_of(seq, share)
    for window in (1, 2, 127, 128, 129, 257, 500, seq):
        made = blocks_of(seq, window, CPU, starts)
        torchs = create_block_mask(made.mask_mod, None if starts is None else 2, None, seq, seq, device="cpu")
        assert (made.shape, made.seq_lengths) == (torchs.shape, torchs.seq_lengths)
        for name in ("kv", "full_kv", "q", "full_q"):
            counts, numbers = (getattr(torchs, f"{name}_{part}") for part in ("num_blocks", "indices"))
            assert torch.equal(getattr(made, f"{name}_num_blocks"), counts)
            used = torch.arange(numbers.shape[-1]) < counts[..., None]
            assert torch.equal(getattr(made, f"{name}_indices")[used], numbers[used])


def test_a_long_block_mask_takes_no_memory_by_the_square() -> None:
    """131,072 squared are 17 GB of decisions."""
    starts = starts_of(1 << 17, 0.001)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with lower_limit(resource.RLIMIT_AS, used + (1 << 30)):
        assert blocks_of(1 << 17, 4096, CPU, starts).shape == (2, 1, 1 << 17, 1 << 17)


@pytest.mark.parametrize("window", [SEQ, SEQ + 1])
def test_a_window_of_the_sequence_is_none_to_the_last_digit(window: int) -> None:
    found = []
    for shape in (SHAPES["llama"], replace(SHAPES["llama"], window=window)):
        model = Gpt(shape, 1)
        prepare_attention(model, AttentionKernels(replace(asking("auto"), model=shape), CPU), CPU)
        loss = model(sample() % VOCAB, sample(2) % VOCAB)
        found.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    assert all(map(torch.equal, *found))


def test_layers_with_a_window_share_one_mask_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SHAPES["llama"], layers=4, window=3, window_layers="SSL")
    model, kernels = (
        Gpt(shape, 1, techniques=Techniques(activation_offload=True)),
        AttentionKernels(replace(asking("auto"), model=shape), CPU),
    )
    prepare_attention(model, kernels, CPU)
    given = [block.attention.sight for block in model.blocks]
    assert given == [kernels.in_window, kernels.in_window, None, kernels.in_window]
    kept: list[Any] = []
    pack = ActivationOffload._pack
    monkeypatch.setattr(ActivationOffload, "_pack", lambda self, tensor: kept.append(pack(self, tensor)) or kept[-1])
    model(sample() % VOCAB, sample(2) % VOCAB)
    mask = kernels.in_window.masks[0].untyped_storage().data_ptr()
    assert [one[0].untyped_storage().data_ptr() for one in kept if len(one) == 1].count(mask) == 3


@pytest.mark.parametrize(
    ("asked", "dtype", "card", "head", "compiler", "name"),
    [
        ("auto", "bf16", (9, 0), 64, True, "cudnn, flash in windows"),
        ("flash", "bf16", (8, 0), 64, True, "flash"),
        ("auto", "fp32", (9, 0), 64, True, "efficient, flex in windows"),
        ("auto", "bf16", (8, 0), 320, True, "flash, flex in windows"),
        ("auto", "fp32", (9, 0), 8, True, "efficient"),
        ("auto", "fp32", (9, 0), 64, False, "efficient"),
        ("auto", "fp16", (7, 0), 64, True, "efficient"),
        ("math", "bf16", (9, 0), 64, True, "math"),
    ],
)
def test_a_gpus_windows_have_this_kernel(asked, dtype, card, head, compiler, name, monkeypatch) -> None:
    assert kernels_on(monkeypatch, asked, dtype, card, head, compiler).chosen == name


@pytest.mark.parametrize("mode", ["none", "block"])
def test_flex_attention_is_compiled_whatever_else_is(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that compiles nothing is built while torch.compile is the identity."""
    compiled: list[Any] = []
    attention._compiled_flex.cache_clear()

    def compile_it(function: Any, **how: Any) -> Any:
        compiled.append((function, how))
        return lambda *parts, **options: ("compiled", *parts)

    monkeypatch.setattr(torch, "compile", compile_it)
    with monkeypatch.context() as building:
        if mode == "none":
            building.setattr(torch, "compile", library_patches._undecorated)
        form = kernels_on(building, "auto", "fp32", (9, 0), 64, True, mode)._forms[5]
    assert form.kernel is not None
    assert form.kernel(1, 2, 3, block_mask=None) == ("compiled", 1, 2, 3)
    assert compiled == [(flex_attention, {"dynamic": False})]
    attention._compiled_flex.cache_clear()


def kernels_on(
    monkeypatch: pytest.MonkeyPatch, asked: str, dtype: Any, card: Any, head: int, compiler: bool, mode: Any = "none"
) -> AttentionKernels:
    """The kernels for a window of 5 by what torch would answer: there is no GPU here."""

    def why_not(kernel: Any, query: Tensor, key: Tensor, mask: Tensor | None) -> str:
        fast = attention._NAMES[kernel.value] in ("flash", "cudnn")
        return "no" if fast and (mask is not None or dtype == "fp32" or query.shape[-1] % 8) else ""

    def refuse() -> None:
        raise ConfigError("there is no compiler", "")

    version = SimpleNamespace(version=lambda: 92600)
    monkeypatch.setattr(torch.backends, "cudnn", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(attention, "check_backend", lambda *_: None if compiler else refuse())
    monkeypatch.setattr(attention, "_why_not", why_not)
    monkeypatch.setattr(torch, "empty", lambda *size, device, **how: torch.zeros(*size, **how))
    resolved = asking(asked)
    shape = replace(resolved.model, hidden=4 * head, window=5, window_layers="SL")
    engine = replace(resolved.engine, compile=mode)
    resolved = replace(resolved, model=shape, engine=engine, train=replace(resolved.train, dtype=dtype))
    return AttentionKernels(resolved, torch.device("cuda", 0))
