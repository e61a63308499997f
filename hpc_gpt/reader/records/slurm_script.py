"""Reads the Slurm script of a log: directives, plain assignments and the trainer's flags. Nothing is ever executed.

It is the weakest evidence, because it may have been edited since the job ran. Values that only a shell could evaluate
(command substitution, a variable that is never set) are unknown, not empty.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.core.files import read_text
from hpc_gpt.core.settings.devices import device_named
from hpc_gpt.core.slurm.directives import options_of
from hpc_gpt.core.slurm.sbatch_words import expand_pattern
from hpc_gpt.reader.records.draft import SCRIPT, Stated

_LARGEST_FILE = 1 << 20
_DIRECTIVE = re.compile(r"^\s*#SBATCH\s+(.{1,2000})")
_OPTION = re.compile(
    r"(--[a-z][a-z-]{1,40}|-[A-Za-z])(?:[= ]\s*|(?<=-[A-Za-z]))(\"[^\"]{0,300}\"|'[^']{0,300}'|[^\s#]+)?"
)
_FLAG = re.compile(
    r"(?<![\w-])--([a-zA-Z][\w-]{1,60})(?:[ =]+(?!--)(\"[^\"]{0,300}\"|'[^']{0,300}'|[^\s\"'\\;|&]{1,200}))?"
)
_WHOLE = re.compile(r"\d{1,12}")
# {field: the trainer's flags and shell variables that give it}, in lower case with underscores.
_FIELDS = {
    "tp": ("tensor_model_parallel_size", "model_parallel_size", "tp_size", "tensor_parallel_size"),
    "pp": ("pipeline_model_parallel_size", "pipe_parallel_size", "pp_size", "pipeline_parallel_size"),
    "cp": ("context_parallel_size", "cp_size"),
    "dp": ("dp_size", "data_parallel_size"),
    "micro_batch": ("micro_batch_size", "per_device_train_batch_size", "micro_bs", "mbs"),
    "micro_batches": ("gas", "gradient_accumulation_steps"),
    "global_batch": ("global_batch_size", "global_batch", "gbs"),
    "layers": ("num_layers", "nlayers", "n_layers", "n_layer"),
    "hidden": ("hidden_size", "nhidden", "n_hidden", "n_embd"),
    "heads": ("num_attention_heads", "nheads", "n_heads", "n_head", "num_heads"),
    "ffn": ("ffn_hidden_size",),
    "seq": ("seq_length", "seq_len", "sequence_length"),
    "steps_planned": ("train_iters", "max_steps"),
    "nodes": ("nnodes", "num_nodes"),
    "gpus_per_node": ("nproc_per_node", "gpus_per_node", "n_gpus_per_node", "gpu_per_node"),
    "gpus": ("world_size",),
    "zero_stage": ("zero_stage",),
}
_FIELD_OF = {name: field for field, names in _FIELDS.items() for name in names}


@dataclass(frozen=True)
class Script:
    """Directives by their long names, variables and the trainer's flags: {name: (value, line)}."""

    path: Path
    directives: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    variables: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    flags: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def job_name(self) -> str | None:
        """The value of `--job-name`, or None."""
        return self.directives["job-name"][0] if "job-name" in self.directives else None

    def facts(self) -> dict[str, Stated]:
        """The fields that the script gives, each with its line."""
        facts: dict[str, Stated] = {}

        def take(name: str, value: str | int | None, line: int, what: str) -> None:
            if value is not None and value != "":
                facts.setdefault(name, Stated(value, SCRIPT, f"{self.path}:{line} ({what})"))

        for names, mark in ((self.flags, "--"), (self.variables, "")):
            for name, (text, line) in names.items():
                target = _FIELD_OF.get(name.lower().replace("-", "_"))
                if target and _WHOLE.fullmatch(text):
                    take(target, int(text), line, mark + name)
        for dtype in ("bf16", "fp16"):
            if dtype in self.flags and self.flags[dtype][0].lower() not in ("false", "0", "no"):
                take("dtype", dtype, self.flags[dtype][1], f"--{dtype}")
        for name, (text, line) in self.directives.items():
            take(*_from_directive(name, text), line, f"--{name}")
        facts.pop("", None)
        return facts


