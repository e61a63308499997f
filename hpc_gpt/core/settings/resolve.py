"""Resolves an experiment: decides every value in five steps and refuses contradictions; and turns the result back into
an experiment."""

import contextlib
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.engines import engine_named, trainers
from hpc_gpt.core.engines.base.facts import EngineFacts, Fault
from hpc_gpt.core.errors import ConfigError, LayoutError, UserError, check_sizes, raise_faults
from hpc_gpt.core.formulas import MOST_TOKENS
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.engines import engine_shape_faults, resolve_engine, resolve_train
from hpc_gpt.core.settings.experiment import Command, Data, Engine, Experiment, Job, LayoutRequest, ScriptFacts, Train
from hpc_gpt.core.settings.key_rules import key_rules, number_faults, without_defaults
from hpc_gpt.core.settings.layout import AXES, Batch, Layout, check_gpus, check_nodes, nodes_for, solve_batch
from hpc_gpt.core.settings.mixture import MIX, mixture_faults
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.model_shape import ModelShape, architecture_of
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.resolved import JOB_NAME_BYTES, Resolved, cut_name
from hpc_gpt.core.settings.schedule import excess_of
from hpc_gpt.core.settings.services import SERVICES, check_services
from hpc_gpt.core.settings.shape_rules import check_shape, shape_faults
from hpc_gpt.core.settings.shape_split import Obstacle, check_split, default_tp, expert_obstacles, split_obstacles
from hpc_gpt.core.settings.sized import NO_BATCH, NO_MODEL, Sized, model_table, program_tables, runs_program
from hpc_gpt.core.tables import toml_lines

NO_EXPERIMENT = "No EXPERIMENT was named: the defaults, and the options of the command line."

SET_END_TOKEN = "set data.end_token to the number of the token that ends a document"

_ALL_KEYS = "hpc-gpt help keys lists every key"
# A model with fewer parameters fits on one GPU, and tensor parallelism only makes it slower.
SMALL = 10**9
# {source that needs a path: (the thing that is missing without one, the hint)}
_NEED_PATH = {
    "tokens": ("no file", "make one with hpc-gpt data, then set data.path"),
    "megatron": ("no prefix of .bin and .idx", 'set data.path, to "stdlib" to try it'),
    "stream": ("no text", 'set data.path to a folder of text, or to "stdlib" to try it'),
}


def resolve(
    experiment: Experiment,
    profile: ClusterProfile,
    sweep: str | None = None,
    row: str | None = None,
    script: ScriptFacts | None = None,
    data_from: int = 0,
    race: int = 0,
) -> Resolved:
    """The run of an experiment whose keys are all decided; nothing changes it afterwards.

    `sweep` and `row` name its row, if it is one; `script` has the facts about a job script; `data_from` is the step of
    a branch to other data, `race` the most visits of a race. Raises as `size_run`.
    """
    sized = size_run(experiment, profile, script)
    return Resolved.of(sized, sweep=sweep, row=row, data_from=data_from, race=race)


