"""How long an attempt had its GPUs, by its files: one answer for status, report and the budget.

A CPU rank of a run on this machine counts as a GPU: it is what the budget asks for.
"""

from __future__ import annotations

import contextlib

from hpc_gpt.runs.heartbeats import read_heartbeats
from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.settings.resolved import Resolved


def gpus_of(resolved: Resolved) -> int:
    """The GPUs of a job of the run, with those of spare nodes."""
    return resolved.gpus + (resolved.job.spare_nodes or 0) * resolved.ranks_per_node


def over_at(attempt: Attempt) -> float | None:
    """Epoch seconds of an attempt's end as its judge or a rank wrote it, else of the last sign of life of its ranks:
    a heartbeat or a step, else a line of the log or the start of a rank. None without any."""
    if written := attempt.verdict().get("time") or attempt.ended().get("time"):
        return float(written)
    signs = [each.time for each in read_heartbeats(attempt.heartbeats).values()]
    signs.append(attempt.last_metrics().get("time") or 0.0)
    if not any(signs):
        for path in (*attempt.logs, *attempt.ranks.glob("*.json")):
            with contextlib.suppress(OSError):
                signs.append(path.stat().st_mtime)
    return max(signs) or None


def gpu_seconds(attempt: Attempt, gpus: int, over: float | None) -> float:
    """What an attempt cost that is `over`; `gpus` unless it states its own. 0 if its start or its end is not known."""
    start = attempt.started()
    began = start.get("started")
    return max(0.0, over - began) * (start.get("gpus") or gpus) if began and over else 0.0
