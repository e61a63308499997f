"""The ranks that share a checkpoint's work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Peers(Protocol):
    """The ranks that share the work; `train.ranks.Ranks` are some."""

    rank: int
    size: int
    is_first: bool

    def share(self, value: T) -> T: ...

    def gather(self, value: T) -> list[T]: ...

    def collect(self, value: T) -> list[T]: ...

    def deal(self, values: Sequence[T]) -> T: ...

    def barrier(self) -> None: ...


class Alone:
    """The peers of a process that is the only one, as of a command that reads a run's checkpoints."""

    rank, size, is_first = 0, 1, True

    def share(self, value: T) -> T:
        return value

    def gather(self, value: T) -> list[T]:
        return [value]

    def collect(self, value: T) -> list[T]:
        return [value]

    def deal(self, values: Sequence[T]) -> T:
        return values[0]

    def barrier(self) -> None:
        return None
