"""A run that resumes from another one's checkpoint in another layout: what may differ, and which run that is.

It is a run of its own, with its own folder and script; `resumed_from.json` in it names the parent. While it has no
checkpoint its trainer takes the parent's newest, and continues its steps, its data and its schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.errors import ConfigError, LayoutError, RunFolderError
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.runs.standing import done_by
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.engines import can_resume
from hpc_gpt.settings.experiment import Experiment, Job, natures
from hpc_gpt.settings.model_shape import preset
from hpc_gpt.settings.resolve import Resolved, experiment_tables, resolve
from hpc_gpt.small_files import read_json
from hpc_gpt.tables import check_tables

RESUMED_FROM = "resumed_from.json"

_ZERO = frozenset({"layout.dp", "engine.zero_stage", "engine.sub_group_elements"})
_ANY_LAYOUT = _ZERO | {"layout.tp", "layout.pp", "engine.partition", "engine.tiles"}
# In what a checkpoint of each engine may differ from the run that takes it up.
CONVERTIBLE: dict[str, frozenset[str]] = {
    "deepspeed-3d": _ANY_LAYOUT,
    "deepspeed-zero": _ANY_LAYOUT,
    "hf-deepspeed": _ZERO,
    "fsdp": frozenset({"layout.tp", "layout.dp"}),
    "ddp": frozenset({"layout.dp"}),
    "megatron-lm": frozenset(),
}
# These train the same model and keep its parameters alike, so that each takes up the other's checkpoints.
RELATED = frozenset({"deepspeed-3d", "deepspeed-zero"})


@dataclass(frozen=True)
class Parent:
    """The run that another one resumes from, and the step of its newest checkpoint when that was submitted."""

    run: str
    path: str
    step: int


def convertible(saved: str, wanted: str) -> frozenset[str]:
    """In what a checkpoint of engine `saved` may differ from a run of engine `wanted`."""
    return CONVERTIBLE[wanted] | ({"engine.name"} if {saved, wanted} <= RELATED else frozenset())


def newest_step(run: RunFolder) -> int | None:
    """The step of the newest checkpoint that looks complete; the trainer looks closer."""
    complete = run.checkpoints.glob("step-*/complete.json")
    steps = (read_json(path).get("step", 0) for path in complete)
    return max((step for step in steps if isinstance(step, int)), default=None)


def check_resumable(resolved: Resolved) -> None:
    """ConfigError if the engine of a run could not resume from a checkpoint: the trainer would end at once."""
    if resolved.engine.offload_path is not None:
        raise ConfigError(
            f"engine.offload_path is {resolved.engine.offload_path}, and DeepSpeed restores nothing there: no "
            "checkpoint is resumed with it",
            "submit a new run that trains in one go, or offloads to the host's memory",
        )


def check_unfinished(run: RunFolder, resolved: Resolved | None = None) -> None:
    """ConfigError if the run is done, or if `resolved`, the settings of a run that is to resume from it, has no
    step to train beyond its checkpoint: the job would end at once."""
    before, reached = run.resolved().train, _reached(run) or 0
    if resolved is not None and resolved.train.steps > reached:
        return
    if resolved is not None and resolved.train.steps != before.steps:
        raise ConfigError(
            f"train.steps is {resolved.train.steps}, but the newest checkpoint is of step {reached}: the job would end "
            "at once",
            f"give more than {reached} steps",
        )
    last = done_by(run.attempts())
    if last is None and resolved is None:
        return
    cause = last.ended().get("cause") if last is not None else None
    trained = [step for each in run.attempts() if isinstance(step := each.ended().get("step"), int)]
    by_steps = not cause or max(trained, default=0) >= before.steps
    why = f"it has trained its {before.steps} steps" if by_steps else cause
    more = [f"--until steps={2 * before.steps}", f"--set train.steps={2 * before.steps}"]
    if not by_steps:
        more = [f"--set train.minutes={before.minutes:g}"] if before.minutes is not None else []
        more += [f"--until loss={0.9 * before.until_loss:.4g}"] if before.until_loss is not None else []
    hint = f"to train on, as a new run: {', or '.join(more)}" if more else "submit a new run"
    if not reached or not can_resume(run.resolved().engine):
        hint = "it has no checkpoint to go on from: submit a new run that trains further"
    raise ConfigError(f"run {run.run_id} is done: {why}; its job would end at once", hint)


def find_ancestors(run: RunFolder) -> list[RunFolder]:
    """The runs that this one resumes from, the nearest first."""
    ancestors: list[RunFolder] = []
    while path := read_json(run.path / RESUMED_FROM).get("path"):
        run = RunFolder(Path(str(path)))
        if run in ancestors:
            raise RunFolderError(f"{run.path} goes on from itself", f"mend {RESUMED_FROM} there")
        ancestors.append(run)
    return ancestors


def parent_of(run: RunFolder) -> Parent:
    """`run` as a parent. ConfigError if neither it nor a run before it has a checkpoint."""
    step = _reached(run)
    if step is None:
        raise ConfigError(
            f"run {run.run_id} has no checkpoint to go on from", "submit a new run, with train.save_every set"
        )
    return Parent(run.run_id, str(run.path), step)


def _reached(run: RunFolder) -> int | None:
    """The step that a run resumes after: of its own newest checkpoint, else of the nearest run's before it."""
    return next((step for each in (run, *find_ancestors(run)) if (step := newest_step(each)) is not None), None)


