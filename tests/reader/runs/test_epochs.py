"""Programs that restart their step count in each epoch: which parts are epochs, and the one part that they become."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from hpc_gpt.reader.lines.part import Fact, Failure, Part, PeakMemory, Place
from hpc_gpt.reader.lines.steps import StepTable
from hpc_gpt.reader.runs.epochs import is_next_epoch, join_epochs


def part(numbers: str = "1..5", dialect: str = "nanogpt", **more: Any) -> Part:
    """A part with lines of these steps, and of `loss` from the first value to the last, and of an `epoch`."""
    first, last = map(float, numbers.split(".."))
    columns = {"step": np.arange(first, last + 1)}
    for name in ("loss", "epoch"):
        if name in more:
            columns[name] = np.linspace(*more.pop(name), len(columns["step"]))
    steps = {dialect: StepTable(columns, count=len(columns["step"]))} if numbers != "1..0" else {}
    return Part("a.log", steps=steps, **more)


HERE = Place("a.log", 1)
PLAN = {"facts": {"steps_planned": [Fact(5, HERE, "nanogpt")]}}
FALLS, GOES_ON, BEGINS = {"loss": (9, 5)}, {"loss": (5.5, 4)}, {"loss": (8, 4)}


@pytest.mark.parametrize(
    ("one", "other", "is_next"),
    [
        (part(**PLAN), part(), True),
        (part("1..4", **PLAN), part("1..4"), False),
        (part(), part(), False),
        (part(**PLAN), part(started=True), False),
        (part(**PLAN), part(arguments={"lr": ("1", HERE)}), False),
        (part(totals={"runtime_s": Fact(9.0, HERE, "nanogpt")}, **PLAN), part(), False),
        (part(ends=[("done", HERE)], **PLAN), part(), False),
        (part("1..0", **PLAN), part(), False),
        (part(**PLAN), part("1..0"), False),
        (part(**PLAN), part("2..6"), False),
        (part("2..6", **PLAN), part("1..5"), False),
        (part("2..5", **PLAN), part("1..5"), True),
        (part("1..10"), part(**PLAN), True),  # two passes that were joined
        (part("5..5", **PLAN), part("5..5"), False),
        (part(**PLAN), part(dialect="litgpt"), False),
        # The epochs show it before the losses do, and these before the plan.
        (part(epoch=(1, 1)), part(epoch=(2, 2)), True),
        (part(epoch=(0, 1)), part(epoch=(1, 2)), False),
        (part(epoch=(1, 1), **FALLS), part(epoch=(1, 1), **GOES_ON), False),
        (part(epoch=(1, 1), **FALLS), part(**GOES_ON), True),
        (part(**FALLS), part(**GOES_ON), True),
        (part(**FALLS), part(epoch=(2, 2), **GOES_ON), True),
        (part(**FALLS, **PLAN), part(**BEGINS), False),
        (part(**FALLS), part(loss=(7.5, 4)), False),  # by the means of the first losses and of the last ones
        (part("1..2", loss=(9, 5)), part("1..2", **GOES_ON), True),
        # Losses of evaluations alone; one of them shows no fall.
        (part(evals=[(1, 9.0, 1), (5, 5.0, 2)]), part(evals=[(1, 5.5, 3)]), True),
        (part(evals=[(1, 9.0, 1), (5, 5.0, 2)], **PLAN), part(evals=[(1, 8.5, 3)]), False),
        (part(evals=[(1, float("nan"), 1), (5, 5.0, 2)]), part(evals=[(1, 5.5, 3)]), False),
        (part(evals=[(5, 5.0, 2)], **PLAN), part(evals=[(1, 9.5, 3)]), True),
        (part(evals=[(1, 9.0, 1), (5, 5.0, 2)], **PLAN), part(), True),
    ],
)
def test_which_part_is_the_next_epoch(one: Part, other: Part, is_next: bool) -> None:
    assert is_next_epoch(one, other) is is_next


def all_of(part: Part) -> dict[str, Any]:
    """What a part has, its steps as lists."""
    found = {each.name: getattr(part, each.name) for each in fields(part)}
    steps = {name: {key: each[key].tolist() for key in each.columns} for name, each in part.steps.items()}
    return {key: value for key, value in (found | {"steps": steps}).items() if value not in (None, {}, [], False)}


def epoch(begin: int, at: float, **more: Any) -> Part:
    places = [Place("a.log", begin + line) for line in range(10)]
    return part(
        "0..2" if begin < 50 else "0..1",
        first_line=begin,
        last_line=begin + 9,
        dialects={"nanogpt": 3},
        facts={"gpus": [Fact(8, places[0], "nanogpt")], "seq": [Fact(begin, places[0], "nanogpt")], **PLAN["facts"]},
        progress=[(1.0, 2.0, begin + 1)],
        evals=[(2.0, 3.5, begin + 2), (None, 3.4, begin + 3)],
        saves=[(2.0, 7.0, begin + 4), (None, None, begin + 5)],
        memory={0: PeakMemory(float(begin), None, places[6])},
        rank_params={"0": (float(begin), places[7])},
        timers_s={"forward": (begin / 100, begin)},
        failures=[Failure("error", f"KeyError: {begin}", places[8])],
        first_at=at,
        last_at=at + 5,
        left_out={"long lines": begin},
        **more,
    )


def test_two_epochs_become_one_part() -> None:
    one = epoch(10, 100.0)
    other = epoch(50, 200.0, totals={"runtime_s": Fact(9.0, Place("a.log", 59), "nanogpt")}, ends=[("done", HERE)])
    other.steps["deepspeed"] = StepTable({"step": np.array([1.0])})
    other.memory[1], other.rank_params["1"], other.timers_s["save"] = PeakMemory(1.0, 2.0, HERE), (5.0, HERE), (4.0, 2)
    other.facts["dp"] = [Fact(2, HERE, "nanogpt")]
    assert all_of(join_epochs(one, other)) == all_of(one) | {
        "last_line": 59,
        "dialects": {"nanogpt": 6},
        "facts": {"gpus": one.facts["gpus"], "seq": one.facts["seq"], "dp": other.facts["dp"]},
        # Steps are counted from 0: the next one is one later than the last.
        "steps": {"nanogpt": {"step": [0, 1, 2, 3, 4]}, "deepspeed": {"step": [4]}},
        "progress": [(1.0, 2.0, 11), (4.0, 2.0, 51)],
        "totals": other.totals,
        "evals": [(2.0, 3.5, 12), (None, 3.4, 13), (5.0, 3.5, 52), (None, 3.4, 53)],
        "saves": [(2.0, 7.0, 14), (None, None, 15), (5.0, 7.0, 54), (None, None, 55)],
        "memory": {0: other.memory[0], 1: other.memory[1]},  # the highest
        "rank_params": {"0": one.rank_params["0"], "1": other.rank_params["1"]},
        "timers_s": {"forward": (0.6, 60), "save": (4.0, 2)},
        "failures": [*one.failures, *other.failures],
        "ends": other.ends,
        "last_at": 205.0,
        "left_out": {"long lines": 60},
    }
    # A figure of a start gives way to one of a step, and each of two kinds of memory counts by itself.
    peaks = [PeakMemory(9.0, None, HERE, at_start=True), PeakMemory(4.0, 6.0, HERE), PeakMemory(3.0, 7.0, HERE)]
    pieces = [part("1..5", memory={0: peak}) for peak in peaks]
    assert join_epochs(pieces[0], pieces[1]).memory == {0: peaks[1]}
    assert join_epochs(pieces[1], pieces[2]).memory == {0: PeakMemory(4.0, 7.0, HERE)}
    # From 1 on, times of one of them alone, and a line of every second step.
    one, other = part("1..5", first_at=1.0, last_at=2.0), part("1..2")
    joined = join_epochs(one, other)
    assert joined.steps["nanogpt"]["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert (joined.first_at, joined.last_at) == (1.0, 2.0)
    assert join_epochs(other, one).first_at == 1.0
    one = Part("a.log", steps={"nanogpt": StepTable({"step": np.array([0.0, 2.0, 4.0])})})
    assert join_epochs(one, one).steps["nanogpt"]["step"].tolist() == [0, 2, 4, 6, 8, 10]
    bars = Part("a.log", progress=[(0.0, None, 1), (5.0, None, 2)])
    assert join_epochs(bars, bars).progress[2:] == [(5.0, None, 1), (10.0, None, 2)]
