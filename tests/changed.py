"""Which tests a change concerns: `make test CHANGED=main`, and of those marked gpu `make test-gpu CHANGED=main`.

python -m tests.changed main          pytest's words for the tests that execute a line that differs from where this
                                      branch left `main`, by the map (`make map`); what the map does not
                                      know goes by imports, and what those do not show is all of tests
python -m tests.changed main --gpu    the files marked gpu, each that differs, or imports a module that does, directly
                                      or not; "none" without one

A module counts as imported if it is named anywhere in a file: some tests start it in a process of its own.
"""

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.mutations.map import MAPS, Map, map_of

ROOT = Path(__file__).resolve().parents[1]
_MARK = "pytest.mark." + "gpu"  # not in one piece, so that this file has none
# What a test file depends on without a word of it.
_EVERY_TEST = re.compile(r"(setup\.cfg|pyproject\.toml|constraints\.txt|\.ci/.*|experiments/.*|templates/clusters/.*)")
_PAGES = re.compile(r"(docs/.*|[^/]*\.md)")


class UnknownCommit(Exception):
    """CHANGED names no commit."""


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", root, *words], check=True, capture_output=True, text=True).stdout


def base_of(commit: str, root: Path = ROOT) -> str:
    """The commit where the branch left `commit`."""
    try:
        return _git(root, "merge-base", "HEAD", commit + "^{commit}").strip()
    except subprocess.CalledProcessError:
        raise UnknownCommit(f"CHANGED={commit} is no commit from which this one branched off") from None


def changed_files(commit: str, root: Path = ROOT) -> set[Path]:
    """Files of the working tree that differ from where it left the commit, or that git does not know yet."""
    asked = (["diff", "--name-only", base_of(commit, root)], ["ls-files", "--others", "--exclude-standard"])
    return {root / name for words in asked for name in _git(root, *words).splitlines()}


def changed_lines(base: str, file: str, root: Path = ROOT) -> set[int]:
    """Lines of the base's file that changed; of what came in between two lines, these."""
    found: set[int] = set()
    text = _git(root, "diff", "-U0", base, "--", file)
    for first, count in re.findall(r"^@@ -(\d+)(?:,(\d+))? ", text, re.MULTILINE):
        found.update(range(int(first), int(first) + (2 if count == "0" else int(count or 1))))
    return found


def concerned(changed: set[Path], root: Path = ROOT) -> list[Path]:
    """The test files marked gpu that are in `changed`, or reach one of these by what they import."""
    graph = _Graph(root)
    # Marked itself, or by the marks of a module that it imports.
    return [
        path
        for path in graph.reaching(changed)
        if any(_MARK in one.read_text(encoding="utf-8") for one in (path, *graph.named[path]))
    ]


def files_that_reach(changed: set[Path], root: Path = ROOT) -> list[Path]:
    """The test files that are in `changed`, or reach one of these by what they import."""
    return _Graph(root).reaching(changed)


@cache
class _Graph:
    def __init__(self, root: Path) -> None:
        self.root = root
        files = {_name(path, root): path for folder in ("hpc_gpt", "tests") for path in (root / folder).rglob("*.py")}
        inner = defaultdict(set)
        for name in files:
            inner[name.rpartition(".")[0]].add(name)
        self.named = dict[Path, set[Path]]()
        for own, path in files.items():
            words = _words(path, own) | {f"{word}.__main__" for word in _words(path, own)}
            chosen_later = {name for word in words if word.endswith(".*") for name in inner[word[:-2]]}
            names = {name for word in words for name in _with_packages(word)} | chosen_later
            self.named[path] = {files[name] for name in names if name in files}
        self.by = defaultdict(set)
        for path, named in self.named.items():
            for each in (*named, *(_conftests(path, root) if _is_test(path) else ())):
                self.by[each].add(path)

    def reaching(self, changed: set[Path]) -> list[Path]:
        """Those that name one directly first."""
        steps, rest, count = dict[Path, int](), changed, 0
        while rest:
            steps |= dict.fromkeys(rest, count)
            rest, count = {user for path in rest for user in self.by[path]} - steps.keys(), count + 1
        return sorted((path for path in steps if _is_test(path)), key=lambda path: (steps[path], path))


def _is_test(path: Path) -> bool:
    return path.match("test_*.py")


