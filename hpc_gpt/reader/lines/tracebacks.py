"""Finds the last line of each traceback, whatever its exception is called, and a message on the next line.

Patterns know an exception by the end of its name. `queue.Empty` and `zmq.error.Again` are exceptions by their place:
the first line after `Traceback (most recent call last)` that is not indented. Ranks print at the same time, so each
label of lines (`[rank3]: `, `n7: `, none) has a traceback of its own; the label is the text before `Traceback`.
"""

import re
from dataclasses import dataclass

from hpc_gpt.core.ends.failures import meaning
from hpc_gpt.reader.lines.matches import find
from hpc_gpt.reader.lines.pattern import Pattern

_FOREIGN = 20  # lines of other programs that may lie between those of a traceback
_MOST_OPEN = 64
LONGEST_FILE = 300  # characters of the name of a source file
_CHAINED = 3  # lines from an exception to Python's message that another one was raised while handling it
LAST_FRAME = 8  # lines from the last `File "…"` of a traceback to its exception: the source, and marks below it
INDENT = " \t"
# A prefix that a launcher puts before each line. A logger's level, a message or a progress bar is not one.
_LABEL = re.compile(r"(?:(?:\([^()]{1,80}\)|\[[^\[\]]{1,80}\]\S{0,12}|[^\s\[\]()]{1,64}[:>|])\s{0,8}){0,6}")
_NO_LABEL = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|WARN|WARNING|INFO|DEBUG|[Ee]rror|[Ee]xception)\b|\d%\||/s\]")
_AFTER_BAR = re.compile(r"\[(?:rank|default)\d{1,7}\]:? ?$")
_NODE = re.compile(r"(?:\d{1,7}: )?([a-z][a-z0-9-]{0,40}\d[a-z0-9.-]{0,40}|\d{1,3}(?:\.\d{1,3}){3}): ")
_TIME = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d(?:[.,]\d{1,9})?")
# An exception that is not Python's has the name of its module before its own.
_EXCEPTION = re.compile(
    r"((?:[A-Za-z_]\w{0,60}\.){1,8}(?:\w{0,30}[A-Z]\w{0,60}|\w{0,20}error|timeout)|_?[A-Z]\w{1,60}(?:Error|Exception)"
    r"|SystemExit|StopIteration|StopAsyncIteration|GeneratorExit|(?:Base)?ExceptionGroup|[A-Z]\w{0,40}Warning)(:.*)?$"
)
_NO_FAILURE = re.compile(r"SystemExit(?:: (?:0|None)?)?$")
_ANOTHER = re.compile(r"Traceback \(most|During handling of|The above exception")
_RULE = re.compile(r"\s*[=*-]{4}")
_MARKS = re.compile(r"[\s~^]+$")  # the ~~~^^^ with which Python underlines a part of the source
_ALONE = re.compile(r"[\w.()]{1,200}\s*$")
# The macros of llm.c and others: the message of CUDA, NCCL or MPI is on the next line.
_OF_MACRO = re.compile(r"\[(\w{1,20}) ERROR\] at [^\n]{1,300}?[:)] (.*)")
# The next line has the whole message, or the text that this line announces.
NO_MESSAGE = re.compile(
    r"(?:[\w.()]{1,200}:(?: .{0,380}:)?|\[\w{1,20} ERROR\] at .{1,300}[\d)]:|Current thread .{1,80}:)\s*$"
)


