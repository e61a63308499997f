"""Matches of the patterns of all dialects in a line, and a scan for the patterns that could match.

Only a few of some thousand patterns can match a line. The scan finds them for many lines and all patterns at once, by
the literal text that each pattern needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
from ahocorasick_rs import BytesAhoCorasick

from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.reader.lines.dialects import dialects
from hpc_gpt.reader.lines.fields import STEP_FIELDS, scaled, unit
from hpc_gpt.reader.lines.mentions import only_mentions
from hpc_gpt.reader.lines.named_figures import figure_spans
from hpc_gpt.reader.lines.pattern import LOSS, VALIDATION, Dialect, Pattern, head_of, needed_texts

LONGEST_TEXT = 1000  # characters of a value
# A program prints few steps, facts or failures on a line. The search for one pattern stops after this many matches, or
# goes on as long as the text that it looks at is short compared with the line: that bounds the time of a line.
MOST_MATCHES = 4
_MOST_LOOKED_AT = 6  # the most characters that a search may look at, per character of the line
_LEAST_LOOKED_AT = 2000  # each match counts as so many characters, as reading it takes time, too
_REACH = re.compile(r"\{\d*,(\d{3,})\}")  # the reach of a piece of a regex
_MOST_ARGUMENTS = 400  # of one pattern
_SHORT = 200  # a line with fewer characters has few places that begin like a match
_BEGIN = 3  # first characters of a literal, by which it is looked up in one line
# Finds the digits, or ranges of digits, that a regex asks for, and leaves out what only looks like one; and the
# assertions that something is not there.
_ASKED = re.compile(r"(\\.|\{[\d,]+\}|\(\?P<\w+>|0-9)|\d-\d|\d")
_NOT_THERE = re.compile(r"\(\?<?!(?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)")
# The mark at the end of a line that a program, or the width of a terminal, cut.
_CUT = re.compile(r"(?:…|(?<!\.)\.{3,})[\])}]?\s*$")


@dataclass(frozen=True)
class DialectPattern:
    """A pattern with its dialect. `number`: its place among all patterns."""

    dialect: Dialect
    pattern: Pattern
    number: int

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The regex of the pattern, compiled when a line first needs it."""
        return re.compile(self.pattern.regex)

    @cached_property
    def _head(self) -> re.Pattern[str] | None:
        head = self.pattern.head or head_of(self.pattern.regex)
        return re.compile(head) if head else None

    @cached_property
    def _texts(self) -> list[str]:
        """Texts that are in each line that matches: a search for them is cheaper than the regex."""
        return needed_texts(self.pattern.regex)

    @cached_property
    def _reaches(self) -> tuple[int, ...]:
        """The longest reach of each piece of the regex, in characters."""
        return (_LEAST_LOOKED_AT, *map(int, _REACH.findall(self.pattern.regex)))

    @cached_property
    def _loosened(self) -> re.Pattern[str] | None:
        """The regex with any digit where it asks for certain ones; None if neither it nor the literal asks for one."""

        def loosened(text: str) -> str:
            return _ASKED.sub(lambda match: match[1] or r"\d", text)

        regex = self.pattern.regex
        asked = _NOT_THERE.sub(lambda match: match[0] if loosened(match[0]) == match[0] else "", regex)
        asks = loosened(asked) != regex or not {*self.pattern.literal}.isdisjoint("0123456789")
        return re.compile(loosened(asked)) if asks else None

    def asks_digits(self, line: str) -> bool:
        """Whether a line like this one matches with certain digits only."""
        return self._loosened is not None and self._loosened.search(line) is not None

    def matches(self, line: str) -> list[re.Match[str]]:
        """The matches in a line; only the first ones if there are very many."""
        for text in self._texts:
            if text not in line:
                return []
        if self.pattern.regex[0] == "^":  # `search` would also try all other places
            return [match] if (match := self.regex.match(line)) else []
        matches: list[re.Match[str]] = []
        if len(line) <= _SHORT or self._head is None:
            for match in self.regex.finditer(line):
                matches.append(match)
                if len(matches) >= MOST_MATCHES and self._looks_at_too_much(len(matches), line):
                    break
            return matches
        tried, begin = 0, self._head.search(line)
        while begin is not None:
            tried += 1
            place = begin.start() + 1
            if match := self.regex.match(line, begin.start()):
                matches.append(match)
                place = max(place, match.end())
            # The generic pattern looks far ahead at each place of an unknown program's line, which rarely has a second
            # step.
            least = 1 if matches and self.dialect.last_resort else MOST_MATCHES // 2
            if tried >= least and self._looks_at_too_much(tried, line):
                break
            begin = self._head.search(line, place)
        return matches

    def _looks_at_too_much(self, times: int, line: str) -> bool:
        match self.pattern.kind:
            case "failure" | "traceback" | "end":
                return True
            case "argument":  # a dump has many on a line
                return times >= _MOST_ARGUMENTS
        most = _MOST_LOOKED_AT / 2 if self.dialect.last_resort else _MOST_LOOKED_AT
        return times * sum(min(reach, len(line)) for reach in self._reaches) > most * len(line)


