"""As a plugin of pytest: of what is collected only the tests that a file lists, alone or by their file or folder.

`pytest -p tests.mutations.chosen --chosen=LIST FILES`. With --no-kept those are left out that compare with what was
once printed: they fail on a right change, too.
"""

import os
import re
from pathlib import Path

import pytest

_FIXTURES = {"file_regression", "data_regression", "num_regression"}
_KEPT = re.compile(
    r"tests/(lock/|mutations/|readers/test_printed\.py::test_what_is_made_of_it|docs/test_pages\.py::test_(a_generated_part|the_picture_of_the_plan)_is"
    r"|cli/test_document\.py::test_the_(page_is_current|stored_short_helps))"
)


def is_kept(item: pytest.Item) -> bool:
    """Whether it compares with a golden script, a sum of answers or a generated text."""
    return bool(_KEPT.match(item.nodeid)) or not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chosen", help="a file of tests, files and folders, one on a line, run in its order")
    parser.addoption("--no-kept", action="store_true", help="no golden scripts, sums of answers or generated texts")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if not (config.getoption("no_kept") and is_kept(item))]
    if (listed := config.getoption("chosen")) is not None:
        order = {name: number for number, name in enumerate(Path(listed).read_text(encoding="utf-8").splitlines())}
        places = {item: place for item in chosen if (place := _place(item.nodeid, order)) is not None}
        chosen = sorted(places, key=lambda item: places[item])
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def pytest_runtest_logstart(nodeid: str) -> None:
    """Whoever waits for the end can see which test runs, and for how long: the file's time is that of its start."""
    if file := os.environ.get("TESTS_NOW"):
        Path(file).write_text(nodeid, encoding="utf-8")


def _place(test: str, order: dict[str, int]) -> int | None:
    file = test.partition("::")[0]
    return next((order[name] for name in (test, file, *map(str, Path(file).parents)) if name in order), None)
