"""The dialect contract: patterns for kinds of lines, and pieces of regular expressions.

A group of a pattern has the name of the field it gives, with its unit if that differs from the field's own: `step_ms`
gives `step_s` (`fields`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from hpc_gpt.reader.lines.fields import TEXT_FIELDS, Fields

# The kinds of matching lines:
#   step      the figures of one optimizer step, or their mean over the steps since the line before; without a step
#             number they belong to the step that another dialect prints next
#   more      further figures of the last step, for programs that print a step on several lines; a figure that the step
#             already has stays
#   progress  a bar or a counter that shows how far a run is: gives the curve, and a Trainer's `step_s`
#   total     a sum at the program's end: `runtime_s` and the like
#   eval      an evaluation's loss
#   save      a checkpoint was written
#   memory    peak memory of a rank
#   timers    milliseconds of the parts of a step: `value` with `name: ms | name: ms`, or `key` and `value` of one
#   fact      what the run is: sizes, layout, batch, versions
#   argument  one line of a dump of arguments: groups `key` and `value`
#   start     a program starts: another attempt, or another run, follows
#   failure   a failure of the class `ended`
#   traceback the next line of its program that is not indented names an exception
#   end       a program ended normally, or its scheduler says how it ended
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
    "traceback",
    "end",
]


@dataclass(frozen=True)
class NamedFigure:
    """A figure that a name gives: its field, as a group of a pattern is named, and its `unit` as printed after it.

    `ends_line`: it may end its line, in some programs only with so many `decimals`: one with fewer was cut.
    `is_positive`: below 0 it stands for none.
    """

    field: str
    unit: str
    ends_line: bool
    decimals: int | None
    is_positive: bool


FigureNames = Mapping[str, tuple[NamedFigure, ...]]
_PLAIN = str.maketrans(" -123456789", "__000000000")
_ROW = re.compile(r"(\w+)(\+?)(\$?)(\d?)(?:\[([^\]]+)\])?(?:=(\S*))?")


def figure_names(rows: str) -> FigureNames:
    """The table {name: the figures that it may give} of rows between blanks, each `field[unit]=name|name`.

    In a name, a hyphen, a blank and `_` are the same, and so are all digits. Without `=name` the field is the name; an
    empty one is for a figure without a name. Behind the field, `+` says that a figure below 0 is none, `$` that it may
    end its line, `$4` that it then has four decimals. A figure gives the first field that it fits.

    >>> [(name, of.field, of.unit) for name, every in figure_names("loss$ step_ms[ms]=dt|time").items() for of in every]
    [('loss', 'loss', ''), ('dt', 'step_ms', 'ms'), ('time', 'step_ms', 'ms')]
    """
    table: dict[str, tuple[NamedFigure, ...]] = {}
    for row in rows.split():
        match = _ROW.fullmatch(row)
        assert match, f"{row} is no row of a figure"
        field, positive, end, decimals, of_unit, names = match.groups()
        figure = NamedFigure(field, of_unit or "", bool(end), int(decimals) if decimals else None, bool(positive))
        for name in (field if names is None else names).split("|"):
            table[plain_name(name)] = (*table.get(plain_name(name), ()), figure)
    return table


@lru_cache(maxsize=4096)
def plain_name(name: str) -> str:
    """A name as tables of figures have it: hyphens and blanks as `_`, digits as 0."""
    return name.translate(_PLAIN)


@dataclass(frozen=True)
class Pattern:
    """One form of a line; the groups of its `regex` are named as in UNITS and STEP_FIELDS.

    `literal` is in every line that matches, by default the longest text of `regex` outside of brackets: a search for it
    is cheap, so `regex` is tried on few lines. A literal of seven characters or more is found fastest. A line can have
    several matches. `names`: what the names and figures after a match, and before the text `until`, give (`figures`).
    `facts` are true if the pattern matches; those named in STEP_FIELDS go into the row of a step.
    """

    kind: Kind
    regex: str
    literal: str = ""
    names: FigureNames = field(default_factory=dict)
    until: str = ""
    facts: Mapping[str, str | int | float] = field(default_factory=dict)
    ended: str | None = None  # the class of failures.ENDED that a failure or an end means
    echo: bool = False  # another failure, on this rank or elsewhere, caused this one: never the first cause
    own: bool = False  # many programs print such a line: it counts only after a line that shows the program
    # Many programs print such a line: it does not show the program. A weak total counts only beside others, a weak end
    # only after steps.
    weak: bool = False
    to_do: str = ""  # the cure of this failure, if the advice of its class says less
    head: str = ""  # a regex for the begin of a match, if `head_of` finds none: only places that match it are tried

    def __post_init__(self) -> None:
        if not self.literal:
            object.__setattr__(self, "literal", literal_of(self.regex))


# A letter of the private use area stands for a punctuation mark that a regex escapes.
_ASIDE = 0xE000


def literal_of(regex: str) -> str:
    """The longest text of a regex outside of brackets, which is in every line that matches.

    >>> literal_of(r"\\bvalidate step: {1,8}(?P<step>\\d{1,12}) \\(done\\)")
    'validate step:'
    """
    longest = max(_texts_of(regex), key=len)
    assert len(longest) > 1, f"no text stands outside of brackets in {regex}: name a literal"
    return longest


def _texts_of(regex: str) -> list[str]:
    """The texts of a regex outside of brackets, all of which are in every line that matches; some are empty."""
    text = re.sub(r"\\(.)", lambda match: "\0" if match[1].isalnum() else chr(_ASIDE + ord(match[1])), regex)
    text, groups = re.sub(r"\[[^\]]*\]", "\0", text), 1
    while groups:
        text, groups = re.subn(r"\([^()]*\)(?:[?*+]|\{[^}]*\})*", "\0", text)
    assert not {"(", ")"} & {*text}, f"{regex} is no complete regex"
    text = re.sub(r".(?:[?*+]|\{[^}]*\})\??", "\0", text)
    assert "|" not in text, f"{regex} has several forms: name a literal"
    assert not regex.startswith("(?i"), f"{regex} has letters of both cases: name a literal"
    texts = re.split(r"[\0.^$]", text)
    return [re.sub("[\ue000-\ue0ff]", lambda match: chr(ord(match[0]) - _ASIDE), text) for text in texts]


def head_of(regex: str) -> str:
    """The piece of a regex before its first lookahead, which finds the places where a match may begin; empty if the
    piece has no text, or is in a group.

    >>> head_of(r"\\bstep (?P<step>\\d{1,12}),(?=[^\\n]{0,400} loss: )")
    '\\\\bstep (?P<step>\\\\d{1,12}),'
    """
    head = re.split(r"\(\?[=!]", regex)[0]
    return head if any(len(text) > 1 for text in _texts_if_complete(head)) else ""


def needed_texts(regex: str) -> list[str]:
    """The texts of a regex outside of brackets, also in a group `words` at its end: a line without one of them does not
    match. No text if the regex has several forms.

    >>> needed_texts(r"^(?:a|b)? \\brank \\d{1,7}: (?P<words>(?:(?<!\\S)\\S{0,80} ?)?watchdog got stuck.{0,300} on x)")
    [' ', 'rank ', ': ', 'watchdog got stuck', ' on x']
    >>> needed_texts(r"one (?P<step>\\d)|another form")
    []
    """
    before, _, words = regex.partition("(?P<words>")
    if words.endswith(")") and _texts_if_complete(before):
        regex = before + words[:-1]
    return [text for text in _texts_if_complete(regex) if text]


def _texts_if_complete(piece: str) -> list[str]:
    """The texts of a piece of a regex; none if its brackets are not closed, or it has several forms."""
    try:
        return _texts_of(piece)
    except AssertionError:
        return []


def failure(ended: str, literal: str, regex: str, echo: bool = False) -> Pattern:
    """The pattern of a failure of the class `ended` (failures.ENDED). Without a group `words` its message is the match
    of `regex` and the text after it."""
    regex = regex if "(?P<words>" in regex else rf"(?P<words>(?:{regex}).{{0,300}})"
    return Pattern("failure", regex, literal, ended=ended, echo=echo)


def echo(ended: str, literal: str, regex: str) -> Pattern:
    """The pattern of an echo: a failure that another failure causes."""
    return failure(ended, literal, regex, echo=True)


@dataclass(frozen=True)
class Dialect:
    """The lines of one program. tests/reader/specimens has a file of its name with lines in this form.

    `interpret` turns the arguments that the program dumped into fields: {argument: text} to {field: value}.
    `flags`: notes that a reader of this program's figures needs; every record from it carries them.
    `last_resort`: it takes a line only if no other dialect matches it. `dtype`: the data type of the program's matrix
    products unless its log says otherwise.
    """

    name: str
    patterns: tuple[Pattern, ...]
    engine: str | None = None
    interpret: Callable[[Mapping[str, str]], Fields] | None = None
    flags: tuple[str, ...] = ()
    last_resort: bool = False
    dtype: str | None = None


# Pieces of regular expressions for printed numbers. Each is bounded, and none can match a text in two ways.
# A number that was cut off is wrong: so a pattern requires the unit or separator after it. If a number ends its line,
# nothing shows whether it was cut.
INT = r"(?:\d{1,3}(?:,\d{3}){1,9}|\d{1,24})"  # 4915 or 7,208,960
NUMBER = rf"[-+]?(?:{INT}(?:\.\d{{0,24}})?(?:[eE][-+]?\d{{1,4}})?|[nN][aA][nN]|[iI][nN][fF](?:inity)?)"
STEP = r"(?P<step>\d{1,12})"
OF_STEPS = r"/(?P<steps_planned>\d{1,12})"
SHORT = r"[-+]?\d{1,24}(?:\.\d{1,24})?(?:[eE][-+]?\d{1,4})?[KMGBT]?"  # 11.5K, 85.8G, 1e-05
CLOCK = r"(?:\d{1,5} days?, )?(?:\d{1,6}:)?\d{1,4}:\d{2}"  # 13:54, 9:07:58
END = r"(?=\s*$)"
START = r"(?<![^\s\]:>])"  # matches where a program's own text starts: the prefixes of launchers and loggers end so
# Like START, for texts that also occur in the middle of other programs' lines: only tags, times and labels can precede.
# pdsh and its like put the host before a line, Ray the actor. `epoch3` is no host.
_HOST = (
    r"(?!(?:epoch|fold|stage|phase|step|iter|task|seed|round|train|val|test|eval|part|chunk|shard|split|layer|batch|level"
    r"|trial|run|exp|model|rank|default))[a-z][a-z0-9-]{0,40}\d[a-z0-9.-]{0,40}|\d{1,3}(?:\.\d{1,3}){3}|localhost"
)
LINE_START = (
    r"^ {0,8}(?:\[[^\]\n]{1,64}\]:? ?|\d{4}-\d\d-\d\d[T ][\d:.,+Z]{8,24} |\d{1,7}: "
    rf"|(?:{_HOST}): {{1,4}}|\(\w{{1,60}} pid=\d{{1,9}}(?:, ip=[\d.]{{7,15}})?\) {{0,4}}){{0,3}} {{0,8}}"
)

# A loss as any program may name it.
IS = r"(?:['\"]? ?[:=] {0,8}| {1,8})"
# `9,8765` has a decimal comma; `9,876` may be nine thousand, and is read so where that is possible.
DECIMAL = r"[-+]?\d{1,24},(?!\d{3}(?!\d))\d{1,24}(?:[eE][-+]?\d{1,4})?"
ANY_NUMBER = rf"(?:{DECIMAL}|{NUMBER})"
AFTER = r"(?=[\s,;|)\]}]|$)(?![.,]\d)"
VALIDATION = "val|valid|validate|validation|eval|evaluation|test|dev"
_OTHER_LOSS = "".join(
    rf"(?<!{word}[ _/-])" for word in (*VALIDATION.split("|"), "best", "aux", "avg", "min", "ema", "balancing")
)
ANY_LOSS = rf"(?=[tcl])(?<![./]){_OTHER_LOSS}(?<![a-z])(?:train(?:ing)?[_ /-])?c?loss{IS}"
LOSS = rf"{ANY_LOSS}(?P<loss>{DECIMAL}|(?!\d{{1,3}},\d{{3}}\b(?!\.)){NUMBER}){AFTER}(?! ?(?:bp|bits?\b))"

FIELD_END = r"(?=[\s,;|)\]}%])"


def later(name: str, group: str, end: str = FIELD_END, number: str = NUMBER, within: str = r"[^\n]{0,1000}?") -> str:
    """An optional lookahead for a figure after `name`, a regex that includes the separator: fields are found in any
    order, with others between."""
    return rf"(?=(?:{within}{name}(?P<{group}>{number}){end})?)"


def has(*texts: str) -> str:
    """A lookahead per regex that a line must contain, in any order: they show which program's line it is."""
    return "".join(rf"(?=[^\n]{{0,400}}?{text})" for text in texts)


