"""The end of a user's own job script, by its exit code, the requests to it, and Slurm's state of the job.

`python -m hpc_gpt.launcher.attempts.script_end RUN ATTEMPT CODE`: a job script has ended on this machine. Under Slurm
`what_next` decides how it ended.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpc_gpt.core.ends.end_policy import (
    STOP,
    End,
    asks_to_requeue,
    class_of_sigterm,
    end_for,
    is_cancelled,
    is_preempted,
    is_put_back,
    moment_of,
    shown_as,
)
from hpc_gpt.core.ends.failures import UNSPECIFIC, meaning
from hpc_gpt.core.ends.program_end import end_of_program, facts_of, read_said
from hpc_gpt.core.ends.state import EXIT_0_BUT, NAN_SINCE, OWN_SIGNAL, SLURM_RUNS
from hpc_gpt.core.files import read_json
from hpc_gpt.core.processes.find_processes import end_processes
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.environment import own_job
from hpc_gpt.core.slurm.sbatch_words import LimitSignal, signal_of
from hpc_gpt.launcher.attempts.checkpoint_failures import with_checkpoint_failure
from hpc_gpt.launcher.attempts.decisions import classify, with_free_space
from hpc_gpt.reader.runs.attempt_cause import read_cause

# Slurm signals up to a minute early.
_EARLY_S = 90.0


def end_script(run: RunFolder, attempt: Attempt, code: int, shown: str) -> None:
    """Writes ended.json, unless the watch has or Slurm's word counts more; ends what the script left running."""
    end_processes(run, attempt, own_job())
    end = _end(run, attempt, run.resolved(), code, shown)
    if end is not None:
        if end.ended in ("done", *UNSPECIFIC):
            logged = read_cause(attempt)  # which compares all failures
            if logged.ended == "nan" and (end.ended != "done" or (logged.cause or "").startswith(NAN_SINCE)):
                end = logged
            elif (end.cause or "").startswith(EXIT_0_BUT) and meaning(logged.ended).in_log:
                end = replace(logged, cause=f"{EXIT_0_BUT}{logged.cause}")
        step = attempt.last_metrics().get("step")
        requeue = asks_to_requeue(run, attempt, end)
        attempt.write_ended(end.ended, end.cause, step if isinstance(step, int) else 0, requeue, note=end.note)


def _end(run: RunFolder, attempt: Attempt, resolved: Resolved, code: int, shown: str) -> End | None:
    """The end of a script; None if Slurm's word or the log counts more."""
    state = shown_as(shown, "JobState")
    if is_cancelled(run, attempt):
        return None
    facts = facts_of(attempt, code, resolved.train.steps, read_said(attempt))
    if resolved.cluster.scheduler == "slurm" and is_put_back(attempt, shown):
        # A requeue by hand, or by the script itself, starts it again even if all its steps are made.
        return end_of_program(facts) if facts.is_finished and code and is_preempted(attempt) else None
    if reason := str(read_json(attempt.folder / STOP).get("reason") or ""):
        end = end_for(reason, resolved, lambda: class_of_sigterm(run, attempt, shown, time.time()))
        end = End(end.ended, end.cause if not code else f"{end.cause}; the script ended with exit code {code}")
        return end_of_program(replace(facts, asked=end))
    if state and state not in SLURM_RUNS and not facts.is_finished:
        return None
    limit_signal = _own_signal(resolved)
    if limit_signal is not None and _is_sent(limit_signal, shown):
        heard = attempt.heard(limit_signal.number) if limit_signal.to_shell else None  # else it is for its steps
        facts = replace(facts, signal=f"{OWN_SIGNAL}{limit_signal.name} before the time limit", heard=heard)
    return end_of_program(facts)


def _own_signal(resolved: Resolved) -> LimitSignal | None:
    """The script's own --signal; None without one."""
    facts = resolved.script
    return signal_of(facts.signal) if facts is not None and facts.signal else None


def _is_sent(limit_signal: LimitSignal, shown: str) -> bool:
    """Whether Slurm can have sent a script's own signal by now."""
    end = moment_of(shown_as(shown, "EndTime"))
    return end is not None and time.time() >= end - limit_signal.lead_s - _EARLY_S


def main(arguments: Sequence[str]) -> int:
    folder, number, status = arguments
    run = RunFolder(Path(folder))
    attempt, code = run.attempt(int(number)), int(status)
    end_script(run, attempt, code, "")
    end = attempt.ended()
    if not end and code:
        failed = with_free_space(run, classify(attempt, "error", f"exit code {code}"))
        failed, _ = with_checkpoint_failure(run, attempt, failed)
        attempt.write_ended(failed.ended, failed.cause, int(attempt.last_metrics().get("step") or 0))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
