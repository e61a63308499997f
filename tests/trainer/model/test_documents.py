"""Documents in one sample: where they begin, and that a model sees each as if it were alone."""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model.attention import rotation_of
from hpc_gpt.trainer.model.documents import Boundaries, Documents
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.sight import Sight, masks_of, packed_kernel
from hpc_gpt.trainer.model.techniques import ActivationOffload, Techniques
from tests.distributed.equality_cases import MODELS

END = 5
SEQ = 16
SHAPES = {
    name: ModelShape(layers=2, heads=4, vocab=61, seq=SEQ, **sizes)
    for name, sizes in MODELS.items()
    if name in ("gpt2", "llama", "qwen3", "smollm3")
}


def sample(seed: int = 1, batch: int = 3) -> Tensor:
    """int64 [batch, SEQ] with some documents in each row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (batch, SEQ), generator=generator)
    tokens[torch.rand(tokens.shape, generator=generator) < 0.2] = END
    return tokens


def documents_of(shape: ModelShape, tokens: Tensor, kernel: Any = None) -> Documents:
    rotation, boundaries = rotation_of(shape, 0), Boundaries.of(tokens, END)
    if kernel is None:
        return Documents.of(boundaries, rotation, masked(boundaries))
    return Documents.of(boundaries, rotation, Sight((), kernel, boundaries.offsets, boundaries.longest))


def masked(boundaries: Boundaries, dtype: torch.dtype = torch.float32) -> Sight:
    return Sight(masks_of(boundaries.starts.shape[1], None, dtype, boundaries.starts.device, boundaries.starts))


def alone(model: Gpt, tokens: Tensor) -> Tensor:
    """The logits of each document as an input of its own, [batch, SEQ, padded_vocab]."""
    rows = []
    for row in tokens:
        ends = [place + 1 for place in range(SEQ) if row[place] == END or place == SEQ - 1]
        rows.append(torch.cat([model.logits(row[None, a:b])[0] for a, b in zip([0, *ends], ends, strict=False)]))
    return torch.stack(rows)


def per_document(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, _: Tensor, longest: int, __: int
) -> Tensor:
    """What a kernel for documents in a row computes: [tokens, heads, width] of each."""
    found = []
    for first, last in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        assert last - first <= longest
        parts = (part[first:last].transpose(0, 1)[None] for part in (query, key, value))
        found.append(F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(found)


def test_a_document_begins_after_an_end_token_and_each_sample() -> None:
    tokens = torch.tensor([[9, 9, END, 9, END], [END, END, 9, 9, 9]])
    found = Boundaries.of(tokens, END)
    assert found.starts.tolist() == [[0, 0, 0, 3, 3], [0, 1, 2, 2, 2]]
    assert found.offsets.tolist() == [0, 3, 5, 6, 7, 10]
    assert (found.offsets.dtype, found.longest) == (torch.int32, 3)


@given(st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=1, max_size=4))
def test_both_forms_of_the_boundaries_are_the_same_documents(rows: list[list[int]]) -> None:
    found = Boundaries.of(torch.tensor(rows), 1)
    places = [number * 7 + start for number, row in enumerate(found.starts.tolist()) for start in row]
    assert sorted({*places, len(rows) * 7}) == found.offsets.tolist()
    assert found.longest == int(found.offsets.diff().max())
    assert all(found.starts[row, at + 1] == at + 1 for row in range(len(rows)) for at in range(6) if rows[row][at] == 1)


@pytest.mark.parametrize("kernel", [None, per_document], ids=["mask", "packed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_model_sees_each_document_as_if_it_were_alone(shape: ModelShape, kernel: Any) -> None:
    model, tokens = Gpt(shape, 1), sample()
    with torch.no_grad():
        together = model.output_layer.logits(model.norm(model.hidden(tokens, documents_of(shape, tokens, kernel))))
        torch.testing.assert_close(together, alone(model, tokens), atol=2e-6, rtol=0)
        assert not torch.allclose(together, model.logits(tokens), atol=1e-3)


def test_the_mask_is_what_sdpa_adds_to_the_scores() -> None:
    tokens = torch.tensor([[9, END, 9, 9]])
    boundaries = Boundaries.of(tokens, END)
    found = Documents.of(boundaries, None, masked(boundaries, torch.bfloat16))
    (mask,) = found.sight.masks
    assert mask.dtype == torch.bfloat16
    seen = (mask == 0)[0, 0].int().tolist()
    assert seen == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert set(mask.unique().tolist()) == {0.0, -float("inf")}
    assert found.positions.tolist() == [[0, 1, 0, 1]]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_layer_that_is_computed_again_has_its_own_documents(recompute: Any) -> None:
    shape, tokens = SHAPES["llama"], [sample(seed) for seed in (1, 2)]
    gradients = []
    for technique in (Techniques(), Techniques(recompute=recompute)):
        model = Gpt(shape, 1, techniques=technique)
        # Both are in flight before the first one's backward pass.
        losses = [model(each, each.roll(-1, 1), documents_of(shape, each)) for each in tokens]
        for loss in losses:
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for once, again in zip(*gradients, strict=True):
        assert torch.equal(once, again)


def test_offloaded_activations_leave_the_mask_where_it_is() -> None:
    shape, tokens = SHAPES["llama"], sample()
    documents = documents_of(shape, tokens)
    own = {tensor.untyped_storage().data_ptr() for tensor in documents.tensors}
    kept: list[int] = []
    pack = ActivationOffload._pack

    def watched(self: ActivationOffload, tensor: Tensor) -> Any:
        found = pack(self, tensor)
        if tensor.untyped_storage().data_ptr() in own:
            kept.append(found[0].data_ptr() - tensor.data_ptr())
        return found

    model = Gpt(shape, 1, techniques=Techniques(activation_offload=True))
    plain = Gpt(shape, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActivationOffload, "_pack", watched)
        loss = model(tokens, tokens.roll(-1, 1), documents)
    loss.backward()
    plain(tokens, tokens.roll(-1, 1), documents).backward()
    assert kept
    assert not any(kept)
    for offloaded, usual in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(offloaded.grad, usual.grad)  # type: ignore[arg-type]


def test_torchs_kernel_is_asked_in_the_words_of_its_version() -> None:
    from torch.nn.attention.varlen import varlen_attn

    def old(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal=False):
        """torch 2.10's."""

    assert packed_kernel(inspect.signature(old).parameters) == ({"is_causal": True}, False)
    options, groups = packed_kernel(inspect.signature(varlen_attn).parameters)
    inspect.signature(varlen_attn).bind(*[None] * 7, **options)
    assert ("enable_gqa" in options) == groups
    assert options.get("is_causal") or options["window_size"] == (-1, 0)
    # A window counts the token itself.
    sizes = [packed_kernel(["window_size"], window)[0]["window_size"] for window in (1, 2, 128)]
    assert sizes == [(0, 0), (1, 0), (127, 0)]
