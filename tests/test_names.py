"""A public name has one meaning in the whole house."""

import ast
import re
from collections import defaultdict

from tests.conftest import REPOSITORY
from tests.test_imports import MODULES

# Each module that is found by being there has its own: of dialects, engines, kinds of requeue, verbs, programs, and
# what has a version; and the type variable of a function.
FOUND_BY_NAME = {"DIALECT", "ENGINE", "RANK", "PLACE", "SCHEMA", "main", "build", "interpret", "T"}


def public_names() -> dict[str, set[str]]:
    """{name: modules that define it}: functions, classes and constants; of cli/, not the verbs, which are commands."""
    found = defaultdict(set)
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = [] if module.startswith("cli.") and node.decorator_list else [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            else:
                continue
            for name in names:
                if not name.startswith("_"):
                    # An engine without torch and its training are two sides of one thing, too.
                    found[name].add(module.removeprefix("train.") if module.startswith("train.engines.") else module)
    return found


def test_no_public_name_is_defined_twice():
    twice = {name: sorted(modules) for name, modules in public_names().items() if len(modules) > 1}
    assert {name: modules for name, modules in twice.items() if name not in FOUND_BY_NAME} == {}


def test_each_name_that_is_found_by_being_there_is_there_twice():
    names = public_names()
    assert {name for name in FOUND_BY_NAME if len(names[name]) < 2} == set()


def test_a_tests_name_has_at_most_sixty_letters():
    files = (path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert [name for text in files for name in re.findall(r"^ *def (test_\w{56,})", text, re.M)] == []
