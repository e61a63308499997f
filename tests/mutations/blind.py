"""Tries faults drawn by a seed: each is put into a copy of the tree, and the tests run that execute its line.

The map (tests/mutations/map.py) says which these are; without one, or for a line that it does not know, the import
graph does (tests/changed.py). A fault's tests run the nearest first, the quick ones before the others, until one fails.
"""

import contextlib
import importlib
import io
import math
import os
import re
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.changed import files_that_reach
from tests.mutations.copies import REPOSITORY, copy_tree
from tests.mutations.draw import Drawn, draw
from tests.mutations.faults import below_room
from tests.mutations.map import Map, map_of, package_of
from tests.processes import all_pids, command_of, environment_of

# Imported once, and forked for each fault; none of them imports hpc_gpt.
_WARM = ("torch", "torch._dynamo", "deepspeed", "hypothesis", "click", "jinja2", "numpy", "pytest")
# A test hangs after so many times what it takes without the fault, and so long for whatever else this machine does.
_USUAL, _START_S = 3.0, 30.0
_HUNG = -1000
_PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "-p", "tests.mutations.chosen", "-m", "not gpu", "--no-header")


@dataclass(frozen=True)
class Verdict:
    """`by` is the test that failed, or what ended the run; `of` how many tests were to run, `left` how many not."""

    fault: Drawn
    name: str
    by: str
    of: int
    left: int
    seconds: float
    long: bool = False


@dataclass(frozen=True)
class Choice:
    """The tests of a fault: `files` to collect, of them `tests` with the seconds that each takes, all if None."""

    files: list[str]
    tests: dict[str, float] | None = None
    left: int = 0


def choose(fault: Drawn, known: Map | None, limit: float, tree: Path = REPOSITORY) -> Choice:
    """Which tests run for it, with `limit` seconds of them at the most."""
    lines, source = range(fault.line, fault.last + 1), (tree / fault.file).read_bytes()
    tests = known.tests_that_use(fault.file, lines, source) if known is not None else []
    if tests and known is not None:
        within: dict[str, float] = {}
        for test in sorted(tests, key=lambda test: (_distance(test, fault.file), known.seconds[test])):
            if not within or sum(within.values()) + known.seconds[test] <= limit:
                within[test] = known.seconds[test]
        left = len(tests) - len(within)
        return Choice(sorted({test.partition("::")[0] for test in within}), within, left)
    # What its package's tests start in a process of its own names no module.
    own = sorted((tree / package_of(fault.file)).rglob("test_*.py")) if package_of(fault.file) else []
    files = [
        str(path.relative_to(tree)) for path in dict.fromkeys([*files_that_reach({tree / fault.file}, tree), *own])
    ]
    return Choice(sorted(files, key=lambda name: _distance(name, fault.file)) or ["tests"])


def _distance(test: str, file: str) -> int:
    """0 for a test that has the module's name, or whose file or case has, 1 of its folder, 2 of its package, else 3."""
    folder, _, name = below_room(file).rpartition("/")
    if folder and re.search(rf"(?<![a-z]){name.partition('.')[0]}(?![a-z])", test):
        return 0
    if folder and test.startswith(f"tests/{folder}/"):
        return 1
    return 2 if folder and test.startswith(f"tests/{folder.partition('/')[0]}/") else 3


def judge(tree: Path, fault: Drawn, choice: Choice, limit: float, long: bool = False) -> Verdict:
    """Runs its tests in a copy of the tree, with the fault in it."""
    path, began = tree / fault.file, time.monotonic()
    sound, at = path.read_bytes(), path.stat()
    path.write_bytes(fault.applied(sound))
    try:
        code, output = _run(tree, choice, _START_S + _USUAL * limit, long)
    finally:
        path.write_bytes(sound)
        os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    failed = re.search(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)
    if code == _HUNG:
        name, by = "caught", f"{output.splitlines()[-1]} hangs"
    elif code is None:
        name, by = "survived", "not all of its tests were reached"
    elif failed or code not in (0, 1, 5):
        name, by = "caught", failed[1] if failed else f"pytest ended with {code}: {output.strip()[-300:]}"
    else:
        name, by = "survived", ""
    count = len(choice.tests) if choice.tests is not None else -1
    return Verdict(fault, name, by, count, choice.left, time.monotonic() - began, long)


