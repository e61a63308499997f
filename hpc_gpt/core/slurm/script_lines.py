"""Reads the lines of a job script: its assignments, and where its programs' output goes. Nothing is ever executed.

Values that only a shell could evaluate (command substitution, a variable that is never set) are unknown, not empty.
"""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_gpt.core.slurm.directives import options_of
from hpc_gpt.core.slurm.sbatch_words import expand_pattern, read_call


@dataclass(frozen=True)
class Redirected:
    """A line that sends a program's output to another file than the script's: its number, and the file as written,
    empty if the line does not name it. `of_srun`: the file may have the fields of srun's patterns."""

    line: int
    target: str
    of_srun: bool = False


# A word of a shell, of any pieces: "$PWD"/out.txt.
_TARGET = r"(?P<target>(?:\"[^\"]{0,400}\"|'[^']{0,400}'|\$\([^()]{1,200}\)|`[^`]{1,200}`|[^\s;|&<>()\"'`]){1,400})"
_STARTS = re.compile(
    r"\b(?:python[\d.]*|torchrun|srun|mpirun|mpiexec|deepspeed|accelerate|apptainer|singularity)\s|^\s*exec\s+[12&]?>"
)
_TO_FILE = re.compile(rf"(?<=\s)(?:[12]|&)?>>?\s*{_TARGET}")
_SRUN = re.compile(r"\bsrun\s")
_TORCHRUN = re.compile(r"\btorchrun\b.*\s(?:--redirects[= ]|-r )(?!0\b)\S")
_LOG_DIR = re.compile(rf"\s--log[-_]dir[= ]{_TARGET}")
_PER_RANK = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "*")


def redirected(text: str) -> list[Redirected]:
    """The lines of a job script that send a program's output to another file than the script's."""
    outputs: list[Redirected] = []
    for number, line in logical_lines(text):
        if line.lstrip().startswith("#") or not _STARTS.search(line):
            continue
        targets = [(target, True) for call in _SRUN.finditer(line) for target in _files_of_srun(line[call.end() :])]
        targets += [(match["target"], False) for match in _TO_FILE.finditer(line) if match["target"] != "/dev/null"]
        if _TORCHRUN.search(line) and "--tee" not in line:
            folder = _LOG_DIR.search(line)
            targets.append((f"{folder['target']}/**/std*.log" if folder else "", False))
        for target, of_srun in dict.fromkeys(targets):
            outputs.append(Redirected(number, re.sub(f"[{_QUOTES}]", "", target), of_srun))
    return outputs


def _files_of_srun(arguments: str) -> Iterator[str]:
    """Yields the files of --output and --error in a call of srun."""
    try:
        words = shlex.split(arguments)
    except ValueError:
        words = arguments.split()
    options, _ = read_call(words, options_of("srun"))
    yield from (options[name] for name in ("output", "error") if options.get(name, "/dev/null") != "/dev/null")


def globs_of(
    text: str, environment: Mapping[str, str], arguments: Sequence[str], in_any_folder: bool = False
) -> list[str]:
    """Patterns of the files to which a script in an environment sends its programs' output, for programs that end
    before a process can be asked. A name must be known except for the number of a rank or a node; other files are left
    out. `in_any_folder`: a file of srun whose name has the job's id may be in folders of unknown names."""
    values = dict(environment) | _PER_RANK | {str(place): value for place, value in enumerate(arguments, 1)}
    for _, line in logical_lines(text):
        if (assigned := assignment(line)) is not None:
            name, written, plain = assigned
            values[name] = expand(written, values) if plain else written
    patterns = []
    for output in redirected(text):
        target = re.sub(r"\$\{?(\d)\}?", lambda match: values.get(match[1], match[0]), expand(output.target, values))
        if output.of_srun:
            slurm_values = values if "SLURM_JOB_ID" in values else {**values, "SLURM_JOB_ID": "*"}
            target = expand_pattern(re.sub(r"%\d*[tnNsJ]", "*", target), slurm_values)
        if target.strip("*/") and not set(target) & set("$`"):
            patterns.append(target)
        elif in_any_folder and output.of_srun:
            name, job_id = target.rpartition("/")[2], values.get("SLURM_JOB_ID", "")
            if job_id and job_id in name and not set(name) & set("$`"):
                patterns += [f"{'*/' * depth}{name}" for depth in range(1, _UNKNOWN_FOLDERS + 1)]
    return patterns