def descend(
    parent: Resolved,
    changes: Mapping[str, Any],
    profile: ClusterProfile,
    step: int,
    length: Mapping[str, Any] | None = None,
) -> Resolved:
    """The parent's settings with `changes` (dotted key -> value) laid over, for a run that resumes after `step`.

    GPUs stay as many as they were unless they, the nodes or dp are given; then dp follows from the others. The global
    batch stays, and micro_batches follows. `length` are keys of [train] that were asked for as the training's end.
    Raises LayoutError or ConfigError for what cannot run, and for what would be another training.
    """
    name = str(changes.get("engine.name") or parent.engine.name)
    if name != parent.engine.name and not {name, parent.engine.name} <= RELATED:
        raise ConfigError(
            f"engine.name would be {name}, but a checkpoint of engine {parent.engine.name} cannot become one of it",
            "keep the engine, or submit a new run",
        )
    _check_preset(parent, changes)
    tables: dict[str, Any] = experiment_tables(parent)
    asked = {key.removeprefix("layout."): value for key, value in changes.items() if key.startswith("layout.")}
    batch = asked.get("global_batch")
    if batch is not None and batch != parent.batch.global_batch:
        _refuse_batch(parent, batch, step)
    tables["layout"] = _layout(parent, asked, profile)
    _leave_site(tables["job"], parent, profile)
    if tables["train"]["optimizer_mode"] == ("fused" if parent.engine.offload == "none" else "host"):
        tables["train"]["optimizer_mode"] = None  # it follows from the place of the states
    for key, value in changes.items():
        table, _, name = key.rpartition(".")
        if table != "layout":
            _table(tables, table, key)[name] = value
    tables["train"].update(length or {})
    given = {name: _given(table) for name, table in tables.items() if isinstance(table, dict)}
    everything = {"name": parent.name, **tables, **given}
    experiment = check_tables(everything, Experiment, "the parent's settings and yours", changes)
    resolved = resolve(experiment, profile)
    check_same_training(parent, resolved)
    return resolved


def _check_preset(parent: Resolved, changes: Mapping[str, Any]) -> None:
    """ConfigError if a preset is asked for whose sizes are not the checkpoint's, which stay."""
    name = changes.get("model.preset")
    if not name:
        return
    named, own = vars(preset(str(name))), vars(parent.model)
    differ = [f"{key} {named[key]}, not {own[key]}" for key in ("hidden", "layers", "heads") if named[key] != own[key]]
    if differ:
        raise ConfigError(
            f"model.preset {name} is another model than the checkpoint's: {'; '.join(differ)}",
            "leave --model out, or submit a new run",
        )