def _run(tree: Path, choice: Choice, limit: float, long: bool) -> tuple[int | None, str]:
    """(pytest's exit code, _HUNG for a test that hangs, None after `limit`; what it printed) in a fork of this one."""
    with tempfile.TemporaryDirectory(prefix="hpc-gpt-fault-") as folder:
        output = Path(folder) / "output"
        environment = {"TESTS_NOW": f"{folder}/now", "PYTHONPATH": str(tree), "CI": "", "ALL_TESTS": "true" * long,
                       "PYTHONDONTWRITEBYTECODE": "1", "HPC_GPT_SHARED": "", "OMP_NUM_THREADS": "1",
                       "PYTEST_DEBUG_TEMPROOT": folder}  # fmt: skip
        now = Path(environment["TESTS_NOW"])
        words = [*_PYTEST, "--no-kept"]
        if choice.tests is not None:
            (Path(folder) / "tests").write_text("\n".join(choice.tests), encoding="utf-8")
            words.append(f"--chosen={folder}/tests")
        pid = os.fork()
        if pid == 0:
            _become_pytest(tree, output, environment, [*words, *choice.files])
        ends, code, done = time.monotonic() + limit, None, 0
        while time.monotonic() < ends and code is None:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
            elif choice.tests is not None and now.exists():
                usual = choice.tests.get(now.read_text(encoding="utf-8"), 0.0)
                code = _HUNG if time.time() - now.stat().st_mtime > _START_S + _USUAL * usual else None
            time.sleep(0.05)
        for each in [*([] if done else [pid, *_descendants(pid)]), *_left_in(folder)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        if not done:
            os.waitpid(pid, 0)
        if code == _HUNG:  # the test, as the last line
            return code, now.read_text(encoding="utf-8")
        return code, output.read_text(encoding="utf-8", errors="replace")


def _become_pytest(tree: Path, output: Path, environment: dict[str, str], words: list[str]) -> None:
    """Goes on as pytest in the tree; what it has of the program and its tests is another tree's."""
    code = 3
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
        for number in (1, 2):
            os.dup2(file, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = os.fdopen(1, "w", 1, closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, closefd=False)
        os.chdir(tree)
        os.environ.update(environment)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "hpc_gpt")]:
            del sys.modules[name]
        ours = str(REPOSITORY)
        sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in ("", ours))]
        sys.dont_write_bytecode = True
        import pytest

        code = int(pytest.main(words))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _descendants(pid: int) -> list[int]:
    import psutil

    with contextlib.suppress(psutil.Error):
        return [each.pid for each in psutil.Process(pid).children(recursive=True)]
    return []


def _left_in(folder: str) -> list[int]:
    """Runs that a test started there, which go on when it is killed: a training would take a core for hours."""
    return [
        pid for pid in all_pids() if any(folder in word for word in (*command_of(pid), *environment_of(pid).values()))
    ]


class _Worker:
    """What one process of several has: a copy of the tree, and which tests have failed in it without a fault."""

    tree: Path
    fails: dict[str, bool] = {}


def _prepare(folders: list[str], number: Any) -> None:
    with number.get_lock():
        _Worker.tree = Path(folders[number.value])
        number.value += 1


def _judge_here(fault: Drawn, choice: Choice, limit: float, ends: float, with_long: bool) -> Verdict | None:
    """None after `ends`, a time of the monotonic clock."""
    if time.monotonic() > ends:
        return None
    # A fault of no choice is tried for as long as there is time.
    limit = min(limit, max(1.0, ends - time.monotonic()))
    found = judge(_Worker.tree, fault, choice, limit)
    if found.name == "survived" and with_long:
        again = judge(_Worker.tree, fault, Choice(choice.files), limit, long=True)
        found = again if again.name == "caught" else found
    test = found.by.removesuffix(" hangs")
    if found.name == "caught" and "::" in test and _fails_without(test, (choice.tests or {}).get(test, 60.0)):
        return replace(found, name="unclear", by=f"{found.by} fails without the fault, too")
    return found


def _fails_without(test: str, usual: float) -> bool:
    if test not in _Worker.fails:
        code, _ = _run(_Worker.tree, Choice([test.partition("::")[0]], {test: usual}), 10 * _START_S, True)
        _Worker.fails[test] = code not in (0, 5)
    return _Worker.fails[test]


