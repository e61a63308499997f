"""Columns of many steps in little memory, exact to the last bit: most figures of a trainer are constant, rise evenly,
have few decimals or come from float32. A million steps of our own metrics take 30 MB, not 120.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SCALES = np.array([1e0, 1e1, 1e3, 1e4, 1e6])  # tried in this order; our own metrics round to 1, 3, 4 and 6 decimals
_TRIED = 8  # values that are tried before a whole block is
_MOST_ROWS = 1 << 20  # per block: an array that is computed from one block takes 8 MiB
_ROWS = 1 << 15  # the number of values that wait before they are packed as a block
_OWN_PAGES = 1 << 16  # bytes from which an array has pages of its own
_FEW = 8  # if at most one value in so many is a number, a block holds only these


def room(size: int) -> bytearray | mmap:
    """A writable buffer of `size` bytes. A large one has pages of its own, which the system gets back when it is freed;
    memory of malloc may stay with the process."""
    return mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS) if size >= _OWN_PAGES else bytearray(size)


@dataclass
class _Block:
    """A packed block of `rows` values. Without `data`: all are `first`, or rise from it by `rise`. `data` with `scale`:
    whole numbers to add to `first`, the sums to be divided by `scale`; `data` with `places`: the values of these rows,
    NaN elsewhere; else `data` has the values themselves."""

    rows: int
    first: float = 0.0
    rise: float = 0.0
    data: NDArray[Any] | None = None
    scale: float = 0.0
    places: NDArray[np.int32] | None = None

    def fill(self, into: NDArray[np.float64]) -> None:
        if self.data is None:
            into[:] = self.first
            if self.rise:
                into += np.arange(self.rows) * self.rise
        elif self.scale:
            np.add(self.data, self.first, out=into)
            into /= self.scale
        elif self.places is not None:
            into[:] = np.nan
            into[self.places] = self.data
        else:
            into[:] = self.data

    def joined(self, other: _Block) -> _Block | None:
        """Both blocks as one if they are constant or continue the same rise; else None."""
        if self.data is not None or other.data is not None or self.rise != other.rise:
            return None
        if self.rise and self.rows + other.rows > _MOST_ROWS:
            return None
        # A constant -0.0 must stay: -0.0 + 0 would be 0.0.
        continues = np.array([self.first + self.rows * self.rise if self.rise else self.first, other.first])
        return _Block(self.rows + other.rows, self.first, self.rise) if _are_equal(continues) else None


@dataclass
class PackedColumn:
    """The values of a column: packed `blocks`, then the arrays that wait to be packed."""

    blocks: list[_Block] = field(default_factory=list)
    waiting: list[NDArray[np.float64]] = field(default_factory=list)
    rows: int = 0

    def add(self, values: NDArray[np.float64]) -> None:
        """Appends values."""
        self.waiting.append(values)
        self.rows += len(values)
        if sum(map(len, self.waiting)) >= _ROWS:
            self.pack()

    def pack(self) -> None:
        """Packs the waiting values, together with the last block if both are small."""
        if not self.waiting:
            return
        values = np.concatenate(self.waiting)
        self.waiting = []
        if self.blocks and self.blocks[-1].rows + len(values) <= _ROWS:
            last = self.blocks.pop()
            values = np.concatenate([np.empty(last.rows), values])
            last.fill(values[: last.rows])
        if len(values):
            self._add(_packed(values))

    def _add(self, block: _Block) -> None:
        together = self.blocks[-1].joined(block) if self.blocks else None
        self.blocks[-1:] = [together] if together else [*self.blocks[-1:], block]

    def add_nothing(self, rows: int) -> None:
        """Appends `rows` NaN values."""
        self.add(np.broadcast_to(np.nan, rows))

    def extend(self, other: PackedColumn) -> None:
        """Appends another column's values."""
        self.pack()
        other.pack()
        self.rows += other.rows
        for block in other.blocks:
            self._add(block)

    def values(self) -> NDArray[np.float64]:
        """All values as one array, made anew on every call; constant values are a read-only array."""
        self.pack()
        if len(self.blocks) == 1 and self.blocks[0].data is None and not self.blocks[0].rise:
            return np.broadcast_to(np.float64(self.blocks[0].first), self.rows)
        unpacked, begin = np.empty(self.rows), 0
        for block in self.blocks:
            block.fill(unpacked[begin : begin + block.rows])
            begin += block.rows
        return unpacked

    def places(self) -> NDArray[np.int32]:
        """All values as int32; they must be whole numbers below 2^31."""
        self.pack()
        unpacked, begin = _stored(np.int32(0), np.int32, self.rows), 0
        for block in self.blocks:
            block.fill(values := np.empty(block.rows))
            unpacked[begin : begin + block.rows] = values
            begin += block.rows
        return unpacked


