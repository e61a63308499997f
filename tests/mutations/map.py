"""The map: which test executes which line of hpc_gpt and of templates, made in pieces by `make map`.

python -m tests.mutations.map [PIECES]      PIECES: folders or files of tests, all without them

A piece is a folder of tests. What one has given is kept under .map/COMMIT, so that a map that was cut off goes on where
it was. tests/mutations/recorder.py records, tests/mutations/contexts.py names the test.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.mutations.faults import below_room
from tests.mutations.python_faults import lines_of_functions, lines_of_tables
from tests.mutations.recorder import FOLDER

ROOT = Path(__file__).resolve().parents[2]
MAPS = ROOT / ".map"
_RECORDER = Path(__file__).with_name("recorder.py")
# The submitted copy of a run, another tree's or a package's: the same line.
_OURS = re.compile(r"(?:.*/)?((?:hpc_gpt|templates)/.*)", re.DOTALL)
_START = "TESTS_MAP_START"
_LIMIT_S = 3600.0


@dataclass
class Map:
    """`lines` is {file: {test: lines that it executes}}, `seconds` what each test took while it was recorded."""

    lines: dict[str, dict[str, set[int]]] = field(default_factory=lambda: defaultdict(dict))
    seconds: dict[str, float] = field(default_factory=dict)
    pieces: set[str] = field(default_factory=set)

    def tests_of(self, file: str, lines: Iterable[int]) -> list[str]:
        """Those that execute one of the lines, the quickest first. Of a template: those that render any of it."""
        wanted = set(lines)
        any_line = file.startswith("templates/")
        found = [test for test, has in self.lines.get(file, {}).items() if any_line or not wanted.isdisjoint(has)]
        return sorted((test for test in found if test in self.seconds), key=lambda test: (self.seconds[test], test))

    def tests_that_use(self, file: str, lines: Iterable[int], source: bytes | None) -> list[str]:
        """Those that use these lines of the file, which the map's commit has as `source`, if at all.

        What runs as a module is imported is recorded of the test that came first: it counts as each one's that calls
        something of the file, and a table's lines as those of all tests of the package.
        """
        lines, of_package = set(lines), ""
        if file.endswith(".py") and source is not None:
            called = lines_of_functions(source)
            if not lines <= called:
                of_package = "" if lines.isdisjoint(lines_of_tables(source)) else package_of(file)
                lines |= called
        found = self.tests_of(file, lines)
        more = set(self.seconds) - set(found) if of_package else ()
        return found + sorted(test for test in more if test.startswith(of_package))

    def has(self, file: str) -> bool:
        """Whether the file's tests were recorded."""
        return file in self.pieces or "/".join(file.split("/")[:2]) in self.pieces


def package_of(file: str) -> str:
    """Where tests of a module's package are; empty for a module of hpc_gpt itself."""
    package, inside, _ = below_room(file).partition("/")
    return f"tests/{package}/" if inside else ""


def pieces() -> Iterator[str]:
    """Folders directly in tests/ that have tests, and the files beside them."""
    for path in sorted((ROOT / "tests").iterdir()):
        if path.is_dir() and any(path.rglob("test_*.py")):
            yield f"tests/{path.name}"
    yield from (f"tests/{path.name}" for path in sorted((ROOT / "tests").glob("test_*.py")))


def commit_of(tree: Path = ROOT, name: str = "HEAD") -> str:
    done = subprocess.run(["git", "-C", tree, "rev-parse", name], capture_output=True, text=True, check=True)
    return done.stdout.strip()[:12]


def map_of(commit: str = "") -> Map | None:
    """What was recorded last of each piece, with lines as the commit's program has them, the working tree's without
    one; None if there is none. A line that differs since has the tests of what it replaces, or of those around it."""
    newest = {path.name: path for path in sorted(MAPS.glob("*/*.json"), key=lambda path: path.stat().st_mtime)}
    with_moves = {path: moves for path in newest.values() if (moves := _moves(path.parent.name, commit)) is not None}
    return read_map(with_moves) if with_moves else None


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)


@cache
def _same(one: str, other: str, *paths: str) -> bool:
    """Whether two commits have the same program, and the same of `paths`; the working tree if `other` is empty."""
    changed = _git("diff", "--quiet", one, *filter(None, [other]), "--", "hpc_gpt", "templates", *paths)
    return changed.returncode == 0


@dataclass
class Move:
    """Where a file is now, none if it is gone, and (first line, count, first line now, count now) of what differs."""

    name: str
    hunks: list[tuple[int, int, int, int]] = field(default_factory=list)

    def lines(self, lines: set[int]) -> set[int]:
        """Where the lines are now."""
        found, rest, shift = set[int](), lines, 0
        for first, count, now, count_now in self.hunks:
            # What came in between two lines stands after `first`; what went out, now after `now`.
            start, start_now = first + (count == 0), now + (count_now == 0)
            found |= {line + shift for line in rest if line < start}
            if not lines.isdisjoint(range(start, start + count) if count else (first, first + 1)):
                found |= set(range(start_now, start_now + count_now))
            rest = {line for line in rest if line >= start + count}
            shift = start_now + count_now - start - count
        return found | {line + shift for line in rest}


