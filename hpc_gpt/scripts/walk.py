"""A script's statements in the order in which the job would run them: what they set, and which programs they start.

Nothing is run. A condition that is not constant is not decided: what a branch sets is then left to the job's bash, by
carrying the statement into the command's `setup`. A statement that assigns is carried only if something that is carried
after it, or the command itself, uses the variable.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_gpt.errors import ConfigError
from hpc_gpt.scripts.expansion import FILLS, Argument, Piece, Scope, Variable, known, quote, source_of
from hpc_gpt.scripts.launchers import Srun, Target, is_candidate, shell_file, shell_text, split_srun, target_of
from hpc_gpt.scripts.notes import Notes
from hpc_gpt.scripts.shell import (
    Assignment,
    Case,
    Command,
    Function,
    Group,
    If,
    Loop,
    Pipeline,
    Statement,
    read_shell,
    read_text,
)
from hpc_gpt.secrets import hide_secrets, is_secret_variable

LARGEST = 1_000_000  # bytes of a script
_DEEPEST = 8
_MOST_TURNS = 64
_MOST_STATEMENTS = 5_000
# They print or wait, and set nothing.
_PRINTS = frozenset(
    ("echo", "printf", "date", "hostname", "pwd", "ls", "cat", "head", "tail", "nvidia-smi", "sinfo", "squeue", "which",
     "type", "command", "true", ":", "wait", "sleep", "sync", "lscpu", "printenv", "env", "nvcc", "free", "df", "uname",
     "lsb_release", "rocm-smi", "ibstat", "id", "whoami", "set", "shopt", "return", "break", "continue", "exit",
     "sstat", "sacct", "tee", "scontrol", "[", "[[", "test", "gcc", "clear", "seff", "hostnamectl", "ifconfig", "ip",
     "false")
)  # fmt: skip
# {program: why it is not carried}
_REFUSED = {
    "rm": "it deletes files, which a retry may need",
    "rmdir": "it deletes files, which a retry may need",
    "mv": "a retry would not find it again",
    "sbatch": "hpc-gpt submits: a run is requeued and resumes, and job.dependency waits for another",
    "scancel": "hpc-gpt cancel RUN",
    "kill": "hpc-gpt ends the processes that it starts",
    "pkill": "hpc-gpt ends the processes that it starts",
    "killall": "hpc-gpt ends the processes that it starts",
    "pip": "install it once, not in each attempt",
    "pip3": "install it once, not in each attempt",
    "git": "a run has a snapshot of the code that it was submitted with",
    "wandb": "log in once in a shell, or export WANDB_API_KEY there",
    "huggingface-cli": "log in once in a shell, or export HF_TOKEN there",
    "hf": "log in once in a shell, or export HF_TOKEN there",
}
_LOGS_IN = ("wandb", "huggingface-cli", "hf")  # with a secret among their words
# What a program gets from hpc-gpt, whatever its script exports.
_GIVEN = frozenset(("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
_OF_TASK = re.compile(r"\$\{?(SLURM_(?:PROCID|NODEID|LOCALID|TASK_PID))\b")
_DECLARES = ("export", "declare", "typeset", "local", "readonly")
_PYTHON = re.compile(r"python[\d.]*")
_ACTIVATE = re.compile(r"(.*)/bin/activate")
_NOT_READ = re.compile(
    r"(^|/)(\.?bash(rc|_profile)|\.?profile|conda\.sh|mamba\.sh|setvars\.sh|modules\.sh|activate)$|^/etc/"
)
_TEST = re.compile(r"(! )?(\[|test\s|\(\(|true\b|false\b)")
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

    `run` is the command without its srun, as bash takes it; `before` are the variables that are set for it alone;
    `inner` is the walk through the script that the command runs, if it runs one.
    """

    place: str
    source: str
    run: str
    before: tuple[tuple[str, Argument], ...]
    srun: Srun | None
    target: Target
    scope: Scope
    steps: tuple[Step, ...]
    inner: Walk | None

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
    venv: tuple[str, str] | None = None
    workdir: tuple[str, str] | None = None
    files: dict[str, str] = field(default_factory=dict)
    refused: bool = False
    ended: bool = False