def _are_equal(values: NDArray[np.float64]) -> bool:
    """Whether all values have the same bits, NaN included."""
    bits = values.view(np.int64)
    return bool((bits == bits[0]).all())


def _packed(values: NDArray[np.float64]) -> _Block:
    rows, first = len(values), float(values[0])
    if _are_equal(values):
        return _Block(rows, first)
    numbers = np.flatnonzero(~np.isnan(values)).astype(np.int32)
    if len(numbers) * _FEW <= rows:
        return _Block(rows, data=values[numbers], places=numbers)
    if len(numbers) == rows:
        tried = _as_whole(values[:_TRIED], _SCALES[:, None])[1].all(axis=1)
        for scale in _SCALES[tried].tolist():
            whole, is_exact = _as_whole(values, scale)
            if is_exact.all():
                low = whole.min()
                rise = float(whole[1] - whole[0])
                if scale == 1 and rise and (np.diff(whole) == rise).all():
                    return _Block(rows, first, rise)
                if whole.max() - low < 2**31:
                    return _Block(rows, float(low), data=_stored(whole - low, np.int32, rows), scale=scale)
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    if np.array_equal(single, values, equal_nan=True):
        return _Block(rows, data=_stored(single, np.float32, rows))
    return _Block(rows, data=_stored(values, np.float64, rows))


def _stored(values: Any, kind: type[np.generic], rows: int) -> NDArray[Any]:
    array = np.frombuffer(room(rows * np.dtype(kind).itemsize), kind)
    array[:] = values
    return array


def _as_whole(values: NDArray[np.float64], scale: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """(the values times `scale`, rounded; a mask of the rounded ones that give their value again)."""
    with np.errstate(over="ignore", invalid="ignore"):
        whole = np.round(values * scale) + 0.0  # no -0.0
        is_exact = np.abs(whole) < 2**53
        is_exact &= (whole / scale).view(np.int64) == values.view(np.int64)
    return whole, is_exact


class PackedColumns(MutableMapping[str, NDArray[np.float64]]):
    """The columns of a step table, each unpacked on every access: a run of five million steps takes no more memory than
    one unpacked column. `chosen`: the indexes of the rows that count, None for all."""

    def __init__(
        self, packed: dict[str, PackedColumn], rows: int, chosen: NDArray[Any] | None = None, **changed: Any
    ) -> None:
        self._packed, self._all, self._chosen, self._changed = packed, rows, chosen, changed
        self.rows = rows if chosen is None else len(chosen)

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        if name in self._changed:
            return np.asarray(self._changed[name])
        values = self._packed[name].values()
        return values if self._chosen is None else values[self._chosen]

    def __setitem__(self, name: str, values: NDArray[np.float64]) -> None:
        self._changed[name] = values

    def __delitem__(self, name: str) -> None:
        self._packed = {key: column for key, column in self._packed.items() if key != name}
        self._changed.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._packed or name in self._changed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed | self._changed)

    def __len__(self) -> int:
        return len(self._packed | self._changed)

    def take(self, rows: NDArray[Any]) -> PackedColumns:
        """The rows of a mask, or of indexes."""
        places = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        chosen = places if self._chosen is None else self._chosen[places]
        kind = np.int32 if self._all < 2**31 else np.int64
        changed = {name: values[places] for name, values in self._changed.items()}
        return PackedColumns(self._packed, self._all, chosen.astype(kind), **changed)

    @staticmethod
    def joined(several: Sequence[PackedColumns]) -> PackedColumns:
        """The rows of several tables' columns, one after the other."""
        if any(columns._chosen is not None or columns._changed for columns in several):
            return PackedColumns._copied(several)
        names = list(dict.fromkeys(name for columns in several for name in columns))
        packed = {name: PackedColumn() for name in names}
        for columns in several:
            for name, column in packed.items():
                column.extend(columns._packed[name]) if name in columns else column.add_nothing(columns.rows)
        return PackedColumns(packed, sum(columns.rows for columns in several))

    @staticmethod
    def _copied(several: Sequence[PackedColumns]) -> PackedColumns:
        packed: dict[str, PackedColumn] = {}
        for name in dict.fromkeys(name for columns in several for name in columns):
            packed[name] = PackedColumn()
            for columns in several:
                packed[name].add(columns[name]) if name in columns else packed[name].add_nothing(columns.rows)
        return PackedColumns(packed, sum(columns.rows for columns in several))
