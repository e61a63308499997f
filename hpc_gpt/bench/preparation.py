"""The cells of a bench: an experiment under every engine and every micro-batch that are asked for, on this machine.

A cell's settings, each overriding those before it: the experiment, its row, the bench's own, the engine, the
micro-batch, the user's. Tokens are always random. And this machine for the planner: its profile, the memory of its
ranks, and what is predicted to fit.
"""

import bisect
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_gpt.engines import engine_named
from hpc_gpt.engines.base.facts import Fault
from hpc_gpt.engines.base.training import Training
from hpc_gpt.errors import ConfigError, UserError
from hpc_gpt.launch.prepare import ONLY_MEASURES, finish, folder_beside, load_row
from hpc_gpt.launch.prepared import PreparedRun
from hpc_gpt.plan.machine import Machine, machine_of
from hpc_gpt.plan.memory import predict_memory
from hpc_gpt.plan.training import training_of
from hpc_gpt.runs.record import Record
from hpc_gpt.settings.around import AROUND, ENGINE_NAMES
from hpc_gpt.settings.cluster import FALLBACK, ClusterProfile, MachineFigures, load_profile
from hpc_gpt.settings.devices import DEVICES, device_named
from hpc_gpt.settings.engines import optimizer_faults
from hpc_gpt.settings.experiment import Engine, Experiment, with_keys
from hpc_gpt.settings.experiment_file import ExperimentFile, cut_warmup, load_experiment, read_experiment
from hpc_gpt.settings.fast import FAST_SETTINGS, PLAIN, with_fast_settings
from hpc_gpt.settings.mixture import MIX
from hpc_gpt.settings.resolve import resolve_shape, size_run
from hpc_gpt.settings.resolved import Resolved, folder_name
from hpc_gpt.settings.sized import Sized
from hpc_gpt.settings.smoke import shrink, sizes_beside
from hpc_gpt.settings.sweep_rows import faults_of_rows
from hpc_gpt.tables import close_matches
from hpc_gpt.words import counted

LOCAL = "local"
# The keys of a profile about the machine itself. All others are for the scheduler.
_OF_THE_MACHINE = ("device", "fabric", "machine", "calibration", "python", "venv", "modules", "environment")
_SMALLER = "try a smaller --model, or --seq"


def profile_here(chosen: ClusterProfile | None, gpus: Sequence[Mapping[str, Any]]) -> ClusterProfile:
    """The profile of this machine with its `gpus`, as provenance lists them, and the user's `chosen` profile.

    A bench always runs here, so only device, software and calibration of a Slurm site's profile count.
    """
    profile = load_profile(LOCAL)
    if chosen is not None and chosen.name != LOCAL:
        own = {key: getattr(chosen, key) for key in _OF_THE_MACHINE}
        profile = replace(chosen, stage=None) if chosen.scheduler == LOCAL else replace(profile, **own)
    if not gpus:
        return profile
    device = profile.device or device_named(str(gpus[0]["name"]))
    figures = profile.machine or MachineFigures()
    if profile.fabric is None and figures.network_gb_s is None:
        figures = replace(figures, network_gb_s=0.0)  # no network to another machine
    return replace(profile, device=device, machine=figures, gpus_per_node=len(gpus))


