"""The state of a run: which job and which attempt decide it, the facts of them in the run folder, the state as text.

`runs.state` decides. Callers pass what Slurm says; the facts in the run folder are gathered here for all of them.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_gpt.process import is_alive
from hpc_gpt.runs.run_folder import IN_QUEUE, Attempt, RunFolder, seconds_of
from hpc_gpt.runs.state import LIVE, Facts, State, class_of, slurm_state, state_of

# A run that has written nothing for this long may no longer run.
SILENT_S = 600.0


@dataclass(frozen=True)
class AttemptEnd:
    """What an attempt's files say of its end: the facts, the `cause` of that end, and `why` the run is in its state.

    The two differ if the judge ended the run: after an attempt that ended as `hang` a run can end as `no_progress`.
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
    """What ended.json and next.json say of an attempt; its facts have no class if both are missing."""
    verdict, end = attempt.verdict(), attempt.ended()
    said = _class(end.get("ended"), "unknown" if end else "")
    facts = Facts(
        said=said,
        judged=_class(verdict.get("attempt_ended"), said or "unknown") if verdict else "",
        verdict=_class(verdict.get("ended"), ""),
        retried=bool(verdict.get("go_on", end.get("requeue"))),
    )
    cause = text_of(verdict.get("cause")) or text_of(end.get("cause"))
    why = None if facts.retried else text_of(verdict.get("why"))
    return AttemptEnd(facts, cause, why or cause, time_of(verdict))


def deciding(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts up to the one that decides the run's state: without refused ones at the end, unless all were
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
class Standing:
    """The state of a run, and what decided it.

    `line`: the line of submissions.jsonl of the deciding job, made up for a job that plain sbatch started; `job_id`:
    its id. `waits`: that job has made no attempt yet. `attempt`, `end`: the last attempt that was not refused, whether
    its job decides or not.
    """

    state: State
    facts: Facts
    line: Mapping[str, Any]
    job_id: str | None
    waits: bool
    attempt: Attempt | None
    end: AttemptEnd | None


def read_standing(run: RunFolder, log_every: int, slurm: Mapping[str, str] | None = None) -> Standing:
    """The state of a run. A healthy run may write nothing for `log_every` steps.

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
    job_id = text_of(live.get("job_id")) if live is not None else _job_of(attempt)
    line = live if live is not None else _line_of(run, chain, job_id)
    facts = end.facts if end is not None and not waits else Facts()
    facts = replace(
        facts,
        submitted=bool(chain),
        refused=bool(line.get("refused")),
        queued=waits and bool(line.get("queue")),
        began=attempt is not None and not waits,
        cancelled=run.is_cancelled(IN_QUEUE if line.get("queue") else job_id),
        slurm=slurm_state(slurm.get(job_id or "", "")) if slurm is not None and is_of_slurm(line) else None,
        alive=_is_alive(line),
    )
    if attempt is not None and facts.began and facts.slurm is None and end is not None and not end.is_over:
        facts = replace(facts, recent=silent_s(attempt) <= _longest_silence_s(attempts, log_every))
    return Standing(state_of(facts), facts, line, job_id, waits, attempt, end)


def attempt_classes(run: RunFolder, attempts: Sequence[Attempt], standing: Standing) -> list[str]:
    """How each attempt of a run ended, first to last; for one that may still run, the state of the run."""
    jobs = [_job_of(attempt) for attempt in attempts]
    ends = [read_end(attempt) for attempt in attempts]
    classes = []
    for index, (attempt, end) in enumerate(zip(attempts, ends, strict=True)):
        if attempt == standing.attempt and standing.facts.began:
            ended = class_of(standing.facts) or standing.state.ended
        else:
            again = jobs[index] is not None and jobs[index] in jobs[index + 1 :]
            facts = replace(end.facts, again=again, followed=True, cancelled=run.is_cancelled(jobs[index]))
            ended = class_of(facts) or "unknown"
        classes.append(ended)
    return classes


def open_jobs(run: RunFolder) -> list[str]:
    """The Slurm jobs whose state in Slurm may decide the run's: those of the newest job chain, without jobs that have
    ended for good by the folder."""
    attempts = run.attempts()
    ends = {_job_of(attempt): read_end(attempt) for attempt in attempts}
    jobs = [text_of(line.get("job_id")) for line in newest_chain(run) if is_of_slurm(line)]
    return [job_id for job_id in jobs if job_id and (job_id not in ends or _is_open(ends[job_id]))]


def _is_open(end: AttemptEnd) -> bool:
    """Whether Slurm can change the class of the job's last attempt, or is to start the job again."""
    facts = end.facts
    return not end.is_over or facts.retried or class_of(replace(facts, slurm="node_failure")) != class_of(facts)


def is_of_slurm(line: Mapping[str, Any]) -> bool:
    """Whether a line of submissions.jsonl is of a Slurm job."""
    return line.get("scheduler") == "slurm"


def other_host(line: Mapping[str, Any]) -> str | None:
    """The machine of a local run; None if it is this one."""
    host = line.get("host")
    return str(host) if line.get("scheduler") == "local" and host not in (None, platform.node()) else None


def _waits(chain: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt], end: AttemptEnd | None) -> bool:
    """Whether no job of the newest job chain has made an attempt, but one may still do so: the run is not done, and the
    chain was not submitted before the run ended."""
    jobs = {text_of(line.get("job_id")) for line in chain} - {None}
    if not chain or not jobs.isdisjoint(_job_of(attempt) for attempt in attempts):
        return False
    if end is None or not end.is_over or end.facts.retried:
        return True
    return not _is_done(end) and time_of(chain[0]) >= end.judged_at


