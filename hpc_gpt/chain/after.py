"""`python -m hpc_gpt.chain.after RUN ATTEMPT CLASS WORDS EXCLUDED [put-back]`: job.sh asks what is next.

The ranks have left. CLASS and WORDS are how the job ended by Slurm's word, EXCLUDED the nodes that it leaves out;
`put-back` says that Slurm starts the same job again. Settles how the attempt ended, judges, writes ended.json and
next.json, and prints one line for the script, whose hands alone are on Slurm:

    hpc-gpt-next again PAUSE_S =NODES JOBS    goes on after so many seconds; nodes to exclude, `-` for those it has now
    hpc-gpt-next stop 0 - JOBS                does not

NODES and JOBS are joined by commas, `-` for no jobs. JOBS are those of the run that may be waiting as links of its
chain.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpc_gpt.chain.decide import nodes_left_out, past_of, rules_of, write_verdict
from hpc_gpt.chain.judge import judge
from hpc_gpt.chain.settle import settle
from hpc_gpt.errors import RunFolderError, UserError
from hpc_gpt.runs import bad_nodes
from hpc_gpt.runs.bad_nodes import NODE
from hpc_gpt.runs.beats import read_beats, slow_nodes
from hpc_gpt.runs.retries import LONGEST_PAUSE_S
from hpc_gpt.runs.run_folder import Attempt, RunFolder

MARK = "hpc-gpt-next"


def decide_next(
    run: RunFolder, attempt: Attempt, slurm: str, words: str, excluded: Sequence[str], put_back: bool, now: float
) -> str:
    """Writes what is settled and judged of an attempt that is over, and gives the script's line.

    Of an attempt that is judged already, the line alone: a script asks again whose signal came in between.
    """
    links = other_jobs(run, str(attempt.started().get("job_id") or ""))
    if found := attempt.verdict():
        nodes = _exclusion(run, attempt, _left_out(found), excluded)
        return script_line(found.get("go_on") is True, _pause_s(found), nodes, links)
    resolved = run.resolved()
    settled = settle(attempt, slurm, words)
    step = attempt.last_metrics().get("step")
    with _disk_that_may_be_full():
        attempt.write_ended(settled.ended, settled.cause, step if isinstance(step, int) else 0, node=settled.node)
    if settled.node is not None:
        why = f"{settled.ended}: {settled.cause}" if settled.cause else settled.ended
        bad_nodes.note(resolved.cluster.name, settled.node, why, run.run_id, resolved.cluster.bad_node_hours)
    for slow in slow_nodes(read_beats(attempt.beats)):
        hours = resolved.cluster.bad_node_hours
        bad_nodes.note(resolved.cluster.name, slow.node, f"slow: {slow}", run.run_id, hours, sure=True)
    past = past_of(run, attempt, settled, resolved, now, over=attempt.number)
    verdict = judge(past, rules_of(resolved), asked_to_end(run, attempt))
    exclude = nodes_left_out(run, resolved, past, now) if verdict.go_on else []
    with _disk_that_may_be_full():
        write_verdict(run, attempt, verdict, past, exclude, now, settled.node, settled.cause, put_back)
    if not verdict.go_on and not put_back:
        forget_stop(run, attempt)
    return script_line(verdict.go_on, verdict.pause_s, _exclusion(run, attempt, exclude, excluded), links)


def _exclusion(run: RunFolder, attempt: Attempt, exclude: Sequence[str], excluded: Sequence[str]) -> str:
    """The nodes that the job is to exclude from now on: what its user excludes, and `exclude`; what earlier verdicts
    left out and this one does not comes back. `-` where it does that already."""
    ours = {node for each in run.attempts() if each.number < attempt.number for node in _left_out(each.verdict())}
    wanted = (set(excluded) - ours) | set(exclude)
    return "-" if wanted == set(excluded) else "=" + ",".join(sorted(wanted))


def _left_out(verdict: Mapping[str, Any]) -> list[str]:
    """The nodes that a next.json excludes; what is no host's name is none, whoever wrote it."""
    nodes = verdict.get("exclude")
    return [node for node in nodes if isinstance(node, str) and NODE.fullmatch(node)] if isinstance(nodes, list) else []


def _pause_s(verdict: Mapping[str, Any]) -> float:
    pause = verdict.get("pause_s")
    if not isinstance(pause, int | float):
        return 0.0
    return float(pause) if 0 <= pause <= LONGEST_PAUSE_S else 0.0


def asked_to_end(run: RunFolder, attempt: Attempt) -> str:
    """How `hpc-gpt cancel` or `hpc-gpt stop` wants the attempt's job to end; empty where nobody has asked."""
    job_id = str(attempt.started().get("job_id") or "")
    if not job_id:
        return ""
    if run.cancelled_mark(job_id).exists():
        return "cancelled"
    return "stopped" if run.stop_mark(job_id).exists() else ""


def forget_stop(run: RunFolder, attempt: Attempt) -> None:
    """The attempt's job has ended as `hpc-gpt stop` asked: who requeues it by hand has a newer wish."""
    with suppress(OSError):
        run.stop_mark(str(attempt.started().get("job_id") or "")).unlink(missing_ok=True)


def other_jobs(run: RunFolder, job_id: str) -> list[str]:
    """The jobs that the run was handed to Slurm as, beside this one. Words for a shell: ids and nothing else."""
    jobs = dict.fromkeys(str(line["job_id"]) for line in run.submissions() if line.get("job_id"))
    return [each for each in jobs if each != job_id and re.fullmatch(r"[0-9]+(_[0-9]+)?", each)]


@contextmanager
def _disk_that_may_be_full() -> Iterator[None]:
    """The script is told what to do even where nothing can be written down."""
    try:
        yield
    except RunFolderError as fault:
        print(f"not written down: {fault}", file=sys.stderr, flush=True)


def script_line(again: bool, pause_s: float, nodes: str, links: Sequence[str]) -> str:
    """The words that job.sh reads."""
    jobs = ",".join(links) or "-"
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
