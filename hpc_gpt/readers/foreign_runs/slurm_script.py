"""The Slurm script that lies beside a log: directives, plain assignments and the trainer's flags, never executed.

What it says is the weakest evidence: it may have been edited since the job ran.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.readers.foreign_runs.shell_words import assignment, expand, logical_lines
from hpc_gpt.readers.foreign_runs.stated import SCRIPT, Stated
from hpc_gpt.settings.devices import device_named

_LARGEST = 1 << 20
_DIRECTIVE = re.compile(r"^\s*#SBATCH\s+(.{1,2000})")
_OPTION = re.compile(
    r"(--[a-z][a-z-]{1,40}|-[A-Za-z])(?:[= ]\s*|(?<=-[A-Za-z]))(\"[^\"]{0,300}\"|'[^']{0,300}'|[^\s#]+)?"
)
_FLAG = re.compile(
    r"(?<![\w-])--([a-zA-Z][\w-]{1,60})(?:[ =]+(?!--)(\"[^\"]{0,300}\"|'[^']{0,300}'|[^\s\"'\\;|&]{1,200}))?"
)
_SHORT = {
    "-N": "--nodes",
    "-n": "--ntasks",
    "-J": "--job-name",
    "-o": "--output",
    "-e": "--error",
    "-t": "--time",
    "-C": "--constraint",
    "-G": "--gpus",
    "-p": "--partition",
    "-A": "--account",
    "-q": "--qos",
    "-w": "--nodelist",
}
_WHOLE = re.compile(r"\d{1,12}")
# Trainer flags and shell variables -> the field they settle. Dashes are underscores here, letters small.
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
    """What a script says: directives by their long names, variables, the trainer's flags; each with its line."""

    path: Path
    directives: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    variables: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    flags: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def job_name(self) -> str | None:
        """`--job-name`, or None."""
        return self.directives["job-name"][0] if "job-name" in self.directives else None

    def facts(self) -> dict[str, Stated]:
        """The fields it settles, each with its line."""
        found: dict[str, Stated] = {}

        def take(name: str, value: str | int | None, line: int, what: str) -> None:
            if value is not None and value != "":
                found.setdefault(name, Stated(value, SCRIPT, f"{self.path}:{line} ({what})"))

        for names, mark in ((self.flags, "--"), (self.variables, "")):
            for name, (text, line) in names.items():
                target = _FIELD_OF.get(name.lower().replace("-", "_"))
                if target and _WHOLE.fullmatch(text):
                    take(target, int(text), line, mark + name)
        for name, dtype in (("bf16", "bf16"), ("fp16", "fp16")):
            if name in self.flags and self.flags[name][0].lower() not in ("false", "0", "no"):
                take("dtype", dtype, self.flags[name][1], f"--{name}")
        for name, text, line in ((name, *value) for name, value in self.directives.items()):
            take(*_from_directive(name, text), line, f"--{name}")
        found.pop("", None)
        return found


def read_script(path: Path) -> Script | None:
    """The script at a path; None where it cannot be read or is too large to be one."""
    try:
        if path.stat().st_size > _LARGEST:
            return None
        text = path.read_text(encoding="utf-8", errors="replace").replace("\0", "")
    except OSError:
        return None
    directives: dict[str, tuple[str, int]] = {}
    variables: dict[str, tuple[str, int]] = {}
    twice: set[str] = set()
    commands: list[tuple[int, str]] = []
    for number, line in logical_lines(text):
        if directive := _DIRECTIVE.match(line):
            for option in _OPTION.finditer(directive[1].split(" #")[0]):
                name = _SHORT.get(option[1], option[1]).lstrip("-")
                directives[name] = ((option[2] or "").strip("\"'"), number)
        elif line.lstrip().startswith("#"):
            continue
        elif assigned := assignment(line):
            name, written, plain = assigned
            values = _known(directives) | {key: value for key, (value, _) in variables.items()}
            value = expand(written, values, keep=True) if plain else written
            assert value is not None
            if name in variables and variables[name][0] != value and _WHOLE.fullmatch(variables[name][0]):
                twice.add(name)  # as in the branches of an `if`: which one ran is not known
            variables[name] = (value, number)
            commands.append((number, value))
        else:
            commands.append((number, line))
    variables = {name: value for name, value in variables.items() if name not in twice}
    flags = _flags(commands, _known(directives) | {name: value for name, (value, _) in variables.items()})
    return Script(path, directives, variables, flags)