@cache
def _moves(one: str, other: str) -> dict[str, Move] | None:
    """{file of one commit: where it is in the other} of those that differ; None if `one` is no commit here."""
    done = _git(*DIFF, one, *filter(None, [other]), "--", "hpc_gpt", "templates")
    return None if done.returncode else moves_of(done.stdout)


DIFF = ("diff", "-U0", "-M", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")
_HEAD = re.compile(
    r"^diff --git a/(.*) b/(.*)$|^(deleted) file|^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE
)


def moves_of(diff: str) -> dict[str, Move]:
    """Of what `git diff -U0 -M` prints."""
    found, move = {}, Move("")
    for old, new, deleted, *hunk in _HEAD.findall(diff):
        if old:
            move = found[old] = Move(new)
        elif deleted:
            move.name = ""
        else:
            first, count, now, count_now = (int(number or 1) for number in hunk)
            move.hunks.append((first, count, now, count_now))
    return found


def read_map(pieces: Mapping[Path, dict[str, Move]]) -> Map:
    """The map of these pieces, with what has moved since each was recorded."""
    found = Map()
    for path, moves in pieces.items():
        piece = json.loads(path.read_text(encoding="utf-8"))
        found.pieces.add(piece["piece"])
        there = {file for file in {test.partition("::")[0] for test in piece["seconds"]} if (ROOT / file).exists()}
        found.seconds |= {test: each for test, each in piece["seconds"].items() if test.partition("::")[0] in there}
        for file, tests in piece["lines"].items():
            move = moves.get(file, Move(file))
            for test, runs in tests.items():
                found.lines[move.name].setdefault(test, set()).update(move.lines(set(_unpacked(runs))))
    found.lines.pop("", None)  # of files that are gone
    return found


def record(piece: str, folder: Path) -> dict[str, object]:
    """Runs the piece's tests and returns what is kept of them."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-p", "tests.mutations.contexts", piece],
        cwd=ROOT,
        env={**os.environ, FOLDER: str(folder), "CI": "", "ALL_TESTS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    said = done.stdout.strip().splitlines() or [""]
    if not (folder / "tests.json").exists():
        raise SystemExit(f"Error: {piece} could not be recorded: {said[-1]}")
    tests = json.loads((folder / "tests.json").read_text(encoding="utf-8"))
    lines = _lines_of(folder, tests["uses"])
    count = sum(len(each) for each in lines.values())
    print(
        f"{piece}: {time.monotonic() - began:.0f} s, {len(tests['seconds'])} tests, {count} pairs: {said[-1]}",
        flush=True,
    )
    return {"piece": piece, "seconds": tests["seconds"], "lines": lines}


def _lines_of(folder: Path, uses: dict[str, list[str]]) -> dict[str, dict[str, list[int]]]:
    """{file: {test: lines}} of all processes; a shared fixture's lines are those of each test that uses it."""
    from coverage import CoverageData

    users = defaultdict(list)
    for test, fixtures in uses.items():
        for fixture in fixtures:
            users[fixture].append(test)
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in folder.glob("lines.*"):
        data = CoverageData(str(path), no_disk=False)
        try:
            data.read()
            for name in data.measured_files():
                if ours := _OURS.fullmatch(name):
                    for line, contexts in data.contexts_by_lineno(name).items():
                        for context in contexts:
                            for test in users.get(context, [context]):
                                found[ours[1]][test].add(line)
        except Exception as cut:  # killed while it wrote
            print(f"left out {path.name}: {cut}", file=sys.stderr)
    return {file: {test: _packed(lines) for test, lines in tests.items()} for file, tests in found.items()}


def _packed(lines: set[int]) -> list[int]:
    """First and last of each stretch of lines."""
    found: list[int] = []
    for line in sorted(lines):
        if found and found[-1] == line - 1:
            found[-1] = line
        else:
            found += [line, line]
    return found


def _unpacked(ends: list[int]) -> Iterator[int]:
    for first, last in zip(ends[::2], ends[1::2], strict=True):
        yield from range(first, last + 1)


def make(wanted: list[str]) -> None:
    target = MAPS / commit_of()
    target.mkdir(parents=True, exist_ok=True)
    # It stays: without the variable it does nothing. A path with a quote in it could not stand in a .pth itself.
    start = Path(sysconfig.get_path("purelib")) / "tests_map.pth"
    start.write_text(f"import os; {_START!r} in os.environ and exec(open(os.environ[{_START!r}]).read(), {{}})\n")
    os.environ[_START] = str(_RECORDER)
    for piece in wanted:
        kept = target / f"{piece.replace('/', '-')}.json"
        same = [path for path in MAPS.glob(f"*/{kept.name}") if _same(path.parent.name, "", piece)]
        if same and not kept.exists():
            shutil.copy(same[0], kept)
        if kept.exists():
            continue
        folder = Path(tempfile.mkdtemp(prefix="hpc-gpt-map-"))
        folder.chmod(0o777)  # a job's user may be another
        try:
            text = json.dumps(record(piece, folder))
            kept.with_suffix(".part").write_text(text, encoding="utf-8")
            kept.with_suffix(".part").rename(kept)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    make(sys.argv[1:] or list(pieces()))