@dataclass
class _Open:
    """An open traceback. `blanks`: after its label. `foreign`: lines of others that may still follow. `file`, `source`:
    of its last frame, whose source is indented by more than `frame_indent`, None after it. `number`: its first line;
    `name`: the exception, in this line, if only the message is missing."""

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
        self._source = ""  # if the last line is an exception without a message: the source line that raised it
        self.raised_in = ""  # the file of the last frame of the traceback that the last line ended

    @property
    def count(self) -> int:
        """The number of open tracebacks."""
        return len(self._open)

    @property
    def skips_indented(self) -> bool:
        """Whether an indented line changes nothing except in the LAST_FRAME lines of a traceback: no label hides its
        indent, and no message is missing."""
        return all(not label and not traceback.name for label, traceback in self._open.items())

    def begin(self, number: int, before: str) -> None:
        """Opens a traceback on line `number`. `before`: the text before `Traceback`, a label or an open bar."""
        label = _TIME.sub("", before).strip()
        if _NO_LABEL.search(label) or not _LABEL.fullmatch(label):
            label = (_AFTER_BAR.search(before) or ("",))[0].strip()
        if label in self._open or len(self._open) < _MOST_OPEN:
            self._open[label] = _Open(len(before) - len(before.rstrip()), number=number)

    def cut_off(self) -> tuple[int, str, str] | None:
        """Returns (first line, file of its last frame, label) of the first traceback whose exception never came."""
        begun = [(each.number, each.file, label) for label, each in self._open.items() if each.file and not each.name]
        return min(begun, default=None)

    def wait(self, number: int, line: str, name: str) -> None:
        """Waits for the message of an exception, `name` with its colon, which may be on the next line."""
        before = line[: line.find(name)]
        label = _TIME.sub("", before).strip()
        if label in self._open or len(self._open) < _MOST_OPEN:
            self._open[label] = _Open(len(before) - len(before.rstrip()), 0, name.strip(), number)

    def quotes(self, line: str) -> bool:
        """Whether the line is source that an open traceback quotes, or the marks below it: it is not a message."""
        label, text = self._split(line)
        indent = self._open[label].frame_indent if label in self._open else None
        return indent is not None and len(text) - len(text.lstrip()) > indent

    def take(self, number: int, line: str, failed: bool) -> tuple[int, str] | None:
        """Returns (number of its first line, text) of the exception that this line ends, None if it ends none.

        `failed`: a pattern already took the line for a failure.
        """
        self._source = ""
        label, text = self._split(line)
        begun = self._open.get(label)
        if begun is None or not text.strip():
            return None
        if begun.name:
            del self._open[label]
            return (
                None
                if any(pattern.match(text) for pattern in (_ANOTHER, _RULE, _MARKS))
                else (begun.number, f"{begun.name} {text.strip()}")
            )
        if text[0] in INDENT and not failed:
            begun.source = text.strip().rstrip("\\ ") if begun.in_frame else begun.source
            begun.in_frame = text.lstrip().startswith('File "')
            indent = len(text) - len(text.lstrip())
            if begun.in_frame or indent <= (begun.frame_indent or 0):
                begun.frame_indent = indent if begun.in_frame else None
            begun.file = text.lstrip()[6:].partition('"')[0][:LONGEST_FILE] if begun.in_frame else begun.file
            return None
        begun.frame_indent = None
        exception = _EXCEPTION.match(text.rstrip())
        begun.foreign -= 1
        if failed or exception or not begun.foreign:
            del self._open[label]
            self._source = begun.source if _ALONE.match(text) else ""
            self.raised_in = begun.file
        if failed or not exception or _NO_FAILURE.match(exception[0]):
            return None
        self._unknown = number
        return number, exception[0]

    def with_source(self, message: str) -> str:
        """The message of a failure on the last line; if it is only a name, with the source line that raised it."""
        return f"{message} at `{self._source[:200]}`" if self._source and _ALONE.match(message) else message

    def _split(self, line: str) -> tuple[str, str]:
        """Returns (the label of an open traceback at the begin of a line, without times of day; the text after it)."""
        text = _TIME.sub("", line)
        bare = text.lstrip()
        label = max((begun for begun in self._open if bare.startswith(begun)), key=len, default="")
        after_label = bare[len(label) :] if label else text
        blanks = min(
            self._open[label].blanks if label in self._open else 0, len(after_label) - len(after_label.lstrip())
        )
        return label, after_label[blanks:]

    def caught(self, number: int) -> int:
        """The line of an exception without a pattern that Python says was caught: the exception raised after it is the
        cause. 0 if there is none right before line `number`."""
        return self._unknown if number - self._unknown <= _CHAINED else 0


def node_of_label(line: str) -> str | None:
    """The node in the label of a line, None without one.

    >>> node_of_label("h100-03: queue.Empty"), node_of_label("[rank3]: queue.Empty")
    ('h100-03', None)
    """
    node = _NODE.match(line.lstrip())
    return node[1] if node and not node[1].startswith(("rank", "default")) else None


def patterns_of(text: str) -> list[Pattern]:
    """The failure patterns that match an exception, `Name: message`: by its name, else by its message alone."""
    if macro := _OF_MACRO.match(text):
        text = f"{macro[1]} error: {macro[2]}"
    name, _, message = text.partition(":")
    if by_name := [rule.pattern for _, rule in find(text) if rule.pattern.kind == "failure"]:
        return by_name
    by_message = [
        rule.pattern for _, rule in find(f"RuntimeError:{message or ' ' + name}") if rule.pattern.kind == "failure"
    ]
    # An unknown exception that timed out is not a collective: patterns know the exceptions of those by name.
    return [pattern for pattern in by_message if not meaning(pattern.ended).victim]
