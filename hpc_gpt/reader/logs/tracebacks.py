"""The last line of each traceback, whatever the name of its exception, and a message that begins on the next line.

Patterns know an exception by the end of its name. `queue.Empty` and `zmq.error.Again` are exceptions by their place:
the first line after `Traceback (most recent call last)` that is not indented. Ranks print at the same time, so each
label of lines (`[rank3]: `, `n7: `, none) has a traceback of its own; what is before `Traceback` is the label.
"""

import re
from dataclasses import dataclass

from hpc_gpt.core.ends.failures import meaning
from hpc_gpt.reader.logs.matches import find
from hpc_gpt.reader.pattern import Pattern

_FOREIGN = 20  # lines of others that may be between those of a traceback
_MOST_OPEN = 64
LONGEST_FILE = 300  # characters of the name of a source
_CHAINED = 3  # lines from an exception to Python's words that another one was raised
LAST_FRAME = 8  # lines from the last `File "…"` of a traceback to its exception: the source, and marks below it
INDENT = " \t"
# What launchers put before each line, none of which is a logger's level, a message or a progress bar.
_LABEL = re.compile(r"(?:(?:\([^()]{1,80}\)|\[[^\[\]]{1,80}\]\S{0,12}|[^\s\[\]()]{1,64}[:>|])\s{0,8}){0,6}")
_NO_LABEL = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|WARN|WARNING|INFO|DEBUG|[Ee]rror|[Ee]xception)\b|\d%\||/s\]")
_AFTER_BAR = re.compile(r"\[(?:rank|default)\d{1,7}\]:? ?$")
_NODE = re.compile(r"(?:\d{1,7}: )?([a-z][a-z0-9-]{0,40}\d[a-z0-9.-]{0,40}|\d{1,3}(?:\.\d{1,3}){3}): ")
_TIME = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d(?:[.,]\d{1,9})?")
# An exception has the name of its module before its own, unless it is Python's.
_EXCEPTION = re.compile(
    r"((?:[A-Za-z_]\w{0,60}\.){1,8}(?:\w{0,30}[A-Z]\w{0,60}|\w{0,20}error|timeout)|_?[A-Z]\w{1,60}(?:Error|Exception)"
    r"|SystemExit|StopIteration|StopAsyncIteration|GeneratorExit|(?:Base)?ExceptionGroup|[A-Z]\w{0,40}Warning)(:.*)?$"
)
_NO_FAILURE = re.compile(r"SystemExit(?:: (?:0|None)?)?$")
_ANOTHER = re.compile(r"Traceback \(most|During handling of|The above exception")
_RULE = re.compile(r"\s*[=*-]{4}")
_MARKS = re.compile(r"[\s~^]+$")  # what Python puts below a part of the source
_ALONE = re.compile(r"[\w.()]{1,200}\s*$")
# llm.c's macros, and others': the message of CUDA, NCCL or MPI is on the next line.
_OF_MACRO = re.compile(r"\[(\w{1,20}) ERROR\] at [^\n]{1,300}?[:)] (.*)")
# What follows is on the next line: the whole message, or what it announces.
NO_MESSAGE = re.compile(r"(?:[\w.()]{1,200}:(?: .{0,380}:)?|\[\w{1,20} ERROR\] at .{1,300}[\d)]:)\s*$")


@dataclass
class _Open:
    """A traceback: the `blanks` after its label, how many `foreign` lines may follow, `file` and `source` of its last
    frame, `name` and `number` of its line if its message alone is missing. The source of that frame is indented by more
    than `frame_indent`, None after it."""

    blanks: int = 0
    foreign: int = _FOREIGN
    name: str = ""
    number: int = 0
    in_frame: bool = False
    source: str = ""
    file: str = ""
    frame_indent: int | None = None


