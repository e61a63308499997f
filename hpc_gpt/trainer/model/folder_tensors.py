"""Weights in transformers' format: each rank reads its own slices of the files in a folder, and an export writes
config.json and one or more safetensors files.

An export writes a file after every 5 GB of weights, which is about the memory that it needs.

The format belongs to transformers' class for the shape (`classes.architecture_of`): that of GPT-2, Llama, Qwen2,
Qwen3, SmolLM3, or one of six mixtures of experts. MistralForCausalLM has the same shape as Llama's class, and so has
SmolLM3's if all layers are rotated: a run writes the class that it began from.
"""

import json
import math
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_gpt.core.errors import ConfigError, check_package, read_hint
from hpc_gpt.core.files import aside, sync
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.config import GENERATION, InitConfig, config_of
from hpc_gpt.core.weights.folder import WeightsFolder, check_weights
from hpc_gpt.core.weights.names import CHOICE_BIAS, WeightPart, parts_of, size_of, to_hf


class SliceReader:
    """Reads weights by our names, as slices of transformers' parameters (`names.parts_of`).

    The files are mapped, so a node's ranks share their pages, and stay open until `close`.
    """

    def __init__(self, folder: WeightsFolder, shape: ModelShape) -> None:
        check_weights(folder, shape)
        self._folder = folder
        self._shape = shape
        self._files: dict[str, Any] = {}
        self._last: tuple[str, int, list[WeightPart]] | None = None

    def read(self, name: str, target: Tensor, row: int, column: int) -> None:
        """Fills `target`, on any device, with the part of a parameter that begins at `row` and `column`. The rows of a
        parameter of all experts, [experts, rows, columns], count through all of them.

        Rows that pad the vocabulary beyond the file's are zero. Raises ConfigError for NaN, infinity, and numbers that
        the target's type cannot hold.
        """
        rows, parts = self._parts(name)
        last = min(rows, row + target.shape[0])
        target[max(0, last - row) :] = 0
        for part in parts[bisect_right(parts, row, key=lambda one: one.start) - 1 :]:
            begin, end = max(row, part.start), min(last, rows if part.end is None else part.end)
            if begin >= end:
                break
            index: list[Any] = [slice(begin - part.start, end - part.start)]
            if target.ndim > 1:
                columns = slice(column, column + target.shape[1])
                index = [columns, index[0]] if part.transposed else [index[0], columns]
            if part.expert is not None:
                index.insert(0, part.expert)
            values = self._slice(part.name)[tuple(index)]
            target[begin - row : end - row].copy_(values.t() if part.transposed else values)
            # Needs no memory per number; if there is a NaN, it is both the minimum and the maximum.
            for extreme in values.aminmax():
                if not extreme.to(target.dtype).isfinite():
                    beyond = f"{extreme:g}, more than {str(target.dtype).removeprefix('torch.')} holds"
                    raise ConfigError(
                        f"{self._folder.path}: {self._folder.stored[part.name]} has "
                        + (beyond if extreme.isfinite() else "NaN or infinity"),
                        "these weights cannot be trained; name another folder",
                    )

    def close(self) -> None:
        self._files.clear()

    def _parts(self, name: str) -> tuple[int, list[WeightPart]]:
        """Returns (rows, parts) of a parameter. It is read in small pieces, and may have hundreds of parts."""
        if self._last is None or self._last[0] != name:
            size = size_of(self._shape, name)
            rows = math.prod(size[:-1]) if len(size) == 3 else size[0]
            self._last = name, rows, parts_of(self._shape, name, self._folder.is_fused)
        return self._last[1:]

    def _slice(self, name: str) -> Any:
        file = str(self._folder.weights[name].file)
        if file not in self._files:
            from safetensors import SafetensorError, safe_open

            try:
                self._files[file] = safe_open(file, framework="pt")
            except SafetensorError as fault:
                raise ConfigError(f"{file} cannot be read: {fault}", _AGAIN) from None
            except OSError as fault:
                raise ConfigError(f"{file} cannot be read: {fault}", read_hint(fault, _AGAIN)) from None
        return self._files[file].get_slice(self._folder.stored[name])


_AGAIN = "download the folder again"
PIECE_BYTES = 5 * 10**9  # as in transformers
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

    The folder is made as a whole or not at all: after a crash or a power cut it is either complete or missing.
    `begun`: see `config_of`.
    """
    with aside(folder) as unfinished:
        unfinished.mkdir(parents=True)
        files = _write_weights(to_hf(shape, weights), unfinished, piece_bytes, _DTYPES[dtype])
        for other in others:
            shutil.copyfile(other, unfinished / other.name)
            files.append(other.name)
        if begun is not None and begun.generation is not None:
            (unfinished / GENERATION).write_text(json.dumps(begun.generation, indent=2) + "\n", encoding="utf-8")
            files.append(GENERATION)
        config = config_of(shape, begun=begun)
        first = {key: config[key] for key in ("architectures", "model_type")}
        text = json.dumps({**first, "dtype": str(_DTYPES[dtype]).removeprefix("torch."), **config}, indent=2) + "\n"
        (unfinished / "config.json").write_text(text, encoding="utf-8")
        for written in (*unfinished.iterdir(), unfinished):
            sync(written)
        check_export(folder)
        unfinished.rename(folder)
        sync(folder.parent)
    return (*files, "config.json")


def check_export(folder: Path) -> None:
    """Raises ConfigError if the folder exists or safetensors is not installed."""
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists, and an export does not replace a folder", "name another folder with --out")
    check_package("safetensors", "the export")


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
        own = torch.float32 if name.endswith(CHOICE_BIAS) else dtype  # as transformers keeps it
        piece[name] = copy = weight.to(own, copy=True, memory_format=torch.contiguous_format)
        held += copy.nbytes
        total += copy.nbytes
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
