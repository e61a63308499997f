"""`python -m hpc_gpt.chain.after RUN ATTEMPT CLASS WORDS EXCLUDED [put-back]`: job.sh asks what is next.

The ranks have ended. CLASS and WORDS say how the job ended by Slurm, EXCLUDED are the nodes that the job excludes, and
`put-back` says that Slurm starts the same job again. Classifies the end of the attempt, judges, writes ended.json and
next.json, and prints one line for the script. Only the script gives commands to Slurm.

    hpc-gpt-next again PAUSE_S =NODES JOBS    another attempt in so many seconds; nodes to exclude, `-` for no change
    hpc-gpt-next stop 0 - JOBS                no other attempt

NODES and JOBS are joined by commas, `-` for no jobs. JOBS are the run's other jobs, which may be waiting in its chain.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_gpt.chain.decisions import MARK, classify, conclude, forget_stop, job_of, other_jobs
from hpc_gpt.errors import UserError
from hpc_gpt.runs import bad_nodes
from hpc_gpt.runs.bad_nodes import NODE
from hpc_gpt.runs.live import read_heartbeats, slow_nodes
from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.runs.state import LONGEST_PAUSE_S


def decide_next(
    run: RunFolder, attempt: Attempt, slurm: str, words: str, excluded: Sequence[str], put_back: bool, now: float
) -> str:
    """Classify and judge an attempt that has ended, write that down, and return the line for the script.

    If the attempt is already judged, only the line: a script that a signal interrupted asks twice.
    """
    job_id = job_of(attempt)
    jobs = other_jobs(run, job_id)
    if found := attempt.verdict():
        nodes = _exclusion(run, attempt, _left_out(found), excluded)
        return _script_line(found.get("go_on") is True, _pause_s(found), nodes, jobs)
    resolved = run.resolved()
    end = classify(attempt, slurm, words, cancelled=run.is_cancelled(job_id))
    for slow in slow_nodes(read_heartbeats(attempt.heartbeats)):
        hours = resolved.cluster.bad_node_hours
        bad_nodes.note(resolved.cluster.name, slow.node, f"slow: {slow}", run.run_id, hours, sure=True)
    asked = run.asked_to_end(job_id)
    verdict, exclude = conclude(run, attempt, resolved, end, now, attempt.number, asked, put_back)
    if not verdict.go_on and not put_back:
        forget_stop(run, attempt)
    return _script_line(verdict.go_on, verdict.pause_s, _exclusion(run, attempt, exclude, excluded), jobs)


def _exclusion(run: RunFolder, attempt: Attempt, exclude: Sequence[str], excluded: Sequence[str]) -> str:
    """The nodes that the job is to exclude now, after `=`: those of its user, and `exclude`. `-` if nothing changes.

    Nodes that an earlier verdict excluded, but not this one, are used again.
    """
    ours = {node for each in run.attempts() if each.number < attempt.number for node in _left_out(each.verdict())}
    wanted = (set(excluded) - ours) | set(exclude)
    return "-" if wanted == set(excluded) else "=" + ",".join(sorted(wanted))


def _left_out(verdict: Mapping[str, Any]) -> list[str]:
    """The nodes that a next.json excludes, without anything that is no host's name."""
    nodes = verdict.get("exclude")
    return [node for node in nodes if isinstance(node, str) and NODE.fullmatch(node)] if isinstance(nodes, list) else []


def _pause_s(verdict: Mapping[str, Any]) -> float:
    pause = verdict.get("pause_s")
    if not isinstance(pause, int | float):
        return 0.0
    return float(pause) if 0 <= pause <= LONGEST_PAUSE_S else 0.0


def _script_line(again: bool, pause_s: float, nodes: str, others: Sequence[str]) -> str:
    """The line that job.sh reads."""
    jobs = ",".join(others) or "-"
    return f"{MARK} again {round(pause_s)} {nodes} {jobs}" if again else f"{MARK} stop 0 - {jobs}"


def main(arguments: Sequence[str]) -> int:
    folder, number, slurm, words, excluded = arguments[:5]
    run, put_back = RunFolder(Path(folder)), "put-back" in arguments[5:]
    nodes = [node for node in excluded.split(",") if node and node != "-"]
    try:
        print(decide_next(run, run.attempt(int(number)), slurm, words, nodes, put_back, time.time()), flush=True)
    except UserError as fault:
        print(f"what comes next is not decided: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
