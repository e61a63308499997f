"""`python -m hpc_gpt.launcher.attempts.siblings RUN ATTEMPT`: job.sh tells the user's queued runs of bad nodes.

The attempt is over, and its run continues or has ended. If the attempt has put nodes on the list for every run, the
jobs of the same user and profile that have not started exclude them, too: not elements of arrays, not jobs that name
their nodes, and none that would have too few nodes left. `excluded.json` in the run of such a job has {node: the run
that found it bad}.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hpc_gpt.core.ends import bad_nodes
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.files import replace_whole
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.slurm.clients import ask
from hpc_gpt.core.slurm.environment import submission_environment
from hpc_gpt.core.slurm.hosts import expand_hosts

_MOST_JOBS, _LIMIT_S = 64, 20.0


class QueuedJob(NamedTuple):
    """A job of a run that has not started, and the nodes that it excludes."""

    job_id: str
    run: RunFolder
    excluded: frozenset[str]


def tell(run: RunFolder, nodes: Sequence[str]) -> None:
    """Adds `nodes` to what the queued jobs of the same profile exclude. Prints a line for each job that was changed or
    refused. Raises SlurmUnreachable."""
    until = time.monotonic() + _LIMIT_S
    for job in _queued_jobs(run.resolved().cluster.name, until):
        new = [node for node in nodes if node not in job.excluded]
        if job.run.path == run.path or not new:
            continue
        wanted = job.excluded | set(new)
        if not _can_start(job, wanted, until) and _can_start(job, job.excluded, until):
            print(f"note: job {job.job_id} may still get {','.join(new)}: without, Slurm has too few nodes for it")
        elif _exclude(job, wanted, job.run.told_nodes() | dict.fromkeys(new, run.run_id), until):
            print(f"job {job.job_id} of run {job.run.run_id} excludes {','.join(new)}, too")


def forgive(cluster: str, node: str) -> int:
    """Takes a node off the queued jobs that were told of it; returns their number. Raises SlurmUnreachable."""
    until = time.monotonic() + _LIMIT_S
    jobs = [job for job in _queued_jobs(cluster, until) if node in job.run.told_nodes()]
    left = [{name: by for name, by in job.run.told_nodes().items() if name != node} for job in jobs]
    return sum(_exclude(job, job.excluded - {node}, nodes, until) for job, nodes in zip(jobs, left, strict=True))


def _queued_jobs(cluster: str, until: float) -> Iterator[QueuedJob]:
    command = ["squeue", "--noheader", "--states=PENDING", f"--user={os.getuid()}", "--format=%i|%n|%x|%o"]
    for line in ask(command, timeout_s=until - time.monotonic()).stdout.splitlines()[:_MOST_JOBS]:
        job_id, named, excluded, script = line.split("|", 3)
        run = RunFolder(Path(script.partition("/job.sh")[0]))
        try:
            is_sibling = run.job_script.is_file() and not run.attempts() and run.resolved().cluster.name == cluster
            if job_id.isdecimal() and named in ("", "(null)") and is_sibling:
                yield QueuedJob(job_id, run, frozenset(expand_hosts(excluded) if excluded != "(null)" else ()))
        except (UserError, ValueError):  # a damaged run, or a list in another form
            continue


def _can_start(job: QueuedJob, excluded: frozenset[str], until: float) -> bool:
    """Whether Slurm would ever start the job without these nodes: asked as in continue.sh.j2."""
    command = ["sbatch", "--quiet", "--test-only", f"--exclude={','.join(sorted(excluded))}", str(job.run.job_script)]
    return ask(command, submission_environment(os.environ, {}), timeout_s=until - time.monotonic()).code == 0


def _exclude(job: QueuedJob, nodes: frozenset[str], notes: dict[str, str], until: float) -> bool:
    command = ["scontrol", "update", f"JobId={job.job_id}", f"ExcNodeList={','.join(sorted(nodes))}"]
    answer = ask(command, timeout_s=until - time.monotonic())
    if answer.code != 0:
        print(f"note: Slurm does not change the nodes of job {job.job_id}: {answer.sentence}")
        return False
    replace_whole(job.run.path / "excluded.json", json.dumps({"nodes": notes}) + "\n")
    return True


def main(arguments: Sequence[str]) -> int:
    run = RunFolder(Path(arguments[0]))
    attempt = run.attempt(int(arguments[1]))
    nodes = bad_nodes.found(run.resolved().cluster.name, run.run_id, attempt.started().get("started") or 0.0)
    try:
        tell(run, nodes)
    except (UserError, OSError) as fault:
        print(f"note: queued runs were not told of {','.join(nodes)}: {fault}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
