"""A script's simple commands: what each sets, does, or starts. Nothing is run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from hpc_gpt.errors import ConfigError
from hpc_gpt.scripts.expansion import Scope, Variable
from hpc_gpt.scripts.launchers import Target, is_candidate, shell_file, shell_text, split_srun, target_of
from hpc_gpt.scripts.notes import Notes
from hpc_gpt.scripts.pieces import Argument, Piece, known, quote, source_of
from hpc_gpt.scripts.quoting import read_text
from hpc_gpt.scripts.shell import read_shell
from hpc_gpt.scripts.state import Started, State, Step, is_reference, left_to_bash, raw_run, run_word, with_documents
from hpc_gpt.scripts.statements import Assignment, Command, Function, Statement
from hpc_gpt.secrets import hide_secrets, is_secret_variable

LARGEST = 1_000_000  # bytes of a script
_DEEPEST = 8
# They print or wait, and set nothing.
_PRINTS = frozenset(
    ("echo", "printf", "date", "hostname", "pwd", "ls", "cat", "head", "tail", "nvidia-smi", "sinfo", "squeue", "which",
     "type", "command", "true", ":", "wait", "sleep", "sync", "lscpu", "printenv", "env", "nvcc", "free", "df", "uname",
     "lsb_release", "rocm-smi", "ibstat", "id", "whoami", "set", "shopt", "return", "break", "continue", "exit",
     "sstat", "sacct", "tee", "scontrol", "[", "[[", "test", "gcc", "clear", "seff", "hostnamectl", "ifconfig", "ip",
     "false")
)  # fmt: skip
# {programs that are not carried: why}.
_REFUSED = {
    ("rm", "rmdir"): "it deletes files, which a retry may need",
    ("mv",): "a retry would not find it again",
    ("sbatch",): "hpc-gpt submits: a run is requeued and resumes, and job.dependency waits for another",
    ("scancel",): "hpc-gpt cancel RUN",
    ("kill", "pkill", "killall"): "hpc-gpt ends the processes that it starts",
    ("pip", "pip3"): "install it once, not in each attempt",
    ("git",): "a run has a snapshot of the code that it was submitted with",
    ("wandb",): "log in once in a shell, or export WANDB_API_KEY there",
    ("huggingface-cli", "hf"): "log in once in a shell, or export HF_TOKEN there",
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


class Commands:
    """The part of a `Walk` that carries simple commands out.

    `folder` is the script's, where files that it sources are looked for; `label` says which file's lines these are.
    """

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
        """Go through statements."""
        raise NotImplementedError

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
        elif name == "set" and argv[1:2] == [(Piece("--"),)]:
            self.scope.parameters = argv[2:]
        elif name == "shift":
            number = known(argv[1]) if argv[1:] else "1"
            if self.scope.parameters and number is not None and number.isdigit():
                self.scope.parameters = self.scope.parameters[int(number) :]
        elif name in ("read", "mapfile", "readarray", "let", "getopts") or name.startswith("(("):
            self.reads(command, name)
        elif is_candidate(argv):
            self.start(argv, before, command, whole, place)
        elif why := next((why for names, why in _REFUSED.items() if name in names), ""):
            shown = command.source if name not in _LOGS_IN else f"{' '.join(command.source.split()[:2])} …"
            self.notes.leave(place, shown, why)
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
        if name != "MASTER_PORT" and is_secret_variable(name, text) and not is_reference(variable):
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
            self.scope.variables[name] = left_to_bash(name, variable)
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
        source = text or with_documents(statement)
        place, sets = self.place(statement), frozenset(sets)
        if any(hide_secrets(line) != line for line in source.splitlines()):
            self.notes.leave(place, source, "it holds a secret, which is never copied")
            return
        for name in sets:
            self.scope.variables[name] = left_to_bash(name, self.scope.variables.get(name))
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
            self.state.purges_modules = True
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
            run = raw_run(source_of(text))
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
                    self.scope.copy(), tuple(self.state.steps))
        )  # fmt: skip

    def within(self, text: str, parameters: list[Argument], label: str) -> Self | None:
        """A walk through a script that a task runs; None if it cannot be read."""
        if self.depth >= _DEEPEST:
            return None
        found = type(self)(self.scope.of_task(parameters), Notes(), self.folder, label, self.depth + 1)
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
