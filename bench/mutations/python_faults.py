"""The faults that can be made of a Python file: (line, kind, start, end, text) each.

Docstrings, annotations, decorators, imports and what an f-string holds have none.
"""

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

Change = tuple[int, str, int, int, str]
_Node = ast.expr | ast.stmt | ast.keyword
_Edit = tuple[str, int, int, str]

_TURNED = {
    ast.Lt: ("<", ">="), ast.LtE: ("<=", ">"), ast.Gt: (">", "<="), ast.GtE: (">=", "<"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
_SHIFTED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
# Calls whose value could be mistaken for their argument, or for the object whose method they call.
_OF_ONE = {"sorted", "abs", "round", "int", "float", "set", "list", "tuple", "reversed", "ceil", "floor", "quote"}
_OF_NONE = {"strip", "rstrip", "lstrip", "lower", "upper", "resolve", "absolute", "detach", "item", "copy"}
_WORD = re.compile(r"[\w.%/-]+")
_BLOCKS = {"body", "orelse", "finalbody", "handlers", "cases"}
_SKIPPED = _BLOCKS | {"annotation", "returns", "decorator_list", "bases"}


def is_grammatical(source: bytes, changed: bytes) -> bool:
    """Whether the changed file compiles, to another program."""
    try:
        return ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
    except (SyntaxError, ValueError):
        return False


def changes_of_python(source: bytes) -> Iterator[Change]:
    """Every fault that can be made of the file's statements."""
    file = _File(source)
    for statement in _statements(ast.parse(source)):
        for kind, start, end, text in file.of_statement(statement):
            yield file.line(start), kind, start, end, text
        for node in _expressions(statement):
            for kind, start, end, text in file.of_expression(node):
                yield file.line(start), kind, start, end, text


class _File:
    def __init__(self, source: bytes) -> None:
        self.source = source
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))

    def line(self, place: int) -> int:
        return bisect_right(self.offsets, place)

    def start(self, node: _Node) -> int:
        return self.offsets[node.lineno - 1] + node.col_offset

    def end(self, node: _Node) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offsets[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: _Node) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def of_statement(self, node: ast.stmt) -> Iterator[_Edit]:
        match node:
            case ast.Expr(value=ast.Call()):
                yield "a call left out", self.start(node), self.end(node), "pass"
            case ast.Raise():
                yield "an exception swallowed", self.start(node), self.end(node), "pass"
            case ast.Break() | ast.Continue():
                yield "a branch dropped", self.start(node), self.end(node), "pass"
            case ast.If(test=test) | ast.While(test=test):
                if not isinstance(test, ast.Compare):
                    yield "a condition negated", self.start(test), self.end(test), f"not ({self.text(test)})"
                yield "a branch dropped", self.start(test), self.end(test), "False"
                # An `elif` starts with its own word: what takes its place would be no statement.
                if node.orelse and self.source[self.start(node.orelse[0]) :][:4] != b"elif":
                    yield "a branch dropped", self.start(node.orelse[0]), self.end(node.orelse[-1]), "pass"
            case ast.Try(handlers=handlers):
                for body in [handler.body for handler in handlers if not isinstance(handler.body[0], ast.Pass)]:
                    yield "an exception swallowed", self.start(body[0]), self.end(body[-1]), "pass"

    def of_expression(self, node: ast.expr) -> Iterator[_Edit]:
        start, end = self.start(node), self.end(node)
        match node:
            case ast.Compare(left=one, ops=[operator], comparators=[other]):
                left, right = self.end(one), self.start(other)
                between, (sign, turned) = self.source[left:right].decode(), _TURNED[type(operator)]
                yield "a comparison turned", left, right, between.replace(sign, turned, 1)
                if shifted := _SHIFTED.get(type(operator)):
                    yield "a comparison shifted", left, right, between.replace(sign, shifted, 1)
            case ast.BoolOp(op=operator, values=values):
                words = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
                for one, other in pairwise(values):
                    left, right = self.end(one), self.start(other)
                    yield "and, or", left, right, self.source[left:right].decode().replace(*words, 1)
            case ast.IfExp(body=one, orelse=other):
                yield "a branch dropped", start, end, f"({self.text(one)})"
                yield "a branch dropped", start, end, f"({self.text(other)})"
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                for test in [test for generator in node.generators for test in generator.ifs]:
                    if not isinstance(test, ast.Compare):
                        yield "a condition negated", self.start(test), self.end(test), f"(not ({self.text(test)}))"
            case ast.Constant(value=bool() as value):
                yield "a constant changed", start, end, str(not value)
            case ast.Constant(value=int() as value):
                yield "a constant changed", start, end, str(value + 1)
            case ast.Constant(value=float() as value):
                yield "a constant changed", start, end, repr(value * 2 or 1.0)
            case ast.Constant(value=str() as value) if self.text(node)[1:-1] == value and _WORD.fullmatch(value):
                yield "a constant changed", end - 1, end - 1, "x"
            case ast.Call():
                yield from self.of_call(node)

    def of_call(self, node: ast.Call) -> Iterator[_Edit]:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in _OF_ONE and len(node.args) == 1 and not isinstance(node.args[0], (ast.Starred, ast.GeneratorExp)):
            yield "a call left out", self.start(node), self.end(node), f"({self.text(node.args[0])})"
        if name in _OF_NONE and not node.args and not node.keywords and isinstance(node.func, ast.Attribute):
            yield "a call left out", self.start(node), self.end(node), self.text(node.func.value)
        arguments = sorted([*node.args, *node.keywords], key=self.start)
        for number, argument in enumerate(arguments):
            if isinstance(argument, ast.keyword) and argument.arg:
                # With the comma before it, or after it if it is the first.
                first = self.end(arguments[number - 1]) if number else self.start(argument)
                last = self.end(argument) if number or len(arguments) == 1 else self.start(arguments[1])
                yield "an argument dropped", first, last, ""
        if len(node.args) > 1 and not isinstance(node.args[-1], ast.Starred):
            yield "an argument dropped", self.end(node.args[-2]), self.end(node.args[-1]), ""


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in [child for field in sorted(_BLOCKS) for child in getattr(node, field, None) or []]:
        match child:
            case ast.Expr(value=ast.Constant()) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.stmt():
                yield child
        if isinstance(child, ast.AST):  # a lambda's body is a statement's own
            yield from _statements(child)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement, without those of its blocks, types and decorators."""

    def inner(node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast":
            node = node.args[1]
        if isinstance(node, ast.expr):
            yield node
        if not isinstance(node, ast.JoinedStr):  # before Python 3.12 it has no places of what it holds
            for child in ast.iter_child_nodes(node):
                if not (isinstance(node, ast.arg) or child is getattr(node, "annotation", None)):
                    yield from inner(child)

    values = [value for field, value in ast.iter_fields(statement) if field not in _SKIPPED]
    for child in [child for value in values for child in (value if isinstance(value, list) else [value])]:
        if isinstance(child, (ast.expr, ast.withitem, ast.keyword, ast.arguments)):
            yield from inner(child)
    for case in statement.cases if isinstance(statement, ast.Match) else ():
        if case.guard is not None:
            yield from inner(case.guard)