def figures(begin: str, shows: str, rows: str, kind: Kind = "step", **options: Any) -> Pattern:
    """The pattern of a line of names and figures, in any order after `begin`, a regex.

    `shows`: a text of each such line that few other programs print. `rows`: what the names give, as in `figure_names`.
    `options`: as in Pattern.

    >>> figures(r"\\biter (?P<step>\\d{1,12}):", ", time ", "loss$ step_ms[ms]=time").literal
    ', time '
    """
    return Pattern(kind, begin, shows, names=figure_names(rows), **options)


def line(kind: Kind, text: str, begin: str | None = None, **options: Any) -> Pattern:
    """The pattern of a line as printed, with its fields in braces: each a number, or text for one of TEXT_FIELDS.

    `{}` is a number that is not read. The last number ends the line. `begin`: what may precede, START or LINE_START;
    without it, anything but a letter. `options`: as in Pattern.

    >>> import re
    >>> found = re.search(line("fact", "of {params_billions} B, {} tied").regex, "parameters of   1.3 B, 0.1 tied")
    >>> found and found.groupdict()
    {'params_billions': '1.3'}
    """
    pieces = re.split(r"\{(\w*)\}", text)
    regex = (r"\b" if text[0].isalnum() else "") if begin is None else begin
    for plain, field_name in zip(pieces[::2], [*pieces[1::2], None], strict=True):
        regex += re.escape(plain)
        if field_name is not None:
            value = r"[^\n]{1,80}?" if field_name in TEXT_FIELDS else NUMBER
            regex += rf" {{0,40}}(?P<{field_name}>{value})" if field_name else rf" {{0,40}}{NUMBER}"
    return Pattern(kind, regex if pieces[-1] else regex + END, max(pieces[::2], key=len), **options)


