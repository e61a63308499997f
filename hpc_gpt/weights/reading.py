"""Slices of a folder's weights, read on the nodes: each rank reads its own part of the files."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hpc_gpt.errors import ConfigError
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.weights.folder import WeightsFolder, check_weights
from hpc_gpt.weights.names import parts_of, size_of


class SliceReader:
    """Reads weights by our names, as slices of transformers' parameters (`names.parts_of`).

    The files are mapped, so a node's ranks share their pages, and stay open until `close`.
    """

    def __init__(self, folder: WeightsFolder, shape: ModelShape) -> None:
        check_weights(folder, shape)
        self._folder = folder
        self._shape = shape
        self._files: dict[str, Any] = {}

    def read(self, name: str, target: Tensor, row: int, column: int) -> None:
        """Fills `target`, on any device, with the part of a parameter that begins at `row` and `column`.

        Rows past the file's, which pad the vocabulary, are zero. Raises ConfigError for NaN or infinity.
        """
        rows = size_of(self._shape, name)[0]
        last = min(rows, row + target.shape[0])
        target[max(0, last - row) :] = 0
        for part in parts_of(self._shape, name):
            begin, end = max(row, part.start), min(last, rows if part.end is None else part.end)
            if begin >= end:
                continue
            index = [slice(begin - part.start, end - part.start)]
            if target.ndim > 1:
                columns = slice(column, column + target.shape[1])
                index = [columns, index[0]] if part.transposed else [index[0], columns]
            values = self._slice(part.name)[tuple(index)]
            target[begin - row : end - row].copy_(values.t() if part.transposed else values)
            # Without memory for each of the numbers; NaN is the least and the largest of any that it is among.
            if not all(one.isfinite() for one in values.aminmax()):
                raise ConfigError(
                    f"{self._folder.path}: {self._folder.stored[part.name]} has NaN or infinity",
                    "these weights cannot be trained; name another folder",
                )

    def close(self) -> None:
        self._files.clear()

    def _slice(self, name: str) -> Any:
        file = str(self._folder.weights[name].file)
        if file not in self._files:
            from safetensors import SafetensorError, safe_open

            try:
                self._files[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as fault:
                raise ConfigError(f"{file} cannot be read: {fault}", "download the folder again") from None
        return self._files[file].get_slice(self._folder.stored[name])
