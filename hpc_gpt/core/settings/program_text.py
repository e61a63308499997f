"""The texts of a program's command: values for their braces, quoted for bash, and checks of their content."""

import contextlib
import re
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from hpc_gpt.core.errors import ConfigError, Fault, raise_faults
from hpc_gpt.core.secrets import REMOVED, hide_secrets, hide_words
from hpc_gpt.core.tables import close_matches

# `{name}`, but not bash's `${name}`; `{{name}}` is the text `{name}`.
_BRACE = re.compile(r"\{\{(?P<text>[A-Za-z_]\w*)\}\}|(?<!\$)\{(?P<name>[A-Za-z_]\w*)\}")
# Bash takes no quotes in these texts: a comment, and the lines of a here-document, which begin below its `<<WORD`.
_COMMENT = re.compile(r"(?:\A|(?<=[\s;|&()]))#[^\n]*")
_HERE = re.compile(
    r"""<<-?[ \t]*(?P<quote>['"]?)(?P<word>\w+)(?P=quote)(?=.*\n\t*(?P=word)$)""", re.DOTALL | re.MULTILINE
)
_VARIABLE = re.compile(r"\$(?:\w+|\{[^{}]*\})")


def fill(text: str, values: Mapping[str, str], alone: bool = False) -> str:
    """A text with its braces filled in. `alone`: only names in `values` are filled in, other braces stay.

    >>> fill("{run}/{{step}}", {"run": "/a b"}), fill("{run}/{lr}/{{step}}", {"lr": "1"}, alone=True)
    ('/a b/{step}', '{run}/1/{{step}}')
    """

    def filled(match: re.Match[str]) -> str:
        if alone and match["name"] not in values:
            return match[0]
        return values[match["name"]] if match["name"] else f"{{{match['text']}}}"

    return _BRACE.sub(filled, text)


def fill_line(line: str, values: Mapping[str, str], alone: bool = False) -> str:
    """One or more lines of bash with their braces filled in. Outside quotes a value is one word, quoted for bash; in
    quotes or a here-document it stands as it is. Comments stay as they are. `alone`: see `fill`.

    Raises ConfigError for a value that bash would read otherwise in quotes or a here-document.

    >>> print(fill_line("run {run} '{run}/x' # isn't {run}", {"run": "/a b"}))
    run '/a b' '/a b/x' # isn't {run}
    """
    parts, quote, place = [], "", 0
    documents: list[str] = []  # the words that end here-documents, whose text begins at the next line
    while place < len(line):
        match = _BRACE.match(line, place)
        if match:
            part = match[0] if alone and match["name"] not in values else fill(match[0], values)
            if match["name"] in values:
                part = _inside(match["name"], part) if quote else shlex.quote(part)
            parts.append(part)
            place = match.end()
            continue
        width = 2 if line[place] == "\\" and quote != "'" else 1
        if not quote:
            if comment := _COMMENT.match(line, place):
                width = len(comment[0])
            elif document := _HERE.match(line, place):
                width = len(document[0])
                documents.append(document["word"])
            elif line[place] in "'\"" or line.startswith("$'", place):
                quote = line[place : place + 1 + (line[place] == "$")]
                width = len(quote)
        elif line[place] == quote[-1]:
            quote = ""
        parts.append(line[place : place + width])
        place += width
        if documents and parts[-1] == "\n":
            end = re.compile(rf"^\t*{documents.pop(0)}$", re.MULTILINE).search(line, place)
            text = line[place : end.start() if end else len(line)]
            for name in names_in(text) & values.keys():
                _inside(name, values[name])
            parts.append(fill(text, values, alone))
            place += len(text)
    return "".join(parts)


def _inside(name: str, value: str) -> str:
    """A value that stands as it is inside quotes or a here-document. Raises ConfigError if bash reads a part of it."""
    if special := re.search(r"""['"\\$`]""", value):
        raise ConfigError(
            f"{{{name}}} stands inside quotes or a here-document of [command], and its value {value!r} has a "
            f"{special[0]}, which bash reads there",
            'take the quotes away, as outside them each value is one word, or give a list: run = ["python", …]',
        )
    return value


