"""Which tests marked gpu a change concerns, for `make test-gpu CHANGED=main`: a lent GPU is there for minutes.

python -m tests.changed_gpu main      the files, each that differs from `main`, or imports a module that does, directly
                                      or not; "none" without one

A module counts as imported if it is named anywhere in a file: some tests start it in a process of its own.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_MARK = "pytest.mark." + "gpu"  # not in one piece, so that this file has none


def changed_files(commit: str, root: Path = ROOT) -> set[Path]:
    """Files of the working tree that differ from the commit's, or that git does not know yet."""
    asked = (["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"])
    lines = [subprocess.run(["git", "-C", root, *words], check=True, capture_output=True, text=True) for words in asked]
    return {root / name for done in lines for name in done.stdout.splitlines()}


def concerned(changed: set[Path], root: Path = ROOT) -> list[Path]:
    """The test files marked gpu that are in `changed`, or reach one of these by what they import."""
    files = {_name(path, root): path for folder in ("hpc_gpt", "tests") for path in (root / folder).rglob("*.py")}

    @cache
    def named_in(path: Path) -> frozenset[str]:
        return frozenset(name for word in _words(path) for name in _with_packages(word) if name in files)

    found = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        # Marked itself, or by the marks of a module that it imports.
        if not any(_MARK in one.read_text(encoding="utf-8") for one in (path, *map(files.get, named_in(path))) if one):
            continue
        seen, rest = set[Path](), [path, *_conftests(path, root)]
        while rest:
            one = rest.pop()
            if one not in seen:
                seen.add(one)
                rest += [files[name] for name in named_in(one)]
        if seen & changed:
            found.append(path)
    return found


def _name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _conftests(path: Path, root: Path) -> list[Path]:
    return [
        folder / "conftest.py"
        for folder in path.parents
        if root in folder.parents and (folder / "conftest.py").is_file()
    ]


def _words(path: Path) -> set[str]:
    """Dotted names that the file imports, or has as a text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {word.strip("'\"(),;:") for word in node.value.split() if "." in word}
    return found


def _with_packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


if __name__ == "__main__":
    print(" ".join(str(path.relative_to(ROOT)) for path in concerned(changed_files(sys.argv[1]))) or "none")
