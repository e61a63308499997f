"""The figures of a program's run, or of a job script's, read from the logs of its attempts as from any other logs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpc_gpt.core.runs.record import ABSENT, RECORD_KEYS, ROUGH_STEP, Flag
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.reader.lines.part import Part
from hpc_gpt.reader.lines.read_log import read_log
from hpc_gpt.reader.lines.steps import StepTable
from hpc_gpt.reader.runs.attempts import AttemptRead
from hpc_gpt.reader.runs.draft import Draft
from hpc_gpt.reader.runs.foreign import join_as_one, read_foreign
from hpc_gpt.reader.runs.grouping import RunParts, group_logs
from hpc_gpt.reader.runs.log_steps import LogSteps
from hpc_gpt.reader.runs.run_read import RunRead

# Keys that a run knows better than its log does: which run it is, when it ran, and how it ended.
_KEYS_OF_RUN = {
    *("schema", "run", "name", "dialect", "engine", "job_id", "nodes", "started", "ended_at", "ended", "cause"),
    *("attempts", "after", "node_list", "failed_node", "gpu_hours", "goodput", "gpu_hours_by", "config_hash"),
    *("settings", "versions", "flags", "flag_kinds", "sources"),
}
# Keys that are taken together, if the log states one of them: they describe the same steps.
_GROUPS = (
    ("step_s", "step_s_p10", "step_s_p90", "step_s_mean", "steps_used", "warmup_steps"),
    ("loss_first", "loss_last"),
)
# Keys that a log states once, not in its lines of steps: a log that lacks lines of steps still has them.
_SETTINGS = {
    *("device", "gpus", "tp", "pp", "cp", "dp", "ep", "zero_stage", "micro_batch", "micro_batches", "global_batch"),
    *("seq", "hidden", "layers", "heads", "vocab", "params", "params_active", "recompute", "dtype", "matmul"),
}


def read_program_logs(run: RunFolder, attempts: Sequence[AttemptRead]) -> RunRead | None:
    """Reads the logs of all attempts as one run, as `report LOG` does; None if no reader knows a line of them. If the
    log of an attempt has several trainings, the last one is read, and a flag says so."""
    joined: RunParts | None = None
    count = 1
    for read in attempts:
        # The names of one job's two streams, by which they are grouped.
        streams = {read.attempt.log: read.attempt.folder / "job.out", read.attempt.err: read.attempt.folder / "job.err"}
        parts_of = {path: _known_parts(path, run.path) for path in read.attempt.logs}
        logs = [(streams.get(path, path), parts) for path, parts in parts_of.items() if parts]
        trainings = join_as_one(group_logs(logs))
        trainings = [training for training in trainings if training.has_steps] or trainings
        if not trainings:
            continue
        count = len(trainings)
        if joined is None:
            joined = trainings[-1]
        else:
            joined.names += trainings[-1].names
            joined.attempts += trainings[-1].attempts
    if joined is None:
        return None
    logged = read_foreign(joined, run.run_id)
    if count > 1:
        logged.record.flags.append(Flag(f"training {count} of {count} in its log: report LOG shows all of them"))
        logged.record.flag_kinds.append("")
    return logged


def _known_parts(path: Path, folder: Path) -> list[Part]:
    """The parts of a log in which a reader knows a line. The log is named by its path in the run folder."""
    name = str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
    return [part for part in read_log(path, name).parts if part.dialects]


def lay_over(draft: Draft, logged: RunRead, noted: StepTable) -> None:
    """Replaces figures of a run's draft by those that its logs state; what they do not state stays the run's own.
    `noted`: the steps in metrics.jsonl, whose figures stay if the logs lack a part of these steps."""
    record = logged.record
    lacks_steps = _lacks_steps(logged.steps, noted)
    if lacks_steps:
        draft.flag("its logs lack steps that metrics.jsonl has: the figures of steps are those of metrics.jsonl")
    group_of = {key: group for group in _GROUPS for key in group}
    for key in RECORD_KEYS:
        if key in _KEYS_OF_RUN or (lacks_steps and key not in _SETTINGS):
            continue
        is_stated = any(getattr(record, each) is not None for each in group_of.get(key, (key,)))
        if is_stated or key not in draft:
            draft.values[key] = getattr(record, key)
            draft.sources.pop(key, None)
            if key in record.sources:
                draft.sources[key] = record.sources[key]
    if record.step_s is not None and not lacks_steps:  # of the steps in metrics.jsonl, whose step_s it is no more
        draft.flags = [flag for flag in draft.flags if getattr(flag, "kind", "") != ROUGH_STEP]
    draft.values["settings"] = record.settings | {"program": record.dialect} | draft.values["settings"]
    draft.values["versions"] = draft.values["versions"] | record.versions
    for text, kind in record.all_flags:
        if kind != ABSENT:  # a script need not print all figures; a log alone names those that are missing
            draft.flag(text, kind)


def _lacks_steps(logged: StepTable, noted: StepTable) -> bool:
    """Whether a part of the steps that were noted while the program ran is not in its logs: a log is gone or cut."""
    noted_steps, logged_steps = (steps["step"][np.isfinite(steps["step"])] for steps in (noted, logged))
    is_numbered = not isinstance(logged, LogSteps) or logged.numbered
    if not len(noted_steps) or not len(logged_steps) or not is_numbered:
        return False
    # A log may have a line every ten steps, and a bar of each step.
    spacing = float(np.median(np.diff(logged_steps))) if len(logged_steps) > 1 else 1.0
    missing = max(logged_steps.min() - noted_steps.min(), noted_steps.max() - logged_steps.max())
    return bool(missing > 2 * max(1.0, spacing))
