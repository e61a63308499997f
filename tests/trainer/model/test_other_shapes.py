"""Other shapes than GPT-2's: the same logits and gradients as transformers' own class, from weights that matter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.shape_split import kind_params
from hpc_gpt.core.weights.config import config_of
from hpc_gpt.core.weights.names import parts_of
from hpc_gpt.trainer.model.attention import Attention, Rotation, attention_core, expand_heads, frequencies
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel, full_name
from tests.distributed.equality_cases import MODELS
from tests.distributed.plain_gpt import PlainOther
from tests.trainer.model.test_gpt import tokens_of

transformers = pytest.importorskip("transformers")
SEQ = 48  # far above the 8 positions after which Llama's rotation is scaled
SHAPES = {
    name: ModelShape(layers=4, heads=4, vocab=61, seq=SEQ, tied=name != "llama", **sizes)
    for name, sizes in MODELS.items()
    if name != "gpt2"
}
SHAPES["all biases"] = replace(SHAPES["llama"], bias="all")


def with_large_weights(shape: ModelShape, **how: Any) -> Gpt:
    """A model whose every part changes the logits: weights of 0.15, norms and biases that are not 1 and 0."""
    model = Gpt(shape, 1, techniques=Techniques(**how))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * drawn if parameter.ndim > 1 else 0.2 * drawn + float("norm" in full_name(parameter)))
    return model


def named(model: Gpt) -> dict[str, Tensor]:
    return {full_name(parameter): parameter.detach() for parameter in model.parameters()}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_gradients_are_those_of_transformers_class(name: str) -> None:
    shape = SHAPES[name]
    model = with_large_weights(shape)
    assert list(named(model)) == shape.parameter_names
    assert sum(weight.numel() for weight in named(model).values()) == shape.params
    plain = PlainOther(shape, named(model))
    tokens, targets = tokens_of(shape)
    torch.testing.assert_close(model.logits(tokens), plain.model(tokens).logits, rtol=1e-5, atol=2e-6)
    ours, theirs = model(tokens, targets), plain(tokens, targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    ours.backward()
    theirs.backward()
    for own in model.parameters():
        expected = [plain.model.get_parameter(part.name).grad for part in parts_of(shape, full_name(own))]
        torch.testing.assert_close(own.grad, torch.cat(expected), rtol=1e-4, atol=1e-6, msg=full_name(own))


def test_expanded_keys_and_values_give_the_same() -> None:
    shape = SHAPES["llama"]
    losses = []
    for expands in (False, True):
        model = with_large_weights(shape)
        for part in model.modules():
            if isinstance(part, Attention):
                part.expands = expands
        losses.append(model(*tokens_of(shape)))
    torch.testing.assert_close(*losses)
    query, key = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4)
    wide, _ = expand_heads(key, key, 6)
    assert torch.equal(wide[:, 2], key[:, 0])
    assert torch.equal(wide[:, 3], key[:, 1])
    turned = [part.transpose(1, 2) for part in (query, key, wide)]
    torch.testing.assert_close(
        attention_core(turned[0], turned[1], turned[1]), attention_core(turned[0], turned[2], turned[2])
    )


def test_in_half_precision_rotation_and_norms_are_in_fp32() -> None:
    rotation = Rotation(16, 4096, 1e4, None)
    heads = torch.randn(1, 4096, 1, 16)
    exact, half = rotation.rotate(heads.bfloat16().float()), rotation.rotate(heads.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, exact.bfloat16()), "rounded once, at the end"
    model = with_large_weights(SHAPES["qwen3"]).to(torch.bfloat16)
    tables = model.blocks[0].attention.rotation
    assert tables.cosines.dtype == tables.sines.dtype == torch.float32
    wide = with_large_weights(SHAPES["qwen3"])
    tokens = tokens_of(SHAPES["qwen3"])
    assert abs(float(model(*tokens).detach() - wide(*tokens).detach())) < 0.02


def test_angles_are_no_parameters_and_in_no_state() -> None:
    model = Gpt(SHAPES["llama"], 1)
    assert list(model.state_dict()) == SHAPES["llama"].parameter_names
    assert not list(model.buffers())
    assert len({id(block.attention.rotation) for block in model.blocks}) == 1


@pytest.mark.parametrize("name", ["llama3.1-8b", "llama3.2-1b", "qwen3-8b", "smollm3-3b"])
def test_a_presets_frequencies_are_those_of_transformers(name: str) -> None:
    shape = preset(name)
    config = config_of(shape)
    kind = getattr(transformers, config.pop("architectures")[0])
    with torch.device("meta"):
        rotary = kind(kind.config_class(**config | {"num_hidden_layers": 1, "no_rope_layers": [1]})).model.rotary_emb
    made = type(rotary)(rotary.config)
    ours = frequencies(shape.head_width, shape.rope_theta, shape.rope_scaling)
    torch.testing.assert_close(ours, made.inv_freq, rtol=1e-6, atol=0)
    if shape.rope_scaling is not None:
        assert float(ours[-1] * shape.rope_scaling.factor) == pytest.approx(
            float(frequencies(shape.head_width, shape.rope_theta)[-1])
        )


def test_a_rank_holds_its_queries_keys_values_gates_and_ups() -> None:
    shape = SHAPES["llama"]  # 4 heads, 2 of keys, 12 wide; 40 inside the MLP
    whole, share = Gpt(shape, 1).blocks[0], Gpt(shape, 1, TensorParallel(1, 2)).blocks[0]
    query, key, value = whole.attention.qkv.weight.split([48, 24, 24])
    assert torch.equal(share.attention.qkv.weight, torch.cat([query[24:], key[12:], value[12:]]))
    gate, up = whole.feed_forward.up.weight.chunk(2)
    assert torch.equal(share.feed_forward.up.weight, torch.cat([gate[20:], up[20:]]))
    assert torch.equal(share.feed_forward.down.weight, whole.feed_forward.down.weight[:, 20:])


@pytest.mark.parametrize(("name", "tp"), [*((name, 4) for name in SHAPES), ("llama", 2)])
def test_plan_counts_the_parameters_that_a_rank_holds(name: str, tp: int) -> None:
    """At tp 4 each head of keys is used by several ranks, of which each holds a part."""
    shape = replace(SHAPES[name], qk_norm=False)
    block = Gpt(replace(shape, layers=1), 1, TensorParallel(tp - 1, tp)).blocks[0]
    assert sum(parameter.numel() for parameter in block.parameters()) == kind_params(shape.kinds[-1], tp)
