"""A job script as an experiment and a cluster profile: `adopt` reads it, and says what became of each line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_gpt.doctor.site import NodeKind, guess_device
from hpc_gpt.engines.base.megatron_checkout import PROGRAM as MEGATRON_PROGRAM
from hpc_gpt.errors import UserError
from hpc_gpt.launch.render import check_job
from hpc_gpt.scripts.directives import Directives
from hpc_gpt.scripts.expansion import LASTING
from hpc_gpt.scripts.megatron import NotExpressible, OptionNotes, read_arguments
from hpc_gpt.scripts.notes import Notes
from hpc_gpt.scripts.pieces import Argument, Piece, known, quote
from hpc_gpt.scripts.reading import Reading
from hpc_gpt.scripts.state import Started, Step, names_used
from hpc_gpt.secrets import is_secret_variable
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment import Experiment
from hpc_gpt.settings.resolve import resolve
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.tables import check_tables, set_dotted
from hpc_gpt.words import counted

# What an srun of hpc-gpt says itself, or what is no matter for a program that it starts.
_OWN_SRUN = frozenset(
    ("ntasks", "nodes", "ntasks-per-node", "cpus-per-task", "gpus", "gpus-per-node", "gpus-per-task", "gres", "export",
     "kill-on-bad-exit", "label", "unbuffered", "output", "error", "input", "jobid", "job-name", "nodelist",
     "exclusive", "partition", "account", "time", "chdir", "verbose", "quiet", "mem", "mem-per-cpu", "qos", "relative",
     "constraint", "open-mode", "wait", "overcommit")
)  # fmt: skip
_LASTING = re.compile(rf"\$({'|'.join(LASTING)})\b")


@dataclass
class Adopted:
    """What a script became.

    `experiment` and `profile` are tables with dotted keys, and `places` says where a key is from; `what` is one line on
    the program and how it is started.
    """

    name: str
    what: str
    notes: Notes
    experiment: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)


def adopt(path: Path, name: str | None, folder: Path, environment: Mapping[str, str]) -> Adopted:
    """Read a job script, for files in `folder`. `environment` is that of the shell that submits.

    Raises ConfigError for what is no script, what bash could not read, and a script that trains nothing.
    """
    return _Adoption(path, name, folder, environment).adopted()


class _Adoption(Reading):
    """Writes the keys of the experiment and the profile."""

    def adopted(self) -> Adopted:
        self.site()
        engine = self.engine()
        self.others()
        resolved = self.checked()
        per = f", once a {resolved.command.per}" if resolved.command is not None else ""
        launcher = self.started.target.launcher or ("srun" if self.started.srun else "")
        under = f" under {launcher}" if launcher else ""
        size = f"{counted(self.gpus, 'GPU')} on {counted(self.nodes, 'node')}"
        what = f"{engine}{under}{per}, {size}"
        return Adopted(self.name, what, self.notes, self.keys, self.profile, self.places)

    def put(self, key: str, value: Any, place: str = "") -> None:
        self.keys[key] = value
        if place:
            self.places[key] = place

    def site(self) -> None:
        """The keys of the profile, and of [job] and the size of [layout]."""
        asked, profile = self.directives, self.profile
        profile["description"] = f"as {self.path.name} asks for"
        features = tuple(str(asked.profile[key]) for key in ("constraint", "partition") if key in asked.profile)
        devices = guess_device(NodeKind(self.gpus_per_node, asked.gpu_type, 0, 0, features))
        if len(devices) == 1:
            profile["device"] = devices[0]
        profile["gpus_per_node"] = self.gpus_per_node
        cpus = asked.node_cpus(self.gpus_per_node)
        if cpus is not None and cpus >= self.gpus_per_node:
            profile["cpus_per_node"] = cpus
        elif cpus is not None:
            place = asked.places.get("cpus-per-task", "")
            means = f"{cpus} CPUs a node are fewer than its {self.gpus_per_node} GPUs: left to the site"
            self.notes.leave(place, f"--cpus-per-task={asked.cpus_per_task}", means)
        if self.walk.state.modules:
            profile["modules"] = [module for _, module in self.walk.state.modules]
            if not self.walk.state.purges_modules:
                profile["purge_modules"] = False
        profile["gpu_flag"] = asked.gpu_flag
        if asked.gpu_type is not None:
            profile["gpu_type"] = asked.gpu_type
        profile |= asked.profile
        image = asked.container.get("container-image")
        srun = self.started.srun
        flags = []
        for option, value in srun.options.items() if srun else ():
            if option == "container-image":
                image = value
            elif option == "container-mounts":
                asked.container["container-mounts"] = value or ""
            elif option not in _OWN_SRUN and value != "?":
                flags.append(f"--{option}" + (f"={value}" if value is not None else ""))
                self.notes.take(self.started.place, flags[-1], "profile: srun")
        if image is not None:
            profile["container.kind"], profile["container.image"] = "pyxis", image
            mounts = asked.container.get("container-mounts")
            if mounts:
                profile["container.mounts"] = mounts.split(",")
            self.notes.take(self.started.place, f"--container-image={image}", "profile: container")
        if flags:
            profile["srun"] = flags
        self.put("layout.gpus", self.gpus)
        self.put("layout.nodes", self.nodes, asked.places.get("nodes", ""))
        asked.job.setdefault("name", self.path.name)  # as sbatch names it
        for key, value in asked.job.items():
            option = {"name": "job-name", "signal_lead_s": "signal"}.get(key, key)
            self.put(f"job.{key}", value, asked.places.get(option, ""))
        for table, given in asked.sbatch.items():
            if given:
                kept = [flag for flag in given if self.carries(flag, asked)]
                if kept and table == "profile":
                    profile["sbatch"] = kept
                elif kept:
                    self.put("job.sbatch", kept)

    def carries(self, flag: str, asked: Directives) -> bool:
        """Whether a directive can carry an option that has no key."""
        try:
            experiment = Experiment(self.name)
            experiment = replace(
                experiment,
                engine=replace(experiment.engine, name="command"),
                command=replace(experiment.command, run="true"),
                job=replace(experiment.job, sbatch=(flag,)),
                train=replace(experiment.train, steps=0),
            )
            check_job(resolve(experiment, ClusterProfile("here")))
        except UserError as fault:
            name = flag.lstrip("-").partition("=")[0]
            self.notes.leave(asked.places.get(name, ""), flag, str(fault).splitlines()[0])
            return False
        return True

    def engine(self) -> str:
        """Choose the engine, and write its keys; a few words on the program."""
        target = self.started.target
        if os.path.basename(target.program) != MEGATRON_PROGRAM:
            self.command()
            return _named(self.started)
        arguments = [known(argument) or "" for argument in target.arguments]
        fork = any(word.startswith(("--deepspeed", "--zero-stage", "--ds-")) for word in arguments)
        if fork or "deepspeed" in target.program.lower():
            self.command()
            return "pretrain_gpt.py of Megatron-DeepSpeed"
        kept = Notes(list(self.notes.taken), list(self.notes.own), list(self.notes.left))
        keys, profile = dict(self.keys), dict(self.profile)
        try:
            self.megatron()
            self.checked()
        except (NotExpressible, UserError) as fault:
            self.notes = self.walk.notes = kept
            self.keys, self.profile = keys, profile
            reason = str(fault).splitlines()[0]
            self.notes.leave(self.started.place, MEGATRON_PROGRAM, f"engine megatron-lm cannot be it: {reason}")
            self.command()
        return "pretrain_gpt.py of Megatron-LM"

    def megatron(self) -> None:
        target = self.started.target
        notes = OptionNotes(self.notes, self.place_of)
        run = read_arguments(target.arguments, self.gpus, notes, self.absolute)
        self.put("engine.name", "megatron-lm", self.started.place)
        for key, value in run.keys.items():
            if value not in ([], ()):
                self.put(key, value, "Megatron-LM's default" if key in run.defaults else "")
        self.profile["megatron_lm"] = os.path.dirname(self.absolute(target.program))
        self.notes.take(self.started.place, target.program, "profile: megatron_lm")
        if self.walk.state.venv is not None:
            place, venv = self.walk.state.venv
            self.profile["venv"] = venv
            self.notes.take(place, f"{venv}/bin/activate", "profile: venv; hpc-gpt must be installed in it, too")
        self.constant_environment()
        for step in self.started.steps:
            if step.acts:
                self.notes.leave(step.place, step.source, "engine megatron-lm runs no lines of your own")

    def command(self) -> None:
        started = self.started
        self.put("engine.name", "command")
        self.put("command.run", started.run, started.place)
        self.put("command.per", self.per(), started.place)
        self.notes.take(started.place, started.source, f'command.run, per = "{self.keys["command.per"]}"')
        chosen = self.walk.state.workdir
        self.put("command.workdir", _relative(self.workdir(), self.folder), chosen[0] if chosen else "")
        if self.directives.stop_signal is not None:
            self.put("command.stop_signal", self.directives.stop_signal, self.directives.places["signal"])
        self.constant_environment()
        lines = []
        if self.walk.state.venv is not None:
            place, venv = self.walk.state.venv
            lines.append(f". {quote((Piece(f'{venv}/bin/activate'),))}")
            self.notes.take(place, lines[0], "command.setup")
        for step in self.setup_steps(names_used(started.run)):
            lines.append(step.text)
            self.notes.take(step.place, step.source, "command.setup")
            if re.search(r"\$\(|`", step.text) and not step.acts and self.keys["command.per"] != "job":
                means = "every node evaluates it for itself: give a fixed text if they must agree"
                self.notes.leave(step.place, step.source, means)
        for found in re.findall(r"\$\([^()]*\)", started.run):
            self.notes.leave(started.place, found, "not understood: each task evaluates it for itself")
        if lines:
            self.put("command.setup", lines)

    def per(self) -> str:
        """How often the command is started."""
        started, asked = self.started, self.directives
        options = started.srun.options if started.srun else {}
        if started.srun is None:
            if started.target.launcher == "mpirun" or self.nodes > 1:
                if self.nodes > 1 and started.target.launcher not in ("mpirun", "deepspeed"):
                    means = f"without srun it runs on the first of {self.nodes} nodes alone"
                    self.notes.leave(started.place, started.source, means)
                return "job"
            return "gpu" if self.gpus == 1 and not started.target.launcher else "node"
        nodes = _number(options.get("nodes")) or self.nodes
        tasks = _number(options.get("ntasks"))
        a_node = _number(options.get("ntasks-per-node"))
        if a_node is None:
            a_node = max(1, tasks // nodes) if tasks else asked.node_tasks
        if nodes < self.nodes and a_node == 1:
            return "job"
        if tasks == 1 and self.nodes > 1:
            return "job"
        if a_node == 1:
            return "node" if self.gpus_per_node > 1 or started.target.launcher else "gpu"
        if a_node != self.gpus_per_node:
            means = f"srun starts {a_node} a node of {counted(self.gpus_per_node, 'GPU')}: taken as one a GPU"
            self.notes.leave(started.place, started.source, means)
        return "gpu"

    def constant_environment(self) -> None:
        """The exported variables that are known now, as those of the profile."""
        kept: dict[str, str] = dict(self.directives.environment)
        given = dict(self.walk.state.environment)
        given |= {name: (self.started.place, value) for name, value in self.started.before}
        exports = self.started.srun.options.get("export") if self.started.srun else None
        for name, equals, word in (part.partition("=") for part in (exports or "").split(",")):
            given |= {name: (self.started.place, (Piece(word),))} if equals else {}
        for name, (place, value) in given.items():
            text = _constant(value)
            if text is None:
                continue
            if self.builds(name, text):
                self.notes.does(place, f"{name}={text}", "a part of the command")
                continue
            if is_secret_variable(name, text):
                self.notes.leave(place, f"{name}=…", "a secret is never copied: export it in the shell that submits")
                continue
            kept[name] = text
            self.notes.take(place, f"{name}={text}", "profile: environment")
        if kept:
            self.profile["environment"] = kept

    def builds(self, name: str, text: str) -> bool:
        """Whether a variable only holds a part of the command: `LAUNCHER="torchrun …"`."""
        return len(text.split()) > 1 and bool(re.search(rf"\$\{{?{name}\b", self.text))

    def setup_steps(self, wanted: set[str]) -> list[Step]:
        """The statements before the command that bash must run, in their order: those that act, and those that set what
        they or the command use."""
        exported = {
            name
            for name, (_, value) in self.walk.state.environment.items()
            if _constant(value) is None and not self.builds(name, "".join(piece.text for piece in value))
        }
        constant = set(self.profile.get("environment", {}))
        found: list[Step] = []
        for step in reversed(self.started.steps):
            sets = step.sets - constant
            if not step.acts and not sets & (wanted | exported):
                continue
            if sets & exported and not re.match(r"(export|declare)\b", step.text) and len(step.sets) == 1:
                step = replace(step, text=f"export {step.text}" if re.match(r"\w+\+?=", step.text) else step.text)
            exported -= sets
            wanted = (wanted | names_used(step.text)) - (step.sets if not step.acts else set())
            if re.search(rf"\$\{{?({'|'.join(step.sets) or '-'})\b", step.text):
                wanted |= step.sets
            found.append(step)
        return found[::-1]

    def others(self) -> None:
        """Note the other programs, and what nothing is known of."""
        started = self.started
        is_before = True
        for other in self.walk.state.started:
            if other is started:
                is_before = False
            elif other.score > 0 or other.target.name.endswith(".py"):
                when = "before" if is_before else "after"
                means = f"it runs {when} the training: run it by hand"
                means += ", or as a line of command.setup" if is_before and "command.run" in self.keys else ""
                self.notes.leave(other.place, other.source, means)
        for step in self.walk.state.steps[len(started.steps) :]:
            if step.acts:
                self.notes.leave(step.place, step.source, "after the training: nothing of yours runs then")
        for name, (line, value) in self.walk.scope.defaults.items():
            self.notes.take(str(line), f"${{{name}:-{value}}}", f"{name} is not set by the script: {value or 'empty'}")
        used = names_used(self.keys.get("command.run", ""))
        for name, line in self.walk.scope.unset.items():
            if name == "@":
                self.notes.leave(str(line), "$1 … $@", "arguments of sbatch are not known: taken as none")
            elif name == "RANDOM":
                self.notes.does(str(line), "$RANDOM", "the job's id: one number on all nodes")
            elif name in used and not name.startswith("SLURM_"):
                self.notes.leave(str(line), f"${name}", "not set by the script: export it in the shell that submits")

    def checked(self) -> Resolved:
        """The run that the tables are; ConfigError if they cannot run."""
        tables: dict[str, Any] = {"name": self.name}
        for key, value in self.keys.items():
            set_dotted(tables, key, value)
        profile: dict[str, Any] = {"name": self.name}
        for key, value in self.profile.items():
            set_dotted(profile, key, value)
        experiment = check_tables(tables, Experiment, str(self.path))
        if "command.run" in self.keys:
            experiment = replace(experiment, train=replace(experiment.train, steps=0))
        resolved = resolve(experiment, check_tables(profile, ClusterProfile, str(self.path)))
        check_job(resolved)
        return resolved


def _constant(argument: Argument) -> str | None:
    """The text of a value that is the same in every job; None for any other."""
    for piece in argument:
        if piece.kind in ("runtime", "hosts") and not _LASTING.fullmatch(piece.text):
            return None
    return known(argument)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) else None


def _relative(folder: str, base: Path) -> str:
    """A folder beside the experiment as it is written there; absolute if it is elsewhere."""
    path = Path(folder)
    return str(path.relative_to(base)) if path.is_relative_to(base) else str(path)


def _named(started: Started) -> str:
    """A few words on the program."""
    target = started.target
    words = [target.name, *(known(argument) or "" for argument in target.arguments)]
    if any("torchtitan" in word or word.startswith("--job.config") for word in words):
        return f"{target.name} of torchtitan"
    if any(re.match(r"--(n_layer|n_embd)\b|config/train_\w+\.py", word) for word in words):
        return f"{target.name}, as nanoGPT's"
    return target.name or "a program"
