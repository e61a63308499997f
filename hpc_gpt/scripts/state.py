"""What the statements of a script have set, done and started so far."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from hpc_gpt.scripts.expansion import Scope, Variable
from hpc_gpt.scripts.launchers import Srun, Target
from hpc_gpt.scripts.pieces import FILLS, Argument, Piece, quote
from hpc_gpt.scripts.statements import Command, Pipeline, Statement

_BRACE = re.compile(r"(?<!\$)\{[A-Za-z_]\w*\}")
_NAMES = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Step:
    """A statement that can be carried: its text for bash, the variables that it sets, and whether it does more."""

    place: str
    text: str
    sets: frozenset[str]
    acts: bool
    source: str


@dataclass(frozen=True)
class Started:
    """A program that the script starts, and what it has set and done before.

    `run` is the command without its srun, as bash takes it; `before` are the variables that are set for it alone.
    """

    place: str
    source: str
    run: str
    before: tuple[tuple[str, Argument], ...]
    srun: Srun | None
    target: Target
    scope: Scope
    steps: tuple[Step, ...]

    @property
    def score(self) -> int:
        """How likely it trains; below 1 it does not."""
        score = self.target.score
        return score + 1 if score > 0 and self.srun is not None else score


@dataclass
class State:
    """What the statements so far have set, beside variables."""

    steps: list[Step] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    environment: dict[str, tuple[str, Argument]] = field(default_factory=dict)
    modules: list[tuple[str, str]] = field(default_factory=list)
    purges_modules: bool = False
    venv: tuple[str, str] | None = None
    workdir: tuple[str, str] | None = None
    files: dict[str, str] = field(default_factory=dict)
    refused: bool = False
    ended: bool = False


def run_word(argument: Argument) -> str:
    """An argument in `command.run`, where `{name}` would be filled in."""
    words = quote(tuple(piece for piece in argument))
    fills = {piece.text for piece in argument if piece.kind == "fill"}
    return _BRACE.sub(lambda found: found[0] if found[0] in fills else f"{{{found[0]}}}", words)


def raw_run(text: str) -> str:
    """A text of bash as `command.run`."""
    for name, fill in FILLS.items():
        text = text.replace(f"${name}", "\0" + fill.strip("{}") + "\0")
    escaped = _BRACE.sub(lambda found: f"{{{found[0]}}}", text.strip())
    return re.sub("\0(\\w+)\0", r"{\1}", escaped)


def effects(state: State) -> tuple[object, ...]:
    """What tells whether statements did more than to set variables."""
    acts = sum(step.acts for step in state.steps)
    return acts, len(state.modules), state.venv, state.workdir, len(state.started), list(state.environment)


def changed(before: Scope, after: Scope) -> set[str]:
    names = {*before.variables, *after.variables}
    return {
        name
        for name in names
        if (one := before.variables.get(name)) is None
        or (two := after.variables.get(name)) is None
        or one.elements != two.elements
    }


def left_to_bash(name: str, variable: Variable | None) -> Variable:
    """A variable whose value only bash will know."""
    source = f"${{{name}[@]}}" if variable is not None and variable.is_array else f"${name}"
    found = variable or Variable([])
    return replace(found, elements=[(Piece(source, "runtime"),)])


def is_reference(variable: Variable) -> bool:
    """Whether a value is only of other variables, as `$HF_TOKEN`."""
    return bool(variable.elements) and all(
        piece.kind == "runtime" and re.fullmatch(r"\$\w+", piece.text) for piece in variable.elements[0]
    )


def with_documents(statement: Statement) -> str:
    """The source of a statement with the here-documents that follow its line."""
    parts = statement.parts if isinstance(statement, Pipeline) else [statement]
    documents = []
    for part in parts:
        for redirect in part.redirects if isinstance(part, Command) else ():
            if redirect.text is not None:
                delimiter = "".join(piece.text for piece in redirect.target)
                documents.append(f"{redirect.text}{delimiter}")
    return "\n".join([statement.source, *documents])


def names_used(text: str) -> set[str]:
    """The variables that a text of bash names."""
    return set(_NAMES.findall(text))
