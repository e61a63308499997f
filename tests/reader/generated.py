"""Text that a regular expression matches, made from the expression itself."""

import random
import re
from collections.abc import Iterator
from functools import cache
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_MOST = 4  # repetitions beyond the least
_CLASSES = {
    codes.CATEGORY_DIGIT: "0123456789",
    codes.CATEGORY_SPACE: " \t",
    codes.CATEGORY_WORD: "aZ_09é",
    codes.CATEGORY_NOT_DIGIT: "a .-",
    codes.CATEGORY_NOT_SPACE: "a0.é$",
    codes.CATEGORY_NOT_WORD: " .-/",
}
_ANY = "aZ_09 .:|%-+'é\x85"


def groups_of(regex: str) -> dict[str, Any]:
    """The named groups of an expression, parsed."""
    tree = parser.parse(regex)
    numbers = {number: name for name, number in tree.state.groupdict.items()}
    return {numbers[number]: inner for number, inner in _groups(tree) if number in numbers}


def _groups(tree: Any) -> Iterator[tuple[int | None, Any]]:
    if isinstance(tree, parser.SubPattern):
        for code, given in tree:
            if code is codes.SUBPATTERN:
                yield given[0], given[-1]
            yield from _groups(given)
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _groups(each)


def text_of(tree: Any, dice: random.Random) -> str:
    """A text for a parsed expression. What may follow or precede by a lookahead or lookbehind is at its place, if it
    is asked for; what must not is not looked at."""
    return "".join(_text(code, given, dice) for code, given in tree)


def _text(code: Any, given: Any, dice: random.Random) -> str:
    if code is codes.LITERAL:
        return chr(given)
    if code is codes.NOT_LITERAL:
        return dice.choice([each for each in _ANY if each != chr(given)])
    if code is codes.ANY:
        return dice.choice(_ANY)
    if code is codes.IN:
        return dice.choice(_members(tuple(given)))
    if code is codes.BRANCH:
        return text_of(dice.choice(given[1]), dice)
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        least, most, inner = given
        most = min(int(most), least + _MOST) if dice.randrange(8) else min(int(most), least + 30)
        return "".join(text_of(inner, dice) for _ in range(dice.choice((least, most, dice.randint(least, most)))))
    if code is codes.SUBPATTERN:
        return text_of(given[-1], dice)
    if code is codes.ATOMIC_GROUP:
        return text_of(given, dice)
    if code is codes.ASSERT:
        return text_of(given[1], dice) if given[0] > 0 and dice.randrange(2) else ""
    return ""


@cache
def _members(given: tuple[Any, ...]) -> str:
    """The characters of a class in brackets, of large ones some."""
    allowed = re.compile("[" + "".join(_source(each) for each in given) + "]")
    likely = {chr(number) for number in range(32, 127)} | set(_ANY)
    for code, value in given:
        if code is codes.LITERAL:
            likely.add(chr(value))
        elif code is codes.RANGE:
            likely |= {chr(value[0]), chr(value[1])}
        elif code is codes.CATEGORY:
            likely |= set(_CLASSES[value])
    return "".join(sorted(each for each in likely if allowed.fullmatch(each)))


def _source(item: Any) -> str:
    code, value = item
    if code is codes.NEGATE:
        return "^"
    if code is codes.LITERAL:
        return re.escape(chr(value))
    if code is codes.RANGE:
        return f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
    letters = {"DIGIT": "d", "SPACE": "s", "WORD": "w"}
    name = str(value).removeprefix("CATEGORY_")
    letter = letters[name.removeprefix("NOT_")]
    return "\\" + (letter.upper() if name.startswith("NOT_") else letter)