def chosen(commit: str, known: Map | None = None, root: Path = ROOT) -> tuple[set[str], set[str]]:
    """(tests, files of tests) that the change concerns; the file `tests` means all."""
    base = base_of(commit, root)
    tests, files, by_imports = set[str](), set[str](), set[Path]()
    for path in sorted(changed_files(commit, root)):
        name = str(path.relative_to(root))
        gone = not path.exists()
        if _EVERY_TEST.fullmatch(name) and not path.name.startswith("test_"):
            return set(), {"tests"}
        if name.startswith("tests/") and path.suffix != ".py":
            files.add("/".join(name.split("/")[:2]))  # a fixture is its folder's
        elif name.startswith("tests/") and not gone:
            by_imports.add(path)
        elif name.startswith(("hpc_gpt/", "templates/")):
            found = (
                set(known.tests_that_use(name, changed_lines(base, name, root), _at(base, name, root)))
                if known
                else set()
            )
            tests |= found
            if not found and (path.suffix != ".py" or gone):
                return set(), {"tests"}
            if not found or known is None:
                by_imports.add(path)
            else:  # the map's pieces that there are not
                files |= {each for each in _names(files_that_reach({path}, root), root) if not known.has(each)}
        elif _PAGES.fullmatch(name):
            files |= {"tests/docs", *_names(_that_name(path.name, root), root)}
        elif not name.startswith("tests/") and name not in ("Makefile", ".gitignore"):
            return set(), {"tests"}
    if by_imports:
        files |= set(_names(files_that_reach(by_imports, root), root))
    return {test for test in tests if not any(_is_of(test, file) for file in files)}, files


def _is_of(test: str, file: str) -> bool:
    return test.partition("::")[0] == file or test.startswith(file + "/")


def _names(paths: list[Path], root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in paths]


def _that_name(word: str, root: Path) -> list[Path]:
    return [path for path in sorted((root / "tests").rglob("test_*.py")) if word in path.read_text(encoding="utf-8")]


def _at(commit: str, file: str, root: Path) -> bytes | None:
    done = subprocess.run(["git", "-C", root, "show", f"{commit}:{file}"], capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _conftests(path: Path, root: Path) -> list[Path]:
    return [
        folder / "conftest.py"
        for folder in path.parents
        if root in folder.parents and (folder / "conftest.py").is_file()
    ]


# Of the program or of its tests: `from a.b import (c, d)`, the dotted name anywhere, a module that is named as it runs.
_FROM = re.compile(r"^\s*from ((?:hpc_gpt|tests)[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
_DOTTED = re.compile(r"\b(?:hpc_gpt|tests)(?:\.\w+)*")
_LATER = re.compile(r"import_module\(f\"(\{__name__\}|[\w.]+)\.\{")


def _words(path: Path, own: str) -> set[str]:
    """Dotted names that the file, module `own`, imports, or has as a text; `a.*` for any module of a package."""
    text = path.read_text(encoding="utf-8")
    of_from = {f"{module}.{name}" for module, names in _FROM.findall(text) for name in re.findall(r"\w+", names)}
    later = {f"{own if package == '{__name__}' else package}.*" for package in _LATER.findall(text)}
    return of_from | later | set(_DOTTED.findall(text))


def _with_packages(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def main() -> int:
    """Prints the words; says on stderr how many tests they are."""
    parser = argparse.ArgumentParser(prog="python -m tests.changed", description=__doc__.partition("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--gpu", action="store_true", help="the files marked gpu")
    asked = parser.parse_args()
    try:
        if asked.gpu:
            print(" ".join(_names(concerned(changed_files(asked.commit)), ROOT)) or "none")
            return 0
        known = map_of(base_of(asked.commit))
        tests, files = chosen(asked.commit, known)
    except UnknownCommit as unknown:
        print(f"Error: {unknown}", file=sys.stderr)
        return 2
    by = "imports: there is no map" if known is None else f"a map of {len(known.pieces)} pieces, and by imports"
    all_of = "all tests" if files == {"tests"} else f"{len(tests):,} tests and {len(files)} files or folders of tests"
    if known is not None and not files:
        all_of += f" ({sum(known.seconds[test] for test in tests):.0f} s, one after the other)"
    print(f"{all_of} concern what differs from {asked.commit}, by {by}", file=sys.stderr)
    listed = MAPS / "chosen"
    MAPS.mkdir(exist_ok=True)
    listed.write_text("".join(f"{each}\n" for each in sorted(tests | files)), encoding="utf-8")
    words = sorted({test.partition("::")[0] for test in tests} | files)
    print(f"-p tests.mutations.chosen --chosen={listed} {' '.join(words)}" if words else "none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
