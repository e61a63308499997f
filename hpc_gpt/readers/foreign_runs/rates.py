"""What a program's own rates and counts tell of a run whose settings it does not print."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from hpc_gpt.readers.foreign_runs.draft import Draft
from hpc_gpt.readers.foreign_runs.run_steps import RunSteps
from hpc_gpt.readers.part import Part

_MOST_GPUS = 64  # of more, rates of three digits do not tell one more or less
_STAGE = re.compile(r"(\d{1,7}) STAGE=(\d{1,5})")
_ALIKE = 0.02  # the two halves of a run whose batch stays the same


def settle_gpus(draft: Draft, steps: RunSteps) -> None:
    """How many GPUs the tokens a second of the whole job are of, where it prints those of one GPU too."""
    with np.errstate(all="ignore"):
        ratio = steps["tokens_per_s"] / steps["tokens_per_s_gpu"]
    ratio = ratio[np.isfinite(ratio)]
    if "gpus" in draft or not len(ratio):
        return
    gpus = np.round(ratio)
    if 1 <= gpus[0] <= _MOST_GPUS and (gpus == gpus[0]).all() and (np.abs(ratio - gpus) < 0.25).all():
        draft.infer("gpus", int(gpus[0]), f"tokens_per_s / tokens_per_s of one GPU, the same over {len(ratio)} lines")


def consumed_by_step(steps: RunSteps) -> float | None:
    """Tokens that one step consumed, by the count of all so far; None where that is not known or changed."""
    known = np.flatnonzero(np.isfinite(steps["consumed_tokens"]) & np.isfinite(steps["step"]) & steps.counts)
    if len(known) < 3 or not steps.numbered:
        return None
    of, tokens = steps["step"][known], steps["consumed_tokens"][known]
    middle = len(known) // 2
    with np.errstate(all="ignore"):
        each = [float((tokens[b] - tokens[a]) / (of[b] - of[a])) for a, b in ((0, middle), (middle, -1), (0, -1))]
    alike = each[2] > 0 and max(abs(each[0] / each[2] - 1), abs(each[1] / each[2] - 1)) <= _ALIKE
    return each[2] if alike else None


def settle_stages(draft: Draft, parts: Sequence[Part]) -> None:
    """The layout by DeepSpeed's word of each stage, which the first of its replicas gives: `RANK=2 STAGE=1`.

    Only where those that speak hold all parameters together: else some stages are not in the log.
    """
    found: dict[tuple[int, int], float] = {}
    for name, (params, _) in ((name, each) for part in parts for name, each in part.rank_params.items()):
        if match := _STAGE.fullmatch(name):
            found[int(match[1]), int(match[2])] = params
    total = draft.whole("params_of_ranks")
    stages = {stage for _, stage in found}
    if not total or len(found) % max(1, len(stages)) or abs(sum(found.values()) - total) > 0.5:
        return
    source = f"the {len(found)} ranks that name their stage hold all parameters ({draft.sources['params_of_ranks']})"
    draft.infer("pp", len(stages), source)
    draft.infer("tp", len(found) // len(stages), source)
