"""What a dialect is made of: patterns, each for one kind of line, and pieces of regular expressions for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

# What a line that matches is about:
#   step      the figures of one optimizer step, or their mean over those since the line before; without a step's
#             number they belong to the steps that another dialect printed about there
#   more      further figures of the step in the same program's last line of steps, if it takes several lines to print
#             them; a figure that the step has is left as it is
#   progress  a bar or a counter that shows how far a run is: gives the curve, never `step_s`
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
    """One kind of line; the groups of its `regex` are named as in fields.py.

    `literal` is in every line that matches: a search for it is cheap, so `regex` is tried on few lines. A line may
    hold several matches. `keys` is for lines of `key: value | key: value`: the text after a match of `regex` is split
    at `separator`, and each key that is named there gives a field. `closed`: the separator also ends the last value,
    so a value without one was cut off and is not taken. `facts` hold if the pattern matches; those named in
    STEP_FIELDS go into the row of a step.
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
    """The lines of one program. `specimen` holds some, whole; `seen` says where they were seen. Tests read them.

    `settle` makes facts of the arguments that the program dumped: {argument: text} to {field: value}.
    `flags`: what a reader must know about this program's figures, in words; they go with every record from it.
    `last_resort`: it takes a line only if no other dialect matches it.
    """

    name: str
    patterns: tuple[Pattern, ...]
    specimen: str
    seen: str
    engine: str | None = None
    settle: Callable[[Mapping[str, str]], Mapping[str, str | int | float]] | None = None
    flags: tuple[str, ...] = ()
    last_resort: bool = False


# How programs print numbers, as pieces of regular expressions. Each is bounded, and none can match a text in two ways.
# A number that was cut off is a wrong number: a pattern asks for what comes after it, a unit or a separator. If a
# number ends a line, nothing shows whether it was cut.
INT = r"(?:\d{1,3}(?:,\d{3}){1,9}|\d{1,24})"  # 4915 or 7,208,960
NUMBER = rf"[-+]?(?:{INT}(?:\.\d{{0,24}})?(?:[eE][-+]?\d{{1,4}})?|nan|NaN|inf|Infinity)"
SHORT = r"[-+]?\d{1,24}(?:\.\d{1,24})?(?:[eE][-+]?\d{1,4})?[KMGBT]?"  # 11.5K, 85.8G, 1e-05
CLOCK = r"(?:\d{1,5} days?, )?(?:\d{1,6}:)?\d{1,4}:\d{2}"  # 13:54, 9:07:58
END = r"(?=\s*$)"
START = r"(?<![^\s\]:>])"  # of a line's own words: what launchers and loggers put before them ends so
# As START, for words that would also be found in the middle of other programs' lines: only tags, times and labels may
# come before.
LINE_START = r"^ {0,8}(?:\[[^\]\n]{1,64}\]:? ?|\d{4}-\d\d-\d\d[T ][\d:.,+Z]{8,24} |\d{1,7}: ){0,3} {0,8}"

# The last line of a Python traceback, `module.XError: words`. Failure dialects build their patterns from it: the
# exception's name and its words decide the class of a failure.
# What launchers put before it: `[rank3]: `, `[default3]:`, `[1,3]<stderr>:`, `12: `, `r6i4n5: `, `(worker pid=12) `, a
# time of day, glog's head, the bars of an ExceptionGroup. A label that matched is not tried in another way: a line of
# blanks costs nothing.
_LABEL = (
    r"(?:\[[^\[\]]{1,80}\](?:<std(?:err|out)>)?:? {0,4}"
    r"|\d{1,7}: {0,4}"
    r"|\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[\d.,+:Z]{0,20} {1,4}(?:- )?"
    r"|[EWIF]\d{4} \d\d:\d\d:\d\d[\d.]{0,12} {1,4}[^\]]{1,160}\] "
    r"|(?!rank|default)(?P<node>[a-z][a-z0-9-]{0,40}\d[a-z0-9.-]{0,40}): {1,4}"
    r"|\([^()]{1,80}\) "
    r"|what\(\): {1,4}"
    r"|[ |+]{1,16})"
)
EXCEPTION_START = rf"^(?>{_LABEL}){{0,5}}"
# What an exception's class is called; `ray.exceptions.RayTaskError(ValueError)` among them.
ANY_NAME = r"_?[A-Z]\w{1,60}(?:Error|Exception)(?:\([\w.]{1,80}\))?"


def raised(names: str, about: str = "") -> str:
    """The regex of a line that reports an exception of one of `names`, a regex, whose words hold one of `about`.

    >>> import re
    >>> re.search(raised("KeyError"), "[rank3]: KeyError: 'x'")["words"]
    "KeyError: 'x'"
    """
    words = rf"(?=.{{0,2000}}(?:{about}))" if about else ""
    module = r"(?:[A-Za-z_]\w{0,60}\.){0,8}"
    return rf"{EXCEPTION_START}{words}(?P<words>{module}(?:{names})(?::.{{0,400}}|\.?$))"