RuleMatch = tuple[re.Match[str], DialectPattern]


@cache
def all_patterns() -> tuple[DialectPattern, ...]:
    """Every pattern of every dialect."""
    every = [(dialect, pattern) for dialect in dialects() for pattern in dialect.patterns]
    return tuple(DialectPattern(*pair, number) for number, pair in enumerate(every))


@cache
def patterns_by_literal() -> dict[str, dict[str, list[DialectPattern]]]:
    """{first _BEGIN characters of a literal: {literal: the patterns that need it}}; shorter literals are under ""."""
    by_begin: dict[str, dict[str, list[DialectPattern]]] = {"": {}}
    for rule in all_patterns():
        literal = rule.pattern.literal
        begin = literal[:_BEGIN] if len(literal) >= _BEGIN else ""
        by_begin.setdefault(begin, {}).setdefault(literal, []).append(rule)
    return by_begin


def _with_literal(line: str) -> list[DialectPattern]:
    """The patterns whose literals are in a line; a literal is searched only if its first characters are in it."""
    by_begin = patterns_by_literal()
    begins = {line[place : place + _BEGIN] for place in range(len(line) - _BEGIN + 1)} & by_begin.keys()
    likely = [by_begin[begin] for begin in ("", *begins)]
    return [rule for some in likely for literal, group in some.items() if literal in line for rule in group]


# The matches of the last lines with failures: all ranks print the same lines, and these match many patterns.
_failures_found: dict[str, list[RuleMatch]] = {}
_MOST_FAILURES = 64


def find(line: str, tried: Sequence[DialectPattern] | None = None) -> list[RuleMatch]:
    """The matches in a line, or in a piece of a line between carriage returns, without colours.

    `tried`: the patterns that may match, in the order of their numbers; None if they are not known.
    """
    if line in _failures_found:
        return _failures_found[line]
    if tried is None:
        wanted = sorted(_with_literal(line), key=lambda rule: rule.number)
    else:
        wanted = [rule for rule in tried if rule.pattern.literal in line]
    first = [rule for rule in wanted if not rule.dialect.last_resort]
    matches = [(match, rule) for rule in first for match in rule.matches(line)]
    if all(rule.pattern.kind == "progress" for _, rule in matches):  # a bar may share its line
        matches += [(match, rule) for rule in wanted if rule.dialect.last_resort for match in rule.matches(line)]
    if any(rule.pattern.kind in ("failure", "end") for _, rule in matches):
        matches = [pair for pair in matches if not _is_mention(line, *pair)]
        if len(_failures_found) >= _MOST_FAILURES:
            _failures_found.clear()
        _failures_found[line] = matches = _of_one_program(matches)
        return matches
    return _of_one_program(matches)


