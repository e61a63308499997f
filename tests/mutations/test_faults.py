"""The list of faults stays one that `make mutations` can use: each applies, and every package has some."""

import ast
from collections import Counter

import pytest

from tests.conftest import REPOSITORY
from tests.mutations.faults import Fault, read_faults

FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_applies_and_its_tests_are_there(fault: Fault) -> None:
    assert fault.text(REPOSITORY) != (REPOSITORY / fault.file).read_text(encoding="utf-8")
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        names = {node.name for node in ast.walk(ast.parse((REPOSITORY / file).read_text(encoding="utf-8")))
                 if isinstance(node, ast.FunctionDef)}  # fmt: skip
        assert not name or name.partition("[")[0] in names, f"{file} has no {name}"


def test_every_package_has_at_least_two() -> None:
    counts = Counter(fault.package for fault in FAULTS)
    packages = {path.parent.name for path in (REPOSITORY / "hpc_gpt").glob("*/*/__init__.py")} | {
        "cli",
        "top",
        "templates",
    }
    packages -= {"chain"}  # names alone, by which scripts start `ends`
    assert {package for package in packages if counts[package] < 2} == set()
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_line_that_is_gone_is_an_error() -> None:
    gone = Fault("x", FAULTS[0].file, "no such line anywhere", "y", ("tests",))
    with pytest.raises(ValueError, match="has the line 0 times, not once"):
        gone.text(REPOSITORY)
