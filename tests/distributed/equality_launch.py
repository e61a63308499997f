"""A launch of ranks that runs one case after the other, and goes on behind one that fails."""

import json
import os
import pickle
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.equality_cases import Case
from tests.distributed.equality_worker import Plan
from tests.distributed.ranks import output_of, run_ranks

# The first compiled case took 181 s on two cores with six times the work.
_STALLED_S = 900.0


@dataclass
class Launch:
    """What the ranks of one world size left, by the name of the case or scenario."""

    folder: Path
    numbers: dict[str, int]
    failures: dict[str, str]
    seconds: float

    def output(self, name: str) -> str:
        """What the ranks printed meanwhile."""
        return "".join(file.read_text() for file in sorted(self.folder.glob(f"{self.numbers[name]}.output-*")))

    def figures(self, name: str) -> Any:
        """What it gave; fails with the ranks' own words where it failed."""
        if name in self.failures:
            pytest.fail(f"{name}\n{self.failures[name]}\n{self.output(name)[-3000:]}", pytrace=False)
        return json.loads((self.folder / f"{self.numbers[name]}.json").read_text())

    def weights(self, case: Case) -> dict[str, Tensor]:
        """The whole model's after the case's last step."""
        weights: dict[str, Tensor] = torch.load(self.folder / f"{self.numbers[case.name]}.pt")
        return weights


def run_launch(world: int, cases: Iterable[Case], scenarios: Iterable[str], folder: Path) -> Launch:
    """Runs all of them in one start of the ranks; in one more for each that takes a rank with it."""
    plan = Plan(tuple(cases), tuple(scenarios), os.environ.get("PATH", ""))
    names = plan.names()
    assert len(set(names)) == len(names)
    started = time.monotonic()
    (folder / "plan.pickle").write_bytes(pickle.dumps(plan))
    failures: dict[str, str] = {}
    begin = 0
    while begin < len(names):
        (folder / "begin").write_text(str(begin))
        if not any(run_ranks("tests.distributed.equality_worker", world, folder, _Stall(folder))):
            break
        lost = next((at for at in range(begin, len(names)) if not _came(folder, at, world)), len(names) - 1)
        failures[names[lost]] = f"a rank died or stood still\n{output_of(world, folder, 2000)}"
        begin = lost + 1
    for number, name in enumerate(names):
        said = sorted(folder.glob(f"{number}.failed-*"))
        if said:
            texts = dict.fromkeys(file.read_text() for file in said)
            failures[name] = "\n".join(texts)
    numbers = {name: number for number, name in enumerate(names)}
    return Launch(folder, numbers, failures, time.monotonic() - started)


def _came(folder: Path, number: int, world: int) -> bool:
    """Whether the ranks went on behind this one: it gave a result, or failed on all of them."""
    failed = len(list(folder.glob(f"{number}.failed-*")))
    return failed == world or ((folder / f"{number}.json").exists() and not failed)


class _Stall:
    """Whether nothing new has been written for long."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.since = folder, 0, time.monotonic()

    def __call__(self) -> bool:
        files = sum(1 for _ in self.folder.iterdir())
        if files != self.files:
            self.files, self.since = files, time.monotonic()
        return time.monotonic() - self.since > _STALLED_S
