"""What a user reads names a published table or its source, not the number of our copy of it."""

import ast
import re
from pathlib import Path

import hpc_gpt

NUMBER = re.compile(r"(?<!memory_)seed[ _-]?00\d", re.IGNORECASE)
HERE = Path(hpc_gpt.__file__).parent
ROOT = HERE.parent
TEXTS = [
    path
    for folder in ("templates", "docs", "experiments")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file()
]


def literals(path: Path) -> list[str]:
    """The string literals of a module; docstrings alone are left out, but a command's, which is its help."""
    tree = ast.parse(path.read_text())
    internal = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and not getattr(node, "decorator_list", ())
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in internal
    ]


def test_no_text_of_the_program_and_no_page_has_one():
    named = [path for path in HERE.rglob("*.py") if NUMBER.search(path.read_text())]  # some by a docstring
    assert [(path, text) for path in named for text in literals(path) if NUMBER.search(text)] == []
    assert [path.name for path in [*TEXTS, ROOT / "README.md"] if NUMBER.search(path.read_text(errors="ignore"))] == []
