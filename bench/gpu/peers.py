"""GPTs as one writes them by hand for one GPU, beside which `turns` measures ours: GPT-2's kind with biases, as
nanoGPT's class is built, and Llama's. Of ours they take sizes and the rotation's frequencies alone. A mixture's peer is
transformers' Qwen3-MoE with its grouped products.

Weights in 16 bits with fp32 masters for a Llama and a mixture; fp32 weights under autocast for a GPT-2. The model is
compiled whole, gradients are clipped, the optimizer is torch's fused AdamW.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model.attention import frequencies

Step = Callable[[Sequence[tuple[Tensor, Tensor]]], float]


class Gpt2Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.hidden
        self.heads = shape.heads
        self.before_mix, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, seq, width = hidden.shape
        parts = self.qkv(self.before_mix(hidden)).view(batch, seq, 3, self.heads, width // self.heads).unbind(2)
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return hidden + self.down(F.gelu(self.up(self.before_mlp(hidden)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.padded_vocab, shape.hidden)
        self.positions = nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(Gpt2Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(self.norm(hidden), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class LlamaBlock(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        own, keys = shape.heads * shape.head_width, shape.key_heads * shape.head_width
        self.shape = shape
        self.before_mix, self.before_mlp = (nn.RMSNorm(shape.hidden, shape.norm_eps) for _ in range(2))
        self.query, self.out = nn.Linear(shape.hidden, own, bias=False), nn.Linear(own, shape.hidden, bias=False)
        self.key, self.value = (nn.Linear(shape.hidden, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.hidden, shape.mlp_width, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.mlp_width, shape.hidden, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, seq, _ = hidden.shape

        def split(part: Tensor) -> Tensor:
            return part.view(batch, seq, -1, self.shape.head_width).transpose(1, 2)

        def turn(part: Tensor) -> Tensor:
            first, second = part.float().chunk(2, -1)
            return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).to(part.dtype)

        normed = self.before_mix(hidden)
        query, key, value = (split(line(normed)) for line in (self.query, self.key, self.value))
        grouped = self.shape.key_heads < self.shape.heads
        mixed = F.scaled_dot_product_attention(turn(query), turn(key), value, is_causal=True, enable_gqa=grouped)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        normed = self.before_mlp(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.padded_vocab, shape.hidden)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.head = self.tokens if shape.tied else nn.Linear(shape.hidden, shape.padded_vocab, bias=False)
        turns = frequencies(shape.head_width, shape.rope_theta, shape.rope_scaling)
        angles = torch.outer(torch.arange(shape.seq, device=turns.device).float(), turns)
        self.tables = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden, *(table.to(hidden.device) for table in self.tables))
        logits = F.linear(self.norm(hidden), self.head.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Mixture(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        super().__init__()
        config = Qwen3MoeConfig(
            vocab_size=shape.padded_vocab, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads, head_dim=shape.head_width,
            num_experts=shape.experts, num_experts_per_tok=shape.experts_per_token, norm_topk_prob=shape.norm_topk,
            moe_intermediate_size=shape.expert_ffn, max_position_embeddings=shape.seq, rms_norm_eps=shape.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta}, use_cache=False,
            tie_word_embeddings=shape.tied, attn_implementation="sdpa", experts_implementation="grouped_mm",
        )  # fmt: skip
        self.model = Qwen3MoeForCausalLM(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(tokens).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build_peer(shape: ModelShape) -> nn.Module:
    """The peer of a shape, with weights of its own."""
    if shape.is_mixture:
        return Mixture(shape)
    return Llama(shape) if shape.positions == "rope" else Gpt2(shape)


def peer_of(shape: ModelShape, device: torch.device) -> Step:
    """A function that makes one step of the peer with that shape, on pairs (tokens, targets) of micro-batches, and
    returns its last loss."""
    torch.manual_seed(1)
    is_llama, cuda = shape.positions == "rope", device.type == "cuda"
    with device:
        model = build_peer(shape)
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, 0.0, 0.02)
    masters = list(model.parameters())
    if is_llama and cuda:
        masters = [nn.Parameter(weight.detach().clone()) for weight in masters]
        model.bfloat16()
    forward = torch.compile(model, dynamic=False) if cuda else model
    groups = [{"params": [one for one in masters if (one.ndim > 1) is flat], "weight_decay": 0.1 * flat}
              for flat in (True, False)]  # fmt: skip
    adam = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)

    def step(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
        loss = math.nan
        for tokens, targets in pairs:
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda and not is_llama):
                found = forward(tokens, targets)
            (found / len(pairs)).backward()
            loss = found.detach()
        weights = list(model.parameters())
        if masters[0] is not weights[0]:
            for master, weight in zip(masters, weights, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        adam.step()
        if masters[0] is not weights[0]:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        adam.zero_grad(set_to_none=True)
        return float(loss)

    return step
