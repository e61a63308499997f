"""Formulas as documents write them: arithmetic on names and numbers, evaluated exactly.

A name may have several words or hyphens ("micro-batch-size", "number of GPUs", `$ng`); whether a hyphen is a minus
depends on the known names. Names and numbers become variables, Python's parser reads the rest, and only arithmetic on
variables is accepted, so nothing is executed.
"""

from __future__ import annotations

import ast
import operator
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
_NUMBER = r"(?:\d[\d_]{0,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][+-]?\d{1,2})?(?![\w.])"
# At most seven words, with a blank or a hyphen between them.
_NAME = r"[$]?[A-Za-z_#]\w{0,60}(?:[ -][A-Za-z]\w{0,60}){0,6}"
_TOKEN = re.compile(rf" ?(?:(?P<number>{_NUMBER})|(?P<name>{_NAME})|(?P<sign>\*\*|[-+*/^()]))")
_SAME_SIGN = str.maketrans({"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "∗": "*"})
_NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Name, ast.operator, ast.unaryop, ast.expr_context)
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_NO_SYMBOLS: Mapping[str, Named] = {}


class FormulaError(ValueError):
    """A text is not a formula, or a formula has no value."""


@dataclass(frozen=True)
class Formula:
    """A formula as in the document. `names`: what each name in it means, in order of appearance."""

    text: str
    tokens: tuple[tuple[str, str], ...]  # (number, name or sign; text)
    names: Mapping[str, Named]
    tree: ast.expr  # variables v0, v1, … are the tokens at these places

    @property
    def has_arithmetic(self) -> bool:
        """Whether it has an operator."""
        return any(kind == "sign" and text in "**/+-" for kind, text in self.tokens)

    def value(self, values: Mapping[str, Fraction]) -> Fraction:
        """The exact value with `values` for the names; FormulaError for a division by zero or too large numbers."""
        return self._work_out(self.tree, values)

    def _work_out(self, node: ast.expr, values: Mapping[str, Fraction]) -> Fraction:
        if isinstance(node, ast.Name):
            kind, text = self.tokens[int(node.id[1:])]
            if kind == "name" and text not in values:
                raise FormulaError(f"{text} is not known")
            return values[text] if kind == "name" else Fraction(Decimal(text.replace("_", "")))
        if isinstance(node, ast.UnaryOp):
            value = self._work_out(node.operand, values)
            return -value if isinstance(node.op, ast.USub) else value
        assert isinstance(node, ast.BinOp)
        left, right = self._work_out(node.left, values), self._work_out(node.right, values)
        is_power, is_division = isinstance(node.op, ast.Pow), isinstance(node.op, ast.Div)
        if is_power and (right.denominator != 1 or abs(right) > (64 if left in (2, 10) else _LARGEST_POWER)):
            raise FormulaError("its power is too large")
        if (is_division and not right) or (is_power and right < 0 and not left):
            raise FormulaError("it divides by zero")
        value = Fraction(_OPERATIONS[type(node.op)](left, right))
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
            raise FormulaError("its numbers are too large")
        return value

    def filled(self, shown: Mapping[str, str]) -> str:
        """The formula with its names replaced by `shown`.

        >>> parse("$ms*4 / ( $sp * 1e3)").filled({"$ms": "48", "$sp": "122"})
        '48 * 4 / (122 * 1e3)'
        """
        filled = ""
        for kind, text in self.tokens:
            filled += shown.get(text, text) if kind == "name" else f" {text} " if text in "*/+-" else text
        return re.sub(r"\s+", " ", filled).strip()


def parse(text: str, symbols: Mapping[str, Named] = _NO_SYMBOLS) -> Formula:
    """The formula in a text; FormulaError if there is none, or it has an unknown name.

    `symbols`: names that the document explains, such as "P parameters".
    """
    if len(text) > _LONGEST_TEXT:
        raise FormulaError("the formula is too long")
    text = " ".join(text.translate(_SAME_SIGN).split())
    tokens: list[tuple[str, str]] = []
    names: dict[str, Named] = {}
    at = depth = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) >= _MOST_TOKENS:
            raise FormulaError(f"{text[at : at + 20].strip()!r} is not part of a formula")
        kind = match.lastgroup or ""
        word, at = match[kind], match.end()
        if kind == "name":
            after_a_value = bool(tokens) and (tokens[-1][0] != "sign" or tokens[-1][1] == ")")
            name, meant = _longest_name(word, symbols, after_a_value)
            at -= len(word) - len(name)
            kind, word = ("name", name) if meant else ("sign", "*")
            if meant:
                names[name] = meant
        depth += (word == "(") - (word == ")")
        if depth > _DEEPEST:
            raise FormulaError("the formula is nested too deep")
        tokens.append((kind, word))
    return Formula(text, tuple(tokens), names, _tree(tokens))


def _longest_name(words: str, symbols: Mapping[str, Named], after_a_value: bool) -> tuple[str, Named | None]:
    """The longest name at the start of `words` and its meaning; None for an "x" that multiplies."""
    parts = re.split(r"([ -])", words)
    if after_a_value and parts[0] in ("x", "X") and parts[0] not in symbols:
        return parts[0], None
    for count in range(len(parts), 0, -2):
        name = "".join(parts[:count])
        meant = symbols.get(name) or named(name, in_formula=True)
        if meant is not None:
            return name, meant
    raise FormulaError(f"{parts[0]!r} is not known")


def _tree(tokens: list[tuple[str, str]]) -> ast.expr:
    """The syntax tree; each variable is named after the place of its token."""
    source = " ".join(
        text.replace("^", "**") if kind == "sign" else f"v{place}" for place, (kind, text) in enumerate(tokens)
    )
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as fault:
        raise FormulaError("a number, a name, a sign or a bracket is missing") from fault
    if not all(isinstance(node, _NODES) for node in ast.walk(tree)):
        raise FormulaError("it is not only arithmetic")
    return tree.body
