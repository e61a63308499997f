"""The state of a run: the job and the attempt that decide it, their facts in the run folder, the state as text.

`core.ends.state` decides. Callers pass what Slurm says; this module gathers the facts in the run folder for them all.
"""

import contextlib
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.ends.failures import LIVE, RETRIES, STARTED, meaning
from hpc_gpt.core.ends.state import Facts, State, class_of, slurm_state, state_of
from hpc_gpt.core.format import clock, some
from hpc_gpt.core.process import Life, boot_id, life_of, pid_namespace
from hpc_gpt.core.processes.find_processes import run_on
from hpc_gpt.core.processes.lock import holder, lock_path, rest_text
from hpc_gpt.core.runs.run_folder import IN_QUEUE, Attempt, RunFolder, job_of, local_job
from hpc_gpt.core.runs.stored import read_stored

# A run that has written nothing for this long may no longer run.
SILENT_S = 600.0
# The cause of an attempt whose process on this machine was killed.
GONE = "its process is gone and wrote no end"
# The cause of a run that waited on this machine for its turn, if the process that was to start it was killed.
ENDED_BEFORE = "the process that was to start it ended before its turn"


@dataclass(frozen=True)
class AttemptEnd:
    """The end of an attempt by its files: the facts, the `cause` of that end, and `why` the run is in its state.

    `cause` and `why` differ if the judge ended the run: after a `hang` a run can end as `no_progress`.
    """

    facts: Facts
    cause: str | None
    why: str | None
    judged_at: float  # epoch seconds, 0 if it is not judged

    @property
    def is_over(self) -> bool:
        """Whether the trainer, the script or the judge has said how it ended."""
        return bool(self.facts.judged or self.facts.said)


def read_end(attempt: Attempt) -> AttemptEnd:
    """Reads the end of an attempt from ended.json and next.json; its facts have no class if both are missing."""
    verdict, end = attempt.verdict(), attempt.ended()
    said = end.get("ended") or ("unknown" if end else "")
    asks = bool(verdict.get("go_on", end.get("requeue")))
    refusal = attempt.requeue_refused() if asks else ""
    facts = Facts(
        said=said,
        judged=verdict.get("attempt_ended") or said or "unknown" if verdict else "",
        verdict=verdict.get("ended") or "",
        retried=asks and not refusal,
        in_job=asks and verdict.get("in_job") is True,
    )
    cause = verdict.get("cause") or end.get("cause")
    why = None if facts.retried or verdict.get("why") == facts.judged else verdict.get("why")
    if refusal:
        before = f"{cause}; " if cause else ""
        why = f'{before}Slurm refuses the requeue ({refusal}): chain = "singleton" in the profile needs none'
    return AttemptEnd(facts, cause, why or cause, verdict.get("time") or 0.0)


