"""The format of a checkpoint: named runs of elements, which every engine reads in every layout.

    states-00003.safetensors   the elements that rank 3 writes, in safetensors' layout
    states.json                the index: step, scale, settings, and where each parameter's elements are

A parameter has several kinds of elements: its weight, and the optimizer's states by the optimizer's own names. A run
is `count` elements that follow each other in the flattened parameter, from element `first` on. They follow each other
in a file, too, from byte `offset` on. A whole parameter, some of its rows, and a piece of a flat buffer are runs.

A parameter that tp ranks split by rows is saved in the order of the whole parameter. One that they split along another
dimension is saved as the shares of the tp ranks; then `first` counts in the share of `tp_rank`. An engine may hold a
matrix transposed; then the runs are those of the transposed matrix. Rows past the vocabulary are not saved.

At 16,384 ranks a parameter has as many runs. Mostly they differ in the file alone, so an entry of the index, (file,
offset, tp_rank, first, count, files, step), stands for `files` runs: each is in the file `step` numbers after the one
before, and continues where that one ends.
"""

import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.checkpoints.folders import IT_IS_DAMAGED, IT_IS_OURS, REMOVE_IT, load_json
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles, map_file
from hpc_gpt.trainer.model.tensor_parallel import Split
from hpc_gpt.trainer.ranks import Peers

INDEX, FORMAT = "states.json", 1
# The kind of a parameter's elements that are its weight; the other kinds are the optimizer's states.
WEIGHT = "weight"
# Files that are mapped at a time. A process may have 65,530 maps (vm.max_map_count), and torch has some thousand.
_MAX_MAPS = 8192
# A kind of AdamW's, and the number of its updates, without which AdamW cannot use it.
MOMENT, UPDATES = "exp_avg", "step"


@dataclass(frozen=True)
class Share:
    """The part of a parameter that a rank holds: `count` elements from `first` on in the flattened share of its tp
    rank.

    `shape` is the whole parameter's, as the engine holds it: `transposed` or not, with padded rows. Of these rows the
    first `kept` are saved.
    """

    name: str
    shape: tuple[int, ...]
    split: Split | None
    tp_rank: int
    tp: int
    first: int
    count: int
    kept: int
    transposed: bool = False

    @property
    def tp_shape(self) -> list[int]:
        """The shape of the tp rank's share."""
        shape = list(self.shape)
        if self.split is not None:
            shape[self.split.dim] //= self.tp
        return shape

    @property
    def is_by_rows(self) -> bool:
        """Whether its elements have places in the whole parameter."""
        return self.split is None or self.tp == 1 or self.split.dim == 0

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Yields (first, begin, count) of its runs: `count` elements, which begin at `begin` in this rank's memory."""
        width = math.prod(self.shape[1:])
        ranges = [(0, math.prod(self.shape))]
        if self.split is not None and self.tp > 1 and self.is_by_rows:
            rows = self.split.ranges(self.shape[0], self.tp_rank, self.tp)
            ranges = [(begin * width, length * width) for begin, length in rows]
        at = 0  # the place of a range in the share
        for begin, length in ranges:
            low, high = max(self.first, at), min(self.first + self.count, at + length)
            high = min(high, at + self.kept * width - begin)
            if low < high:
                yield begin + low - at, low - self.first, high - low
            at += length


class Held(NamedTuple):
    """The elements of one kind of a share. `elements` has `share.count` of them, on any device, without gaps."""

    share: Share
    kind: str
    elements: Tensor


