"""Which digits of a line its patterns ask for: with these, lines that differ in other digits are matched alike.

In a pattern each atom that asks for certain digits is made a group of any digit. A match in which no such group took
part is found whatever the digits are; one with them is found in each line whose digits there are those asked for. This
is true because more digits can only mean more matches: not in an assertion that something is missing, nor in an atomic
group. Patterns with such an atom there may match a line or not.
"""

import re
from collections.abc import Sequence
from functools import cache

from hpc_gpt.readers.logs.matches import DialectPattern

# (place in a line, the digits that may be there), for each digit that a pattern asks for.
AskedDigits = tuple[tuple[int, str], ...]
_TOKEN = re.compile(
    r"\\x[0-9a-f]{2}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d+(?:,\d*)?\}[?+]?"
    r"|\(\?(?:P<\w+>|P=\w+\)|\(\w+\)|<[=!]|[:=!>]|[a-z]+[:)])|[*+?]\+|.",
    re.DOTALL,
)
_ANY_DIGIT = "0123456789"
_OPAQUE = ("(?!", "(?<!", "(?>")


@cache
def _loosened(regex: str) -> tuple[re.Pattern[str], dict[int, str]]:
    """(the pattern with any digit where it asks for certain ones, {group: the digits that it asks for}). These are ""
    where it cannot be said."""
    tokens = _TOKEN.findall(regex)
    found: list[str] = []
    asked: dict[int, str] = {}
    groups = 0
    opened: list[tuple[bool, int]] = []  # by open group: whether it is opaque, and the groups before it
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        repeated = following[:1] in ("{", "*", "+") or following == "?+"
        digits = ""
        if token[0] == "(" and (token[-1] != ")" or token.startswith("(?(")):
            opened.append((token in _OPAQUE or any(opaque for opaque, _ in opened), groups))
            groups += token == "(" or token.startswith("(?P<")
        elif token == ")":
            _, before = opened.pop()
            if repeated:  # only the last of its repetitions is known
                asked |= {group: "" for group in asked if group > before}
        elif token in _ANY_DIGIT:
            digits = token
        elif token[0] == "[":
            rest = re.sub(r"\\.|0-9", "", token)
            if any(digit in rest for digit in _ANY_DIGIT):
                digits = "".join(re.findall(token, _ANY_DIGIT)) if re.fullmatch(r"\[[\d-]+\]", token) else "?"
        elif token.startswith("(?P=") or re.fullmatch(r"\\[1-9]", token):
            digits = "?"
        if digits == "?" or (digits and opened and opened[-1][0]):
            return re.compile(""), {0: ""}
        if digits:
            groups += 1
            asked[groups] = "" if repeated else digits
            token = r"(\d)"
        found.append(token)
    return re.compile("".join(found)), asked


def asked_digits(tried: Sequence[DialectPattern], text: str) -> AskedDigits | None:
    """The digits that patterns ask for in a line that has them; None if it lacks one, or if none can say.

    `tried`: the patterns whose literal is in the line, digits aside.
    """
    found: dict[int, str] = {}
    for each in tried:
        literal = each.pattern.literal
        regex, asked = _loosened(each.pattern.regex)
        in_literal = [place for place, letter in enumerate(literal) if letter in _ANY_DIGIT]
        for match in regex.finditer(text) if asked or in_literal else ():
            at = text.find(literal) if in_literal else 0
            pairs = [(at + place, literal[place]) for place in in_literal]
            pairs += [(match.start(group), digits) for group, digits in asked.items() if match.start(group) >= 0]
            for place, digits in pairs:
                found[place] = "".join(digit for digit in found.get(place, _ANY_DIGIT) if digit in digits)
            if at < 0 or not all(text[place : place + 1] in tuple(found[place]) for place, _ in pairs):
                return None
    return tuple(found.items())
