"""Bash as statements: commands with their words, assignments and here-documents, and the compound ones around them.

It reads and never runs. Of a word it keeps the parts, since `expansion` fills in variables later. The grammar is that
of the bash manual as far as job scripts have it; no library for it can be a dependency: bashlex is under the GPL, and
tree-sitter needs a compiled wheel on a login node.
"""

from __future__ import annotations

import re

from hpc_gpt.scripts.quoting import ENDS_WORD, WordReader
from hpc_gpt.scripts.statements import (
    Assignment,
    Case,
    Command,
    Function,
    Group,
    If,
    Loop,
    Part,
    Pipeline,
    Redirect,
    Statement,
    Word,
)

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\n]*)\])?(\+?)=")
_REDIRECT = re.compile(r"(?:\d*|\{\w+\})(<<<|<<-|<<|<>|>>|>&|<&|>\||>|<)|(&>>|&>)")
_FUNCTION = re.compile(r"([\w:.-]+)[ \t]*\([ \t]*\)")
_DECLARES = frozenset(("export", "declare", "typeset", "local", "readonly"))
_DEEPEST = 60


def read_shell(text: str, where: str = "") -> list[Statement]:
    """The statements of a script. ConfigError with `where` and the line for one that bash could not read either.

    >>> [statement.line for statement in read_shell("a=1 # one\\nb \\\\\\n  c\\nd")]
    [1, 2, 4]
    """
    return _Reader(text.replace("\r\n", "\n"), where).statements()


