"""What follows an attempt that has ended, for the scripts that ask.

`python -m hpc_gpt.launcher.chain.after RUN ATTEMPT CODE SHOWN`: job.sh asks what is next.

The ranks have ended. The script states facts: CODE is srun's exit code, and SHOWN what `scontrol show job` prints.
Classifies the end of the attempt, judges, writes ended.json and next.json, and prints one line for the script. Only the
script gives commands to Slurm.

    hpc-gpt-next again PAUSE_S =NODES JOBS CODE  another attempt in so many seconds; nodes to exclude, `-` for no change
    hpc-gpt-next stop 0 - JOBS CODE              no other attempt

NODES and JOBS are joined by commas, `-` for no jobs. JOBS are the run's other jobs, which may be waiting in its chain.
CODE is the exit code of the first rank that failed, else srun's.

Scripts of earlier versions name the module without its room, and times in their SHOWN are local. Some pass CODE SAID
EXCLUDED SHOWN [put-back], or CLASS CAUSE EXCLUDED [put-back], and read no CODE. SAID is srun's message on the first
rank that failed, EXCLUDED are the nodes that the job excludes, and `put-back` says that Slurm starts the same job
again.

`python -m hpc_gpt.launcher.chain.script_end RUN ATTEMPT CODE`: a job script of the user's own has ended on this
machine. Under Slurm `chain.after` concludes how it ended.
"""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpc_gpt.core.ends import bad_nodes
from hpc_gpt.core.ends.decisions import (
    NEXT_MARK,
    ReadCause,
    ShownJob,
    classify,
    conclude,
    forget_stop,
    other_jobs,
    with_free_space,
)
from hpc_gpt.core.ends.end_policy import (
    STOP,
    End,
    asks_to_requeue,
    class_of_sigterm,
    end_by_script,
    end_for,
    exit_code,
    first_failure,
    in_utc,
    is_cancelled,
    is_preempted,
    is_put_back,
    moment_of,
    shown_as,
)
from hpc_gpt.core.ends.failures import LONGEST_PAUSE_S, VAGUE, meaning
from hpc_gpt.core.ends.program_end import at_limit, end_of_program, facts_of, read_said
from hpc_gpt.core.ends.state import EXIT_0_BUT, NAN_SINCE, OWN_SIGNAL, SLURM_RUNS
from hpc_gpt.core.errors import ConfigError, UserError
from hpc_gpt.core.files import read_json
from hpc_gpt.core.process import job_of
from hpc_gpt.core.runs import lock, processes
from hpc_gpt.core.runs.heartbeats import read_heartbeats, slow_nodes
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.core.slurm.environment import as_given
from hpc_gpt.core.slurm.hosts import expand_hosts
from hpc_gpt.core.slurm.sbatch_words import LimitSignal, signal_of


def decide_next(
    run: RunFolder, attempt: Attempt, slurm: str, cause: str, job: ShownJob, now: float, read_cause: ReadCause
) -> str:
    """Classifies and judges an attempt that has ended, writes that down, and returns the line for the script.

    `slurm` and `cause` are as in `classify`. If the attempt is already judged, only the line: a script that a signal
    interrupted asks twice.
    """
    job_id = attempt.job_id
    others = ",".join(other_jobs(run, job_id)) or "-"
    if found := attempt.verdict():
        again, pause_s, exclude = found.get("go_on") is True, found.get("pause_s") or 0.0, found.get("exclude") or []
        pause_s = pause_s if pause_s <= LONGEST_PAUSE_S else 0.0
    else:
        resolved = run.resolved()
        end = with_free_space(run, classify(attempt, slurm, cause, read_cause, cancelled=run.is_cancelled(job_id)))
        for slow in slow_nodes(read_heartbeats(attempt.heartbeats)):
            hours = resolved.cluster.bad_node_hours
            bad_nodes.note(resolved.cluster.name, slow.node, f"slow: {slow}", run.run_id, hours, sure=True)
        asked = run.asked_to_end(job_id)
        verdict, exclude = conclude(run, attempt, resolved, end, now, attempt.number, job, asked)
        again, pause_s = verdict.go_on, verdict.pause_s
        if not again and not job.put_back:
            forget_stop(run, attempt)
    if not again:
        return f"{NEXT_MARK} stop 0 - {others}"
    # The nodes of the job's user, and those of this verdict: what only an earlier one excludes is used again.
    earlier = [each.verdict().get("exclude") or [] for each in run.before(attempt)]
    ours = {node for nodes in earlier for node in nodes}
    wanted = (set(job.excluded) - ours) | set(exclude)
    nodes = "-" if wanted == set(job.excluded) else "=" + ",".join(sorted(wanted))
    return f"{NEXT_MARK} again {round(pause_s)} {nodes} {others}"


