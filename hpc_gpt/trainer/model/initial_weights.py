"""The initial weights of a model: drawn on several threads as a function of the seed and each parameter's name, or read
from a folder."""

import errno
import hashlib
import math
import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.folder import WeightsFolder
from hpc_gpt.core.weights.tensors import SliceReader

STD = 0.02  # GPT-2's standard deviation of initial weights
# The most numbers drawn ahead, 4 GiB of the host's memory in fp32. (A weight below _WORTH_A_THREAD takes less than 1 ms
# to draw.)
_NUMBERS_AHEAD = 1 << 30
# The numbers of a parameter that are copied into its place at once, 4 MiB in fp32.
AT_ONCE = 1 << 20
_WORTH_A_THREAD = 1 << 17


class _Draw(NamedTuple):
    """A weight to draw: its size, its standard deviation, a row that is zero, and the number of its first expert."""

    shape: tuple[int, ...]
    std: float
    zero_row: int | None = None
    first: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class InitialWeights:
    """Draws a model's weights, one parameter in full size at a time.

    Each parameter has its own generator, seeded by the run's seed and its name, always on the CPU. So all ranks draw
    the same numbers, whatever layers, shards or devices they have. A rank draws only the parameters of its own stage;
    for the 48B model on 16 stages these are 3.3e9 numbers. A core draws 130e6 per second.

    A generator is one long chain, so one thread draws a weight, while others draw the weights that come next: blocks
    are alike, so the requested ones show what the later ones need. As many threads work as torch computes with, the
    caller's among them. `end` is the block after the last one that this rank builds; if it is too large, some weights
    are drawn for nothing.
    """

    def __init__(self, seed: int, layers: int) -> None:
        self.seed = seed
        self.layers = layers
        self.end = layers  # the block after the last one that is built here
        self._of_a_block: dict[str, _Draw] = {}
        self._ahead: dict[str, tuple[_Draw, Future[Tensor]]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._first = -1  # the first block of the kind that is built

    def normal(
        self, name: str, shape: tuple[int, ...], std: float = STD, zero_row: int | None = None, first: int = 0
    ) -> Tensor:
        """Normal numbers with mean 0 in fp32, except for a row of zeros, if there is one. Weights of experts begin with
        those of expert `first`."""
        wanted = _Draw(shape, std, zero_row, first)
        self._draw_ahead(name, wanted)
        drawn, future = self._ahead.pop(name, (wanted, None))
        assert drawn == wanted, f"{name} is {wanted}, unlike the blocks before"
        if not self._ahead:
            self._threads = None  # its threads end when they have no work left
        # If no thread has begun this weight, it is drawn here. While another thread draws it, later ones are drawn
        # here.
        if future is None or future.cancel():
            return self._draw(name, wanted)
        while not future.done() and self._draw_one_ahead():
            pass
        return future.result()

    def residual(self, name: str, shape: tuple[int, ...], first: int = 0) -> Tensor:
        """Weights of a layer that adds to the residual stream: the standard deviation is divided by sqrt(2 layers).

        Source: Radford et al. 2019 (GPT-2), section 2.3; two such layers in each block.
        """
        return self.normal(name, shape, STD / math.sqrt(2 * self.layers), first=first)

    def _draw_one_ahead(self) -> bool:
        """Draws, on this thread, the next weight that no thread has begun; False if there is none."""
        for following, (draw, future) in self._ahead.items():
            if future.cancel():
                drawn: Future[Tensor] = Future()
                drawn.set_result(self._draw(following, draw))
                self._ahead[following] = draw, drawn
                return True
        return False

    def _draw_ahead(self, name: str, wanted: _Draw) -> None:
        """Begins to draw weights that will be requested after `name`, the next ones first."""
        path = name.split(".", 2)
        workers = torch.get_num_threads() - 1
        if path[0] != "blocks" or wanted.numel < _WORTH_A_THREAD or not workers:
            return
        block, suffix = int(path[1]), path[2]
        if suffix not in self._of_a_block and block != self._first:
            self._forget()  # the blocks before are of another kind
            self._first = block
        self._of_a_block.setdefault(suffix, wanted)
        passed = list(self._of_a_block).index(suffix)
        coming = [(block, *weight) for weight in list(self._of_a_block.items())[passed + 1 :]]
        coming += [(later, *weight) for later in range(block + 1, self.end) for weight in self._of_a_block.items()]
        numbers = sum(draw.numel for draw, _ in self._ahead.values())
        for later, weight_name, draw in coming:
            if len(self._ahead) >= 4 * workers or numbers + draw.numel > _NUMBERS_AHEAD:
                break
            following = f"blocks.{later}.{weight_name}"
            if following not in self._ahead:
                self._threads = self._threads or ThreadPoolExecutor(workers, "initial weights")
                self._ahead[following] = draw, self._threads.submit(self._draw, following, draw)
                numbers += draw.numel

    def _forget(self) -> None:
        """Drops what is drawn ahead, and the weights that a block was found to have."""
        for _, future in self._ahead.values():
            future.cancel()
        self._ahead.clear()
        self._of_a_block.clear()

    def _draw(self, name: str, wanted: _Draw) -> Tensor:
        drawn = _memory(wanted)
        if drawn.ndim < 3:
            self._fill(name, wanted, drawn)
        else:  # an expert's weights do not depend on the others
            for number, expert in enumerate(drawn, wanted.first):
                self._fill(f"{name}.{number}", wanted, expert)
        return drawn

    def _fill(self, name: str, wanted: _Draw, drawn: Tensor) -> None:
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1  # manual_seed takes 63 bits for certain
        generator = torch.Generator().manual_seed(seed)
        drawn.normal_(0.0, wanted.std, generator=generator)
        if wanted.zero_row is not None:
            drawn[wanted.zero_row] = 0


def _memory(wanted: _Draw) -> Tensor:
    """Memory for a weight, which returns to the system when it is freed.

    glibc keeps freed blocks of less than 32 MB, and torch's alignment prevents it from using them again: a model of
    604 MB that was drawn weight by weight, each sent to a device, still took 344 MB on the host.
    """
    if wanted.numel < _WORTH_A_THREAD:
        return torch.empty(wanted.shape)
    try:
        pages = mmap.mmap(-1, 4 * wanted.numel, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as fault:
        if fault.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"{4 * wanted.numel:,} bytes for {wanted.shape} numbers: {fault.strerror}") from None
    return torch.frombuffer(pages, dtype=torch.float32).view(wanted.shape)


class PutLater(InitialWeights):
    """Initial weights that are put into their places once these exist; until then each is a size on the meta device,
    which takes no memory. So a weight that nothing fills cannot be trained by mistake.

    `taken` has the names that were requested.
    """

    def __init__(self, seed: int, layers: int) -> None:
        super().__init__(seed, layers)
        self.taken: set[str] = set()

    def normal(
        self, name: str, shape: tuple[int, ...], std: float = STD, zero_row: int | None = None, first: int = 0
    ) -> Tensor:
        return torch.empty(shape, device="meta")

    def keep(self, name: str, value: Tensor) -> None:
        """Keeps the initial value of a parameter that is not drawn."""

    def read(self, name: str, target: Tensor, row: int = 0, column: int = 0) -> None:
        """Fills `target`, on any device, with the part of a parameter that begins at `row` and `column`."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees everything that reading has left open or in memory."""
        raise NotImplementedError


class DrawnLater(PutLater):
    """Initial weights that are drawn once their places exist."""

    def __init__(self, seed: int, layers: int) -> None:
        super().__init__(seed, layers)
        self._wanted: dict[str, _Draw | Tensor] = {}
        self._last: tuple[str, Tensor] | None = None

    def normal(
        self, name: str, shape: tuple[int, ...], std: float = STD, zero_row: int | None = None, first: int = 0
    ) -> Tensor:
        assert not first, "the engines that draw later do not divide experts"
        self._wanted[name] = _Draw(shape, std, zero_row)
        return super().normal(name, shape)

    def keep(self, name: str, value: Tensor) -> None:
        self._wanted.setdefault(name, value)

    def read(self, name: str, target: Tensor, row: int = 0, column: int = 0) -> None:
        if self._last is None or self._last[0] != name:
            self._last = None  # freed before the next one is drawn
            wanted = self._wanted[name]
            drawn = wanted if isinstance(wanted, Tensor) else InitialWeights.normal(self, name, *wanted)
            self._last = name, drawn.flatten(0, 1) if drawn.ndim == 3 else drawn
        values = self._last[1][row : row + len(target)]
        target.copy_(values if target.ndim == 1 else values[:, column : column + target.shape[1]])

    def close(self) -> None:
        self._last = None
        self._ahead.clear()


class GivenWeights(PutLater):
    """The weights of a folder under our names: each rank reads its own slices, a few megabytes at a time."""

    def __init__(self, folder: WeightsFolder, shape: ModelShape) -> None:
        super().__init__(0, shape.layers)
        self._reader = SliceReader(folder, shape)

    def read(self, name: str, target: Tensor, row: int = 0, column: int = 0) -> None:
        """See `PutLater`. Rows past the file's, which pad the vocabulary, are zero. Raises ConfigError for NaN or
        infinity."""
        count = max(1, AT_ONCE // max(1, target[:1].numel()))
        for first in range(0, len(target), count):
            self._reader.read(name, target[first : first + count], row + first, column)

    def close(self) -> None:
        self._reader.close()
