"""Writes weights as a folder of transformers' format: config.json, and safetensors in one file or several.

A file is written for every 5 GB of weights, which is about the memory that an export needs.

The format is that of transformers' class of the shape (`model_shape.architecture_of`): GPT2LMHeadModel,
LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM or SmolLM3ForCausalLM. Mistral's shape is Llama's, so a run writes
MistralForCausalLM if it began from one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from hpc_gpt.errors import ConfigError
from hpc_gpt.files import aside, sync
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.settings.requirements import check_package
from hpc_gpt.weights.config import GENERATION, InitConfig, config_of
from hpc_gpt.weights.names import to_hf

PIECE_BYTES = 5 * 10**9  # what transformers writes too
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_INDEX = "model.safetensors.index.json"


def write_hf(
    shape: ModelShape,
    weights: Iterable[tuple[str, Tensor]],
    folder: Path,
    piece_bytes: int = PIECE_BYTES,
    dtype: str = "fp32",
    others: Iterable[Path] = (),
    begun: InitConfig | None = None,
) -> tuple[str, ...]:
    """Writes weights, by our names and without the vocabulary's padding, and `others`; returns the files' names.

    The folder is made as a whole or not at all: whoever finds it after a crash or a power cut finds all of it.
    `begun`: see `config_of`.
    """
    with aside(folder) as own:
        own.mkdir(parents=True)
        files = _write_weights(to_hf(shape, weights), own, piece_bytes, _DTYPES[dtype])
        for other in others:
            shutil.copyfile(other, own / other.name)
            files.append(other.name)
        if begun is not None and begun.generation is not None:
            (own / GENERATION).write_text(json.dumps(begun.generation, indent=2) + "\n", encoding="utf-8")
            files.append(GENERATION)
        config = config_of(shape, begun=begun)
        first = {key: config[key] for key in ("architectures", "model_type")}
        text = json.dumps({**first, "dtype": str(_DTYPES[dtype]).removeprefix("torch."), **config}, indent=2) + "\n"
        (own / "config.json").write_text(text, encoding="utf-8")
        for written in (*own.iterdir(), own):
            sync(written)
        check_export(folder)
        own.rename(folder)
        sync(folder.parent)
    return (*files, "config.json")


def check_export(folder: Path) -> None:
    """Raises ConfigError if the folder exists or safetensors is not installed."""
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists, and an export replaces no folder", "name another folder with --out")
    check_package("safetensors", "hf", "the export")


def _write_weights(
    weights: Iterator[tuple[str, Tensor]], folder: Path, piece_bytes: int, dtype: torch.dtype
) -> list[str]:
    """Writes weights in files of about `piece_bytes`, and an index if there are several; returns the files' names."""
    from safetensors.torch import save_file

    pieces: list[list[str]] = []
    total = 0

    def write(piece: dict[str, Tensor]) -> None:
        save_file(piece, str(folder / f"piece-{len(pieces)}"), metadata={"format": "pt"})
        pieces.append(list(piece))

    piece: dict[str, Tensor] = {}
    held = 0
    for name, weight in weights:
        # A copy: a view of a larger parameter would be written whole, and keep it alive.
        piece[name] = kept = weight.to(dtype, copy=True, memory_format=torch.contiguous_format)
        held += kept.nbytes
        total += kept.nbytes
        if held >= piece_bytes:
            write(piece)
            piece, held = {}, 0
    if piece:
        write(piece)
    if len(pieces) == 1:
        (folder / "piece-0").rename(folder / "model.safetensors")
        return ["model.safetensors"]
    files = [f"model-{number:05d}-of-{len(pieces):05d}.safetensors" for number in range(1, len(pieces) + 1)]
    for number, file in enumerate(files):
        (folder / f"piece-{number}").rename(folder / file)
    where = {name: file for names, file in zip(pieces, files, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return [*files, _INDEX]
