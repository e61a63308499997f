"""The settings of a run that resumes from another run's checkpoint: what stays, what may differ, what must not."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, Fault, LayoutError, raise_faults
from hpc_gpt.core.gone import refuse_gone
from hpc_gpt.core.optimizers import optimizer_named
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Data, Experiment, Job
from hpc_gpt.core.settings.experiment_file import OF_A_MODEL
from hpc_gpt.core.settings.key_rules import key_rules
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.schedule import schedule_faults
from hpc_gpt.core.settings.services import OPTIMIZER_NAMES
from hpc_gpt.core.settings.stored import experiment_tables
from hpc_gpt.core.tables import flat, value_at
from hpc_gpt.core.typed_tables import read_tables
from hpc_gpt.core.weights.config import read_config

# Keys of [data] that change neither the samples nor their order.
_OF_ATTENTION = ("mask_documents", "end_token")


def descend(
    parent: Resolved,
    changes: Mapping[str, Any],
    profile: ClusterProfile,
    step: int,
    length: Mapping[str, Any] | None = None,
    branch: bool = False,
) -> Resolved:
    """The settings of a run that resumes after `step`: the parent's settings, with `changes` ({dotted key: value}).

    The number of GPUs stays unless GPUs, nodes or dp are given; then dp follows from the others. The global batch
    stays, and micro_batches follows. `length`: the keys of [train] that say when the training ends. `branch`: the run
    may be another training. Raises LayoutError or ConfigError if the run cannot run, or would be another training.
    """
    refuse_gone(parent.gone, f"run {parent.name}")
    if parent.model.is_mixture and parent.train.balance is None:  # of hf-deepspeed in 0.4.0
        parent = replace(parent, train=replace(parent.train, balance="none"))
    name = str(changes.get("engine.name") or parent.engine.name)
    for engine in (parent.engine.name, name):
        engine_named(engine).refuse_program(
            "its checkpoints stay with its run", "submit --resume without changes, or submit a new run"
        )
    _check_preset(parent, changes)
    tables: dict[str, Any] = experiment_tables(parent)
    layout_changes = {key.removeprefix("layout."): value for key, value in changes.items() if key.startswith("layout.")}
    batch = layout_changes.get("global_batch")
    if batch is not None and batch != parent.batch.global_batch:
        _refuse_batch(parent, batch, step)
    tables["layout"] = _layout(parent, layout_changes, profile)
    _leave_site(tables["job"], parent, profile)
    if tables["train"]["optimizer_mode"] == ("fused" if parent.engine.offload == "none" else "host"):
        tables["train"]["optimizer_mode"] = None  # it follows from the place of the optimizer states
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        if branch and (source := table.removeprefix("data.mix.")) != table:  # the source may be new
            tables["data"]["mix"] = {source: {}} | (tables["data"]["mix"] or {})
        if table != "layout" and key != "model.hf":  # model.hf only repeats the parent's sizes, which stay
            _table(tables, table, key)[name] = value
    tables["train"].update(length or {})
    if tables["train"]["decay"] != parent.train.decay:  # these keys belong to the schedule wsd
        stays = {f"train.{key}" for key in ("decay_steps", "decay_shape")} - changes.keys()
        tables["train"] |= {key.removeprefix("train."): None for key in stays}
    if tables["train"]["optimizer"] in OPTIMIZER_NAMES:  # keys of the parent's alone
        of_parent, own = (optimizer_named(name).keys for name in (parent.train.optimizer, tables["train"]["optimizer"]))
        tables["train"] |= {key: None for key in of_parent - own if f"train.{key}" not in changes}
    stated = {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in tables.items()
        if isinstance(table, dict)
    }
    everything = {"name": parent.name, **tables, **stated}
    where = "the parent's settings and yours"
    hint = "use more train.steps, or a shorter decay: the warm-up stays as it was"
    experiment, faults = read_tables(everything, Experiment, where, changes)
    for fault in schedule_faults(experiment.train, stated["train"], where, changes) if branch else ():
        faults.append(fault._replace(hint=hint) if "train.warmup_steps" in fault.message else fault)
    raise_faults(faults)
    is_other = reads_other_data(parent, engine_named(experiment.engine.name).data_of(experiment.data))
    resolved = resolve(experiment, profile, data_from=step if is_other else min(step, parent.data_from))
    check_same_training(parent, resolved, branch, changes)
    return resolved


def _check_preset(parent: Resolved, changes: Mapping[str, Any]) -> None:
    """Raises ConfigError if a requested preset or config.json has other sizes than the checkpoint, which stay."""
    name, file = changes.get("model.preset"), changes.get("model.hf")
    if not name and not file:
        return
    requested = preset(str(name)) if name else read_config(Path(str(file)), parent.model.seq)
    named, existing = vars(requested), vars(parent.model)
    sizes = [key.removeprefix("model.") for key in OF_A_MODEL if key not in ("model.hf", "model.pad_token")]
    differ = [f"{key} {named[key]}, not {existing[key]}" for key in sizes if named[key] != existing[key]]
    if differ:
        key = f"model.preset {name}" if name else f"model.hf {file}"
        raise ConfigError(
            f"{key} is not the model of the checkpoint: {'; '.join(differ)}",
            "leave --model out, or submit a new run",
        )


def _table(tables: dict[str, Any], name: str, key: str) -> dict[str, Any]:
    table: Any = value_at(tables, name) if name else tables
    if not isinstance(table, dict):
        raise ConfigError(f"unknown key {key}", "hpc-gpt help keys lists every key")
    return table


def _layout(parent: Resolved, changes: Mapping[str, Any], profile: ClusterProfile) -> dict[str, Any]:
    """The [layout] of the new run: the requested sizes, else the parent's."""
    old = parent.layout
    tp, pp, cp = (changes.get(axis) or getattr(old, axis) for axis in ("tp", "pp", "cp"))
    others = tp * cp * pp
    gpus, nodes, dp = changes.get("gpus"), changes.get("nodes"), changes.get("dp")
    if gpus is None and nodes is None:
        gpus = others * dp if dp else parent.gpus
        if gpus == parent.gpus and profile == parent.cluster:
            nodes = parent.nodes
    if gpus is not None and dp is None and gpus % others:
        product = f"tp {tp} x {f'cp {cp} x ' if cp > 1 else ''}pp {pp} = {others}"
        raise LayoutError(
            f"{product} does not divide {gpus} GPUs: {gpus} / {others} = {gpus / others:.2f}",
            f"give --gpus, a multiple of {others}",
        )
    micro_batch = changes.get("micro_batch") or (None if "micro_batches" in changes else parent.batch.micro_batch)
    ranks = gpus if gpus is not None else (nodes or 0) * profile.gpus_per_node
    shard = changes.get("shard", old.shard)
    if "shard" not in changes and shard and cp * (dp or ranks // others) % shard:
        shard = None  # the parent's groups do not fit, and the checkpoint is read into any
    ep = changes.get("ep") or math.gcd(old.ep, cp * (dp or ranks // others))  # what the new ranks can have of it
    _check_batch(parent.batch.global_batch, micro_batch, dp or ranks // others)
    across = bool(parent.ranks_per_node % old.tp) and tp == old.tp
    sizes = {
        "gpus": gpus,
        "nodes": nodes,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": dp,
        "ep": ep if ep > 1 else None,
        "shard": shard,
        "global_batch": parent.batch.global_batch,
        "micro_batch": micro_batch,
        "micro_batches": changes.get("micro_batches"),
        "allow_tp_across_nodes": changes.get("allow_tp_across_nodes", across),
    }
    return {**changes, **sizes}


def _check_batch(global_batch: int, micro_batch: int | None, dp: int) -> None:
    """Raises LayoutError, with a size that fits, if the sizes do not divide the global batch, which stays."""
    if micro_batch is None or not dp or global_batch % (micro_batch * dp) == 0:
        return
    fits = math.gcd(micro_batch, global_batch // dp)
    raise LayoutError(
        f"global_batch {global_batch} stays, and is not a multiple of micro_batch x dp = {micro_batch} x {dp} = "
        f"{micro_batch * dp}",
        f"use a dp that divides {global_batch}" if global_batch % dp else f"use --micro-batch-size {fits}",
    )


def _leave_site(job: dict[str, Any], parent: Resolved, profile: ClusterProfile) -> None:
    """Removes the values of the parent's profile from its [job], and on another site the keys of the old site."""
    job["dependency"] = None
    moves = profile.name != parent.cluster.name
    for key, rules in key_rules(Job).items():
        if job[key] == getattr(parent.cluster, key, None) or (moves and rules.site_may_set):
            job[key] = None


def _refuse_batch(parent: Resolved, batch: int, step: int) -> None:
    old = parent.batch.global_batch
    done = step * old
    even = f"which is step {done // batch}" if done % batch == 0 else f"which is within step {done // batch + 1}"
    raise LayoutError(
        f"the run has read {step} steps x {old} = {done} samples; with global_batch {batch} it would resume after "
        f"sample {done} = {done / batch:g} x {batch}, {even} of another order and another schedule",
        f"keep --global-batch-size {old}, or submit a new run",
    )


def reads_other_data(parent: Resolved, data: Data) -> bool:
    """Whether a branch with these data begins at their first sample, because its parent read other data."""
    rules = parent.key_rules("data")
    before, after = vars(parent.data), vars(data)
    of_samples = [key for key in before if rules[key].resume == "never" and key not in _OF_ATTENTION]
    return any(before[key] != after[key] for key in of_samples)


def check_same_training(
    parent: Resolved, resolved: Resolved, branch: bool = False, changes: Mapping[str, Any] | None = None
) -> None:
    """Raises ConfigError for changes that make it another training; a `branch` may have other data and another
    schedule. `changes`: the keys that the user gives, by default all that differ."""
    faults, optimizers = list[Fault](), {parent.train.optimizer, resolved.train.optimizer}
    of_both = {key for each in optimizers for key in optimizer_named(each).keys} if branch else ()
    for name in ("model", "data", "train", "layout", "engine"):
        before, after = vars(getattr(parent, name)), vars(getattr(resolved, name))
        of_keys = parent.key_rules(name)
        for key in [key for key in before if before[key] != after[key]]:
            may_branch = of_keys[key].branch or name == "data" or (len(optimizers) > 1 and key in of_both)
            if key == "balance" and "bias" in (before[key], after[key]):
                may_branch = False  # the router's choice biases stay what they are
            if of_keys[key].resume == "never" and not (branch and may_branch):
                is_free = may_branch and not branch
                hint = "or submit --branch, which may change it" if is_free else "or submit a new run"
                for part, of_before, of_after in _parts_that_differ(key, before[key], after[key]):
                    fault = f"{name}.{part} would be {of_after}, but is {of_before} in the checkpoint's run"
                    is_given = changes is None or any(given.startswith(f"{name}.") for given in changes)
                    keep = "leave these out" if is_given else f"keep it with --set {name}.{part}={of_before}"
                    faults.append(Fault(fault, f"{keep}, {hint}"))
    raise_faults(faults)


def _parts_that_differ(key: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted key, value before, value after) of a key whose values differ; for a table, of its keys that do."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        yield key, before, after
        return
    old, new = (flat({name: asdict(entry) for name, entry in table.items()}, f"{key}.") for table in (before, after))
    for part in {**old, **new}:
        if old.get(part) != new.get(part):
            yield part, old.get(part), new.get(part)
