"""A command line that starts a program on GPUs: srun, mpirun, torchrun, accelerate, deepspeed, or python by itself."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_gpt.launch.slurm_options import options_of
from hpc_gpt.scripts.pieces import Argument, known

# srun's options of pyxis without a value.
_PYXIS_FLAGS = frozenset(
    ("container-mount-home", "no-container-mount-home", "container-writable", "container-remap-root",
     "no-container-remap-root", "container-entrypoint", "no-container-entrypoint")
)  # fmt: skip
_MPI_FLAGS = frozenset(
    ("allow-run-as-root", "oversubscribe", "tag-output", "v", "report-bindings", "nooversubscribe", "display-map", "l")
)
# Programs that start others, and how many words of their own they have at least: numactl --membind=0 python …
_WRAPPERS = {"time": 0, "exec": 0, "nohup": 0, "nice": 0, "stdbuf": 0, "env": 0, "command": 0, "numactl": 0,
             "timeout": 1, "catchsegv": 0, "taskset": 1, "ionice": 0, "setsid": 0, "bindpcie": 0}  # fmt: skip
_TORCH_RUN = ("torch.distributed.run", "torch.distributed.launch")
_SHELLS = ("bash", "sh", "zsh")
_MPI = ("mpirun", "mpiexec", "orterun", "mpiexec.hydra")
_CONTAINERS = ("apptainer", "singularity")
_PYTHON = re.compile(r"(python|pypy)[\d.]*")
# On the nodes they train nothing.
_CHORES = frozenset(
    ("hostname", "nvidia-smi", "mkdir", "cp", "rsync", "rm", "tar", "ls", "sleep", "cat", "echo", "dcgmi", "date", "df",
     "true", "env", "printenv", "free", "uname", "ln", "mv", "touch", "chmod", "find", "sync", "wget", "curl", "unzip",
     "ibstat", "which", "test", "scp", "sbcast", "pkill", "killall", "kill", "make", "cmake", "pip", "pip3", "lscpu",
     "rocm-smi", "printf", "id", "whoami", "nproc", "ray", "squeue", "sinfo", "module", "ip", "ifconfig", "export")
)  # fmt: skip
_TRAINS = re.compile(r"(?i)train|tune|sft|dpo|run_clm|gpt|llm|llama|nanotron|nemo|jax|fsdp|ddp|main|run")
_PREPARES = re.compile(
    r"(?i)(?<![a-z])(prepare|preproc|download|upload|convert|tokeni[sz]e|eval|plot|export|merge|setup|install|hostfile|"
    r"consolidate|generate|infer|serve|clean)"
)
# torchrun's, accelerate's and deepspeed's options without a value.
_LAUNCHER_FLAGS = frozenset(
    ("standalone", "no-python", "no_python", "m", "module", "run-path", "run_path", "use-env", "use_env",
     "multi_gpu", "multi-gpu", "use_fsdp", "use-fsdp", "use_deepspeed", "use-deepspeed", "cpu", "debug",
     "same_network", "same-network", "dynamo_use_fullgraph", "use_megatron_lm", "tpu", "quiet", "q",
     "force_multi", "no_ssh", "no_local_rank", "bind_cores_to_core", "save_pid", "enable_each_rank_log",
     "no_ssh_check", "mps", "use_xpu", "ipex", "virtual-local-rank")
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What a launcher starts: the program's own words after it. `launcher` is torchrun, accelerate, deepspeed, mpirun
    or empty; `options` are the launcher's by name, with `-` for `_`; `is_module`: `program` is a module (`-m`)."""

    launcher: str
    options: dict[str, str | None]
    program: str
    arguments: tuple[Argument, ...]
    is_module: bool = False

    @property
    def name(self) -> str:
        """The program's file name, or its module."""
        return self.program if self.is_module else os.path.basename(self.program)

    @property
    def score(self) -> int:
        """How likely it trains; below 1 it does not."""
        if os.path.basename(self.program) in _CHORES or not self.program:
            return 0
        score = 3 if self.launcher else 1
        if _PREPARES.search(self.name):
            score -= 3
        return score + 2 if _TRAINS.search(self.name) else score


