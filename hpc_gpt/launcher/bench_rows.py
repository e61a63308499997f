"""The rows of a bench, prepared as those of a sweep: an experiment, or rows of it, under every requested engine and
micro-batch, on this machine. A row with engine `command` is a peer, a program of the user's own.

A setting of a row overrides the same setting of the sources before it, in this order: the experiment, its row, the
bench's own settings, the engine, the micro-batch, the user's settings. Then settings that the engine or this machine
lacks are left out. Tokens are always random.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, UserError
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.core.settings.engines import FAST_SETTINGS, PLAIN, with_fast_settings
from hpc_gpt.core.settings.experiment import Engine, Experiment, with_keys
from hpc_gpt.core.settings.experiment_file import ExperimentFile, load_experiment, read_experiment
from hpc_gpt.core.settings.mixture import MIX
from hpc_gpt.core.settings.resolve import resolve_shape
from hpc_gpt.core.settings.resolved import folder_name
from hpc_gpt.core.settings.services import ENGINE_NAMES
from hpc_gpt.core.settings.smoke import SMOKE_STEPS
from hpc_gpt.core.settings.sweep_rows import faults_of_rows
from hpc_gpt.core.tables import close_matches
from hpc_gpt.launcher.prepare import MEASURED, earlier_runs, load_row, prepare_row
from hpc_gpt.launcher.prepared import Copies, PreparedRun
from hpc_gpt.launcher.request import Request

DEFAULT_BENCH = "bench"
# From SIGTERM to SIGKILL of a peer: torchrun needs time to end its workers.
KILL_LEAD_S = 10
_NO_BENCH = "bench compares trainers of one model"
_NO_COMPILER = "this machine has neither a GPU nor a C++ compiler (g++)"
_RANDOM: Mapping[str, Any] = {"data.source": "random", **dict.fromkeys(("data.path", "data.mix", "data.phases"))}
# The keys that decide the length of a bench's rows, but not of a ladder's rungs.
_LENGTH = ("train.eval_every", "train.minutes")


@dataclass(frozen=True)
class BenchCell:
    """One measurement, a row of the table. Its `name` is unique in the bench.

    `pattern`: a regular expression that finds tokens/s in a peer's output; None if the log readers find them. A cell
    that cannot run on this machine has a `record` with the reason.
    """

    name: str
    prepared: PreparedRun | None = None
    pattern: str | None = None
    record: Record | None = None
    is_peer: bool = False  # a program of the user's own
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchRequest:
    """The request for a bench. `overrides`: the user's own, by dotted key. `row`: one of the file's rows, or several
    with commas between them. `steps` None: the experiment's, or five in a smoke run. `is_ladder`: the cells are rungs,
    which also compare data, logging and evaluation, so these settings stay."""

    experiment: str
    profile: ClusterProfile
    overrides: Mapping[str, Any] = field(default_factory=dict)
    row: str | None = None
    engines: Sequence[str] = ()
    micro_batches: Sequence[int] = ()
    steps: int | None = None
    smoke: bool = False
    has_gpu: bool = False
    is_ladder: bool = False
    copies: Copies = field(default_factory=Copies, compare=False, repr=False)

    @property
    def gives_steps(self) -> bool:
        """Whether the bench, not the experiment's file, sets the number of steps."""
        return self.smoke or self.steps is not None

    @property
    def rows(self) -> list[str]:
        """The names of the requested rows."""
        return [name.strip() for name in (self.row or "").split(",") if name.strip()]


@dataclass(frozen=True)
class PreparedCells:
    """The name of a bench, its cells, and notes for the user."""

    name: str
    cells: Sequence[BenchCell]
    notes: tuple[str, ...] = ()


def prepare_cells(request: BenchRequest) -> PreparedCells:
    """One cell per row, engine and micro-batch, or a single one. Raises ConfigError or LayoutError with the faults of
    all cells at once."""
    file = read_experiment(request.experiment)
    rows = [file.row(name) for name in request.rows or (None,)]
    cells: list[BenchCell] = []
    faults: dict[str, UserError] = {}
    for row in rows:
        for engine in request.engines or (None,):
            for micro_batch in request.micro_batches or (None,):
                over: dict[str, Any] = {} if micro_batch is None else {"layout.micro_batch": micro_batch}
                if engine is not None:
                    kind, _, stage = engine.partition(":")
                    over |= {"engine.name": kind, "engine.zero_stage": int(stage) if stage else None}
                of_row = row.name if row is not None and len(rows) > 1 else None
                named = [part for part in (of_row, engine, micro_batch and f"mbs {micro_batch}") if part]
                try:
                    name = " ".join(named) if of_row is not None else None
                    cells.append(prepare_cell(request, file, row.name if row is not None else None, over, engine, name))
                except UserError as fault:
                    faults[" ".join(named)] = fault
    if faults:
        raise next(iter(faults.values())) if len(faults) == 1 else faults_of_rows(faults)
    notes = dict.fromkeys(note for cell in cells for note in cell.notes)
    first = rows[0].name if rows[0] is not None else None
    source = load_experiment(file, None, first, steps_elsewhere=True).data.source
    if "data" in file.tables and source != "random":
        notes[f"data: random tokens, not {source} as {request.experiment} says: a bench is about speed alone"] = None
    if not (request.has_gpu or request.smoke):
        notes["this machine has no GPU, so a CPU is measured; --smoke tries the same on a tiny model"] = None
    experiment = load_experiment(file, request.overrides, first, request.gives_steps)
    name = _name(request, file, experiment) + (f"-{first}" if first is not None and len(rows) == 1 else "")
    return PreparedCells(name + ("-smoke" if request.smoke else ""), cells, tuple(notes))


