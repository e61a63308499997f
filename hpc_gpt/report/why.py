"""Why a run ended: the first cause over all ranks of each attempt, with the lines around it in the log."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

from hpc_gpt.core.checkpoints.find_checkpoints import command_of
from hpc_gpt.core.ends.exit_status import ExitStatus, read_exit_status
from hpc_gpt.core.ends.failures import LIVE, UNSPECIFIC, advice, meaning
from hpc_gpt.core.ends.program_end import AT_ONCE
from hpc_gpt.core.ends.run_state import deciding, is_of_slurm, moved_from, newest_submission, read_end, retry_note
from hpc_gpt.core.ends.state import DAMAGED_CHECKPOINT, Facts, class_of, fails_again
from hpc_gpt.core.files import from_here, open_regular
from hpc_gpt.core.format import class_and_cause, without_figures
from hpc_gpt.core.processes.slow_ranks import SLOW_RANK
from hpc_gpt.core.runs.find_runs import name_here
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.runs.work_archive import link_line, missing_in_copy
from hpc_gpt.core.slurm.directives import asks_for_gpus
from hpc_gpt.core.slurm.hosts import first_host
from hpc_gpt.core.slurm.script_lines import redirected
from hpc_gpt.reader.failures.causes import Cause, first_cause, one_line
from hpc_gpt.reader.lines.part import Failure, Part
from hpc_gpt.reader.lines.read_log import read_log
from hpc_gpt.reader.runs.attempt_cause import cause_before_attempts, job_output
from hpc_gpt.reader.runs.grouping import one_if_interleaved
from hpc_gpt.reader.runs.own_run import OF_CHECKPOINTS
from hpc_gpt.reader.runs.results import OF_EXPERTS
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.reader.runs.sockets import OF_NETWORK
from hpc_gpt.report.gather import read_one
from hpc_gpt.report.log_lines import last_lines, lines_around

SCHEMA = 1
_MOST_LISTED = 10
# An exit code says that a process failed, not why.
_ELSEWHERE = (
    "the reason is elsewhere: in the output of the step or of each rank (srun --output, torchrun --log-dir), in the"
    " node's kernel log (dmesg), or in sacct -j JOB -o JobID,State,ExitCode,MaxRSS,NodeList"
)
_NO_STEP_IN_TIME = "it came to no step in its time: ask for more, or prepare data, model and caches before"
_OWN_RANK = re.compile(r"rank (\d{1,7})\b")
# job.sh's line at the start of each attempt, in Slurm's own output of the job.
_ATTEMPT_BEGINS = re.compile(r"^run folder .*, attempt (\d{1,9}), output in attempts/\d{1,9}/log$")
# A line of the job script in bash's message on it, and a call in a traceback of Python.
_LINE_OF_SCRIPT = re.compile(r"(?:^|/)slurm_script: line (\d+): ")
_FRAME = re.compile(r'File "([^"<]+)", line (\d+)')
_OF_PACKAGE = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d")
# A line is read in pieces of so many letters: a log without one has no end of a line, either.
_LONGEST = 1 << 16


@dataclass(frozen=True)
class AttemptWhy:
    """The end of one attempt: its class, the reason in `text` (None if nothing says it), and the cause in its logs."""

    attempt: int
    ended: str
    text: str | None
    cause: Cause
    note: str | None = None  # what may be wrong with an attempt that is done
    pause_s: float | None = None  # the pause before it, if it is a restart inside its job
    steps: tuple[int, int] | None = None  # the first and the last step of a program; None for our trainer
    logged: Cause | None = None  # the cause as the logs alone give it

    @property
    def failure(self) -> Failure | None:
        """The log line of the cause."""
        return self.cause.failure

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        failure = self.failure
        return {
            "attempt": self.attempt,
            "ended": self.ended,
            "cause": self.text,
            "note": self.note,
            "pause_s": self.pause_s,
            "first_step": self.steps[0] if self.steps else None,
            "last_step": self.steps[1] if self.steps else None,
            "rank": self.cause.rank,
            "node": self.cause.node,
            "failed_node": self.cause.failed_node,
            "file": failure.place.file if failure else None,
            "line": failure.place.line if failure else None,
            "sure": self.cause.sure or None,
            "others": [_failure_dict(other) for other in self.others[:_MOST_LISTED]],
            "survived": [_failure_dict(other) for other in self.cause.survived[:_MOST_LISTED]],
            "followed": {"count": len(self.cause.echoes), "words": dict(followed(self.cause.echoes))},
        }

    @property
    def others(self) -> list[Failure]:
        """The other failures by time, except those that followed from another failure or were survived."""
        elsewhere = {id(failure) for failure in (*self.cause.survived, *self.cause.echoes)}
        return [failure for failure in self.cause.ordered if failure != self.failure and id(failure) not in elsewhere]


@dataclass(frozen=True)
class Why:
    """The reason why a run ended, or its state: `attempts` first to last, `lines` around the cause of the last one."""

    record: Record
    attempts: tuple[AttemptWhy, ...]
    lines: tuple[tuple[int, str], ...] = ()
    run_folder: RunFolder | None = None
    cannot: tuple[str, ...] = field(default=())  # logs that could not be read, with the reason
    cancelled_by: str | None = None  # who cancelled the job, and when, by Slurm's accounting
    status: str | None = None  # why a run that has not ended is in its state, as `status` says

    @property
    def last(self) -> AttemptWhy | None:
        """The last attempt if it decides the run's state; None if the run was cancelled later, while it waited."""
        last = self.attempts[-1] if self.attempts else None
        return None if last and self.record.ended == "cancelled" != last.ended else last

    @property
    def text(self) -> str | None:
        """The reason why the run ended, in one line; None if nothing says it."""
        reason = self.last.text if self.last else None
        return self.cancelled_by or reason or (None if self.status else one_line(self.record.cause or "") or None)

    @property
    def unnamed_canceller(self) -> str | None:
        """The job id of our run if it was cancelled, but not by hpc-gpt: only Slurm knows by whom."""
        run, job_id = self.run_folder, self.record.job_id
        unnamed = run is not None and job_id is not None and self.ended == "cancelled" and not run.is_cancelled(job_id)
        return job_id if unnamed and run is not None and is_of_slurm(newest_submission(run)) else None

    @property
    def ended(self) -> str:
        """The class of the run's end, or pending, running, unknown."""
        record = self.record.ended or "unknown"
        return self.last.ended if self.last and record in UNSPECIFIC else record

    @property
    def is_open(self) -> bool:
        """Whether it is a run of ours whose folder does not say how it ended, so that `as_status_says` is asked."""
        return self.run_folder is not None and self.record.ended in (None, "unknown", *LIVE)

    def end_by_logs(self, state: str, cause: str | None) -> tuple[str, str | None]:
        """The class and the cause of an end that nobody has judged, by the last attempt's logs; `state` and `cause`, by
        what else is known, if the logs say nothing."""
        *_, last = (None, *self.attempts)
        if last is not None and last.logged is not None:
            last = _attempt_why(last.attempt, state, cause, last.logged)
        return (state, cause) if last is None or last.ended == state else (last.ended, last.text)

    def as_status_says(self, state: str, cause: str | None) -> Why:
        """A copy with the state and cause of `launcher.watch.status`, which asks the scheduler."""
        record = replace(self.record, ended=state, cause=cause)
        if state in (*LIVE, "unknown"):
            return _with_lines(replace(self, record=record, status=cause))
        *before, last = self.attempts or (None,)
        if last is not None and last.ended in (*LIVE, "unknown"):
            last = replace(_attempt_why(last.attempt, state, cause, last.cause), pause_s=last.pause_s)
        attempts = () if last is None else (*before, last)
        return _with_lines(replace(self, record=record, attempts=attempts, status=None))

    @property
    def to_do(self) -> str:
        """The advice to the user, in one line; with the place in the user's own code if that is to be corrected."""
        advised, correct = self._advised, meaning("user_error").to_do
        place = self._place_to_correct if advised.startswith(correct) else ""
        return advised.replace(correct, f"{correct}, at {place}", 1) if place else advised

    @property
    def _place_to_correct(self) -> str:
        """FILE:LINE of the job script, or of the last call in code that is not a package's, as the lines up to the
        cause name it; else empty."""
        failure = self.last.failure if self.last else None
        until = failure.place.line if failure is not None else 0
        for text in reversed([text for number, text in self.lines if number <= until]):
            if of_script := _LINE_OF_SCRIPT.search(text):
                script = self.run_folder.resolved().program.script if self.run_folder is not None else None
                return f"{from_here(script)}:{of_script[1]}" if script else f"line {of_script[1]} of the job script"
            if (frame := _FRAME.search(text)) and not _OF_PACKAGE.search(frame[1]):
                return f"{from_here(frame[1])}:{frame[2]}"
        return ""

    @property
    def _advised(self) -> str:
        if (
            self.run_folder is not None
            and self.ended == "user_error"
            and moved_from(self.run_folder, newest_submission(self.run_folder))
        ):
            again = f"hpc-gpt submit --resume {quote(name_here(self.run_folder))} continues it"
            return f"leave the folder in its place until the run has ended; {again}"
        if self.run_folder is not None and (
            fault := _left_out_of_copy(self.run_folder, [self.text or "", *(t for _, t in self.lines)])
        ):
            return fault
        failure = self.last.failure if self.last else None
        # A run of ours may train by lines that no dialect reads.
        reached = (self.record.attempts or [{}])[-1].get("last_step") or self.run_folder
        if self.ended == "walltime" and not reached:
            return _NO_STEP_IN_TIME
        if failure is not None and failure.to_do and failure.ended == self.ended:
            return failure.to_do
        unseen = self.run_folder if self.ended in UNSPECIFIC and failure is None else None
        if unseen is not None and (places := _sent_elsewhere(unseen)):
            return f"read the files that the script's programs write to: {places}"
        end = read_exit_status(self.text)
        if self.last is None or self.ended not in UNSPECIFIC or end is None or not end.is_kill:
            only = failure is not None and failure.echo and self.ended in UNSPECIFIC
            return _ELSEWHERE if only else advice(self.ended, self.run_folder is not None)
        where = f"of {self.last.cause.node}" if self.last.cause.node else "of its node"
        return f"read the kernel's log {where} (dmesg): if the kernel killed the process, ask for more memory (--mem)"

    @property
    def notes(self) -> list[str]:
        """Notes on what looks wrong besides the end itself."""
        of_end = [self.last.note] if self.last is not None and self.last.note else []
        if self.run_folder is not None and any(attempt.at_once.exists() for attempt in self.run_folder.attempts()):
            of_end += [] if self.last is not None and AT_ONCE in (self.last.text or "") else [AT_ONCE]
        kinds = (OF_CHECKPOINTS, OF_EXPERTS, OF_NETWORK, SLOW_RANK)
        return [*of_end, *(flag for flag, kind in self.record.all_flags if kind in kinds)]

    @property
    def failed_nodes(self) -> list[str]:
        """The nodes that made attempts fail, without repeats."""
        named = [attempt.cause.failed_node for attempt in self.attempts] + [self.record.failed_node]
        return list(dict.fromkeys(node for node in named if node))

    @property
    def exclude(self) -> str | None:
        """The way to exclude the failed nodes from the next start: a command for our run, else an sbatch directive."""
        # pdsh may name a node by its address, which is not a name that Slurm knows.
        nodes = ",".join(node for node in self.failed_nodes if not node.replace(".", "").isdigit())
        if not nodes or self.ended in ("done", *LIVE):
            return None
        return (
            f"hpc-gpt submit --resume {self.record.run} --exclude {nodes}"
            if self.run_folder
            else f"#SBATCH --exclude={nodes}"
        )

    @property
    def chain(self) -> str | None:
        """The job chain's decision after the last attempt of our run; None if it only repeats how the attempt ended."""
        attempts = deciding(self.run_folder.attempts()) if self.run_folder and self.last else []
        end = read_end(attempts[-1]) if attempts else None
        if end is None:
            return None
        if end.facts.retried:
            return retry_note(attempts[-1])
        end_text = class_and_cause(end.facts.verdict or "", one_line(end.why or ""))
        return None if end.why == end.cause or end_text == self.ended else f"ends as {end_text}"

    @property
    def can_succeed(self) -> bool | None:
        """Whether the same job, started again by hand, can succeed: as the judge of the last attempt says, else by its
        class; None if it depends."""
        attempts = deciding(self.run_folder.attempts()) if self.run_folder and self.last else []
        end = read_end(attempts[-1]) if attempts else None
        return False if end is not None and fails_again(end.why) else meaning(self.ended).can_succeed

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the last attempt's cause on top, then every attempt's."""
        last = self.last.to_dict() if self.last else {}
        top = {key: last.get(key) for key in ("cause", "rank", "node", "failed_node", "file", "line", "sure")}
        top |= {"cause": self.text}
        return {
            "schema": SCHEMA,
            "run": self.record.run,
            "name": self.record.name,
            "job_id": self.record.job_id,
            "ended": self.ended,
            "status": self.status,
            **top,
            "lines": [{"line": number, "text": text} for number, text in self.lines],
            "retry": self.can_succeed,
            "means": meaning(self.ended).means,
            "to_do": self.to_do,
            "exclude": self.exclude,
            "chain": self.chain,
            "notes": self.notes,
            "attempts": [attempt.to_dict() for attempt in self.attempts],
            "unread": list(self.cannot),
        }


def explain(name: str, logs: Path, *more_logs: str) -> Why:
    """Explains why the run `name` ended: a RUN as for read_one, which raises NoSuchRun. `more_logs`: its other logs."""
    read = read_one(name, logs, *more_logs, ends_only=True)
    if read.folder is not None:
        return _with_lines(_explain_own(read))
    log = next(iter(read.files), None)
    # Another training may follow in the file.
    file, _, line = read.record.sources.get("ended", "").rpartition(":")
    end = int(line) if file == str(log) and line.isdigit() else sys.maxsize
    return _with_lines(_explain_foreign(read), log, end)


def explain_run(run: RunFolder) -> Why:
    """Explains why our own run ended, without the lines of its logs."""
    return _explain_own(read_one(str(run.path), run.path.parent, ends_only=True))


def _with_lines(why: Why, log: Path | None = None, end: int = sys.maxsize) -> Why:
    """Adds the log lines around the cause; without a cause the last lines of `log` up to line `end`, or of our run's
    last attempt."""
    failure = None
    if why.last and why.ended != "done":
        # If the logs lack the cause, the first of its consequences.
        failure = why.last.failure or next(iter(why.last.cause.echoes), None)
    if failure is not None:
        return replace(why, lines=tuple(lines_around(Path(failure.place.file), failure.place.line)))
    # The log names no cause: show its last lines.
    if log is None and why.run_folder is not None:
        log = next((attempt.log for attempt in why.run_folder.attempts()[-1:] if attempt.log.is_file()), None)
    return replace(why, lines=tuple(last_lines(log, end)) if log is not None and why.ended in UNSPECIFIC else ())


def _sent_elsewhere(run: RunFolder) -> str:
    """The files to which a run's job script redirects output, as the script writes them, with its lines; else ""."""
    with contextlib.suppress(OSError):
        text = (run.path / "slurm_script").read_text(encoding="utf-8", errors="replace")
        return ", ".join(
            f"{redirection.target} (line {redirection.line})" for redirection in redirected(text) if redirection.target
        )
    return ""


