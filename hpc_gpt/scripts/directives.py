"""The `#SBATCH` lines of a script: what of them belongs to the site, what to the experiment, and the job's size."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpc_gpt.errors import ConfigError
from hpc_gpt.launch.slurm_options import options_of
from hpc_gpt.scripts.notes import Notes
from hpc_gpt.secrets import is_secret, is_secret_variable
from hpc_gpt.settings.experiment import limit_s

# {option: the key that it becomes}: of the profile what all jobs of a site have, of the experiment what is this run's.
_PROFILE = dict.fromkeys(("account", "partition", "qos", "constraint", "reservation", "mem"))
_JOB = {"time": "time", "job-name": "name", "comment": "comment", "nodelist": "nodelist", "exclude": "exclude",
        "dependency": "dependency"}  # fmt: skip
_SIZES = ("nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task", "gres", "cpus-per-task",
          "cpus-per-gpu")  # fmt: skip
_OWN = {
    "output": "output goes to the run's attempts/<n>/log",
    "error": "output goes to the run's attempts/<n>/log",
    "open-mode": "output goes to the run's attempts/<n>/log",
    "requeue": "a run is requeued and resumes",
}
_NO_KEY = {
    "array": "each run is one experiment; for several: hpc-gpt help sweeps",
    "input": "a job's input is empty",
    "wait": "hpc-gpt submit --wait",
    "hold": "the run would never start by itself",
    "test-only": "hpc-gpt submit --dry-run",
    "parsable": "of sbatch's own output",
    "quiet": "of sbatch's own output",
    "verbose": "of sbatch's own output",
    "clusters": "choose the cluster with --cluster",
}
_SIGNALS = {"TERM": "TERM", "SIGTERM": "TERM", "15": "TERM", "USR1": "USR1", "SIGUSR1": "USR1", "10": "USR1",
            "USR2": "USR2", "SIGUSR2": "USR2", "12": "USR2"}  # fmt: skip
_OF_ONE_JOB = ("mail-type", "mail-user", "begin", "deadline", "nice", "time-min", "priority", "wckey", "licenses")


@dataclass
class Directives:
    """What the directives ask for; a size is None if they do not give it. `profile` and `job` are keys of those
    tables, each with its place; `sbatch` is what has no key, by table."""

    nodes: int | None = None
    tasks: int | None = None
    tasks_per_node: int | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    gpu_flag: str = "none"
    gpu_type: str | None = None
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    profile: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    sbatch: dict[str, list[str]] = field(default_factory=lambda: {"profile": [], "job": []})
    environment: dict[str, str] = field(default_factory=dict)
    container: dict[str, str] = field(default_factory=dict)
    stop_signal: str | None = None
    chdir: str | None = None
    places: dict[str, str] = field(default_factory=dict)

    @property
    def all_nodes(self) -> int:
        """The nodes that the job gets."""
        if self.nodes is not None:
            return self.nodes
        if self.tasks and self.tasks_per_node:
            return -(-self.tasks // self.tasks_per_node)
        return 1

    @property
    def node_tasks(self) -> int:
        """Tasks a node of an srun without sizes."""
        if self.tasks_per_node is not None:
            return self.tasks_per_node
        if self.tasks is not None:
            return max(1, self.tasks // self.all_nodes)
        if self.gpus_per_task and self.node_gpus:
            return max(1, self.node_gpus // self.gpus_per_task)
        return 1

    @property
    def node_gpus(self) -> int | None:
        """GPUs of a node; None if the directives do not give them."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        if self.gpus is not None:
            return max(1, self.gpus // self.all_nodes)
        if self.gpus_per_task is not None:
            if self.tasks_per_node or self.tasks:
                return self.gpus_per_task * (self.tasks_per_node or max(1, (self.tasks or 1) // self.all_nodes))
            return self.gpus_per_task
        return None

    def node_cpus(self, gpus: int) -> int | None:
        """CPUs that the job has on a node of `gpus` GPUs; None if the directives do not say."""
        if self.cpus_per_gpu is not None:
            return self.cpus_per_gpu * gpus
        if self.cpus_per_task is None:
            return None
        return self.cpus_per_task * self.node_tasks


def read_directives(text: str, notes: Notes) -> Directives:
    """The directives of a script, up to its first command, at which sbatch stops reading."""
    found = Directives()
    is_head = True
    for number, line in enumerate(text.splitlines(), 1):
        place = str(number)
        if line.strip() and not line.startswith("#"):
            is_head = False
        if not line.startswith("#SBATCH") or line[7:8].isalnum():
            continue
        if not is_head:
            notes.leave(place, line, "sbatch reads no directive after the first command")
            continue
        try:
            words = shlex.split(line[7:], comments=True)
        except ValueError:
            notes.leave(place, line, "a quote has no end")
            continue
        for option, value in _options(words):
            _take(found, option, value, place, notes)
    return found


def _options(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """(long name, value) of each option."""
    kinds, letters = options_of("sbatch")
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given: str | None = value if equals else None
        elif word.startswith("-") and len(word) > 1:
            name, given = letters.get(word[1], word[1]), word[2:].lstrip("=") or None
        else:
            yield f" {word}", None  # no option
            continue
        if given is None and kinds.get(name, "valued") == "valued" and waiting and not waiting[0].startswith("--"):
            given = waiting.pop(0)
        yield name, given


def _take(found: Directives, option: str, value: str | None, place: str, notes: Notes) -> None:
    """Put one option where it belongs, and note that."""
    text = f"--{option}" + (f"={value}" if value is not None else "")
    found.places[option] = place
    if option in _SIZES:
        _take_size(found, option, value or "", place, notes)
    elif option in _OWN:
        notes.does(place, text, _OWN[option])
    elif option in _NO_KEY:
        notes.leave(place, text, _NO_KEY[option])
    elif option == "no-requeue":
        found.profile["chain"] = "none"
        notes.take(place, text, 'profile: chain = "none"')
    elif option == "exclusive":
        if value is None:
            found.profile["exclusive"] = True
            notes.take(place, text, "profile: exclusive = true")
        else:
            found.sbatch["profile"].append(text)
            notes.take(place, text, "profile: sbatch")
    elif option in _PROFILE and value:
        found.profile[option] = value
        notes.take(place, text, f"profile: {option}")
    elif option == "time" and value and not _is_time(value):
        notes.leave(place, text, "no time limit that sbatch knows")
    elif option in _JOB and value:
        found.job[_JOB[option]] = value
        notes.take(place, text, f"job.{_JOB[option]}")
    elif option == "signal" and value:
        _take_signal(found, value, text, place, notes)
    elif option == "chdir" and value:
        found.chdir = value
        notes.take(place, text, "the folder it runs in")
    elif option == "export" and value:
        _take_export(found, value, text, place, notes)
    elif option in ("container-image", "container-mounts") and value:
        found.container[option] = value
        notes.take(place, text, "profile: container")
    elif value is not None and is_secret(option, value):
        notes.leave(place, f"--{option}=…", "a secret is never copied")
    elif re.fullmatch(r"[a-z][a-z0-9-]*", option):
        table = "job" if option in _OF_ONE_JOB else "profile"
        found.sbatch[table].append(text)
        notes.take(place, text, "job.sbatch" if table == "job" else "profile: sbatch")
    else:
        notes.leave(place, option.strip(), "no option of sbatch")


def _take_size(found: Directives, option: str, value: str, place: str, notes: Notes) -> None:
    text = f"--{option}={value}"
    if option == "gres":
        gpus = re.search(r"(?:^|,)(?:gres[/:])?gpu(?::([A-Za-z][\w.-]*))?(?:[:=](\d+))?(?=$|,|\()", value)
        if gpus is None:
            found.sbatch["profile"].append(text)
            notes.take(place, text, "profile: sbatch")
            return
        found.gpus_per_node, found.gpu_flag = int(gpus[2] or 1), "gres"
        found.gpu_type = gpus[1] or found.gpu_type
        others = [part for part in value.split(",") if "gpu" not in part]
        if others:
            notes.leave(place, f"--gres={','.join(others)}", "of --gres hpc-gpt asks for GPUs alone")
        notes.take(place, text, f"profile: gpus_per_node = {found.gpus_per_node}, gpu_flag")
        return
    kind, _, count = value.rpartition(":")
    if option.startswith("gpus") and kind:
        found.gpu_type = kind
    number = re.match(r"\d+", count)
    if number is None:
        notes.leave(place, text, "no number")
        return
    size = int(number[0])
    setattr(found, {"nodes": "nodes", "ntasks": "tasks", "ntasks-per-node": "tasks_per_node"}.get(
        option, option.replace("-", "_")), size)  # fmt: skip
    if option in ("gpus", "gpus-per-node", "gpus-per-task"):
        found.gpu_flag = "gpus-per-node"
    if number[0] != count:
        notes.leave(place, text, f"a range of nodes: taken as {size}")
    means = {
        "nodes": "layout.nodes",
        "ntasks": "how often srun starts its command",
        "ntasks-per-node": "how often srun starts its command",
        "cpus-per-task": "profile: cpus_per_node",
        "cpus-per-gpu": "profile: cpus_per_node",
    }.get(option, "layout.gpus; profile: gpus_per_node, gpu_flag")
    notes.take(place, text, means)


def _take_signal(found: Directives, value: str, text: str, place: str, notes: Notes) -> None:
    parsed = re.fullmatch(r"(?:[BR]+:)?(\w+)(?:@(\d+))?", value)
    signal = _SIGNALS.get(parsed[1].upper()) if parsed else None
    if parsed is None or signal is None:
        notes.leave(place, text, "stop_signal is TERM, USR1, USR2 or none")
        return
    found.stop_signal = signal
    lead = int(parsed[2] or 60)
    if lead:
        found.job["signal_lead_s"] = lead
    notes.take(place, text, f"job.signal_lead_s = {lead}; {signal} is sent then")


def _take_export(found: Directives, value: str, text: str, place: str, notes: Notes) -> None:
    for part in value.split(","):
        name, equals, given = part.partition("=")
        if equals and (is_secret_variable(name, given) or is_secret(name)):
            notes.leave(place, f"--export={name}=…", "a secret is never copied: export it in the shell that submits")
        elif equals:
            found.environment[name] = given
            notes.take(place, f"--export={name}={given}", "profile: environment")
        elif name in ("ALL", "NIL"):
            notes.does(place, f"--export={name}", "the ranks have the job's environment")
        else:
            notes.leave(place, f"--export={name}", "the ranks have the whole environment of the shell that submits")


def _is_time(value: str) -> bool:
    try:
        limit_s(value)
    except ConfigError:
        return False
    return True
