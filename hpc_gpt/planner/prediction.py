"""The planner's part in preparing a run: chooses open values, predicts memory and time, refuses too large runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_gpt import __version__
from hpc_gpt.core.engines import engine_named, engine_of
from hpc_gpt.core.errors import ConfigError, LayoutError, UserError
from hpc_gpt.core.format import Line, counted
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.layout import solve_batch
from hpc_gpt.core.settings.sized import Sized, runs_program

if TYPE_CHECKING:
    from hpc_gpt.core.engines.base.training import Training
    from hpc_gpt.planner.machine import Constants, Machine
    from hpc_gpt.planner.search import Candidate, Searched
    from hpc_gpt.planner.step_time import StepTime

SCHEMA = 1
_MICRO_BATCH, _PP = "layout.micro_batch", "layout.pp"
# {key that the planner chooses if it is not given: its name in texts}; more stages only if one does not fit.
_OPEN = {"engine.recompute": "recompute", "engine.zero_stage": "ZeRO stage", _MICRO_BATCH: "micro-batch", _PP: "pp"}

# More settings than one layout can have: all are kept, to find the default ones among them.
_EVERY = 10**4
# A layout is the user's if one of them is given.
_AXES = frozenset({"layout.tp", _PP, "layout.dp", "layout.ep"})

# Seconds of CPU time that the search of all layouts may take while a user waits for a submission.
_FASTER_S = 2.0


@dataclass(frozen=True)
class Prediction:
    """The prediction as text for the user, or why there is none, and its figures; None if nothing is predicted."""

    text: str
    predicted: Predicted | None = None
    tables: dict[str, Any] | None = None  # of predicted.json

    @property
    def is_known(self) -> bool:
        """Whether something is predicted."""
        return self.tables is not None

    @property
    def line(self) -> Line:
        """The line for the user."""
        return Line("predicted" if self.is_known else "not predicted", self.text)


@dataclass(frozen=True)
class Predicted:
    """The predicted memory and time of a run on the nodes of a profile. If the time cannot be predicted, `run` has no
    step and `no_time` says why. `may_run`: it fits, not counting the activations that it offloads to a host."""

    profile: ClusterProfile
    machine: Machine
    run: Candidate
    no_time: str
    may_run: bool


class PlanChoice(NamedTuple):
    """The planner's values of the open keys: `keys`, by dotted key, and `lines` that name them. `best`: the best of all
    layouts, if the plan searched all."""

    keys: Mapping[str, Any] = {}
    lines: tuple[str, ...] = ()
    best: Candidate | None = None


def plan_open(
    resolved: Sized, profile: ClusterProfile, given_keys: Collection[str], all_layouts: bool = False
) -> PlanChoice:
    """The planner's values of the open keys, where they are better than the values in `resolved`.

    Open are the ZeRO stage, recomputation, the micro-batch, and pp if one stage does not fit, unless they are in
    `given_keys` (dotted keys). Empty if the profile says too little, or if nothing fits. The caller sizes the run with
    the keys, because a switch that the user gave may refuse them. `all_layouts`: if tp, pp and dp are open, too, the
    same search covers all layouts, unless that takes more than _FASTER_S.
    """
    if runs_program(resolved):
        return PlanChoice()
    open_keys, is_whole = set(_OPEN) - {_PP, *given_keys}, not _AXES.isdisjoint(given_keys)
    may_split = not is_whole and resolved.layout.pp == 1 and engine_named(resolved.engine.name).splits("pp")
    if not (open_keys or may_split):
        return PlanChoice()
    try:
        machine = _machine_for(resolved, profile)
        searched = _search_layouts(resolved, profile, machine) if all_layouts and not is_whole else None
        picked = _pick(resolved, profile, machine, open_keys, may_split, searched)
    except UserError:
        return PlanChoice()
    best = searched.best if searched is not None else None
    if picked is None:
        return PlanChoice(best=best)
    run = picked.training
    values = {
        "engine.recompute": (run.recompute, resolved.engine.recompute),
        "engine.zero_stage": (run.zero_stage, resolved.engine.zero_stage),
        _MICRO_BATCH: (run.micro_batch, resolved.batch.micro_batch),
        _PP: (run.pp, resolved.layout.pp),
    }
    changed = {key: value for key, (value, rule) in values.items() if key not in given_keys and value != rule}
    if not engine_named(resolved.engine.name).has_zero:
        changed.pop("engine.zero_stage", None)
    if not changed:
        return PlanChoice(best=best)
    choices = ", ".join(f"{_OPEN[key]} {value}" for key, value in changed.items())
    keys: dict[str, Any] = dict(changed)
    if "engine.compile" not in given_keys:
        from hpc_gpt.planner.training import engine_for

        keys["engine.compile"] = engine_for(run, resolved.engine).compile  # ZeRO-3 cannot compile the edges
    if {_PP, _MICRO_BATCH} & set(changed):
        sizes = {**vars(run.layout), **vars(solve_batch(run.dp, run.micro_batch, run.micro_batches))}
        keys |= {f"layout.{name}": size for name, size in sizes.items()}
    return PlanChoice(keys, (f"from plan: {choices}, which neither flags nor experiment give",), best)


def best_layouts(
    resolved: Sized, profile: ClusterProfile, given_keys: Collection[str], most: int, of_any_engine: bool = False
) -> list[tuple[str, dict[str, Any]]]:
    """Returns (name, {dotted key: value}) of the `most` best layouts that fit, for the run's GPUs and global batch,
    each with its best settings. The keys in `given_keys` stay, and so does the engine unless `of_any_engine`. Raises
    ConfigError if the profile says too little for a plan."""
    from hpc_gpt.planner.training import engine_for

    open_keys = _LAYOUTS | ({"engine.name", "engine.sharded_optimizer"} if of_any_engine else set())
    searched = _search(resolved, profile, _machine_for(resolved, profile), _ALL - (open_keys - set(given_keys)))
    layouts = []
    for run in [candidate.training for candidate in searched.best_of_layouts if not candidate.needs_unknown_host][
        :most
    ]:
        engine = engine_for(run, resolved.engine)
        sizes = {**vars(run.layout), **vars(solve_batch(run.dp, run.micro_batch, run.micro_batches))}
        keys: dict[str, Any] = {f"layout.{name}": size for name, size in sizes.items()}
        run_engine = vars(resolved.engine)
        keys |= {f"engine.{name}": value for name, value in vars(engine).items() if value != run_engine[name]}
        layouts.append((str(run.layout), keys))
    return layouts


def predict(resolved: Sized, profile: ClusterProfile, refuse: bool) -> Prediction:
    """The prediction for a run on its profile.

    `refuse`: raise LayoutError, with the nearest layout that fits, if this one does not.
    """
    if runs_program(resolved):
        return Prediction("a program of your own")
    if profile.no_device:  # as many profiles: a render then loads no more of the planner
        return Prediction(profile.no_device)
    try:
        predicted = _predict(resolved, profile)
    except UserError as fault:
        return Prediction(str(fault))
    if not predicted.may_run and refuse:
        raise _refusal(resolved, predicted)
    return Prediction(_text(resolved, predicted), predicted, _tables(predicted))


def _machine_for(resolved: Sized, profile: ClusterProfile) -> Machine:
    """The profile's machine. Raises ConfigError if the profile says too little, or no network joins the run's GPUs."""
    from hpc_gpt.planner.machine import check_reach, machine_of

    machine = machine_of(profile)
    check_reach(machine, resolved.gpus)
    return machine


def _predict(resolved: Sized, profile: ClusterProfile) -> Predicted:
    from hpc_gpt.planner.machine import check_dtype

    machine = _machine_for(resolved, profile)
    from hpc_gpt.planner.search import candidate_of
    from hpc_gpt.planner.step_time import predict_step
    from hpc_gpt.planner.training import training_of

    run, no_time = candidate_of(training_of(resolved), machine), ""
    try:
        check_dtype(run.training.dtype, machine)
        run = replace(run, step=predict_step(run.training, machine, constants_of(profile)))
    except ConfigError as fault:
        no_time = str(fault)
    # Megatron-DeepSpeed's rows had more activations than this on such nodes, so activations do not refuse a run.
    states = candidate_of(replace(run.training, activations_on_host=False), machine)
    may_run = run.need_gib <= run.card_gib and states.host_share <= 1
    return Predicted(profile, machine, run, no_time, may_run)


def constants_of(profile: ClusterProfile) -> Constants:
    """The planner's constants: the defaults, replaced by the profile's calibration where it has one."""
    from hpc_gpt.planner.machine import constants_from

    return constants_from(profile.calibration.constants if profile.calibration else {})


def _text(resolved: Sized, predicted: Predicted) -> str:
    from hpc_gpt.planner.figures import as_text, memory_text, plan_figures

    time = as_text(plan_figures(predicted.run), "step", "band") or f"time not predicted: {predicted.no_time}"
    fits = "" if predicted.run.fits else ": does not fit"
    return f"{resolved.layout} needs {memory_text(predicted.run)}{fits}; {time}"


def _tables(predicted: Predicted) -> dict[str, Any]:
    """The tables of predicted.json."""
    memory, step = predicted.run.memory, predicted.run.step
    stages = [{**asdict(stage), "allocated": stage.allocated} for stage in memory.stages]
    return {
        "schema": SCHEMA,
        "version": __version__,
        "fits": predicted.run.fits,
        "memory_gib": {"card": predicted.machine.memory_gib, "deciding": memory.deciding, "stages": stages},
        "step": {**asdict(step), "step_s": step.step_s} if step else None,
        "calibrated": bool(predicted.profile.calibration and predicted.profile.calibration.constants),
        "machine": asdict(predicted.machine),
    }


def _refusal(resolved: Sized, predicted: Predicted) -> LayoutError:
    from hpc_gpt.planner.figures import as_text, memory_text, plan_figures

    run = predicted.run
    message = f"{resolved.layout} is predicted not to fit on {predicted.machine.device}: it needs {memory_text(run)}"
    nearest = _nearest(resolved, predicted)
    if nearest is None:
        return LayoutError(
            message,
            f"no layout of {counted(resolved.gpus, 'GPU')} fits at global batch {resolved.batch.global_batch}: "
            "use more GPUs, a smaller model, a shorter --seq, or --force to run it anyway",
        )
    time = as_text(plan_figures(nearest), "step", "band") if run.step else ""
    what = "; ".join(filter(None, (f"{nearest.layout}: {memory_text(nearest)}", time)))
    return LayoutError(message, f"use {_flags(run.training, nearest.training)} ({what}), or --force to run it anyway")


# The keys that may change to make a run fit, smallest changes first. All other keys stay.
_SMALL = ("engine.recompute", "layout.micro_batch", "engine.zero_stage")
_SPLITS = ("layout.pp", "layout.dp", "layout.tp", "layout.ep", "layout.shard")
_SWITCHES = ("engine.sequence_parallel", "engine.sharded_optimizer", "engine.offload")
_NEARER: tuple[tuple[str, ...], ...] = (
    ("engine.recompute",),
    _SMALL,
    ("layout.ep",),
    (*_SMALL, "engine.sequence_parallel"),
    ("layout.pp", "layout.dp"),
    (*_SMALL, "layout.pp", "layout.dp"),
    (*_SMALL, *_SPLITS),
    (*_SMALL, *_SPLITS, *_SWITCHES),
    (*_SMALL, *_SPLITS, *_SWITCHES, "engine.name"),
)
_ALL = frozenset(key for keys in _NEARER for key in keys)
# Keys that a plan chooses but that a run keeps.
_KEPT = ("engine.cp_exchange", "engine.compile", "engine.loss_chunks", "engine.activation_offload")
# Keys that differ between the layouts of a run; its engine and its offload stay.
_LAYOUTS = frozenset((*_SMALL, *_SPLITS, "engine.sequence_parallel"))


def _nearest(resolved: Sized, predicted: Predicted) -> Candidate | None:
    """The fastest candidate that fits after the smallest change of settings; None if none fits."""
    for open_keys in _NEARER:
        try:
            picked = _search(resolved, predicted.profile, predicted.machine, _ALL - set(open_keys)).best
        except UserError:
            continue
        if picked is not None:
            return picked
    return None


def _search_layouts(resolved: Sized, profile: ClusterProfile, machine: Machine) -> Searched | None:
    """Every layout of the run's GPUs, engine and global batch; None if the search fails or takes more than
    _FASTER_S."""
    try:
        return _search(resolved, profile, machine, _ALL - _LAYOUTS, keep=_EVERY, limit_s=_FASTER_S)
    except (UserError, TimeoutError):
        return None


def _pick(
    resolved: Sized,
    profile: ClusterProfile,
    machine: Machine,
    open_keys: Collection[str],
    may_split: bool,
    searched: Searched | None,
) -> Candidate | None:
    """The planner's choice of the `open_keys` in the default layout, or with more stages if it `may_split`; taken from
    `searched`, else from a new search. None if nothing fits, or if the defaults are as good."""

    def candidates(holds: Collection[str]) -> list[Candidate]:
        if searched is None:
            return _search(resolved, profile, machine, holds, keep=_EVERY).candidates
        return _with_values(searched.candidates, resolved, holds)

    fitting = candidates(_ALL - set(open_keys))
    if not fitting and may_split:
        fitting = candidates(_ALL - {*open_keys, _PP, "layout.dp"})
    by_rules = resolved.layout, resolved.engine.recompute, resolved.batch.micro_batch
    runs = ((candidate, candidate.training) for candidate in fitting)
    ruled = next(
        (candidate for candidate, run in runs if (run.layout, run.recompute, run.micro_batch) == by_rules), None
    )
    if not fitting or (ruled is not None and ruled.sort_key <= fitting[0].sort_key):
        return None
    return fitting[0]


def _with_values(candidates: Iterable[Candidate], resolved: Sized, holds: Collection[str]) -> list[Candidate]:
    """The candidates that have the run's values of the keys `holds`, best first."""
    from hpc_gpt.planner.search import ranked
    from hpc_gpt.planner.training import training_of

    names = ["engine" if key == "engine.name" else key.partition(".")[2] for key in holds]
    run = training_of(resolved)
    values = [getattr(run, name) for name in names]
    return ranked(
        candidate for candidate in candidates if [getattr(candidate.training, name) for name in names] == values
    )


