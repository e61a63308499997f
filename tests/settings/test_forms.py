"""Whether a run is of our model or of a program is known to its form and to its engine: all others ask them."""

import ast
from collections.abc import Iterator
from dataclasses import fields

import pytest

from hpc_gpt.settings.forms import OurModel, OwnProgram
from tests.test_imports import MODULES

WORDS = {"NO_MODEL", "NO_BATCH", "has_model", "has_batch", "has_layout", "is_program", "takes_command"}
FORMS = {
    "settings.forms",
    "settings.resolved",
    "engines",
    "engines.base.facts",
    "engines.command",
    "engines.megatron_lm",
}
# {a module that finds it out itself: why}
EXCEPTIONS = {
    "settings.resolve": "leaves out the model and the batch of a program, before there is a run",
    "settings.around": "its command is that of [notify]",
    "train.__main__": "starts the one or the other: a program needs no torch",
}


def found_out(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of each of the words, and of each comparison of a `command`, or of a name that is given one."""

    def is_command(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "command"

    def parts(node: ast.AST) -> list[ast.expr]:
        return node.elts if isinstance(node, ast.Tuple) else [node]  # type: ignore[list-item]

    held = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        for name, value in zip(parts(target), parts(node.value), strict=False)
        if isinstance(name, ast.Name) and is_command(value)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(isinstance(each, ast.Is | ast.IsNot) for each in node.ops):
            if is_command(node.left) or (isinstance(node.left, ast.Name) and node.left.id in held):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).rpartition(".")[2] in WORDS:
            yield node.lineno, ast.unparse(node)


def test_no_other_module_finds_out_what_a_run_is_of() -> None:
    texts = {each: MODULES[each].read_text(encoding="utf-8") for each in sorted(set(MODULES) - FORMS - set(EXCEPTIONS))}
    # Most modules have none of the words, and are not parsed.
    asking = {each: text for each, text in texts.items() if any(word in text for word in (*WORDS, ".command"))}
    assert [(each, *found) for each, text in asking.items() for found in found_out(ast.parse(text))] == []


@pytest.mark.parametrize("module", EXCEPTIONS)
def test_an_exception_is_needed(module: str) -> None:
    assert list(found_out(ast.parse(MODULES[module].read_text(encoding="utf-8"))))


@pytest.mark.parametrize(
    "planted",
    [
        "if resolved.command is not None:\n    pass",
        "archive, command = kept(resolved), resolved.command\nfound = command is None",
        "x = 1 if run.has_model else 2",
        "skips = engine_named(name).is_program",
        "batch = NO_BATCH",
    ],
)
def test_a_planted_question_is_found(planted: str) -> None:
    assert list(found_out(ast.parse(planted)))


def test_both_forms_answer_the_same_questions() -> None:
    answers = [
        {name for name in dir(form) if not name.startswith("_")} - {entry.name for entry in fields(form)}
        for form in (OurModel, OwnProgram)
    ]
    assert answers[0] == answers[1]