_UNKNOWN_FOLDERS = 3  # folders, one in the other, below the job's
_QUOTES = "\"'"
_MOST_LINES = 5000
_LONGEST = 20_000
_LARGEST_NUMBER = 10**15
_DEEPEST = 20
_ASSIGNED = re.compile(r"^\s*(?:(?:export|readonly|local|declare(?: -[a-zA-Z]+)?)\s+)?([A-Za-z_]\w{0,63})=")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w{0,63})(?::?[-=]([^{}$`]{0,200}))?\}|([A-Za-z_]\w{0,63}))")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^$`()\n]|\([^$`()\n]{0,100}\)){1,200})\)\)")
_WRITTEN = re.compile(r"\$\(\((?:[^`()\n]|\([^`()\n]{0,100}\)){1,200}\)\)")
_ARITHMETIC_TEXT = re.compile(r"[A-Za-z0-9_ \t+*/%()-]{1,1000}")
_WORD = re.compile(r"\"((?:[^\"\\]|\\.){0,20000})\"|'([^']{0,20000})'|([^\s;&|\"'#]{1,4000})")


# The options of srun that are the job's, if srun asks for an allocation of its own.
_OF_ALLOCATION = {
    *("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus", "gpus-per-node", "gpus-per-task", "gres", "mem"),
    *("partition", "account", "qos", "constraint", "nodelist", "exclude", "time", "exclusive", "reservation"),
}


def directives_of_srun(text: str) -> list[str]:
    """The #SBATCH lines for what the first srun of a text asks of Slurm; empty if it asks for nothing."""
    for _, line in logical_lines(text):
        words = line.split()  # no option of an allocation needs quotes
        if words[:1] == ["srun"]:
            given, _ = read_call([word.strip("\"'") for word in words[1:]], options_of("srun"))
            of_job = {name: value for name, value in given.items() if name in _OF_ALLOCATION}
            return [f"#SBATCH --{name}{value and '='}{value}" for name, value in of_job.items()]
    return []


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields (number of its first line, line). After a backslash or in an open quote a line continues on the next."""
    held, begun = "", 0
    for number, line in enumerate(text.splitlines()[:_MOST_LINES], 1):
        begun = begun or number
        if not held and line.lstrip().startswith("#"):
            yield number, line
            begun = 0
            continue
        if line.endswith("\\"):
            held += line[:-1] + " "
        elif len(held) + len(line) < _LONGEST and (held + line).replace('\\"', "").count('"') % 2:
            held += line + " "
        else:
            yield begun, held + line
            held, begun = "", 0
    if held:
        yield begun, held


def assignment(line: str) -> tuple[str, str, bool] | None:
    """Returns (name, value without quotes, whether it can contain variables) of `NAME=value`; None for other lines."""
    begin = _ASSIGNED.match(line[:_LONGEST])
    if begin is None:
        return None
    text = line[begin.end() : _LONGEST]
    if text.startswith("$(("):
        written = _WRITTEN.match(text)
        return (begin[1], written[0], True) if written else None
    word = _WORD.match(text)
    if word is None:
        return begin[1], "", True
    if word[2] is not None:
        return begin[1], word[2], False
    return begin[1], word[1] if word[1] is not None else word[3], True


def expand(text: str, variables: Mapping[str, str]) -> str:
    """The text with variables and arithmetic evaluated; unknown parts stay as written.

    >>> expand("$((NODES * ${GPUS}))", {"NODES": "16", "GPUS": "4"})
    '64'
    """
    for _ in range(_DEEPEST):
        before = text
        text = _VARIABLE.sub(lambda match: _value(match, variables), text)
        text = _ARITHMETIC.sub(lambda match: _evaluated(match, variables), text)
        if text == before or len(text) > _LONGEST:
            break
    return text[:_LONGEST]


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name = match[1] or match[3]
    if name in variables:
        return variables[name]
    return match[2] if match[2] is not None else match[0]


def _evaluated(match: re.Match[str], variables: Mapping[str, str]) -> str:
    value = arithmetic(match[1], variables)
    return match[0] if value is None else str(value)


def arithmetic(text: str, variables: Mapping[str, str]) -> int | None:
    """The value of `$((text))`, in whole numbers as in a shell; None if it is unknown.

    >>> arithmetic("(WORLD_SIZE / (TP * PP)) % 5", {"WORLD_SIZE": "64", "TP": "4", "PP": "2"})
    3
    """
    if not _ARITHMETIC_TEXT.fullmatch(text.strip()):
        return None
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body, variables)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr, variables: Mapping[str, str]) -> int:
    """The value of a parsed expression. Raises ValueError if it is unknown, not arithmetic, or too large."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            pass
        case ast.Name(id=name) if variables.get(name, "").isdecimal():
            value = int(variables[name])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_evaluate(operand, variables)
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _evaluate(left, variables), _evaluate(right, variables)
            match op:
                case ast.Add():
                    value = one + other
                case ast.Sub():
                    value = one - other
                case ast.Mult():
                    value = one * other
                case ast.Div() | ast.Mod():
                    # A shell rounds towards zero.
                    whole = abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
                    value = whole if isinstance(op, ast.Div) else one - whole * other
                case _:
                    raise ValueError("not an operation of a shell")
        case _:
            raise ValueError("not arithmetic, or unknown")
    if abs(value) > _LARGEST_NUMBER:
        raise ValueError("larger than any size")
    return value
