"""A run that resumes from the checkpoint of another run, its parent: the parent, and the settings that may differ.

Such a run has its own folder and script, and its `resumed_from.json` names the parent. As long as it has no checkpoint,
its trainer loads the parent's newest one and continues the parent's steps, data and schedule. A branch loads the
checkpoint of a certain step, and may have another schedule and other data.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, LayoutError, RunFolderError, raise_faults
from hpc_gpt.core.format import and_more, some
from hpc_gpt.core.gone import refuse_gone
from hpc_gpt.core.runs.checkpoints import (
    checkpoint_note,
    command_of,
    list_complete,
    newest_checkpoint,
    newest_sound,
    read_marker,
    step_in,
    stored_bytes,
)
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.experiment import Data, Experiment, Job
from hpc_gpt.core.settings.experiment_file import OF_A_MODEL, schedule_faults
from hpc_gpt.core.settings.key_rules import key_rules
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.resolve import experiment_tables, resolve
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.tables import flat
from hpc_gpt.core.typed_tables import check_tables
from hpc_gpt.core.weights.config import read_config

RESUMED_FROM = "resumed_from.json"
# A larger checkpoint is not read before a run is submitted: a login node takes a minute for this.
MOST_READ_BYTES = 32 << 30
# Keys of [data] that change neither the samples nor their order.
_OF_ATTENTION = ("mask_documents", "end_token")


@dataclass(frozen=True)
class Parent:
    """The run from which another run resumes. `step`: its newest checkpoint at that submission; for a `branch`, the
    step after which it begins."""

    run: str
    path: str
    step: int
    branch: bool = False

    @property
    def note(self) -> dict[str, Any]:
        """The content of resumed_from.json."""
        return {key: value for key, value in vars(self).items() if key != "branch" or value}


def convertible(saved: str, wanted: str) -> frozenset[str]:
    """The keys in which a checkpoint of engine `saved` may differ from a run of engine `wanted`."""
    facts = engine_named(wanted)
    return facts.converts | ({"engine.name"} if saved in facts.loads_checkpoints_of else frozenset())


def newest_step(run: RunFolder) -> int | None:
    """The step of the newest checkpoint that is marked complete; None without one. The trainer checks its files."""
    folder, names = run.checkpoints, list[str]()
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(folder) if name.startswith("step-")]
    complete = (path for name in names if (path := folder / name / "complete.json").exists())
    return max((read_stored(path).get("step") or 0 for path in complete), default=None)


def find_ancestors(run: RunFolder) -> list[RunFolder]:
    """The runs that this one resumes from, nearest first."""
    ancestors: list[RunFolder] = []
    while path := read_stored(run.path / RESUMED_FROM).get("path"):
        run = RunFolder(Path(path))
        if run in ancestors:
            raise RunFolderError(f"{run.path} resumes from itself", f"correct {RESUMED_FROM} there")
        ancestors.append(run)
    return ancestors


def checkpoint_sources(run: RunFolder, only: int | None = None) -> list[tuple[RunFolder, int | None]]:
    """Lists where a trainer looks for a run's checkpoint, as (run, step): first the run itself, then its ancestors.

    `step` is the only step that counts in that run, None for its newest one: a branch begins after one step of its
    parent, and `only` requests one. An ancestor counts for a step only if the training left it at that step or later.
    """
    sources = [(run, only)]
    for parent in find_ancestors(run):
        note = read_stored(run.path / RESUMED_FROM)
        left, is_branch = int(note.get("step") or 0), bool(note.get("branch"))
        if only is not None and (only > left or (is_branch and only != left)):
            break
        only = left if is_branch else only
        sources.append((parent, only))
        run = parent
    return sources


def branched_at(run: RunFolder) -> int:
    """The step after which a run, or its nearest ancestor that is a branch, began its own schedule; 0 without one."""
    for ancestor in (run, *find_ancestors(run)):
        note = read_stored(ancestor.path / RESUMED_FROM)
        if note.get("branch"):
            return int(note.get("step") or 0)
    return 0


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run resumes: its own newest sound one, else the one of its nearest ancestor.

    `notes`: newer checkpoints that the trainer will skip, and what could not be checked on this machine.
    """

    step: int
    notes: tuple[str, ...] = ()


def resume_point(run: RunFolder, only: int | None = None) -> ResumePoint | None:
    """Finds where a run resumes, as the trainer does. None if neither it nor an ancestor has a checkpoint (of the step
    `only`, unless that is None).

    Files are checked by their CRC-32, those of a very large checkpoint only by their sizes. ConfigError if no
    checkpoint is sound.
    """
    if (command := command_of(run)) is not None:
        path, saved = newest_checkpoint(run, command)
        note = checkpoint_note(run)
        return None if path is None else ResumePoint(saved or 0, (note,) if note else ())
    notes: list[str] = []
    for source, step in checkpoint_sources(run, only):
        sound, passed = newest_sound(source.checkpoints, MOST_READ_BYTES, step)
        notes += [f"checkpoint {name} is not sound, and is passed over: {fault.text}" for name, fault in passed.items()]
        if sound is None:
            continue
        if (size := stored_bytes(sound)) > MOST_READ_BYTES:
            notes.append(f"only the sizes of the files of {sound.name}, {size / 2**30:.0f} GiB, were checked here")
        return ResumePoint(int(read_marker(sound).get("step") or 0), tuple(notes))
    if not notes:
        return None
    faults = [note.replace(" is not sound, and is passed over", "", 1) for note in notes]
    unlisted = and_more(len(faults), 3, "\nand ")
    raise ConfigError(
        f"run {run.run_id} has no sound checkpoint to resume from:\n" + "\n".join(faults[:3]) + unlisted,
        "bring the files back, or train it again from step 0, as a new run: "
        f"hpc-gpt submit --resume {run.run_id} --from-start",
    )


