"""Starts the ranks of a test: one process each on this machine, over gloo. A launch of them runs tasks in turn."""

import json
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.equality_cases import Case
from tests.forked import start_module
from tests.processes import cpu_seconds_of
from tests.waiting import patient

HERE = Path(__file__).resolve().parent
# The first compiled case took 181 s on two cores with six times the work.
_STALLED_S = 900.0
# Looks, 0.05 s apart, in which each rank takes less than a hundredth of a core: those that wait for each other have
# threads of gloo's. Not seconds, as the whole machine may stand still.
_IDLE_LOOKS, _IDLE_CPU_S = 4000, 2.0


@dataclass(frozen=True)
class Task:
    """What the ranks of a launch do together: `function(folder, *given)`, which gives plain JSON on rank 0.

    Assertions stay in the tests: a rank that fails alone would leave the others waiting.
    """

    name: str
    world: int
    function: Callable[..., Any]
    given: tuple[Any, ...] = ()
    part: str = ""  # of what is too much for one launch

    @property
    def launch(self) -> str:
        """The launch that runs it: that of its function's module, on so many ranks."""
        module = self.function.__module__.rpartition(".")[2].removeprefix("test_")
        return f"{module}-{self.world}" + (self.part and f"-{self.part}")


def task_of(function: Callable[..., Any], *cases: Case, part: str = "") -> Task:
    """What `function` does with these cases, on as many ranks as the largest has."""
    name = " to ".join(case.name for case in cases)
    return Task(f"{function.__name__} {name}", max(case.layout.gpus for case in cases), function, cases, part)


def each(
    function: Callable[..., Any], short: Sequence[Any], long: Sequence[Any] = (), always: Sequence[Any] = ()
) -> pytest.MarkDecorator:
    """A test's parameter `task`: the function with each case, or with each tuple of cases; see `each_task`."""

    def tasks(cases: Sequence[Any]) -> list[Task]:
        return [task_of(function, *(one if isinstance(one, tuple) else (one,))) for one in cases]

    return each_task(tasks(short), tasks(long), tasks(always))


def each_task(short: Sequence[Task], long: Sequence[Task] = (), always: Sequence[Task] = ()) -> pytest.MarkDecorator:
    """A test's parameter `task`. All tests that read a long one run on the same day; `always` in every run of CI."""
    marks = {task: [pytest.mark.long(launch=task.name)] for task in long}
    marks |= {task: [pytest.mark.long(launch=task.name, always=True)] for task in always}
    tasks = [*short, *marks]
    assert len(tasks) == len(short) + len(long) + len(always)
    each = [pytest.param(one, marks=marks.get(one, ()), id=one.name.partition(" ")[2]) for one in tasks]
    return pytest.mark.parametrize("task", each)


@dataclass
class Launch:
    """The ranks of `world`, which have run all of the tasks in one start, and in one more for each that took a rank
    with it; what they left. Ranks that stand still are started once more, with a warning that shows where."""

    world: int
    tasks: Sequence[Task]
    folder: Path

    def __post_init__(self) -> None:
        self.numbers = {task.name: number for number, task in enumerate(self.tasks)}
        assert len(self.numbers) == len(self.tasks)
        self.failures: dict[int, str] = {}
        started = time.monotonic()
        (self.folder / "tasks.pickle").write_bytes(pickle.dumps([(task.function, task.given) for task in self.tasks]))
        begin, repeated = 0, -1
        while begin < len(self.tasks):
            (self.folder / "begin").write_text(str(begin))
            codes = run_ranks("tests.distributed.trainings", self.world, self.folder, Stall(self.folder))
            if not any(codes):
                break
            last = len(self.tasks) - 1
            lost = next((number for number in range(begin, last) if not self._came(number)), last)
            said = f"a rank died or stood still\n{output_of(self.world, self.folder, 2000)}"
            if set(codes) == {-signal.SIGKILL} and lost != repeated:
                # Seen once in some hundred whole runs, on a busy machine, and never alone.
                warnings.warn(f"{self.tasks[lost].name} once more: {said}", stacklevel=1)
                for path in (*self.folder.glob("meeting-*"), *self.folder.glob(f"{lost}.*")):
                    path.unlink()
                begin = repeated = lost
            else:
                self.failures[lost] = said
                begin = lost + 1
        self.seconds = time.monotonic() - started

    def _came(self, number: int) -> bool:
        """Whether the ranks went on after this one: it gave a result, or failed on all of them."""
        failed = len(list(self.folder.glob(f"{number}.failed-*")))
        return failed == self.world or ((self.folder / f"{number}.json").exists() and not failed)

    def output(self, task: Task) -> str:
        """What the ranks printed meanwhile."""
        return "".join(file.read_text() for file in sorted(self.folder.glob(f"{self.numbers[task.name]}.output-*")))

    def all_output(self) -> str:
        """What they printed during all tasks."""
        return "".join(map(self.output, self.tasks))

    def figures(self, task: Task) -> Any:
        """What it gave; fails with the ranks' own words where it failed."""
        number = self.numbers[task.name]
        said = [file.read_text() for file in sorted(self.folder.glob(f"{number}.failed-*"))]
        if said or number in self.failures:
            words = self.failures.get(number) or "\n".join(dict.fromkeys(said))
            pytest.fail(f"{task.name}\n{words}\n{self.output(task)[-3000:]}", pytrace=False)
        return json.loads((self.folder / f"{number}.json").read_text())