class Tracebacks:
    """The tracebacks of a log that have begun and not ended.

    `begin` at each line with `Traceback`, `wait` at an exception without a message, `take` with each line after them.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._unknown = 0  # the line of the last exception that no pattern knows
        self._source = ""  # the source of an exception without a message that the last line was
        self.raised_in = ""  # the file of the last frame of a traceback that the last line ended

    @property
    def open(self) -> bool:
        return bool(self._open)

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)

    @property
    def skips_indented(self) -> bool:
        """Whether an indented line changes nothing, but for the LAST_FRAME: no label hides its indent, no message is
        missing."""
        return all(not label and not each.name for label, each in self._open.items())

    def begin(self, before: str) -> None:
        """A traceback begins in a line, after its label or a progress bar that was not ended."""
        label = _TIME.sub("", before).strip()
        if _NO_LABEL.search(label) or not _LABEL.fullmatch(label):
            label = (_AFTER_BAR.search(before) or ("",))[0].strip()
        if label in self._open or len(self._open) < _MOST_OPEN:
            self._open[label] = _Open(len(before) - len(before.rstrip()))

    def wait(self, number: int, line: str, name: str) -> None:
        """The message of an exception, the `name` with its colon, may be on the next line."""
        before = line[: line.find(name)]
        label = _TIME.sub("", before).strip()
        if label in self._open or len(self._open) < _MOST_OPEN:
            self._open[label] = _Open(len(before) - len(before.rstrip()), 0, name.strip(), number)

    def quotes(self, line: str) -> bool:
        """Whether the line is source that an open traceback quotes, or the marks below it: its words are not said."""
        label, rest = self._split(line)
        indent = self._open[label].frame_indent if label in self._open else None
        return indent is not None and len(rest) - len(rest.lstrip()) > indent

    def take(self, number: int, line: str, failed: bool) -> tuple[int, str] | None:
        """(number of its first line, text) of an exception that this line ends, None if it ends none.

        `failed`: patterns took the line for a failure, so that it is no news.
        """
        self._source = ""
        label, rest = self._split(line)
        begun = self._open.get(label)
        if begun is None or not rest.strip():
            return None
        if begun.name:
            del self._open[label]
            return (
                None
                if any(each.match(rest) for each in (_ANOTHER, _RULE, _MARKS))
                else (begun.number, f"{begun.name} {rest.strip()}")
            )
        if rest[0] in INDENT and not failed:
            begun.source = rest.strip().rstrip("\\ ") if begun.in_frame else begun.source
            begun.in_frame = rest.lstrip().startswith('File "')
            indent = len(rest) - len(rest.lstrip())
            if begun.in_frame or indent <= (begun.frame_indent or 0):
                begun.frame_indent = indent if begun.in_frame else None
            begun.file = rest.lstrip()[6:].partition('"')[0][:LONGEST_FILE] if begun.in_frame else begun.file
            return None
        begun.frame_indent = None
        found = _EXCEPTION.match(rest.rstrip())
        begun.foreign -= 1
        if failed or found or not begun.foreign:
            del self._open[label]
            self._source = begun.source if _ALONE.match(rest) else ""
            self.raised_in = begun.file
        if failed or not found or _NO_FAILURE.match(found[0]):
            return None
        self._unknown = number
        return number, found[0]

    def with_source(self, message: str) -> str:
        """The message of a failure that is the last line, with the source that raised it if that is a name alone."""
        return f"{message} at `{self._source[:200]}`" if self._source and _ALONE.match(message) else message

    def _split(self, line: str) -> tuple[str, str]:
        """(the label of an open traceback with which a line begins, without times of day; the line after it)."""
        text = _TIME.sub("", line)
        bare = text.lstrip()
        label = max((each for each in self._open if bare.startswith(each)), key=len, default="")
        rest = bare[len(label) :] if label else text
        blanks = min(self._open[label].blanks if label in self._open else 0, len(rest) - len(rest.lstrip()))
        return label, rest[blanks:]

    def caught(self, number: int) -> int:
        """The line of an exception that no pattern knows, and that Python says was caught: the one that was raised then
        says why. 0 if there is none right before line `number`."""
        return self._unknown if number - self._unknown <= _CHAINED else 0


def node_of_label(line: str) -> str | None:
    """The node that a line is labelled with, None without one.

    >>> node_of_label("h100-03: queue.Empty"), node_of_label("[rank3]: queue.Empty")
    ('h100-03', None)
    """
    node = _NODE.match(line.lstrip())
    return node[1] if node and not node[1].startswith(("rank", "default")) else None


def patterns_of(text: str) -> list[Pattern]:
    """The patterns that take an exception, `Name: message`, for a failure: by its name, or by its message alone."""
    if found := _OF_MACRO.match(text):
        text = f"{found[1]} error: {found[2]}"
    name, _, message = text.partition(":")
    if known := [each.pattern for _, each in find(text) if each.pattern.kind == "failure"]:
        return known
    said = [each.pattern for _, each in find(f"RuntimeError:{message or ' ' + name}") if each.pattern.kind == "failure"]
    # What timed out is no collective: those raise what patterns know by name.
    return [each for each in said if not meaning(each.ended).victim]
