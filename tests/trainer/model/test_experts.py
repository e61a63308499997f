"""Routers and experts against a plain reference: choice and weights, balance's gradients, counts, grouped products."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model import experts as experts_module
from hpc_gpt.trainer.model.experts import Experts, GroupedLinear
from hpc_gpt.trainer.model.gpt import Block, Gpt
from hpc_gpt.trainer.model.router import Router, routers_of
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import Split, TensorParallel, split_of
from tests.distributed.equality_cases import SEQ, VOCAB, whole_batch
from tests.distributed.mixtures import LEAST_GAP, MIXTURES
from tests.distributed.plain_mixture import PlainMixture
from tests.trainer.model.test_gpt import tokens_of

SHAPE = ModelShape(
    hidden=32, layers=2, heads=4, vocab=61, seq=24, mlp="swiglu", norm="rmsnorm", positions="rope", bias="none",
    experts=8, experts_per_token=3, expert_ffn=16,
)  # fmt: skip
SIGMOID = replace(SHAPE, router="sigmoid", router_bias=True, norm_topk=True, router_scale=2.5)
ROUTERS = {
    "softmax": SHAPE,
    "normed": replace(SHAPE, norm_topk=True, router_scale=0.5),
    "topk-softmax": replace(SHAPE, router="topk-softmax"),
    "sigmoid": SIGMOID,
    "groups": replace(SIGMOID, expert_groups=4, groups_per_token=2),
    "softmax with bias": replace(SHAPE, router_bias=True),
    "all experts": replace(SHAPE, experts_per_token=8),
}
LOSSES = Techniques(balance_coef=0.3, z_loss=0.07)


def router_of(shape: ModelShape, techniques: Techniques = LOSSES) -> Router:
    """A router whose decisions are apart, and whose bias changes some."""
    tp = TensorParallel()
    router = Router("blocks.1.router", shape, tp, tp.initial(3, shape.layers), techniques)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        router.weight.copy_(0.3 * torch.randn(router.weight.shape, generator=generator))
        if router.choice_bias is not None:
            router.choice_bias.copy_(0.1 * torch.randn(8, generator=generator))
    return router


def hidden_of(batch: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(batch, 24, 32, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def plain(shape: ModelShape, router: Router, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(weight of each expert, 0 if not chosen; balance loss; z-loss), token by token in plain PyTorch."""
    logits = hidden @ router.weight.t()
    scores = logits.sigmoid() if shape.router == "sigmoid" else logits.softmax(-1)
    choice = scores.detach() + (0 if router.choice_bias is None else router.choice_bias)
    rows = []
    for token in choice.flatten(0, 1):
        allowed = set(range(8))
        if shape.expert_groups and shape.groups_per_token:
            groups = token.view(shape.expert_groups, -1)
            best = sorted(range(len(groups)), key=lambda group: -float(groups[group].sort()[0][-2:].sum()))
            used, width = best[: shape.groups_per_token], groups.shape[1]
            allowed = {expert for expert in range(8) if expert // width in used}
        rows.append(sorted(allowed, key=lambda expert: -float(token[expert]))[: shape.experts_per_token])
    mask = torch.zeros(len(rows), 8).scatter_(1, torch.tensor(rows), 1.0).view_as(scores)
    weights = scores * mask
    if shape.norm_topk or shape.router == "topk-softmax":
        weights = weights / weights.sum(-1, keepdim=True)
    shares = scores / scores.sum(-1, keepdim=True)
    balance = sum(8 * (mask[one].sum(0) / mask[one].sum() * shares[one].mean(0)).sum() for one in range(len(hidden)))
    return shape.router_scale * weights, balance / len(hidden), logits.logsumexp(-1).square().mean()


def dense(weights: Tensor, chosen: Tensor) -> Tensor:
    return torch.zeros(*weights.shape[:2], 8).scatter(-1, chosen, weights)


@pytest.mark.parametrize("name", ROUTERS)
def test_router_and_its_gradients_are_the_plain_ones(name: str) -> None:
    shape, router = ROUTERS[name], router_of(ROUTERS[name])
    hidden, pull = hidden_of(), torch.randn(3, 24, 8, generator=torch.Generator().manual_seed(2))
    weights, balance, z_loss = plain(shape, router, hidden)
    (4 * ((weights * pull).sum() + 0.3 * balance + 0.07 * z_loss)).backward()
    wanted = hidden.grad, router.weight.grad
    hidden.grad = router.weight.grad = None
    router.scale = 4.0
    ours, chosen = router(hidden)
    torch.testing.assert_close(dense(ours, chosen), weights)
    (4 * (dense(ours, chosen) * pull).sum()).backward()
    torch.testing.assert_close((hidden.grad, router.weight.grad), wanted, rtol=1e-5, atol=1e-5)
    assert router.sums is not None
    counts = (weights > 0).sum((0, 1)).double()
    torch.testing.assert_close(router.sums, torch.cat([counts, balance.detach().double().view(1)]), rtol=1e-6, atol=0)


def test_balance_does_not_depend_on_the_micro_batch() -> None:
    gradients = []
    for size in (1, 2, 4):
        router, hidden = router_of(SHAPE), hidden_of(4)
        router.scale = size / 4
        for part in hidden.split(size):
            (router(part)[0][..., 0].mean() * router.scale).backward()
        assert router.sums is not None
        gradients.append((router.weight.grad, router.sums[:-1], router.sums[-1] * size / 4))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-5, atol=1e-6)