def _of_one_program(matches: list[RuleMatch]) -> list[RuleMatch]:
    """The matches, with steps of one dialect only: that of the match that begins first, then of the longest."""
    steps = [(match, rule) for match, rule in matches if rule.pattern.kind == "step"]
    if not steps:
        return matches
    _, winner = min(steps, key=lambda pair: (pair[0].start(), -pair[0].end()))
    return [pair for pair in matches if pair[1].pattern.kind != "step" or pair[1].dialect is winner.dialect]


def _is_mention(line: str, match: re.Match[str], rule: DialectPattern) -> bool:
    """Whether the line only mentions the failure or the end that the match names."""
    return rule.pattern.kind in ("failure", "end") and only_mentions(line, rule.pattern.literal, match.start())


# The loss in a line of a step whose pattern reads none: a program's variant prints it, too. A figure that ends the line
# may be cut, and -1 is no loss.
_LOSS_BY_SHAPE = re.compile(
    rf"(?i)(?:(?=[^\n]{{0,400}}?train(?:ing)?[_ /-]?loss)|(?![^\n]{{0,400}}\b(?:{VALIDATION})(?:\b|_)))"
    rf"[^\n]{{0,400}}?{LOSS}"
)


def field_spans(line: str, match: re.Match[str], pattern: Pattern) -> dict[str, tuple[int, int]]:
    """Returns (start, end) of each group that matched and of each figure that the names after the match give, by name.

    A value that touches the mark of a cut at the line's end, as in `loss=2.3…` or `loss=2.3...`, is left out.
    """
    spans = {name: match.span(name) for name, text in match.groupdict().items() if text is not None}
    if pattern.names:
        spans = figure_spans(line, match.end(), _end_of_record(line, match, pattern), pattern.names) | spans
    lacks_loss = pattern.kind == "step" and all(unit(name)[0] != "loss" for name in spans)
    lacks_loss = lacks_loss and line.lower().count("loss") == 1  # of several, this may be another one
    if lacks_loss and (loss := _LOSS_BY_SHAPE.match(line, match.start())) and _is_whole(line, *loss.span("loss")):
        spans["loss"] = loss.span("loss")
    if ("…" in line or "..." in line) and (cut := _cut_at(line)) is not None:
        return {name: span for name, span in spans.items() if span[1] < cut or name == "words"}
    return spans


def _end_of_record(line: str, match: re.Match[str], pattern: Pattern) -> int:
    """Where the figures of a match end: a line may hold several records."""
    ends = [line.find(pattern.until, match.end())] if pattern.until else []
    if line.count(pattern.literal) > 1 and (following := match.re.search(line, match.end())):
        ends.append(following.start())
    return min((end for end in ends if end >= 0), default=len(line))


def _is_whole(line: str, start: int, end: int) -> bool:
    return line[start] != "-" and end < len(line.rstrip())


@lru_cache(maxsize=4)
def _cut_at(line: str) -> int | None:
    """The place of the mark of a cut, None without one; cached, because a line may have very many matches."""
    mark = _CUT.search(line)
    return mark.start() if mark else None


def values_of(line: str, match: re.Match[str], pattern: Pattern) -> dict[str, float | str]:
    """The values of a match by field: figures in the units of the fields, and texts."""
    texts = {name: line[slice(*span)] for name, span in field_spans(line, match, pattern).items()}
    if pattern.kind == "timers":
        return dict(texts)
    stated = {name: float(value) for name, value in pattern.facts.items() if name in STEP_FIELDS}
    return stated | {figure[0]: figure[1] for name, text in texts.items() if (figure := scaled(name, text)) is not None}


def row_of(values: Mapping[str, float | str], at: float | None) -> dict[str, float]:
    """The row of a line of steps: its fields of STEP_FIELDS, and `at`, its time of day."""
    row = {name: value for name, value in values.items() if name in STEP_FIELDS and isinstance(value, float)}
    return row if at is None else {"at": at} | row


def float_of(values: Mapping[str, float | str], name: str) -> float | None:
    """The figure of a field, None without one."""
    value = values.get(name)
    return value if isinstance(value, float) else None


def cut_value(value: Any) -> Any:
    """The value; a text is cut and its secrets are hidden, because it may be written to disk."""
    return hide_secrets(value[:LONGEST_TEXT]) if isinstance(value, str) else value


