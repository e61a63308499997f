"""The decision behind an attempt, written down: attempts/<n>/next.json, once and for good."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from hpc_gpt.chain.history import Past, gpu_hours, newest_saved, read_history
from hpc_gpt.chain.judge import Rules, Verdict
from hpc_gpt.chain.settle import Settled
from hpc_gpt.runs import bad_nodes
from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.settings.engines import can_resume
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.small_files import write_once


def rules_of(resolved: Resolved) -> Rules:
    """What the settings of a run say to its judge."""
    cannot = ""
    if resolved.cluster.chain == "none":
        cannot = f'chain = "none" in profile {resolved.cluster.name}'
    elif not can_resume(resolved.engine):
        cannot = "what is offloaded to NVMe is in no checkpoint"
    pause = resolved.job.retry_pause_s
    return Rules(cannot, float(resolved.cluster.retry_pause_s if pause is None else pause), resolved.job.max_gpu_hours)


def gpus_of(resolved: Resolved) -> int:
    """GPUs that a job of the run is given, the spare nodes' too."""
    return resolved.gpus + (resolved.job.spare_nodes or 0) * resolved.ranks_per_node


def past_of(
    run: RunFolder, attempt: Attempt, settled: Settled, resolved: Resolved, now: float, over: int | None
) -> list[Past]:
    """The run's attempts up to this one, which ended as settled whatever its ended.json says: a rank's own word may
    have been the first. `over` is as for read_history."""
    history = read_history(run, gpus_of(resolved), now, over)
    past = [each for each in history if each.number <= attempt.number]
    return [
        replace(each, ended=settled.ended, cause=settled.cause, node=settled.node)
        if each.number == attempt.number
        else each
        for each in past
    ]


def nodes_left_out(run: RunFolder, resolved: Resolved, past: Sequence[Past], now: float) -> list[str]:
    """The nodes that the next attempt does without: those that failed this run not long ago, and those that the
    cluster's list has for every run."""
    since = now - 3600 * resolved.cluster.bad_node_hours
    own = {each.node for each in past if each.node and each.over > since}
    return sorted(own | set(bad_nodes.left_out(resolved.cluster.name, run.run_id, now)))


def write_verdict(
    run: RunFolder,
    attempt: Attempt,
    verdict: Verdict,
    past: Sequence[Past],
    exclude: Sequence[str],
    now: float,
    node: str | None = None,
    cause: str | None = None,
    put_back: bool = False,
) -> None:
    """Writes next.json unless it is there. RunFolderError where the disk refuses.

    `put_back`: Slurm starts the same job again, whatever the verdict.
    """
    text = {
        **asdict(verdict),
        "cause": cause,
        "node": node,
        "begin": now + verdict.pause_s if verdict.go_on else None,
        "exclude": list(exclude) if verdict.go_on else [],
        "saved_step": newest_saved(run),
        "gpu_hours": round(gpu_hours(past), 6),
        "put_back": put_back,
        "time": now,
    }
    write_once(attempt.folder / "next.json", json.dumps(text) + "\n")
