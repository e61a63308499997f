"""The project's tests. `ALL_TESTS=true`, as `make test-all` sets it, adds what is too long for every change."""

import os
from typing import TypeVar

T = TypeVar("T")
ALL_TESTS = os.environ.get("ALL_TESTS") == "true"


def without(table: dict[str, T], *names: str) -> dict[str, T]:
    """The table less what is too long for every change: with ALL_TESTS it is whole. KeyError for a name it lacks."""
    too_long = {name: table[name] for name in names}
    return table if ALL_TESTS else {name: value for name, value in table.items() if name not in too_long}
