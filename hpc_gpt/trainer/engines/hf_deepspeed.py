"""Engine hf-deepspeed: transformers' own model under DeepSpeed's ZeRO 1 to 3, offloaded or not.

The shape decides the class (`core.weights.classes.architecture_of`): GPT2LMHeadModel, LlamaForCausalLM and others.

This is "HF + Deepspeed" in Megatron-DeepSpeed's perf tables. The model starts from our initial weights, so it trains
like every other engine. Attention is torch's SDPA, or transformers' eager one if engine.attention is math.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.core.errors import check_package
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.weights.config import config_of
from hpc_gpt.core.weights.names import WeightPart, held_by_class, parts_of
from hpc_gpt.trainer.checkpoints.states import Share
from hpc_gpt.trainer.engines.deepspeed_zero import DeepspeedZero
from hpc_gpt.trainer.engines.library_patches import keep_buffers_in_fp32
from hpc_gpt.trainer.engines.master_weights import HALF
from hpc_gpt.trainer.model.experts import GroupedLinear, note_once, why_not_grouped
from hpc_gpt.trainer.model.initial_weights import InitialWeights
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel, Tile, name_parameter
from hpc_gpt.trainer.model.vocab_loss import VocabParallelLoss


def build(resolved: Resolved, device: torch.device) -> HfDeepspeed:
    """Builds the engine on this rank. Raises ConfigError without transformers."""
    check_package("transformers", "engine hf-deepspeed")
    return HfDeepspeed(resolved, device)


class HfDeepspeed(DeepspeedZero):
    """DeepSpeed's ZeRO with transformers' model."""

    def _build_model(self, tp: TensorParallel) -> nn.Module:
        return HfGpt(self._resolved, tp)

    @property
    def _transposed(self) -> frozenset[str]:
        model = self._resolved.model
        return frozenset(name for name in model.parameter_names if parts_of(model, name)[0].transposed)

    def _fill(self, share: Share, rows: Tensor, first: int) -> None:
        if share.transposed:
            self._tp.fill(share.name, rows.t(), None, share.shape[::-1], column=first)
        else:
            super()._fill(share, rows, first)


class HfGpt(nn.Module):
    """transformers' model in the form that our engines need: (tokens, targets) -> loss, parameters by our names.

    The embedding has the rows of our padded vocabulary; rows past the tokenizer's vocabulary take no part in the loss.
    """

    def __init__(self, resolved: Resolved, tp: TensorParallel) -> None:
        import transformers

        super().__init__()
        shape = resolved.model
        keys = config_of(shape, shape.padded_vocab) | {"use_cache": False}
        kind: Any = getattr(transformers, keys.pop("architectures")[0])
        config = kind.config_class(**{key: value for key, value in keys.items() if key != "model_type"})
        config._attn_implementation = "eager" if resolved.engine.attention == "math" else "sdpa"
        dtype = HALF.get(resolved.train.dtype, torch.float32)
        if shape.expert_ffn and (
            why := GroupedLinear.refused
            or why_not_grouped(tp.device or torch.device("cpu"), dtype, shape.hidden, shape.expert_ffn)
        ):
            note_once(why)
            config._experts_implementation = "eager"
        # On the meta device nothing is drawn and no memory taken: `_make_weights` makes the weights one by one.
        with torch.device("meta"):
            self.model: Any = kind(config)
        self.shape = shape
        _make_weights(self.model, shape, resolved.train.seed, tp)
        if resolved.engine.recompute == "full":
            # transformers 5 has renamed it, and transformers 6 drops the old name.
            name = "activation" if hasattr(self.model, "activation_checkpointing_enable") else "gradient"
            enable = getattr(self.model, f"{name}_checkpointing_enable")
            enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})
        self.loss = VocabParallelLoss(shape.vocab, shape.padded_vocab, tp)
        self.train()

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer's layers."""
        whole = self.model.base_model
        blocks = whole.h if hasattr(whole, "h") else whole.layers
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def choice_biases(self) -> dict[str, Tensor]:
        """{our name: the buffer with which a router of transformers' class chooses experts}; no step moves them."""
        names = self.shape.buffer_names
        return {name: self.model.get_buffer(held_by_class(self.shape, name)[0].name) for name in names}

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens and the tokens that follow them, both [batch, seq] -> mean loss in nats per token, fp32 scalar."""
        loss: Tensor = self.loss(self.model(tokens).logits, targets)
        return loss


def _make_weights(model: nn.Module, shape: ModelShape, seed: int, tp: TensorParallel) -> None:
    """Gives a model on the meta device weights with memory and our names, layer by layer.

    Each layer is then registered with its parent once more: ZeRO-3 partitions it at that moment. A parameter that has
    only some rows of our parameter is marked as a tile of it.
    """
    initial = tp.initial(seed, shape.layers)
    for name in shape.parameter_names:
        parts = held_by_class(shape, name)
        whole = tp.share(name, _draw(initial, name, _size(model, parts), shape.pad_token), None)
        for number, part in enumerate(parts):
            path, _, kind = part.name.rpartition(".")
            layer = model.get_submodule(path)
            weight = nn.Parameter(whole.new_empty(part.of(whole).shape))
            tile = Tile(number, len(parts)) if len(parts) > 1 else None
            layer.register_parameter(kind, name_parameter(weight, name, tile=tile))
            if not any(parameter.is_meta for parameter in layer.parameters()):
                owner, _, attribute = path.rpartition(".")
                setattr(model.get_submodule(owner), attribute, layer)
    if shape.tied:
        embedding = parts_of(shape, "embedding.weight")[0].name
        model.get_submodule("lm_head").register_parameter("weight", model.get_parameter(embedding))
    assert not any(parameter.is_meta for parameter in model.parameters())
    for name in shape.buffer_names:
        path, _, kind = held_by_class(shape, name)[0].name.rpartition(".")
        router = model.get_submodule(path)
        router.register_buffer(kind, tp.whole(name, torch.zeros(router.get_buffer(kind).shape)))
        keep_buffers_in_fp32(router)
    _make_buffers(model)


def _size(model: nn.Module, parts: list[WeightPart]) -> tuple[int, ...]:
    """The size of our parameter, from the sizes of its parts in transformers' model."""
    sizes = [part.of(model.get_parameter(part.name)).shape for part in (part._replace(end=None) for part in parts)]
    return sum(size[0] for size in sizes), *sizes[0][1:]


def _make_buffers(model: nn.Module) -> None:
    """Makes the rotation's frequencies, which are also on the meta device, and keeps them in fp32."""
    for path, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            made: Any = type(module)(module.config)
            keep_buffers_in_fp32(made)
            owner, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(owner), attribute, made)


def _draw(initial: InitialWeights, name: str, size: tuple[int, ...], pad: int | None) -> Tensor:
    """The initial value of a parameter of `hpc_gpt.trainer.model.gpt`.

    Our layers cannot be built for that: ZeRO-3 would partition them, too.
    """
    layer, _, kind = name.rpartition(".")
    if kind == "bias":
        return torch.zeros(size)
    if layer.endswith(("norm", "norm1", "norm2")):
        return torch.ones(size)
    if layer.endswith(("projection", "down")):
        return initial.residual(name, size)
    return initial.normal(name, size, zero_row=pad if layer == "embedding" else None)
