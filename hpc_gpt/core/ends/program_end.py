"""The end of a program or a job script that is not ours, by its exit code, its steps and its last lines.

The supervisor of a program, the watch over a script and the judge of its end gather the facts; `end_of_program` alone
decides. A new start needs a sure reason, and exit code 0 is not one: a guess is only a note beside `done`.
"""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_gpt.core.ends.end_policy import OVER, End
from hpc_gpt.core.ends.state import BY_ITSELF, EXIT_0_BUT
from hpc_gpt.core.files import write_once
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.runs.stored import read_as, read_stored, read_stored_lines, stored_lines_from_end

# If a program fails before its first step and its script does nothing more, the script ends within so many seconds.
AT_ONCE_S = 5.0
# Words by which a program says that its training is over; not those of a launcher about any program.
_TRAINING_IS_OVER = re.compile(r"(?i)\btrain(?:ing|er)?\b")
# Exit codes, as a shell has them, of a program that SIGINT or SIGTERM ended.
_ASKED_TO_END = (130, 143)
_FIRST_BYTES = 4096
AT_ONCE = "several trainings print their steps at once, so that no curve and no loss is read"


@dataclass(frozen=True)
class PrintedEnd:
    """The printed lines that explain how the program ended."""

    planned: int = 0
    """The number of planned steps; 0 if no line says it."""
    limit: str = ""
    """The program's message about its own time limit."""
    failed: End | None = None
    """A sure failure after its last line of a step."""
    of_program: bool = False
    """`failed` is the traceback, the kill or the absence of a program, not a failure of the script."""
    failed_s: float | None = None
    """Seconds before the end at which `failed` came; None if that is not known."""
    note: str = ""
    """A message that may or may not mean a failure."""
    over: str = ""
    """The program's message that it ends for another reason than a limit (`program_ends` of the reader)."""
    queued: str = ""
    """The next job of a script that has submitted itself, or its program: its successor."""
    others: str = ""
    """Other jobs that a script has submitted."""
    loaded: int = 0
    """The step of the checkpoint that it says it has loaded; 0 if no line says it."""


@dataclass(frozen=True)
class ProgramFacts:
    """The facts about a program or a script that has ended."""

    code: int = 0
    """Its exit code, as a shell has it."""
    step: int = 0
    """The last step that it made; before its first step, the step of its checkpoint."""
    stepped: bool = False
    """It has printed a step."""
    planned: int = 0
    """The number of planned steps; 0 if that is not known."""
    spacing: int = 0
    """Its log has a line every so many steps; 0 if that is not known."""
    said: PrintedEnd = PrintedEnd()
    ran_s: float | None = None
    """Seconds that the program ran; None if that is not known."""
    asked: End | None = None
    """The end that was requested."""
    at_limit: bool = False
    """Slurm's time limit ended it."""
    signal: str = ""
    """A text about the script's own --signal, if it is late enough for Slurm to have sent it."""
    heard: bool | None = None
    """Whether the script's shell got that signal; None if that is not known, as when it goes to the steps."""
    at_once: bool = False
    """Its output has steps of several trainings at once: neither the last step nor the planned one is that of all."""
    near_limit: str = ""
    """A text about its time limit, if that is near."""

    @property
    def near(self) -> str:
        """A text about a time limit that may have ended it; empty if none is near."""
        return self.near_limit or (self.signal if self.heard is not False else "")

    @property
    def made_last(self) -> bool:
        """Whether the last step that it made, by a line of its log, is the last planned one."""
        return 0 < self.planned == self.step

    @property
    def is_finished(self) -> bool:
        """Whether all planned steps are done: a failure or an exit code after that belongs to the last save."""
        if self.code == 0 and not self.at_limit:
            return 0 < self.planned <= self.step
        ended = self.at_limit or self.code in _ASKED_TO_END
        return self.made_last and ended and self.said.failed is None


def end_of_program(facts: ProgramFacts) -> End | None:
    """The end of a program that has ended, as `_end_by_facts`; a script that exited with 0 and has queued its successor
    itself is not started again beside that job. Another job is only named."""
    end, said = _end_by_facts(facts), facts.said
    if end is None or end.ended in ("stopped", "requeued"):
        return end
    if said.others and end.ended != "done":
        end = replace(end, cause=f"{end.cause}; it has queued another job, {said.others}")
    if facts.code or not said.queued:
        return end
    cause = f"{end.cause}; it has queued its next job, {said.queued}"
    return replace(end, cause=f"{EXIT_0_BUT}{cause}" if end.ended == "walltime" else cause)


