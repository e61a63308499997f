"""The values of a script's variables, as far as they are constant, and words with their variables filled in.

A value is a list of pieces: text that is known, and what only the job knows, which keeps its source. Nothing is run. A
command substitution that asks for the first node, the number of nodes or a free port is known by what hpc-gpt gives a
program for it (`MASTER_ADDR`, `{nodes}`, `MASTER_PORT`); any other is kept as it is, for the node to evaluate.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpc_gpt.scripts.constants import changed_text, evaluate
from hpc_gpt.scripts.pieces import (
    FILLS,
    MASTER_ADDR,
    MASTER_PORT,
    Argument,
    Piece,
    is_hosts,
    known,
    merged,
    with_spaces,
)
from hpc_gpt.scripts.quoting import read_operand
from hpc_gpt.scripts.shell import read_shell
from hpc_gpt.scripts.statements import Assignment, Part, Word
from hpc_gpt.secrets import is_secret_variable

# The variables of this shell that are the same in a job, and no secret.
LASTING = ("HOME", "USER", "LOGNAME", "SCRATCH", "WORK", "STORE")
# What every login shell or job has, whatever the script says.
_USUAL = frozenset(
    ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LIBRARY_PATH", "CPATH", "HOME", "USER", "LOGNAME", "HOSTNAME", "TMPDIR",
     "SCRATCH", "WORK", "STORE", "PWD", "SHELL", "CUDA_HOME", "RANDOM", "SECONDS", "UID", "0", "?", "$", "!", "-", "_")
)  # fmt: skip
_FIRST_HOST = re.compile(
    r"scontrol\s+show\s+hostnames?\b.*\|\s*(head\s+(-n\s*)?-?1\b|sed\s+(-n\s+)?['\"]?1[pq]|awk\s+.NR)"
)
_HOSTS = re.compile(r"scontrol\s+show\s+hostnames?\b[^|]*")
_COUNT = re.compile(r"scontrol\s+show\s+hostnames?\b[^|]*\|\s*wc\s+(-l|-w)\s*")
_OWN_HOST = re.compile(r"\$?\(?\s*(/bin/)?hostname(\s+(-[A-Za-z]+|--[a-z-]+))?\s*(\|\s*(awk|cut|head|tr|sed)\b[^|]*)*")
_HOST_OF = re.compile(
    r"(srun\b.*\s(-w\s*|--nodelist[= ]).*\bhostname\b|getent\s+(a?hosts|ahostsv4)\b|host\s|nslookup\s).*"
)
_GPU_COUNT = re.compile(r"nvidia-smi\s+(-L|--list-gpus|--query-gpu=\w+ --format=csv,noheader)\s*\|\s*wc\s+-l\s*")
_OPERATOR = re.compile(r"(:?[-=?+]|##?|%%?|//?|\^\^?|,,?|:)")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9@*#?$!-])(?:\[([^\]]*)\])?")
_DEFAULTS = ("-", ":-", "=", ":=")
_MOST_TEXT = 1_000_000


@dataclass
class Variable:
    """A variable's elements, one if it is no array; whether commands see it, and its line."""

    elements: list[Argument]
    is_array: bool = False
    exported: bool = False
    line: int = 0


