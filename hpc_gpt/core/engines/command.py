"""The engine for any program that `[command]` starts: what it computes, and how, is up to the program.

This module has the rules of `[command]`, and fills its texts with the values of an attempt.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

from hpc_gpt.core.engines.base.facts import EngineFacts
from hpc_gpt.core.errors import ConfigError, Fault
from hpc_gpt.core.secrets import is_secret
from hpc_gpt.core.settings.experiment import Command, Data, Engine, Train
from hpc_gpt.core.settings.key_rules import number_faults
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.program_text import (
    brace_faults,
    command_faults,
    fill,
    fill_line,
    names_in,
    text_faults,
    texts_of,
)
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.services import Plan

# The keys of [train] that concern the attempt, or the figures of the record.
_OF_TRAIN = ("steps", "minutes", "dtype", "hang_multiple", "hang_floor_s")
_FOLLOWS = ("optimizer_mode",)  # `resolve` gives it a value
_NO_DATA = Data(source="random")
# The names that are filled in.
BRACES = ("gpus", "nodes", "tp", "run", "attempt", "checkpoint")
# {name: where it is known, if it is not known everywhere}.
_KNOWN = dict.fromkeys(BRACES, "elsewhere") | {"checkpoint": "in command.resume, which is added once there is one"}
# The groups that `pattern` may have, the same as in a dialect (reader/lines/fields.py).
PATTERN_GROUPS = (
    "step", "steps_planned", "step_s", "step_ms", "steps_per_s", "loss", "loss_eval", "lr", "grad_norm", "tokens_per_s",
    "tokens_per_s_gpu", "samples_per_s", "tflops", "mfu", "mfu_percent", "skipped", "memory_allocated_gib",
    "memory_allocated_mib", "memory_allocated_gb", "memory_reserved_gib", "memory_reserved_mib", "memory_reserved_gb",
    "balance_loss", "z_loss", "expert_load", "experts_dead",
)  # fmt: skip


class CommandEngine(EngineFacts):
    order = 70
    trains_our_model = False
    is_program = True
    packages = ()
    takes_command = True
    axes = frozenset({"tp", "pp", "cp", "ep", "etp"})  # the program splits, not we
    switches = frozenset({"recompute"})  # for the record's FLOPs
    recomputes_parts = True
    unfollowed = frozenset()  # as far as we know
    no_save = "your own program decides when it saves; stop and requeue send it command.stop_signal"

    def shape_fault(self, shape: ModelShape) -> str | None:
        return None

    def context_fault(self, shape: ModelShape, layout: Layout, engine: Engine) -> Fault | None:
        return None

    def own_faults(self, engine: Engine, layout: Layout, train: Train, shape: ModelShape) -> Iterator[Fault]:
        """The faults for keys of [train] that would not reach the program."""
        plain = Train()
        for entry in fields(Train):
            if entry.name not in _OF_TRAIN + _FOLLOWS and getattr(train, entry.name) != getattr(plain, entry.name):
                yield Fault(
                    f"train.{entry.name} is {getattr(train, entry.name)}, but your own program does not get it",
                    f"put it into command.run; only these keys of [train] apply: {', '.join(_OF_TRAIN)}",
                )

    def data_of(self, data: Data) -> Data:
        """Returns no data, as the program reads its own."""
        return _NO_DATA

    def program_of(self, command: Command) -> Command:
        return with_values(command)

    def table_faults(self, command: Command, plan: Plan, data: Data) -> Iterator[Fault]:
        """The faults of `[command]`, and of keys of `[data]` that would not reach the program. Every `[plan]` is
        accepted: no other key says what the program does."""
        if data not in (Data(), _NO_DATA):
            yield Fault(
                "[data] is given, but your own program does not get it", "put it into command.run", keys=("data",)
            )
        of_values = [*_value_faults(command)]
        try:
            yield from of_values or _faults(with_values(command))
        except ConfigError as fault:
            yield Fault(str(fault), fault.hint)

    def planned_as(self, plan: Plan) -> str | None:
        if plan.like in (None, self.name):
            self.refuse_program(
                "plan knows neither its memory nor its time",
                "say in [plan] which engine it is like, and how it runs (hpc-gpt help keys plan); or submit it",
            )
        return plan.like

    def check_program(self, resolved: Resolved, environment: Mapping[str, str]) -> None:
        """Raises ConfigError if the program's folder does not exist. On a node without it the attempt ends so."""
        command = resolved.program
        if resolved.cluster.container is not None:
            return
        if not Path(command.workdir).is_dir():
            raise ConfigError(
                f"command.workdir is {command.workdir}, which is not a folder here", "name the program's folder"
            )
        for name in command.link:
            if not Path(command.workdir, name).exists():
                raise ConfigError(f"command.link has {name}, which is not in {command.workdir}", "correct its name")

    def why_not(self, verb: str, resolved: Resolved) -> str:
        if verb in ("stop", "requeue") and resolved.program.stop_signal == "none":
            return f"command.stop_signal is none: nothing tells this program to {verb}; hpc-gpt cancel ends it"
        return super().why_not(verb, resolved)