@dataclass(frozen=True)
class Srun:
    """An srun in front of a command: its options by long name, None without a value."""

    options: dict[str, str | None]


def is_candidate(argv: Sequence[Argument]) -> bool:
    """Whether a command may start a program that trains."""
    argv = unwrapped(argv)
    name = os.path.basename(known(argv[0]) or "") if argv else ""
    if name in ("srun", "torchrun", "accelerate", "deepspeed", "composer", *_MPI, *_CONTAINERS):
        return len(argv) > 1
    if name in _SHELLS:
        return len(argv) > 1
    if _PYTHON.fullmatch(name):
        words = [known(each) for each in argv[1:3]]
        is_tool = words in (["-m", "pip"], ["-m", "venv"])
        return bool(words) and not is_tool and words[0] not in ("-c", "-V", "--version", "-")
    return name.endswith((".sh", ".py", ".bash")) or name == "jsrun"


def unwrapped(argv: Sequence[Argument]) -> Sequence[Argument]:
    """A command without `time`, `env NAME=value`, `numactl …` and the like in front of it."""
    words = list(argv)
    while words:
        name = os.path.basename(known(words[0]) or "")
        if name in _WRAPPERS:
            own = _WRAPPERS[name]
            words = words[1:]
            while words and ((text := known(words[0])) is None or text.startswith("-") or _is_assignment(text)):
                words = words[1:]
            words = words[own:]
        elif name == "nsys" and len(words) > 1:
            words = words[2:]
            while words and (known(words[0]) or "-").startswith("-"):
                words = words[1 if "=" in (known(words[0]) or "") else 2 :]
        else:
            return words
    return words


def _is_assignment(text: str) -> bool:
    return re.match(r"[A-Za-z_]\w*=", text) is not None


def split_srun(argv: Sequence[Argument]) -> tuple[Srun | None, Sequence[Argument]]:
    """(the srun, the command after its options); no srun if the command has none."""
    words = list(unwrapped(argv))
    if not words or os.path.basename(known(words[0]) or "") != "srun":
        return None, argv
    kinds, letters = options_of("srun")
    options: dict[str, str | None] = {}
    place = 1
    while place < len(words):
        text = known(words[place])
        text = "".join(piece.text for piece in words[place]) if text is None else text
        if text == "--":
            place += 1
            break
        if not text.startswith("-"):
            break
        if text.startswith("--"):
            name, equals, value = text[2:].partition("=")
            given: str | None = value if equals else None
        else:
            name, given = letters.get(text[1:2], text[1:2]), text[2:].lstrip("=") or None
            if kinds.get(name) == "plain" and given:  # -lu
                options.update({letters.get(letter, letter): None for letter in given})
                given = None
        takes_value = kinds.get(name, "valued") == "valued" and name not in _PYXIS_FLAGS
        if given is None and takes_value and place + 1 < len(words):
            place += 1
            given = known(words[place]) or "?"
        options[name] = given
        place += 1
    return Srun(options), words[place:]


def shell_text(argv: Sequence[Argument]) -> Argument | None:
    """The text that `bash -c TEXT` runs; None for any other command."""
    words = unwrapped(argv)
    if not words or os.path.basename(known(words[0]) or "") not in _SHELLS:
        return None
    for place, word in enumerate(words[1:], 1):
        text = known(word) or ""
        if not text.startswith("-"):
            return None
        if text.endswith("c") and not text.startswith("--") and place + 1 < len(words):
            return words[place + 1]
    return None


def shell_file(argv: Sequence[Argument]) -> tuple[str, list[Argument]] | None:
    """(path, arguments) of `bash FILE …` or `./FILE.sh …`; None for any other command."""
    words = list(unwrapped(argv))
    if not words:
        return None
    name = known(words[0]) or ""
    if os.path.basename(name) in _SHELLS:
        words = words[1:]
        while words and (known(words[0]) or "").startswith("-"):
            words = words[1:]
        name = (known(words[0]) or "") if words else ""
    elif not name.endswith((".sh", ".bash")):
        return None
    return (name, words[1:]) if name else None