def texts_of(where: str, command: str | tuple[str, ...]) -> dict[str, str]:
    """{dotted name: text} for a line of bash, or for each word of a list."""
    if isinstance(command, str):
        return {where: command}
    return {f"{where}[{index}]": word for index, word in enumerate(command)}


def text_faults(where: str, text: str) -> Iterator[Fault]:
    """Each fault in a text of a command: a NUL, or a secret."""
    if "\0" in text:
        yield Fault(f"{where} holds a NUL, which no command line can carry", "take it out")
    bare = _VARIABLE.sub("/", text)
    if hide_secrets(bare) != bare:
        yield _secret_fault(where, hide_secrets(bare), ", and use its variable: $NAME")


def command_faults(where: str, command: str | Sequence[str]) -> Iterator[Fault]:
    """(message, hint) as `text_faults` for a line of bash, or for the words of a list, where the word before a value
    tells whether it is a secret."""
    if isinstance(command, str):
        yield from text_faults(where, command)
        return
    bare = [_VARIABLE.sub("/", word) for word in command]
    for index, (word, shown) in enumerate(zip(bare, hide_words(bare), strict=True)):
        if "\0" in word:
            yield from text_faults(f"{where}[{index}]", "\0")
        if shown != word:
            option = f"{bare[index - 1]} {shown}" if shown == REMOVED and index else shown
            yield _secret_fault(f"{where}[{index}]", option, ": the program has it in its environment")


def without_secret_comments(text: str) -> str:
    """An experiment's text with possible secrets removed from its comments."""
    lines = text.split("\n")
    hidden = [hide_secrets(line) if "#" in line else line for line in lines]
    if hidden == lines:
        return text
    tables = tomllib.loads(text)
    for number in [number for number, line in enumerate(lines) if line != hidden[number]]:
        changed = "\n".join([*lines[:number], hidden[number], *lines[number + 1 :]])
        with contextlib.suppress(tomllib.TOMLDecodeError):
            if tomllib.loads(changed) == tables:
                lines[number] = hidden[number]
    return "\n".join(lines)


def check_file_text(path: Path, text: str) -> None:
    """Raises ConfigError if any line of an experiment's file, also of a row that was not requested, seems to contain a
    secret. Variables and names in braces are allowed."""
    for number, line in enumerate(text.splitlines(), 1):
        bare = _BRACE.sub("/", _VARIABLE.sub("/", line))
        if (shown := hide_secrets(bare)) != bare:
            raise_faults([_secret_fault(f"{path}:{number}", shown.strip(), ", or use a variable: $NAME")])


def _secret_fault(where: str, shown: str, then: str) -> Fault:
    message = f"{where} holds what looks like a secret, and the run folder would keep it: {shown:.80}"
    return Fault(message, f"export it in the shell that submits{then}")


def names_in(text: str) -> set[str]:
    """The names in a text's braces."""
    return {match["name"] for match in _BRACE.finditer(text) if match["name"]}


def brace_faults(
    where: str, text: str, names: Collection[str], elsewhere: Mapping[str, str] | None = None
) -> Iterator[Fault]:
    """(message, hint) of each brace in a text whose name is not in `names`. `elsewhere`: {other name: where it is
    known}."""
    for match in _BRACE.finditer(text):
        name = match["name"]
        if name is None or name in names:
            continue
        braces = ", ".join(f"{{{other}}}" for other in names)
        if elsewhere and name in elsewhere:
            yield Fault(f"{where} has {{{name}}}, which is known only {elsewhere[name]}", f"known here: {braces}")
        else:
            similar = close_matches(name, names)
            yield Fault(
                f"{where} has {{{name}}}, which is not known" + (f"; {similar}" if similar else ""),
                f"known: {braces}; write {{{{{name}}}}} to pass {{{name}}} to the program",
            )
