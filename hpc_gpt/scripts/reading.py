"""A job script as it is read: its directives, what its statements set, and the program that trains."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_gpt.errors import ConfigError
from hpc_gpt.scripts.commands import LARGEST
from hpc_gpt.scripts.directives import Directives, read_directives
from hpc_gpt.scripts.expansion import Scope
from hpc_gpt.scripts.notes import Notes
from hpc_gpt.scripts.pieces import Piece, known
from hpc_gpt.scripts.shell import read_shell
from hpc_gpt.scripts.state import Started
from hpc_gpt.scripts.walk import Walk

_GPU_COUNTS = re.compile(
    r"(?i)(n_?)?(gpus?|procs?|nproc|num_gpus)(_?per_?node)|ngpus?|num_gpus|gpus_on_node|nproc_per_node"
)
_PASSED = {"nproc-per-node": "torchrun", "num-gpus": "deepspeed"}


def read_script(path: Path) -> str:
    """The text of a job script. ConfigError for what is none: missing, a folder, binary, or larger than any."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder", "give the job script itself: --from job.slurm")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no regular file", "give a job script: --from job.slurm")
        size = path.stat().st_size
        if size > LARGEST:
            limit = f"{LARGEST / 1e6:g} MB"
            raise ConfigError(f"{path} has {size / 1e6:.1f} MB, and a job script has at most {limit}", "is it a log?")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{path}: not UTF-8 at byte {fault.start}", "give the job script, a text") from None
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror}", "give a job script that can be read") from None
    if path.suffix == ".py" or re.match(r"#!.*\bpython", text):
        raise ConfigError(f"{path} is a Python program, and no job script", "give the script that starts it by sbatch")
    if "\0" in text:
        raise ConfigError(f"{path} is binary: it holds a NUL", "give the job script, a text")
    return text


class Reading:
    """What a script says, for files in `folder`. `environment` is that of the shell that submits.

    Raises ConfigError for what is no script, what bash could not read, and a script that trains nothing.
    """

    def __init__(self, path: Path, name: str | None, folder: Path, environment: Mapping[str, str]) -> None:
        self.path, self.folder, self.environment = path, folder, environment
        self.text = read_script(path)
        self.name = name or re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-") or "experiment"
        self.beside = path.resolve().parent
        self.notes = Notes()
        self.statements = read_shell(self.text, str(path))
        self.directives = read_directives(self.text, self.notes)
        self.walk, self.gpus_per_node = self.walked()
        started = self.walk.best()
        if started is None:
            raise ConfigError(
                f"{path} trains nothing: no srun, torchrun, accelerate, deepspeed, mpirun or python starts a program "
                "that could",
                "give the script that starts the training itself",
            )
        self.started = started
        self.nodes = self.directives.all_nodes
        self.gpus = self.nodes * self.gpus_per_node
        self.keys: dict[str, Any] = {}
        self.profile: dict[str, Any] = {}
        self.places: dict[str, str] = {}

    def walked(self) -> tuple[Walk, int]:
        """(the walk through the script, GPUs a node), which the command may say if the directives do not."""
        notes, given = self.notes, self.directives.node_gpus
        self.notes = Notes()
        walk = self.walk_once(given or 1)
        started = walk.best()
        if given is None and started is not None:
            count, why = _gpus_of(started, self.directives, self.directives.all_nodes)
            notes.leave(started.place, started.source, f"no directive asks for GPUs: {count} a node, from {why}")
            given, self.notes = count, Notes()
            walk = self.walk_once(given)
        for part in ("taken", "own", "left"):
            getattr(notes, part).extend(getattr(self.notes, part))
        self.notes = walk.notes = notes
        return walk, given or 1

    def walk_once(self, gpus_per_node: int) -> Walk:
        asked = self.directives
        nodes, tasks = asked.all_nodes, asked.tasks or asked.node_tasks * asked.all_nodes
        gpus = nodes * gpus_per_node
        all_nodes = Piece("{nodes}", "fill", str(nodes))
        all_gpus = Piece("{gpus}", "fill", str(gpus))
        all_tasks = all_gpus if tasks == gpus else all_nodes if tasks == nodes else Piece(str(tasks))
        node_gpus = Piece(str(gpus_per_node), value=str(gpus_per_node))
        sizes = {
            "SLURM_NNODES": all_nodes, "SLURM_JOB_NUM_NODES": all_nodes, "SLURM_NTASKS": all_tasks,
            "SLURM_NPROCS": all_tasks, "SLURM_GPUS": all_gpus, "SLURM_GPUS_ON_NODE": node_gpus,
            "SLURM_GPUS_PER_NODE": node_gpus, "SLURM_NTASKS_PER_NODE": Piece(str(asked.node_tasks)),
        }  # fmt: skip
        if asked.cpus_per_task is not None:
            sizes["SLURM_CPUS_PER_TASK"] = Piece(str(asked.cpus_per_task))
        if (job_name := asked.job.get("name")) is not None:
            sizes["SLURM_JOB_NAME"] = Piece("$SLURM_JOB_NAME", "runtime", job_name)
        self.work = self.start_folder()
        scope = Scope(sizes, self.environment, str(self.beside), self.work, gpus)
        walk = Walk(scope, self.notes, self.beside)
        walk.walk(self.statements)
        return walk

    def start_folder(self) -> str:
        """Where the job starts: as the directives say, else here, where it is submitted from."""
        here = os.getcwd()
        return os.path.normpath(os.path.join(here, self.directives.chdir or "."))

    def workdir(self) -> str:
        return self.walk.state.workdir[1] if self.walk.state.workdir else self.work

    def absolute(self, path: str) -> str:
        """A path as the job finds it from the folder that it works in."""
        return os.path.normpath(os.path.join(self.workdir(), os.path.expanduser(path)))

    def place_of(self, option: str) -> str:
        """The line that has an option; that of the command if none has."""
        pattern = re.compile(rf"(?<![\w-]){re.escape(option)}(?![\w-])")
        for number, line in enumerate(self.text.splitlines(), 1):
            if not line.lstrip().startswith("#") and pattern.search(line):
                return str(number)
        return self.started.place


def _gpus_of(started: Started, asked: Directives, nodes: int) -> tuple[int, str]:
    """(GPUs a node, where that is from) if the directives say nothing."""
    target = started.target
    for option, launcher in _PASSED.items():
        value = target.options.get(option) or target.options.get(option.replace("-", "_"))
        if value is not None and value.isdigit():
            return max(1, int(value)), f"{launcher}'s --{option}"
    value = target.options.get("num-processes")
    if value is not None and value.isdigit() and int(value) % nodes == 0:
        return max(1, int(value) // nodes), "accelerate's --num_processes"
    for name, variable in started.scope.variables.items():
        text = known(variable.elements[0]) if variable.elements else None
        if text is not None and text.isdigit() and _GPU_COUNTS.fullmatch(name) and 0 < int(text) <= 64:
            return int(text), name
    if started.srun is not None and asked.node_tasks > 1:
        return asked.node_tasks, "the tasks of srun"
    return 1, "nothing"
