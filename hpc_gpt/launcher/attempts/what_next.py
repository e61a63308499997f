"""`python -m hpc_gpt.launcher.attempts.what_next RUN ATTEMPT CODE SHOWN [WAITED]`: job.sh asks what follows an attempt.

The ranks have ended. The script passes facts: CODE is srun's exit code, SHOWN the output of `scontrol show job`.
Classifies the end of the attempt, judges it, writes ended.json and next.json, and prints one line for the script. Only
the script gives commands to Slurm.

    hpc-gpt-next again PAUSE_S =NODES JOBS CODE    another attempt in PAUSE_S seconds; nodes to exclude, `-`: no change
    hpc-gpt-next restart PAUSE_S =NODES JOBS CODE  the same, in this job; after a pause the script asks again, with the
                                                   exit code of its wait as WAITED, as the job may end by now
    hpc-gpt-next stop 0 - JOBS CODE                no other attempt

NODES and JOBS are joined by commas, `-` for no jobs. JOBS are the run's other jobs, which may be waiting in its chain.
CODE is the exit code of the first rank that failed, else srun's.
"""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_gpt.core.ends import bad_nodes
from hpc_gpt.core.ends.end_policy import end_by_script, exit_code, first_failure, is_put_back, shown_as
from hpc_gpt.core.ends.failures import GOOD, LONGEST_PAUSE_S
from hpc_gpt.core.ends.program_end import at_limit
from hpc_gpt.core.errors import ConfigError, UserError
from hpc_gpt.core.processes import lock
from hpc_gpt.core.processes.find_processes import end_run_on
from hpc_gpt.core.processes.heartbeats import read_heartbeats
from hpc_gpt.core.processes.slow_ranks import slow_ranks
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.core.slurm.hosts import expand_hosts
from hpc_gpt.core.slurm.left_steps import end_left_steps
from hpc_gpt.launcher.attempts.decisions import (
    NEXT_MARK,
    classify,
    conclude,
    forget_stop,
    look_again,
    measure,
    other_jobs,
    say_note,
    script_holder,
    with_free_space,
)
from hpc_gpt.launcher.attempts.draft import Draft, ShownJob
from hpc_gpt.launcher.attempts.script_end import end_script

# The killed steps of a script leave its nodes within so many seconds, or its next attempt comes from the queue.
_STEPS_S = 60.0


def decide_next(
    run: RunFolder, attempt: Attempt, slurm: str, cause: str, job: ShownJob, now: float, waited: int | None = None
) -> str:
    """Classifies and judges an attempt that has ended, writes the result, and returns the line for the script.

    `slurm` and `cause` are as in `classify`. If the attempt is already judged, it only returns the line: a script that
    a signal interrupted asks twice. `waited`: the exit code of the script's wait, if it has waited for a restart in the
    job.
    """
    job_id = attempt.job_id
    others = ",".join(other_jobs(run, job_id)) or "-"
    if not attempt.verdict():
        resolved = run.resolved()
        say_note(run)
        end = with_free_space(run, classify(attempt, slurm, cause, cancelled=run.is_cancelled(job_id)))
        for node, slow in slow_ranks(read_heartbeats(attempt.heartbeats)).nodes.items():
            hours = resolved.cluster.bad_node_hours
            bad_nodes.note(resolved.cluster.name, node, f"slow: {slow}", run.run_id, hours, sure=True)
        wish = run.asked_to_end(job_id)
        draft = measure(Draft(run, attempt, resolved, end, now, job, attempt.number, wish))
        verdict = conclude(draft)
        again, pause_s, exclude = verdict.go_on, verdict.pause_s, draft.exclude
    elif waited is not None:
        look_again(run, attempt, job, now, waited)
    judged = attempt.verdict()  # missing if the disk is full: then the job goes back to the queue
    if judged:
        again, pause_s, exclude = judged.get("go_on") is True, judged.get("pause_s") or 0.0, judged.get("exclude") or []
        pause_s = pause_s if pause_s <= LONGEST_PAUSE_S and waited is None else 0.0
    if not again:
        if not job.put_back:
            forget_stop(run, attempt)
        return f"{NEXT_MARK} stop 0 - {others}"
    # Exclude the nodes that the job's user excludes, and those of this verdict: a node that only an earlier verdict
    # excludes is used again.
    earlier = [earlier_attempt.verdict().get("exclude") or [] for earlier_attempt in run.before(attempt)]
    ours = {node for nodes in (*earlier, run.told_nodes()) for node in nodes}
    wanted = (set(job.excluded) - ours) | set(exclude)
    nodes = "-" if wanted == set(job.excluded) else "=" + ",".join(sorted(wanted))
    where = "restart" if judged.get("in_job") is True else "again"
    return f"{NEXT_MARK} {where} {round(pause_s)} {nodes} {others}"


def main(arguments: Sequence[str]) -> int:
    folder, number, status, shown, *waited = arguments
    run = RunFolder(Path(folder))
    attempt, code = run.attempt(int(number)), int(status)
    message = first_failure(attempt)
    left, resolved = "", run.resolved()
    if resolved.script is not None:  # the exit code of the script counts, whatever its steps returned
        end_script(run, attempt, code, shown)
        if code and resolved.job.restart_in_job and not waited and shown_as(shown, "JobState") == "RUNNING":
            left = end_left_steps(os.environ.get("SLURM_JOB_ID", ""), _STEPS_S)
    else:
        end_run_on(run, 0.0)  # a rank that was killed has ended nothing, and Slurm may have lost sight of it
        code = exit_code(message, code)
    # At the time limit job.sh puts the job back before it asks.
    put_back = is_put_back(attempt, shown) or (attempt.folder / "put-back").exists()
    ran_s = None
    if not is_put_back(attempt, shown):
        with contextlib.suppress(ConfigError):  # Slurm did not answer
            ran_s = limit_s(shown_as(shown, "RunTime"))
    slurm, cause = end_by_script(run, attempt, code, message, shown, put_back)
    if runs_program(resolved):
        slurm, cause = at_limit(attempt, resolved.train.steps, slurm, cause)
    line = ""
    try:
        job, ended = ShownJob(_excluded(shown), put_back, ran_s, shown, left), int(waited[0]) if waited else None
        line = decide_next(run, attempt, slurm, cause, job, time.time(), ended)
        if bad := bad_nodes.found(resolved.cluster.name, run.run_id, attempt.started().get("started") or 0.0):
            with contextlib.suppress(OSError):  # job.sh starts siblings.py with them, once the run goes on
                (attempt.folder / "bad-nodes").write_text(" ".join(bad), encoding="utf-8")
        code = 0 if waited and attempt.verdict().get("ended") in GOOD else code
        print(f"{line} {code}", flush=True)
    except UserError as fault:
        print(f"cannot decide what comes next: {fault}", file=sys.stderr)
        return 1
    finally:
        if not line.startswith(f"{NEXT_MARK} restart"):
            lock.release(run, script_holder(attempt.job_id))
    return 0


def _excluded(shown: str) -> list[str]:
    """The nodes that the job excludes; none if Slurm prints them in an unknown form."""
    text = shown_as(shown, "ExcNodeList")
    try:
        return [] if text in ("", "(null)") else expand_hosts(text)
    except ValueError:
        print(f"warning: ExcNodeList={text} cannot be read", file=sys.stderr)
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
