"""The best plan of a run without a file, whose engine, layout and batch are open."""

import contextlib
from collections.abc import Collection
from dataclasses import replace

from hpc_gpt.core.engines import trainers
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import size_run
from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.experiment_file import DEFAULT_EXPERIMENT, cut_warmup, read_experiment
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model import resolve_shape
from hpc_gpt.planner.machine import check_dtype, check_reach, machine_of
from hpc_gpt.planner.prediction import PlanChoice, constants_of
from hpc_gpt.planner.question import asked_gpus, question_of
from hpc_gpt.planner.search import Candidate, search
from hpc_gpt.planner.table import settings_text
from hpc_gpt.planner.training import engine_for

_BATCH = ("micro_batch", "micro_batches", "global_batch")
# The most tokens of the default batch; models as large as Llama 3 begin with 4M (arXiv:2407.21783, 3.4.1).
_USUAL_TOKENS = 2**22


def usual_batch(seq: int, gpus: int) -> int:
    """The global batch at which models are compared: the default experiment's, or smaller for longer sequences, so that
    it has at most _USUAL_TOKENS. It is rounded to a multiple of the GPUs, or of the most GPUs that divide them and have
    a sample each."""
    default = int(read_experiment(DEFAULT_EXPERIMENT).tables["layout"]["global_batch"])
    usual = min(default, 1 << max(0, (_USUAL_TOKENS // seq).bit_length() - 1))
    replicas = max(count for count in range(1, usual + 1) if gpus % count == 0)
    return max(1, round(usual / replicas)) * replicas


def best_plan(experiment: Experiment, profile: ClusterProfile, given_keys: Collection[str], fast: bool) -> PlanChoice:
    """The engine, layout and settings of the best plan for an experiment without a file, and a line that names them.

    The values of `given_keys` stay; if they have a size of the batch, the rules decide the batch. If the profile says
    too little for a plan, or nothing fits, only the engine is chosen: the simplest that runs the rules' layout. `fast`:
    with the fast settings of the engine.
    """
    try:
        best = _best(experiment, profile, given_keys, fast)
    except UserError:
        best = None
    if best is None:
        return PlanChoice({"engine.name": _simplest_engine(experiment, profile, given_keys)})
    run = best.training
    sizes = {**vars(run.layout), **{name: getattr(run, name) for name in _BATCH}}
    keys = {f"layout.{name}": size for name, size in sizes.items()}
    keys |= {f"engine.{name}": value for name, value in vars(engine_for(run, experiment.engine)).items()}
    chosen = [] if "engine.name" in given_keys else [f"engine {run.engine}"]
    chosen += [text for text in (settings_text(replace(run, compiled=False)),) if text != "-"]
    chosen += [] if {f"layout.{axis}" for axis in ("tp", "pp")} <= {*given_keys} else [str(run.layout)]
    chosen += [] if "layout.micro_batch" in given_keys else [f"micro-batch {run.micro_batch}"]
    return PlanChoice(keys, (f"from plan: {', '.join(chosen)}",) if chosen else ())


def _best(experiment: Experiment, profile: ClusterProfile, given_keys: Collection[str], fast: bool) -> Candidate | None:
    machine, holds, layout = machine_of(profile), {*given_keys}, experiment.layout
    if {f"layout.{name}" for name in _BATCH} & holds:
        batch = size_run(cut_warmup(experiment)[0], profile).batch.global_batch
        holds.add("layout.global_batch")
    else:
        batch = usual_batch(resolve_shape(experiment.model).seq, asked_gpus(experiment, profile))
    experiment = replace(experiment, layout=replace(layout, global_batch=batch))
    question = question_of(experiment, profile, holds, fast=fast)
    check_reach(machine, question.gpus)
    check_dtype(question.dtype, machine)
    return search(question, machine, constants_of(profile)).best


def _simplest_engine(experiment: Experiment, profile: ClusterProfile, given_keys: Collection[str]) -> str:
    """The simplest engine that runs the experiment's layout, as the rules decide it."""
    if "engine.name" in given_keys:
        return experiment.engine.name

    def layout_on(engine: str) -> Layout | None:
        with contextlib.suppress(UserError):
            named = replace(experiment, engine=replace(experiment.engine, name=engine))
            return size_run(cut_warmup(named)[0], profile).layout
        return None

    by_rules = layout_on(experiment.engine.name)
    engines = sorted(trainers().values(), key=lambda facts: facts.plan_order)
    layouts = ((facts.name, layout_on(facts.name)) for facts in engines)
    runs = (name for name, layout in layouts if layout is not None and by_rules in (None, layout))
    return next(runs, experiment.engine.name)