def _value_faults(command: Command) -> Iterator[Fault]:
    """The faults of the command's own names and values."""
    texts = {"run": command.run, "setup": command.setup}
    texts |= {name: getattr(command, name) for name in ("workdir", "resume", "checkpoints", "complete")}
    every = [text for part in texts.values() if part for text in ((part,) if isinstance(part, str) else part)]
    used = set[str]().union(*map(names_in, every))
    for name, value in (command.values or {}).items():
        if is_secret(name, value):
            yield Fault(
                f"command.values.{name} looks like a secret, which the run folder would keep",
                "export it in the shell that submits: the program has it in its environment",
            )
        elif not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            message = f"command.values has {name!r}, which is not made of letters, digits and _"
            yield Fault(message, "give it another name")
        elif name in BRACES:
            yield Fault(f"command.values has {name}, which hpc-gpt itself fills in", "give it another name")
        elif name not in used:
            yield Fault(
                f"command.values has {name}, but no text of [command] uses {{{name}}}", "take it out, or use it"
            )


def with_values(command: Command) -> Command:
    """The command with its `values` filled into its texts, and without `values`."""
    if not command.values:
        return replace(command, values=None)
    values = {name: re.sub(r"\{(\w+)\}", r"{{\1}}", str(value)) for name, value in command.values.items()}

    def line(text: str) -> str:
        return fill_line(text, values, alone=True)

    def word(text: str) -> str:
        return fill(text, values, alone=True)

    run = line(command.run) if isinstance(command.run, str) else tuple(map(word, command.run))
    filled: dict[str, Any] = {
        name: word(text) for name in ("checkpoints", "complete") if (text := getattr(command, name)) is not None
    }
    filled |= {"workdir": word(command.workdir), "setup": tuple(map(line, command.setup))}
    resume = line(command.resume) if command.resume is not None else None
    return replace(command, values=None, run=run, resume=resume, **filled)


def _faults(command: Command) -> Iterator[Fault]:
    first = command.run if isinstance(command.run, str) else "".join(command.run[:1])
    if command.script is not None:
        excluded = [name for name in ("run", "setup", "resume") if getattr(command, name)]
        if excluded:
            yield Fault(
                f"command.{excluded[0]} and command.script are given: a script runs as it is", "leave one of them out"
            )
    elif command.args:
        yield Fault("command.args has arguments for command.script, which is not given", "put them into command.run")
    elif not first.strip():
        yield Fault("command.run is empty, but engine command needs a program", 'set run = "…" in the table [command]')
    texts = texts_of("command.run", command.run)
    yield from command_faults("command.run", command.run)
    every = {"command.workdir": command.workdir, "command.resume": command.resume or ""}
    every |= {f"command.setup[{index}]": line for index, line in enumerate(command.setup)}
    every |= {"command.checkpoints": command.checkpoints or "", "command.complete": command.complete or ""}
    for where, text in every.items():
        yield from text_faults(where, text)
    known_braces = tuple(name for name in BRACES if name != "checkpoint")
    for where, text in texts.items():
        yield from brace_faults(where, text, known_braces, _KNOWN)
    yield from brace_faults("command.resume", command.resume or "", BRACES)
    yield from brace_faults("command.complete", command.complete or "", ("run", "checkpoint"), _KNOWN)
    yield from _checkpoint_faults(command)
    yield from _pattern_faults(command.pattern)
    yield from _link_faults(command)
    yield from number_faults("command", command, "")


def _checkpoint_faults(command: Command) -> Iterator[Fault]:
    glob = command.checkpoints
    if glob is None:
        for name in ("resume", "complete"):
            if getattr(command, name) is not None:
                yield Fault(f"command.{name} is given without command.checkpoints", 'set checkpoints = "out/ckpt-*"')
        return
    yield from brace_faults("command.checkpoints", glob, ("run",), _KNOWN)
    below = PurePosixPath(glob.removeprefix("{run}/"))
    if command.script is not None and glob.startswith("/") and ".." not in below.parts and "{run}" not in glob:
        return  # a job script's checkpoints are where it writes them
    if not glob.strip() or below.is_absolute() or ".." in below.parts or "{run}" in str(below) or glob.startswith("~"):
        yield Fault(
            f"command.checkpoints is {glob!r}, which is neither in the run's folder nor in the work folder",
            'use "{run}/checkpoints/…", a folder that the program has as HPC_GPT_CHECKPOINTS, or "out/…" in workdir',
        )


def _link_faults(command: Command) -> Iterator[Fault]:
    for name in command.link:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith(("/", "~")) or ".." in parts or "\0" in name:
            yield Fault(
                f"command.link has {name!r}, which is not a path in command.workdir", 'for example link = ["data"]'
            )
    if command.link and not command.snapshot:
        yield Fault(
            "command.link is given, but command.snapshot is false: the program runs in workdir itself", "leave it out"
        )


def _pattern_faults(pattern: str | None) -> Iterator[Fault]:
    if pattern is None:
        return
    example = r"pattern = 'step (?P<step>\d+) loss (?P<loss>[\d.]+)'"
    try:
        groups = re.compile(pattern).groupindex
    except re.error as fault:
        yield Fault(f"command.pattern is not a regular expression: {fault}", f"for example {example}")
        return
    if "step" not in groups:
        yield Fault("command.pattern has no group step, so no line counts as a step", f"for example {example}")
    for name in groups:
        if name not in PATTERN_GROUPS:
            yield Fault(
                f"command.pattern has a group {name}, which is not known", f"use one of {', '.join(PATTERN_GROUPS)}"
            )


ENGINE = CommandEngine()