def faster_notes(
    prediction: Prediction, resolved: Sized, given_keys: Collection[str], best: Candidate | None
) -> list[str]:
    """Notes on changes that are predicted to make the run faster: the `best` of all layouts, if the plan searched all,
    and compiling, unless that is `given_keys` (dotted keys). Empty if the run's own time is not predicted."""
    predicted = prediction.predicted
    if predicted is None or (step := predicted.run.step) is None:
        return []
    notes = []
    if best is not None:
        notes.append(_faster_layout(resolved, predicted, step, best))
    if "engine.compile" not in given_keys and (
        compiled := compiled_step(predicted.run.training, predicted.machine, constants_of(predicted.profile))
    ):
        notes.append(
            f"note: engine.compile = block is predicted {step.step_s / compiled.step_s:.2f} times as fast: "
            f"{_instead(replace(predicted.run, step=compiled), predicted.run)}; use --set engine.compile=block"
        )
    return [note for note in notes if note]


def _faster_layout(resolved: Sized, predicted: Predicted, ours: StepTime, best: Candidate) -> str:
    """A note on the `best` layout of as many GPUs and the same global batch; empty unless it is predicted to be faster
    by more than both error bands."""
    theirs = best.step
    if theirs is None or theirs.step_s * (1 + theirs.band) >= ours.step_s * (1 - ours.band):
        return ""
    flags = _flags(predicted.run.training, best.training)
    what = f"{best.layout} is predicted faster than {resolved.layout}"
    if str(best.layout) == str(resolved.layout):
        what = f"{flags} is predicted faster in the same layout, {best.layout}"
    return f"note: {what}: {_instead(best, predicted.run)}; use {flags}"


