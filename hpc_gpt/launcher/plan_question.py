"""The question of `hpc-gpt plan`, from the user's request: model, machine, batch, and the values that the search
varies."""

import contextlib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.engines import engine_named, trainers
from hpc_gpt.core.engines.base.programs import KINDS
from hpc_gpt.core.errors import ConfigError, Fault, LayoutError, UserError, raise_faults
from hpc_gpt.core.settings.cluster import ClusterProfile, load_profile, user_default
from hpc_gpt.core.settings.devices import DEVICES, device_named, known_devices
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, with_keys
from hpc_gpt.core.settings.experiment_file import (
    DEFAULT_EXPERIMENT,
    cut_warmup,
    keys_given,
    load_experiment,
    read_experiment,
)
from hpc_gpt.core.settings.layout import AXES, Layout
from hpc_gpt.core.settings.model import resolve_shape
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import PRESETS
from hpc_gpt.core.settings.rules.engine import engine_shape_faults
from hpc_gpt.core.settings.rules.walk import faults_before
from hpc_gpt.core.settings.services import EngineName, Plan
from hpc_gpt.core.weights.config import model_name
from hpc_gpt.launcher.request import DEFAULTS, Request, choose_profile, compiles, is_fast, requested_file
from hpc_gpt.planner.best_plan import usual_batch
from hpc_gpt.planner.figures import peak_memory_text
from hpc_gpt.planner.machine import Constants, Machine, check_dtype, check_reach, machine_of
from hpc_gpt.planner.nearest import check_possible, fewest_gpus
from hpc_gpt.planner.prediction import constants_of
from hpc_gpt.planner.question import Question, asked_gpus, question_of, searched_engines
from hpc_gpt.planner.search import Searched, search
from hpc_gpt.planner.step_time import StepTime
from hpc_gpt.planner.table import engine_text
from hpc_gpt.planner.training import PLANNED, check_matmul

# The profile to plan for if the user has named no cluster, and the fallback has no device.
STAND_IN = "a100-80g-8"
# The program that stands for one which trains a shape that no engine here trains.
LIKE_UNTRAINED: EngineName = "megatron-lm"
# The length of the training for the predicted days and GPU-hours: GPT-3's (arXiv:2005.14165).
PLANNED_TOKENS = 300e9
# The keys of [model] with which --max-model turns the MLP of its family into experts.
_WITHOUT_EXPERTS: dict[str, Any] = dict.fromkeys(("experts", "experts_per_token", "expert_ffn"))
# If a sequence above this length does not fit, it is too long, not the model too large.
_USUAL_SEQ = 131_072
_BATCH = ("micro_batches", "global_batch")
_MODELS = {"model.preset", "model.hf", "model.hidden", "model.layers", "model.heads", "train.init"}
# {generation of NVLink: the usual ports between nodes of such GPUs}
_PORTS = {2: "4x100G", 3: "8x200G"}
_ON_SLINGSHOT = ("mi250x", "mi300a")  # Frontier, LUMI, El Capitan and their like
# {kinds of runs that are not predicted: the pattern of a key, a value or a Megatron-LM argument that requests them}
_UNPLANNED = {
    "experts outside of [model]": r"num-experts",
    "Megatron-LM's hybrid sharding": r"distributed-optimizer-instances",
    "zero-bubble schedules": r"zero.?bubble|dualpipe",
}


@dataclass(frozen=True)
class PlanRequest:
    """A request to plan, with everything that is decided before the search.

    `base` is the experiment of the file, `experiment` the same with the user's options. `source` says where the
    planner's `constants` are from. `of_program`: the experiment starts a program of the user's own. Days and GPU-hours
    are printed for a budget of `tokens`. `stands_in`: the profile stands in for the user's, who has chosen none.
    `fast`: its runs have the fast settings of the engine unless an option says otherwise.
    """

    request: Request
    name: str
    base: Experiment
    experiment: Experiment
    model: ModelShape
    machine: Machine
    constants: Constants
    source: str
    question: Question
    tokens: float
    profile: ClusterProfile
    stands_in: bool = False
    of_program: bool = False
    fast: bool = False

    @property
    def stand_in_note(self) -> str:
        """The note that names the planned nodes if the user has chosen no cluster; else empty."""
        if not self.stands_in:
            return ""
        if self.request.device is not None:
            return f"planned for {self.profile.description}; --cluster with a profile plans for your own nodes"
        stand_in = f"no cluster is chosen: planned for {STAND_IN}, {self.profile.description}"
        return f"{stand_in}; --cluster plans for another, and hpc-gpt profile list names them"