def settings(
    form: str, fields: Mapping[str, str], begin: str | None = None, kind: Kind = "fact", **options: Any
) -> tuple[Pattern, ...]:
    """A `line` per entry of `fields`, {name: field}: `form` with these in place of NAME and FIELD.

    >>> [each.literal for each in settings("--> NAME=FIELD", {"context_length": "seq", "batch": "micro_batch"})]
    ['--> context_length=', '--> batch=']
    """
    return tuple(
        line(kind, form.replace("NAME", name).replace("FIELD", f"{{{field}}}"), begin, **options)
        for name, field in fields.items()
    )


# The last line of a Python traceback, `module.XError: message`. Failure dialects build their patterns from it: the
# name and the message of the exception decide the class of a failure.
# The prefixes of launchers: `[rank3]: `, `[default3]:`, `[1,3]<stderr>:`, `12: `, `r6i4n5: `, `(worker pid=12) `, a
# time of day, glog's prefix, the bars of an ExceptionGroup; those of containers, `… stderr F ` and `trainer-1  | `; and
# those of loggers, `ERROR 05-07 02:14:18 [core.py:396] `, `root - ERROR - ` and `rank=3 node=n1 `. The group is atomic:
# a line of blanks costs nothing.
_LABEL = (
    r"(?:\[[^\[\]]{1,80}\](?:<std(?:err|out)>)?:? {0,4}"
    r"|\d{1,7}: {0,4}"
    r"|\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[\d.,+:Z]{0,20} {1,4}(?:- )?"
    r"|[EWIF]\d{4} \d\d:\d\d:\d\d[\d.]{0,20} {1,4}[^\]]{1,160}\] "
    r"|[EWIF] (?=\d{4}-)|(?:task|rank|process|node|host)=[\w.-]{1,80} {1,4}"
    r"|(?!rank|default)(?P<node>[a-z][a-z0-9-]{0,40}\d[a-z0-9.-]{0,40}|\d{1,3}(?:\.\d{1,3}){3}): {1,4}"
    r"|[\w.-]{1,64}: (?=\[(?:rank|default)\d)"
    r"|\([^()]{1,80}\) "
    r"|what\(\): {1,4}"
    r"|std(?:err|out) [FP] |[a-z][\w.-]{0,60}[-_]\d{1,4} {1,8}\| {1,4}"
    r"|(?:ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[\w./]{1,80}:\d{1,6}\] |[\w.]{1,60} - (?:ERROR|CRITICAL) - "
    r"|[ |+]{1,16})"
)
EXCEPTION_START = rf"^(?>{_LABEL}){{0,5}}"
# Names of exception classes, `ray.exceptions.RayTaskError(ValueError)` among them.
ANY_NAME = r"_?[A-Z]\w{1,60}(?:Error|Exception)(?:\([\w.]{1,80}\))?"


def raised(names: str, about: str = "") -> str:
    """The regex of a line that reports an exception of one of `names`, a regex, whose message matches `about`.

    >>> import re
    >>> re.search(raised("KeyError"), "[rank3]: KeyError: 'x'")["words"]
    "KeyError: 'x'"
    """
    name = rf"(?:[A-Za-z_]\w{{0,60}}\.){{0,8}}(?:{names})"
    # The name first: few lines have one, and the search for the message is long.
    words = rf"(?={name}(?::|\.?$))(?=.{{0,2000}}(?:{about}))" if about else ""
    return rf"{EXCEPTION_START}{words}(?P<words>{name}(?::.{{0,700}}|\.?$))"