def _left_out_of_copy(run: RunFolder, texts: Sequence[str]) -> str:
    """The advice if a run's program did not find a file that is in its folder but not in the run's copy; else ""."""
    command = command_of(run)
    if command is None or not any("such file" in text or "not found" in text or "xist" in text for text in texts):
        return ""
    name = next((missing for text in texts if (missing := missing_in_copy(run.path, command, text))), "")
    if not name:
        return ""
    line = link_line([*command.link, name.partition("/")[0]])
    return f"git ignores {command.workdir}/{name}, so the run's copy lacks it: add {line}, and submit again"


def followed(echoes: Sequence[Failure]) -> list[tuple[str, int]]:
    """Returns (message, count) of the consequences, the most frequent first, alike ones as one, as in notes."""
    return Counter(one_line(without_figures(echo.message[:120])) for echo in echoes).most_common(_MOST_LISTED)


def _failure_dict(failure: Failure) -> dict[str, Any]:
    return {
        "ended": failure.ended,
        "cause": one_line(failure.message),
        "rank": failure.rank,
        "node": failure.node,
        "file": failure.place.file,
        "line": failure.place.line,
    }


def _explain_own(read: RunRead) -> Why:
    """Explains our own run by what the judge has written, which has read the logs; by the logs where nobody has judged
    an attempt that says only `error`, and for the line of the cause."""
    assert read.folder is not None
    run, record, cannot = RunFolder(read.folder), read.record, []
    tables = record.attempts or []
    attempts: list[AttemptWhy] = []
    own, is_program = run.attempts(), command_of(run) is not None
    for index, (attempt, table) in enumerate(zip(own, tables, strict=False)):
        following = attempt.next_of_job(own[index + 1 :])
        ended, reason = table.get("ended"), table.get("cause")
        # Slurm's own output is of a start of the job: what it says is meant for the last attempt of that start, unless
        # the job outlived that, too, and ended in the pause before a restart.
        verdict = attempt.verdict()
        outlived = "in_job" in verdict and verdict.get("retries") and not verdict.get("put_back")
        is_earlier = outlived or (following and following.restarts_in_job)
        output = [] if is_earlier else job_output(run, table.get("job_id"))
        parts: list[Part] = []
        for path in [*attempt.logs, *output]:
            if path.exists():
                log = read_log(path)
                is_own, first = path in (attempt.log, attempt.err), [*run.before_in_job(attempt), attempt][0].number
                parts += one_if_interleaved(log.parts) if is_own else _own_part(log.parts, path, attempt, first, ended)
                cannot += [f"{path}: {log.refused}"] if log.refused else []
        cause = first_cause(parts, ended == "done", asks_for_gpus(run.job_script))
        cause = _with_dead_host(cause, ended, attempt.ended(), table.get("node_list"))
        explained = _attempt_why(attempt.number, ended, reason, cause, bool(verdict))
        note = table.get("note") if explained.ended == "done" else None
        begin, final = table.get("first_step"), table.get("last_step")
        steps = (begin, final) if is_program and begin is not None and final is not None else None
        attempts.append(replace(explained, note=note, pause_s=table.get("pause_s"), steps=steps, logged=cause))
    if not attempts and (before := cause_before_attempts(run, record.job_id)):
        attempts.append(AttemptWhy(0, before.ended, before.text, before))
    return Why(record, tuple(attempts), run_folder=run, cannot=tuple(cannot))


