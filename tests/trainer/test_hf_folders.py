"""Folders in Hugging Face's format, of every architecture: transformers loads what is written, and computes alike."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.config import InitConfig, read_config
from hpc_gpt.trainer.model.folder_tensors import write_hf
from tests.trainer.model.test_gpt import tokens_of
from tests.trainer.model.test_other_shapes import SHAPES, named, with_large_weights

transformers = pytest.importorskip("transformers")
FAMILIES = {
    name: replace(shape, layers=2, tied=name not in ("llama", "gpt2 untied"))
    for name, shape in {
        **SHAPES,
        "gpt2": ModelShape(32, 2, 4, 61, 48),
        "gpt2 untied": ModelShape(32, 2, 4, 61, 48),
    }.items()
}


def write(
    shape: ModelShape,
    folder: Path,
    piece_bytes: int = 10**9,
    dtype: str = "fp32",
    begun_as: str | None = None,
) -> dict[str, torch.Tensor]:
    """Writes a model whose every part changes the logits; returns its weights by our names, without padding."""
    weights = named(with_large_weights(shape))
    for name in ("embedding.weight", "head.weight"):
        if name in weights:
            weights[name] = weights[name][: shape.vocab].clone()
    write_hf(shape, weights.items(), folder, piece_bytes, dtype, begun=InitConfig(begun_as))
    return weights


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    shape = FAMILIES[name]
    write(shape, tmp_path / "one")
    write(shape, tmp_path / "several", piece_bytes=9_000)
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 2
    listed = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())["weight_map"]
    assert ("lm_head.weight" in listed) is not shape.tied, "a tied file has no head of its own"
    tokens, _ = tokens_of(shape)
    expected = with_large_weights(shape).logits(tokens)[..., : shape.vocab].detach()
    for folder in (tmp_path / "one", tmp_path / "several"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(tokens).logits, expected, rtol=1e-5, atol=1e-5)
        assert read_config(folder, shape.seq) == replace(shape, vocab_multiple=64)