def _live_job(chain: Sequence[Mapping[str, Any]], slurm: Mapping[str, str]) -> Mapping[str, Any] | None:
    """The job of a job chain that runs by Slurm's answer, else the first that waits."""
    for wanted in reversed(LIVE):
        for line in chain:
            if slurm_state(slurm.get(str(line.get("job_id")), "")) == wanted:
                return line
    return None


def _line_of(run: RunFolder, chain: Sequence[Mapping[str, Any]], job_id: str | None) -> Mapping[str, Any]:
    """The last line of submissions.jsonl for a job, made up for one that plain sbatch started."""
    lines = [line for line in (*run.submissions(), *chain) if text_of(line.get("job_id")) == job_id]
    if lines and job_id is not None:
        return lines[-1]
    return {"scheduler": "slurm", "job_id": job_id} if job_id is not None else {}


def _is_alive(line: Mapping[str, Any]) -> bool | None:
    """Whether the process of a local job runs; None if that is not visible from here."""
    process = line.get("queue") or line
    if line.get("scheduler") != "local" or other_host(line) or process.get("pid") is None:
        return None
    return is_alive(process["pid"], process.get("pid_start"))


def silent_s(attempt: Attempt) -> float:
    """Seconds since the attempt's folder or its files last changed."""
    newest = 0.0
    for path in (attempt.folder, attempt.log, attempt.metrics):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:
            continue
    return time.time() - newest


def _longest_silence_s(attempts: Sequence[Attempt], log_every: int) -> float:
    """Seconds for which a healthy run may write nothing: it writes every `log_every` steps."""
    metrics = next((found for attempt in reversed(attempts) if (found := attempt.last_metrics())), {})
    step_s = metrics.get("step_s")
    return max(SILENT_S, max(10, 3 * log_every) * seconds_of(step_s))


# --- the newest job


def newest_submission(run: RunFolder) -> dict[str, Any]:
    """The line of submissions.jsonl for the run's newest job.

    It is the last line, or that of an older job whose attempt is newer; a line is made for a job that plain sbatch
    started. A refused submission counts only before the first attempt.
    """
    lines, attempts = run.submissions(), run.attempts()
    if aside := _stepped_aside(attempts):  # the other jobs decide the run's state
        attempts = [attempt for attempt in attempts if str(attempt.started().get("job_id")) not in aside]
        lines = [line for line in lines if str(line.get("job_id")) not in aside] or lines
    start = attempts[-1].started() if attempts else {}
    job_id = str(start.get("job_id") or "")
    if job_id:
        lines = [line for line in lines if not line.get("refused")]
    last = lines[-1] if lines else {}
    # A `submit --resume` after that attempt is newer, even if it has not started.
    resumed = seconds_of(start.get("started")) < seconds_of(last.get("time"))
    if not job_id or resumed or job_id == str(last.get("job_id")):
        return last
    own = [line for line in lines if str(line.get("job_id")) == job_id]
    return own[-1] if own else {"scheduler": "slurm", "job_id": job_id, "refused": None}


def _stepped_aside(attempts: list[Attempt]) -> set[str]:
    """The newest jobs that refused to start, because another job of the run ran or its chain had ended; empty if all
    jobs did."""
    jobs: set[str] = set()
    for attempt in reversed(attempts):
        if attempt.ended().get("ended") != "refused":
            return jobs
        jobs.add(str(attempt.started().get("job_id")))
    return set()


def newest_chain(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of the job chain that the newest job is in, first to last, without refused ones; that job's line if it
    is in no chain."""
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


def words_between(attempt: Attempt, now: float | None = None) -> str | None:
    """What a run waits for after an attempt that another one follows; None if none does, or it is not judged."""
    verdict = attempt.verdict()
    if verdict.get("go_on") is not True:
        return None
    words = [f"continues after {verdict.get('attempt_ended')}"]
    begin = verdict.get("begin")
    current = time.time() if now is None else now
    if isinstance(begin, int | float) and verdict.get("pause_s") and begin > current:
        words.append(f"at {clock(begin, current)}")
    left_out = [str(node) for node in verdict.get("exclude") or []]
    if left_out:
        words.append(f"without {', '.join(left_out[:8])}" + (", …" if len(left_out) > 8 else ""))
    row = verdict.get("retries")
    tail = f"; {ordinal(row)} failure in a row" if isinstance(row, int) and row > 1 else ""
    return ", ".join(words) + tail


def clock(moment: float, now: float) -> str:
    """A local time: `12:03`, with the date if that is not today."""
    then, today = time.localtime(moment), time.localtime(now)
    return time.strftime("%H:%M" if then[:3] == today[:3] else "%Y-%m-%d %H:%M", then)


def ordinal(number: int) -> str:
    """A number with its ending.

    >>> [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 21, 112)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '21st', '112th']
    """
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"


def time_of(table: Mapping[str, Any]) -> float:
    """`time` of a line of submissions.jsonl or of a small file, epoch seconds; 0 without one."""
    return seconds_of(table.get("time"))


def _job_of(attempt: Attempt | None) -> str | None:
    return text_of(attempt.started().get("job_id")) if attempt is not None else None


def _class(value: Any, default: str) -> str:
    return str(value) if value else default


def text_of(value: Any) -> str | None:
    """A value of a small file as text, None for none."""
    return None if value is None else str(value)
