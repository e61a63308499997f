"""The words of a bash script: their quotes, and the variables and substitutions in them."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NoReturn

from hpc_gpt.errors import ConfigError
from hpc_gpt.scripts.statements import Part, Word

# What ends a word that is not quoted.
ENDS_WORD = frozenset(" \t\n;&|()<>")


def read_text(text: str) -> Word:
    """The parts of a text as it would be between double quotes."""
    return tuple(WordReader(text, "").quoted_parts(len(text)))


def read_operand(text: str) -> Word:
    """The parts of `word` in `${NAME:-word}`: its quotes are removed, its blanks kept."""
    reader = WordReader(text, "")
    parts: list[Part] = []
    while reader.at < len(text):
        if text[reader.at].isspace():
            parts.append(Part("text", text[reader.at], False))
            reader.at += 1
        else:
            parts += reader.word(also="\0", blanks=" \t\n")
    return _joined(parts)


class WordReader:
    """Reads a text from the place `at` on. Raises ConfigError with `where` and the line."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.at = text, where, 0
        self.newlines = [place for place, letter in enumerate(text) if letter == "\n"]

    def fail(self, what: str, at: int | None = None) -> NoReturn:
        line = self.line(self.at if at is None else at)
        raise ConfigError(f"{self.where}:{line}: {what}", "bash -n FILE checks a script")

    def line(self, at: int) -> int:
        return bisect_right(self.newlines, at - 1) + 1

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def word(self, also: str = "", blanks: str = "") -> Word:
        """The parts of the word that begins here, which has at least one letter. It ends at a blank, and at what ends a
        command, or instead of that at a letter of `also`."""
        parts: list[Part] = []
        begin = self.at
        ends = ENDS_WORD if not also else set(also) | (set(blanks) if blanks else set(" \t\n;"))
        while self.at < len(self.text) and self.text[self.at] not in ends:
            letter = self.text[self.at]
            if letter == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                if escaped != "\n":
                    parts.append(Part("text", escaped, True))
                self.at += 2
            elif letter == "'" or self.peek("$'"):
                parts.append(Part("text", self.single_quoted(), True))
            elif letter == '"' or self.peek('$"'):
                begin_of_quote = self.at
                self.at += 1 if letter == '"' else 2
                parts += self.quoted_parts() or [Part("text", "", True)]
                if not self.peek('"'):
                    self.fail("a double quote has no end", begin_of_quote)
                self.at += 1
            elif letter in "$`":
                parts.append(self.dollar(False))
            else:
                found = re.compile(r"[^\s;&|()<>\\'\"$`]+|.", re.DOTALL).match(self.text, self.at)
                assert found is not None
                parts.append(Part("text", found[0], False))
                self.at = found.end()
        if self.at == begin:
            self.fail(f"unexpected {self.text[self.at : self.at + 1]!r}" if self.at < len(self.text) else "no end")
        return _joined(parts)

    def single_quoted(self) -> str:
        is_ansi = self.peek("$'")
        begin = self.at + (2 if is_ansi else 1)
        pattern = re.compile(r"(?:[^'\\]|\\.)*'" if is_ansi else r"[^']*'", re.DOTALL)
        found = pattern.match(self.text, begin)
        if found is None:
            self.fail("a single quote has no end")
        self.at = found.end()
        text = found[0][:-1]
        return re.sub(r"\\(.)", lambda each: {"n": "\n", "t": "\t"}.get(each[1], each[1]), text) if is_ansi else text

    def quoted_parts(self, end: int | None = None) -> list[Part]:
        """The parts up to the closing double quote, or up to `end`."""
        parts: list[Part] = []
        while self.at < (len(self.text) if end is None else end):
            letter = self.text[self.at]
            if letter == '"' and end is None:
                break
            if letter == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                escaped = self.text[self.at + 1]
                if escaped != "\n":
                    parts.append(Part("text", escaped, True))
                self.at += 2
            elif letter in "$`":
                parts.append(self.dollar(True))
            else:
                found = re.compile(r"[^\\\"$`]+|.", re.DOTALL).match(self.text, self.at)
                assert found is not None
                parts.append(Part("text", found[0], True))
                self.at = found.end()
        return list(_joined(parts))

    def dollar(self, quoted: bool) -> Part:
        if self.peek("`"):
            found = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL).match(self.text, self.at)
            if found is None:
                self.fail("a ` has no end")
            self.at = found.end()
            return Part("command", re.sub(r"\\([`$\\])", r"\1", found[1]), quoted)
        self.at += 1
        if self.peek("((") and (expression := self.arithmetic()) is not None:
            return Part("arithmetic", expression, quoted)
        if self.peek("("):
            return Part("command", self.balanced(1), quoted)
        if self.peek("{"):
            return Part("variable", self.balanced(1, "{", "}"), quoted)
        name = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]").match(self.text, self.at)
        if name is None:
            return Part("text", "$", quoted)
        self.at = name.end()
        return Part("variable", name[0], quoted)

    def arithmetic(self) -> str | None:
        """The expression of `$((…))`; None, at the same place, if it is `$( (…) )`."""
        begin = self.at
        inner = self.balanced(1)
        if inner.startswith("(") and inner.endswith(")"):
            return inner[1:-1].strip()
        self.at = begin
        return None

    def balanced(self, marks: int, opens: str = "(", closes: str = ")") -> str:
        """The text between brackets, of which `marks` are at this place, with those and quotes in it."""
        begin, depth = self.at, 0
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "\\":
                self.at += 1
            elif letter == "'":
                self.single_quoted()
                continue
            elif letter == '"':
                self.at += 1
                self.quoted_parts()
            elif letter == "`":
                self.dollar(False)
                continue
            elif letter == "#" and opens == "(" and self.text[self.at - 1] in " \t\n":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
                continue
            elif letter == opens:
                depth += 1
            elif letter == closes:
                depth -= 1
                if not depth:
                    self.at += 1
                    return self.text[begin + marks : self.at - marks]
            self.at += 1
        return self.fail(f"{opens} has no {closes}", begin)


def _joined(parts: list[Part]) -> Word:
    """The parts with neighbouring texts of one kind as one."""
    found: list[Part] = []
    for part in parts:
        if found and part.kind == "text" == found[-1].kind and part.quoted == found[-1].quoted:
            found[-1] = Part("text", found[-1].text + part.text, part.quoted)
        else:
            found.append(part)
    return tuple(found)
