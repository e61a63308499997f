"""Formulas as documents state them: read by a parser that knows arithmetic and names, worked out exactly.

Nothing is executed. A name may be several words or hyphenated ("micro-batch-size", "number of GPUs", `$ng`); whether a
hyphen is a minus is settled by which names are known.

    sum     = product (("+" | "-") product)*
    product = power (("*" | "/") power)*
    power   = ("-" | "+")? atom (("**" | "^") power)?
    atom    = number | name | "(" sum ")"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from hpc_gpt.report.audit.quantities import Named, named

_LONGEST_TEXT = 400
_MOST_TOKENS = 200
_DEEPEST = 20
_LARGEST_POWER = 8
_MOST_BITS = 4096
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d[\d_]{0,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][+-]?\d{1,2})?)(?![\w.])"
    r"|(?P<name>[$]?[A-Za-z_#]\w{0,60}(?:-[A-Za-z]\w{0,60}){0,6})|(?P<sign>\*\*|[-+*/^()]))"
)
_SAME_SIGN = str.maketrans({"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "∗": "*"})
_WORDS_OF_A_NAME = 5
_NO_SYMBOLS: Mapping[str, Named] = {}


class FormulaError(ValueError):
    """Text that is no formula, or one that has no value."""


@dataclass(frozen=True)
class _Token:
    kind: str  # number, name, sign
    text: str
    value: Fraction = Fraction(0)
    named: Named | None = None


@dataclass(frozen=True)
class Formula:
    """A formula in the document's words. `names`: what it needs, in the order met, by the name the text has."""

    text: str
    tokens: tuple[_Token, ...]

    @property
    def names(self) -> dict[str, Named]:
        """What each name stands for."""
        return {token.text: token.named for token in self.tokens if token.named is not None}

    @property
    def has_arithmetic(self) -> bool:
        """Whether it is more than a name or a number."""
        return any(token.kind == "sign" and token.text in "**/+-" for token in self.tokens)

    def value(self, values: Mapping[str, Fraction]) -> Fraction:
        """The value with `values` for the names, exact; FormulaError for a division by zero or a number too large."""
        return _Evaluation(self.tokens, values).whole()

    def filled(self, shown: Mapping[str, str]) -> str:
        """The formula with `shown` in the place of the names.

        >>> parse("$ms*4 / ( $sp * 1e3)").filled({"$ms": "48", "$sp": "122"})
        '48 * 4 / (122 * 1e3)'
        """
        text = ""
        for token in self.tokens:
            word = shown.get(token.text, token.text) if token.kind == "name" else token.text
            text += f" {word} " if token.kind == "sign" and token.text in "*/+-" else word
        return re.sub(r"\s+", " ", text).strip()


def parse(text: str, symbols: Mapping[str, Named] = _NO_SYMBOLS) -> Formula:
    """The formula of a text; FormulaError where it is none, or names what is not known.

    `symbols` are names that the document explains itself, as "P parameters".
    """
    if len(text) > _LONGEST_TEXT:
        raise FormulaError("the formula is too long")
    text = text.translate(_SAME_SIGN)
    tokens: list[_Token] = []
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) >= _MOST_TOKENS:
            raise FormulaError(f"{text[at : at + 20].strip()!r} is no part of a formula")
        at = match.end()
        kind = match.lastgroup or ""
        word = match[kind]
        value = Fraction(Decimal(word.replace("_", ""))) if kind == "number" else Fraction(0)
        tokens.append(_Token(kind, word, value))
    formula = Formula(" ".join(text.split()), tuple(_join_names(tokens, symbols)))
    _Evaluation(formula.tokens, None).whole()
    return formula


def _join_names(tokens: list[_Token], symbols: Mapping[str, Named]) -> list[_Token]:
    """Words that follow one another become the one name they are, hyphens no name has become minus signs."""
    joined: list[_Token] = []
    while tokens:
        first, *rest = tokens
        if first.kind != "name":
            joined.append(first)
            tokens = rest
            continue
        run = 1
        while run < len(tokens) and tokens[run].kind == "name":
            run += 1
        after_a_value = bool(joined) and (joined[-1].kind != "sign" or joined[-1].text == ")")
        if first.text in ("x", "X") and first.text not in symbols and after_a_value:
            joined.append(_Token("sign", "*"))
            tokens = rest
            continue
        for words in range(min(run, _WORDS_OF_A_NAME), 0, -1):
            text = " ".join(token.text for token in tokens[:words])
            meant = symbols.get(text) or named(text, in_formula=True)
            if meant is not None:
                joined.append(_Token("name", text, named=meant))
                tokens = tokens[words:]
                break
        else:
            if "-" not in first.text:
                raise FormulaError(f"{first.text!r} is not known")
            parts = re.split(r"(-)", first.text)
            tokens = [_Token("sign" if part == "-" else "name", part) for part in parts] + rest
    return joined


class _Evaluation:
    """One pass over the tokens; without values it only checks that they are a formula."""

    def __init__(self, tokens: tuple[_Token, ...], values: Mapping[str, Fraction] | None) -> None:
        self.tokens = tokens
        self.values = values
        self.at = 0
        self.depth = 0

    def whole(self) -> Fraction:
        value = self.sum()
        if self.at < len(self.tokens):
            raise FormulaError(f"{self.tokens[self.at].text!r} is out of place")
        return value

    def sum(self) -> Fraction:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise FormulaError("the formula is nested too deep")
        value = self._chain(self.product, "+", "-")
        self.depth -= 1
        return value

    def product(self) -> Fraction:
        return self._chain(self.power, "*", "/")

    def power(self) -> Fraction:
        sign = self._take("+", "-")
        value = self.atom()
        if self._take("**", "^"):
            self.depth += 1
            if self.depth > _DEEPEST:
                raise FormulaError("the formula is nested too deep")
            value = self._raise(value, self.power())
            self.depth -= 1
        return -value if sign == "-" else value

    def atom(self) -> Fraction:
        if self._take("("):
            value = self.sum()
            if not self._take(")"):
                raise FormulaError("a bracket is not closed")
            return value
        if self.at >= len(self.tokens) or self.tokens[self.at].kind == "sign":
            raise FormulaError("a number or a name is missing")
        token = self.tokens[self.at]
        self.at += 1
        if token.kind == "number" or self.values is None:
            return token.value
        if token.text not in self.values:
            raise FormulaError(f"{token.text} is not known")
        return self.values[token.text]

    def _chain(self, part: Callable[[], Fraction], *signs: str) -> Fraction:
        value = part()
        while sign := self._take(*signs):
            other = part()
            if self.values is None:
                continue
            if sign == "/" and not other:
                raise FormulaError("it divides by zero")
            value = self._bounded(
                value * other if sign == "*" else value / other if sign == "/" else value + other
                if sign == "+" else value - other
            )  # fmt: skip
        return value

    def _raise(self, value: Fraction, power: Fraction) -> Fraction:
        if self.values is None:
            return value
        if power.denominator != 1 or (abs(power) > _LARGEST_POWER and value not in (2, 10)) or abs(power) > 64:
            raise FormulaError("its power is too large")
        if not value and power < 0:
            raise FormulaError("it divides by zero")
        return self._bounded(value ** int(power))

    def _bounded(self, value: Fraction) -> Fraction:
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
            raise FormulaError("its numbers are too large")
        return value

    def _take(self, *signs: str) -> str:
        if self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.kind == "sign" and token.text in signs:
                self.at += 1
                return token.text
        return ""
