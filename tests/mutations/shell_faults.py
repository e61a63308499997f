"""The faults that can be made of a template's shell, and of the conditions around it: as python_faults has them."""

import re
import subprocess
from collections.abc import Iterator

from tests.mutations.python_faults import Change

_TESTS = {"-lt": "-le", "-le": "-lt", "-gt": "-ge", "-ge": "-gt", "-eq": "-ne", "-ne": "-eq", "-n": "-z", "-z": "-n",
          "-e": "! -e", "-d": "! -d", "-f": "! -f", "-r": "! -r", "==": "!=", "!=": "==", "=": "!="}  # fmt: skip
_TEST = re.compile(rf"(?<=\s)({'|'.join(map(re.escape, _TESTS))})(?=\s)")
_KEYWORDS = re.compile(
    r"\s*(#|\{[%#]|[})]|;;|(if|then|elif|else|fi|for|while|until|do|done|case|esac|local|in)\b|\w+\(\)|[\w*|\" ?-]+\))"
)
_OPEN = re.compile(r"(\\|\||&&|\|\||[({]|\b(then|do|in|else))\s*(#.*)?$")


def is_shell(name: str) -> bool:
    return name.startswith("templates/") and name.endswith((".sh", ".sh.j2"))


def is_grammatical(sound: bytes, changed: bytes) -> bool:
    """Whether bash reads it as before, its tags left out; jinja is asked, too."""
    import jinja2

    try:
        jinja2.Environment().parse(changed.decode())
    except jinja2.TemplateSyntaxError:
        return False
    return changed != sound and (not _is_read(sound) or _is_read(changed))


def _is_read(text: bytes) -> bool:
    plain = re.sub(r"\{#.*?#\}", "", text.decode(), flags=re.DOTALL)
    plain = re.sub(
        r"\{\{.*?\}\}", "word", re.sub(r"^\s*\{%.*?%\}\n|\{%.*?%\}", "", plain, flags=re.DOTALL | re.MULTILINE)
    )
    return subprocess.run(["bash", "-n"], input=plain, text=True, capture_output=True, check=False).returncode == 0


def changes_of_shell(source: bytes) -> Iterator[Change]:
    """All that can be made of its lines; comments have none."""
    text = source.decode()
    hidden = [found.span() for found in re.finditer(r"\{#.*?#\}", text, flags=re.DOTALL)]
    place, before = 0, ""
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not any(first <= place < last for first, last in hidden) and not re.match(r"\s*(#|$)", line):
            start = len(text[:place].encode())
            for kind, first, last, instead in _of_line(line.rstrip("\n"), before):
                ends = (start + len(line[:first].encode()), start + len(line[:last].encode()))
                yield number, number, kind, *ends, instead
        place, before = place + len(line), line.rstrip("\n")


def _of_line(line: str, before: str) -> Iterator[tuple[str, int, int, str]]:
    for tag in re.finditer(r"\{%-? (?:el)?if (.*?) -?%\}", line):
        yield "a condition negated", *tag.span(1), f"not ({tag[1]})"
        for word in re.finditer(r"\b(and|or)\b", tag[1]):
            first = tag.start(1) + word.start()
            yield "and, or", first, first + len(word[0]), "or" if word[0] == "and" else "and"
    code = line.partition(" # ")[0]
    # Of the same length, so that what stands in a tag is left alone and places stay.
    code = re.sub(r"\{%.*?%\}|\{\{.*?\}\}", lambda tag: "\0" * len(tag[0]), code)
    for word in re.finditer(r"\b(if|elif|while|until) (! )?", code):
        if word[2]:
            yield "a condition negated", word.start(2), word.end(2), ""
        elif not re.match(r"\s*(IFS=|read\b)", code[word.end() :]):
            yield "a condition negated", word.end(), word.end(), "! "
    for sign in re.finditer(r" (&&|\|\|)(?= |$)", code):
        yield "and, or", *sign.span(1), "||" if sign[1] == "&&" else "&&"
    if "[" in code or "test " in code:
        for sign in _TEST.finditer(code):
            yield "a comparison turned", *sign.span(1), _TESTS[sign[1]]
    for sign in re.finditer(r"(?<=\(\().*?(<=|>=|<|>)", code):
        yield "a comparison shifted", *sign.span(1), sign[1][0] if len(sign[1]) == 2 else sign[1] + "="
    for figure in re.finditer(r"(?<![\w$.#%{&>-])\d+(?![\w>]|[<>]|[.]\d)", code):
        yield "a constant changed", *figure.span(), str(int(figure[0]) + 1)
    for flag in re.finditer(r" --?[a-zA-Z][\w-]*(=(\"[^\"]*\"|'[^']*'|[^\s\"')]+)?)?(?=[\s)]|$)", code):
        if "[" not in code[: flag.start()] and flag[0].strip() not in _TESTS:
            yield "an argument dropped", *flag.span(), ""
    for end in re.finditer(r"\b(exit|return|fail|die)\b[^;&|}]*", code):
        yield "an exception swallowed", *end.span(), ": "
    whole = code.count('"') % 2 == 0 and code.count("'") % 2 == 0 and code.count("(") == code.count(")")
    if whole and not _KEYWORDS.match(line) and not _OPEN.search(code) and not _OPEN.search(before) and code[0] != "\0":
        yield "a call left out", len(code) - len(code.lstrip()), len(code.rstrip()), ":"