def has_compiler() -> bool:
    """Whether there is a C++ compiler, which torch.compile needs on a CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++"))


def with_predicted_memory(record: Record, resolved: Sized) -> Record:
    """The record with the planner's predicted_memory_gib, if it has none and plan can predict it. Allocated memory does
    not depend on the device, so none need be known."""
    if record.predicted_memory_gib:
        return record
    try:
        memory = predict_memory(training_of(resolved))
    except UserError:
        return record
    sources = {**record.sources, "predicted_memory_gib": "plan, allocated at the peak, on any GPU: none is named here"}
    return replace(record, predicted_memory_gib=[stage.allocated for stage in memory.stages], sources=sources)


def advice_on_memory(resolved: Resolved, profile: ClusterProfile, ended: str) -> str:
    """Advice for the user: what may fit instead of a run that ended as `ended` (gpu_memory or host_memory).

    What a process may have of the host, by its RAM, its cgroup and ulimit, is not predicted.
    """
    asked = training_of(resolved)
    half = f"try --mbs {asked.micro_batch // 2}" if asked.micro_batch > 1 else _SMALLER
    if ended != "gpu_memory":
        return half
    try:
        machine = machine_of(profile)
    except UserError as fault:
        return f"{half}; plan cannot say what fits: {fault}"
    where = f"the {machine.memory_gib:.1f} GiB of a {machine.device}"
    need = need_gib(asked, machine, asked.micro_batch)
    if need <= machine.memory_gib:
        return f"{half}; plan predicts that {need:.3g} GiB are enough, and {where} hold that"
    fits = nearest_micro_batch(asked, machine)
    need = need_gib(asked, machine, fits or 1)
    if fits == 0:
        return f"plan predicts that no micro-batch fits in {where}: --mbs 1 needs {need:.3g} GiB already; {_SMALLER}"
    return f"the nearest micro-batch predicted to fit in {where} is --mbs {fits}, with {need:.3g} GiB"


def nearest_micro_batch(asked: Training, machine: Machine) -> int:
    """The largest micro-batch below the one asked for that is predicted to fit; 0 if none is."""
    smaller = range(1, asked.micro_batch)
    return bisect.bisect_right(smaller, machine.memory_gib, key=lambda size: need_gib(asked, machine, size))


def need_gib(asked: Training, machine: Machine, micro_batch: int) -> float:
    """The predicted need of a rank, in GiB."""
    memory = predict_memory(replace(asked, micro_batch=micro_batch), machine)
    return memory.stages[memory.deciding].nvidia_smi


DEFAULT_BENCH = "bench"
_NO_COMPILER = "this machine has neither a GPU nor a C++ compiler (g++)"
_MEASURED: Mapping[str, Any] = {**ONLY_MEASURES, "train.matmul_rate": True}
_RANDOM: Mapping[str, Any] = {"data.source": "random", **dict.fromkeys(("data.path", "data.mix", "data.phases"))}
_BENCH: Mapping[str, Any] = {
    **_MEASURED,
    "train.eval_every": 0,
    "train.minutes": None,
}


@dataclass(frozen=True)
class BenchCell:
    """One thing that is measured, a row of the table. Its `name` is unique in the bench.

    `pattern`: a regular expression that finds tokens/s in a peer's output; None if the log readers find them. A cell
    that cannot run here has a `record` with the reason.
    """

    name: str
    prepared: PreparedRun | None = None
    pattern: str | None = None
    record: Record | None = None
    is_peer: bool = False  # a program of the user's own


@dataclass(frozen=True)
class BenchRequest:
    """The request for a bench. `overrides`: the user's own, by dotted key. `steps` None: the experiment's, or five in a
    smoke run. `is_ladder`: rungs also compare data, logging and evaluation, so these are kept."""

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

    @property
    def gives_steps(self) -> bool:
        """Whether the bench sets the number of steps, and not the experiment's file."""
        return self.smoke or self.steps is not None


_NO_BENCH = "bench compares trainers of one model"


@dataclass(frozen=True)
class PreparedCells:
    """The bench's name, its cells, and notes for the user."""

    name: str
    cells: Sequence[BenchCell]
    notes: tuple[str, ...] = ()


def prepare_cells(asked: BenchRequest) -> PreparedCells:
    """A cell for each engine and each micro-batch, or a single one. Raises ConfigError or LayoutError with the faults
    of all cells at once."""
    file = read_experiment(asked.experiment)
    chosen = file.row(asked.row)
    row = chosen.name if chosen is not None else None
    cells: list[BenchCell] = []
    faults: dict[str, UserError] = {}
    for engine in asked.engines or (None,):
        for micro_batch in asked.micro_batches or (None,):
            over: dict[str, Any] = {} if micro_batch is None else {"layout.micro_batch": micro_batch}
            if engine is not None:
                kind, _, stage = engine.partition(":")
                over |= {"engine.name": kind, "engine.zero_stage": int(stage) if stage else None}
            try:
                cells.append(prepare_cell(asked, file, row, over, engine))
            except UserError as fault:
                faults[" ".join(part for part in (engine, micro_batch and f"mbs {micro_batch}") if part)] = fault
    if faults:
        raise next(iter(faults.values())) if len(faults) == 1 else faults_of_rows(faults)
    prepared = [cell.prepared for cell in cells if cell.prepared]
    notes = dict.fromkeys(note for each in prepared for note in each.notes)
    source = load_experiment(file, None, row, steps_elsewhere=True).data.source
    if "data" in file.tables and source != "random":
        notes[f"data: random tokens, not {source} as {asked.experiment} says: a bench is about speed alone"] = None
    if not (asked.has_gpu or asked.smoke):
        notes["this machine has no GPU, so a CPU's speed is measured; --smoke tries the same on a tiny model"] = None
    experiment = load_experiment(file, asked.overrides, row, asked.gives_steps)
    name = _name(asked, file, experiment) + (f"-{row}" if row is not None else "")
    return PreparedCells(name + ("-smoke" if asked.smoke else ""), cells, tuple(notes))


