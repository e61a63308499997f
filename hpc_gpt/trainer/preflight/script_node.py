"""`python -m hpc_gpt.trainer.preflight.script_node`: puts the job back into the queue when its script's node is dead.

A job with spare nodes outlives a dead node (--no-kill). If that was the node of its script, Slurm would leave it
running without one until its limit. So preflight.nodes starts this beside the ranks, on another node of the job; it
ends with the job. Environment: HPC_GPT_RUN, HPC_GPT_ATTEMPT and SLURM_JOB_ID.
"""

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


def watch(attempt: Attempt, job_id: str) -> str:
    """Waits until the script's node is dead, and requeues the job; returns what it did, or why it stops."""
    node = first_host(attempt.started().get("node_list"))
    while True:
        try:
            shown = ask(["scontrol", "--oneliner", "show", "job", job_id]).stdout
            alive = expand_hosts(shown_as(shown, "NodeList"))
            if shown and (shown_as(shown, "JobState") not in SLURM_RUNS or is_put_back(attempt, shown)):
                return "the job ends"
            if alive and node not in alive:
                last = attempt.last_metrics().get("step")
                step = last if isinstance(last, int) else 0
                attempt.write_ended(
                    "node_failure", f"node {node}, on which the job's script ran, is dead", step, node=node
                )
                answer = ask(["scontrol", "requeue", job_id])
                if answer.code == 0:
                    return f"node {node} of the job's script is dead, so job {job_id} goes back to the queue"
                print(f"scontrol requeue {job_id}: {answer.sentence}", file=sys.stderr, flush=True)
        except (UserError, ValueError) as fault:  # the controller may be away for a while
            print(f"watch of the script's node: {fault}", file=sys.stderr, flush=True)
        time.sleep(_EVERY_S)


def main() -> None:
    attempt = RunFolder(Path(os.environ["HPC_GPT_RUN"])).attempt(int(os.environ["HPC_GPT_ATTEMPT"]))
    print(watch(attempt, os.environ["SLURM_JOB_ID"]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