def try_all(faults: list[Drawn], at_once: int, limit: float, minutes: float, long: bool) -> Iterator[Verdict | None]:
    """A verdict for each fault as it comes; None for one that was not reached within so many minutes."""
    known = map_of()
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    ends = time.monotonic() + 60 * minutes
    with contextlib.redirect_stdout(io.StringIO()):
        for module in _WARM:
            importlib.import_module(module)
    context = get_context("fork")
    with tempfile.TemporaryDirectory(prefix="hpc-gpt-mutations-") as folder:
        trees = [str(Path(folder) / str(number) / "tree") for number in range(at_once)]
        for tree in trees:
            copy_tree(Path(tree))
        number = context.Value("i", 0)
        with ProcessPoolExecutor(at_once, context, _prepare, (trees, number)) as pool:
            asked = [
                pool.submit(_judge_here, fault, choose(fault, known, limit), limit, ends, long) for fault in faults
            ]
            for each in asked:
                yield each.result()


@cache
def equivalent() -> dict[str, str]:
    """{a fault as it is printed, without its line: why no test can fail on it}, told apart by hand."""
    tables = tomllib.loads(Path(__file__).with_name("equivalent.toml").read_text(encoding="utf-8"))
    return {table["fault"]: table["why"] for table in tables["same"]}


def interval(caught: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.96, caught / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return middle - half, middle + half


def run_random(
    count: int, seed: int, words: str, only_list: bool, at_once: int, limit: float, minutes: float, long: bool
) -> int:
    """Prints the faults, or tries them; the exit code, which no share changes."""
    try:
        faults = draw(REPOSITORY, count, seed, words)
    except ValueError as fault:
        print(f"Error: {fault}", file=sys.stderr)
        return 2
    if only_list:
        for fault in faults:
            print(fault.described(REPOSITORY))
        return 0
    began, verdicts = time.monotonic(), []
    alike = [fault for fault in faults if fault.without_line(REPOSITORY) in equivalent()][: max(1, count // 10)]
    for fault in alike:
        print(f"the same  {'':8s}  {fault.package:11s}  {fault.described(REPOSITORY)}", flush=True)
    faults = [fault for fault in faults if fault not in alike]
    for found, fault in zip(try_all(faults, at_once, limit, minutes, long), faults, strict=True):
        if found is None:
            continue
        if found.name != "unclear":
            verdicts.append(found)
        tests = "no test known" if found.of < 0 else f"{found.of} tests"
        if found.left:
            tests += f", {found.left} more not run"
        late = ", by make test-all alone" if found.name == "caught" and found.long else ""
        print(
            f"{found.name:8s}  {found.seconds:6.1f} s  {fault.package:11s}  {fault.described(REPOSITORY)}  "
            f"[{fault.kind}; {tests}{late}{'; ' + found.by if found.by else ''}]",
            flush=True,
        )
    caught = [found for found in verdicts if found.name == "caught"]
    print("\n| package | caught | of | share |\n|---|---|---|---|")
    for package, all_of_it in sorted(Counter(found.fault.package for found in verdicts).items()):
        of_package = sum(each.fault.package == package for each in caught)
        print(f"| {package} | {of_package} | {all_of_it} | {of_package / all_of_it:.0%} |")
    print()
    in_time = sum(not each.long for each in caught)
    if cut := sum(each.name == "survived" and bool(each.left or each.by) for each in verdicts):
        print(f"of those that survived {cut} have tests that were not reached")
    print(f"seed {seed}, {(time.monotonic() - began) / 60:.1f} min")
    if verdicts:
        low, high = interval(in_time, len(verdicts))
        print(f"make test: {in_time / len(verdicts):.0%}, 95 % interval {low:.0%} to {high:.0%}")
    if alike:
        print(f"{len(alike)} change nothing (tests/mutations/equivalent.toml) and do not count")
    if missing := len(faults) - len(verdicts):
        print(f"no verdict of {missing} of {count}: not reached within {minutes:g} min, or unclear")
    unknown = "" if long else ", not asked"
    print(f"make test catches {in_time} of {len(verdicts)}, make test-all {len(caught)}{unknown}")
    return 0
