"""The parts that the time of an attempt went into. Goodput is the share that went into steps that count."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpc_gpt.core.ends.failures import CLASSES
from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.processes.heartbeats import end_time_of, gpu_time, gpus_of, idle_s, ran_on_cpu
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.reader.lines.steps import Mask, StepColumn, StepTable
from hpc_gpt.reader.runs.attempts import AttemptRead
from hpc_gpt.reader.runs.draft import Draft

# `start`: until the first step begins, and that step's warm-up. `saves`: the steps wait for them; a write in the
# background costs nothing. `lost`: steps that a later attempt made again, and the time after the last step of a failed
# attempt. `between`: from its end to the next start in the same start of its job. `spares`: idle nodes.
PARTS = ("steps", "start", "compile", "preflight", "saves", "evaluation", "lost", "between", "spares", "other")


def add_gpu_hours(
    draft: Draft, resolved: Resolved, attempts: list[AttemptRead], steps: StepTable, tables: list[dict[str, Any]]
) -> None:
    """Adds the GPU-hours of the run and of each attempt (`tables`), split into PARTS. An attempt lasts from its
    start to its end, or to its last sign of life, plus the wait for a restart inside its job. Ranks on CPUs have
    only the shares of the parts."""
    if resolved.asked_gpus is None:
        return
    has_saves = engine_named(resolved.engine.name).writes_metrics
    is_on_cpu = bool(attempts) and all(ran_on_cpu(read.attempt) for read in attempts)
    hours_of: list[dict[str, float]] = []
    all_attempts = [read.attempt for read in attempts]
    for index, (read, table) in enumerate(zip(attempts, tables, strict=True)):
        over = end_time_of(read.attempt)
        gpus, span_s = gpu_time(read.attempt, gpus_of(resolved), over)
        if over and 0 < span_s <= over and (is_on_cpu or not ran_on_cpu(read.attempt)):
            counts = steps.counts[steps.attempt == read.attempt.number]
            parts = _seconds_by(read, counts, span_s, over, table["ended"], has_saves)
            following = read.attempt.next_of_job(all_attempts[index + 1 :])
            parts["between"] = between_s = idle_s(read.attempt, span_s, following)
            working = min(gpus, resolved.gpus)
            hours = {name: float(seconds) * working / 3600 for name, seconds in parts.items()}
            hours["spares"] = (span_s + between_s) * (gpus - working) / 3600
            hours_of.append(hours)
            table |= _keys(hours, is_on_cpu)
    where = f"gpus x the time of {len(hours_of)} of {len(attempts)} attempts"
    total = {name: math.fsum(hours[name] for hours in hours_of) for name in PARTS} if hours_of else {}
    for key, value in (_keys(total, is_on_cpu) if total else {}).items():
        draft.set(key, value, f"{where}, by the lines of their steps")
    if not is_on_cpu:
        draft.set("gpu_hours", math.fsum(total.values()) if total else None, where)


def _keys(hours: Mapping[str, float], is_on_cpu: bool) -> dict[str, Any]:
    """The keys `goodput` and `gpu_hours_by` of GPU-hours by part; ranks on CPUs have no GPU-hours."""
    total = math.fsum(hours.values())
    share = round(hours["steps"] / total, 6) if total else None
    return {"goodput": share, "gpu_hours_by": None if is_on_cpu else {name: hours[name] for name in PARTS}}


def _seconds_by(
    read: AttemptRead, counts: Mask, span_s: float, over: float, ended: str, has_saves: bool
) -> dict[str, float]:
    """Seconds of each part of PARTS in an attempt of `span_s` seconds that ended at epoch seconds `over`; their sum is
    `span_s`. `counts`: which of its steps count. `ended`: its class. `has_saves`: its steps wait only for evaluations
    and saves, as our trainer's do; the pauses of another program are `other`.

    All times are from rank 0 and its host. A step's time is in its line; the pause before it belongs to the evaluation
    and the save after the line before.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    preflight_s = min(span_s, _figure(read_stored(read.attempt.preflight), "took_s"))
    steps, at = read.steps, read.steps["at"]
    if not np.isfinite(at).any():
        parts["start"] = span_s - preflight_s
    else:
        rows = np.isfinite(at)
        at, counts, step = at[rows], counts[rows], steps["step"][rows]
        step_s, eval_s, save_s = (
            np.nan_to_num(steps[name][rows], nan=np.nan) for name in ("step_s", "eval_s", "save_s")
        )
        each = np.maximum(
            1, np.diff(step, prepend=read.first_step - 1 if np.isfinite(read.first_step) else step[0] - 1)
        )
        *_, last_gap = gaps = _gaps(at, read.start_s or 0.0, over, span_s)
        gaps = gaps[:-1]
        made_s = np.minimum(gaps, np.where(np.isfinite(step_s), step_s * each, gaps))
        # The first line's time holds the warm-up, which is no step's.
        usual_s = float(np.nanmedian(made_s[1:] / each[1:])) * each[0] if len(made_s) > 1 else made_s[0]
        first_s = min(made_s[0], usual_s)
        warm_up_s, made_s[0] = made_s[0] - first_s, first_s
        pauses = np.append((gaps - made_s)[1:], last_gap)
        evaluations = np.minimum(pauses, np.nan_to_num(eval_s))
        pauses -= evaluations
        # A save that ends the attempt is in its last line; before that the steps wait for nothing else.
        last_save = min(pauses[-1], float(np.nan_to_num(save_s[-1])))
        parts["saves"] = last_save + (float(pauses[:-1].sum()) if has_saves else 0.0)
        parts["evaluation"] = float(evaluations.sum())
        parts["steps"], parts["lost"] = float(made_s[counts].sum()), float(made_s[~counts].sum())
        if not read.ended or ended not in CLASSES or (retry := CLASSES[ended].retry) is None or retry.fails:
            parts["lost"] += pauses[-1] - last_save
        start_s = gaps[0] - first_s
        compile_s = min(_figure(read.measured, "compile_s"), warm_up_s)
        preflight_s = min(preflight_s, start_s - compile_s)
        parts["compile"], parts["start"] = compile_s, start_s - compile_s - preflight_s
    parts["preflight"] = preflight_s
    return parts | {"other": max(0.0, span_s - sum(parts.values()))}


def _gaps(at: StepColumn, began: float, over: float, span_s: float) -> StepColumn:
    """The seconds before each line and after the last one, `span_s` at most in all: if the clock was set, or the two
    hosts differ, the longest one holds the jump."""
    gaps = np.maximum(0.0, np.diff(at, prepend=began, append=over))
    longest = gaps.argmax()
    gaps[longest] -= min(gaps[longest], max(0.0, gaps.sum() - span_s))
    return gaps


def _figure(table: Mapping[str, object], key: str) -> float:
    value = table.get(key)
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else 0.0
