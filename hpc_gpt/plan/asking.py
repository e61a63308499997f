"""From an experiment and what of it holds to a question for the search; and why a question has no answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace

from hpc_gpt.errors import ConfigError, LayoutError, UserError
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.question import TP_SPANS, USUAL_ENGINES, Question, Split
from hpc_gpt.plan.search import search
from hpc_gpt.plan.translation import PLANNED, shape_of, traits_of, update_mode
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.engines import OFFERS
from hpc_gpt.settings.experiment import Engine, Experiment
from hpc_gpt.settings.layout import Layout, check_nodes, nodes_for
from hpc_gpt.settings.model_shape import check_split
from hpc_gpt.settings.resolve import resolve, resolve_shape

# Key of an experiment -> field of a Training that it settles.
_SETTLES = {
    **{f"layout.{name}": name for name in ("tp", "pp", "dp", "micro_batch", "micro_batches")},
    **{f"engine.{name}": name for name in ("zero_stage", "recompute", "offload", "sequence_parallel")},
    "engine.sharded_optimizer": "distributed_optimizer",
}


_MOST = 10**9


def question_of(
    experiment: Experiment,
    profile: ClusterProfile,
    holds: Collection[str] = (),
    engines: tuple[str, ...] | None = None,
) -> Question:
    """The search for an experiment: its model, batch, dtype and switches, its layout open but for the dotted keys that
    `holds` names. `engines` are those to try, by default the usual ones; engine.name in `holds` means the
    experiment's.

    Raises LayoutError or ConfigError for what contradicts itself.
    """
    _check_sizes(experiment)
    model, asked, engine = resolve_shape(experiment.model), experiment.layout, experiment.engine
    gpus = _gpus(experiment, profile)
    settled = {}
    for key, name in _SETTLES.items():
        table, _, own = key.partition(".")
        value = getattr(getattr(experiment, table), own)
        if key in holds and value is not None:
            settled[name] = value
    names = (engine.name,) if "engine.name" in holds else engines or USUAL_ENGINES
    named = {key.partition(".")[2] for key in holds if key.startswith("engine.")} - set(PLANNED)
    names = tuple(name for name in names if _takes(name, engine, named))
    batch = asked.global_batch
    if "layout.micro_batches" in holds and "layout.global_batch" not in holds:
        batch = None
    elif batch is None:
        batch = _own_batch(experiment, profile)
    even = engine.partition == "layers" or (isinstance(engine.partition, tuple) and "engine.partition" not in holds)
    return Question(
        shape=shape_of(model),
        gpus=gpus,
        gpus_per_node=profile.gpus_per_node,
        dtype=experiment.train.dtype,
        global_batch=batch,
        engines=names,
        settled=settled,
        traits={name: traits_of(engine, name, profile.device) for name in names},
        tp_across_nodes=asked.allow_tp_across_nodes,
        partition="layers" if even else engine.partition,
        model=model,
        optimizer_mode=update_mode(experiment.train),
        offload_ratio=engine.offload_ratio,
    )


def check_dtype(dtype: str, machine: Machine) -> None:
    """ConfigError where the device has no unit for the arithmetic: its time cannot be predicted."""
    if dtype not in machine.peak_tflops:
        known = ", ".join(machine.peak_tflops)
        raise ConfigError(
            f"{machine.device} has no unit for train.dtype {dtype}", f"use --set train.dtype= one of: {known}"
        )


def check_possible(question: Question, experiment: Experiment, profile: ClusterProfile, name: str) -> None:
    """LayoutError or ConfigError where no layout can run at all, whatever it needs: why, and which numbers of GPUs
    work. `question` is the experiment's."""
    splits = list(question.splits())
    if any(obstacle is None and _has_way(question, split) for split, obstacle in splits):
        return
    if not question.engines:
        _resolve_with(question, experiment, profile, Split(1, 1, question.gpus))
        raise ConfigError(
            "no engine takes all the switches of [engine] that are set together", "hpc-gpt help engines lists them"
        )
    if len(splits) == 1:
        _refuse(question, splits[0][0])
    unobstructed = next((split for split, obstacle in splits if obstacle is None), None)
    if unobstructed is not None:  # an engine's switches are in the way: its own words
        _resolve_with(question, experiment, profile, unobstructed)
    settled = {axis: question.settled[axis] for axis in ("tp", "pp", "dp") if axis in question.settled}
    if not splits and len(settled) == 3:
        _resolve_with(question, experiment, profile, Split(**settled))
    words = " with " + ", ".join(f"{axis} {size}" for axis, size in settled.items()) if settled else ""
    reasons = list(dict.fromkeys(reason or "no engine that is asked for splits so" for _, reason in splits))
    if not splits:
        reasons = [f"{' x '.join(settled)} does not divide {question.gpus}"]
    counts = working_counts(question)
    if reasons == ["dp does not divide the global batch"]:
        counts = []
    hint = f"use --gpus {' or '.join(map(str, counts))}" if counts else "leave --tp, --pp, --dp and the batch open"
    if reasons == [TP_SPANS]:
        hint += ", or --allow-tp-across-nodes if the slow links are meant"
    raise LayoutError(f"no layout of {name} can run on {question.gpus} GPUs{words}: {', '.join(reasons)}", hint)