def prepare_cell(
    request: BenchRequest,
    file: ExperimentFile,
    row: str | None,
    over: Mapping[str, Any],
    engine: str | None = None,
    name: str | None = None,
) -> BenchCell:
    """One cell: the experiment's row overridden by `over` (dotted keys), then by the user's own settings.

    Without `name` its name is its engine, as the user wrote it, with the micro-batch if one was requested.
    """
    experiment = load_experiment(file, {**over, **request.overrides}, row, request.gives_steps)
    facts = engine_named(experiment.engine.name)
    is_peer = name is not None and facts.starts_command(experiment.command)
    of_peer = ("command", "layout", "job")
    users = {key: value for key, value in request.overrides.items() if not is_peer or key.partition(".")[0] in of_peer}
    if not is_peer:
        facts.refuse_program(_NO_BENCH, "name trainers with --engines, and several rows with --row, or use --peer")
    users |= {"train.steps": request.steps} if request.steps is not None and not is_peer else {}
    keys = {**_bench_settings(request, file, row, is_peer), **over, **users}
    keys |= {} if request.is_ladder or is_peer else _RANDOM
    notes: list[str] = []
    if not is_peer:
        experiment = load_row(file, keys, row, request.gives_steps, batch_follows=True)
        keys |= _without_lacking(experiment, request, notes)
    if name is None:
        micro_batch = f" mbs {experiment.layout.micro_batch}" if request.micro_batches else ""
        name = f"{engine or experiment.engine.name}{micro_batch}"
    if row is None:
        keys["name"] = f"{_name(request, file, experiment)}-{folder_name(name)}"
    last = {} if is_peer else _last_overrides(request, experiment, users, "layout.micro_batch" in over)
    smoke = request.smoke and not is_peer
    of_row = Request(request.experiment, None, None, keys, row, smoke=smoke, measured=last, copies=request.copies)
    prepared = prepare_row(of_row, request.profile, file, row, earlier_runs)
    return BenchCell(name, prepared, is_peer=is_peer, notes=(*notes, *prepared.notes))


def _bench_settings(request: BenchRequest, file: ExperimentFile, row: str | None, is_peer: bool) -> dict[str, Any]:
    """The bench's own settings, by dotted key."""
    if is_peer:
        # It gets no setting of our trainers.
        of_trainers = [
            f"{table}.{key}" for table in ("train", "engine") for key in file.tables.get(table, ()) if key != "name"
        ]
        return {**dict.fromkeys([*MEASURED, *of_trainers]), "job.signal_lead_s": KILL_LEAD_S}
    keys = dict[str, Any](MEASURED)
    if request.is_ladder:
        length = () if request.steps is None else ("train.minutes",)
        keys = {key: value for key, value in keys.items() if key not in _LENGTH or key in length}
        if load_experiment(file, None, row, steps_elsewhere=True).data.source in ("tokens", "megatron", MIX):
            keys |= _RANDOM  # not the user's own file
    return keys


def _last_overrides(
    request: BenchRequest, experiment: Experiment, users: Mapping[str, Any], holds_batch: bool
) -> dict[str, Any]:
    """The settings, by dotted key, that override all others. There is no logging, so that nothing is copied from the
    device between the first step and the last. A smoke run, which is made small before, gets the user's settings
    back."""
    if request.smoke:
        steps = SMOKE_STEPS if request.steps is None else request.steps
        keys = {"train.steps": steps, "train.log_every": steps, "job.time": experiment.job.time}
        return keys | ({"layout.micro_batch": experiment.layout.micro_batch} if holds_batch else {})
    if "train.log_every" in users or request.is_ladder:
        return {}
    return {"train.log_every": max(1, experiment.train.steps)}