def _end_by_facts(facts: ProgramFacts) -> End | None:
    """The end of a program that has ended; None if it failed, and its log or Slurm says how. The first row counts.

    | facts | end |
    |---|---|
    | the last planned step is made; exit code 0, SIGTERM, SIGINT or Slurm's time limit | `done` |
    | it was asked to end | as requested |
    | its shell heard the script's own --signal; or the signal was for its steps, and it exited above 0 | `walltime` |
    | an exit code above 0 | None |
    | the rows of exit code 0: `_end_of_exit_0` | |
    """
    exit_text = f"exit code {facts.code}"
    if facts.is_finished:
        progress = f"{facts.step:,} of {facts.planned:,} steps"
        ended = "the time limit ended it" if facts.at_limit else exit_text
        return End(
            "done", progress if not facts.code and not facts.at_limit else f"{progress}; {ended}", note=_note(facts)
        )
    if facts.asked is not None or facts.at_limit:
        return facts.asked
    of_steps = facts.heard is None and facts.code > 0 and not facts.said.of_program
    if facts.signal and (facts.heard or of_steps):
        return End("walltime", f"{facts.signal}, {exit_text}")
    return None if facts.code else _end_of_exit_0(facts)


def _end_of_exit_0(facts: ProgramFacts) -> End:
    """The end of a program that exited with 0 and that nobody asked to end. The first row counts.

    | facts | end |
    |---|---|
    | its output has steps of several trainings at once | `done` |
    | it came within a line's spacing of its last planned step | `done` |
    | a sure failure after its last step; or of a program before any step, right before the end | that of the failure |
    | its own message about a time limit | `walltime` |
    | its own message that it is over (a target reached, early stopping), and steps of a known total are left | `done` |
    | its own message that the training is over, with no step and no failure: it was finished before | `done` |
    | its time limit is near, and steps of a known total are left | `walltime` |
    | steps of a known total are left | `error` |
    | else | `done` |
    """
    printed, step, planned = facts.said, facts.step, facts.planned
    if facts.at_once:
        return End("done", f"exit code 0; {AT_ONCE}", note=_note(facts))
    # A program that counts from 0 ends one step short: exit code 0 says that this was the last.
    if step and not is_step_due(step + 1, facts.spacing, planned):
        return End("done", f"{max(step, planned):,} of {planned:,} steps", note=_note(facts))
    if printed.failed is not None and (facts.stepped or _failed_at_once(facts)):
        return End(printed.failed.ended, f"{EXIT_0_BUT}{printed.failed.cause}", printed.failed.node)
    of_planned = f"at {step:,} of {planned:,} steps" if planned else f"after step {step:,}"
    if printed.limit and (planned or facts.stepped):
        return End("walltime", f"{printed.limit}, {of_planned}")
    if planned:
        if printed.over and facts.stepped:
            return End("done", f"{printed.over}, {of_planned}", note=_note(facts))
        if _TRAINING_IS_OVER.search(printed.over) and not (step or printed.note):
            return End("done", f"{printed.over}; it had no step to train")
        if facts.near:
            return End("walltime", f"{facts.near}, {of_planned}")
        return End("error", f"{BY_ITSELF}{step:,} of {planned:,} steps, with exit code 0")
    of_steps = f", {of_planned}; the number of planned steps is not known (train.steps)" if step else ""
    return End("done", f"exit code 0{of_steps}", note=_note(facts))


def _failed_at_once(facts: ProgramFacts) -> bool:
    """Whether a program failed right before the end: if the script continued, it has handled the failure."""
    if not facts.said.of_program:
        return False
    seconds = [limit for limit in (facts.said.failed_s, facts.ran_s) if limit is not None]
    return bool(seconds) and min(seconds) <= AT_ONCE_S


def _note(facts: ProgramFacts) -> str | None:
    """The doubt about an end that is taken for `done`; None if there is none."""
    if facts.said.note:
        return f"exit code {facts.code}, but its log says {facts.said.note}"
    return f"exit code {facts.code}, but {facts.near}" if facts.near and not facts.planned else None


def is_step_due(made: int, spacing: int, planned: int) -> bool:
    """Whether a program whose log has a line every `spacing` steps prints another one after `made` of `planned` steps
    (0: not known).

    >>> [is_step_due(90, 10, planned) for planned in (99, 100, 0)]
    [False, True, True]
    """
    return not planned or made + spacing <= planned


# --- the facts in the attempt's folder


def write_said(attempt: Attempt, task: int, printed: PrintedEnd) -> None:
    """Writes what a task's program printed, unless the file exists. RunFolderError if the disk refuses."""
    write_once(attempt.folder / OVER / str(task), json.dumps(asdict(printed)) + "\n")