def _own_part(parts: Sequence[Part], path: Path, attempt: Attempt, first: int, ended: str | None) -> list[Part]:
    """The parts of Slurm's own output of a job that belong to one attempt: Slurm's output holds all starts of the job.
    `first`: the first attempt of the start that is wanted.

    A requeue message is not a cause if the attempt ended otherwise: its own script asked for the requeue.
    """
    begin, end = _span(path, first, attempt.number)
    requeued = ended == "requeued" or not (attempt.verdict() or attempt.ended())

    def counts(failure: Failure) -> bool:
        return begin <= failure.place.line < end and (requeued or failure.ended != "requeued")

    return [
        replace(
            part,
            failures=[failure for failure in part.failures if counts(failure)],
            ends=[ended for ended in part.ends if begin <= ended[1].line < end],
        )
        for part in parts
    ]


def _span(path: Path, number: int, last: int) -> tuple[int, int]:
    """Returns (first line, line after the last) of the attempts `number` to `last`, which are one start of a job, in
    Slurm's own output of that job; an empty range if not there."""
    begins: dict[int, int] = {}
    with contextlib.suppress(OSError), io.TextIOWrapper(open_regular(path), "utf-8", "replace") as file:
        for line, text in enumerate(iter(lambda: file.readline(_LONGEST), ""), 1):
            if start := _ATTEMPT_BEGINS.match(text):
                begins[int(start[1])] = line
    if not begins:
        return 1, sys.maxsize  # not written by a script of ours
    first = begins.get(number, sys.maxsize)
    # The lines before the first start belong to that start, or to a script that came to no attempt.
    return 1 if first == min(begins.values()) else first, min(
        (line for begun, line in begins.items() if line > first and begun > last), default=sys.maxsize
    )