def deciding(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts up to the one that decides the run's state: without refused attempts at the end, unless all were
    refused."""
    counted = list(attempts)
    while len(counted) > 1 and str(counted[-1].ended().get("ended")) == "refused":
        counted.pop()
    return counted


def done_by(attempts: Sequence[Attempt]) -> Attempt | None:
    """The attempt that has finished the training; None if the run is not done."""
    last = next(reversed(deciding(attempts)), None)
    return last if last is not None and _is_done(read_end(last)) else None


def _is_done(end: AttemptEnd) -> bool:
    return end.is_over and state_of(end.facts).ended == "done"


@dataclass(frozen=True)
class RunState:
    """The state of a run, and what decided it."""

    state: State
    facts: Facts
    line: Mapping[str, Any]
    """The deciding job's line of submissions.jsonl; made up for a job that plain sbatch started."""
    job_id: str | None
    """The id of that job."""
    waits: bool
    """Whether that job has made no attempt yet."""
    attempt: Attempt | None
    """The last attempt that was not refused, whether its job decides or not."""
    end: AttemptEnd | None
    """The end of that attempt."""
    moved_from: Path | None = None
    """The run folder when the job was submitted; None if it was not moved."""
    run_on: Sequence[int] = ()
    """The processes of the attempt that still run although their supervisor on this machine is gone."""

    @property
    def is_settled(self) -> bool:
        """Whether the run is over by its files, so that only new files, or a job of it in Slurm, can change that."""
        by_files = self.state.by in ("next", "ended") and not self.facts.alive
        return by_files and self.state.ended in {*RETRIES} - {"unknown"}


def read_run_state(run: RunFolder, log_every: int, slurm: Mapping[str, str] | None = None) -> RunState:
    """Reads the state of a run. A healthy run may write nothing for `log_every` steps.

    `slurm`: {job id: long state name} of the jobs that Slurm knows; None if it was not asked or did not answer.
    """
    attempts = run.attempts()
    chain = newest_chain(run)
    attempt = next(reversed(deciding(attempts)), None)
    end = read_end(attempt) if attempt is not None else None
    waits = _waits(chain, attempts, end)
    live = _live_job(chain, slurm or {})
    if live is None and waits:
        live = chain[0]
    job_id = live.get("job_id") if live is not None else (attempt.job_id or None) if attempt is not None else None
    line = live if live is not None else _line_of(run, chain, attempt)
    facts = end.facts if end is not None and not waits else Facts()
    in_slurm = slurm_state(slurm.get(job_id or "", "")) if slurm is not None and is_of_slurm(line) else None
    if line.get("shared") and in_slurm in STARTED:  # the job may run another one of its runs
        is_over = end is not None and end.is_over and not end.facts.retried
        in_slurm = "pending" if waits else None if is_over else in_slurm
    facts = replace(
        facts,
        submitted=bool(chain),
        refused=bool(line.get("refused")),
        lost=bool(line.get("lost")),
        queued=waits and bool(line.get("queue")),
        began=attempt is not None and not waits,
        cancelled=run.is_cancelled(mark_of(line) or job_id),
        slurm=in_slurm,
        alive=_is_alive(run, line),
        moved=(moved := moved_from(run, line)) is not None,
    )
    if attempt is not None and facts.began and facts.slurm is None and end is not None and not end.is_over:
        facts = replace(facts, recent=silent_s(attempt) <= _longest_silence_s(attempts, log_every))
    is_decided = not facts.said or facts.judged or facts.retried or meaning(facts.said).chain == "stops"
    if facts.alive and not is_decided:
        # The process gives its lock back when it has decided that no attempt follows.
        facts = replace(facts, undecided=holder(run) is not None)
    running_on: Sequence[int] = ()
    if facts.began and facts.alive is False and end is not None and not end.is_over and (running_on := run_on(run)):
        facts = replace(facts, alive=True)
    return RunState(state_of(facts), facts, line, job_id, waits, attempt, end, moved, running_on)


def attempt_classes(run: RunFolder, attempts: Sequence[Attempt], run_state: RunState) -> list[str]:
    """The class of each attempt's end, first to last; for an attempt that may still run, the state of the run."""
    classes = []
    for index, attempt in enumerate(attempts):
        if attempt == run_state.attempt and run_state.facts.began:
            ended = class_of(run_state.facts) or run_state.state.ended
        else:
            ended = class_of(replace(facts_before(run, attempt, attempts[index + 1 :]), followed=True)) or "unknown"
        classes.append(ended)
    return classes


def facts_before(run: RunFolder, attempt: Attempt, later: Sequence[Attempt]) -> Facts:
    """The facts about the end of an attempt that `later` ones have followed. A restart in the job is no other start of
    it, and a cancel of the job was not meant for an attempt that the job has already restarted."""
    following = attempt.next_of_job(later)
    restarted = following is not None and following.restarts_in_job > 0
    cancelled = run.is_cancelled(attempt.job) and not restarted
    return replace(read_end(attempt).facts, again=following is not None and not restarted, cancelled=cancelled)


def open_jobs(run: RunFolder) -> list[str]:
    """The Slurm jobs whose state in Slurm may decide the run's state: the jobs of the newest job chain, without those
    that have ended for good by the run folder."""
    attempts = run.attempts()
    ends = {attempt.job_id: read_end(attempt) for attempt in attempts}
    jobs = [line.get("job_id") for line in newest_chain(run) if is_of_slurm(line)]
    return [job_id for job_id in jobs if job_id and (job_id not in ends or _is_open(ends[job_id]))]


def _is_open(end: AttemptEnd) -> bool:
    """Whether Slurm can still change the class of the job's last attempt, or is to start the job again."""
    facts = end.facts
    return not end.is_over or facts.retried or class_of(replace(facts, slurm="node_failure")) != class_of(facts)


def is_of_slurm(line: Mapping[str, Any]) -> bool:
    """Whether a line of submissions.jsonl belongs to a Slurm job."""
    return line.get("scheduler") == "slurm"


def mark_of(line: Mapping[str, Any]) -> str | None:
    """The name under which `hpc-gpt cancel` marks the job of a line; None if the line names no job."""
    return job_of(line) or (IN_QUEUE if line.get("queue") else None)


def other_place(line: Mapping[str, Any]) -> str | None:
    """The place of a local run, as text, if its processes are not visible from here; else None."""
    if line.get("scheduler") != "local":
        return None
    if (host := line.get("host")) not in (None, platform.node()):
        return f"on {host}"
    process = line.get("queue") or line
    is_here = process.get("pid_namespace") in (None, pid_namespace()) or process.get("boot") != boot_id()
    return None if is_here else "in another container of this machine"


def _waits(chain: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt], end: AttemptEnd | None) -> bool:
    """Whether no job of the newest job chain has made an attempt, but one still may: the run is not done, and the chain
    was submitted after the run had ended, if it has."""
    jobs = {job_of(line) for line in chain} - {""}
    if not chain or not jobs.isdisjoint(attempt.job for attempt in attempts):
        return False
    if end is None or not end.is_over or end.facts.retried:
        return True
    return not _is_done(end) and submitted_after(chain[0], attempts[-1], end.judged_at)


