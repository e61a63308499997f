"""Engine hf-deepspeed: transformers' GPT2LMHeadModel under DeepSpeed's ZeRO 1 to 3, offloaded or not.

It is HF + DeepSpeed of seed 001. The model starts from our initial weights, so it trains as every other engine does.
Attention is torch's SDPA, or transformers' eager one if engine.attention is math.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.model.tensor_parallel import InitialWeights, TensorParallel, VocabParallelLoss, name_parameter
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.settings.requirements import check_package
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints import universal
from hpc_gpt.train.engines.deepspeed_zero import DeepspeedZero
from hpc_gpt.train.export import hf_config, hf_name, to_hf, weight_names


def build(resolved: Resolved, device: torch.device) -> HfDeepspeed:
    """Builds the engine on this rank. Raises ConfigError without transformers."""
    check_package("transformers", "hf", "engine hf-deepspeed")
    return HfDeepspeed(resolved, device)


class HfDeepspeed(DeepspeedZero):
    """DeepSpeed's ZeRO with transformers' model."""

    def _build_model(self, tp: TensorParallel) -> nn.Module:
        return HfGpt(self._resolved)


class HfGpt(nn.Module):
    """GPT2LMHeadModel as our engines want a model: (tokens, targets) -> loss, parameters by our names.

    The embedding has the rows of our padded vocabulary; those past the tokenizer's take no part in the loss.
    """

    def __init__(self, resolved: Resolved) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        shape = resolved.model
        config = GPT2Config(**hf_config(shape, shape.padded_vocab) | {"use_cache": False})
        config._attn_implementation = "eager" if resolved.engine.attention == "math" else "sdpa"
        # On the meta device nothing is drawn and no memory taken: `_fill` makes the weights one by one.
        with torch.device("meta"):
            self.model: Any = GPT2LMHeadModel(config)
        _fill(self.model, shape, resolved.train.seed)
        if resolved.engine.recompute == "full":
            # The name since transformers 5; transformers 6 drops the other.
            name = "activation" if hasattr(self.model, "activation_checkpointing_enable") else "gradient"
            enable = getattr(self.model, f"{name}_checkpointing_enable")
            enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})
        self.loss = VocabParallelLoss(shape.vocab, shape.padded_vocab, TensorParallel())
        self.train()

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer's layers."""
        blocks = self.model.transformer.h
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens and the tokens that follow them, both [batch, seq] -> mean loss in nats per token, fp32 scalar."""
        loss: Tensor = self.loss(self.model(tokens).logits, targets)
        return loss


def _fill(model: nn.Module, shape: ModelShape, seed: int) -> None:
    """Gives a model on the meta device our initial weights, a layer at a time.

    Each layer is then registered with its parent once more: ZeRO-3 partitions it at that moment.
    """
    initial = InitialWeights(seed, shape.layers)
    for name in weight_names(shape):
        path, _, kind = hf_name(name).rpartition(".")
        layer = model.get_submodule(path)
        size = to_hf(name, layer.get_parameter(kind)).shape
        weight = to_hf(name, _draw(initial, name, tuple(size))).contiguous()
        layer.register_parameter(kind, name_parameter(nn.Parameter(weight), name))
        if not any(own.is_meta for own in layer.parameters()):
            owner, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(owner), attribute, layer)
    if shape.tied:
        model.get_submodule("lm_head").register_parameter("weight", model.get_parameter("transformer.wte.weight"))
    assert not any(parameter.is_meta for parameter in model.parameters())


def _draw(initial: InitialWeights, name: str, size: tuple[int, ...]) -> Tensor:
    """The initial value of a parameter of `hpc_gpt.model.gpt`.

    Its own layers cannot be built for that: ZeRO-3 would partition them, too.
    """
    layer, _, kind = name.rpartition(".")
    if kind == "bias":
        return torch.zeros(size)
    if layer.endswith(("norm", "norm1", "norm2")):
        return torch.ones(size)
    return (initial.residual if layer.endswith(("projection", "down")) else initial.normal)(name, size)


def read_weights(folder: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of the whole model by its full name, in our shape, fp32, without torch.distributed."""
    for name, weight in universal.read_weights(folder, resolved):
        yield name, to_hf(name, weight)