class Key(NamedTuple):
    """What all ranks say alike of a kind of a parameter."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    split: tuple[Any, ...] | None
    transposed: bool


@dataclass
class SavedIndex:
    """The places of the last save, which the next one uses again if no rank has others."""

    sent: Any = None
    parameters: dict[str, Any] = field(default_factory=dict)


def put_states(
    files: RankFiles,
    held: Iterable[Held],
    about: Mapping[str, Any],
    last: SavedIndex,
    names: Iterable[str] = (),
) -> None:
    """Adds the elements that this rank writes, and on rank 0 the index, which begins with `about`. Collective.

    `about["optimizer"]`: the optimizer's states that are one number, of the parameters that this rank updates; the
    index has those of all ranks. Raises CheckpointError if no engine could load the parameters `names` by a new index.
    """
    held = [one for one in held if any(one.share.places())]
    ends = [max(begin + count for _, begin, count in one.share.places()) for one in held]
    kept = [one.elements.detach().reshape(-1)[:end] for one, end in zip(held, ends, strict=True)]
    offsets = files.put_tensors(file_name(files.peers.rank), kept) if kept else []
    keys, rows = list[Key](), list[tuple[int, ...]]()
    for (share, kind, elements), offset in zip(held, offsets, strict=True):
        shape = (share.kept, *share.shape[1:])
        split = None if share.is_by_rows or share.split is None else tuple(share.split.stored())
        key = Key(share.name, kind, str(elements.dtype).removeprefix("torch."),
                   shape[::-1] if share.transposed else shape, split, share.transposed)  # fmt: skip
        for first, begin, count in share.places():
            keys.append(key)
            place = offset + begin * elements.element_size()
            rows.append((place, 0 if split is None else share.tp_rank, first, count))
    peers, sent = files.peers, (keys, rows)
    ranks = peers.gather((sent == last.sent, about["optimizer"]))
    numbers = {kind: value for _, of_rank in ranks for kind, value in of_rank.items()}
    about = {"format": FORMAT, **about, "optimizer": numbers}
    if not peers.broadcast(all(is_alike for is_alike, _ in ranks)):
        last.sent = None  # until rank 0 has the new places
        last.parameters = _gather(peers, keys, rows)
        fault = _find_fault({**about, "parameters": last.parameters}, names) if peers.is_first else None
        if (fault := peers.broadcast(fault)) is not None:
            raise CheckpointError(f"step {about['step']} cannot be saved: {fault}", IT_IS_OURS)
        last.sent = sent
    if peers.is_first:
        files.put_bytes(INDEX, show_index(about, last.parameters).encode())


def _find_fault(about: dict[str, Any], names: Iterable[str]) -> str | None:
    """The reason why no engine could load a checkpoint of this index; None if any can."""
    try:
        SavedStates(Path("the checkpoint"), about).check(names)
    except CheckpointError as fault:
        return str(fault)
    return None


def show_index(about: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """The text of the index, with a line for each parameter."""
    first = json.dumps(about, indent=1).removesuffix("\n}")
    lines = (f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in parameters.items())
    return first + ',\n "parameters": {\n' + ",\n".join(lines) + "\n }\n}\n"


def _gather(peers: Peers, keys: Sequence[Key], rows: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """The index's parameters on rank 0, from the places of all ranks. Collective.

    Mostly all ranks have the same keys. So a rank sends numbers, and only those keys that rank 0 lacks.
    """
    common = {key: number for number, key in enumerate(peers.broadcast(list(dict.fromkeys(keys))))}
    firsts = len(common)
    own = [key for key in dict.fromkeys(keys) if key not in common]
    numbers = common | {key: firsts + number for number, key in enumerate(own)}
    table = np.array([(numbers[key], *row) for key, row in zip(keys, rows, strict=True)], np.int64)
    sent = peers.gather((own, zlib.compress(table.tobytes(), 1)))
    tables = []
    for file, (others, packed) in enumerate(sent):
        part = np.frombuffer(bytearray(zlib.decompress(packed)), np.int64).reshape(-1, 5)
        added = np.array([common.setdefault(key, len(common)) for key in others], np.int64)
        is_other = part[:, 0] >= firsts
        part[is_other, 0] = added[part[is_other, 0] - firsts]
        tables.append(np.column_stack([part, np.full(len(part), file)]))
    return index_of(list(common), np.concatenate(tables)) if tables else {}


def index_of(keys: Sequence[Key], table: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The index's parameters. A row of `table`: number of the key, offset, tp rank, first, count, file; any order."""
    table = table[np.lexsort((table[:, 3], table[:, 2], table[:, 0]))]
    number, offset, tp_rank, first, count, file = table.T
    apart = np.diff(file, prepend=0)
    goes_on = np.zeros(len(table), bool)  # like the run before it, whose end it begins at, in a later file
    for column in (number, offset, tp_rank, count):
        goes_on[1:] |= column[1:] != column[:-1]
    goes_on[1:] = ~goes_on[1:] & (first[1:] == first[:-1] + count[:-1]) & (apart[1:] > 0)
    begins = ~goes_on
    begins[1:] |= goes_on[:-1] & (apart[1:] != apart[:-1])
    starts = np.flatnonzero(begins)
    sizes = np.diff(starts, append=len(table))
    steps = np.where(sizes > 1, apart[np.minimum(starts + 1, len(table) - 1)], 1)
    columns = (file[starts], offset[starts], tp_rank[starts], first[starts], count[starts], sizes, steps)
    parameters: dict[str, Any] = {}
    for place, run in zip(number[starts].tolist(), np.column_stack(columns).tolist(), strict=True):
        key = keys[place]
        entry = parameters.setdefault(key.name, {"shape": key.shape, "split": key.split})
        if key.transposed:
            entry["transposed"] = True
        kind = entry.setdefault("kinds", {}).setdefault(key.kind, {"dtype": key.dtype, "runs": []})
        kind["runs"].append(run)
    return parameters