def submitted_after(line: Mapping[str, Any], attempt: Attempt, moment: float) -> bool:
    """Whether a job was submitted after an attempt, by the number of attempts at the submission. If the line lacks
    that, by its time: after `moment`, though the two clocks may differ."""
    before = line.get("attempts_before")
    return int(before) >= attempt.number if before is not None else float(line.get("time") or 0.0) > moment


def _live_job(chain: Sequence[Mapping[str, Any]], slurm: Mapping[str, str]) -> Mapping[str, Any] | None:
    """The line of the job that runs by Slurm's answer, else of the first job in the chain that waits."""
    for state in reversed(LIVE):
        for line in chain:
            if slurm_state(slurm.get(str(line.get("job_id")), "")) == state:
                return line
    return None


def _line_of(run: RunFolder, chain: Sequence[Mapping[str, Any]], attempt: Attempt | None) -> Mapping[str, Any]:
    """The last line of submissions.jsonl for an attempt's job, made up for a job that plain sbatch started."""
    if attempt is None or not attempt.job:
        return {}
    lines = [line for line in (*run.submissions(), *chain) if job_of(line) == attempt.job]
    return lines[-1] if lines else {"scheduler": "slurm", "job_id": attempt.job_id}


def moved_from(run: RunFolder, line: Mapping[str, Any]) -> Path | None:
    """The folder's path when `line` was submitted, if it has moved since; else None. Ranks may have made the old path
    again, without resolved.json."""
    submitted = Path(line.get("folder") or run.path)
    return submitted if submitted != run.path and not (submitted / "resolved.json").exists() else None


