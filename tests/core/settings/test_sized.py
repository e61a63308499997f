"""Whether a run is of our model or of a program is known to three modules: all others call a function of theirs."""

import ast
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, LayoutRequest, ScriptFacts
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.core.settings.sized import command_lines, does, program_tables, run_rows
from tests.test_imports import MODULES

WORDS = {"NO_MODEL", "NO_BATCH", "is_program", "takes_command"}
ASKERS = {
    "core.settings.sized": "says what depends on it, a function each",
    "core.settings.resolve": "leaves out the model and the batch of a program, before there is a run",
    "core.engines.base.facts": "says of an engine whether it starts another program",
    "core.engines": "lists those that train a model that we know",
    "trainer.__main__": "starts a program's rank in place of the trainer",
}
OTHER_COMMANDS = {"core.settings.services"}  # that of [notify]


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
        elif (
            isinstance(node, ast.Name | ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and ast.unparse(node).rpartition(".")[2] in WORDS
        ):
            yield node.lineno, ast.unparse(node)


def test_no_other_module_finds_out_what_a_run_is_of() -> None:
    others = sorted(set(MODULES) - set(ASKERS) - OTHER_COMMANDS)
    texts = {each: MODULES[each].read_text(encoding="utf-8") for each in others}
    # Most modules have none of the words, and are not parsed.
    asking = {each: text for each, text in texts.items() if any(word in text for word in (*WORDS, ".command"))}
    assert [(each, *found) for each, text in asking.items() for found in found_out(ast.parse(text))] == []


@pytest.mark.parametrize("module", {*ASKERS, *OTHER_COMMANDS})
def test_an_asker_asks(module: str) -> None:
    assert list(found_out(ast.parse(MODULES[module].read_text(encoding="utf-8"))))


@pytest.mark.parametrize(
    "planted",
    [
        "if resolved.command is not None:\n    pass",
        "archive, command = kept(resolved), resolved.command\nfound = command is None",
        "x = 1 if facts.takes_command else 2",
        "skips = engine_named(name).is_program",
        "batch = NO_BATCH",
    ],
)
def test_a_planted_question_is_found(planted: str) -> None:
    assert list(found_out(ast.parse(planted)))


PROGRAM = {"run": "train  {gpus}", "setup": ("a\n\nb",), "workdir": "/w"}
SHORT = {"checkpoints": "as the program decides itself", "stops by": "SIGTERM"}


@pytest.mark.parametrize(
    ("command", "rows", "lines", "stops"),
    [
        (
            PROGRAM,
            {"command": "once a gpu, in /w: train {gpus}", **SHORT},
            ["a", "b", "train  {gpus}"],
            "end by SIGTERM",
        ),
        (
            {
                "run": ("x y", "z"),
                "per": "node",
                "workdir": "/w",
                "stop_signal": "none",
                "checkpoints": "c-*",
                "resume": "-r",
            },
            {"command": "once a node, in /w: 'x y' z", "checkpoints": "c-*, resumed by -r", "stops by": "none"},
            ["'x y' z"],
            "end by SIGnone",
        ),
        (
            {"script": "/s/job", "args": ("a b",), "workdir": "/w"},
            {
                "script": "/s/job 'a b'",
                "runs in": "/w",
                "checkpoints": "the script's own, which the chain does not see",
            },
            ["/s/job 'a b'"],
            "end by SIGTERM",
        ),
    ],
)
def test_a_program_is_shown_by_its_command(command, rows, lines, stops) -> None:
    experiment = Experiment(engine=Engine("command"), layout=LayoutRequest(gpus=2), command=Command(run="x"))
    run = resolve(experiment, load_profile("local"))
    script = ScriptFacts("0") if "script" in command else None
    run = replace(run, command=Command(**command), script=script)
    assert dict(run_rows(run, "here")) == {"layout": "here", **rows}
    assert command_lines(run) == lines
    assert [does(run, verb) for verb in ("stop", "requeue")] == [stops, f"{stops} and go back to the queue"]
    kept = set(program_tables(run)["command"])
    of_program, of_script = {"run", "per", "setup", "resume", "snapshot", "link"}, {"script", "args"}
    assert (kept & of_program, kept & of_script) == ((set(), of_script) if script else (of_program, set()))