class _Reader(WordReader):
    def __init__(self, text: str, where: str) -> None:
        super().__init__(text, where)
        self.depth = 0
        # Redirects to here-documents whose text begins at the next line: (list of the command's, index, strips tabs).
        self.pending: list[tuple[list[Redirect], int, bool]] = []

    def statements(self) -> list[Statement]:
        found = self.list_until(())
        if self.at < len(self.text):
            self.fail(f"unexpected {self.text[self.at]!r}")
        return found

    def skip_blanks(self) -> None:
        """Blanks, continued lines and a comment."""
        text = self.text
        while self.at < len(text):
            if text[self.at] in " \t":
                self.at += 1
            elif text.startswith("\\\n", self.at):
                self.at += 2
            elif text[self.at] == "#" and (self.at == 0 or text[self.at - 1] in ENDS_WORD):
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                return

    def skip_newlines(self, separators: str = "") -> None:
        """Blanks, and ends of lines with the here-documents after them."""
        while True:
            self.skip_blanks()
            if self.at < len(self.text) and self.text[self.at] == "\n":
                self.at += 1
                self.read_documents()
            elif self.at < len(self.text) and self.text[self.at] in separators and not self.peek(";;"):
                self.at += 1
            else:
                return

    def read_documents(self) -> None:
        for redirects, index, strips in self.pending:
            redirect = redirects[index]
            delimiter = "".join(part.text for part in redirect.target)
            begin, lines = self.at, []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, self.at = self.text[self.at : end], end + 1
                if strips:
                    line = line.lstrip("\t")
                if line == delimiter:
                    break
                lines.append(line + "\n")
            else:
                self.fail(f"the here-document <<{delimiter} has no end", begin - 1)
            literal = any(part.quoted for part in redirect.target)
            redirects[index] = redirect._replace(text="".join(lines), literal=literal)
        self.at = min(self.at, len(self.text))
        self.pending = []

    def next_name(self) -> str:
        """The reserved word at this place, if it is one; empty else."""
        found = re.compile(r"[a-z!{}\[\]]+(?=[\s;&|()<>]|\Z)").match(self.text, self.at)
        return found[0] if found else ""

    def list_until(self, ends: tuple[str, ...]) -> list[Statement]:
        """Statements up to a reserved word, `)` or `;;` of `ends`, which is left there."""
        self.depth += 1
        if self.depth > _DEEPEST:
            self.fail(f"statements are more than {_DEEPEST} deep")
        found: list[Statement] = []
        joined = ""
        while True:
            self.skip_newlines(";&" if not joined else "")
            if self.at >= len(self.text) or self.text[self.at] == ")" or self.peek(";;") or self.next_name() in ends:
                break
            statement = self.pipeline(joined)
            found.append(statement)
            self.skip_blanks()
            joined = next((mark for mark in ("&&", "||") if self.peek(mark)), "")
            if joined:
                self.at += 2
            elif self.peek("&") or (self.peek(";") and not self.peek(";;")):
                if isinstance(statement, Pipeline):
                    statement.in_background = self.peek("&")
                self.at += 1
        if self.at >= len(self.text) and ends:
            self.fail(f"no {' or '.join(ends)} before the end")
        self.depth -= 1
        return found

    def expect(self, word: str) -> None:
        self.skip_newlines(";" if word in ("then", "do") else "")
        if (word == ")" and self.peek(word)) or self.next_name() == word:
            self.at += len(word)
            return
        self.fail(f"no {word} here")

    def pipeline(self, joined: str) -> Statement:
        begin, parts = self.at, []
        while True:
            while self.next_name() in ("!", "time"):
                self.at += len(self.next_name())
                self.skip_blanks()
            parts.append(self.statement())
            self.skip_blanks()
            if not self.peek("|") or self.peek("||"):
                break
            self.at += 2 if self.peek("|&") else 1
            self.skip_newlines()
        return Pipeline(self.line(begin), self.text[begin : self.at].strip(), parts, joined)

    def statement(self) -> Statement:
        begin, name = self.at, self.next_name()
        found: Statement
        if self.peek("((") and not name:
            found = Command(0, words=[(Part("text", "((", True), Part("text", self.balanced(2), True))])
        elif self.peek("("):
            self.at += 1
            found = Group(0, body=self.list_until(()), is_subshell=True)
            self.expect(")")
        elif name == "{":
            self.at += 1
            found = Group(0, body=self.list_until(("}",)))
            self.expect("}")
        elif name == "if":
            found = self.read_if()
        elif name in ("for", "select", "while", "until"):
            found = self.read_loop(name)
        elif name == "case":
            found = self.read_case()
        elif name == "function" or (name != "[[" and _FUNCTION.match(self.text, self.at)):
            found = self.read_function(name)
        else:
            found = self.simple()
        if not isinstance(found, Command | Function):
            self.redirects_after(found)
        found.line, found.source = self.line(begin), self.text[begin : self.at].strip()
        return found

    def redirects_after(self, statement: Statement) -> None:
        """Reads over the redirects of a compound statement; their here-documents, too, are its input alone."""
        while True:
            self.skip_blanks()
            mark = _REDIRECT.match(self.text, self.at)
            if mark is None:
                return
            self.redirect(mark, [])

    def read_if(self) -> If:
        found = If(0)
        self.at += 2
        while True:
            condition = self.list_until(("then",))
            self.expect("then")
            found.branches.append((condition, self.list_until(("elif", "else", "fi"))))
            if self.next_name() != "elif":
                break
            self.at += 4
        if self.next_name() == "else":
            self.at += 4
            found.branches.append(([], self.list_until(("fi",))))
        self.expect("fi")
        return found

    def read_loop(self, kind: str) -> Loop:
        found = Loop(0, kind=kind)
        self.at += len(kind)
        self.skip_blanks()
        if kind in ("while", "until"):
            self.list_until(("do",))
        elif self.peek("(("):
            self.balanced(2)
        else:
            name = _NAME.match(self.text, self.at)
            if name is None:
                self.fail("no name after for")
            found.name, self.at = name[0], name.end()
            self.skip_newlines()
            if self.next_name() == "in":
                self.at += 2
                found.words = self.simple().words
        self.expect("do")
        found.body = self.list_until(("done",))
        self.expect("done")
        return found

    def read_case(self) -> Case:
        self.at += 4
        self.skip_blanks()
        found = Case(0, subject=self.word())
        self.skip_newlines()
        self.expect("in")
        while True:
            self.skip_newlines()
            if self.next_name() == "esac":
                break
            if self.peek("("):
                self.at += 1
            patterns = []
            while True:
                self.skip_blanks()
                patterns.append(self.word())
                self.skip_blanks()
                if not self.peek("|"):
                    break
                self.at += 1
            self.expect(")")
            found.branches.append((patterns, self.list_until(("esac",))))
            if self.peek(";;"):
                self.at += 3 if self.peek(";;&") else 2
        self.expect("esac")
        return found

    def read_function(self, name: str) -> Function:
        if name == "function":
            self.at += 8
            self.skip_blanks()
        found = re.compile(r"([\w:.-]+)(?:[ \t]*\([ \t]*\))?").match(self.text, self.at)
        if found is None:
            self.fail("a function has no name")
        self.at = found.end()
        self.skip_newlines()
        body = self.statement()
        return Function(0, name=found[1], body=body.body if isinstance(body, Group) else [body])

    def simple(self) -> Command:
        found = Command(0)
        while True:
            self.skip_blanks()
            if self.at >= len(self.text):
                break
            mark = _REDIRECT.match(self.text, self.at)
            if mark is not None and not (self.text[self.at] in "<>" and self.text[self.at + 1 : self.at + 2] == "("):
                self.redirect(mark, found.redirects)
                continue
            if self.text[self.at] in "\n;&|)":
                break
            assigned = _ASSIGNMENT.match(self.text, self.at)
            declares = found.words and found.words[0] and found.words[0][0].text in _DECLARES
            if assigned is not None and (not found.words or declares):
                self.at = assigned.end()
                found.assignments.append(self.assignment(assigned))
            elif self.peek("(") or self.peek("<(") or self.peek(">("):
                begin = self.at
                self.at += not self.peek("(")
                self.balanced(1)
                found.words.append((Part("command", self.text[begin : self.at], False),))
            else:
                found.words.append(self.word())
                if found.words == [(Part("text", "[[", False),)]:
                    self.test(found)
        return found

    def test(self, command: Command) -> None:
        """The words up to `]]`, in which `<`, `(` and `&&` are words, too."""
        while True:
            self.skip_newlines()
            if self.at >= len(self.text):
                self.fail("no ]] before the end")
            begin = self.at
            if self.next_name() != "]]" and self.text[self.at] in "<>()&|":
                self.at += 2 if self.peek("&&") or self.peek("||") else 1
                command.words.append((Part("text", self.text[begin : self.at], True),))
                continue
            command.words.append(self.word(also="()&|" if not self.is_pattern(command) else "&|"))
            if command.words[-1] == (Part("text", "]]", False),):
                return

    @staticmethod
    def is_pattern(command: Command) -> bool:
        return bool(command.words) and command.words[-1] == (Part("text", "=~", False),)

    def redirect(self, mark: re.Match[str], redirects: list[Redirect]) -> None:
        operator = mark[1] or mark[2]
        self.at = mark.end()
        self.skip_blanks()
        if self.peek("<(") or self.peek(">("):
            self.at += 1
            target: Word = (Part("command", self.balanced(1), False),)
        else:
            target = self.word()
        redirects.append(Redirect(operator, target))
        if operator in ("<<", "<<-"):
            self.pending.append((redirects, len(redirects) - 1, operator == "<<-"))

    def assignment(self, found: re.Match[str]) -> Assignment:
        name, index, plus = found.groups()
        if not self.peek("("):
            ends = self.at >= len(self.text) or self.text[self.at] in ENDS_WORD
            return Assignment(name, index, bool(plus), () if ends else self.word(), False)
        self.at += 1
        values = []
        while True:
            self.skip_newlines()
            if self.at >= len(self.text):
                self.fail(f"{name}=( has no end", found.start())
            if self.peek(")"):
                break
            if self.text[self.at] in ";&|<>(":
                self.fail(f"unexpected {self.text[self.at]!r} in {name}=(")
            values.append(self.word())
        self.at += 1
        return Assignment(name, index, bool(plus), tuple(values), True)