def _given(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def _table(tables: dict[str, Any], name: str, key: str) -> dict[str, Any]:
    table = tables if not name else tables.get(name)
    if not isinstance(table, dict):
        raise ConfigError(f"unknown key {key}", "hpc-gpt help keys lists every key")
    return table


def _layout(parent: Resolved, asked: Mapping[str, Any], profile: ClusterProfile) -> dict[str, Any]:
    """The [layout] of the new run: its sizes are the parent's if nothing that is asked for decides them."""
    old = parent.layout
    tp, pp = asked.get("tp") or old.tp, asked.get("pp") or old.pp
    gpus, nodes, dp = asked.get("gpus"), asked.get("nodes"), asked.get("dp")
    if gpus is None and nodes is None:
        gpus = tp * pp * dp if dp else parent.gpus
        if gpus == parent.gpus and profile == parent.cluster:
            nodes = parent.nodes
    if gpus is not None and dp is None and gpus % (tp * pp):
        raise LayoutError(
            f"tp {tp} x pp {pp} = {tp * pp} does not divide {gpus} GPUs: {gpus} / {tp * pp} = {gpus / (tp * pp):.2f}",
            f"give --gpus, a multiple of {tp * pp}",
        )
    micro_batch = asked.get("micro_batch") or (None if "micro_batches" in asked else parent.batch.micro_batch)
    ranks = gpus if gpus is not None else (nodes or 0) * profile.gpus_per_node
    _check_batch(parent.batch.global_batch, micro_batch, dp or ranks // (tp * pp))
    across = bool(parent.ranks_per_node % old.tp) and tp == old.tp
    sizes = {
        "gpus": gpus,
        "nodes": nodes,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "global_batch": parent.batch.global_batch,
        "micro_batch": micro_batch,
        "micro_batches": asked.get("micro_batches"),
        "allow_tp_across_nodes": asked.get("allow_tp_across_nodes", across),
    }
    return {**asked, **sizes}


def _check_batch(global_batch: int, micro_batch: int | None, dp: int) -> None:
    """LayoutError with the nearest size that works if the global batch, which stays, cannot be divided so."""
    if micro_batch is None or not dp or global_batch % (micro_batch * dp) == 0:
        return
    fits = math.gcd(micro_batch, global_batch // dp)
    raise LayoutError(
        f"global_batch {global_batch} stays, and is not a multiple of micro_batch x dp = {micro_batch} x {dp} = "
        f"{micro_batch * dp}",
        f"use a dp that divides {global_batch}" if global_batch % dp else f"use --micro-batch-size {fits}",
    )


def _leave_site(job: dict[str, Any], parent: Resolved, profile: ClusterProfile) -> None:
    """Takes out of the parent's [job] what came from its profile, and on another site what belongs to the old one."""
    job["dependency"] = None
    moves = profile.name != parent.cluster.name
    for key, nature in natures(Job).items():
        if job[key] == getattr(parent.cluster, key, None) or (moves and nature.of_site):
            job[key] = None


def _refuse_batch(parent: Resolved, batch: int, step: int) -> None:
    old = parent.batch.global_batch
    done = step * old
    even = f"which is step {done // batch}" if done % batch == 0 else f"which lies within step {done // batch + 1}"
    raise LayoutError(
        f"the run has read {step} steps x {old} = {done} samples; with global_batch {batch} it would go on after "
        f"sample {done} = {done / batch:g} x {batch}, {even} of another order and another schedule",
        f"keep --global-batch-size {old}, or submit a new run",
    )


def check_same_training(parent: Resolved, resolved: Resolved) -> None:
    """Refuses what the checkpoint cannot be turned into, and what would train something else."""
    faults = []
    may = convertible(parent.engine.name, resolved.engine.name)
    for name in ("model", "data", "train", "layout", "engine"):
        before, after = vars(getattr(parent, name)), vars(getattr(resolved, name))
        of_keys = parent.natures(name)
        for key in [key for key in before if before[key] != after[key]]:
            if of_keys[key].resume == "never":
                faults.append(f"{name}.{key} would be {after[key]}, but is {before[key]} in the checkpoint's run")
            elif of_keys[key].resume == "converted" and f"{name}.{key}" not in may:
                faults.append(
                    f"{name}.{key} would be {after[key]}, but a checkpoint of engine {parent.engine.name} with "
                    f"{before[key]} cannot become that"
                )
    if faults:
        raise ConfigError("\n".join(faults), "leave these out, or submit a new run")
