"""`python -m hpc_gpt.trainer.preflight.script_node`: puts the job back into the queue when its script's node is dead.

A job with spare nodes outlives a dead node (--no-kill). If that was the node of its script, Slurm would leave it
running without one until its limit. So preflight.nodes starts this beside the ranks, on another node of the job; it
ends with the job. Environment: HPC_GPT_RUN, HPC_GPT_ATTEMPT and SLURM_JOB_ID.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

from hpc_gpt.core.ends.end_policy import is_put_back, shown_as
from hpc_gpt.core.ends.state import SLURM_RUNS
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.slurm.clients import ask
from hpc_gpt.core.slurm.hosts import expand_hosts, first_host

MODULE = "hpc_gpt.trainer.preflight.script_node"
_EVERY_S = 10.0


def watch(attempt: Attempt, job_id: str) -> None:
    """Waits until the script's node is dead, and requeues the job; returns early if no restart in the job follows the
    attempt, or if the next one has its own watch."""
    node = first_host(attempt.started().get("node_list"))
    while not _is_over(attempt):
        try:
            shown = ask(["scontrol", "--oneliner", "show", "job", job_id]).stdout
            alive = expand_hosts(shown_as(shown, "NodeList"))
            if shown and (shown_as(shown, "JobState") not in SLURM_RUNS or is_put_back(attempt, shown)):
                return
            if alive and node not in alive:
                # Slurm's own words, by which the attempt's end is judged; after the requeue nobody may read a line.
                print(f"Node failure on {node}, where the job's script ran: scontrol requeue {job_id}", file=sys.stderr)
                answer = ask(["scontrol", "requeue", job_id])
                if answer.code == 0:
                    return
                print(answer.sentence, file=sys.stderr)
        except (UserError, ValueError) as fault:  # the controller may be away for a while
            print(f"watch of the script's node: {fault}", file=sys.stderr)
        time.sleep(_EVERY_S)


def _is_over(attempt: Attempt) -> bool:
    verdict = attempt.verdict()
    ends = bool(verdict) and verdict.get("in_job") is not True
    return ends or (attempt.folder.parent / str(attempt.number + 1)).is_dir()


def main() -> None:
    attempt = RunFolder(Path(os.environ["HPC_GPT_RUN"])).attempt(int(os.environ["HPC_GPT_ATTEMPT"]))
    # Not through srun, which would print at each attempt's end that it ends this.
    with attempt.log.open("a", encoding="utf-8", buffering=1) as log, contextlib.redirect_stderr(log):
        watch(attempt, os.environ["SLURM_JOB_ID"])


if __name__ == "__main__":
    main()
