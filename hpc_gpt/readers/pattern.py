"""What a dialect is made of: patterns, each for one kind of line, with groups named as in fields.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

# What a line that matches is about:
#   step      the figures of one optimizer step, or their mean over those since the line before; without a step's
#             number they belong to the steps that another dialect printed about there
#   more      further figures of the step that the same program's line of steps before told of, where it takes several
#             lines to say them; a figure that the step has is left as it is
#   progress  a bar or a counter that tells how far a run is: gives the curve, never `step_s`
#   total     what a program sums up at its end: `runtime_s` and the like
#   eval      an evaluation's loss
#   save      a checkpoint was written
#   memory    peak memory of a rank
#   timers    milliseconds of a step's parts: `value` with `name: ms | name: ms`, or `key` and `value` of one
#   fact      what the run is: sizes, layout, batch, versions
#   argument  one line of a dump of arguments: groups `key` and `value`
#   start     a program starts: what follows is another attempt, or another run
#   failure   something went wrong: `ended` says of which class
#   end       a program ended as it should, or its scheduler says how
Kind = Literal[
    "step",
    "more",
    "progress",
    "total",
    "eval",
    "save",
    "memory",
    "timers",
    "fact",
    "argument",
    "start",
    "failure",
    "end",
]


@dataclass(frozen=True)
class Pattern:
    """One kind of line.

    `literal` stands in every line that matches: a search for it is cheap, so `regex` is tried on few lines. A line may
    hold several matches. `keys` is for lines of `key: value | key: value`: what follows a match of `regex` is parted
    at `separator`, and each key that is named there gives a field. `closed`: the separator ends each of them too, so
    what follows the last one is cut off. `facts` are settled by any match; those named in STEP_FIELDS go into the row
    of a step.
    """

    kind: Kind
    literal: str
    regex: str
    keys: Mapping[str, str] = field(default_factory=dict)
    separator: str = "|"
    closed: bool = False
    facts: Mapping[str, str | int | float] = field(default_factory=dict)
    ended: str | None = None  # the class of state.ENDED that a failure or an end means
    echo: bool = False  # a failure that another one brought about, on this rank or elsewhere: never the first cause


@dataclass(frozen=True)
class Dialect:
    """The lines of one program. `specimen` holds some, whole, with where they were seen; tests read them.

    `settle` makes facts of the arguments that the program dumped: {argument: text} to {field: value}.
    `flags`: what a reader must know of this program's figures, in words; they go with every record from it.
    `last_resort`: a line is its only where no other dialect says anything of it.
    """

    name: str
    patterns: tuple[Pattern, ...]
    specimen: str
    seen: str
    engine: str | None = None
    settle: Callable[[Mapping[str, str]], Mapping[str, str | int | float]] | None = None
    flags: tuple[str, ...] = ()
    last_resort: bool = False
