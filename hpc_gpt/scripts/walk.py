"""A script's statements in the order in which the job would run them: what they set, and which programs they start.

Nothing is run. A condition that is not constant is not decided: what a branch sets is then left to the job's bash, by
carrying the statement into the command's `setup`. A statement that assigns is carried only if something that is carried
after it, or the command itself, uses the variable.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import replace

from hpc_gpt.errors import ConfigError
from hpc_gpt.scripts.commands import Commands
from hpc_gpt.scripts.expansion import Variable
from hpc_gpt.scripts.notes import Notes
from hpc_gpt.scripts.pieces import Argument, Piece, known
from hpc_gpt.scripts.state import State, changed, effects
from hpc_gpt.scripts.statements import Case, Command, Function, Group, If, Loop, Pipeline, Statement

_MOST_TURNS = 64
_MOST_STATEMENTS = 5_000
_TEST = re.compile(r"(! )?(\[|test\s|\(\(|true\b|false\b)")


class Walk(Commands):
    """Goes through a script."""

    def walk(self, statements: Iterable[Statement]) -> None:
        chains: list[list[Statement]] = []
        for statement in statements:
            if isinstance(statement, Pipeline) and statement.joined and chains:
                chains[-1].append(statement)
            else:
                chains.append([statement])
        for chain in chains:
            if self.state.ended:
                return
            self.scope.line = chain[0].line
            self.chain(chain)

    def chain(self, statements: list[Statement]) -> None:
        """`a && b || c`: what runs as far as that is constant; a command that is no test is taken to succeed."""
        last: bool | None = True
        for index, statement in enumerate(statements):
            joined = getattr(statement, "joined", "")
            if joined and last is None:
                trial = self.trial()
                trial.walk([replace(each, joined="") for each in statements[index:] if isinstance(each, Pipeline)])
                source = " ".join(f"{getattr(each, 'joined', '')} {each.source}".strip() for each in statements)
                self.undecided(Statement(statements[0].line, source), [trial], True)
                return
            if (joined == "&&" and last is False) or (joined == "||" and last is True):
                continue
            self.one(statement)
            is_test = isinstance(statement, Pipeline) and _TEST.match(statement.source)
            last = self.truth([statement]) if is_test else True

    def one(self, statement: Statement) -> None:
        self.walked[0] += 1
        if self.walked[0] > _MOST_STATEMENTS:
            raise ConfigError(
                f"line {self.place(statement)}: with its loops it has more than {_MOST_STATEMENTS:,} statements",
                "give a script with shorter loops",
            )
        if isinstance(statement, Pipeline):
            self.pipeline(statement)
        elif isinstance(statement, Command):
            self.command(statement, statement)
        elif isinstance(statement, Function):
            self.functions[statement.name] = statement
        elif isinstance(statement, If):
            self.branch(statement, statement.branches)
        elif isinstance(statement, Case):
            self.case(statement)
        elif isinstance(statement, Loop):
            self.loop(statement)
        elif isinstance(statement, Group):
            self.walk(statement.body)

    def pipeline(self, statement: Pipeline) -> None:
        if len(statement.parts) == 1:
            part = statement.parts[0]
            if isinstance(part, Command):
                self.command(part, statement)
            else:
                self.one(part)
            return
        trial = self.trial()
        for part in statement.parts:
            trial.one(part)
        if trial.state.started:  # of `srun … | tee FILE` the program alone
            trial.state.steps = list(self.state.steps)
            self.take(trial)
        elif not all(isinstance(part, Command) and self.prints(part) for part in statement.parts):
            self.carry(statement, self.names_in(statement.parts), acts=True)

    def trial(self) -> Walk:
        """A walk from here whose results are not ours yet."""
        found = Walk(self.scope.copy(), Notes(), self.folder, self.label, self.depth)
        found.functions, found.state = dict(self.functions), State(files=dict(self.state.files))
        found.walked = self.walked
        found.state.steps, found.uses_module_path = list(self.state.steps), self.uses_module_path
        found.state.environment = dict(self.state.environment)
        return found

    def take(self, trial: Walk) -> None:
        """Make a trial's results ours."""
        for name in ("taken", "own", "left"):
            getattr(self.notes, name).extend(getattr(trial.notes, name))
        state = trial.state
        state.started = self.state.started + state.started
        state.modules = self.state.modules + state.modules
        state.purges_modules = self.state.purges_modules or state.purges_modules
        state.venv, state.workdir = state.venv or self.state.venv, state.workdir or self.state.workdir
        self.state, self.scope, self.functions = state, trial.scope, trial.functions

    def branch(self, statement: Statement, branches: list[tuple[list[Statement], list[Statement]]]) -> None:
        """`if`: the branch that is taken, or all that may be."""
        trials: list[Walk] = []
        may_be_none = True
        for condition, body in branches:
            holds = True if not condition else self.truth(condition)
            if holds is False:
                continue
            if holds and not trials:
                self.walk(body)
                return
            trial = self.trial()
            trial.walk(body)
            trials.append(trial)
            if holds:
                may_be_none = False
                break
        self.undecided(statement, trials, may_be_none)

    def undecided(self, statement: Statement, trials: list[Walk], may_be_none: bool) -> None:
        """Take of several trials the one that trains; else leave to bash what they set."""
        source = statement.source.splitlines()[0] if statement.source else ""
        going_on = [trial for trial in trials if not trial.state.ended]
        for trial in trials:
            if trial.best() is not None:
                self.notes.leave(self.place(statement), source, "only the job knows: taken as if it trains")
                self.take(trial)
                return
            for other in trial.state.started:
                means = "it may run before the training: run it by hand, or as a line of command.setup"
                self.notes.leave(other.place, other.source, means)
            trial.state.refused = trial.state.refused or bool(trial.state.started)
            trial.state.started = []
        if len(going_on) == 1 and not may_be_none:
            self.take(going_on[0])
            return
        names = {name for trial in going_on for name in changed(self.scope, trial.scope)}
        acts = any(effects(trial.state) != effects(self.trial().state) for trial in going_on)
        if not names and not acts:
            return
        for trial in going_on:
            self.notes.left.extend(trial.notes.left)
        if any(trial.state.refused for trial in going_on):
            acts = False
        for name in names:
            found = [trial.scope.variables[name] for trial in going_on if name in trial.scope.variables]
            if any(variable.is_array for variable in found):
                self.scope.variables[name] = Variable([], True)
        if names or acts:
            self.carry(statement, names, acts)

    def case(self, statement: Case) -> None:
        subject = known(self.scope.text(statement.subject))
        trials = []
        for patterns, body in statement.branches:
            texts = [known(self.scope.text(pattern)) for pattern in patterns]
            if subject is not None and None not in texts:
                if any(fnmatch.fnmatchcase(subject, str(text)) for text in texts):
                    self.walk(body)
                    return
                continue
            trial = self.trial()
            trial.walk(body)
            trials.append(trial)
        self.undecided(statement, trials, True)

    def loop(self, statement: Loop) -> None:
        items = None
        if statement.words is not None:
            items = [item for word in statement.words for item in self.scope.expand(word)]
            if len(items) > _MOST_TURNS or any(known(item) is None or _is_pattern(item) for item in items):
                items = None
        if items is None:
            trial = self.trial()
            if statement.name:
                trial.scope.set(statement.name, (Piece(f"${statement.name}", "runtime"),))
            trial.walk(statement.body)
            self.undecided(statement, [trial], True)
            return
        for number, item in enumerate(items):
            trial = self.trial()
            trial.scope.set(statement.name, item)
            trial.walk(statement.body)
            if trial.best() is not None:
                others = len(items) - number - 1
                if others:
                    means = f"taken with {statement.name}={known(item)}; for the other {others}: hpc-gpt help sweeps"
                    self.notes.leave(self.place(statement), statement.source.splitlines()[0], means)
                self.take(trial)
                return
            if effects(trial.state) != effects(self.trial().state):  # it does more than to set variables
                self.undecided(statement, [trial], True)
                return
            self.take(trial)

    def truth(self, statements: list[Statement]) -> bool | None:
        """Whether a condition holds; None if only the job knows."""
        if len(statements) == 2 and isinstance(statements[1], Pipeline):
            first, second = self.truth(statements[:1]), self.truth(statements[1:])
            if statements[1].joined == "&&":
                return False if False in (first, second) else (True if first and second else None)
            if statements[1].joined == "||":
                return True if True in (first, second) else (False if (first, second) == (False, False) else None)
        if len(statements) != 1 or not isinstance(statements[0], Pipeline) or len(statements[0].parts) != 1:
            return None
        command = statements[0].parts[0]
        if not isinstance(command, Command) or not command.words:
            return None
        is_negated = statements[0].source.startswith("! ")
        words = [argument for word in command.words for argument in self.scope.expand(word) or [()]]
        texts = [known(word) for word in words]
        if texts[:1] in (["true"], [":"]):
            return True
        if texts[:1] == ["false"]:
            return False
        if texts[0] is not None and texts[0].startswith("(("):
            value = known(self.scope.arithmetic(texts[0][2:]))
            return None if value is None else (value != "0") is not is_negated
        if texts[0] not in ("[", "[[", "test"):
            return None
        inner = texts[1:-1] if texts[0] != "test" else texts[1:]
        if inner[:1] == ["!"]:
            inner, is_negated = inner[1:], not is_negated
        found = _test(inner)
        return found if found is None else found is not is_negated


def _is_pattern(argument: Argument) -> bool:
    return any(piece.kind == "pattern" for piece in argument)


def _test(words: list[str | None]) -> bool | None:
    """`[ … ]` of constants; None for files, and for what only the job knows."""
    if len(words) == 1:
        return None if words[0] is None else words[0] != ""
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return None if words[1] is None else (words[1] == "") is (words[0] == "-z")
    if len(words) != 3 or None in words:
        return None
    left, mark, right = (str(word) for word in words)
    if mark in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) is (mark != "!=")
    numbers = [re.fullmatch(r"-?\d+", each) for each in (left, right)]
    if None in numbers:
        return None
    one, two = int(left), int(right)
    compared = {"-eq": one == two, "-ne": one != two, "-lt": one < two, "-le": one <= two, "-gt": one > two,
                "-ge": one >= two}  # fmt: skip
    return compared.get(mark)
