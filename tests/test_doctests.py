"""The examples in the package's docstrings say what its functions do."""

import doctest
import importlib
from pathlib import Path

import pytest

import hpc_gpt

PACKAGE = Path(hpc_gpt.__file__).parent
WITH_EXAMPLES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_hold(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module.removesuffix(".__init__")))
    assert tried
    assert not failed
