"""The project's tests. tests/chosen.py says which run."""

import os
from collections.abc import Collection, Iterable
from typing import Any

ALL_TESTS = os.environ.get("ALL_TESTS") == "true"


def examples(count: int) -> int:
    """How many a dear property tries: all with ALL_TESTS, two fifths without."""
    return count if ALL_TESTS else 2 * count // 5


def marked(cases: Iterable[Any], too_long: Collection[Any]) -> list[Any]:
    """The values of a parameter, tuples those of several; `too_long` are marked `long`."""
    import pytest

    cases = list(cases)
    assert all(case in cases for case in too_long)
    each = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*values, marks=[pytest.mark.long] * (case in too_long))
        for case, values in zip(cases, each, strict=True)
    ]