def prepare_cell(
    asked: BenchRequest,
    file: ExperimentFile,
    row: str | None,
    over: Mapping[str, Any],
    engine: str | None = None,
    name: str | None = None,
) -> BenchCell:
    """One cell: the experiment's row overridden by `over` (dotted keys), then by the user's own settings.

    It is called `name`, else by its engine, as the user wrote it, and its micro-batch if that was asked for.
    """
    notes: list[str] = []
    experiment = _load(asked, file, row, over)
    engine_named(experiment.engine.name).refuse_program(_NO_BENCH, "name trainers with --engines")
    experiment = _possible(experiment, asked, notes)
    if name is None:
        micro_batch = f" mbs {experiment.layout.micro_batch}" if asked.micro_batches else ""
        name = f"{engine or experiment.engine.name}{micro_batch}"
    if row is None:
        experiment = replace(experiment, name=f"{_name(asked, file, experiment)}-{folder_name(name)}")
    whole, cut = cut_warmup(replace(experiment, **AROUND))
    if asked.smoke:
        real = size_run(whole, load_profile(FALLBACK))
        small = shrink(experiment, real, asked.has_gpu)
        last = _as_asked(small.experiment, experiment, asked, "layout.micro_batch" in over)
        prepared = finish(last, asked.profile, file=file, row=row)
        sizes = "; ".join(" ".join(line.split()) for line in sizes_beside(real, prepared.resolved)[1:2])
        steps = counted(last.train.steps, "step")
        notes += [f"smoke: {sizes}, {steps}: its figures show that it runs, no speed", *small.notes]
    else:
        prepared = finish(whole, asked.profile, file=file, row=row)
        notes += cut
    beside = folder_beside(file, prepared.resolved, {**over, **asked.overrides}, row)
    return BenchCell(name, replace(prepared, notes=tuple(notes), data_beside=beside))


def parse_engines(text: str | None) -> list[str]:
    """The parts of `ddp,deepspeed-zero:3`, each an engine, or an engine and a ZeRO stage. Raises ConfigError."""
    engines = [part.strip() for part in text.split(",")] if text is not None else []
    known = ENGINE_NAMES
    for engine in engines:
        name, colon, stage = engine.partition(":")
        if name not in known:
            raise ConfigError(f"no engine {name!r}", close_matches(name, known) or f"engines: {', '.join(known)}")
        facts = engine_named(name)
        facts.refuse_program(_NO_BENCH, "compare its run with others: hpc-gpt compare")
        if colon and not (facts.has_zero and stage in map(str, facts.zero_stages)):
            stages = ", ".join(f"{name}:{each}" for each in facts.zero_stages)
            hint = f"use one of {stages}" if facts.has_zero else f"use {name}; deepspeed-zero has stages 0 to 3"
            raise ConfigError(f"engine {engine!r}: {stage!r} is no ZeRO stage of {name}", hint)
    _check_single("--engines", engines)
    return engines