def read_script(path: Path) -> Script | None:
    """The script at a path; None if it cannot be read, or is too large to be one."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            return None
        text = read_text(path, most=_LARGEST_FILE).replace("\0", "")
    except OSError:
        return None
    directives: dict[str, tuple[str, int]] = {}
    variables: dict[str, tuple[str, int]] = {}
    twice: set[str] = set()
    commands: list[tuple[int, str]] = []
    for number, line in logical_lines(text):
        if directive := _DIRECTIVE.match(line):
            for option in _OPTION.finditer(directive[1].split(" #")[0]):
                name = option[1].lstrip("-")
                name = options_of("sbatch").letters.get(name) or options_of("sbatch").named(name)
                directives[name] = ((option[2] or "").strip("\"'"), number)
        elif line.lstrip().startswith("#"):
            continue
        elif assigned := assignment(line):
            name, written, plain = assigned
            values = _known(directives) | {key: value for key, (value, _) in variables.items()}
            value = expand(written, values) if plain else written
            if name in variables and variables[name][0] != value and _WHOLE.fullmatch(variables[name][0]):
                twice.add(name)  # for example in the branches of an `if`: nothing says which branch ran
            variables[name] = (value, number)
            commands.append((number, value))
        else:
            commands.append((number, line))
    variables = {name: value for name, value in variables.items() if name not in twice}
    flags = _flags(commands, _known(directives) | {name: value for name, (value, _) in variables.items()})
    return Script(path, directives, variables, flags)


def script_beside(log: Path, name: str | None, scripts: Mapping[Path, Sequence[Script]]) -> Script | None:
    """The script of a log, from its folder or the folder above. `scripts`: by their folder.

    It is the only script of the log's folder, else the one whose `--output` or `--error` fits the log's name, else the
    one with the longest `--job-name` that the log's name begins with.
    """
    candidates = scripts.get(log.parent, ())
    if len(candidates) == 1:
        return candidates[0]
    candidates = candidates or scripts.get(log.parent.parent, ())
    named = [script for script in candidates if _fits(log.name, script)]
    if not named:
        called = [(script, job) for script in candidates if (job := script.job_name)]
        fitting = [(len(job), script) for script, job in called if job == name or log.name.startswith(job)]
        longest = max((length for length, _ in fitting), default=0)
        named = [script for length, script in fitting if length == longest]
    return named[0] if len(named) == 1 else None


def _fits(log: str, script: Script) -> bool:
    """Whether `--output` or `--error` may have given a log its name."""
    for option in ("output", "error"):
        if option not in script.directives:
            continue
        pattern = script.directives[option][0].rsplit("/", 1)[-1]
        if not pattern or len(pattern) > 200:
            continue
        plain, *pieces = re.split(r"%\d{0,3}([a-zA-Z])", pattern)
        regex = re.escape(plain)
        for letter, text in zip(pieces[::2], pieces[1::2], strict=True):
            any_value = letter != "x" or not script.job_name
            regex += (r"[\w.-]{1,80}" if any_value else re.escape(script.job_name or "")) + re.escape(text)
        if re.fullmatch(regex, log):
            return True
    return False


def _known(directives: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """The variables that Slurm sets in a job's environment because of the directives."""
    options = {name: value for name, (value, _) in directives.items()}
    variables = {}
    for variable, option in (
        ("SLURM_NNODES", "nodes"),
        ("SLURM_JOB_NUM_NODES", "nodes"),
        ("SLURM_NTASKS_PER_NODE", "ntasks-per-node"),
        ("SLURM_GPUS_PER_NODE", "gpus-per-node"),
        ("SLURM_NTASKS", "ntasks"),
        ("SLURM_CPUS_PER_TASK", "cpus-per-task"),
    ):
        if _WHOLE.fullmatch(options.get(option, "")):
            variables[variable] = options[option]
    return variables


