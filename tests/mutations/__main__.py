"""Puts one fault after the other into a copy of the tree and runs the tests that must fail on it.

python -m tests.mutations [--at-once N] [WORDS]         WORDS: only faults whose name or file holds them
python -m tests.mutations --random N --seed S [WORDS]   faults that nobody has chosen (tests/mutations/blind.py), of all
                                                        files or of those whose name holds WORDS

First all those tests run without a fault. A fault that those of `make test` do not catch is tried again with those that
are `long`. Ends with 1 if a fault survives, or cannot be judged: its line is gone, its tests cannot be collected, or
they do not end; or if `make test` alone catches fewer than nine in ten.
"""

import argparse
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from tests.mutations.copies import copy_tree
from tests.mutations.faults import Fault, read_faults

_LIMIT_S = 900.0
# What pytest's exit codes mean here; any other is no verdict.
_VERDICTS = {0: "SURVIVED", 1: "caught"}
_NONE_SELECTED = 5
_LATE = "caught by make test-all alone"


def run_tests(tree: Path, tests: list[str], long: bool = False) -> tuple[int | None, str]:
    """(pytest's exit code, None if it did not end; its output) of tests in a copy of the tree; `long` ones, too."""
    environment = {
        **os.environ,
        "CI": "true",  # the same examples each time, and a skip is a failure
        "ALL_TESTS": "true" if long else "",
        "PYTHONPATH": str(tree),
        # Two texts of one length within a second would share a .pyc.
        "PYTHONDONTWRITEBYTECODE": "1",
        "HPC_GPT_SHARED": "",  # CI has no real files: a fault that they alone show would reach users
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_LIMIT_S)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def judge(tree: Path, fault: Fault) -> tuple[str, str]:
    """(verdict, what there is to say of it beyond that)"""
    sound = (tree / fault.file).read_text(encoding="utf-8")
    try:
        (tree / fault.file).write_text(fault.text(tree), encoding="utf-8")
    except (ValueError, SyntaxError) as gone:
        return "NO LONGER APPLIES", str(gone)
    try:
        code, output = run_tests(tree, list(fault.tests))
        in_time = code not in (0, _NONE_SELECTED)
        if not in_time:
            code, output = run_tests(tree, list(fault.tests), long=True)
    finally:
        (tree / fault.file).write_text(sound, encoding="utf-8")
    if code is None:
        return f"NO END IN {_LIMIT_S:.0f} S", output[-3000:]
    verdict = _VERDICTS.get(code, f"NO VERDICT: PYTEST ENDED WITH {code}")
    if verdict == "caught":
        return verdict if in_time else _LATE, ""
    return verdict, output[-3000:]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"Error: {message}\n")


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is no number from 1")
    return int(text)


def main() -> int:
    """The exit code; a line for each fault, then how many of each package were caught."""
    parser = _Parser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="?", default="", help="only faults whose name or file holds these words")
    parser.add_argument("--at-once", type=_count, default=2, help="copies of the tree that work side by side")
    blind = parser.add_argument_group("faults drawn from all lines")
    blind.add_argument("--random", type=_count, metavar="N", help="so many, each of another line")
    blind.add_argument(
        "--seed", type=int, metavar="S", default=1, help="the draw's: on one commit it has the same faults"
    )
    blind.add_argument("--list", action="store_true", help="print them, and run nothing")
    blind.add_argument("--limit", type=float, metavar="SECONDS", default=math.inf, help="of tests for a fault")
    blind.add_argument("--minutes", type=float, default=math.inf, help="for all; says how many were not reached")
    blind.add_argument("--long", action="store_true", help="try the tests marked long on those that survive")
    asked = parser.parse_args()
    if asked.random is not None:
        from tests.mutations.blind import run_random

        how = (asked.list, asked.at_once, asked.limit, asked.minutes, asked.long)
        return run_random(asked.random, asked.seed, asked.words, *how)
    faults = [fault for fault in read_faults() if asked.words in fault.name or asked.words in fault.file]
    if not faults:
        print(f"Error: no fault's name or file holds {asked.words!r}", file=sys.stderr)
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hpc-gpt-mutations-") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(asked.at_once):
            copy_tree(tree := Path(folder) / str(number) / "tree")
            trees.put(tree)
        tests = sorted({test for fault in faults for test in fault.tests})
        code, output = run_tests(tree, ["-n", str(asked.at_once), "--dist", "loadgroup", *tests], long=True)
        if code != 0:
            print(f"Error: the tests fail, or cannot run, without any fault\n{output[-5000:]}", file=sys.stderr)
            return 1
        print(f"{len(tests)} tests and files pass without a fault, after {time.monotonic() - began:.0f} s", flush=True)

        def judge_in_a_tree(fault: Fault) -> tuple[Fault, str]:
            tree, since = trees.get(), time.monotonic()
            try:
                verdict, more = judge(tree, fault)
            finally:
                trees.put(tree)
            seconds = time.monotonic() - since
            print(
                f"{verdict:8s}  {seconds:6.1f} s  {fault.package:9s}  {fault.name}",
                more,
                sep="\n" if more else "",
                flush=True,
            )
            return fault, verdict

        with ThreadPoolExecutor(asked.at_once) as pool:
            verdicts = list(pool.map(judge_in_a_tree, faults))
    caught = [fault for fault, verdict in verdicts if verdict in ("caught", _LATE)]
    in_time = sum(verdict == "caught" for _, verdict in verdicts)
    for package in sorted({fault.package for fault in faults}):
        count = sum(fault.package == package for fault in caught)
        print(f"{package:9s}  {count} of {sum(fault.package == package for fault in faults)} caught")
    minutes = (time.monotonic() - began) / 60
    print(f"{len(caught)} of {len(faults)} faults caught, {in_time} by make test alone, in {minutes:.1f} min")
    return 0 if len(caught) == len(faults) and in_time >= 0.9 * len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