def parse_micro_batches(text: str | None) -> list[int]:
    """`1,2,4` as numbers. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    for part in parts:
        if not part.isascii() or not part.isdecimal() or not 0 < int(part[:10]) < 10**9:
            raise ConfigError(
                f"--mbs {text!r}: {part!r} is no micro-batch, which is a whole number of samples, 1 or more",
                "give one, or several with commas between them, as --mbs 1,2,4",
            )
    _check_single("--mbs", parts)
    return [int(part) for part in parts]


def _check_single(option: str, parts: Sequence[str]) -> None:
    twice = [part for part in dict.fromkeys(parts) if parts.count(part) > 1]
    if twice:
        raise ConfigError(f"{option} names {twice[0]} twice", "give each once; --rounds measures each several times")


def _load(asked: BenchRequest, file: ExperimentFile, row: str | None, over: Mapping[str, Any]) -> Experiment:
    own = {**asked.overrides, **({"train.steps": asked.steps} if asked.steps is not None else {})}
    if asked.is_ladder:
        needed = dict(_MEASURED)
        if load_experiment(file, None, row, steps_elsewhere=True).data.source in ("tokens", "megatron", MIX):
            needed |= _RANDOM  # not the user's own file
        needed |= {} if asked.steps is None else {"train.minutes": None}
        overrides = {**needed, **over, **own}
    else:
        overrides = {**_BENCH, **over, **own, **_RANDOM}
    # A cell's micro-batch does not change the number of micro-batches of a step.
    experiment = load_row(file, overrides, row, asked.gives_steps, batch_follows=True)
    if "train.log_every" in own or asked.is_ladder:
        return experiment
    # No logging, so that nothing is copied from the device between the first step and the last.
    return replace(experiment, train=replace(experiment.train, log_every=max(1, experiment.train.steps)))


def _possible(experiment: Experiment, asked: BenchRequest, notes: list[str]) -> Experiment:
    """The experiment without what its engine or this machine lacks: compilation, unless the user asks for it, and the
    bench's own settings that Megatron-LM does not have.

    A setting that the user asks for is left out for an engine that lacks it if another engine of the table has it. If
    none has it, it stays, and is refused.
    """
    engine, train = experiment.engine, experiment.train
    others = [replace(engine, name=part.partition(":")[0]) for part in asked.engines]

    def is_lacking(key: str, lacks: Callable[[Engine], object]) -> bool:
        return bool(lacks(engine)) and (key not in asked.overrides or not all(map(lacks, others or [engine])))

    def optimizer_fault(engine: Engine) -> Fault | None:
        return next(optimizer_faults(engine, train), None)

    lacks_compiler = engine.compile_backend == "inductor" and not asked.has_gpu and not has_compiler()
    if fixed := engine_named(engine.name).fixed_train:
        train = replace(train, **fixed)
        notes.append(f"{engine.name} saves as it ends, and the device's own rate is not measured in its processes")
    if engine.compile != "none":
        if is_lacking("engine.compile", lambda each: "compile" not in engine_named(each.name).switches):
            engine = replace(engine, compile="none", keep_residuals=False)
            notes.append(f"engine.compile is none for engine {engine.name}, which does not have it")
        elif lacks_compiler and "engine.compile" not in asked.overrides:
            engine = replace(engine, compile="none", keep_residuals=False)
            notes.append(f"engine.compile is none: {_NO_COMPILER}")
    fault = optimizer_fault(engine)
    if train.optimizer_mode == "compiled" and fault and is_lacking("train.optimizer_mode", optimizer_fault):
        train = replace(train, optimizer_mode=None)
        notes.append(f"train.optimizer_mode is left out for engine {engine.name}: {fault.message}")
    if lacks_compiler and train.optimizer_mode == "compiled" and "train.optimizer_mode" not in asked.overrides:
        train = replace(train, optimizer_mode=None)
        notes.append(f"train.optimizer_mode is not compiled: {_NO_COMPILER}")
    if asked.experiment == DEFAULT_BENCH:
        engine = _fast_here(engine, experiment, asked, notes)
    return replace(experiment, engine=engine, train=train)


def _fast_here(engine: Engine, experiment: Experiment, asked: BenchRequest, notes: list[str]) -> Engine:
    """The engine with those of the default bench's fast settings that it, the model and this machine take; the user's
    own stay."""
    own = {each.key: PLAIN[each.key] for each in FAST_SETTINGS if f"engine.{each.key}" not in asked.overrides}
    if engine.compile == "none":
        own.pop("compile", None)
    device, fast = DEVICES.get(asked.profile.device or ""), replace(engine, **own)
    if asked.has_gpu and (device is None or (device.cuda and "bf16" in device.peaks)):
        fast = with_fast_settings(fast, resolve_shape(experiment.model), experiment.train, asked.overrides)
    if left_out := [f"engine.{key}" for key in own if getattr(fast, key) != getattr(engine, key)]:
        who = f"engine {engine.name} with these settings" if asked.has_gpu else "a CPU"
        notes.append(f"left out, as not for {who}: {', '.join(left_out)}")
    return fast


def _as_asked(small: Experiment, real: Experiment, asked: BenchRequest, holds_micro_batch: bool) -> Experiment:
    """The small experiment with the steps, the micro-batch and the time limit that the user asked for."""
    steps = asked.steps if asked.steps is not None else small.train.steps
    keys = {"train.steps": steps, "train.log_every": steps, "job.time": real.job.time}
    return with_keys(small, keys | ({"layout.micro_batch": real.layout.micro_batch} if holds_micro_batch else {}))


def _name(asked: BenchRequest, file: ExperimentFile, experiment: Experiment) -> str:
    """The name of a bench: its experiment, or the model if no experiment was named."""
    preset = experiment.model.preset
    return preset if asked.experiment == DEFAULT_BENCH and preset else file.name
