"""`python -m hpc_gpt.launcher.attempts.siblings RUN ATTEMPT`: job.sh tells the user's queued runs of bad nodes.

The attempt is over, and its run continues or has ended. If the attempt has put nodes on the list for every run, the
jobs of the same user and profile that have not started exclude them, too: not elements of arrays, not jobs that name
their nodes, and none that would have too few nodes left. `excluded.json` in the run of such a job has {node: the run
that found it bad}.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.files import replace_whole
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.slurm.clients import ask, squeue_rows
from hpc_gpt.core.slurm.environment import submission_environment
from hpc_gpt.core.slurm.hosts import expand_hosts

_MOST_JOBS = 64


def tell(run: RunFolder, nodes: Sequence[str]) -> None:
    """Adds `nodes`, which `run` has found bad, to what the queued jobs of the same profile exclude. Prints a line for
    each job that was changed or refused. Raises SlurmUnreachable."""
    for job_id, sibling, excluded in _queued_jobs(run.resolved().cluster.name):
        new = [node for node in nodes if node not in excluded]
        wanted = excluded | set(new)
        if new and not _can_start(sibling, wanted) and _can_start(sibling, excluded):
            print(f"note: job {job_id} may still get {','.join(new)}: without, Slurm has too few nodes for it")
        elif new and _exclude(job_id, sibling, wanted, sibling.told_nodes() | dict.fromkeys(new, run.run_id)):
            print(f"job {job_id} of run {sibling.run_id} excludes {','.join(new)}, too")


def forgive(cluster: str, node: str) -> int:
    """Takes a node off the queued jobs that were told of it; returns their number. Raises SlurmUnreachable."""
    changed = 0
    for job_id, run, excluded in _queued_jobs(cluster):
        if (told := run.told_nodes()).pop(node, None):
            changed += _exclude(job_id, run, excluded - {node}, told)
    return changed


def _queued_jobs(cluster: str) -> Iterator[tuple[str, RunFolder, frozenset[str]]]:
    """(id, run, the nodes that it excludes) of each job of a run that has not started."""
    command = ["squeue", "--noheader", "--states=PENDING", f"--user={os.getuid()}", "--format=%i|%n|%x|%o"]
    for job_id, named, excluded, script in squeue_rows(ask(command), 4)[:_MOST_JOBS]:
        run = RunFolder(Path(script.partition("/job.sh")[0]))
        try:
            is_sibling = run.job_script.is_file() and not run.attempts() and run.resolved().cluster.name == cluster
            if job_id.isdecimal() and named in ("", "(null)") and is_sibling:
                yield job_id, run, frozenset(expand_hosts(excluded) if excluded != "(null)" else ())
        except (UserError, ValueError):  # a damaged run, or a list in another form
            continue


def _can_start(run: RunFolder, excluded: frozenset[str]) -> bool:
    """Whether Slurm would ever start the job without these nodes: asked as in continue.sh.j2."""
    command = ["sbatch", "--quiet", "--test-only", f"--exclude={','.join(sorted(excluded))}", str(run.job_script)]
    return ask(command, submission_environment(os.environ, {})).code == 0


def _exclude(job_id: str, run: RunFolder, nodes: frozenset[str], told: dict[str, str]) -> bool:
    answer = ask(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(sorted(nodes))}"])
    if answer.code != 0:
        print(f"note: Slurm does not change the nodes of job {job_id}: {answer.sentence}")
        return False
    replace_whole(run.path / "excluded.json", json.dumps({"nodes": told}) + "\n")
    return True


def main(arguments: Sequence[str]) -> int:
    run = RunFolder(Path(arguments[0]))
    nodes = (run.attempt(int(arguments[1])).folder / "bad-nodes").read_text(encoding="utf-8").split()
    try:
        tell(run, nodes)
    except (UserError, OSError) as fault:
        print(f"note: queued runs were not told of {','.join(nodes)}: {fault}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