# The prefixes that launchers and loggers put before a program's own text: colours, ranks, times of day.
_COLOURS = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\r\n]{0,256}(?:\x07|\x1b\\)"
_ANSI, ANSI = re.compile(_COLOURS), re.compile(_COLOURS.encode())
# torchrun's and deepspeed's tags, srun --label, Megatron's "[Rank 51]". The number is the rank; in `[default7]:` and in
# torchrun's tag with `--role HOST`, it is the rank within the node. In `3: [rank5]:` the first number is srun's task,
# which starts several ranks.
_ROLE = r"\[(?!rank|default|worker|trainer)(?:[a-z][a-z0-9-]{0,40}\d[\w.-]{0,80})"
# JAX's, after glog's prefix.
_JAX_TASK = r"[EWIF]\d{4} \d\d:\d\d:\d\d[\d.]{0,20} {1,4}[^\]\n]{1,160}\] \[task (\d{1,7})(?: on ([\w.-]{1,80}))?\]"
_ON_TASK = re.compile(r"^\s*" + _JAX_TASK)
_RANK = re.compile(
    r"^\s*(?:(?:\S{1,64}: {1,2})?\[rank(\d{1,7})\][: ]|(\d{1,7}): |\[default(\d{1,4})\]:|"
    r"\[?[Rr]ank ?[:=]?(\d{1,7})\]?[: ]|\[XTuner\]\[RANK (\d{1,7})\]|"
    r"[^=\n]{0,60}\b(?:task|rank|process)=(\d{1,7}) (?=(?:node|host)=)|" + _ROLE + r":(\d{1,3})\]:|" + _JAX_TASK + ")"
)
_KEYED_HOST = re.compile(
    r"(?:[^=\n]{0,60}\b(?:task|rank|process)=\d{1,7} (?:node|host)=|\([^()\n]{1,60} pid=\d{1,9}, ip=)([\w.-]{1,80})[ )]"
)
_NCCL_HOST = re.compile(r"(?:^|[\s\]:>])([A-Za-z][\w.-]{0,80}):\d{1,9}:\d{1,9} \[\d{1,4}\] ")
ROLE_HOST = re.compile(r"^\s{0,8}" + _ROLE.replace("(?:[a-z]", "([a-z]") + r":\d{1,3}\]:")
_AT = re.compile(
    r"(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[ T](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
    r"|(?P<us_month>\d\d)/(?P<us_day>\d\d)/(?P<us_year>\d{4}) (?P<us_clock>\d\d:\d\d:\d\d)"
)
# glog's time, from C++ and torch.distributed: without a year; PyTorch's C++ prints the month without its zero.
_GLOG = re.compile(r"(?:^|[\s\]:\[])[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?= )")
OF_NO_YEAR = 366 * 86400.0
_OF_A_MOMENT = ("year", "month", "day", "hour", "minute", "second")


def without_colours(text: str) -> str:
    """The text without ANSI escape sequences."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def rank_of(line: str) -> int | None:
    """The rank that a line is labelled with, None without a label.

    >>> rank_of("[default7]: iteration"), rank_of("12: loss"), rank_of("3: [rank5]:[titan] x"), rank_of("loss 3")
    (7, 12, 5, None)
    """
    span = rank_span(line)
    return int(line[slice(*span)]) if span else None


def node_of(line: str) -> str | None:
    """The node in the prefix of NCCL's lines, `host:pid:tid [GPU]`, of torchrun's, `[host:local rank]:`, of a
    logger's, `rank=3 node=n1`, or of Ray's, `(Worker pid=7, ip=10.0.0.1)`; None without one.

    >>> node_of("[rank0]:n1:2914:2914 [0] NCCL WARN x"), node_of("12:30:00 [0] x"), node_of("[gpu187:2]:KeyError: 1")
    ('n1', None, 'gpu187')
    """
    if task := _ON_TASK.match(line):
        return task[2]
    match = ROLE_HOST.match(line) or _KEYED_HOST.match(line)
    match = match or (_NCCL_HOST.search(line, 0, 200) if "] " in line else None)
    return match[1] if match else None


def rank_span(line: str) -> tuple[int, int] | None:
    """Returns (start, end) of the rank in a line's label, None without one."""
    match = _RANK.match(line)
    return next((match.span(index) for index in range(1, 9) if match[index] is not None), None) if match else None