class SavedStates:
    """The elements in a checkpoint. Every method raises CheckpointError if some are missing.

    The files are memory-mapped: a rank reads only the pages that it needs, and a node's ranks share them.
    """

    has_optimizer = True  # whether it gives the optimizer's states

    def __init__(self, folder: Path, about: dict[str, Any] | None = None) -> None:
        """Reads the index of the folder, unless it is given as `about`."""
        self.folder = folder
        self.about = load_json(folder / INDEX) if about is None else about
        if self.about.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder} is a checkpoint of format {self.about.get('format')}, and this version reads {FORMAT}",
                "resume it with the version that saved it",
            )
        self._parameters: dict[str, Any] = self.about["parameters"]
        self._tp = int(self.about["settings"]["layout.tp"])
        self._maps: dict[str, Tensor] = {}

    @property
    def optimizer(self) -> dict[str, float]:
        """The optimizer's states that are one number, by its own names; without skipped steps."""
        numbers: dict[str, float] = self.about["optimizer"]
        if not numbers and any(MOMENT in self.kinds(name) for name in self.names):
            # 0.4.0 wrote rank 0's numbers alone, which has none if other ranks own all of AdamW's parameters.
            numbers = {UPDATES: float(self.about["step"])}
        return numbers if self.has_optimizer else {}

    def check(self, names: Iterable[str]) -> None:
        """Checks that each of the parameters `names` has all elements of its kinds, and the numbers that go with
        these."""
        for name in names:
            entry = self._entry(name)
            if MOMENT in entry["kinds"] and UPDATES not in self.about["optimizer"]:
                raise CheckpointError(f"{self.folder} holds {MOMENT} of {name}, but no {UPDATES}", REMOVE_IT)
            shares = 1 if entry["split"] is None else self._tp
            wanted = math.prod(entry["shape"]) // shares
            for kind, tp_rank in itertools.product(dict.fromkeys((WEIGHT, *entry["kinds"])), range(shares)):
                runs = self._kind(name, kind)["runs"]
                counts = [count * files for *_, of_rank, _, count, files, _ in runs if of_rank == tp_rank]
                self._check_count(name, sum(counts), wanted)

    @property
    def names(self) -> list[str]:
        """The full names of all parameters, and of the choice biases of routers."""
        return list(self._parameters)

    def kinds(self, name: str) -> list[str]:
        """The kinds of a parameter's elements besides its weight."""
        return [kind for kind in self._entry(name)["kinds"] if kind != WEIGHT and self.has_optimizer]

    def read(self, share: Share, kind: str, memory: Tensor) -> None:
        """Fills `memory`, which has `share.count` elements without gaps. Rows that are padding stay as they are."""
        entry, flat = self._entry(share.name), memory.view(-1)
        is_alike = entry["split"] is None if share.is_by_rows else bool(entry["split"]) and share.tp == self._tp
        if is_alike and share.transposed == entry.get("transposed", False):
            tp_rank = 0 if share.is_by_rows else share.tp_rank
            for first, begin, count in share.places():
                self._fill(share.name, kind, tp_rank, first, flat[begin : begin + count])
            return
        turned = share.transposed or entry.get("transposed", False)
        low, high, before = 0, entry["shape"][0], 0
        if not turned:  # only the rows of the share
            width = math.prod(share.shape[1:]) // (share.tp if share.split else 1)
            low, high = share.first // width, -(-(share.first + share.count) // width)
            before = low * width
        rows = self.whole(share.name, kind, low, high)
        rows = rows.t() if share.transposed else rows
        held = rows if share.split is None else share.split.shard(rows, share.tp_rank, share.tp)
        flat.copy_(held.reshape(-1)[share.first - before : share.first - before + share.count])

    def whole(self, name: str, kind: str = WEIGHT, low: int = 0, high: int | None = None) -> Tensor:
        """The whole parameter, or one of its whole states, in the model's order and dtype as saved; or its rows from
        `low` to `high`, if it was not saved transposed."""
        entry = self._entry(name)
        shape = entry["shape"][::-1] if entry.get("transposed") else list(entry["shape"])
        split = None if entry["split"] is None else Split.of_stored(entry["split"])
        shape[0] = (shape[0] if high is None or entry.get("transposed") else high) - low
        if split is not None:
            shape[split.dim] //= self._tp
        shares, first = [], low * math.prod(shape[1:])
        for tp_rank in range(1 if split is None else self._tp):
            shares.append(torch.empty(shape, dtype=getattr(torch, self._kind(name, kind)["dtype"])))
            self._fill(name, kind, tp_rank, first, shares[-1].view(-1))
        whole = shares[0] if split is None else split.merge(shares)
        return whole.t() if entry.get("transposed") else whole

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._parameters:
            raise CheckpointError(f"{self.folder} holds no {name}", REMOVE_IT)
        entry: dict[str, Any] = self._parameters[name]
        return entry

    def _kind(self, name: str, kind: str) -> dict[str, Any]:
        if kind not in (kinds := self._entry(name)["kinds"]):
            raise CheckpointError(f"{self.folder} holds no {kind} of {name}", REMOVE_IT)
        saved: dict[str, Any] = kinds[kind]
        return saved

    def pieces(self, name: str, kind: str, tp_rank: int, first: int, end: int) -> Iterator[tuple[str, int, int, int]]:
        """Yields (file, byte offset, first, count) for the saved elements from `first` to `end`."""
        saved = self._kind(name, kind)
        size: int = getattr(torch, saved["dtype"]).itemsize
        for file, offset, of_rank, begin, count, files, step in saved["runs"]:
            if of_rank != tp_rank or begin >= end or begin + files * count <= first:
                continue
            for number in range(max(0, first - begin) // count, min(files, -(-(end - begin) // count))):
                at = begin + number * count
                low, high = max(first, at), min(end, at + count)
                yield file_name(file + number * step), offset + (low - at) * size, low, high - low

    def _fill(self, name: str, kind: str, tp_rank: int, first: int, memory: Tensor) -> None:
        """Fills `memory` with the elements from `first` on."""
        filled = 0
        for begin, elements in self._elements(name, kind, tp_rank, first, first + len(memory)):
            memory[begin - first : begin - first + len(elements)].copy_(elements)
            filled += len(elements)
        self._check_count(name, filled, len(memory))

    def _check_count(self, name: str, count: int, wanted: int) -> None:
        if count != wanted:
            raise CheckpointError(f"{self.folder} holds {count} of the {wanted} elements of {name}", REMOVE_IT)

    def _elements(self, name: str, kind: str, tp_rank: int, first: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (first, elements) for the saved elements from `first` to `end`, mapped."""
        dtype: torch.dtype = getattr(torch, self._kind(name, kind)["dtype"])
        for file, offset, begin, count in self.pieces(name, kind, tp_rank, first, end):
            if file not in self._maps:
                if len(self._maps) >= _MAX_MAPS:
                    del self._maps[next(iter(self._maps))]  # the oldest
                self._maps[file] = map_file(self.folder / file)
            data = self._maps[file][offset : offset + count * dtype.itemsize]
            if len(data) != count * dtype.itemsize:
                end_at = offset + count * dtype.itemsize
                raise CheckpointError(f"{self.folder / file} ends before byte {end_at}", IT_IS_DAMAGED)
            yield begin, data.view(dtype)


def kept_rows(model: ModelShape, name: str, rows: int) -> int:
    """How many of a parameter's `rows` are saved: those past the vocabulary are an engine's own."""
    return min(rows, model.vocab) if name in ("embedding.weight", "head.weight") else rows


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"states-{rank:05d}.safetensors"