def test_no_balance_leaves_the_gradient_and_still_counts() -> None:
    router, hidden = router_of(SHAPE, Techniques()), hidden_of()
    weights, chosen = router(hidden)
    weights.square().sum().backward()
    gradient, router.weight.grad = router.weight.grad, None
    plain(SHAPE, router, hidden)[0].square().sum().backward()
    torch.testing.assert_close(gradient, router.weight.grad)
    assert router.sums is not None
    assert router.sums[:-1].sum() == chosen.numel()
    with torch.no_grad():
        router.sums = None
        router(hidden)
    assert router.sums is None, "an evaluation counts"


def layer_of(shape: ModelShape, techniques: Techniques = LOSSES) -> Block:
    tp = TensorParallel()
    layer = Block(1, shape, tp, tp.initial(1, shape.layers), techniques)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            if parameter.ndim > 1:
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                parameter.copy_(0.2 * drawn)
    return layer


@pytest.mark.parametrize("model", MIXTURES)
def test_loss_and_gradients_are_those_of_a_familys_class(model: str) -> None:
    """With weights that matter."""
    pytest.importorskip("transformers")
    shape = ModelShape(heads=4, vocab=VOCAB, seq=SEQ, tied=False, **MIXTURES[model])
    ours, generator = Gpt(shape, 1), torch.Generator().manual_seed(3)
    biases = [buffer for name, buffer in ours.named_buffers() if name.endswith("choice_bias")]
    with torch.no_grad():
        for _, weight in ours.named_parameters():
            weight.mul_(4 if weight.ndim > 1 else 1).add_(torch.randn(weight.shape, generator=generator) / 8)
        for bias in biases:
            bias.normal_(0.0, 0.3, generator=generator)
    plain = PlainMixture(shape, dict(ours.named_parameters()), Train())
    assert len(plain.biases()) == len(biases) == (2 if shape.router_bias else 0)
    for theirs, own in zip(plain.biases(), biases, strict=True):
        theirs.copy_(own)
    tokens, targets = (part[:8] for part in whole_batch(0))
    losses = [one(tokens, targets) for one in (ours, plain)]
    assert plain.gap > LEAST_GAP
    torch.testing.assert_close(*losses, rtol=0, atol=2e-6)
    for loss in losses:
        loss.backward()
    places = dict(plain.model.named_parameters())
    for name, weight in ours.named_parameters():
        expected = torch.cat([places[one].grad for one in plain.places(name)])
        torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=2e-6, msg=f"gradient of {name}")


