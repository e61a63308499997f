"""The faults that can be made of a Python file: (line, last line of its statement, kind, start, end, text) each.

Docstrings, annotations, decorators and imports have none.
"""

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator

Change = tuple[int, int, str, int, int, str]

_TURNED = {
    ast.Lt: ("<", ">="), ast.LtE: ("<=", ">"), ast.Gt: (">", "<="), ast.GtE: (">=", "<"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
_SHIFTED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
# Calls whose value is their argument's, but for what the call is there for.
_OF_ONE = {
    "sorted",
    "abs",
    "round",
    "int",
    "float",
    "set",
    "list",
    "tuple",
    "reversed",
    "ceil",
    "floor",
    "quote",
    "bool",
}
_OF_NONE = {"strip", "rstrip", "lstrip", "lower", "upper", "resolve", "absolute", "detach", "item", "copy"}
_UNITS = {"GiB": "GB", "GB": "GiB", "MiB": "GiB", "TiB": "GiB", "KiB": "MiB", "MB": "GB", "TB": "GB", "ms": "s",
          "s": "ms", "min": "h", "h": "min", "days": "h", "TFLOP/s": "GFLOP/s", "tokens/s": "tokens"}  # fmt: skip
_ANY_UNIT = "|".join(map(re.escape, sorted(_UNITS, key=len, reverse=True)))
_UNIT = re.compile(rf"(?<=[\d}} ])({_ANY_UNIT})(?![\w/'])")
_WORD = re.compile(r"[\w.%/-]+")


def is_grammatical(sound: bytes, changed: bytes) -> bool:
    """Whether the changed file compiles, to another program."""
    try:
        return ast.dump(ast.parse(changed)) != ast.dump(ast.parse(sound))
    except (SyntaxError, ValueError):
        return False


def lines_of_functions(source: bytes) -> set[int]:
    """The lines that run as something is called; the others of the file run as it is imported."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.update(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
    return found


def lines_of_tables(source: bytes) -> set[int]:
    """The lines of values that a module or a class has: what its package does may depend on them anywhere."""
    found: set[int] = set()
    blocks: list[ast.AST] = [ast.parse(source)]
    while blocks:
        for node in getattr(blocks.pop(), "body", []):
            if isinstance(node, ast.ClassDef):
                blocks.append(node)
            elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_left_out(node):
                found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def changes_of_python(source: bytes) -> Iterator[Change]:
    """All that can be made of the file's statements."""
    return _Changes(source).all()


class _Changes:
    def __init__(self, source: bytes) -> None:
        self.source = source
        self.tree = ast.parse(source)
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self.offsets[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offsets[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def all(self) -> Iterator[Change]:
        for statement in _statements(self.tree):
            first, last = statement.lineno, _last_line(statement)
            for kind, line, start, end, text in self.of_statement(statement):
                yield line, max(last, line), kind, start, end, text
            for node, inside in _expressions(statement):
                # Before Python 3.12 the place of what is in an f-string is not to be relied on.
                if inside and not self.is_there(node):
                    continue
                for kind, start, end, text in self.of_expression(node):
                    line = bisect_right(self.offsets, start)
                    yield line, max(last, first, line), kind, start, end, text

    def is_there(self, node: ast.expr) -> bool:
        try:
            return ast.dump(ast.parse(f"({self.text(node)})", mode="eval").body) == ast.dump(node)
        except (SyntaxError, ValueError, UnicodeDecodeError):
            return False

    def of_statement(self, node: ast.stmt) -> Iterator[tuple[str, int, int, int, str]]:
        def instead(kind: str, of: ast.expr | ast.stmt, text: str) -> tuple[str, int, int, int, str]:
            return kind, of.lineno, self.start(of), self.end(of), text

        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield instead("a call left out", node, "pass")
        if isinstance(node, ast.Raise):
            yield instead("an exception swallowed", node, "pass")
        if isinstance(node, (ast.Break, ast.Continue)):
            yield instead("a branch dropped", node, "pass")
        if isinstance(node, (ast.If, ast.While)):
            if not isinstance(node.test, ast.Compare):
                yield instead("a condition negated", node.test, f"not ({self.text(node.test)})")
            yield instead("a branch dropped", node.test, "False")
        if isinstance(node, ast.If) and node.orelse and not _is_elif(node, self.source, self.offsets):
            kind, line, start, _, text = instead("a branch dropped", node.orelse[0], "pass")
            yield kind, line, start, self.end(node.orelse[-1]), text
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                if not isinstance(handler.body[0], ast.Pass):
                    kind, line, start, _, text = instead("an exception swallowed", handler.body[0], "pass")
                    yield kind, line, start, self.end(handler.body[-1]), text

    def of_expression(self, node: ast.expr) -> Iterator[tuple[str, int, int, str]]:
        start, end = self.start(node), self.end(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self.end(node.left), self.start(node.comparators[0])
            between, operator = self.source[left:right].decode(), type(node.ops[0])
            sign, turned = _TURNED[operator]
            yield "a comparison turned", left, right, between.replace(sign, turned, 1)
            if operator in _SHIFTED:
                yield "a comparison shifted", left, right, between.replace(sign, _SHIFTED[operator], 1)
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for one, next_one in zip(node.values, node.values[1:], strict=False):
                left, right = self.end(one), self.start(next_one)
                yield "and, or", left, right, self.source[left:right].decode().replace(*words, 1)
        elif isinstance(node, ast.IfExp):
            yield "a branch dropped", start, end, f"({self.text(node.body)})"
            yield "a branch dropped", start, end, f"({self.text(node.orelse)})"
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            for test in [test for generator in node.generators for test in generator.ifs]:
                if not isinstance(test, ast.Compare):
                    yield "a condition negated", self.start(test), self.end(test), f"(not ({self.text(test)}))"
        elif isinstance(node, ast.Constant):
            yield from self.of_constant(node)
        elif isinstance(node, ast.Call):
            yield from self.of_call(node)
        elif isinstance(node, ast.JoinedStr):
            yield from self.of_joined(node)

    def of_constant(self, node: ast.Constant) -> Iterator[tuple[str, int, int, str]]:
        start, end, value, text = self.start(node), self.end(node), node.value, self.text(node)
        if isinstance(value, bool):
            yield "a constant changed", start, end, str(not value)
        elif isinstance(value, int):
            yield "a constant changed", start, end, str(value + 1)
        elif isinstance(value, float):
            yield "a constant changed", start, end, repr(value * 2 or 1.0)
        elif isinstance(value, str) and text.startswith(('"', "'")) and _value_of(text) == value:
            if _WORD.fullmatch(value):
                yield "a constant changed", end - 1, end - 1, "x"
            yield from self.units(text, start)

    def units(self, text: str, start: int) -> Iterator[tuple[str, int, int, str]]:
        for found in _UNIT.finditer(text):
            place = start + len(text[: found.start()].encode())
            yield "a unit changed", place, place + len(found[0].encode()), _UNITS[found[0]]

    def of_call(self, node: ast.Call) -> Iterator[tuple[str, int, int, str]]:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in _OF_ONE and len(node.args) == 1 and not isinstance(node.args[0], (ast.Starred, ast.GeneratorExp)):
            yield "a call left out", self.start(node), self.end(node), f"({self.text(node.args[0])})"
        if name in _OF_NONE and not node.args and not node.keywords and isinstance(node.func, ast.Attribute):
            yield "a call left out", self.start(node), self.end(node), self.text(node.func.value)
        each = sorted([*node.args, *node.keywords], key=self.start)
        for number, argument in enumerate(each):
            if isinstance(argument, ast.keyword) and argument.arg:
                # With the comma before it, or after it if it is the first.
                first = self.end(each[number - 1]) if number else self.start(argument)
                last = self.end(argument) if number or len(each) == 1 else self.start(each[1])
                yield "an argument dropped", first, last, ""
        if len(node.args) > 1 and not isinstance(node.args[-1], ast.Starred):
            yield "an argument dropped", self.end(node.args[-2]), self.end(node.args[-1]), ""

    def of_joined(self, node: ast.JoinedStr) -> Iterator[tuple[str, int, int, str]]:
        text, start = self.text(node), self.start(node)
        for found in re.finditer(r"(?<!\{)\{(?!\{)", text):
            place = start + len(text[: found.start()].encode())
            yield "a figure changed", place, place, "1"
        yield from self.units(text, start)


def _value_of(text: str) -> object:
    try:
        return ast.literal_eval(f"({text})")
    except (SyntaxError, ValueError):  # a part of an f-string
        return None


def _is_elif(node: ast.If, source: bytes, offsets: list[int]) -> bool:
    first = node.orelse[0]
    place = offsets[first.lineno - 1] + first.col_offset
    return isinstance(first, ast.If) and source[place : place + 4] == b"elif"


def _last_line(statement: ast.stmt) -> int:
    """Of its own text: of what it holds, a block, none."""
    if isinstance(statement, (ast.If, ast.While)):
        return statement.test.end_lineno or statement.lineno
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        return statement.iter.end_lineno or statement.lineno
    if isinstance(statement, (ast.With, ast.FunctionDef, ast.ClassDef, ast.Try, ast.Match, ast.AsyncFunctionDef)):
        return statement.lineno
    return statement.end_lineno or statement.lineno


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, name, None) or []:
            if isinstance(each, ast.stmt) and not _is_left_out(each):
                yield each
            if isinstance(each, ast.AST) and not (isinstance(each, ast.If) and _is_left_out(each)):
                yield from _statements(each)


def _is_left_out(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.If(test=ast.Attribute(attr="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar"))):
            return True
    return False


def _expressions(statement: ast.stmt) -> Iterator[tuple[ast.expr, bool]]:
    """(expression, whether it is inside an f-string) of a statement, without its blocks, types and decorators."""
    skipped = {"body", "orelse", "finalbody", "handlers", "cases", "annotation", "returns", "decorator_list", "bases"}

    def inner(node: ast.AST, inside: bool) -> Iterator[tuple[ast.expr, bool]]:
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if name == "cast":
            node = node.args[1]  # type: ignore[attr-defined]
        if isinstance(node, ast.expr) and not isinstance(node, ast.FormattedValue):
            # The texts between the figures have the place of the whole.
            yield node, inside
        for each in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.JoinedStr) and isinstance(each, ast.Constant)):
                yield from inner(each, inside or isinstance(node, ast.JoinedStr))

    for field, value in ast.iter_fields(statement):
        if field not in skipped:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.arguments):
                    for default in [*each.defaults, *filter(None, each.kw_defaults)]:
                        yield from inner(default, False)
                elif isinstance(each, (ast.expr, ast.withitem, ast.keyword)):
                    yield from inner(each, False)
    if isinstance(statement, ast.Match):
        for case in statement.cases:
            if case.guard is not None:
                yield from inner(case.guard, False)