def read_said(attempt: Attempt) -> PrintedEnd:
    """Reads what the programs of all tasks printed. A failure of a program counts first, then the first task's."""
    paths = sorted((attempt.folder / OVER).glob("[0-9]*"))
    printed: list[PrintedEnd] = [task for path in paths if (task := read_as(PrintedEnd, path)) is not None]
    first = min((task for task in printed if task.failed), key=lambda task: not task.of_program, default=PrintedEnd())
    values: dict[str, Any] = {
        key: next((text for task in printed if (text := getattr(task, key))), "")
        for key in ("limit", "note", "over", "queued", "others")
    }
    values |= {key: max((getattr(task, key) for task in printed), default=0) for key in ("planned", "loaded")}
    return replace(first, **values)


def facts_of(attempt: Attempt, code: int, planned: int, printed: PrintedEnd) -> ProgramFacts:
    """The facts of an attempt whose program ended with `code`. `planned`: by the settings, 0 if the log says it."""
    step, has_stepped, spacing = _last_step(attempt)
    # A finished training that is started once more may have nothing left to print.
    if not has_stepped and printed.failed is None:
        step = max(step, printed.loaded, read_stored(attempt.resume).get("step") or 0)
    seconds, at_once = attempt.script_exit().get("seconds"), attempt.at_once.exists()
    return ProgramFacts(
        code if code >= 0 else 128 - code,
        step,
        has_stepped,
        0 if at_once else planned or printed.planned or int(attempt.last_metrics().get("steps_planned") or 0),
        spacing,
        printed,
        None if seconds is None else float(seconds),
        at_once=at_once,
    )


def _last_step(attempt: Attempt) -> tuple[int, bool, int]:
    """Returns (the last step of the attempt's log, or the step after which it began, as far as that is known; whether
    its log has a step; steps from one line to the next). The last one is by the newest start of the run that has two
    lines, as the step after which a start began says nothing of them; 0 without one, or if another stage or epoch has
    begun."""
    steps = _last_two(attempt)
    if len(steps) > 1:
        return steps[0], True, max(0, steps[0] - steps[1])
    earlier = RunFolder(attempt.folder.parents[1]).before(attempt)
    begun = attempt.trainer().get("resumed_step")
    begun = last_logged(earlier) if begun is None else begun
    newer, older = next((two for two in map(_last_two, reversed(earlier)) if len(two) > 1), (0, 0))
    return (steps or [begun])[0], bool(steps), max(0, newer - older)


def _last_two(attempt: Attempt) -> list[int]:
    """The last two steps of the attempt's log at most, newest first."""
    return [int(line.get("step") or 0) for line in itertools.islice(stored_lines_from_end(attempt.metrics), 2)]


def has_last_line(attempt: Attempt, planned: int) -> bool:
    """Whether a program that runs has printed its last line of a step. `planned`: by the settings, 0 if its log says
    it."""
    step, has_stepped, spacing = _last_step(attempt)
    first = next(iter(read_stored_lines(attempt.metrics, first_bytes=_FIRST_BYTES)), {})
    planned = planned or int(attempt.last_metrics().get("steps_planned") or 0)
    is_last = 0 < planned <= step + (first.get("step") == 0)
    return has_stepped and (is_last or not is_step_due(step, spacing, planned))


def last_logged(attempts: Sequence[Attempt]) -> int:
    """The largest of the last steps in the attempts' logs: the progress of a program that alone knows its
    checkpoints."""
    return max((int(attempt.last_metrics().get("step") or 0) for attempt in attempts), default=0)


def last_planned_step(attempt: Attempt, planned: int) -> int:
    """The last planned step, if the attempt's program made it last; else 0. `planned`: by the settings."""
    if attempt.at_once.exists():
        return 0
    last = attempt.last_metrics()
    step, total = int(last.get("step") or 0), planned or int(last.get("steps_planned") or 0)
    return step if step == total else 0


def at_limit(attempt: Attempt, planned: int, ended: str, cause: str) -> tuple[str, str]:
    """Returns (class, cause) of an attempt that Slurm's time limit ended: `done` if its program had made its last
    step."""
    printed = read_said(attempt)
    last = last_planned_step(attempt, planned or printed.planned)
    if ended != "walltime" or not last:
        return ended, cause
    end = end_of_program(ProgramFacts(step=last, planned=last, said=printed, at_limit=True))
    return (end.ended, str(end.cause)) if end is not None else (ended, cause)