SHARED = replace(SHAPE, shared_ffn=24, shared_gate=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loop_gives_the_bits_of_grouped_products(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, hidden = layer_of(SHAPE).to(dtype), hidden_of().detach().to(dtype)
    with torch.no_grad():  # two experts without tokens
        layer.router.weight[:2] = 0
        layer.router.weight[2:, 0] = 50
        hidden[..., 0] = 1
    results = []
    for why in ("", "a test"):
        monkeypatch.setattr(experts_module, "why_not_grouped", lambda *_, why=why: why)
        layer.zero_grad()
        layer.router.sums = None
        output = layer._feed_forward(hidden)
        output.square().mean().backward()
        assert layer.router.sums is not None
        assert (layer.router.sums[:2] == 0).all()
        results.append([output, *(one.grad for one in layer.parameters() if one.grad is not None)])
    assert len(results[0]) == 4
    for grouped, looped in zip(*results, strict=True):
        assert torch.equal(grouped, looped)


def test_widths_that_grouped_products_refuse_go_by_the_loop(capsys: Any) -> None:
    layer = GroupedLinear(torch.nn.Parameter(torch.randn(2, 6, 5)))
    rows, ends = torch.randn(7, 5), torch.tensor([3, 7], dtype=torch.int32)
    wanted = torch.cat([rows[:3] @ layer.weight[0].t(), rows[3:] @ layer.weight[1].t()])
    torch.testing.assert_close(layer(rows, ends), wanted)
    layer(rows, ends)
    noted = capsys.readouterr().err
    assert noted.count("note: experts are multiplied one by one") == 1
    assert "multiples of 4 in torch.float32, but one is 6" in noted


def test_same_step_twice_gives_the_same_bits() -> None:
    tokens, found = tokens_of(SHARED), []
    for recompute in ("none", "none", "full"):
        model = Gpt(SHARED, 1, techniques=replace(LOSSES, recompute=recompute))  # type: ignore[arg-type]
        loss = model(*tokens)
        loss.backward()
        sums = [router.sums for router in routers_of(model)]
        found.append([loss, *sums, *(parameter.grad for parameter in model.parameters())])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_each_expert_is_drawn_by_itself() -> None:
    few, many = (replace(SHAPE, experts=count) for count in (4, 8))
    tp = TensorParallel()
    drawn = [Experts("blocks.0.experts", one, tp, tp.initial(1, 2)) for one in (few, many)]
    assert torch.equal(drawn[0].up.weight, drawn[1].up.weight[:4])
    assert not torch.equal(drawn[1].up.weight[0], drawn[1].up.weight[1])


@pytest.mark.parametrize("size", [1, 2])
def test_the_ranks_shares_of_experts_are_those_of_whole_ones(size: int) -> None:
    alone = TensorParallel()
    whole = Experts("blocks.0.experts", SHAPE, alone, alone.initial(1, 2))
    for rank in range(size):
        tp = TensorParallel(rank, size)
        share = Experts("blocks.0.experts", SHAPE, tp, tp.initial(1, 2))
        for one, other in zip(share.parameters(), whole.parameters(), strict=True):
            assert torch.equal(one, torch.stack([_of_expert(expert, one, rank, size) for expert in other]))


def _of_expert(expert: Tensor, like: nn.Parameter, rank: int, size: int) -> Tensor:
    """The rank's share of an expert's weight, [outputs, inputs]."""
    split = split_of(like)
    assert split is not None
    return Split(split.dim - 1, split.parts).shard(expert, rank, size)


def test_choice_bias_stays_fp32_and_keeps_its_values() -> None:
    router = router_of(SIGMOID)
    assert router.choice_bias is not None
    values = router.choice_bias.clone()
    for cast in (router.bfloat16, router.half, lambda: router.to_empty(device="cpu")):
        cast()
        assert router.choice_bias.dtype == torch.float32
        assert torch.equal(router.choice_bias, values)
    assert "choice_bias" in router.state_dict()


@pytest.mark.parametrize("kind", ["softmax", "normed", "topk-softmax"])
def test_a_router_may_multiply_in_fp32_alone(kind: str) -> None:
    """In bf16 as a plain loop does whose product alone is fp32; in fp32 nothing changes."""
    shape = replace(ROUTERS[kind], router_scale=1.0)
    whole = [router_of(one)(hidden_of()) for one in (shape, replace(shape, router_dtype="fp32"))]
    assert all(torch.equal(one, other) for one, other in zip(*whole, strict=True))
    router = router_of(replace(shape, router_dtype="fp32"), Techniques()).bfloat16()
    hidden = hidden_of().detach().bfloat16().requires_grad_()
    weights, chosen = router(hidden)
    assert weights.dtype == torch.bfloat16
    tokens, matrix = hidden.detach().requires_grad_(), router.weight.detach().requires_grad_()
    raised, rows, picked = matrix.float(), [], []
    for token in tokens.flatten(0, 1):
        scores = (raised @ token.float()).softmax(-1)
        best = scores.topk(shape.experts_per_token or 0).indices
        of_best = scores[best] / scores[best].sum() if router.norms else scores[best]
        rows.append(of_best.bfloat16())
        picked.append(best)
    assert torch.equal(chosen.flatten(0, 1), torch.stack(picked))
    assert torch.equal(weights.flatten(0, 1), torch.stack(rows))
    pull = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    (weights * pull).sum().backward()
    (torch.stack(rows) * pull.flatten(0, 1)).sum().backward()
    for one, other in ((hidden.grad, tokens.grad), (router.weight.grad, matrix.grad)):
        assert one is not None
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
    in_bf16 = router_of(shape, Techniques()).bfloat16()(hidden)[0]
    assert not torch.equal(in_bf16, weights)