def _with_dead_host(cause: Cause, ended: str | None, ended_json: Mapping[str, Any], node_list: object) -> Cause:
    """The cause with the dead node, if the script itself was lost; srun names any other node that dies."""
    named = any(failure.ended == ended and failure.node for failure in cause.ordered)
    node = first_host(node_list) if ended == "node_failure" and not named else None
    if node is None:
        return cause
    sure = "the script itself was lost, so it is probably its node: the first of the job's list"
    return Cause("node_failure", str(ended_json.get("cause") or "a node died"), None, node, cause.ordered, sure=sure)


def _attempt_why(
    number: int, ended: str | None, cause_text: str | None, cause: Cause, is_judged: bool = False
) -> AttemptWhy:
    attempt = _explained(number, ended, cause_text, cause, is_judged)
    # Our own tracebacks have no rank, but ended.json has it.
    named_rank = _OWN_RANK.match(cause_text or "")
    if named_rank is not None and attempt.cause.rank is None and attempt.text == one_line(cause_text or ""):
        return replace(attempt, cause=replace(attempt.cause, rank=int(named_rank[1])))
    return attempt


def _explained(number: int, ended: str | None, cause_text: str | None, cause: Cause, is_judged: bool) -> AttemptWhy:
    """The reason that the attempt itself gives; the logs' if the attempt only says that something failed."""
    if (end := read_exit_status(cause_text)) is not None and end.signal is not None and _only_echoes(cause):
        return _ended_by_signal(number, ended or "unknown", cause_text or "", end, cause)
    has_cause = cause.ended not in ("unknown", "done")
    recorded = ended or "unknown"
    if (
        recorded in UNSPECIFIC
        and not is_judged
        and not (cause_text or "").startswith(DAMAGED_CHECKPOINT)
        and has_cause
        and (cause_text is None or cause.ended not in UNSPECIFIC or not _only_echoes(cause))
    ):
        better = cause.text if cause.ended != "error" or cause_text is None else cause_text
        ended = class_of(Facts(said=recorded, logs=cause.ended)) or recorded
        return AttemptWhy(number, ended, one_line(better), cause)
    ended = recorded
    place = _place_of(ended, cause_text, cause)
    if place is not cause.failure and not (place is None and cause.ended == ended):
        rank = place.rank if place else None
        others = [failure for failure in cause.ordered if failure is not place]
        ordered = [place, *others] if place else others
        cause = Cause(ended, cause_text or "", place, place.node if place else None, ordered, rank, cause.survived)
    if cause_text is None and has_cause and ended == cause.ended:
        cause_text = cause.text
    return AttemptWhy(number, ended, None if cause_text is None else one_line(cause_text), replace(cause, ended=ended))