def _flags(commands: Sequence[tuple[int, str]], values: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """`--flag value` of all commands, with variables replaced; the first per name."""
    flags: dict[str, tuple[str, int]] = {}
    for number, line in commands:
        for flag in _FLAG.finditer(expand(line, values)):
            value = (flag[2] or "").strip("\"'")
            if "$" not in value and "`" not in value:
                flags.setdefault(flag[1], (value, number))
    return flags


def _from_directive(name: str, text: str) -> tuple[str, str | int | None]:
    """(field, value) of a directive; ("", None) for one that gives no field."""
    if name == "nodes":
        return "nodes", _whole(text)
    if name in ("gpus-per-node", "gres"):
        # gpu:4, gpu:a100:4, gpu=4 or 4; other resources of --gres are ignored.
        for piece in text.split(","):
            parts = re.split(r"[:=]", piece)
            if (name == "gpus-per-node" or parts[0] == "gpu") and len(parts) <= 3:
                return "gpus_per_node", _whole(parts[-1]) if parts[-1] != "gpu" else 1
        return "", None
    if name == "gpus":
        return "gpus", _whole(text.rpartition(":")[2])
    if name == "job-name":
        return "name", text
    if name == "constraint":
        return "device", next(
            (device for word in re.split(r"[&|,*\[\]() ]", text) if (device := device_named(word))), None
        )
    return "", None


def _whole(text: str) -> int | None:
    return int(text) if _WHOLE.fullmatch(text) else None


@dataclass(frozen=True)
class Redirected:
    """A line that sends a program's output to another file than the script's: its number, and the file as written,
    empty if the line does not name it. `of_srun`: the file may have the fields of srun's patterns."""

    line: int
    target: str
    of_srun: bool = False


_TARGET = r"(?P<target>\"[^\"]{1,400}\"|'[^']{1,400}'|(?:\$\([^()]{1,200}\)|`[^`]{1,200}`|[^\s;|&<>()\"'`]){1,400})"
_STARTS = re.compile(
    r"\b(?:python[\d.]*|torchrun|srun|mpirun|mpiexec|deepspeed|accelerate|apptainer|singularity)\s|^\s*exec\s+[12&]?>"
)
_TO_FILE = re.compile(rf"(?<=\s)(?:[12]|&)?>>?\s*{_TARGET}")
_OF_SRUN = re.compile(rf"\bsrun\b(?:\s+-\S*(?:\s+(?!-)\S+)??)*?\s+(?:--(?:output|error)[= ]|-[oe] ?){_TARGET}")
_TORCHRUN = re.compile(r"\btorchrun\b.*\s(?:--redirects[= ]|-r )(?!0\b)\S")
_LOG_DIR = re.compile(rf"\s--log[-_]dir[= ]{_TARGET}")
_PER_RANK = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "*")


def redirected(text: str) -> list[Redirected]:
    """The lines of a job script that send a program's output to another file than the script's."""
    outputs: list[Redirected] = []
    for number, line in logical_lines(text):
        if line.lstrip().startswith("#") or not _STARTS.search(line):
            continue
        targets = [(match["target"], True) for match in _OF_SRUN.finditer(line)]
        targets += [(match["target"], False) for match in _TO_FILE.finditer(line) if match["target"] != "/dev/null"]
        if _TORCHRUN.search(line) and "--tee" not in line:
            folder = _LOG_DIR.search(line)
            targets.append((f"{folder['target'].strip(_QUOTES)}/**/std*.log" if folder else "", False))
        outputs += [Redirected(number, target.strip(_QUOTES), of_srun) for target, of_srun in dict.fromkeys(targets)]
    return outputs


def globs_of(text: str, environment: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """Patterns of the files to which a script in an environment sends its programs' output. A name must be known except
    for the number of a rank or a node; other files are left out."""
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
    return patterns


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
    """(name, value without quotes, whether it can contain variables) of `NAME=value`; None for other lines."""
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
