"""The reference of the equality table: a GPT in plain PyTorch, one process, written apart from hpc_gpt's.

It takes nothing from hpc_gpt but the numbers of an experiment and the initial weights, by name. For other shapes than
GPT-2's it is transformers' own class, whose keys and names hpc_gpt gives, as its export does; for a mixture of experts
that of `plain_mixture`. The `float()` in it are
nothing in fp32; under autocast they keep in fp32 what autocast keeps so on a GPU, but not on a CPU.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.config import config_of
from hpc_gpt.core.weights.names import parts_of, to_hf
from tests.distributed.equality_cases import token_bytes
from tests.distributed.plain_mixture import PlainMixture
from tests.distributed.plain_muon import PlainMuon


class PlainBlock(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(hidden, -1)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(hidden // self.heads)
        future = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        attended = scores.float().masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, seq, hidden))
        inner = self.up(self.norm2(x)).float()
        gelu = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        return x + self.down(gelu)


class PlainGpt(nn.Module):
    def __init__(self, shape: ModelShape, initial: dict[str, Tensor]) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.padded_vocab, shape.hidden)
        self.position = nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(PlainBlock(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.padded_vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        with torch.no_grad():
            for name, parameter in self.weights().items():
                parameter.copy_(initial[name])
        assert self.weights().keys() == initial.keys()

    def weights(self) -> dict[str, nn.Parameter]:
        """Parameters by hpc_gpt's names; a tied head once."""
        return {
            name.replace("qkv", "attention.qkv")
            .replace("projection", "attention.projection")
            .replace("up.", "feed_forward.up.")
            .replace("down.", "feed_forward.down."): parameter
            for name, parameter in self.named_parameters()
        }

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        # Columns that pad the vocabulary get no probability.
        logits = logits.masked_fill(torch.arange(logits.shape[-1]) >= self.shape.vocab, -torch.inf)
        self.losses = -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return self.losses.mean()


class PlainOther(nn.Module):
    """transformers' own class of a shape that is not GPT-2's."""

    def __init__(self, shape: ModelShape, initial: dict[str, Tensor]) -> None:
        import transformers

        super().__init__()
        self.shape = shape
        config = config_of(shape, shape.padded_vocab)
        kind = getattr(transformers, config.pop("architectures")[0])
        self.model = kind(kind.config_class(**config | {"use_cache": False}))
        self.model.config._attn_implementation = "eager"
        named = dict(self.model.named_parameters())
        if shape.tied:
            assert self.model.lm_head.weight is self.model.model.embed_tokens.weight
        with torch.no_grad():
            for name, weight in to_hf(shape, initial.items()):
                named.pop(name).copy_(weight)
        assert not named, "transformers has parameters that we lack"

    def weights(self) -> dict[str, Tensor]:
        """Values by hpc_gpt's names."""
        named = dict(self.model.named_parameters())
        names = self.shape.parameter_names
        return {name: torch.cat([named[part.name] for part in parts_of(self.shape, name)]) for name in names}

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(tokens).logits.float()
        logits = logits.masked_fill(torch.arange(logits.shape[-1]) >= self.shape.vocab, -torch.inf)
        self.losses = -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return self.losses.mean()


@dataclass
class PlainRun:
    """The reference's results: figures of each step, evaluation loss and weights after the last.

    Of a mixture also (balance loss, load, dead experts) of each step, the biases that choose experts, and the `gap` of
    the closest decision.
    """

    losses: list[float]
    norms: list[float]
    lrs: list[float]
    loss_eval: float
    weights: dict[str, Tensor]
    balance: list[list[float]] = field(default_factory=list)
    biases: list[list[float]] = field(default_factory=list)
    gap: float = math.inf
    bpb: float | None = None  # of the evaluation, with `token_bytes`


