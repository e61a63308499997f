"""The statements of a bash script, as `shell` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Part(NamedTuple):
    """A part of a word: literal text, or the source of a `$NAME`, `${…}`, `$(…)` or `$((…))`. `quoted`: it is not split
    into words, and has no patterns."""

    kind: Literal["text", "variable", "command", "arithmetic"]
    text: str
    quoted: bool


Word = tuple[Part, ...]


class Assignment(NamedTuple):
    """`name=value`, `name+=value`, `name[index]=value` or `name=(value …)`."""

    name: str
    place: str | None
    appends: bool
    value: Word | tuple[Word, ...]
    is_array: bool


class Redirect(NamedTuple):
    """`operator target`; for a here-document its text, and whether its delimiter was quoted."""

    operator: str
    target: Word
    text: str | None = None
    literal: bool = False


@dataclass
class Statement:
    """A statement of any kind: its first line, counted from 1, and its source."""

    line: int
    source: str = field(default="", compare=False)


@dataclass
class Command(Statement):
    """A simple command."""

    assignments: list[Assignment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class Pipeline(Statement):
    """Commands joined by `|`, and how they are joined to those before: `&&`, `||` or not."""

    parts: list[Statement] = field(default_factory=list)
    joined: str = ""
    in_background: bool = False


@dataclass
class If(Statement):
    """`if`: (condition, body) of each branch; `else` has an empty condition."""

    branches: list[tuple[list[Statement], list[Statement]]] = field(default_factory=list)


@dataclass
class Loop(Statement):
    """`for` over words, or `while` and `until`, which have no words."""

    kind: str = "while"
    name: str = ""
    words: list[Word] | None = None
    body: list[Statement] = field(default_factory=list)


@dataclass
class Case(Statement):
    """`case`: the bodies of its patterns."""

    subject: Word = ()
    branches: list[tuple[list[Word], list[Statement]]] = field(default_factory=list)


@dataclass
class Group(Statement):
    """`{ …; }`, or `( … )` with variables of its own."""

    body: list[Statement] = field(default_factory=list)
    is_subshell: bool = False


@dataclass
class Function(Statement):
    """A function's name and body."""

    name: str = ""
    body: list[Statement] = field(default_factory=list)