def run_together(function: Callable[..., Any], world: int, folder: Path, *given: Any) -> Any:
    """What one function gives on so many ranks."""
    task = Task(function.__name__, world, function, given)
    return Launch(world, [task], folder).figures(task)


class Stall:
    """Whether nothing new has been written for long, or for some time in which the ranks did not compute either."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.since = folder, 0, time.monotonic()
        self.cpu_s, self.idle_looks = 0.0, 0

    def __call__(self, pids: Sequence[int]) -> bool:
        files, cpu_s = sum(1 for _ in self.folder.iterdir()), sum(map(cpu_seconds_of, pids))
        self.idle_looks += 1
        if cpu_s - self.cpu_s > _IDLE_CPU_S * len(pids) or files != self.files:
            self.cpu_s, self.idle_looks = cpu_s, 0
        if files != self.files:
            self.files, self.since = files, time.monotonic()
        return self.idle_looks > patient(_IDLE_LOOKS) or time.monotonic() - self.since > patient(_STALLED_S)


def launch_ranks(module: str, world: int, folder: Path) -> None:
    """Runs `module` in `world` processes with `folder` as argument; fails with their output unless all end with 0."""
    codes = run_ranks(module, world, folder, Stall(folder))
    assert not any(codes), f"ranks ended with {codes}\n{output_of(world, folder, 3000)}"


def output_of(world: int, folder: Path, characters: int) -> str:
    """The last lines of every rank, each under its file's name."""
    return "\n".join(f"--- {log.name}\n{log.read_text()[-characters:]}" for log in _logs(world, folder))


def run_ranks(module: str, world: int, folder: Path, late: Callable[[Sequence[int]], bool]) -> list[int]:
    """The exit codes of `world` processes that run `module`. One that fails ends all, and so does `late`."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(HERE.parent.parent),
        "PATH": "/nonexistent",  # no compiler is to be found, nor needed, but by what asks for
        "COMPILERS": os.environ.get("PATH", ""),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # nothing compiled before is found either
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    ranks = [
        start_module(module, str(folder), {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log)
        for rank, log in enumerate(_logs(world, folder))
    ]
    try:
        while any(rank.exitcode is None for rank in ranks):
            if any(rank.exitcode for rank in ranks):
                break
            if late([rank.pid for rank in ranks if rank.pid is not None]):
                asked = [rank for rank in ranks if rank.pid is not None and rank.exitcode is None]
                for rank in asked:
                    os.kill(rank.pid, signal.SIGQUIT)
                _wait_for_stacks(_logs(world, folder), len(asked))
                break
            time.sleep(0.05)
    finally:
        for rank in ranks:  # all at once: one whose peer has gone would end by an error of its own
            rank.kill()
        for rank in ranks:
            rank.join()
    return [rank.exitcode for rank in ranks]


def _wait_for_stacks(logs: list[Path], count: int) -> None:
    """Waits until so many ranks have written their threads' stacks; a rank that is stopped writes nothing."""
    until = time.monotonic() + patient(20)
    while sum("Current thread 0x" in log.read_text() for log in logs) < count and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.05)  # the lines of that thread, in one go


def _logs(world: int, folder: Path) -> list[Path]:
    return [folder / f"rank-{rank}.log" for rank in range(world)]