def _ended_by_signal(number: int, ended: str, text: str, end: ExitStatus, cause: Cause) -> AttemptWhy:
    """The end of an attempt whose launcher saw which rank a signal ended; the log has its message, or only what
    followed."""
    statuses = [(failure, read_exit_status(failure.message)) for failure in cause.ordered]
    failure, seen = next(((failure, seen) for failure, seen in statuses if seen and seen.is_of(end)), (None, None))
    end = replace(end, node=end.node or (seen.node if seen else None))
    text = one_line(text) if str(end) in text else str(end)
    ordered = [other for other in cause.ordered if other is not failure]
    ordered = [failure, *ordered] if failure else ordered
    return AttemptWhy(number, ended, text, Cause(ended, text, failure, end.node, ordered, end.rank, cause.survived))


def _only_echoes(cause: Cause) -> bool:
    return cause.failure is None or cause.failure.echo


def _place_of(ended: str, cause_text: str | None, cause: Cause) -> Failure | None:
    """The failure in the logs that ended.json means: the one with its text, else the first of its class."""
    if cause_text:
        for failure in cause.ordered:
            if any(text[:60] in cause_text for text in (failure.message, one_line(failure.message))):
                return failure
    of_class = [failure for failure in cause.ordered if failure.ended == ended and not failure.echo]
    return of_class[0] if of_class else None


def _explain_foreign(read: RunRead) -> Why:
    """Explains another program's run by the causes that the log reader found, one per attempt."""
    tables = read.record.attempts or []
    attempts = []
    for number, cause in enumerate(read.causes, 1):
        table = tables[number - 1] if number <= len(tables) else {}
        # If a log names no cause, the record says more: the last step, and whether the job was requeued.
        reason = cause.text if cause.failure else table.get("cause")
        attempts.append(AttemptWhy(number, str(table.get("ended") or cause.ended), reason or None, cause))
    return Why(read.record, tuple(attempts))