def main(arguments: Sequence[str], read_cause: ReadCause, shows_utc: bool = True) -> int:
    """`shows_utc`: the times in SHOWN are UTC; else this host's."""
    folder, number, slurm, cause, *more = arguments
    run = RunFolder(Path(folder))
    attempt = run.attempt(int(number))
    code, ran_s = "", None
    if not more:
        shown = cause if shows_utc else in_utc(cause)  # the last argument is SHOWN
        message = first_failure(attempt)
        if run.resolved().script is not None:  # its exit code is the job's, whatever its steps returned
            code = f" {int(slurm)}"
            end_script(run, attempt, int(slurm), shown, read_cause)
        else:
            code = f" {exit_code(message, int(slurm))}"
        # At the time limit job.sh puts the job back before it asks.
        put_back = is_put_back(attempt, shown) or (attempt.folder / "put-back").exists()
        nodes, ran_s = _excluded(shown), None
        if not is_put_back(attempt, shown):
            with contextlib.suppress(ConfigError):  # Slurm did not answer
                ran_s = limit_s(shown_as(shown, "RunTime"))
        slurm, cause = end_by_script(run, attempt, int(code), message, shown, put_back)
        if runs_program(run.resolved()):
            slurm, cause = at_limit(attempt, run.resolved().train.steps, slurm, cause)
    else:
        put_back = "put-back" in more
        nodes = [node for node in more[0].split(",") if node and node != "-"]
        if slurm.isdecimal():
            slurm, cause = end_by_script(run, attempt, int(slurm), cause, more[1], put_back)
    try:
        line = decide_next(run, attempt, slurm, cause, ShownJob(nodes, put_back, ran_s), time.time(), read_cause)
        print(line + code, flush=True)
    except UserError as fault:
        print(f"what comes next is not decided: {fault}", file=sys.stderr)
        return 1
    finally:
        lock.release(run, lock.job_holder(attempt.job_id))
    return 0


def _excluded(shown: str) -> list[str]:
    """The nodes that the job excludes; none if Slurm names them in a form that is not known."""
    text = shown_as(shown, "ExcNodeList")
    try:
        return [] if text in ("", "(null)") else expand_hosts(text)
    except ValueError:
        print(f"warning: ExcNodeList={text} is not read", file=sys.stderr)
        return []


# --- the end of a job script of the user's own: its exit code, what it was asked, and what Slurm shows of the job

# Slurm signals up to a minute early.
_EARLY_S = 90.0


def end_script(run: RunFolder, attempt: Attempt, code: int, shown: str, read_cause: ReadCause) -> None:
    """Writes ended.json unless the watch has, or what Slurm says counts more; ends what the script left running."""
    end_left_over(run, attempt)
    end = _end(run, attempt, run.resolved(), code, shown)
    if end is not None:
        if end.ended in ("done", *VAGUE):
            found = read_cause(attempt)  # it compares all failures
            if found.ended == "nan" and (end.ended != "done" or (found.cause or "").startswith(NAN_SINCE)):
                end = found
            elif (end.cause or "").startswith(EXIT_0_BUT) and meaning(found.ended).in_log:
                end = replace(found, cause=f"{EXIT_0_BUT}{found.cause}")
        step = attempt.last_metrics().get("step")
        requeue = asks_to_requeue(run, attempt, end)
        attempt.write_ended(end.ended, end.cause, step if isinstance(step, int) else 0, requeue, note=end.note)


def _end(run: RunFolder, attempt: Attempt, resolved: Resolved, code: int, shown: str) -> End | None:
    """The end of a script, None if what Slurm says or its log says counts more."""
    state = shown_as(shown, "JobState")
    if is_cancelled(run, attempt):
        return None
    facts = facts_of(attempt, code, resolved.train.steps, read_said(attempt))
    if resolved.cluster.scheduler == "slurm" and is_put_back(attempt, shown):
        # A requeue by hand, or by the script itself, starts it again whatever it has made.
        return end_of_program(facts) if facts.is_finished and code and is_preempted(attempt) else None
    if asked := str(read_json(attempt.folder / STOP).get("reason") or ""):
        end = end_for(asked, resolved, lambda: class_of_sigterm(run, attempt, shown, time.time()))
        end = End(end.ended, end.cause if not code else f"{end.cause}; the script ended with exit code {code}")
        return end_of_program(replace(facts, asked=end))
    if state and state not in SLURM_RUNS and not facts.is_finished:
        return None
    given = _own_signal(resolved)
    if given is not None and _is_sent(given, shown):
        heard = attempt.heard(given.number) if given.to_shell else None  # else for its steps
        facts = replace(facts, signal=f"{OWN_SIGNAL}{given.name} before the time limit", heard=heard)
    return end_of_program(facts)


def _own_signal(resolved: Resolved) -> LimitSignal | None:
    """The script's own --signal; None without one."""
    facts = resolved.script
    return signal_of(facts.signal) if facts is not None and facts.signal else None


def _is_sent(given: LimitSignal, shown: str) -> bool:
    """Whether Slurm can have sent a script's own signal by now."""
    end = moment_of(shown_as(shown, "EndTime"))
    return end is not None and time.time() >= end - given.lead_s - _EARLY_S


def end_left_over(run: RunFolder, attempt: Attempt, task: int | None = None) -> None:
    """Kills the processes on this node that an attempt, or one of its tasks, has started in the job of this process, as
    slurmstepd does at the end of a job."""
    processes.end_processes(run, attempt, _own_job(), task)


def _own_job() -> tuple[bytes, bytes]:
    text = b"\0".join(b"%b=%b" % pair for pair in os.environb.items())
    return job_of("self", as_given(text))


def end_here(arguments: Sequence[str], read_cause: ReadCause) -> int:
    run = RunFolder(Path(arguments[0]))
    attempt, code = run.attempt(int(arguments[1])), int(arguments[2])
    end_script(run, attempt, code, "", read_cause)
    end = attempt.ended()
    if not end and code:
        found = with_free_space(run, classify(attempt, "error", f"exit code {code}", read_cause))
        attempt.write_ended(found.ended, found.cause, int(attempt.last_metrics().get("step") or 0))
    return 0
