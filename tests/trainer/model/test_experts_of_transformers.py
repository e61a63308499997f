"""Mixtures of experts with weights that matter: the loss and each gradient of every family are those of its class."""

import pytest
import torch

from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model.gpt import Gpt
from tests.distributed.equality_cases import SEQ, VOCAB, whole_batch
from tests.distributed.mixtures import LEAST_GAP, MIXTURES
from tests.distributed.plain_mixture import PlainMixture

pytest.importorskip("transformers")


@pytest.mark.parametrize("model", MIXTURES)
def test_loss_and_gradients_of_experts(model: str) -> None:
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