def _is_alive(run: RunFolder, line: Mapping[str, Any]) -> bool | None:
    """True if the process of a local job runs, False if not; None if that is not visible from here. A process that is
    not, as one in another container, has the run's lock as long as it runs."""
    process = line.get("queue") or line
    if line.get("scheduler") != "local" or process.get("pid") is None:
        return None
    life = life_of({"host": line.get("host"), **process})
    job = local_job(process)
    if life is Life.UNKNOWN and (owner := holder(run)) is not None and owner.job == job:
        life = owner.life(lock_path(run))
    if life is Life.UNKNOWN and run.is_declared_gone(job):
        return False
    return None if life is Life.UNKNOWN else life is Life.LIVES


def is_lost_here(run: RunFolder, attempt: Attempt) -> bool:
    """Whether the attempt's process on this machine is gone, with all that it had started."""
    lines = [line for line in run.submissions() if job_of(line) == attempt.job and line.get("scheduler") == "local"]
    return bool(lines) and _is_alive(run, lines[-1]) is False and not run_on(run)


def silent_s(attempt: Attempt) -> float:
    """Seconds since the attempt's folder or its files last changed."""
    newest = 0.0
    for path in (attempt.folder, *attempt.logs, attempt.metrics):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:
            continue
    return time.time() - newest


def _longest_silence_s(attempts: Sequence[Attempt], log_every: int) -> float:
    """Seconds for which a healthy run, which writes every `log_every` steps, may write nothing."""
    metrics = next((last for attempt in reversed(attempts) if (last := attempt.last_metrics())), {})
    step_s = metrics.get("step_s")
    return max(SILENT_S, max(10, 3 * log_every) * (step_s or 0.0))


# --- the newest job


def newest_submission(run: RunFolder) -> dict[str, Any]:
    """The line of submissions.jsonl for the run's newest job.

    That is the last line, or the line of an older job whose attempt is newer; it is made up for a job that plain sbatch
    started. A refused submission counts only before the first attempt.
    """
    lines, attempts = run.submissions(), run.attempts()
    if aside := _stepped_aside(attempts):  # the other jobs decide the run's state
        attempts = [attempt for attempt in attempts if attempt.job not in aside]
        lines = [line for line in lines if job_of(line) not in aside] or lines
    start = attempts[-1].started() if attempts else {}
    if job := job_of(start):
        lines = [line for line in lines if not line.get("refused")]
    last = lines[-1] if lines else {}
    # A `submit --resume` after that attempt is newer, even if it has not started.
    resumed = bool(attempts) and submitted_after(last, attempts[-1], start.get("started") or 0.0)
    if not job or resumed or job == job_of(last):
        return last
    of_job = [line for line in lines if job_of(line) == job]
    return of_job[-1] if of_job else {"scheduler": "slurm", "job_id": attempts[-1].job_id, "refused": None}


def _stepped_aside(attempts: list[Attempt]) -> set[str]:
    """The newest jobs that refused to start, because another job of the run ran or their chain had ended; empty if all
    jobs refused."""
    jobs: set[str] = set()
    for attempt in reversed(attempts):
        if attempt.ended().get("ended") != "refused":
            return jobs
        jobs.add(attempt.job)
    return set()