def read_plan_request(
    request: Request,
    tokens: float,
    calibration: str | None,
    why: str | None = None,
    largest: bool = False,
    longest: bool = False,
) -> PlanRequest:
    """Decides everything that the search does not vary. Raises UserError.

    `why` is the layout to explain, `calibration` the cluster whose constants are used; `largest` asks for the largest
    model, `longest` for the longest sequence.
    """
    overrides = dict(request.overrides)
    _refuse_unplanned(overrides.items())
    if why is not None:
        overrides |= _layout_of(why, overrides)
    if longest:
        _check_names_model(request, overrides)
    profile, stands_in = _planned_nodes(request)
    of_largest = largest and not request.names_experiment
    file = requested_file(request, profile, _start_of_largest(profile, overrides) if of_largest else None)
    fast = (file.path is DEFAULTS or of_largest) and is_fast(profile, request.overrides)
    # A plan does not depend on the run's length and warm-up.
    found = list[Fault]()
    read = load_experiment(file, overrides, request.row, faults=found)
    if found:
        raise_faults(faults_before(read, profile, found))
    experiment, like, program = _without_program(cut_warmup(read)[0])
    base = load_experiment(file, {}, request.row, steps_elsewhere=True)
    if largest and experiment.model.experts and experiment.model.expert_ffn is None:
        experiment = _with_expert_width(experiment)
    model = resolve_shape(experiment.model)
    is_open = not request.names_experiment and overrides.get("engine.name") is None
    if like is None and is_open and all(facts.shape_fault(model) for facts in trainers().values()):
        like = LIKE_UNTRAINED
        experiment = replace(experiment, engine=replace(experiment.engine, name=like))
        overrides["engine.name"] = like
    elif like is None and not is_open:
        raise_faults(engine_shape_faults(Engine(name=experiment.engine.name), model))
    if largest:
        _check_family(model)
    _refuse_unplanned([("engine.megatron_args", experiment.engine.megatron_args)])
    is_usual = not request.names_experiment and not any(overrides.get(f"layout.{name}") for name in _BATCH)
    if is_usual:  # layouts are compared at one global batch for any model of that sequence
        size = usual_batch(model.seq, asked_gpus(experiment, profile))
        experiment = with_keys(experiment, {"layout.global_batch": size})
    machine = machine_of(profile)
    holds = {key for key, value in overrides.items() if value is not None and not (fast and key == "engine.compile")}
    holds |= {"engine.name"} if request.names_experiment else set()
    if program is not None:  # how a program runs is a fact, and no choice of the search
        given = keys_given(file, overrides, request.row) - {key for key, value in overrides.items() if value is None}
        holds |= given & {f"engine.{name}" for name in PLANNED}
    if largest or longest:
        experiment, holds = _at_smallest_batch(experiment, overrides, holds)
    question = question_of(experiment, profile, holds, _engines_for(model, profile), fast, program)
    if is_usual and question.global_batch is not None:
        question = replace(question, usual_batch=functools.partial(usual_batch, model.seq))
    _check_machine(question, machine)
    name = _shown_name(experiment, model, request.overrides)
    if not (largest or longest):
        check_possible(question, experiment, profile, name)
    constants, source = _constants(profile if calibration is None else load_profile(calibration), calibration)
    return PlanRequest(
        request, name, base, experiment, model, machine, constants, source, question, tokens, profile, stands_in,
        like is not None, fast,
    )  # fmt: skip


def _check_names_model(request: Request, overrides: Mapping[str, Any]) -> None:
    """Raises ConfigError if the longest sequence is requested, but nothing names a model."""
    if not request.names_experiment and not _MODELS & {key for key, value in overrides.items() if value is not None}:
        raise ConfigError(
            "--max-seq finds the longest sequence of a model, and none is named",
            "add --model, for example --model llama3.1-8b, or name an EXPERIMENT",
        )


def _without_program(experiment: Experiment) -> tuple[Experiment, EngineName | None, Plan | None]:
    """(the experiment, for a program with a [plan] that of the engine which stands for it; that engine, and how the
    program runs; None without one). Raises ConfigError for a kind that no program like that engine has."""
    program = experiment.plan
    like = engine_named(experiment.engine.name).planned_as(program)
    if like is None:
        return experiment, None, None
    if program.kind is not None and (like, program.kind) not in KINDS:
        known = [kind for engine, kind in KINDS if engine == like]
        hint = f"use {' or '.join(known)}, or leave it out" if known else "leave it out"
        raise ConfigError(f"plan.kind is {program.kind}, but no program like {like} is of that kind", hint)
    engine = replace(experiment.engine, name=like)
    train = replace(experiment.train, steps=experiment.train.steps or 1)  # 0 means unknown, which our engines refuse
    return replace(experiment, engine=engine, command=Command(), plan=Plan(), train=train), like, program