def parse_engines(text: str | None) -> list[str]:
    """The parts of `ddp,deepspeed-zero:3`: engines, some with a ZeRO stage. Raises ConfigError."""
    engines = [part.strip() for part in text.split(",")] if text is not None else []
    for engine in engines:
        name, colon, stage = engine.partition(":")
        if name not in ENGINE_NAMES:
            hint = close_matches(name, ENGINE_NAMES) or f"engines: {', '.join(ENGINE_NAMES)}"
            raise ConfigError(f"no engine {name!r}", hint)
        facts = engine_named(name)
        facts.refuse_program(_NO_BENCH, "compare its run with others: hpc-gpt compare")
        if colon and not (facts.has_zero and stage in map(str, facts.zero_stages)):
            stages = ", ".join(f"{name}:{zero_stage}" for zero_stage in facts.zero_stages)
            hint = f"use one of {stages}" if facts.has_zero else f"use {name}; deepspeed-zero has stages 0 to 3"
            raise ConfigError(f"engine {engine!r}: {stage!r} is not a ZeRO stage of {name}", hint)
    _check_single("--engines", engines)
    return engines


def parse_micro_batches(text: str | None) -> list[int]:
    """The micro-batches of a text such as `1,2,4`. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    for part in parts:
        if not part.isascii() or not part.isdecimal() or not 0 < int(part[:10]) < 10**9:
            raise ConfigError(
                f"--mbs {text!r}: {part!r} is not a micro-batch, a whole number of samples above 0",
                "give one, or several with commas between them, as in --mbs 1,2,4",
            )
    _check_single("--mbs", parts)
    return [int(part) for part in parts]


def _check_single(option: str, parts: Sequence[str]) -> None:
    twice = [part for part in dict.fromkeys(parts) if parts.count(part) > 1]
    if twice:
        raise ConfigError(f"{option} names {twice[0]} twice", "give each once; --rounds measures each several times")


def _without_lacking(experiment: Experiment, request: BenchRequest, notes: list[str]) -> dict[str, Any]:
    """The overrides, by dotted key, that switch off settings which the engine or this machine lacks: compilation,
    unless the user requests it, and the bench's own settings that Megatron-LM does not have.

    A setting that the user requests is left out for an engine that lacks it if another engine of the table has it. If
    none has it, it stays, and is refused.
    """
    engine, keys = experiment.engine, dict[str, Any]()
    others = [replace(engine, name=part.partition(":")[0]) for part in request.engines]

    def is_lacking(key: str, lacks: Callable[[Engine], object]) -> bool:
        return bool(lacks(engine)) and (key not in request.overrides or not all(map(lacks, others or [engine])))

    lacks_compiler = engine.compile_backend == "inductor" and not request.has_gpu and not has_compiler()
    if fixed := engine_named(engine.name).fixed_train:
        keys |= {f"train.{key}": value for key, value in fixed.items()}
        notes.append(f"{engine.name} saves as it ends")
    if engine.compile != "none":
        why = ""
        if is_lacking("engine.compile", lambda other: "compile" not in engine_named(other.name).switches):
            why = f"engine.compile is none for engine {engine.name}, which does not have it"
        elif lacks_compiler and "engine.compile" not in request.overrides:
            why = f"engine.compile is none: {_NO_COMPILER}"
        if why:
            keys |= {"engine.compile": "none", "engine.keep_residuals": False}
            notes.append(why)
    engine = with_keys(experiment, keys).engine
    if request.experiment == DEFAULT_BENCH:
        fast = _fast_here(engine, experiment, request, notes)
        keys |= {f"engine.{key}": value for key, value in vars(fast).items() if value != getattr(engine, key)}
    return keys


def _fast_here(engine: Engine, experiment: Experiment, request: BenchRequest, notes: list[str]) -> Engine:
    """The engine with the default bench's fast settings, as far as it, the model and this machine allow them; the
    user's own settings stay."""
    plain = {
        setting.key: PLAIN[setting.key] for setting in FAST_SETTINGS if f"engine.{setting.key}" not in request.overrides
    }
    if engine.compile == "none":
        plain.pop("compile", None)
    device, fast = DEVICES.get(request.profile.device or ""), replace(engine, **plain)
    if request.has_gpu and (device is None or (device.cuda and "bf16" in device.peaks)):
        fast = with_fast_settings(fast, resolve_shape(experiment.model), experiment.train, request.overrides)
    if left_out := [f"engine.{key}" for key in plain if getattr(fast, key) != getattr(engine, key)]:
        who = f"engine {engine.name} with these settings" if request.has_gpu else "a CPU"
        notes.append(f"left out, as not for {who}: {', '.join(left_out)}")
    return fast


def has_compiler() -> bool:
    """Whether this machine has a C++ compiler, which torch.compile needs on a CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++"))


def _name(request: BenchRequest, file: ExperimentFile, experiment: Experiment) -> str:
    """The name of a bench: its experiment, or the model if no experiment was named."""
    preset = experiment.model.preset
    return preset if request.experiment == DEFAULT_BENCH and preset else file.name
