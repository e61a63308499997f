"""Dotted names in backticks of docstrings and comments are in the code: a room that moved takes its mentions along."""

import ast
import builtins
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "hpc_gpt"
MODULES = sorted(PACKAGE.rglob("*.py"))
NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`(?!`)")
# Of libraries that no module imports by this name, and of a file of any name.
OTHERS = {"zmq", "nn", "prefix", *dir(builtins)}
FILES = {"py", "json", "jsonl", "toml", "md", "sh", "txt", "out", "err", "log", "j2", "npy", "bin", "html", "pt", "cfg"}


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring and comment of a module."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _code_of(path: Path) -> str:
    """A module without its docstrings and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                statement.value = ast.Constant(0)
    return ast.unparse(tree)


@cache
def code() -> str:
    """All that is no text for readers: modules, templates, and the names of files."""
    others = [path for folder in ("templates", "experiments") for path in (REPOSITORY / folder).rglob("*.*")]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in others if path.is_file()]
    return "\n".join([*map(_code_of, MODULES), *texts, *(str(path) for path in (*MODULES, *others))])


@cache
def rooms() -> frozenset[str]:
    """The dotted path of each module, and of each name at the top of a module."""
    found = set()
    for path in MODULES:
        of = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        found.add(of)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(f"{of}.{node.name}")
            if isinstance(node, ast.ClassDef):
                found.update(f"{of}.{node.name}.{member}" for member in _members(node))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(f"{of}.{node.id}")
    return frozenset(suffix for name in found for suffix in _suffixes(name))


def _members(of: ast.ClassDef) -> Iterator[str]:
    """The methods of a class, its fields, and the attributes that its methods set."""
    for node in ast.walk(of):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Name) and isinstance(getattr(node, "target", node), ast.Name):
            yield getattr(node, "target", node).id  # type: ignore[union-attr]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _suffixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[at:]) for at in range(len(parts)))


@cache
def _imported() -> frozenset[str]:
    """The packages that are not ours and that a module imports."""
    return frozenset(re.findall(r"^\s*(?:import|from) (\w+)", code(), re.MULTILINE)) | sys.stdlib_module_names


def is_known(name: str) -> bool:
    """Whether a dotted name is in the code: the end of a path of modules and classes, or as it stands there."""
    first, last = name.split(".")[0], name.split(".")[-1]
    if name in rooms() or first in _imported() | OTHERS or last in FILES:
        return True
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code()) is not None


def test_a_name_in_backticks_is_one_of_the_code() -> None:
    unknown = [
        f"{path.relative_to(REPOSITORY)}:{line} {name}"
        for path in MODULES
        for line, text in texts_of(path)
        for name in NAME.findall(text)
        if not is_known(name)
    ]
    assert not unknown, "\n".join(unknown)


def test_what_a_gone_name_is() -> None:
    there = ("lines.pattern", "pattern.figures", "LineReader.finish", "torch.load", "train.steps", "record.json")
    assert [name for name in there if not is_known(name)] == []
    assert [name for name in ("records.times", "LineReader.no_such_method") if is_known(name)] == []