def newest_chain(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of the newest job's chain, first to last, without refused ones; only that job's line if it has no
    chain."""
    newest, lines = newest_submission(run), run.submissions()
    if newest not in lines:
        return [newest] if newest else []
    # A job that the last job of a chain submitted has its id in `chained_to`.
    begins = [n for n, line in enumerate(lines) if not line.get("chained_to") and line.get("link") in (None, 1)]
    place = len(lines) - 1 - lines[::-1].index(newest)
    begin = max((n for n in begins if n <= place), default=0)
    end = min((n for n in begins if n > place), default=len(lines))
    return [line for line in lines[begin:end] if line.get("job_id") and not line.get("refused")] or [newest]


# --- as text


def cancel_cause(run: RunFolder, run_state: RunState) -> str | None:
    """The text that says who cancelled a run, and when, by `hpc-gpt cancel`'s mark; None if it has no mark."""
    job = mark_of(run_state.line) or run_state.job_id
    if run_state.state.ended != "cancelled" or job is None or not run.is_cancelled(job):
        return None
    text = _cancelled_by(run, job)
    if run_state.facts.in_job:
        return f"{text}, between two attempts"
    return f"{text}, while it waited" if run_state.waits or run_state.facts.retried else text


def _cancelled_by(run: RunFolder, job: str) -> str:
    mark = run.cancelled_mark(job)
    note = read_stored(mark)
    moment = note.get("time")
    if not moment:  # a full disk left it empty
        with contextlib.suppress(OSError):
            moment = mark.stat().st_mtime
    when = time.strftime("on %Y-%m-%d at %H:%M", time.localtime(moment))
    user = note.get("user")
    return f"{user} cancelled it {when}" if user else f"hpc-gpt cancel {when}"


def cause_of_attempt(run: RunFolder, attempt: Attempt, ended: str) -> str | None:
    """The cause of an attempt that ended as class `ended`: who cancelled it, else the cause in its files."""
    if ended == "cancelled" and run.is_cancelled(attempt.job):
        return _cancelled_by(run, attempt.job)
    return read_end(attempt).cause


def run_on_note(run: RunFolder, run_state: RunState) -> str:
    """The note that processes of a run still run unsupervised, and how to end them; empty if there are none."""
    return f"{rest_text(run_state.run_on)}; hpc-gpt cancel {run.run_id}" if run_state.run_on else ""


def moved_note(run_state: RunState) -> str:
    """The note on a run that is over and whose folder was moved before its end; empty for any other."""
    had_ended = run_state.end is not None and run_state.end.is_over and not run_state.facts.retried
    if run_state.moved_from is None or run_state.state.ended in LIVE or (had_ended and not run_state.waits):
        return ""
    when = "while it ran" if run_state.facts.began else "before it began"
    return f"its folder was moved from {run_state.moved_from} {when}"


def failure_note(attempt: Attempt) -> str | None:
    """The note that an attempt has failed, and why, though another one follows; None if it did not fail."""
    end = read_end(attempt)
    ended = class_of(end.facts)
    failed = ended is not None and RETRIES[ended].fails
    return f"attempt {attempt.number} ended as {ended}" + (f": {end.cause}" if end.cause else "") if failed else None


def retry_note(attempt: Attempt, now: float | None = None, why: bool = False) -> str | None:
    """The note about the attempt that follows this one: after what, when and without which nodes.

    None if none follows, or if the attempt is not judged. `why`: with the cause, after a failure.
    """
    verdict = attempt.verdict()
    if verdict.get("go_on") is not True or attempt.requeue_refused():
        return None
    failure = failure_note(attempt) if why else None
    current = time.time() if now is None else now
    left_s = float(verdict.get("begin") or 0.0) - current if verdict.get("pause_s") else 0.0
    continues = "between attempts" if verdict.get("in_job") else "continues"
    ended, end = verdict.get("attempt_ended"), read_end(attempt)
    if ended == "requeued":
        ended = end.cause if end is not None and (end.cause or "").startswith("hpc-gpt ") else "a requeue"
    parts = [f"{failure}; {continues}" if failure else f"{continues} after {ended}"]
    if left_s > 0:
        parts.append(f"{left_s:.0f} s left" if verdict.get("in_job") else f"at {clock(current + left_s, current)}")
    left_out = verdict.get("exclude") or []
    if left_out:
        parts.append(f"without {some(left_out, 8)}")
    failures = verdict.get("retries") or 0
    tail = f"; {ordinal(failures)} failure in a row" if failures > 1 else ""
    return ", ".join(parts) + tail


def ordinal(number: int) -> str:
    """A number with its ending.

    >>> [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 21, 112)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '21st', '112th']
    """
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"
