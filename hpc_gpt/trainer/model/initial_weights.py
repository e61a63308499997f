"""The initial weights of a model: drawn in blocks of rows, each as a function of the seed, the parameter's name and the
rows, or read from a folder."""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.folder import WeightsFolder
from hpc_gpt.trainer.model.folder_tensors import SliceReader

STD = 0.02  # GPT-2's standard deviation of initial weights
# The numbers of a parameter that are copied into its place at once, 4 MiB in fp32.
AT_ONCE = 1 << 20
# The numbers of a block of rows, at most if it has several rows.
_BLOCK = 1 << 17


class _Draw(NamedTuple):
    """A weight to draw: its size, its standard deviation, and a row that is zero."""

    shape: tuple[int, ...]
    std: float
    zero_row: int | None = None


class InitialWeights:
    """Initial weights that are put into their places once these exist; until then each is a size on the meta device,
    which takes no memory. So a weight that nothing fills cannot be trained by mistake.

    `taken` has the names that were requested.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.taken: set[str] = set()

    def normal(self, name: str, shape: tuple[int, ...], std: float = STD, zero_row: int | None = None) -> Tensor:
        """Weights that, if they are drawn, are normal numbers with mean 0, except for a row of zeros, if there is
        one."""
        return torch.empty(shape, device="meta")

    def residual(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Weights of a layer that adds to the residual stream: the standard deviation is divided by sqrt(2 layers).

        Source: Radford et al. 2019 (GPT-2), section 2.3; two such layers in each block.
        """
        return self.normal(name, shape, STD / math.sqrt(2 * self.layers))

    def set_constant(self, name: str, value: Tensor) -> None:
        """Keeps the initial value of a parameter that is not drawn."""

    def read(self, name: str, target: Tensor, row: int = 0, column: int = 0) -> None:
        """Fills `target`, on any device, with the part of a parameter that begins at `row` and `column`."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the files that are read, if there are any."""


class SeededWeights(InitialWeights):
    """Initial weights that are drawn, always on the CPU.

    Each block of a parameter's rows has its own generator, seeded by the run's seed, the parameter's name and the
    first row. So all ranks draw the same numbers, whatever layers, rows or devices they have, and a rank draws only the
    blocks of its own rows. As many threads draw as torch computes with; a core draws 157e6 numbers per second.
    """

    def __init__(self, seed: int, layers: int) -> None:
        super().__init__(layers)
        self.seed = seed
        self._wanted: dict[str, _Draw | Tensor] = {}

    def normal(self, name: str, shape: tuple[int, ...], std: float = STD, zero_row: int | None = None) -> Tensor:
        self._wanted[name] = _Draw(shape, std, zero_row)
        return super().normal(name, shape)

    def set_constant(self, name: str, value: Tensor) -> None:
        self._wanted.setdefault(name, value)

    def read(self, name: str, target: Tensor, row: int = 0, column: int = 0) -> None:
        wanted = self._wanted[name]
        if isinstance(wanted, _Draw):
            self._draw(name, wanted, target, row, column)
        else:
            values = wanted[row : row + len(target)]
            target.copy_(values if target.ndim == 1 else values[:, column : column + target.shape[1]])

    def _draw(self, name: str, wanted: _Draw, target: Tensor, row: int, column: int = 0) -> None:
        """Fills `target` with the part of a weight that begins at `row` and `column`. The rows of an expert follow
        those of the one before; its weights do not depend on the others."""
        height, width = wanted.shape[-2:]
        rows, places, at = max(1, _BLOCK // width), [], 0
        while at < len(target):
            expert, inside = divmod(row + at, height)
            begin = inside - inside % rows
            end = min(begin + rows, height)
            count = min(end - inside, len(target) - at)
            places.append((f"{name}.{expert}" if len(wanted.shape) == 3 else name, begin, end, inside, at, count))
            at += count

        def put(place: tuple[str, int, int, int, int, int]) -> None:
            of, begin, end, inside, at, count = place
            seed = hashlib.sha256(f"{self.seed}:{of}:{begin}".encode()).digest()
            # manual_seed takes 63 bits for certain.
            generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "little") >> 1)
            block = torch.empty(end - begin, width).normal_(0.0, wanted.std, generator=generator)
            if wanted.zero_row is not None and begin <= wanted.zero_row < end:
                block[wanted.zero_row - begin] = 0
            with torch.no_grad():  # which each thread sets for itself
                target[at : at + count].copy_(block[inside - begin :][:count, column : column + target.shape[1]])

        if (workers := min(torch.get_num_threads(), len(places))) > 1:
            with ThreadPoolExecutor(workers, "initial weights") as threads:
                list(threads.map(put, places))
        else:
            list(map(put, places))


class FolderWeights(InitialWeights):
    """The weights of a folder under our names: each rank reads its own slices, a few megabytes at a time."""

    def __init__(self, folder: WeightsFolder, shape: ModelShape) -> None:
        super().__init__(shape.layers)
        self._reader = SliceReader(folder, shape)

    def read(self, name: str, target: Tensor, row: int = 0, column: int = 0) -> None:
        """See `InitialWeights`. Rows past the file's, which pad the vocabulary, are zero. Raises ConfigError for
        NaN or infinity."""
        count = max(1, AT_ONCE // max(1, target[:1].numel()))
        for first in range(0, len(target), count):
            self._reader.read(name, target[first : first + count], row + first, column)

    def close(self) -> None:
        self._reader.close()