def working_counts(question: Question, most: int = 3) -> list[int]:
    """Numbers of GPUs near the one asked for on which some layout can run, in order."""
    per_node, gpus = question.gpus_per_node, question.gpus
    nodes = gpus // per_node
    near = [per_node * count for count in range(max(1, nodes - 64), nodes + 66)]
    doubled = [per_node * 2**power for power in range(20)]
    counts = sorted({*range(1, per_node + 1), *near, *doubled} - {gpus}, key=lambda count: abs(count - gpus))
    found: list[int] = []
    for count in counts:
        other = replace(question, gpus=count)
        if any(obstacle is None and _has_way(other, split) for split, obstacle in other.splits()):
            found.append(count)
            if len(found) == most:
                break
    return sorted(found)


def _gpus(experiment: Experiment, profile: ClusterProfile) -> int:
    """As `resolve` counts them, all of whole nodes."""
    asked, per_node = experiment.layout, profile.gpus_per_node
    gpus = asked.gpus or (asked.nodes * per_node if asked.nodes else per_node)
    nodes = asked.nodes or nodes_for(gpus, per_node)
    if gpus > nodes * per_node or gpus % nodes:
        raise LayoutError(
            f"{gpus} GPUs do not spread over {nodes} nodes of {per_node}", f"use --nodes {nodes_for(gpus, per_node)}"
        )
    if profile.scheduler == "local" and nodes > 1:
        raise LayoutError(
            f"{gpus} GPUs need {nodes} nodes, but profile {profile.name} is this one machine",
            f"use --gpus {per_node} or fewer, or another --cluster",
        )
    return gpus


def _check_sizes(experiment: Experiment) -> None:
    """Refuses what no machine has, before anything is divided by it or by all its divisors."""
    for table in ("model", "layout"):
        for name, size in asdict(getattr(experiment, table)).items():
            if isinstance(size, bool) or not isinstance(size, int):
                continue
            if size < 1:
                raise LayoutError(f"{table}.{name} is {size}, but must be at least 1", f"give a positive {name}")
            if size > _MOST:
                raise LayoutError(f"{table}.{name} is over {_MOST:,}, which no machine has", f"give a real {name}")


def _own_batch(experiment: Experiment, profile: ClusterProfile) -> int:
    """The global batch of the experiment's own layout; of one replica where that cannot run here."""
    try:
        return resolve(experiment, profile).batch.global_batch
    except UserError:
        return (experiment.layout.micro_batch or 1) * (experiment.layout.micro_batches or 1)


def _takes(name: str, engine: Engine, keys: Collection[str]) -> bool:
    """Whether the engine has every switch of `keys` that is not at its default."""
    plain = Engine()
    return all(key in OFFERS[name].switches or getattr(engine, key, None) == getattr(plain, key, None) for key in keys)


def _has_way(question: Question, split: Split) -> bool:
    return bool(question.batches(split.dp)) and any(
        question.states(engine, split)
        and question.chunks(engine, split.pp)
        and question.recomputes(engine)
        and question.sequence_parallel(engine, split.tp)
        for engine in question.engines
    )


def _resolve_with(question: Question, experiment: Experiment, profile: ClusterProfile, split: Split) -> None:
    """Raises what `resolve` does of the experiment's own engine under the split."""
    layout = replace(experiment.layout, gpus=question.gpus, nodes=None, **split._asdict())
    engine = experiment.engine
    if "zero_stage" not in question.settled:
        engine = replace(engine, zero_stage=None)
    resolve(replace(experiment, layout=layout, engine=engine), profile)


def _refuse(question: Question, split: Split) -> None:
    """The launcher's own words for one layout, where it has some."""
    layout = Layout(*split)
    if question.model is not None:
        check_split(question.model, layout)
    check_nodes(
        layout, nodes_for(question.gpus, question.gpus_per_node), question.gpus_per_node, question.tp_across_nodes
    )


def fewest_gpus(question: Question, machine: Machine, most: int = 65536) -> int | None:
    """The first doubling of the GPUs, in whole nodes, on which something fits; None where none up to `most` does."""
    per_node = question.gpus_per_node
    gpus = question.gpus
    while gpus < most:
        gpus = 2 * gpus if gpus >= per_node else min(2 * gpus, per_node)
        if search(replace(question, gpus=gpus), machine, first=True).candidates:
            return gpus
    return None