def size_run(experiment: Experiment, profile: ClusterProfile, script: ScriptFacts | None = None) -> Sized:
    """The experiment with a value for every key, for one cluster profile.

    Raises LayoutError or ConfigError for what cannot run, before anything is written or queued.
    """
    facts = engine_named(experiment.engine.name)
    command = facts.program_of(experiment.command)
    shape = _size_model(experiment, facts, profile, command)
    layout, nodes, batch = _size_layout(experiment, shape, profile, command)
    train, engine = _size_engine(experiment, layout, shape, command)
    data = _size_data(experiment.data, facts, layout, engine)
    _check_tables(experiment, facts, layout, shape)
    sized = Sized(
        name=experiment.name,
        preset=experiment.model.preset,
        model=shape,
        data=data,
        engine=engine,
        layout=layout,
        batch=batch,
        gpus=layout.gpus,
        nodes=nodes,
        ranks_per_node=-(-layout.gpus // nodes),
        train=train,
        job=_job_over_profile(experiment, profile, script is not None),
        cluster=profile.of_a_run,
        command=command,
        **{name: getattr(experiment, name) for name in SERVICES},
        script=script,
    )
    facts.check_sized(sized)
    _check_after(sized)
    _check_tokens(sized)
    return sized


# --- the steps of it


def _size_model(
    experiment: Experiment, facts: EngineFacts, profile: ClusterProfile, command: Command | None
) -> ModelShape:
    """The model's shape, which may be unknown for a program. Its faults come with those of the engine and of ep."""
    if command is not None and experiment.model == Model():
        return NO_MODEL
    shape = _stated_shape(experiment.model)
    if faults := shape_faults(shape):
        more = engine_shape_faults(experiment.engine, shape) if shape.is_mixture else ()
        of_ep = _expert_obstacles_of(experiment.layout, shape, profile)
        raise_faults(faults | {fault.message: fault.hint for fault in (*more, *of_ep)}, LayoutError)
    return replace(shape, pad_token=None) if "pad_token_id" in facts.unfollowed else shape


def _size_layout(
    experiment: Experiment, shape: ModelShape, profile: ClusterProfile, command: Command | None
) -> tuple[Layout, int, Batch]:
    """(layout, nodes, batch); the batch may be unknown for a program."""
    request = experiment.layout
    layout, nodes = _resolve_layout(request, experiment.engine, shape, profile)
    sizes = request.micro_batch, request.micro_batches, request.global_batch
    batch = NO_BATCH if command is not None and not any(sizes) else solve_batch(layout.dp, *sizes)
    return layout, nodes, batch


def _expert_obstacles_of(request: LayoutRequest, shape: ModelShape, profile: ClusterProfile) -> list[Obstacle]:
    """The faults of the requested ep, for a shape with faults of its own."""
    tp, pp, cp = request.tp or 1, request.pp or 1, request.cp or 1
    gpus = request.gpus or (request.nodes or 1) * profile.gpus_per_node
    if not request.ep or request.ep < 1 or min(tp, pp, cp) < 1 or (shape.experts or 1) < 1:
        return []
    dp = max(1, request.dp or gpus // (tp * pp * cp))
    return list(expert_obstacles(shape, Layout(tp, pp, dp, cp, request.ep)))


def _size_engine(
    experiment: Experiment, layout: Layout, shape: ModelShape, command: Command | None
) -> tuple[Train, Engine]:
    """[train] and [engine]; the steps may be unknown for a program."""
    _check_train(experiment.train, is_open=command is not None)
    raise_faults(number_faults("job", experiment.job, _ALL_KEYS))
    split = split_obstacles(shape, layout) if shape != NO_MODEL else ()
    others = [Fault(obstacle.message, obstacle.hint, of_layout=True) for obstacle in split]
    engine = resolve_engine(experiment.engine, layout, shape, experiment.train, others)
    return resolve_train(experiment.train, engine, shape), engine


def _size_data(requested: Data, facts: EngineFacts, layout: Layout, engine: Engine) -> Data:
    """[data] as the engine reads it."""
    if requested.mix is not None and requested.source == Data.source:  # no other source was requested
        requested = replace(requested, source=MIX)
    _check_data(requested)
    data = facts.data_of(requested)
    if data.mask_documents and not facts.trains_our_model:
        able = " or ".join(name for name, other in trainers().items() if other.trains_our_model)
        raise ConfigError(
            f"data.mask_documents is true, which engine {engine.name} does not have",
            f"leave it out, or use --engine {able}",
        )
    if data.mask_documents and layout.cp > 1 and engine.cp_exchange == "keys":
        raise ConfigError(
            f"data.mask_documents is true, but cp is {layout.cp} and engine.cp_exchange is keys, whose ranks have two "
            "chunks of a sample and no mask of documents",
            'use engine.cp_exchange = "heads", or data.mask_documents = false',
        )
    return data


def _check_tables(experiment: Experiment, facts: EngineFacts, layout: Layout, shape: ModelShape) -> None:
    """Refuses keys that the engine does not follow, and faults in the tables around the training."""
    facts.check_run(layout, shape, experiment.train)
    check_services(experiment.notify, experiment.after, experiment.track)
    if facts.is_program and experiment.track.is_asked:
        raise ConfigError(
            f"[track] is given, but engine {facts.name} runs another program, and our trainer alone writes curves",
            "leave [track] out; hpc-gpt report RUN --wandb DIR, or --tensorboard DIR, exports them after the fact",
        )
    facts.check_plan(experiment.plan)
    for key in key_rules(Train):
        if not facts.follows(key) and (value := getattr(experiment.train, key)) not in (None, ()):
            raise ConfigError(
                f"train.{key} is {value}, but engine {facts.name} is another program, which runs none of our code",
                "use another engine, or give the program its own arguments",
            )
    if "pad_token_id" in facts.unfollowed and (pad := experiment.model.pad_token) is not None:
        raise ConfigError(
            f"model.pad_token is {pad}, but engine {facts.name} trains every row of the embedding",
            "leave model.pad_token out, or use another engine",
        )


def _check_tokens(sized: Sized) -> None:
    """Raises ConfigError if the run has more tokens than can be counted."""
    steps, batch, seq = sized.train.steps, sized.batch.global_batch, sized.model.seq
    if not runs_program(sized) and steps * batch * seq > MOST_TOKENS:
        product = f"{steps:,} steps x {batch:,} samples x {seq:,} are {steps * batch * seq:,} tokens"
        fewer = f"--set train.steps={MOST_TOKENS // (batch * seq)} or less"
        raise ConfigError(f"{product}, but a run has at most 2^63 - 1", fewer)


def _check_after(resolved: Sized) -> None:
    """Raises ConfigError if `[after]` needs checkpoints or exports that such a run cannot give."""
    after, command = resolved.after, resolved.command
    if not after.is_asked:
        return
    if command is not None and command.checkpoints is None:
        raise ConfigError(
            "[after] follows checkpoints, but nothing says where the program's are",
            'set command.checkpoints, such as "{run}/step-*"',
        )
    if after.export:
        engine_named(resolved.engine.name).check_export()
        if architecture_of(resolved.model) is None:
            raise ConfigError(
                "after.export is true, but transformers has no class of this model's shape",
                "leave it out, and let the job read {checkpoint}",
            )


def resolve_shape(model: Model) -> ModelShape:
    """The shape of the preset or config.json, overridden by the model's own sizes; ConfigError if a size is missing,
    LayoutError if they contradict each other."""
    shape = _stated_shape(model)
    check_shape(shape)
    return shape


def _stated_shape(model: Model) -> ModelShape:
    """The same, without the check of its sizes."""
    sizes = {key: size for key, size in vars(model).items() if size is not None and key not in ("preset", "hf")}
    if model.preset is not None and model.hf is not None:
        raise ConfigError(
            f"model.preset is {model.preset}, and model.hf is {model.hf}: both give the sizes", "leave one of them out"
        )
    if model.hf is not None:
        from hpc_gpt.core.weights.config import read_config  # only published weights need it

        shape = replace(read_config(Path(model.hf), model.seq), **sizes)
    elif model.preset is not None:
        shape = replace(preset(model.preset), **sizes)
    else:
        missing = [name for name in ("hidden", "layers", "heads") if name not in sizes]
        if missing:
            raise ConfigError(
                f"model lacks {', '.join(missing)}, and names no preset", 'set model.preset = "gpt2", or give the sizes'
            )
        shape = ModelShape(**sizes)
    return shape


def with_pad_token(model: Model, init: Path) -> Model:
    """The model with the pad token of the folder of its weights, if it has none itself.

    A folder that cannot be read, or belongs to another model, changes nothing; `check_weights` reports it.
    """
    from hpc_gpt.core.weights.config import read_config

    with contextlib.suppress(UserError):
        if resolve_shape(model).pad_token is None:
            padded = replace(model, pad_token=read_config(init).pad_token)
            resolve_shape(padded)
            return padded
    return model


def _resolve_layout(
    request: LayoutRequest, engine: Engine, shape: ModelShape, profile: ClusterProfile, hints: bool = True
) -> tuple[Layout, int]:
    """(layout, nodes). By default pp is 1, tp the largest that fits a node and the heads, and dp takes the remaining
    GPUs.

    A model below SMALL parameters, or an engine without a pipeline, splits over tp only if that is requested. `hints`:
    a refusal names layouts that would run.
    """
    check_sizes({name: getattr(request, name) for name in ("gpus", "nodes", *AXES, "ep", "etp", "shard")}, "layout.")
    per_node = profile.gpus_per_node
    gpus = request.gpus
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
    if tp is None and not facts.splits_unasked and not (request.dp and facts.splits("tp")):
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
        nearest = _nearest(request, engine, shape, profile, layout, gpus) if hints else ""
        raise LayoutError(str(fault), f"use {nearest}" if nearest else fault.hint) from None
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


def _nearest(
    request: LayoutRequest, engine: Engine, shape: ModelShape, profile: ClusterProfile, layout: Layout, gpus: int
) -> str:
    """A hint for a `layout` that does not use exactly these GPUs: the number that it needs, and the nearest layouts of
    these GPUs, each tried; for a tp above a node's GPUs a tp within a node, or the option that allows it."""

    def changed(**changes: Any) -> Layout | None:
        try:
            tried, _ = _resolve_layout(replace(request, **changes), engine, shape, profile, hints=False)
            check_split(shape, tried)
            if request.global_batch is not None:
                solve_batch(tried.dp, request.micro_batch, request.micro_batches, request.global_batch)
        except LayoutError:
            return None
        return tried

    across = request.tp is not None and not request.allow_tp_across_nodes and bool(profile.gpus_per_node % request.tp)
    allowed, how = {"allow_tp_across_nodes": True} if across else {}, " with --allow-tp-across-nodes" if across else ""
    options = []
    if across:
        others, tp = (request.pp or 1) * layout.cp, None
        if engine_named(engine.name).splits("pp") and gpus % others == 0:  # here a small model is split, too
            tp = default_tp(gpus, profile.gpus_per_node, shape, others)
        options = [f"--tp {tried.tp} ({tried})"] if (tried := changed(tp=tp)) else []
    elif request.gpus is not None:
        options = [f"--gpus {layout.gpus}"] if changed(gpus=layout.gpus) else []
    elif request.nodes is not None and changed(nodes=(nodes := -(-layout.gpus // profile.gpus_per_node))):
        options = [f"--nodes {nodes}"]
    for axis in ("dp", "pp"):
        others = layout.gpus // getattr(layout, axis)
        if gpus % others == 0 and (tried := changed(**{axis: gpus // others}, **allowed)):
            of_tp = f"--tp {tried.tp} " if across else ""
            options.append(f"{of_tp}--{axis} {getattr(tried, axis)} ({tried}){how}")
            break
    else:
        smaller: list[dict[str, Any]] = [{"tp": None}, {"pp": None}, {"tp": None, "pp": None}]
        smaller += [{"tp": None, "pp": None, "dp": None}, {"tp": None, "pp": gpus, "dp": None}]
        for changes in smaller if not across else ():
            if tried := changed(**changes):
                options.append(f"{' '.join(f'--{axis} {getattr(tried, axis)}' for axis in changes)} ({tried})")
                break
    if across and not options and changed(gpus=layout.gpus, nodes=None, **allowed):
        options.append(f"--gpus {layout.gpus}{how}")
    return ", or ".join(options) or (f"a tp that divides {min(profile.gpus_per_node, gpus)}" if across else "")


def _check_train(train: Train, is_open: bool) -> None:
    """Raises ConfigError for the faults of [train]. `is_open`: the number of steps may be unknown."""
    faults = list(number_faults("train", train, _ALL_KEYS, ("steps",) if is_open and not train.steps else ()))
    if not faults and train.steps and (excess := excess_of(train)):
        raise ConfigError(excess, "use a shorter warm-up or decay, or more train.steps")
    if train.eval_every > 0 and not train.eval_batches:
        faults.append("train.eval_batches is 0, but must be at least 1 if train.eval_every is not 0")
    if early := [at for at in (*train.save_at, *train.profile_steps) if at < 1]:
        faults.append(f"step {early[0]} of train.save_at or train.profile_steps must be at least 1")
    if train.profile_steps and (len(train.profile_steps) != 2 or train.profile_steps[0] > train.profile_steps[1]):
        faults.append(f"train.profile_steps is {list(train.profile_steps)}, but must be [first step, last step]")
    raise_faults(dict.fromkeys(faults, _ALL_KEYS))


def _check_data(data: Data) -> None:
    faults = dict(mixture_faults(data.source, data.path, data.mix, data.phases))
    raise_faults(faults | number_faults("data", data, _ALL_KEYS))
    if data.source in _NEED_PATH and not data.path:
        raise ConfigError(
            f'data.source is "{data.source}", but data.path names {_NEED_PATH[data.source][0]}',
            _NEED_PATH[data.source][1],
        )
    if data.begin_token and data.source not in ("stream", "random"):
        raise ConfigError(
            f'data.begin_token is for text that is tokenised as it is read, but data.source is "{data.source}"',
            "make the file with hpc-gpt data --begin-token, and leave data.begin_token out",
        )
    if data.end_token is not None and not data.mask_documents:
        raise ConfigError(
            f"data.end_token is {data.end_token}, but data.mask_documents is false, and nothing else reads it",
            "set data.mask_documents = true, or leave data.end_token out",
        )
    kinds = {one.source for one in data.mix.values()} if data.mix else {data.source}
    if data.mask_documents and data.end_token is None and kinds & {"megatron", "random"}:
        what = "random tokens" if "random" in kinds else "Megatron's pairs"
        raise ConfigError(
            f"data.mask_documents is true, but {what} do not say which token ends a document", SET_END_TOKEN
        )


def _job_over_profile(experiment: Experiment, profile: ClusterProfile, of_a_script: bool) -> Job:
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


# --- back to an experiment


def experiment_tables(resolved: Sized) -> dict[str, dict[str, Any]]:
    """The tables of an experiment that resolves to `resolved` with the same profile; open keys are None."""
    profile = resolved.cluster
    job = asdict(resolved.job)
    # `resolve` puts the profile's flags before the experiment's own.
    job["sbatch"] = resolved.job.sbatch[len(profile.sbatch) :]
    job["srun"] = resolved.job.srun[len(profile.srun) :]
    layout = {
        "gpus": resolved.gpus,
        "nodes": resolved.nodes,
        **asdict(resolved.layout),
        "cp": resolved.layout.cp if resolved.layout.cp > 1 else None,
        "ep": resolved.layout.ep if resolved.layout.ep > 1 else None,
        **{name: size or None for name, size in vars(resolved.batch).items()},
        "allow_tp_across_nodes": bool(resolved.ranks_per_node % resolved.layout.tp),
    }
    return {
        "model": {"preset": resolved.preset, **model_table(resolved)},
        "data": asdict(resolved.data),
        "engine": asdict(resolved.engine),
        "layout": layout,
        "train": asdict(resolved.train),
        "job": job,
        **program_tables(resolved),
        **{name: without_defaults(table := getattr(resolved, name), vars(table)) for name in SERVICES},
    }


def experiment_of(resolved: Sized) -> Experiment:
    """The experiment that resolves to `resolved` with the same profile."""
    tables = experiment_tables(resolved)
    sizes = {name: getattr(resolved.model, name) for name in model_table(resolved)}
    model, layout, job = Model(resolved.preset, **sizes), LayoutRequest(**tables["layout"]), Job(**tables["job"])
    command = resolved.command or Command()
    services = {name: getattr(resolved, name) for name in SERVICES}
    copied = (resolved.data, resolved.engine, layout, resolved.train, job, command)
    return Experiment(resolved.name, model, *copied, **services)


def experiment_text(resolved: Resolved, comment: str) -> str:
    """The TOML text of that experiment, after a line with `comment`."""
    lines = [f"# {comment}", *toml_lines({"name": resolved.name})]
    kinds = {entry.name: entry.default_factory for entry in fields(Experiment) if entry.default_factory is not MISSING}
    for name, table in experiment_tables(resolved).items():
        if given := toml_lines(without_defaults(kinds[name], table)):
            lines += ["", f"[{name}]", *given]
    return "\n".join(lines) + "\n"
