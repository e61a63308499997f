"""Arithmetic and `${NAME…}` of constants, as bash computes them."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable
from typing import Any


def changed_text(text: str, mark: str, operand: str) -> str:
    """`${text MARK operand}` of constants."""
    if mark in ("#", "##", "%", "%%"):
        cuts = range(len(text) + 1)
        sides = [(text[:cut], text[cut:]) for cut in cuts]
        if mark.startswith("#"):
            fit = [rest for head, rest in sides if fnmatch.fnmatchcase(head, operand)]
            return (fit[-1] if mark == "##" else fit[0]) if fit else text
        fit = [head for head, rest in sides if fnmatch.fnmatchcase(rest, operand)]
        return (fit[0] if mark == "%%" else fit[-1]) if fit else text
    if mark in ("/", "//"):
        old, _, new = operand.partition("/")
        return text.replace(old, new, -1 if mark == "//" else 1) if old else text
    if mark in ("^", "^^", ",", ",,"):
        change: Callable[[str], str] = str.upper if mark[0] == "^" else str.lower
        return change(text) if len(mark) == 2 else change(text[:1]) + text[1:]
    start, _, length = operand.partition(":")
    numbers = [int(each) if re.fullmatch(r"\s*-?\d+\s*", each) else None for each in (start, length)]
    begin = numbers[0] or 0
    return text[begin:] if numbers[1] is None else text[begin:][: numbers[1]]


_OPERATORS: dict[type, Callable[[int, int], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b), ast.FloorDiv: lambda a, b: int(a / b), ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


def evaluate(text: str) -> int | None:
    """A whole number from an expression of numbers; None if it is no such thing, or is too large."""
    if len(text) > 500:
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and (binary := _OPERATORS.get(type(node.op))):
        found = int(binary(_value(node.left), _value(node.right)))
        if abs(found) < 2**63:
            return found
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and (compare := _OPERATORS.get(type(node.ops[0]))):
        return int(compare(_value(node.left), _value(node.comparators[0])))
    raise ValueError("not a constant of whole numbers")