def _check_family(model: ModelShape) -> None:
    """Raises ConfigError if the model does not begin a family in which the largest is searched."""
    if not replace(model, **_WITHOUT_EXPERTS).is_gpt2:
        kind = "the largest model is searched among GPT-2's shapes, but the model has another shape"
        raise ConfigError(kind, "name no --model, or one such as gpt2")


def _check_machine(question: Question, machine: Machine) -> None:
    """Raises ConfigError if the machine cannot join so many GPUs, or compute in these formats."""
    check_reach(machine, question.gpus)
    check_dtype(question.dtype, machine)
    check_matmul(question.matmul, machine)


def _engines_for(model: ModelShape, profile: ClusterProfile) -> tuple[EngineName, ...]:
    """The engines that the search tries: for a mixture also programs that divide experts over ranks."""
    engines = searched_engines(profile)
    if model.is_mixture:
        engines += tuple(name for name, facts in trainers().items() if "ep" in facts.axes and name not in engines)
    return engines


def _planned_nodes(request: Request) -> tuple[ClusterProfile, bool]:
    """Returns (the profile to plan for, whether it stands in for one that the user has not chosen)."""
    if request.device is not None:
        return _nodes_of(request.device), True
    profile = choose_profile(request, queueing=False)
    stands_in = request.cluster is None and user_default() is None and profile.device is None
    return load_profile(STAND_IN) if stands_in else profile, stands_in


def _nodes_of(product: str) -> ClusterProfile:
    """The profile of the usual nodes of a device, by our name or the driver's. Raises ConfigError for an unknown
    device."""
    name = device_named(product.lower()) or device_named(product)
    if name is None or DEVICES[name].nominal:
        of_profile = "figures of another go into a profile: hpc-gpt help profile, [machine]"
        raise ConfigError(f"--device {product!r:.60} is not known", f"{known_devices(product)}; {of_profile}")
    device = DEVICES[name]
    per_node = 4 if device.nvlink_gpus or name.startswith(("gh200", "mi300a")) else 8
    ports = _PORTS.get(device.nvlink or 0, "8x400G" if device.nvlink or device.node_gb_s else "1x200G")
    kind, shown = ("slingshot", "Slingshot") if name in _ON_SLINGSHOT else ("infiniband", "InfiniBand")
    ports = "4x200G" if name in _ON_SLINGSHOT else ports
    inside = f"NVLink {device.nvlink}" if device.nvlink else "links of its own" if device.node_gb_s else "PCI Express"
    text = f"nodes of {per_node} {name} with {inside} inside and {shown} {ports} between them"
    return ClusterProfile(
        name, device=name, gpus_per_node=per_node, fabric=f"{kind} {ports}", description=text, scheduler="slurm"
    )


def _start_of_largest(profile: ClusterProfile, overrides: dict[str, Any]) -> dict[str, Any]:
    """The tables from which the search for the largest model starts without an EXPERIMENT. Adds to `overrides` the
    dtype and the compilation that the largest model will have."""
    if overrides.get("train.dtype") is None:
        overrides["train.dtype"] = "bf16" if "bf16" in machine_of(profile).peak_tflops else "fp16"
    if compiles(profile, overrides):
        overrides["engine.compile"] = "block"
    return {"model": read_experiment(DEFAULT_EXPERIMENT).tables["model"]}


def _with_expert_width(experiment: Experiment) -> Experiment:
    """The experiment with experts that are together as wide for a token as the model's dense MLP."""
    dense = resolve_shape(replace(experiment.model, experts=None, experts_per_token=None))
    width = dense.mlp_width // (experiment.model.experts_per_token or 1)
    return replace(experiment, model=replace(experiment.model, expert_ffn=max(1, width)))


def _at_smallest_batch(
    experiment: Experiment, overrides: Mapping[str, Any], holds: set[str]
) -> tuple[Experiment, set[str]]:
    """Returns (the experiment with one sample per pass and one pass per step, unless others are given, and without
    offload; the keys that the search keeps fixed)."""
    batch: dict[str, Any] = {name: overrides.get(f"layout.{name}") or 1 for name in ("micro_batch", "micro_batches")}
    experiment = replace(experiment, layout=replace(experiment.layout, **batch, global_batch=None))
    held = {"layout.micro_batch", "layout.micro_batches", "engine.offload"}
    if "engine.offload" not in holds:
        experiment = replace(experiment, engine=replace(experiment.engine, offload="none"))
        held.add("engine.activation_offload")
    return experiment, holds - {"layout.global_batch"} | held


def _shown_name(experiment: Experiment, model: ModelShape, overrides: Mapping[str, Any]) -> str:
    """The name of the model: its sizes if the user gives some, else its preset, its file or the experiment."""
    if any(overrides.get(f"model.{key}") is not None for key in ("hidden", "layers", "heads")):
        return f"{model.layers} x {model.hidden}"
    of_file = experiment.model.hf and model_name(Path(experiment.model.hf))
    return experiment.model.preset or of_file or experiment.name