class Walk:
    """Goes through a script. `folder` is the script's, where files that it sources are looked for; `label` says which
    file's lines these are; `known_files` are texts that the script writes itself."""

    is_one_command = False

    def __init__(self, scope: Scope, notes: Notes, folder: Path, label: str = "", depth: int = 0) -> None:
        self.scope, self.notes, self.folder, self.label, self.depth = scope, notes, folder, label, depth
        self.state = State()
        self.walked = [0]  # statements, of all trials together
        self.functions: dict[str, Function] = {}
        self.uses_module_path = False

    def place(self, statement: Statement) -> str:
        return f"{self.label}:{statement.line}" if self.label else str(statement.line)

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

    # --- conditions

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
        changed = {name for trial in going_on for name in _changed(self.scope, trial.scope)}
        acts = any(_effects(trial.state) != _effects(self.trial().state) for trial in going_on)
        if not changed and not acts:
            return
        for trial in going_on:
            self.notes.left.extend(trial.notes.left)
        if any(trial.state.refused for trial in going_on):
            acts = False
        for name in changed:
            found = [trial.scope.variables[name] for trial in going_on if name in trial.scope.variables]
            if any(variable.is_array for variable in found):
                self.scope.variables[name] = Variable([], True)
        if changed or acts:
            self.carry(statement, changed, acts)

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
            if _effects(trial.state) != _effects(self.trial().state):  # it does more than to set variables
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

    # --- simple commands

    def command(self, command: Command, whole: Statement) -> None:
        place = self.place(command)
        declares = known(self.scope.text(command.words[0])) if command.words else None
        if not command.words or declares in _DECLARES:
            self.assignments(command, declares, place)
            return
        argv = [argument for word in command.words for argument in self.scope.expand(word)]
        if not argv:
            return
        name = os.path.basename(known(argv[0]) or "")
        before = [(each.name, self.scope.text(each.value, each.name)) for each in command.assignments]  # type: ignore[arg-type]
        if command.words[0][0].kind == "text" and name in self.functions:
            self.call(self.functions[name], argv[1:])
        elif name in ("cd", "pushd"):
            self.cd(argv[1:], command, place)
        elif name in ("source", "."):
            self.source(argv[1:], command, place)
        elif name in ("module", "ml"):
            self.module(name, argv[1:], command, place)
        elif name == "eval":
            self.evaluate(argv[1:], command)
        elif name == "trap":
            self.notes.does(place, command.source, "signals: hpc-gpt forwards them, and requeues")
        elif name == "scontrol" and "requeue" in map(known, argv):
            self.notes.does(place, command.source, "a run is requeued and resumes")
        elif name in ("exit", "return"):
            self.state.ended = name == "exit"
        elif name == "unset":
            for argument in argv[1:]:
                self.scope.variables.pop(known(argument) or "", None)
                self.state.environment.pop(known(argument) or "", None)
            self.carry(command, (), acts=True)
        elif name == "shift":
            number = known(argv[1]) if argv[1:] else "1"
            if self.scope.parameters and number is not None and number.isdigit():
                self.scope.parameters = self.scope.parameters[int(number) :]
        elif name in ("read", "mapfile", "readarray", "let", "getopts") or name.startswith("(("):
            self.reads(command, name)
        elif is_candidate(argv):
            self.start(argv, before, command, whole, place)
        elif name in _REFUSED:
            shown = command.source if name not in _LOGS_IN else f"{' '.join(command.source.split()[:2])} …"
            self.notes.leave(place, shown, _REFUSED[name])
            self.state.refused = True
        elif not self.prints(command):
            self.carry(command, (), acts=True, text=self.document(command) if name == "cat" else None)

    def prints(self, command: Command) -> bool:
        """Whether a command only prints."""
        if not command.words:
            return False
        name = os.path.basename(known(self.scope.text(command.words[0])) or "")
        writes = any(
            redirect.operator in (">", ">>", ">|", "&>", "&>>")
            and known(self.scope.text(redirect.target)) not in ("/dev/null", "/dev/stderr", "/dev/stdout")
            for redirect in command.redirects
        )
        if name == "tee":
            return len(command.words) == 1
        is_line = _PYTHON.fullmatch(name) and "-c" in map(known, map(self.scope.text, command.words[1:3]))
        return (name in _PRINTS or bool(is_line)) and not writes

    def assignments(self, command: Command, declares: str | None, place: str) -> None:
        exports = declares == "export" or (declares in ("declare", "typeset") and "-x" in command.source.split())
        for assignment in command.assignments:
            self.assign(assignment, command, exports or None, place)
        if declares == "export":
            for word in command.words[1:]:
                for argument in self.scope.expand(word):
                    name = known(argument) or ""
                    if name in self.scope.variables:
                        self.scope.variables[name].exported = True
                        self.export(name, command, place)

    def assign(self, assignment: Assignment, command: Command, exported: bool | None, place: str) -> None:
        name = assignment.name
        variable = self.scope.assign(assignment, command.line, exported)
        text = "".join(piece.text for each in variable.elements for piece in each)
        if name != "MASTER_PORT" and is_secret_variable(name, text) and not _is_reference(variable):
            means = "a secret is never copied: export it in the shell that submits; jobs inherit it"
            self.notes.leave(place, f"{name}=…", means)
            self.scope.set(name, (Piece(f"${name}", "runtime"),), line=command.line)
            self.state.environment.pop(name, None)
            return
        if name in ("MASTER_ADDR", "MASTER_PORT"):
            self.rendezvous(name, variable, command, place)
            return
        pieces = [piece for each in variable.elements for piece in each]
        if any(piece.kind == "runtime" and piece.text.startswith("$(") for piece in pieces):
            self.scope.variables[name] = _left_to_bash(name, variable)
            self.carry(command, {name}, acts=False)
        elif not variable.is_array and variable.elements:
            self.state.steps.append(
                Step(place, f"{name}={quote(variable.elements[0])}", frozenset((name,)), False, command.source)
            )
        else:
            values = " ".join(map(quote, variable.elements))
            self.state.steps.append(Step(place, f"{name}=({values})", frozenset((name,)), False, command.source))
        if variable.exported:
            self.export(name, command, place)

    def rendezvous(self, name: str, variable: Variable, command: Command, place: str) -> None:
        value = known(variable.elements[0]) if variable.elements else ""
        if name == "MASTER_ADDR" and value in ("localhost", "127.0.0.1"):
            return
        words = {"MASTER_ADDR": "the first node's address", "MASTER_PORT": "a port of the job's own"}
        means = f"{name} is {words[name]}"
        self.notes.does(place, command.source, means)
        self.scope.set(name, (Piece(f"${name}", "runtime"),), line=command.line)

    def export(self, name: str, command: Command, place: str) -> None:
        variable = self.scope.variables[name]
        if name in _GIVEN:
            if name not in ("MASTER_ADDR", "MASTER_PORT"):
                self.notes.does(place, command.source, f"{name} is what each process is given")
            return
        if variable.is_array:
            return
        self.state.environment[name] = (place, variable.elements[0])

    def carry(self, statement: Statement, sets: Iterable[str], acts: bool, text: str | None = None) -> None:
        """Leave a statement, as it is or as `text`, and what it sets, to the job's bash."""
        source = text or _with_documents(statement)
        place, sets = self.place(statement), frozenset(sets)
        if any(hide_secrets(line) != line for line in source.splitlines()):
            self.notes.leave(place, source, "it holds a secret, which is never copied")
            return
        for name in sets:
            self.scope.variables[name] = _left_to_bash(name, self.scope.variables.get(name))
            if name in self.state.environment:
                self.state.environment[name] = (place, self.scope.variables[name].elements[0])
        self.state.steps.append(Step(place, source, sets, acts, statement.source))

    def names_in(self, parts: Iterable[Statement]) -> set[str]:
        """The variables that commands set by their assignments."""
        return {
            each.name for part in parts if isinstance(part, Command) and not part.words for each in part.assignments
        }

    def reads(self, command: Command, name: str) -> None:
        """`read`, `mapfile` and arithmetic, which set variables."""
        words = [known(self.scope.text(word)) or "" for word in command.words[1:]]
        names = {word for word in words if re.fullmatch(r"[A-Za-z_]\w*", word)}
        if name.startswith("((") or name == "let":
            names = set(re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=|\+\+|--)", command.source))
        hosts = re.search(r"scontrol\s+show\s+hostnames?\b[^|)]*\)", command.source)
        if hosts and len(names) == 1:
            self.scope.set(names.pop(), (Piece("$(scontrol show hostnames)", "hosts"),))
            return
        if names:
            self.carry(command, names, acts=False)

    def call(self, function: Function, arguments: list[Argument]) -> None:
        if self.depth >= _DEEPEST:
            return
        kept, self.scope.parameters = self.scope.parameters, arguments
        self.depth += 1
        self.walk(function.body)
        self.depth -= 1
        self.scope.parameters = kept

    def cd(self, arguments: list[Argument], command: Command, place: str) -> None:
        folder = known(arguments[0]) if arguments else None
        if arguments and quote(arguments[0]).strip('"') == "$SLURM_SUBMIT_DIR":
            self.notes.does(place, command.source, "a job starts in the folder that it is submitted from")
            return
        if folder is None:
            means = "only the job knows this folder and goes there: set command.workdir for a snapshot of it"
            self.notes.leave(place, command.source, means)
            self.carry(command, (), acts=True)
            return
        self.notes.take(place, command.source, "the folder that it runs in")
        base = self.state.workdir[1] if self.state.workdir else self.scope.work
        self.state.workdir = (place, os.path.normpath(os.path.join(base, folder)))

    def source(self, arguments: list[Argument], command: Command, place: str) -> None:
        path = known(arguments[0]) if arguments else None
        if path is not None and (venv := _ACTIVATE.fullmatch(path)):
            self.state.venv = (place, os.path.normpath(os.path.join(self.folder, venv[1])))
            return
        text = None if path is None or _NOT_READ.search(path) else self.text_of(path)
        if text is None or self.depth >= _DEEPEST:
            if path is not None and not _NOT_READ.search(path):
                self.notes.leave(place, command.source, "not found here, so not read: bash reads it in each job")
            self.carry(command, (), acts=True)
            return
        label = os.path.basename(str(path))
        try:
            statements = read_shell(text, label)
        except ConfigError:
            self.notes.leave(place, command.source, "it could not be read: bash reads it in each job")
            self.carry(command, (), acts=True)
            return
        self.notes.take(place, command.source, "read, see its own lines")
        kept, parameters = self.label, self.scope.parameters
        self.label, self.depth = label, self.depth + 1
        if arguments[1:]:
            self.scope.parameters = arguments[1:]
        self.walk(statements)
        self.label, self.depth, self.scope.parameters = kept, self.depth - 1, parameters

    def text_of(self, path: str) -> str | None:
        """The text of a file that the script has written, or that is beside it or where it works; None if none is."""
        if (written := self.state.files.get(os.path.normpath(path))) is not None:
            return written
        folders = [str(self.folder), self.state.workdir[1] if self.state.workdir else self.scope.work]
        for folder in folders:
            file = Path(folder, path)
            try:
                if file.is_file() and file.stat().st_size <= LARGEST:
                    return file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                return None
        return None

    def document(self, command: Command) -> str | None:
        """`cat > FILE <<END` so that tasks that write the file side by side never read half of it; None for any other
        command. The file's text is remembered: a later command may run it."""
        files = [each for each in command.redirects if each.operator in (">", ">|")]
        texts = [each for each in command.redirects if each.text is not None]
        if len(command.words) != 1 or len(files) != 1 or len(texts) != 1 or len(command.redirects) != 2:
            return None
        target, text = self.scope.text(files[0].target), texts[0].text or ""
        if (path := known(target)) is not None:
            own = text if texts[0].literal else source_of(self.scope.text(read_text(text)))
            self.state.files[os.path.normpath(path)] = own
        delimiter = "".join(part.text for part in texts[0].target)
        begin = f"'{delimiter}'" if texts[0].literal else delimiter
        aside = f"{quote(target)}.$$"
        return f"cat > {aside} <<{begin}\n{text}{delimiter}\nmv -f {aside} {quote(target)}"

    def module(self, name: str, arguments: list[Argument], command: Command, place: str) -> None:
        words = [known(argument) for argument in arguments]
        verb, names = (words[0] if words else None), words[1:]
        if name == "ml" and verb not in ("load", "purge", "use", "unload", "swap", "list"):
            verb, names = "load", words
        if verb == "purge":
            self.notes.does(place, command.source, "modules are purged before they are loaded")
        elif verb in ("load", "add") and None not in names and not self.uses_module_path:
            loaded = [str(each) for each in names]
            self.state.modules += [(place, each) for each in loaded]
            self.notes.take(place, command.source, "profile: modules")
        elif verb in ("list", "avail"):
            return
        else:  # what follows may need it
            self.uses_module_path = self.uses_module_path or verb == "use"
            self.carry(command, (), acts=True)

    def evaluate(self, arguments: list[Argument], command: Command) -> None:
        text = " ".join(map(source_of, arguments))
        if re.search(r"\$\(|`", text):
            self.carry(command, (), acts=True)
            return
        self.inner(text, command.line)

    def inner(self, text: str, line: int) -> None:
        """Walk a text that the script hands to its own bash, as if it were at that line."""
        if self.depth >= _DEEPEST:
            return
        statements = read_shell(text, self.label or "script")
        for each in statements:
            each.line = line
            for part in getattr(each, "parts", []):
                part.line, part.source = line, part.source
        self.depth += 1
        self.walk(statements)
        self.depth -= 1

    def start(
        self, argv: list[Argument], before: list[tuple[str, Argument]], command: Command, whole: Statement, place: str
    ) -> None:
        """A command that may train: what it starts, also through a script of its own."""
        srun, words = split_srun(argv)
        text, file = shell_text(words), shell_file(words)
        run, target, inner = "", None, None
        if text is not None:
            inner = self.within(source_of(text), [], self.label)
            run = _raw_run(source_of(text))
        elif file is not None and (content := self.text_of(file[0])) is not None:
            inner = self.within(content, file[1], os.path.basename(file[0]))
        if inner is not None:
            best = inner.best()
            target = best.target if best else None
            if best is not None and text is not None and inner.is_one_command:
                run = best.run
        elif text is None:
            target = target_of(words)
        if target is None:
            target = Target("", {}, file[0] if file else "", tuple(file[1]) if file else ())
        if srun is None and before:
            words = [*((Piece(f"{name}="), *value) for name, value in before), *words]
        if not run:
            clean = [self.without_secret(word, words[:index], place) for index, word in enumerate(words)]
            run = " ".join(map(run_word, clean))
        if not self.scope.in_task:
            pieces = {piece.text for word in argv for piece in word if piece.kind == "runtime"}
            for found in sorted({each for text in pieces for each in _OF_TASK.findall(text)}):
                means = "in a batch script it is 0 for all; here each task has its own"
                self.notes.leave(place, f"${found}", means)
        self.state.started.append(
            Started(place, whole.source or command.source, run, tuple(before) if srun else (), srun, target,
                    self.scope.copy(), tuple(self.state.steps), inner)
        )  # fmt: skip

    def within(self, text: str, parameters: list[Argument], label: str) -> Walk | None:
        """A walk through a script that a task runs; None if it cannot be read."""
        if self.depth >= _DEEPEST:
            return None
        found = Walk(self.scope.of_task(parameters), Notes(), self.folder, label, self.depth + 1)
        found.walked = self.walked
        found.state.files, found.state.workdir = dict(self.state.files), self.state.workdir
        try:
            statements = read_shell(text, label)
        except ConfigError:
            return None
        found.walk(statements)
        parts = [part for each in statements for part in getattr(each, "parts", [each])]
        found.is_one_command = len(parts) == 1 and isinstance(parts[0], Command) and not parts[0].redirects
        return found

    def best(self) -> Started | None:
        """The program that most likely trains; None if none does."""
        scores = [started.score for started in self.state.started]
        return self.state.started[scores.index(max(scores))] if scores and max(scores) > 0 else None

    def without_secret(self, word: Argument, before: Sequence[Argument], place: str) -> Argument:
        """An argument with the variable of a secret in its place."""
        text = known(word) if all(piece.kind == "text" for piece in word) else None
        if text is None:
            return word
        option = (known(before[-1]) or "") if before else ""
        name, equals, value = text.partition("=")
        if not equals or not re.match(r"-*[A-Za-z_]", name):
            name, equals, value = option if option.startswith("-") else "", "", text
        key = re.sub(r"\W+", "_", name.lstrip("-"))
        if value.startswith("-") or not is_secret_variable(key, value):
            return word
        variable = key.upper() or "SECRET"
        means = f"a secret is never copied: export {variable} in the shell that submits"
        self.notes.leave(place, f"{name} …", means)
        return (*([Piece(f"{name}=")] if equals else []), Piece(f"${variable}", "runtime"))