def mean_loss(
    model: nn.Module, tokens: Tensor, targets: Tensor, end: int | None, text: list[float] | None = None
) -> Tensor:
    """The mean over all tokens. With an `end` token each document is an input of its own, beside others as long. The
    nats and bytes of targets that have bytes are added to `text`."""

    def counted(targets: Tensor) -> None:
        if text is not None:
            sizes = torch.tensor([*token_bytes(model.shape.vocab), 0])[targets]
            text[0] += float(model.losses.double()[sizes > 0].sum())
            text[1] += float(sizes.sum())

    if end is None:
        whole: Tensor = model(tokens, targets)
        counted(targets)
        return whole
    by_length: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for number, (row, following) in enumerate(zip(tokens, targets, strict=True)):
        begin = 0
        for place, token in enumerate(row.tolist(), 1):
            if token == end or place == len(row):
                document = (row[begin:place], following[begin:place], torch.tensor(number))
                by_length.setdefault(place - begin, []).append(document)
                begin = place
    total = torch.zeros(())
    for length, documents in by_length.items():
        inputs, wanted, model.rows = (torch.stack(part) for part in zip(*documents, strict=True))
        total = total + model(inputs, wanted) * (length * len(documents))
        counted(wanted)
    return total / tokens.numel()


def train_plainly(
    shape: ModelShape,
    train: Train,
    initial: dict[str, Tensor],
    batches: list[tuple[Tensor, Tensor]],
    evaluation: tuple[Tensor, Tensor],
    autocast: bool = False,
    end: int | None = None,
    idle: int = 0,
    noise: int = 0,
) -> PlainRun:
    """One step on each whole batch: clip by the global norm, then AdamW or SGD with torch's for-loop kernels, or Muon.

    With `autocast` the weights stay in fp32 and products are done in bf16. With an `end` token the model sees each
    document alone. Of a mixture the first `idle` experts get no token. `noise`, the seed of a generator, moves each
    number of the gradients by about 1e-7 of itself; 0 moves none.
    """
    if shape.is_mixture:
        model: Any = PlainMixture(shape, initial, train, idle)
    else:
        model = PlainGpt(shape, initial) if shape.positions == "learned" else PlainOther(shape, initial)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    if train.optimizer == "muon":
        optimizer: Any = PlainMuon(model, train)
    elif train.optimizer == "adamw":
        optimizer = torch.optim.AdamW(
            groups, betas=(train.beta1, train.beta2), eps=train.eps, foreach=False, fused=False
        )
    else:
        optimizer = torch.optim.SGD(groups, foreach=False, fused=False)
    run, generator = PlainRun([], [], [], 0.0, {}), torch.Generator().manual_seed(noise)
    for step, (tokens, targets) in enumerate(batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = mean_loss(model, tokens, targets, end)
        added = torch.zeros(())
        if shape.is_mixture:
            added, figures = model.balance(len(tokens))
            run.balance.append(figures)
        (loss + added).backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))
        if train.clip and norm > train.clip:
            for p in parameters:
                assert p.grad is not None
                p.grad *= train.clip / (norm + 1e-6)
        for p in parameters if noise else []:
            assert p.grad is not None
            p.grad *= 1 + 1e-7 * torch.randn(p.shape, generator=generator)
        if step < train.warmup_steps:
            lr = train.lr * (step + 1) / train.warmup_steps
        else:
            turn = math.pi * (step - train.warmup_steps) / (train.steps - train.warmup_steps)
            lr = train.min_lr + (train.lr - train.min_lr) * (1 + math.cos(turn)) / 2
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        if shape.is_mixture:
            model.after_step()
        run.losses.append(loss.item())
        run.norms.append(norm)
        run.lrs.append(lr)
    with torch.no_grad():
        text = [0.0, 0.0]
        run.loss_eval = float(mean_loss(model, *evaluation, end, text))
        run.bpb = text[0] / math.log(2) / text[1]
    run.weights = {name: weight.detach() for name, weight in model.weights().items()}
    if shape.is_mixture:
        run.gap, run.biases = model.gap, [bias.tolist() for bias in model.biases()]
    return run