def target_of(argv: Sequence[Argument]) -> Target:
    """The program that a command line without srun starts, through whatever launcher."""
    words = list(unwrapped(argv))
    launcher = ""
    options: dict[str, str | None] = {}
    while words:
        name = os.path.basename(known(words[0]) or "")
        if name in _MPI:
            launcher = "mpirun"
            options, words = _mpi_options(words[1:])
        elif name in _CONTAINERS and known(words[1] if len(words) > 1 else ()) in ("exec", "run"):
            words = _in_image(words[2:])
        elif name in ("torchrun", "deepspeed", "composer") or (
            name == "accelerate" and known(words[1] if len(words) > 1 else ()) == "launch"
        ):
            launcher = name
            options, words = _launcher_options(words[2 if name == "accelerate" else 1 :])
            return _program(launcher, options, words)
        elif _PYTHON.fullmatch(name):
            words = words[1:]
            while words and (text := known(words[0])) and text.startswith("-") and text not in ("-m", "-c"):
                words = words[2 if text in ("-W", "-X") else 1 :]
            if words and known(words[0]) == "-m" and len(words) > 1:
                module = known(words[1]) or ""
                if module in _TORCH_RUN or module == "accelerate.commands.launch":
                    launcher = "accelerate" if module.startswith("accelerate") else "torchrun"
                    options, words = _launcher_options(words[2:])
                    return _program(launcher, options, words)
                return Target(launcher, options, module, tuple(words[2:]), True)
            return _program(launcher, options, words)
        else:
            unwrapped_words = list(unwrapped(words))
            if unwrapped_words == words:
                return Target(launcher, options, known(words[0]) or "", tuple(words[1:]))
            words = unwrapped_words
    return Target(launcher, options, "", ())


def _program(launcher: str, options: dict[str, str | None], words: list[Argument]) -> Target:
    is_module = "m" in options or "module" in options
    if launcher and words and known(words[0]) in ("python", "python3") and len(words) > 1:
        words = words[1:]  # torchrun --no-python python train.py
    # The name of a program in a folder that only the job knows is known all the same.
    program = "".join(piece.text if piece.value is None else piece.value for piece in words[0]) if words else ""
    return Target(launcher, options, program, tuple(words[1:]), is_module)


def _launcher_options(words: list[Argument]) -> tuple[dict[str, str | None], list[Argument]]:
    """(the launcher's options, the program and its arguments)."""
    options: dict[str, str | None] = {}
    place = 0
    while place < len(words):
        text = known(words[place])
        if text is None:
            text = "".join(piece.text for piece in words[place])
        if not text.startswith("-"):
            break
        name, equals, value = text.lstrip("-").partition("=")
        name = name.replace("_", "-") if name not in _LAUNCHER_FLAGS else name
        is_flag = name in _LAUNCHER_FLAGS or name.replace("-", "_") in _LAUNCHER_FLAGS
        if not equals and not is_flag and place + 1 < len(words):
            place += 1
            options[name] = known(words[place])
        else:
            options[name] = value if equals else None
        place += 1
    return options, words[place:]


def _mpi_options(words: list[Argument]) -> tuple[dict[str, str | None], list[Argument]]:
    """(mpirun's options, the command after them); `-x NAME=value`, `-np N`, `--mca NAME value`."""
    options: dict[str, str | None] = {}
    place = 0
    while place < len(words):
        text = known(words[place]) or ""
        if not text.startswith("-"):
            break
        name = text.lstrip("-")
        count = 2 if name in ("mca", "gmca") else 0 if name in _MPI_FLAGS or "=" in name else 1
        if count and place + 1 < len(words):
            options[name] = known(words[place + 1])
        place += 1 + count
    return options, words[place:]


def _in_image(words: list[Argument]) -> list[Argument]:
    """The command in `apptainer exec --nv --bind A:B IMAGE COMMAND …`."""
    place = 0
    while place < len(words):
        text = known(words[place]) or ""
        if not text.startswith("-"):
            return words[place + 1 :]
        takes = text.lstrip("-") in ("bind", "B", "env", "env-file", "pwd", "home", "H", "overlay", "o", "workdir", "W")
        place += 2 if takes else 1
    return []
