"""The plain parts of a shell script: assignments, what variables stand for, arithmetic. Nothing is ever executed.

What a shell would have to run to know - command substitution, a variable set nowhere - is unknown, not empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_MOST_LINES = 5000
_LONGEST = 20_000
_LARGEST = 10**15
_DEEPEST = 20
_ASSIGNED = re.compile(r"^\s*(?:(?:export|readonly|local|declare(?: -[a-zA-Z]+)?)\s+)?([A-Za-z_]\w{0,63})=")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w{0,63})(?::?[-=]([^{}$`]{0,200}))?\}|([A-Za-z_]\w{0,63}))")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^$`()\n]|\([^$`()\n]{0,100}\)){1,200})\)\)")
_WRITTEN = re.compile(r"\$\(\((?:[^`()\n]|\([^`()\n]{0,100}\)){1,200}\)\)")
_TOKEN = re.compile(r"\s*(?:(\d{1,15})|([A-Za-z_]\w{0,63})|([-+*/%()]))")
_WORD = re.compile(r"\"((?:[^\"\\]|\\.){0,20000})\"|'([^']{0,20000})'|([^\s;&|\"'#]{1,4000})")


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, line) with lines that a backslash or an open quote goes on from joined."""
    held, begun = "", 0
    for number, line in enumerate(text.splitlines()[:_MOST_LINES], 1):
        begun = begun or number
        if not held and line.lstrip().startswith("#"):
            yield number, line
            begun = 0
            continue
        if line.endswith("\\"):
            held += line[:-1] + " "
        elif len(held) + len(line) < _LONGEST and (held + line).replace('\\"', "").count('"') % 2:
            held += line + " "
        else:
            yield begun, held + line
            held, begun = "", 0
    if held:
        yield begun, held


def assignment(line: str) -> tuple[str, str, bool] | None:
    """(name, value as written without its quotes, whether it may hold variables) of `NAME=value`; None for others."""
    found = _ASSIGNED.match(line[:_LONGEST])
    if found is None:
        return None
    rest = line[found.end() : _LONGEST]
    if rest.startswith("$(("):
        written = _WRITTEN.match(rest)
        return (found[1], written[0], True) if written else None
    word = _WORD.match(rest)
    if word is None:
        return found[1], "", True
    if word[2] is not None:
        return found[1], word[2], False
    return found[1], word[1] if word[1] is not None else word[3], True


def expand(text: str, variables: Mapping[str, str], keep: bool = False) -> str | None:
    """The text with variables and arithmetic worked out; None where part of it cannot be known.

    With `keep`, what cannot be known stays as it is written.

    >>> expand("$((NODES * ${GPUS}))", {"NODES": "16", "GPUS": "4"})
    '64'
    """
    for _ in range(_DEEPEST):
        before = text
        text = _VARIABLE.sub(lambda found: _value(found, variables), text)
        text = _ARITHMETIC.sub(lambda found: _worked_out(found, variables), text)
        if text == before or len(text) > _LONGEST:
            break
    if len(text) > _LONGEST or (not keep and ("$" in text or "`" in text)):
        return text[:_LONGEST] if keep else None
    return text


def _value(found: re.Match[str], variables: Mapping[str, str]) -> str:
    name = found[1] or found[3]
    if name in variables:
        return variables[name]
    return found[2] if found[2] is not None else found[0]


def _worked_out(found: re.Match[str], variables: Mapping[str, str]) -> str:
    value = arithmetic(found[1], variables)
    return found[0] if value is None else str(value)


def arithmetic(text: str, variables: Mapping[str, str]) -> int | None:
    """What `$((text))` gives, in whole numbers as a shell has them; None where it cannot be known.

    >>> arithmetic("(WORLD_SIZE / (TP * PP)) % 5", {"WORLD_SIZE": "64", "TP": "4", "PP": "2"})
    3
    """
    tokens: list[str] = []
    place = 0
    while place < len(text.rstrip()):
        found = _TOKEN.match(text, place)
        if found is None or len(tokens) > 100:
            return None
        token = found[1] or found[3] or variables.get(found[2], "")
        if not token or (found[2] and not token.isdecimal()):
            return None
        tokens.append(token)
        place = found.end()
    try:
        value, rest = _sum(tokens, 0, 0)
    except (ValueError, IndexError, ZeroDivisionError):
        return None
    return value if rest == len(tokens) else None


def _sum(tokens: list[str], at: int, depth: int) -> tuple[int, int]:
    value, at = _product(tokens, at, depth)
    while at < len(tokens) and tokens[at] in "+-":
        sign = 1 if tokens[at] == "+" else -1
        other, at = _product(tokens, at + 1, depth)
        value = _checked(value + sign * other)
    return value, at


def _product(tokens: list[str], at: int, depth: int) -> tuple[int, int]:
    value, at = _single(tokens, at, depth)
    while at < len(tokens) and tokens[at] in "*/%":
        by = tokens[at]
        other, at = _single(tokens, at + 1, depth)
        # A shell cuts off towards zero.
        whole = abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1) if by != "*" else 0
        value = _checked(value * other if by == "*" else whole if by == "/" else value - whole * other)
    return value, at


def _single(tokens: list[str], at: int, depth: int) -> tuple[int, int]:
    if depth > _DEEPEST:
        raise ValueError("too deep")
    if tokens[at] == "(":
        value, at = _sum(tokens, at + 1, depth + 1)
        if tokens[at] != ")":
            raise ValueError("no closing parenthesis")
        return value, at + 1
    if tokens[at] == "-":
        value, at = _single(tokens, at + 1, depth + 1)
        return -value, at
    return int(tokens[at]), at + 1


def _checked(value: int) -> int:
    if abs(value) > _LARGEST:
        raise ValueError("larger than any size")
    return value