def _instead(faster: Candidate, run: Candidate) -> str:
    """The step times of `faster` and of `run` as text."""
    from hpc_gpt.planner.figures import plan_figures

    ours, theirs = ({key: figure.text for key, figure in plan_figures(one).items()} for one in (run, faster))
    return f"step {theirs['step']} instead of {ours['step']}, give or take {theirs['band']} and {ours['band']}"


def compiled_step(training: Training, machine: Machine, constants: Constants) -> StepTime | None:
    """The step of a training with blocks and loss compiled; None if they already are, cannot be, or gain under 1 %."""
    from hpc_gpt.planner.step_time import predict_step

    # Triton supports GPUs from Ampere on, the first with bf16.
    if training.compiled or not ("compile" in engine_of(training).switches and "bf16" in machine.peak_tflops):
        return None
    compiled = predict_step(replace(training, compiled=True, compiled_loss=True), machine, constants)
    return compiled if predict_step(training, machine, constants).step_s >= 1.01 * compiled.step_s else None


def _search(
    resolved: Sized, profile: ClusterProfile, machine: Machine, holds: Collection[str], **limits: Any
) -> Searched:
    """Searches with the run's values of the keys `holds` and of the global batch; `limits`: arguments of `search`."""
    from hpc_gpt.core.settings.stored import experiment_of
    from hpc_gpt.planner.question import question_of
    from hpc_gpt.planner.search import search

    question = question_of(experiment_of(resolved), profile, {*holds, *_KEPT, "layout.global_batch"})
    fixed = {**question.fixed, "cp": resolved.layout.cp}
    fixed |= {name: getattr(resolved.layout, name) for name in ("ep", "shard") if f"layout.{name}" in holds}
    question = replace(question, fixed=fixed)
    if question.dtype not in machine.peak_tflops:  # candidates are ranked by fp32's rate
        machine = replace(machine, peak_tflops={**machine.peak_tflops, question.dtype: machine.peak_tflops["fp32"]})
    return search(question, machine, constants_of(profile), **limits)