@dataclass
class Scope:
    """What is known at a place of a script.

    `sizes` are the pieces of what Slurm says of the job, `parameters` the script's own arguments, None if they are not
    known; `environment` the variables of the shell that submits; `folder` is the script's, `work` where the job starts.
    `in_task`: each task evaluates the script for itself, so that SLURM_PROCID and the like are the task's. `unset`
    gathers the variables that nothing in the script sets, with their line, `defaults` those that have a default.
    `begins` is the variable that an assignment is about.
    """

    sizes: Mapping[str, Piece] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = "."
    work: str = "."
    gpus: int | None = None
    parameters: list[Argument] | None = None
    in_task: bool = False
    variables: dict[str, Variable] = field(default_factory=dict)
    unset: dict[str, int] = field(default_factory=dict)
    defaults: dict[str, tuple[int, str]] = field(default_factory=dict)
    line: int = 0
    begins: str = ""

    def copy(self) -> Scope:
        """The same with variables of its own."""
        found = Scope(**vars(self))
        found.variables = {
            name: Variable(list(each.elements), each.is_array, each.exported, each.line)
            for name, each in self.variables.items()
        }
        return found

    def of_task(self, parameters: list[Argument] | None = None) -> Scope:
        """What a script that a task runs sees of it: the exported variables."""
        found = self.copy()
        found.in_task, found.parameters = True, parameters
        found.variables = {name: each for name, each in found.variables.items() if each.exported}
        return found

    # --- assignments

    def assign(self, assignment: Assignment, line: int, exported: bool | None = None) -> Variable:
        """Carry an assignment out, and give the variable."""
        name = assignment.name
        self.begins = "" if exported else name
        old = self.variables.get(name)
        if assignment.is_array:
            elements = [each for word in assignment.value for each in self.expand(word)]  # type: ignore[arg-type]
        else:
            elements = [self.text(assignment.value, name)]  # type: ignore[arg-type]
        self.begins = ""
        if assignment.place is not None:
            kept = list(old.elements) if old else []
            place = int(assignment.place) if assignment.place.isdigit() else len(kept)
            kept[place : place + 1] = elements
            elements = kept
        elif assignment.appends and old is not None:
            joined = [(*old.elements[0], *elements[0])] if old.elements else elements
            elements = old.elements + elements if assignment.is_array else joined + old.elements[1:]
        if sum(len(piece.text) for each in elements for piece in each) > _MOST_TEXT:
            elements = [(Piece(f"${name}", "runtime"),)]
        is_array = assignment.is_array or bool(old and old.is_array)
        keeps = exported if exported is not None else bool(old and old.exported)
        self.variables[name] = Variable(elements, is_array, keeps, line)
        return self.variables[name]

    def set(self, name: str, *elements: Argument, exported: bool = False, line: int = 0) -> None:
        self.variables[name] = Variable(list(elements), len(elements) != 1, exported, line)

    # --- words

    def text(self, word: Word, name: str = "") -> Argument:
        """A word as the one value of the variable `name`: not split, without patterns."""
        pieces: list[Piece] = []
        for number, part in enumerate(word):
            if part.kind == "text":
                pieces += self._home(part) if not number else [Piece(part.text)]
            else:
                for index, each in enumerate(self._part(part, name)):
                    pieces += [*([Piece(" ")] if index else []), *each]
        return merged(piece._replace(splits=False) for piece in pieces)

    def expand(self, word: Word) -> list[Argument]:
        """The arguments that bash makes of a word: none, one or several."""
        found: list[list[Piece]] = []
        current: list[Piece] | None = None
        for number, part in enumerate(word):
            if part.kind == "text":
                current = [] if current is None else current
                *home, rest = self._home(part) if not number else [Piece(part.text)]
                is_pattern = not part.quoted and re.search(r"[*?]|\{[^{}]*(,|\.\.)[^{}]*\}", rest.text)
                current += [*home, rest._replace(kind="pattern") if is_pattern else rest]
                continue
            several = self._part(part)
            if part.quoted:
                for index, each in enumerate(several):
                    if index and current is not None:
                        found.append(current)
                        current = None
                    current = [*(current or []), *each]
                continue
            for index, each in enumerate(several):
                if index and current is not None:
                    found.append(current)
                    current = None
                for piece in each:
                    if piece.kind != "text":
                        current = [*(current or []), piece._replace(splits=piece.value is None and _may_split(piece))]
                        continue
                    fields = re.split(r"([ \t\n]+)", piece.text)
                    for field_text in fields:
                        if field_text and field_text.isspace():
                            if current is not None:
                                found.append(current)
                            current = None
                        elif field_text:
                            current = [*(current or []), Piece(field_text, "pattern" if "*" in field_text else "text")]
        if current is not None:
            found.append(current)
        return [merged(pieces) for pieces in found]

    def _home(self, part: Part) -> list[Piece]:
        """The text of a word's first part, with a leading `~` as the home folder."""
        if part.quoted or not re.match(r"~(/|$)", part.text):
            return [Piece(part.text)]
        return [Piece("$HOME", "runtime", self.environment.get("HOME")), Piece(part.text[1:])]

    def _part(self, part: Part, name: str = "") -> list[Argument]:
        """The values of a `$…`: several for the elements of an array, none for an empty one."""
        if part.kind == "variable":
            return self._parameter(part.text, part.quoted)
        if part.kind == "arithmetic":
            return [self.arithmetic(part.text, name)]
        return [self._substitution(part.text.strip(), name)]

    # --- $NAME and ${…}

    def _parameter(self, text: str, quoted: bool) -> list[Argument]:
        source = f"${text}" if re.fullmatch(r"\w+|\W", text) else f"${{{text}}}"
        counts = re.fullmatch(r"#([A-Za-z_]\w*)\[[@*]\]", text)
        if counts:
            variable = self.variables.get(counts[1])
            if variable is None or [each for each in variable.elements if _unknown(each)]:
                counts_nodes = variable is not None and any(map(is_hosts, variable.elements))
                return [(self.sizes["SLURM_NNODES"] if counts_nodes else Piece(source, "runtime"),)]
            return [(Piece(str(len(variable.elements))),)]
        length = re.fullmatch(r"#([A-Za-z_]\w*)", text)
        if length is not None and (measured := self._values(length[1], None, True)):
            own = known(measured[0])
            return [(Piece(source, "runtime") if own is None else Piece(str(len(own))),)]
        found = _PARAMETER.match(text)
        if found is None:
            return [(Piece(source, "runtime"),)]
        name, index, rest = found[1], found[2], text[found.end() :]
        values = self._values(name, index, quoted)
        if name in ("@", "*") and values is None:
            self.unset.setdefault("@", self.line)
            return []
        if not rest:
            if values is None:
                return [(self._unset(name, source),)]
            return values
        mark = _OPERATOR.match(rest)
        if mark is None:
            return [(Piece(source, "runtime"),)]
        operand = rest[mark.end() :]
        if name in ("@", "*") and mark[1] == ":" and operand.strip().isdigit() and self.parameters is not None:
            return self.parameters[max(0, int(operand) - 1) :]
        if mark[1] in (":?", "?"):
            return values if values is not None else [(self._unset(name, f"${name}"),)]
        is_empty = values is not None and known(values[0] if values else ()) == ""
        if mark[1] in _DEFAULTS:
            if values is None or (is_empty and mark[1].startswith(":")):
                given = values is not None
                values = [self.text(read_operand(operand), name)]
                if not given and known(values[0]) is not None and not self.in_task:
                    self.defaults.setdefault(name, (self.line, known(values[0]) or ""))
                if mark[1] in ("=", ":="):
                    self.set(name, *values, line=self.line)
            return values
        if mark[1] in ("+", ":+"):
            if values is None or (is_empty and mark[1].startswith(":")):
                return [()]
            return [self.text(read_operand(operand))]
        if values is None:
            return [(self._unset(name, source),)]
        changed = []
        for value in values:
            own, other = known(value), known(self.text(read_operand(operand)))
            if own is None or other is None or any(piece.kind == "fill" for piece in value):
                return [(Piece(source, "runtime"),)]
            changed.append((Piece(changed_text(own, mark[1], other)),))
        return list(changed)

    def _values(self, name: str, index: str | None, quoted: bool) -> list[Argument] | None:
        """The values of a parameter; None if nothing sets it."""
        if name in ("@", "*") or name.isdigit():
            if self.parameters is None:
                return None
            if name.isdigit():
                return self.parameters[int(name) - 1 : int(name)] or None if int(name) else None
            return self.parameters if name == "@" or not quoted else [with_spaces(self.parameters)]
        if name == "#":
            return [(Piece(str(len(self.parameters))),)] if self.parameters is not None else None
        if name in FILLS:
            fill = FILLS[name]
            return [(Piece(fill, "fill", str(self.gpus) if fill == "{gpus}" else self.sizes["SLURM_NNODES"].value),)]
        variable = self.variables.get(name)
        if variable is None:
            if name in ("MASTER_ADDR", "MASTER_PORT"):
                return [(MASTER_ADDR if name == "MASTER_ADDR" else MASTER_PORT,)]
            if name == "RANDOM" and not self.in_task:
                self.unset.setdefault(name, self.line)
                return [(Piece("$SLURM_JOB_ID", "runtime"),)]  # one number for all nodes
            if name in self.sizes and not self.in_task:
                return [(self.sizes[name],)]
            if name in self.sizes:
                return [(Piece(f"${name}", "runtime", self.sizes[name].value),)]
            if name.startswith("SLURM_"):
                return [(Piece(f"${name}", "runtime"),)]
            return None
        elements = variable.elements
        if index in ("@", "*"):
            return elements if index == "@" or not quoted else [with_spaces(elements)]
        number = self._number(index or "0")
        if number is None or any(is_hosts(each) for each in elements):
            return [(MASTER_ADDR,)] if number == 0 else [(Piece(f"${{{name}[{index}]}}", "runtime"),)]
        return elements[number : number + 1] or [()]

    def _unset(self, name: str, source: str) -> Piece:
        """The piece of a variable that nothing in the script sets: the shell that submits may."""
        if (name.isdigit() and name != "0") or name in "@*#":
            self.unset.setdefault("@", self.line)
            return Piece("")
        if name not in _USUAL:
            if name == self.begins:  # NAME="$NAME …" for the first time
                return Piece("")
            self.unset.setdefault(name, self.line)
        value = self.environment.get(name, "") if source == f"${name}" else ""
        # Of this shell's variables folders are used, and what is the same in every job.
        is_folder = value.startswith("/") and ":" not in value and not is_secret_variable(name, value)
        return Piece(source, "runtime", value if name in LASTING or (is_folder and name not in _USUAL) else None)

    # --- $(…)

    def _substitution(self, source: str, name: str) -> Argument:
        if source[:1] in "<>(":  # a process substitution, or a pattern
            return (Piece(source, "runtime", splits=True),)
        flat = re.sub(r"\\\n|\s+", " ", source).strip()
        if _COUNT.fullmatch(flat):
            return (self.sizes["SLURM_NNODES"],)
        if _FIRST_HOST.match(flat):
            return (MASTER_ADDR,)
        if _HOSTS.fullmatch(flat):
            return (Piece(f"$({source})", "hosts"),)
        asks_first = _HOST_OF.fullmatch(flat) and self._names_first_host(flat)
        if not self.in_task and (_OWN_HOST.fullmatch(flat) or asks_first):
            return (MASTER_ADDR,)  # the script itself is on the first node
        if "PORT" in name.upper():
            return (MASTER_PORT,)
        if _GPU_COUNT.fullmatch(flat) and (here := self.sizes.get("SLURM_GPUS_ON_NODE")):
            return (here,)
        return self._simple(source) or (Piece(f"$({source})", "runtime"),)

    def _names_first_host(self, source: str) -> bool:
        """Whether a variable in the source is the first node's name."""
        values = [self._values(name, None, True) for name in re.findall(r"\$\{?(\w+)", source)]
        return any(value and value[0] == (MASTER_ADDR,) for value in values)

    def _simple(self, source: str) -> Argument | None:
        """What a substitution of constants prints: echo, dirname, basename, expr, pwd, whoami; None for any other."""
        try:
            statements = read_shell(source)
        except ValueError:
            return None
        parts = [part for each in statements for part in getattr(each, "parts", [])]
        if len(parts) != 1 or not getattr(parts[0], "words", None) or parts[0].redirects:
            if re.fullmatch(r"cd .* && pwd( -P)?", source.strip()) and "dirname" in source:
                return (Piece(os.path.normpath(os.path.join(self.folder, _below(source)))),)
            return None
        given = [argument for word in parts[0].words for argument in self.expand(word)]
        program, *words = [known(each) for each in given]
        if program == "whoami" or (program == "id" and words == ["-un"]):
            return (Piece("$USER", "runtime", self.environment.get("USER")),)
        if program == "pwd":
            return (Piece("$PWD", "runtime"),)
        if program in ("dirname", "realpath", "readlink") and re.search(r"\$\{?(0|BASH_SOURCE)", source):
            return (Piece(self.folder),)
        if program == "echo" and given[1:2] != [(Piece("-n"),)]:
            return with_spaces(given[1:])
        if None in words or not words:
            return None
        texts = [str(word) for word in words]
        if program == "dirname" and len(texts) == 1:
            return (Piece(os.path.dirname(texts[0]) or "."),)
        if program == "basename":
            base = os.path.basename(texts[0].rstrip("/"))
            return (Piece(base.removesuffix(texts[1]) if len(texts) > 1 else base),)
        if program == "expr":
            return self.arithmetic(" ".join(texts))
        return None

    # --- $((…))

    def _number(self, text: str) -> int | None:
        value = known(self.arithmetic(text))
        return int(value) if value is not None and value.lstrip("-").isdigit() else None

    def arithmetic(self, text: str, name: str = "") -> Argument:
        """The value of an expression; its source if only the job knows it."""
        if "PORT" in name.upper() and re.search(r"SLURM_JOB_?ID|RANDOM", text):
            return (MASTER_PORT,)
        of_nodes = False
        values: dict[str, str] = {}
        sources: dict[str, str] = {}
        for found in re.finditer(r"\$\{([^{}]*)\}|\$?([A-Za-z_]\w*)", text):
            inner = found[1] or found[2]
            value = self._parameter(inner, True)
            own = value[0] if len(value) == 1 else ()
            of_nodes = of_nodes or any(piece.kind == "fill" for piece in own)
            number = known(own)
            if number is not None and re.fullmatch(r"\s*-?\d+\s*", number):
                values[found[0]] = number.strip()
            sources[found[0]] = values.get(found[0]) or "".join(piece.text for piece in own)
        pattern = re.compile("|".join(sorted(map(re.escape, sources), key=len, reverse=True)) or r"(?!)")
        if len(values) == len(sources):
            result = evaluate(pattern.sub(lambda each: values[each[0]], text))
            if result is not None and of_nodes and result == self.gpus:
                return (Piece("{gpus}", "fill", str(result)),)
            if result is not None:
                return (Piece(str(result)),)
        inner = pattern.sub(lambda each: sources[each[0]], text)
        return (Piece(f"$(({inner}))", "runtime"),)


def _may_split(piece: Piece) -> bool:
    """Whether bash may make several words of a piece, as of a list of options; Slurm's own and names have no blanks."""
    return piece.kind == "runtime" and piece not in (MASTER_ADDR, MASTER_PORT) and not piece.text.startswith("$SLURM_")


def _unknown(argument: Argument) -> bool:
    return any(piece.kind in ("hosts", "runtime") for piece in argument)


def _below(source: str) -> str:
    """`..` of `cd "$(dirname "$0")/.." && pwd`."""
    found = re.search(r"\)\"?((?:/\.\.)+)", source)
    return found[1].lstrip("/") if found else "."