def parent_of(run: RunFolder) -> tuple[Parent, ResumePoint]:
    """(`run` as a parent, where its child resumes). ConfigError if neither it nor one of its ancestors has a sound
    checkpoint."""
    point = resume_point(run)
    if point is None:
        raise ConfigError(
            f"run {run.run_id} has no checkpoint to resume from", "submit a new run, with train.save_every set"
        )
    return Parent(run.run_id, str(run.path), point.step), point


def branch_of(run: RunFolder, step: int | None) -> tuple[Parent, ResumePoint]:
    """(`run` as the parent of a branch, where the branch resumes): after `step`, or at its newest checkpoint if that is
    None. ConfigError without a sound checkpoint of that step."""
    point = resume_point(run, step)
    if point is None:
        steps = saved_steps(run)
        what = f"of step {step}" if step is not None else "to branch from"
        existing = f"; it has checkpoints of steps {some(list(map(str, steps)), 8)}" if steps else ""
        near = min(steps, key=lambda saved: abs(saved - (step or 0)), default=None)
        raise ConfigError(
            f"run {run.run_id} has no checkpoint {what}{existing}",
            "hpc-gpt save makes one while the run trains" if near is None else f"--branch {run.run_id}@{near}",
        )
    return Parent(run.run_id, str(run.path), point.step, branch=True), point


def saved_steps(run: RunFolder) -> list[int]:
    """The steps after which a branch of the run can begin, by the names of its checkpoints and its ancestors'."""
    branch_steps = set()
    for holder, _ in checkpoint_sources(run):
        steps = {step_in(path.name) for path in list_complete(holder.checkpoints)}
        branch_steps |= {step for step in steps if holder in [source for source, _ in checkpoint_sources(run, step)]}
    return sorted(branch_steps)


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
    name = str(changes.get("engine.name") or parent.engine.name)
    for engine in (parent.engine.name, name):
        engine_named(engine).refuse_program(
            "its checkpoints stay with its run", "submit --resume without changes, or submit a new run"
        )
    if name != parent.engine.name and parent.engine.name not in engine_named(name).loads_checkpoints_of:
        raise ConfigError(
            f"engine.name would be {name}, but a checkpoint of engine {parent.engine.name} cannot be converted to that",
            "keep the engine, or submit a new run",
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
    stated = {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in tables.items()
        if isinstance(table, dict)
    }
    everything = {"name": parent.name, **tables, **stated}
    where = "the parent's settings and yours"
    faults = schedule_faults(stated["train"], where, changes, steps_elsewhere=False) if branch else {}
    hint = "use more train.steps, or a shorter decay: the warm-up stays as it was"
    faults |= dict.fromkeys((fault for fault in faults if "train.warmup_steps" in fault), hint)
    experiment = check_tables(everything, Experiment, where, changes, faults)
    is_other = reads_other_data(parent, engine_named(experiment.engine.name).data_of(experiment.data))
    resolved = resolve(experiment, profile, data_from=step if is_other else min(step, parent.data_from))
    check_same_training(parent, resolved, branch)
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
    table: Any = tables
    for part in name.split(".") if name else ():
        table = table.get(part) if isinstance(table, dict) else None
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


def check_same_training(parent: Resolved, resolved: Resolved, branch: bool = False) -> None:
    """Raises ConfigError for changes to which the checkpoint cannot be converted, or that make it another training; a
    `branch` may have other data and another schedule."""
    faults = {}
    may = convertible(parent.engine.name, resolved.engine.name)
    for name in ("model", "data", "train", "layout", "engine"):
        before, after = vars(getattr(parent, name)), vars(getattr(resolved, name))
        of_keys = parent.key_rules(name)
        for key in [key for key in before if before[key] != after[key]]:
            may_branch = of_keys[key].branch or name == "data"
            if key == "balance" and "bias" in (before[key], after[key]):
                may_branch = False  # the router's choice biases stay what they are
            if of_keys[key].resume == "never" and not (branch and may_branch):
                is_free = may_branch and not branch
                hint = "or submit --branch, which may change it" if is_free else "or submit a new run"
                for part, of_before, of_after in _parts_that_differ(key, before[key], after[key]):
                    fault = f"{name}.{part} would be {of_after}, but is {of_before} in the checkpoint's run"
                    faults[fault] = f"leave these out, {hint}"
            elif of_keys[key].resume == "converted" and f"{name}.{key}" not in may:
                fault = (
                    f"{name}.{key} would be {after[key]}, but a checkpoint of engine {parent.engine.name} with "
                    f"{before[key]} cannot be converted to that"
                )
                faults[fault] = "leave these out, or submit a new run"
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