def _flags(requested: Training, nearest: Training) -> str:
    """The options that turn the requested training into the nearest that fits."""
    options = []
    for name, flag in _FLAGS.items():
        value = getattr(nearest, name)
        if name == "zero_stage" and not engine_of(nearest).has_zero:
            options += ["--set engine.zero_stage="] if engine_of(requested).has_zero else []
        elif value != getattr(requested, name) or (name == "tp" and nearest.engine != requested.engine):
            # Another engine has another default tp.
            text = str(value).lower() if isinstance(value, bool) else value
            options.append(f"{flag}{'' if text is None else text}")
    if (requested.micro_batch, requested.dp) != (nearest.micro_batch, nearest.dp):
        options.append(f"--global-batch-size {nearest.global_batch}")
    return " ".join(options)


_FLAGS: Mapping[str, str] = {
    "engine": "--engine ",
    "tp": "--tp ",
    "pp": "--pp ",
    "dp": "--dp ",
    "ep": "--ep ",
    "shard": "--set layout.shard=",
    "micro_batch": "--micro-batch-size ",
    "zero_stage": "--zero-stage ",
    "recompute": "--set engine.recompute=",
    "sequence_parallel": "--set engine.sequence_parallel=",
    "sharded_optimizer": "--set engine.sharded_optimizer=",
    "offload": "--set engine.offload=",
}
