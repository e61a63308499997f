"""Draws faults by a seed, puts one after the other into a copy of the tree and runs the tests nearest to it.

python -m bench.mutations [--faults N] [--seed S] [FILES]    FILES: part of a file's name, as hpc_gpt/core/settings/

Each statement's line of hpc_gpt counts once; a line that is drawn gets one of the faults that can be made of it. Its
tests are those with the module's name, then those that name the module, then those of its package. What fails runs once
more without the fault: if it fails again, the fault is `unclear` and does not count. No share fails the command.
"""

import argparse
import math
import queue
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.mutations.copies import REPOSITORY, copy_tree, run_tests
from bench.mutations.python_faults import changes_of_python, is_grammatical

# Texts that are written by the program: each right change differs from them, too.
_WRITTEN = re.compile(r"\b(file|data|num)_regression\b")
_NOT_RUN = ("tests/golden/", "bench/mutations/", "tests/docs/")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, order=True)
class Fault:
    """`text` takes the place of the bytes `start` to `end` of `file`."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def described(self, tree: Path) -> str:
        """file:line, before -> after, on one line."""
        source = (tree / self.file).read_bytes()
        first, end = source.rfind(b"\n", 0, self.start) + 1, source.find(b"\n", self.end)
        after = source[first : self.start] + self.text.encode() + source[self.end : end]
        old, new = (" ".join(text.decode().split()) for text in (source[first:end], after))
        return f"{self.file}:{self.line}  {old} -> {new}"


def draw(tree: Path, count: int, seed: int, part: str = "") -> list[Fault]:
    """`count` faults, each of another line of a file whose name has `part`; ValueError if there are fewer lines."""
    listed = subprocess.run(["git", "-C", tree, "ls-files", "hpc_gpt"], capture_output=True, text=True, check=True)
    lines: dict[tuple[str, int], list[Fault]] = {}
    for name in sorted(name for name in listed.stdout.split() if name.endswith(".py") and part in name):
        for change in changes_of_python((tree / name).read_bytes()):
            lines.setdefault((name, change[0]), []).append(Fault(name, *change))
    if count > len(lines):
        raise ValueError(f"faults can be made of {len(lines):,} lines, not of {count:,}")
    drawn: list[Fault] = []
    for place in random.Random(seed).sample(sorted(lines), len(lines)):  # a longer draw begins with a shorter one's
        if len(drawn) < count:
            source = (tree / place[0]).read_bytes()
            faults = random.Random(f"{seed} {place}").sample(sorted(lines[place]), len(lines[place]))
            drawn += [fault for fault in faults if is_grammatical(source, fault.applied(source))][:1]
    return drawn


def nearest_tests(tree: Path, file: str) -> list[str]:
    """The test files of a module, the nearest first."""
    parts = Path(file).with_suffix("").parts
    parts = parts[:-1] if parts[-1].startswith("__") else parts
    package, name = parts[-2] if len(parts) > 1 else "", parts[-1]
    dotted = re.escape(".".join(parts[:-1]))
    named = re.compile(rf"\b{dotted}(\.| import (\([^)]*|[^(\n]*)\b){name}\b")
    nearness: dict[str, int] = {}
    for path in sorted((tree / "tests").rglob("test_*.py")):
        test, text = str(path.relative_to(tree)), path.read_text(encoding="utf-8")
        if test.startswith(_NOT_RUN) or _WRITTEN.search(text):
            continue
        within = package in path.parent.parts
        if within and path.stem == f"test_{name}":
            nearness[test] = 0
        elif named.search(text):
            nearness[test] = 1 if within else 2
        elif within:
            nearness[test] = 3
    return sorted(nearness, key=lambda test: (nearness[test], test))


def judge(tree: Path, fault: Fault, limit: float) -> tuple[str, str]:
    """(caught, survived or unclear; the test that failed, or why there is no more to say)"""
    tests = nearest_tests(tree, fault.file)
    if not tests:
        return "survived", "no test names its module"
    path = tree / fault.file
    source = path.read_bytes()
    path.write_bytes(fault.applied(source))
    try:
        code, output = run_tests(tree, tests, limit)
    finally:
        path.write_bytes(source)
    if code is None:
        return "survived", f"not all of its tests ended within {limit:g} s"
    if code == 0:
        return "survived", f"{len(tests)} files of tests passed"
    failed = _FAILED.search(output)
    if failed is None:
        return "unclear", f"pytest ended with {code}: {output.strip()[-300:]}"
    if run_tests(tree, [failed[1]], 3 * limit)[0] != 0:
        return "unclear", f"{failed[1]} fails without the fault, too"
    return "caught", failed[1]


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1")
    return int(text)


def try_all(faults: list[Fault], at_once: int, limit: float, minutes: float, say: Callable[[str], None]) -> list[str]:
    """A verdict for each fault that was reached within so many minutes; says each as it comes."""
    ends = time.monotonic() + 60 * minutes
    trees: queue.Queue[Path] = queue.Queue()

    def judge_in_a_tree(fault: Fault) -> str:
        if (left := ends - time.monotonic()) <= 0:
            return ""
        tree, began = trees.get(), time.monotonic()
        try:
            verdict, reason = judge(tree, fault, min(limit, left))
        finally:
            trees.put(tree)
        seconds = time.monotonic() - began
        say(f"{verdict:8s}  {seconds:5.1f} s  {fault.described(REPOSITORY)}  [{fault.kind}; {reason}]")
        return verdict

    with tempfile.TemporaryDirectory(prefix="hpc-gpt-mutations-") as folder, ThreadPoolExecutor(at_once) as pool:
        for number in range(at_once):
            copy_tree(tree := Path(folder) / str(number) / "tree")
            trees.put(tree)
        return [verdict for verdict in pool.map(judge_in_a_tree, faults) if verdict]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="?", default="", metavar="FILES", help="only files whose name has this part")
    parser.add_argument("--faults", type=_count, metavar="N", default=40, help="each in another line (40)")
    parser.add_argument("--seed", type=int, metavar="S", default=1, help="one commit has the same faults again (1)")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--limit", type=float, metavar="SECONDS", default=60.0, help="for a fault's tests (60)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for all faults")
    parser.add_argument("--at-once", type=_count, default=2, metavar="N", help="copies of the tree side by side (2)")
    asked = parser.parse_args()
    try:
        faults = draw(REPOSITORY, asked.faults, asked.seed, asked.part)
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    if asked.list:
        print("\n".join(fault.described(REPOSITORY) for fault in faults))
        return 0
    verdicts = try_all(faults, asked.at_once, asked.limit, asked.minutes, lambda line: print(line, flush=True))
    caught, unclear = verdicts.count("caught"), verdicts.count("unclear")
    print(f"seed {asked.seed}: {caught} of {len(verdicts) - unclear} faults caught; {unclear} unclear, "
          f"{len(faults) - len(verdicts)} not reached")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
