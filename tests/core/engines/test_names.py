"""An engine's name is compared only by the engines, by their trainers, and by dialects: all others ask the engine."""

import ast
from collections.abc import Iterator
from itertools import pairwise

import jinja2
import pytest
from jinja2 import nodes

from hpc_gpt.core.engines import engines
from tests.conftest import REPOSITORY
from tests.test_imports import MODULES

# A word of its own, too: it is an engine's name only beside an engine.
COMMON = frozenset({"command"})
NAMES = frozenset(engines()) - COMMON
MAY_COMPARE = ("core.engines.", "trainer.engines.", "reader.programs.")
ASKERS = {module: path for module, path in MODULES.items() if not f"{module}.".startswith(MAY_COMPARE)}
TEMPLATES = sorted((REPOSITORY / "templates").rglob("*.j2"))
# Methods that look at a part of a text.
OF_PARTS = {"startswith", "endswith", "removeprefix", "removesuffix", "find", "index", "count", "partition", "split"}


def comparisons(tree: ast.AST, names: frozenset[str] = NAMES) -> Iterator[tuple[int, str]]:
    """(line, text) of what compares an engine's name, holds it in a collection, or looks at a part of it."""

    def is_name(node: ast.AST | None) -> bool:
        return isinstance(node, ast.Constant) and node.value in names

    def is_common(node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) and node.value in COMMON

    def is_part(node: ast.AST | None) -> bool:
        text = node.value if isinstance(node, ast.Constant) else None
        return isinstance(text, str) and len(text) > 1 and any(text in name for name in names)

    def is_engine(node: ast.AST) -> bool:
        """Whether an expression is an engine's name by its words, as `resolved.engine.name`, not a key of one."""
        return any(
            (isinstance(each, ast.Name) and each.id in ("engine", "name"))
            or (isinstance(each, ast.Attribute) and each.attr in ("engine", "name"))
            or (isinstance(each, ast.Constant) and each.value == "engine")
            for each in ast.walk(node)
        )

    every = list(ast.walk(tree))
    held = {
        ast.unparse(target)
        for node in every
        if isinstance(node, ast.Assign) and is_name(node.value)
        for target in node.targets
    }
    for node in every:
        found = False
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            equal = any(isinstance(operator, ast.Eq | ast.NotEq) for operator in node.ops)
            found = any(is_name(side) or (equal and held and ast.unparse(side) in held) for side in sides)
            found |= equal and any(map(is_common, sides)) and any(map(is_engine, sides))
            for operator, (left, right) in zip(node.ops, pairwise(sides), strict=True):
                found |= isinstance(operator, ast.In | ast.NotIn) and is_part(left) and is_engine(right)
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            found = any(map(is_name, node.elts))
        elif isinstance(node, ast.Dict):
            found = any(map(is_name, [*node.keys, *node.values]))
        elif isinstance(node, ast.MatchValue):
            found = is_name(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OF_PARTS:
            found = any(map(is_part, node.args)) and is_engine(node.func.value)
        if found:
            yield node.lineno, ast.unparse(node)


def test_no_other_module_compares_an_engines_name() -> None:
    trees = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in ASKERS.items()}
    assert [(module, each) for module, tree in trees.items() for each in comparisons(tree, NAMES)] == []


def test_no_template_names_an_engine() -> None:
    environment = jinja2.Environment(autoescape=True)
    trees = {path.name: environment.parse(path.read_text(encoding="utf-8")) for path in TEMPLATES}
    named = [(name, node) for name, tree in trees.items() for node in tree.find_all(nodes.Const)]
    assert [(name, node.lineno) for name, node in named if node.value in NAMES] == []


@pytest.mark.parametrize(
    "planted",
    [
        'resolved.engine.name == "fsdp"', '"ddp" != name', 'resolved.engine.name == "command"',
        'name in ("fsdp", other)', '{"ddp": 4}[name]', 'frozenset({"deepspeed-3d"})', 'Literal["ddp", "fsdp"]',
        'names = ["megatron-lm"]', '"deepspeed" in resolved.engine.name', '"zero" not in engine',
        'USUAL = "ddp"\nchosen = run.engine == USUAL', 'run.engine.startswith("hf")',
        '[name for name in found if name.endswith("-zero")]', 'str(draft.get("engine")).startswith("hf")',
        'match name:\n    case "fsdp" | "x":\n        pass',
    ],
)  # fmt: skip
def test_a_planted_comparison_is_found(planted: str) -> None:
    assert list(comparisons(ast.parse(planted)))


@pytest.mark.parametrize(
    "sound",
    [
        'name: str = "deepspeed-3d"', 'engine = "ddp" if zero == 0 else "fsdp"',
        'f"{name}; deepspeed-zero has stages 0 to 3"', '"deepspeed" in cited', 'engine == "hf"',
        'key.startswith("engine.")', '"offload" in engine_named(engine).switches', 'engine.partition(":")',
        'engine in engines()',
    ],
)  # fmt: skip
def test_what_only_writes_a_name_is_sound(sound: str) -> None:
    assert list(comparisons(ast.parse(sound))) == []