def time_of(line: str) -> float | None:
    """Epoch seconds of the first time of day in a line, taken as UTC; None without a valid one.

    >>> time_of("[2021-05-25 22:29:50,309] [INFO]")
    1621981790.309
    """
    spans = time_spans(line)
    if not spans:
        return None
    year, month, day, hour, minute, second = (int(line[slice(*spans[name])]) for name in _OF_A_MOMENT)
    try:
        moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    return moment.timestamp() + (float(f"0.{line[slice(*spans['part'])]}") if "part" in spans else 0.0)


@lru_cache(maxsize=4)  # a line may have many
def time_of_failure(line: str) -> float | None:
    """Epoch seconds as in `time_of`; for glog's times, which have no year, seconds since the start of the year.

    >>> time_of_failure("[rank7]:[E102 00:00:36.5 ProcessGroupNCCL.cpp:1743] x"), time_of_failure("E1399 00:00:00.5 x")
    (86436.5, None)
    """
    if (at := time_of(line)) is not None or (match := _GLOG.search(line, 0, 200)) is None:
        return at
    month, day, hour, minute, second = (int(number) for number in match.groups()[:5])
    try:
        moment = datetime(1970, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    return moment.timestamp() + float(f"0.{match[6] or 0}")


def time_spans(line: str) -> dict[str, tuple[int, int]] | None:
    """Returns (start, end) of each number of the first time of day: _OF_A_MOMENT, and `part` of a second if printed."""
    match = _AT.search(line)
    if match is None:
        return None
    us = "" if match["year"] else "us_"
    spans = {name: match.span(f"{us}{name}") for name in _OF_A_MOMENT[:3]}
    clock = match.start(f"{us}clock")
    spans |= {name: (clock + 3 * place, clock + 3 * place + 2) for place, name in enumerate(_OF_A_MOMENT[3:])}
    return spans | {"part": match.span("part")} if match["part"] else spans


# Every digit of a line and of a literal is replaced with 0, so that lines that differ in digits only are the same.
ZEROS = bytes(0x30 if 0x30 <= byte <= 0x39 else byte for byte in range(256))


class LiteralScan:
    """Searches many lines for the literals of patterns; all digits count as 0."""

    def __init__(self, patterns: Sequence[DialectPattern]) -> None:
        self.groups: dict[bytes, list[DialectPattern]] = {}
        for rule in patterns:
            self.groups.setdefault(rule.pattern.literal.encode().translate(ZEROS), []).append(rule)
        self._rules = list(self.groups.values())
        self._search = BytesAhoCorasick(self.groups)

    def candidates(self, lines: Sequence[bytes]) -> dict[int, list[DialectPattern]]:
        """{index of a line: the patterns whose literal is in it, by number}; all digits of the lines are 0."""
        found = np.array(self._search.find_matches_as_indexes(b"\n".join(lines), overlapping=True), np.int64)
        ends = np.cumsum(np.fromiter(map(len, lines), np.int64, len(lines)) + 1)
        numbers, starts, _ = found.reshape(-1, 3).T
        pairs = np.unique(np.searchsorted(ends, starts, side="right") * len(self._rules) + numbers)
        by_line: dict[int, list[DialectPattern]] = {}
        for line, number in zip(*(each.tolist() for each in np.divmod(pairs, len(self._rules))), strict=True):
            by_line.setdefault(line, []).extend(self._rules[number])
        for patterns in by_line.values():
            patterns.sort(key=lambda rule: rule.number)
        return by_line


@cache
def literal_scan() -> LiteralScan:
    """The scan for the literals of all patterns of all dialects."""
    return LiteralScan(all_patterns())
