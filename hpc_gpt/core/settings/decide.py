"""Decides: from an experiment and a cluster profile to a value for every key.

`size_run` first collects the faults that show without any decision, then decides with the keys that are sound, then
collects the faults of what was decided; it raises all of them at once.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, Fault, LayoutError, gathered, raise_faults
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Engine, Experiment, Job, LayoutRequest, ScriptFacts, Train
from hpc_gpt.core.settings.layout import Layout, check_gpus, check_nodes, nodes_for, solve_batch
from hpc_gpt.core.settings.model import stated_shape
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.resolved import JOB_NAME_BYTES, Resolved, cut_name
from hpc_gpt.core.settings.rules import keys_of
from hpc_gpt.core.settings.rules.data import with_mix
from hpc_gpt.core.settings.rules.engine import product_faults, with_stage
from hpc_gpt.core.settings.rules.walk import faults_after, faults_before, sound_part, without_followers
from hpc_gpt.core.settings.services import SERVICES
from hpc_gpt.core.settings.shape_split import check_split, default_tp
from hpc_gpt.core.settings.sized import NO_BATCH, NO_MODEL, Sized

# A model with fewer parameters fits on one GPU, and tensor parallelism only makes it slower.
SMALL = 10**9


def resolve(
    experiment: Experiment,
    profile: ClusterProfile,
    sweep: str | None = None,
    row: str | None = None,
    script: ScriptFacts | None = None,
    data_from: int = 0,
) -> Resolved:
    """The run of an experiment whose keys are all decided; nothing changes it afterwards.

    `sweep` and `row` name its row, if it is one; `script` has the facts about a job script; `data_from` is the step of
    a branch to other data. Raises as `size_run`.
    """
    sized = size_run(experiment, profile, script)
    return Resolved.of(sized, sweep=sweep, row=row, data_from=data_from)


def size_run(
    experiment: Experiment,
    profile: ClusterProfile,
    script: ScriptFacts | None = None,
    faults: Sequence[Fault] = (),
    to_train: bool = False,
) -> Sized:
    """The experiment with a value for every key, for one cluster profile.

    Raises LayoutError or ConfigError for what cannot run, before anything is written or queued: all faults at once, and
    with them `faults` that were found before. Without a sound layout those that no layout mends stand for all of what
    would be decided. `to_train`: also those that do not hinder a plan.
    """
    found = faults_before(experiment, profile, faults)
    sound, sized, more = sound_part(experiment, found), None, list[Fault]()
    with gathered(more):
        sized = _decide(sound, profile, script)
    has_layout = sized is not None and not any(key.startswith("layout") for fault in found for key in keys_of(fault))
    after = faults_after(sized) if sized is not None and has_layout else _faults_of_any_layout(sound, profile)
    more = [*after, *more, *(product_faults(sized) if sized is not None and to_train else ())]
    of_layout = () if experiment.layout.tp else ("model",)  # a default tp follows from the model
    found += without_followers(more, found, ("engine.name",), of_layout)
    raise_faults(fault._replace(keys=keys_of(fault)) for fault in found)
    assert sized is not None
    return sized


def _faults_of_any_layout(experiment: Experiment, profile: ClusterProfile) -> list[Fault]:
    """The faults of what would be decided with two layouts and batches that have no size in common: the layout has no
    part in these. Empty if something else cannot be decided."""
    small = LayoutRequest(gpus=1, tp=1, pp=1, micro_batch=1, micro_batches=1)
    large = LayoutRequest(tp=2, pp=2, cp=2, dp=2, ep=2, micro_batch=2, micro_batches=3)
    one_node = replace(profile, gpus_per_node=16)
    try:
        first, second = (
            faults_after(_decide(replace(experiment, layout=layout), one_node, None)) for layout in (small, large)
        )
    except (ConfigError, LayoutError):
        return []
    return [fault for fault in first if fault in second]


def _decide(experiment: Experiment, profile: ClusterProfile, script: ScriptFacts | None) -> Sized:
    """The sizes of an experiment without faults of its own. Raises LayoutError or ConfigError if it has no layout or no
    batch."""
    facts = engine_named(experiment.engine.name)
    command = facts.program_of(experiment.command)
    shape = NO_MODEL if command is not None and experiment.model == Model() else stated_shape(experiment.model)
    if "pad_token_id" in facts.unfollowed:
        shape = replace(shape, pad_token=None)
    request = experiment.layout
    layout, nodes = _decide_layout(request, experiment.engine, shape, profile)
    sizes = request.micro_batch, request.micro_batches, request.global_batch
    engine = with_stage(experiment.engine)
    return Sized(
        name=experiment.name,
        preset=experiment.model.preset,
        model=shape,
        data=facts.data_of(with_mix(experiment.data)),
        engine=engine,
        layout=layout,
        batch=NO_BATCH if command is not None and not any(sizes) else solve_batch(layout.dp, *sizes),
        gpus=layout.gpus,
        nodes=nodes,
        ranks_per_node=-(-layout.gpus // nodes),
        train=_decide_train(experiment.train, engine, shape),
        job=job_over_profile(experiment, profile, script is not None),
        cluster=profile.of_a_run,
        command=command,
        **{name: getattr(experiment, name) for name in SERVICES},
        script=script,
    )


def _decide_train(train: Train, engine: Engine, shape: ModelShape) -> Train:
    """[train] with the optimizer's mode, by default fused kernels, or the host's kernel if its states are offloaded;
    and with the balance of the experts: one value for all engines, as a run may resume on another engine."""
    mode = train.optimizer_mode or ("fused" if engine.offload == "none" else "host")
    balance, facts = train.balance, engine_named(engine.name)
    if balance is None and shape.is_mixture and not facts.is_program:
        # Published weights: as transformers' classes train on, whose balance loss is off by default.
        as_classes = train.init is not None or not facts.trains_our_model
        balance = "none" if as_classes else "bias" if shape.router_bias else "loss"
    return replace(train, optimizer_mode=mode, balance=balance)


def _decide_layout(
    request: LayoutRequest, engine: Engine, shape: ModelShape, profile: ClusterProfile, hints: bool = True
) -> tuple[Layout, int]:
    """(layout, nodes). By default pp is 1, tp the largest that fits a node and the heads, and dp takes the remaining
    GPUs.

    A model below SMALL parameters, or an engine without a pipeline, splits over tp only if that is requested. `hints`:
    a refusal names a layout that would run.
    """
    per_node, gpus = profile.gpus_per_node, request.gpus
    pp, cp = request.pp or 1, request.cp or 1
    if gpus is None:
        if request.nodes is not None:
            gpus = request.nodes * per_node
        elif request.tp and request.dp:
            gpus = request.tp * cp * pp * request.dp
        else:
            gpus = per_node
    tp = request.tp
    facts = engine_named(engine.name)
    splits_unasked = facts.splits("pp") and not facts.takes_command
    if tp is None and not splits_unasked and not (request.dp and facts.splits("tp")):
        tp = 1
    if tp is None:
        others = cp * pp
        if gpus % others:
            axes = f"cp {cp} x pp {pp} = {others}" if cp > 1 < pp else f"cp {cp}" if cp > 1 else f"pp {pp}"
            raise LayoutError(
                f"{axes} does not divide {gpus} GPUs: {gpus} / {others} = {gpus / others:.2f}",
                f"use --gpus {-(-gpus // others) * others}, or a {'cp' if cp > 1 else 'pp'} that divides {gpus}",
            )
        if request.dp and gpus % (others * request.dp) == 0 and gpus // (others * request.dp) <= per_node:
            tp = gpus // (others * request.dp)
        elif shape.params < SMALL:
            tp = 1
        else:
            spread = request.nodes is not None and gpus % request.nodes == 0
            tp = default_tp(gpus, gpus // request.nodes if request.nodes and spread else per_node, shape, others)
    etp = request.etp if request.etp != tp else None
    layout = Layout(tp, pp, request.dp or max(1, gpus // (tp * cp * pp)), cp, request.ep or 1, etp)
    if request.shard != layout.data_ranks:
        layout = replace(layout, shard=request.shard)
    try:
        if request.nodes is not None and request.gpus is None:
            check_nodes(layout, request.nodes, per_node, allow_tp_across_nodes=True)
        check_gpus(layout, gpus)
    except LayoutError as fault:
        near = _near_options(request, engine, shape, profile, layout, gpus) if hints else ""
        raise LayoutError(str(fault), f"use {near}" if near else fault.hint) from None
    nodes = request.nodes or nodes_for(gpus, per_node)
    if gpus % nodes:
        raise LayoutError(
            f"{gpus} GPUs do not spread evenly over {nodes} nodes", f"use --nodes {nodes_for(gpus, per_node)}"
        )
    check_nodes(layout, nodes, per_node, request.allow_tp_across_nodes)
    if profile.scheduler == "local" and nodes > 1:
        raise LayoutError(
            f"layout {layout} needs {nodes} nodes, but profile {profile.name} is this one machine",
            f"use --gpus {per_node} or fewer, or another --cluster",
        )
    return layout, nodes


def _near_options(
    request: LayoutRequest, engine: Engine, shape: ModelShape, profile: ClusterProfile, layout: Layout, gpus: int
) -> str:
    """The options of the nearest layout that can run in place of one that does not use exactly these GPUs: another tp
    for a tp above a node's GPUs, else another dp or pp, the GPUs that it needs, or a smaller one. Empty if none can."""
    per_node = profile.gpus_per_node
    is_across = request.tp is not None and not request.allow_tp_across_nodes and bool(per_node % request.tp)
    changes: list[dict[str, Any]] = []
    if is_across:
        others, tp = (request.pp or 1) * layout.cp, None
        if engine_named(engine.name).splits("pp") and gpus % others == 0:  # here a small model is split, too
            tp = default_tp(gpus, per_node, shape, others)
        changes.append({"tp": tp})
    allowed = {"allow_tp_across_nodes": True} if is_across else {}
    for axis in ("dp", "pp"):
        size, rest = divmod(gpus, layout.gpus // getattr(layout, axis))
        changes += [] if rest else [{axis: size, **allowed}]
    if request.nodes is not None and request.gpus is None:
        changes.append({"nodes": -(-layout.gpus // per_node), **allowed})
    else:
        changes.append({"gpus": layout.gpus, **allowed})
    if not is_across:
        changes += [{"tp": None}, {"pp": None}, {"tp": None, "pp": None}]
        changes += [{"tp": None, "pp": None, "dp": None}, {"tp": None, "pp": gpus, "dp": None}]
    for change in changes:
        try:
            tried, nodes = _decide_layout(replace(request, **change), engine, shape, profile, hints=False)
            check_split(shape, tried)
            if request.global_batch is not None:
                solve_batch(tried.dp, request.micro_batch, request.micro_batches, request.global_batch)
        except LayoutError:
            continue
        if "gpus" in change:
            options = [f"--gpus {tried.gpus}"]
        else:
            sizes = {**tried.table(), "nodes": nodes}
            options = [f"--{name} {sizes[name]}" for name in change if name in sizes]
        options += ["--allow-tp-across-nodes"] if "allow_tp_across_nodes" in change else []
        return f"{' '.join(options)} ({tried})"
    return f"a tp that divides {min(per_node, gpus)}" if is_across else ""


def job_over_profile(experiment: Experiment, profile: ClusterProfile, of_a_script: bool = False) -> Job:
    """[job] with the experiment's values, else the profile's. It has the flags of both, the profile's first.

    A job `of_a_script` gets no signal unless the experiment states its lead.
    """
    job = experiment.job
    values: dict[str, Any] = {}
    for entry in fields(Job):
        value = getattr(job, entry.name)
        if entry.name in ("sbatch", "srun"):
            value = (*getattr(profile, entry.name), *value)
        elif value is None:
            named = cut_name(experiment.name, JOB_NAME_BYTES) if entry.name == "name" else None
            value = named or getattr(profile, entry.name, None)
        values[entry.name] = value
    if of_a_script:
        values["signal_lead_s"] = job.signal_lead_s
    return Job(**values)