def run_word(argument: Argument) -> str:
    """An argument in `command.run`, where `{name}` would be filled in."""
    words = quote(tuple(piece for piece in argument))
    fills = {piece.text for piece in argument if piece.kind == "fill"}
    return _BRACE.sub(lambda found: found[0] if found[0] in fills else f"{{{found[0]}}}", words)


def _raw_run(text: str) -> str:
    """A text of bash as `command.run`."""
    for name, fill in FILLS.items():
        text = text.replace(f"${name}", "\0" + fill.strip("{}") + "\0")
    escaped = _BRACE.sub(lambda found: f"{{{found[0]}}}", text.strip())
    return re.sub("\0(\\w+)\0", r"{\1}", escaped)


def _effects(state: State) -> tuple[object, ...]:
    """What tells whether statements did more than to set variables."""
    acts = sum(step.acts for step in state.steps)
    return acts, len(state.modules), state.venv, state.workdir, len(state.started), list(state.environment)


def _changed(before: Scope, after: Scope) -> set[str]:
    names = {*before.variables, *after.variables}
    return {
        name
        for name in names
        if (one := before.variables.get(name)) is None
        or (two := after.variables.get(name)) is None
        or one.elements != two.elements
    }


def _left_to_bash(name: str, variable: Variable | None) -> Variable:
    """A variable whose value only bash will know."""
    source = f"${{{name}[@]}}" if variable is not None and variable.is_array else f"${name}"
    found = variable or Variable([])
    return replace(found, elements=[(Piece(source, "runtime"),)])


def _is_reference(variable: Variable) -> bool:
    """Whether a value is only of other variables, as `$HF_TOKEN`."""
    return bool(variable.elements) and all(
        piece.kind == "runtime" and re.fullmatch(r"\$\w+", piece.text) for piece in variable.elements[0]
    )


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


def _with_documents(statement: Statement) -> str:
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