def _constants(profile: ClusterProfile, calibration: str | None) -> tuple[Constants, str]:
    """Returns (the planner's constants for a profile, their source). Raises ConfigError if `calibration` names a
    profile without them."""
    if profile.calibration is None and calibration is not None:
        raise ConfigError(
            f"profile {profile.name} has no [calibration]",
            f"hpc-gpt plan --calibrate RECORDS --cluster {profile.name} writes one",
        )
    return constants_of(profile), "data sheets" if profile.calibration is None else f"calibration of {profile.name}"


def search_plan(plan: PlanRequest, must_fit: bool) -> Searched:
    """The result of the search. Raises LayoutError with the nearest layout if `must_fit` and none fits."""
    searched = search(plan.question, plan.machine, plan.constants)
    if searched.candidates or not must_fit:
        return searched
    nearest, engine = searched.too_large[0], plan.request.overrides.get("engine.name")
    fixed = [name for name in (*AXES, "offload") if name in plan.question.fixed]
    otherwise = f"leave out --{', --'.join(fixed)}" if fixed else "use a smaller model"
    enough = fewest_gpus(plan.question, plan.machine)
    find = "--max-model"
    if plan.question.shape.seq > _USUAL_SEQ:
        otherwise, find = "use a shorter --seq", "--max-seq" + f" --model {plan.name}" * (plan.name in PRESETS)
    hint = f"use --gpus {enough}, which fits" if enough else f"{otherwise}, or find one with hpc-gpt plan {find}"
    if engine is not None and (other := _other_engine(plan)) is not None:
        hint = f"leave --engine out: {other} fits; or {hint}"
    raise LayoutError(
        f"{plan.name} does not fit on {plan.question.gpus} {plan.machine.device}: the nearest, {nearest.layout} on "
        f"{engine_text(nearest.training)}, needs {peak_memory_text(nearest)}",
        hint,
    )


def keys_without_effect(plan: PlanRequest, searched: Searched) -> list[str]:
    """The keys of [engine] that a program's experiment or the user's options set, and that change nothing in its plan:
    the engine that it is like has no such switch."""
    engine, usual = plan.experiment.engine, Engine()
    idle = []
    for name, default in vars(usual).items():
        key = f"engine.{name}"
        if key == "engine.name" or vars(engine)[name] == default:
            continue
        overrides = {**plan.request.overrides, key: default}
        with contextlib.suppress(UserError):  # the plan needs the key
            without = read_plan_request(replace(plan.request, overrides=overrides), plan.tokens, None)
            other = search(without.question, plan.machine, plan.constants)
            if _runs_of(other) == _runs_of(searched):
                idle.append(key)
    return idle


def _runs_of(searched: Searched) -> list[tuple[Layout, StepTime | None, float]]:
    """Layout, time, and GiB of memory of each candidate."""
    found = (*searched.candidates, *searched.too_large)
    return [(candidate.layout, candidate.step, candidate.need_gib) for candidate in found]


def _other_engine(plan: PlanRequest) -> str | None:
    """The engine of a plan without --engine, if one fits."""
    overrides = {key: value for key, value in plan.request.overrides.items() if key != "engine.name"}
    with contextlib.suppress(UserError):
        open_plan = read_plan_request(replace(plan.request, overrides=overrides), plan.tokens, None)
        best = search(open_plan.question, plan.machine, plan.constants).best
        return best.training.engine if best is not None else None
    return None


def _refuse_unplanned(settings: Iterable[tuple[str, Any]]) -> None:
    """Raises ConfigError for a setting (dotted key, value) of a kind of run for which the planner has no physics."""
    for key, value in settings:
        table, _, name = key.partition(".")
        for what, pattern in _UNPLANNED.items() if table in ("model", "engine", "layout") else ():
            if name not in ("preset", "hf") and re.search(pattern, f"{name}={value}", re.IGNORECASE):
                verb, it = ("is", "it") if what.endswith("ing") else ("are", "them")
                raise ConfigError(
                    f"{what} {verb} not planned, but {key} requests {it}",
                    f"plan without it, or measure: {', '.join(_UNPLANNED)} have no prediction",
                )


def _layout_of(why: str, overrides: dict[str, object]) -> dict[str, int]:
    try:
        parsed = Layout.parse(why)
    except LayoutError as fault:
        raise ConfigError(f"--why {fault}", fault.hint) from None
    layout = {f"layout.{axis}": size for axis, size in vars(parsed).items() if size is not None}
    for key, size in layout.items():
        if overrides.get(key, size) != size:
            axis = key.partition(".")[2]
            raise ConfigError(f"--why {why} and --{axis} {overrides[key]} contradict each other", f"leave --{axis} out")
    return layout
