"""The reference of a mixture of experts: transformers' class with its loop over experts, and balance written plainly.

It takes from hpc_gpt the numbers of a shape alone: keys, names and formulas are this module's own. A hook on each
router gives its scores and choices, from which follow the balance loss, the z-loss, the load and the gap of the
closest decision.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.core.settings.model_shape import ModelShape
from tests.distributed.mixtures import NEVER

_NAMES = {
    "norm1": "input_layernorm",
    "attention.projection": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "norm2": "post_attention_layernorm",
    "feed_forward.down": "mlp.down_proj",
    "router": "mlp.gate",
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}


def family_of(shape: ModelShape) -> str:
    """The model type of transformers that has the shape."""
    if shape.router == "sigmoid":
        return "glm4_moe" if shape.rotated < 1 else "dots1"
    if shape.qk_norm:
        return "olmoe" if shape.qk_norm == "width" else "qwen3_moe"
    return "qwen2_moe" if shape.shared_gate else "mixtral"


def _config(shape: ModelShape, family: str) -> Any:
    from transformers import CONFIG_MAPPING

    expert = shape.expert_ffn or 0
    keys: dict[str, Any] = {
        "vocab_size": shape.padded_vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": expert if family in ("mixtral", "olmoe") else shape.mlp_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "num_experts_per_tok": shape.experts_per_token,
        "pad_token_id": shape.pad_token,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": False,
    }
    if shape.head_dim:
        keys["head_dim"] = shape.head_dim
    if family in ("dots1", "glm4_moe"):
        keys |= {"n_routed_experts": shape.experts, "first_k_dense_replace": shape.dense_layers}
        keys |= {"n_shared_experts": (shape.shared_ffn or 0) // expert, "routed_scaling_factor": shape.router_scale}
        keys |= {"n_group": shape.expert_groups or 1, "topk_group": shape.groups_per_token or 1}
        keys |= {"attention_bias": shape.bias == "qkv"}
    else:
        keys["num_local_experts" if family in ("mixtral", "qwen3_moe") else "num_experts"] = shape.experts
    if family == "glm4_moe":
        keys["use_qk_norm"] = bool(shape.qk_norm)
        keys["rope_parameters"]["partial_rotary_factor"] = shape.rotated
    if family != "mixtral":
        assert family != "olmoe" or not shape.head_dim
        keys["norm_topk_prob"] = shape.norm_topk
        keys |= {} if family in ("olmoe", "mixtral") else {"moe_intermediate_size": expert}
    if shape.window:
        keys |= {"sliding_window": shape.window, "use_sliding_window": True}
        letters = [
            (shape.window_layers or "S")[layer % len(shape.window_layers or "S")] for layer in range(shape.layers)
        ]
        names = {"S": "sliding_attention", "L": "full_attention"}
        keys |= {"layer_types": [names[one] for one in letters]} if family in ("qwen2_moe", "dots1") else {}
    if family == "qwen2_moe":
        keys |= {"shared_expert_intermediate_size": shape.shared_ffn, "qkv_bias": shape.bias == "qkv"}
    return CONFIG_MAPPING[family](**keys)


def closest_decision(logits: Tensor, bias: Tensor | None, used: int, groups: int, groups_used: int) -> float:
    """The distance in logits of the last expert or group that is chosen from the next one: the least of all tokens'.

    `logits`: [tokens, experts]. `bias`: of a sigmoid router, which is added to the scores.
    """
    gaps, scores = [], logits
    if bias is not None:
        scores = 4 * (logits.sigmoid() + bias)  # times the least that a sigmoid makes a difference of logits smaller
    if groups_used < groups:
        by_group = scores.view(len(scores), groups, -1)
        sums, order = by_group.topk(2, -1).values.sum(-1).sort(-1, descending=True)
        gaps.append(sums[:, groups_used - 1] - sums[:, groups_used])
        scores = by_group.gather(1, order[:, :groups_used, None].expand(-1, -1, by_group.shape[2])).flatten(1)
    if used < scores.shape[1]:
        ranked = scores.sort(-1, descending=True).values
        gaps.append(ranked[:, used - 1] - ranked[:, used])
    return min((float(gap.min()) for gap in gaps), default=math.inf)


class PlainMixture(nn.Module):
    """The class of a shape, with what its routers gave since the last step; the first `idle` experts of each layer are
    never chosen. `rows`: of which sample each input is a document, where a batch is not passed at once."""

    rows: Tensor | None = None

    def __init__(self, shape: ModelShape, initial: dict[str, Tensor], train: Train, idle: int = 0) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.shape, self.train_settings = shape, train
        self.family = family_of(shape)
        self.model = AutoModelForCausalLM.from_config(_config(shape, self.family), attn_implementation="eager")
        self.model.set_experts_implementation("eager")
        named = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in initial.items():
                places = [named.pop(place) for place in self.places(name)]
                for place, part in zip(places, weight.split([len(place) for place in places]), strict=True):
                    place.copy_(part)
        assert not named, f"transformers has parameters that we lack: {list(named)}"
        self.routers = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
        # (sample, scores, experts) of each token: one entry for each layer of each pass.
        self.chosen: list[tuple[Tensor, Tensor, Tensor]] = []
        for router in self.routers:
            router.register_forward_hook(lambda _, __, given: self.chosen.append((self.samples, given[0], given[2])))
            if idle:
                router.e_score_correction_bias[:idle] = NEVER
        self.gap = math.inf

    def places(self, name: str) -> list[str]:
        """The parameters of the class that are ours when joined by rows."""
        layer, kind = name.rsplit(".", 1)
        before, ours = "", layer
        if layer.startswith("blocks."):
            _, number, ours = layer.split(".", 2)
            before = f"model.layers.{number}."
        shared = "mlp.shared_expert" if self.family == "qwen2_moe" else "mlp.shared_experts"
        if ours.startswith("experts."):
            return [before + {"experts.up": "mlp.experts.gate_up_proj", "experts.down": "mlp.experts.down_proj"}[ours]]
        joined = {
            "attention.qkv": [f"self_attn.{one}_proj" for one in "qkv"],
            "feed_forward.up": ["mlp.gate_proj", "mlp.up_proj"],
            "shared.up": [f"{shared}.gate_proj", f"{shared}.up_proj"],
            "shared.down": [f"{shared}.down_proj"],
            "shared_gate": ["mlp.shared_expert_gate"],
        }
        return [f"{before}{one}.{kind}" for one in joined.get(ours) or [_NAMES[ours]]]

    def weights(self) -> dict[str, Tensor]:
        """Values by hpc_gpt's names."""
        named = dict(self.model.named_parameters())
        return {
            name: torch.cat([named[one] for one in self.places(name)])
            for name in self.shape.parameter_names
            if not name.endswith("choice_bias")
        }

    def biases(self) -> list[Tensor]:
        """The bias that chooses, of each layer that has one."""
        return [one.e_score_correction_bias for one in self.routers if hasattr(one, "e_score_correction_bias")]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        rows = torch.arange(len(tokens)) if self.rows is None else self.rows
        self.samples = rows.repeat_interleave(tokens.shape[1])
        logits = self.model(tokens).logits.float()
        for (_, scores, _), router in zip(self.chosen[-len(self.routers) :], self.routers, strict=True):
            self.gap = min(self.gap, self._gap(scores.detach(), router))
        logits = logits.masked_fill(torch.arange(logits.shape[-1]) >= self.shape.vocab, -torch.inf)
        self.losses = -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return self.losses.mean()

    def _gap(self, scores: Tensor, router: nn.Module) -> float:
        shape = self.shape
        bias: Any = router.e_score_correction_bias if shape.router == "sigmoid" else None
        return closest_decision(
            scores, bias, shape.experts_per_token or 0, shape.expert_groups or 1, shape.groups_per_token or 1
        )

    def balance(self, samples: int) -> tuple[Tensor, list[float]]:
        """(addition of so many samples to the loss of the step, (balance loss, load, dead experts))."""
        losses, z_losses, loads, dead = [], [], [], 0
        for rows, scores, experts in self._by_layer():
            counts = experts.flatten().bincount(minlength=scores.shape[1]).float()
            raw = scores.sigmoid() if self.shape.router == "sigmoid" else scores.softmax(-1)
            hits = nn.functional.one_hot(experts, len(counts)).float().mean(1)
            shares = raw / raw.sum(-1, keepdim=True)
            f, p = (torch.zeros(samples, len(counts)).index_add(0, rows, one) for one in (hits, shares))
            tokens = len(rows) / samples
            losses.append(len(counts) * (f / tokens * p / tokens).sum(-1).mean())
            z_losses.append(scores.logsumexp(-1).square().mean())
            loads.append(float(counts.max() / counts.mean()))
            dead += int((counts == 0).sum())
        train = self.train_settings
        added = train.z_loss * sum(z_losses, torch.zeros(()))
        if train.balance == "loss":
            added = added + train.balance_coef * sum(losses, torch.zeros(()))
        return added, [float(sum(losses, torch.zeros(())).detach()) / len(losses), max(loads), dead]

    def _by_layer(self) -> list[tuple[Tensor, ...]]:
        """(sample, scores, experts) of each token of the step, of each layer."""
        count = len(self.routers)
        return [tuple(map(torch.cat, zip(*self.chosen[layer::count], strict=True))) for layer in range(count)]

    @torch.no_grad()
    def after_step(self) -> None:
        """Moves the biases by the loads of the step."""
        if self.train_settings.balance == "bias":
            for bias, (_, scores, experts) in zip(self.biases(), self._by_layer(), strict=True):
                counts = experts.flatten().bincount(minlength=scores.shape[1]).float()
                signs = (counts.mean() - counts).sign()
                bias += self.train_settings.balance_rate * (signs - signs.mean())
        self.chosen.clear()
