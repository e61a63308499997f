"""Where the time of an attempt went. Goodput is the share of the allocated time that went into steps that count."""

from collections.abc import Mapping

import numpy as np

from hpc_gpt.core.ends.failures import CLASSES
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.reader.records.attempts import AttemptRead
from hpc_gpt.reader.steps import Mask

# `start`: until the first step begins, and that step's warm-up. `saves`: the steps wait for them; a write in the
# background costs nothing. `lost`: steps that a later attempt made again, and the time after the last step of a failed
# attempt. `between`: from the end of the ranks to the next start in the same job. `spares`: idle nodes.
PARTS = ("steps", "start", "compile", "preflight", "saves", "evaluation", "lost", "between", "spares", "other")


def seconds_by(
    read: AttemptRead, counts: Mask, span_s: float, over: float, ended: str, has_saves: bool
) -> dict[str, float]:
    """Seconds of each part of PARTS in an attempt of `span_s` seconds that ended at epoch seconds `over`; their sum is
    `span_s`. `counts`: which of its steps count. `ended`: its class. `has_saves`: its steps wait only for evaluations
    and saves, as our trainer's do; the pauses of another program are `other`.

    All times are from rank 0 and its host. A step's time is in its line; the pause before it belongs to the evaluation
    and the save after the line before.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    preflight_s = _figure(read_stored(read.attempt.preflight), "took_s")
    steps, at = read.steps, read.steps["at"]
    began = read.start_s or 0.0
    if not np.isfinite(at).any():
        parts["start"] = max(0.0, span_s - preflight_s)
    else:
        rows = np.isfinite(at)
        at, counts, step = at[rows], counts[rows], steps["step"][rows]
        step_s, eval_s, save_s = (
            np.nan_to_num(steps[name][rows], nan=np.nan) for name in ("step_s", "eval_s", "save_s")
        )
        each = np.maximum(
            1, np.diff(step, prepend=read.first_step - 1 if np.isfinite(read.first_step) else step[0] - 1)
        )
        gaps = np.maximum(0, np.diff(at, prepend=began))
        made_s = np.minimum(gaps, np.where(np.isfinite(step_s), step_s * each, gaps))
        # The first line's time holds the warm-up, which is no step's.
        usual_s = float(np.nanmedian(made_s[1:] / each[1:])) * each[0] if len(made_s) > 1 else made_s[0]
        first_s = min(made_s[0], usual_s)
        warm_up_s, made_s[0] = made_s[0] - first_s, first_s
        pauses = np.append((gaps - made_s)[1:], max(0.0, over - at[-1]))
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
        parts["compile"], parts["start"] = compile_s, max(0.0, start_s - compile_s - preflight_s)
    parts["preflight"] = preflight_s
    total = sum(parts.values())
    # Clocks of two hosts may differ, and the end may have been noted before the last line: the parts fill the span.
    if total > span_s:
        return {name: seconds * span_s / total for name, seconds in parts.items()}
    return parts | {"other": span_s - total}


def _figure(table: Mapping[str, object], key: str) -> float:
    value = table.get(key)
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else 0.0