def script_beside(log: Path, name: str | None, scripts: Sequence[Script]) -> Script | None:
    """The script a log is of, among those of its folder, else of the folder above.

    The one whose `--output` or `--error` the log's name fits, or whose `--job-name` it begins with; else the only one
    of its folder.
    """
    beside = [script for script in scripts if script.path.parent == log.parent]
    if beside:
        return beside[0] if len(beside) == 1 else _of_name(log, name, beside)
    return _of_name(log, name, [script for script in scripts if script.path.parent == log.parent.parent])


def _of_name(log: Path, name: str | None, beside: Sequence[Script]) -> Script | None:
    """The one script that a log's name, or the job's, is of."""
    named = [script for script in beside if _fits(log.name, script)]
    if not named:
        called = [script for script in beside if script.job_name]
        named = [script for script in called if script.job_name == name or log.name.startswith(f"{script.job_name}")]
        named = [
            script for script in named if len(script.job_name or "") == max(len(each.job_name or "") for each in named)
        ]
    return named[0] if len(named) == 1 else None


def _fits(log: str, script: Script) -> bool:
    """Whether `--output` or `--error` may have given a log its name."""
    for option in ("output", "error"):
        if option not in script.directives:
            continue
        pattern = script.directives[option][0].rsplit("/", 1)[-1]
        if not pattern or len(pattern) > 200:
            continue
        pieces = re.split(r"%\d{0,3}([a-zA-Z])", pattern)
        regex = "".join(
            re.escape(piece)
            if number % 2 == 0
            else re.escape(script.job_name)
            if piece == "x" and script.job_name
            else r"[\w.-]{1,80}"
            for number, piece in enumerate(pieces)
        )
        if re.fullmatch(regex, log):
            return True
    return False


def _known(directives: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """What Slurm sets in a job's environment from the directives."""
    given = {name: value for name, (value, _) in directives.items()}
    found = {}
    for variable, option in (
        ("SLURM_NNODES", "nodes"),
        ("SLURM_JOB_NUM_NODES", "nodes"),
        ("SLURM_NTASKS_PER_NODE", "ntasks-per-node"),
        ("SLURM_GPUS_PER_NODE", "gpus-per-node"),
        ("SLURM_NTASKS", "ntasks"),
        ("SLURM_CPUS_PER_TASK", "cpus-per-task"),
    ):
        if _WHOLE.fullmatch(given.get(option, "")):
            found[variable] = given[option]
    return found


def _flags(commands: Sequence[tuple[int, str]], values: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """`--flag value` of every command, variables worked out; the first of each name."""
    found: dict[str, tuple[str, int]] = {}
    for number, line in commands:
        text = expand(line, values, keep=True) or ""
        for flag in _FLAG.finditer(text):
            value = (flag[2] or "").strip("\"'")
            if "$" not in value and "`" not in value:
                found.setdefault(flag[1], (value, number))
    return found


def _from_directive(name: str, text: str) -> tuple[str, str | int | None]:
    """(field, value) of a directive; ("", None) for one that settles nothing."""
    if name == "nodes":
        return "nodes", _whole(text)
    if name in ("gpus-per-node", "gres"):
        # gpu:4, gpu:a100:4, gpu=4 or 4; other resources of --gres say nothing.
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
            (found for word in re.split(r"[&|,*\[\]() ]", text) if (found := device_named(word))), None
        )
    return "", None


def _whole(text: str) -> int | None:
    return int(text) if _WHOLE.fullmatch(text) else None
