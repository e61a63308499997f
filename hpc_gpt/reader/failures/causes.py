"""The first cause of an attempt's end, from the logs of all its ranks.

The rules, in this order:

1. A line that several patterns match is one failure, of the most specific class. Of the lines of one failure (some 20
   lines of one rank without a step between) a specific class wins over `error`, in whatever order. An exception that
   quotes another's traceback is left out: the quoted one counts (`part_failures.without_quotes`).
2. A failure was survived, and ended nothing, if the same log has a step after it, or a word that it is done, which does
   not outlive a traceback; two steps, if it is of another rank than
   the one that prints them, as that one may still print the step in which the other failed. The same holds for a failure in
   another file if both have times of day, or if the program says that it is done after all planned steps; and for an
   exception that Python says it ignored. In a file without steps, beside a file with steps, a process that never began
   (`python: command not found`) was survived, and so was everything before the lines in which the program says what it
   trains. A message of a batch script or of a tool beside the ranks (a vague failure without a rank) ended nothing if a
   rank fails by itself later. An end by the scheduler is over once a program starts below it, or if a later failure of
   the file has a clock minutes after it: the next start's.
3. A consequence of another failure (an echo: a closed connection, a SIGTERM, `Exited with exit code 1`) is the cause
   only if there is nothing else; then the first echo is the cause, and `sure` says so.
4. In one file the first failure counts, by the clocks of the lines if these are not in order. Exception: right after a
   collective timeout or a cancellation, a failure that explains it counts. The peers of a dead process also print a
   link's fault: so it explains no earlier timeout, and a failure that a rank reports of itself wins over it unless
   that failure is shown to be later (on the same rank, or by time of day).
5. Between files the time of day decides if all failures have one. Clocks may differ by two seconds: within these the
   more specific class decides, and `sure` says so. Without times the more specific class decides.
6. Slurm's time limit wins over the lines that ranks print while they are ended, in any file: over everything except a
   failure that explains itself (`KeyError: 'x'`) and was printed before it in the same file, or a minute earlier. A
   signal from outside, and Slurm's message of a cancellation, win over later lines of the same file.
7. A node that shows no GPU is at fault if its job asked for GPUs; else the request is at fault. A node is at fault if
   a container did not start on it alone. An exception like `KeyError` within minutes of the start, before the first
   step, is the user's, and so is any that two ranks raise in the same words before it, if it names no device, network,
   disk or memory. A file that is missing is the user's before the first step, and the data's after it. A signal 9 on a
   host that the program itself calls nearly full is for want of its memory.
   A fault that the GPU's driver reports explains the program's fault of the GPU before it; a line of NCCL's network
   plugin explains a collective that failed without a reason.
8. A cause without a node has its rank's node, by NCCL's lines or the launcher's. If it names no rank and no rank waited
   for another, it has the node of the first rank that the launcher saw fail.
9. If a collective timed out, the rank that did not report it, or is at an earlier collective, is blamed.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hpc_gpt.core.ends.exit_status import name_signals
from hpc_gpt.core.ends.failures import UNSPECIFIC, meaning
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.reader.failures.amd_faults import for_vendor
from hpc_gpt.reader.failures.blame import (
    FIRST_OBSERVED,
    MISSING,
    OF_JAX,
    everyone_waits,
    has_left,
    node_of_failure,
    node_the_launcher_names,
    nodes_of_tasks,
    only_node_that_failed,
    only_one_that_left,
    rank_to_blame,
)
from hpc_gpt.reader.failures.context import full_host, in_context
from hpc_gpt.reader.failures.failure_families import (
    COLLECTIVE,
    CONTAINER,
    CONTAINER_ON_NODE,
    GPU_MISSING,
    GPU_MISSING_ON_NODE,
    NEVER_MET,
    OLD_MEETING,
    has_too_many,
    never_came,
)
from hpc_gpt.reader.failures.first_failure import (
    IN_COLLECTIVE,
    LINK,
    NEVER_BEGAN,
    by_time,
    choose,
    from_outside,
    is_later,
    is_own,
    is_shell_line,
    signal_before,
)
from hpc_gpt.reader.failures.memory_exhausted import held_by_others
from hpc_gpt.reader.failures.part_failures import (
    SKEW_S,
    first_line,
    found_in,
    join_blocks,
    last_line,
    last_setting,
    last_step_at,
    lines_of_program,
    prints_steps,
    with_years,
)
from hpc_gpt.reader.lines.part import Failure, Part

_RANK_IN_FILE = re.compile(r"(?:^|[/_.\[-])(?<!local[_-])rank[_.-]?(\d{1,7})(?=$|[/_.\]-])", re.IGNORECASE)
# A failure so long after the end of a job by the scheduler is the next start's.
_NEXT_START_S = 300.0
# Slurm announces an end; a rank may make so many steps until it is killed.
_STEPS_WHILE_STOPPED = 40
_STOPS_STEPS = re.compile(r"\*\*\* (?:JOB|STEP) .{1,120} CANCELLED AT .{1,60} DUE TO (?:TIME LIMIT|PREEMPTION)")
_KILLED = re.compile(
    r"(?:^|\d|:|\() {0,30}[Kk]illed\b(?! by)|\bSIGKILL\b|\b(?:exit|return) ?code:? (?:= )?(?:137|-9)\b|exitcode: -9\b"
)
_FEW_LINES = 5  # between two lines of the shell, which its script may print
_VAGUE_OF_TOOLS = ("user_error", "error", "port_taken")
_OF_SHELL = re.compile(r"\bexit code 12[67]\b")
_REQUEUE_FAILED = re.compile(r"(?i)requeu\w{0,4}\b.{0,60}\bfailed\b")
# Finds what a handler or a shell says of a process that a signal ended; and, in the handler's stack, the innermost line
# of Python.
_A_DEATH = re.compile(
    r"(?:Fatal Python error: |Signal: |Caught signal |\d{1,10} )?(?:Segmentation|Bus|Illegal|Floating)"
)
# A script's own words that its training failed: it is not done, whatever was reached.
_SAID_FAILED = re.compile(
    r"(?i)(?:\w+ ){0,2}(?:error|exception) [\w ]{3,40}training\b|(?:pre-?)?training (?:has |was )?(?:failed|crashed|aborted)"
)
_BUS = re.compile(r"\bBus error\b|\bSIGBUS\b")
_BUS_TO_DO = (
    "a page of a mapped file could not be read: /dev/shm or a disk was full, a data file was cut or its file system lost;"
    " see df -h /dev/shm and the files that the ranks map"
)
_FRAME = re.compile(r"^Current thread .{1,80}: (File .{1,300})")
_ALL_WAIT = (
    "no rank is missing, so no node is at fault by it: look for a slow or stuck network (NCCL_DEBUG=INFO, switches), or"
    " a step that takes longer than the limit"
)
_NO_CAUSE = "nothing says why the log ends"


@dataclass
class Cause:
    """The end of an attempt and its cause.

    `ended`: a class of failures.ENDED, `unknown` if nothing says it. `text`: the cause in one line, quoted from the log
    after the number of the rank; printable, without secrets. `failure`: the log's failure, None if the log has none.
    `node`, `rank`: where the failure was, if known; `blames_rank`: the rank was blamed because it was silent or late.
    `ordered`: every failure, one per line: the cause, then other failures by time, then survived ones, then echoes.
    `sure`: empty if the log says the cause, else what it is inferred from.
    """

    ended: str
    text: str
    failure: Failure | None = None
    node: str | None = None
    ordered: list[Failure] = field(default_factory=list)
    rank: int | None = None
    survived: list[Failure] = field(default_factory=list)
    sure: str = ""
    blames_rank: bool = False

    @property
    def failed_node(self) -> str | None:
        """The node if it is at fault; the next attempt then excludes it."""
        row = meaning(self.ended)
        echo = self.failure is not None and self.failure.echo  # its cause is on another node
        echo = echo or (self.failure is not None and self.failure.to_do == NEVER_MET)  # other ranks never came
        return self.node if row.of_node and (self.blames_rank or not row.victim) and not echo else None

    @property
    def echoes(self) -> list[Failure]:
        """The consequences of the cause."""
        return [failure for failure in self.ordered if failure.echo and failure != self.failure]


def first_cause(parts: Sequence[Part], reached_end: bool, asked_for_gpus: bool = False) -> Cause:
    """The first cause in the parts of one attempt: the files of all ranks and of the scheduler.

    `reached_end`: all planned steps were trained; then only a failure after the last step counts. `asked_for_gpus`: the
    attempt's script asks for GPUs; ranks that used GPUs show it, too.
    """
    devices = [str(fact.value) for part in parts for fact in part.facts.get("device", [])]
    asked_for_gpus = asked_for_gpus or any(part.memory or part.fact("device") for part in parts)
    failures, open_, survived = _failures(parts, reached_end, asked_for_gpus)
    causes = by_time([failure for failure in open_ if not failure.echo], parts)
    echoes = [failure for failure in open_ if failure.echo]
    chosen, sure = choose(causes)
    if chosen is not None and LINK.search(chosen.message):
        of_peer, why = choose([other for other in causes if is_own(other) and not is_later(other, chosen)])
        why = why or "a dead peer makes the same lines as a link's fault"
        chosen, sure = (of_peer, why) if of_peer else (chosen, sure)
    if chosen is not None and (first := _of_first_observed(chosen, causes, echoes)) is not None:
        chosen, sure = first, ""
    if chosen is not None and (outside := from_outside(causes, echoes, chosen)) is not None:
        chosen, sure = outside, ""
    done = reached_end or any(ended == "done" for part in parts for ended, _ in part.ends)
    if chosen is None and done and not any(_SAID_FAILED.match(echo.message) for echo in echoes):
        return Cause("done", "", None, None, [*survived, *echoes], survived=survived)
    if chosen is None and echoes:
        chosen = signal_before(echoes, [other for other in echoes if other.ended != "cancelled"])
        sure = "" if chosen else "only its consequences are in the logs"
        chosen = chosen or min(echoes, key=_aftermath)
    if chosen is None:
        return Cause("unknown", _NO_CAUSE, None, None, survived, survived=survived)
    if (reason := _reason_below(chosen, echoes)) is not None:
        causes, echoes = [*causes, reason], [echo for echo in echoes if echo.place != reason.place]
        chosen = reason
    chosen = in_context(chosen, failures, parts, reached_end)
    if chosen.to_do == CONTAINER and (alone := only_node_that_failed(echoes)) is not None:
        chosen = replace(chosen, ended="node_failure", to_do=CONTAINER_ON_NODE, node=alone)
    if chosen.to_do == NEVER_MET and has_too_many(chosen.message):
        chosen = replace(chosen, ended="user_error", to_do=OLD_MEETING)
    if every := everyone_waits(chosen, failures, parts):
        chosen = replace(chosen, rank=None, to_do=_ALL_WAIT)
    rank, node, why, inferred = _place_of(chosen, failures, echoes, parts)
    sure = "; ".join(filter(None, (sure, *inferred)))
    if _KILLED.search(chosen.message) and (full := full_host(parts)):
        chosen, sure = replace(chosen, ended="host_memory", echo=False), full
    elif chosen.ended == "error" and _KILLED.search(chosen.message):
        sure = "; ".join(filter(None, (sure, "nothing says who killed it: most often the kernel, out of memory")))
    if not chosen.to_do and _BUS.search(chosen.message):
        chosen = replace(chosen, to_do=_BUS_TO_DO)
    if to_do := for_vendor(chosen.to_do, chosen.message, [*devices, *(other.message for other in failures)]):
        chosen = replace(chosen, to_do=to_do)
    others = [failure for failure in [*causes, *survived, *echoes] if failure.place != chosen.place]
    text = _text_of(chosen, rank if chosen.rank is None else chosen.rank, why or every, echoes)
    return Cause(chosen.ended, text, chosen, node, [chosen, *others], rank, survived, sure, why != "")


def _of_first_observed(chosen: Failure, causes: Sequence[Failure], echoes: Sequence[Failure]) -> Failure | None:
    """The first failure of the rank that torchelastic saw fail first, if it may be the cause in place of another
    rank's; None without one."""
    observed = {failure.rank for failure in echoes if failure.message.endswith(FIRST_OBSERVED)}
    if len(observed) != 1 or chosen.rank is None or chosen.rank in observed or meaning(chosen.ended).by_scheduler:
        return None
    of_rank = [failure for failure in causes if failure.rank in observed and is_own(failure)]
    least = meaning(chosen.ended).precedence
    usable = (each for each in of_rank if meaning(each.ended).precedence <= least and not is_later(each, chosen))
    return next(usable, None)


def _text_of(chosen: Failure, rank: int | None, why: str, echoes: Sequence[Failure]) -> str:
    """The cause in one line. `why`: why its rank, or none, is blamed."""
    text = "; ".join(filter(None, (one_line(chosen.message), _frame_of(chosen, echoes))))
    if rank is not None and f"ank {rank}" not in text and f"task {rank}" not in text:
        text = f"rank {rank}: {text}"
    if why and (MISSING.search(chosen.message) or OF_JAX in why):
        text = f"{why}; {text}"  # the missing rank before the waiting one
    elif why:
        text = f"{text}; {why}"
    elif chosen.to_do == NEVER_MET and (missing := never_came(chosen.message)):
        text = f"{missing}; {text}"
    if meaning(chosen.ended).by_scheduler and (
        failed := next(filter(_REQUEUE_FAILED.match, (other.message for other in echoes)), None)
    ):
        text = f"{text}; the program's own requeue failed, too: {one_line(failed)}"
    return text


def _frame_of(death: Failure, echoes: Sequence[Failure]) -> str:
    """The line of Python in which a signal ended an interpreter; empty if its handler does not print it."""
    frames = (echo for echo in echoes if _A_DEATH.match(death.message) and echo.place.file == death.place.file)
    below = (_FRAME.search(echo.message) for echo in frames if echo.place.line > death.place.line)
    return next((one_line(frame[1]) for frame in below if frame), "")


def _failures(
    parts: Sequence[Part], reached_end: bool, asked_for_gpus: bool
) -> tuple[list[Failure], list[Failure], list[Failure]]:
    """Returns (all failures of the parts, the failures that may have ended the attempt, the survived ones)."""
    if not any(part.failures or part.ends for part in parts):
        return [], [], []
    failures: list[Failure] = []
    survived: list[Failure] = []
    open_: list[Failure] = []
    said_done = reached_end and any(ended == "done" for part in parts for ended, _ in part.ends)
    trained_at, trained_by_others_at = (
        max((at for part in parts if (at := last_step_at(part, nth)) is not None), default=-math.inf) for nth in (1, 2)
    )
    has_trained = any(map(prints_steps, parts))
    failed = with_years(parts, [found_in(part) for part in parts])
    of_ranks = {part.file: _OwnFailures() for part in parts}
    for part, of_part in zip(parts, failed, strict=True):
        of_ranks[part.file].add(part, of_part)
    starts = {part.file: part.first_line for part in parts if part.started}  # the last one of each file
    latest: dict[str, float] = {}
    for part, of_part in zip(parts, failed, strict=True):
        echoed = {each.place for each in of_part if each.echo}
        own = [each for each in of_part if each.place not in echoed and not meaning(each.ended).by_scheduler]
        times = [each.at for each in own if each.at is not None]
        latest[part.file] = max([latest.get(part.file, -math.inf), *times])
    labelled = sum(of_file.labelled > 0 for of_file in of_ranks.values())
    for part, of_part in zip(parts, failed, strict=True):
        of_file, rank = of_ranks[part.file], _rank_of_file(part.file)
        is_beside = has_trained and not prints_steps(part)
        ranks_ran = is_beside or labelled > bool(of_file.labelled)
        begun = of_file.begun if is_beside else 0
        # Ranks may print late: a single step of another rank does not show that a failure was survived.
        trained, trained_by_others = last_line(part, 1), last_line(part, 1 if reached_end else 2)
        begun_at, outlived_stop = first_line(part), last_line(part, _STEPS_WHILE_STOPPED)
        blocks = join_blocks(of_part)
        step_rank = part.step_rank if rank is None else rank
        left = max((one.place.line for one in blocks if has_left(one) and one.rank != (step_rank or 0)), default=0)
        for failure in blocks:
            failure = replace(failure, rank=rank) if failure.rank is None and rank is not None else failure
            if asked_for_gpus and failure.to_do == GPU_MISSING:
                failure = replace(failure, ended="node_failure", to_do=GPU_MISSING_ON_NODE)
            if failure.ended == "gpu_memory" and (to_do := held_by_others(failure.message)):
                failure = replace(failure, to_do=to_do)
            failures.append(failure)
            # Without a label it may be of the rank that, as its launcher says below, ended beside the one with the steps.
            other = failure.place.line < left if failure.rank is None else failure.rank != step_rank
            before = failure.place.line < (trained_by_others if other else trained)
            if failure.raised_in:  # a word after a traceback is an echo of the script
                before = failure.place.line < last_line(part, 2 if other and not reached_end else 1, False)
            if begun_at < failure.place.line and _STOPS_STEPS.match(failure.message):
                before = failure.place.line < outlived_stop
            step_at = trained_by_others_at if other else trained_at
            before = before or (failure.at is not None and failure.at < step_at - SKEW_S)
            # In a separate file without times nothing shows that a failure came after the last step.
            before = before or (said_done and failure.at is None and not trained and failure.ended != "node_failure")
            before = before or failure.place.line < begun
            if meaning(failure.ended).by_scheduler:
                before = before or failure.place.line < starts.get(part.file, 0)
                before = before or (failure.at is not None and failure.at < latest[part.file] - _NEXT_START_S)
            before = before or (ranks_ran and bool(NEVER_BEGAN.search(failure.message))) or of_file.ran_after(failure)
            (survived if before else open_).append(failure)
    return failures, open_, survived


def _place_of(
    chosen: Failure, failures: Sequence[Failure], echoes: Sequence[Failure], parts: Sequence[Part]
) -> tuple[int | None, str | None, str, list[str]]:
    """Returns (the rank of a cause, its node, the reason to blame it if others waited, what both are inferred from)."""
    # By lines that name rank and node, such as srun's and torchelastic's; the first one counts.
    nodes: dict[int, str] = nodes_of_tasks(failures)
    nodes |= {other.rank: other.node for other in reversed(failures) if other.rank is not None and other.node}
    rank, why = chosen.rank, ""
    inferred: list[str] = []
    if meaning(chosen.ended).victim:
        blamed, why = rank_to_blame([failure for failure in failures if failure.ended == chosen.ended], parts)
        rank = chosen.rank if blamed is None else blamed
        if blamed is None and chosen.to_do in (NEVER_MET, _ALL_WAIT):
            return None, None, "", []  # the reporting rank only waited: no node is to blame
    if meaning(chosen.ended).by_scheduler:
        return rank, chosen.node, why, inferred
    # A shell that finds no command belongs to the batch script, unless tasks ended with its exit code.
    shell = rank is None and bool(NEVER_BEGAN.search(chosen.message)) and "execve" not in chosen.message
    echoes_of_it = [other for other in echoes if not shell or _OF_SHELL.search(other.message)]
    if _A_DEATH.match(chosen.message):
        echoes_of_it += [other for other in failures if other.message.startswith("srun: ") and not other.echo]
    left = only_one_that_left(echoes_of_it) if rank is None else None
    if left is not None and left is not chosen:
        rank = left.rank
        inferred.append("the launcher says that this rank ended first")
    node = node_of_failure(chosen, rank, nodes, parts, why != "")
    if node is None and rank is None and not any(meaning(failure.ended).victim for failure in failures):
        node, by_launcher = node_the_launcher_names(chosen, echoes_of_it)
        inferred.append(by_launcher)
    return rank, node, why, inferred


def with_nan(cause: Cause, nan: Failure) -> Cause:
    """The cause of an attempt whose steps were NaN from `nan` on to its end: the NaN, unless another end is known."""
    if cause.ended not in (*UNSPECIFIC, "done"):
        return cause
    return Cause("nan", nan.message, nan, None, [nan, *cause.ordered], survived=cause.survived)


def _aftermath(failure: Failure) -> tuple[bool, bool, bool, bool, bool]:
    """A sort key of echoes: first a process's own end, before messages of its peers; then echoes that say what to do,
    what was observed first, and those with a node and a rank."""
    ended_by_others = failure.ended in ("cancelled", "stopped", "collective_timeout")
    first = failure.message.endswith(FIRST_OBSERVED)
    return ended_by_others, not failure.to_do, not first, failure.node is None, failure.rank is None


def one_line(message: str) -> str:
    """A message in one printable line: no control characters, no secrets, signals by their names.

    >>> one_line("RuntimeError:\\x1b[31m  bad\\x00 token=hf_abcdefghijklmnopqrstu")
    'RuntimeError: [31m bad token=[removed]'
    """
    printable = "".join(letter if letter.isprintable() else " " for letter in message)
    return name_signals(hide_secrets(" ".join(printable.split())))[:400]


@dataclass
class _OwnFailures:
    """The lines of a file in which ranks fail by themselves: the `last` one, and the last one `labelled` with a rank;
    and the line by which the ranks have `begun`. A line is 0 if there is none. `shell`: the lines in which the shell
    finds no command or file; `printed`: those of a program."""

    last: int = 0
    labelled: int = 0
    begun: int = 0
    shell: list[int] = field(default_factory=list)
    printed: list[int] = field(default_factory=list)

    def add(self, part: Part, failures: Sequence[Failure]) -> None:
        """Adds a part of the file."""
        self.printed += lines_of_program(part)
        self.shell += [each.place.line for each in failures if is_shell_line(each)]
        self.begun = max(self.begun, last_setting(part), part.first_line if part.started else 0)
        for failure in failures:
            # Skip srun's reports, as a task's own message is better, and messages of a shell, which name no task.
            if (
                not failure.echo
                and is_own(failure)
                and not failure.message.startswith("srun: ")
                and not NEVER_BEGAN.search(failure.message)
            ):
                self.last = max(self.last, failure.place.line)
                self.labelled = max(self.labelled, failure.place.line if failure.rank is not None else 0)

    def ran_after(self, failure: Failure) -> bool:
        """Whether the ranks ran on after a vague failure without a rank: then it belongs to the batch script, or to a
        tool beside the ranks."""
        if failure.echo or failure.rank is not None or failure.node or failure.ended not in _VAGUE_OF_TOOLS:
            return False
        line = failure.place.line
        shell = is_shell_line(failure) and (line < self.last or self._printed_before_shell(line))
        return shell or line < self.labelled or line < self.begun < self.last

    def _printed_before_shell(self, line: int) -> bool:
        """Whether a program printed after a line of the shell and before a later one: known lines, or several."""
        later = max(self.shell, default=0)
        return any(line < printed < later for printed in self.printed) or any(
            line <= before and after - before > _FEW_LINES for before, after in pairwise(sorted({line, *self.shell}))
        )


def _reason_below(failure: Failure, echoes: Sequence[Failure]) -> Failure | None:
    """The line of NCCL or its plugin that says why a collective failed, with what to do; None without one."""
    if failure.to_do != COLLECTIVE and not (failure.ended == "error" and IN_COLLECTIVE.search(failure.message)):
        return None
    reasons = [echo for echo in echoes if echo.ended == "user_error" and echo.to_do]
    same = [echo for echo in reasons if echo.place.file == failure.place.file] or reasons
    if not same:
        return None
    return replace(same[0], echo=False, rank=failure.rank if same[0].rank is None else same[0].rank)


def _rank_of_file(file: str) -> int | None:
    """The rank in the name of a file; None without one.

    >>> [_rank_of_file(name) for name in ("logs/rank_3.log", "rank12/stderr", "local_rank_1.log", "ranks.log")]
    [3, 12, None, None]
    """
    ranks = _RANK_IN_FILE.findall(file)
    return int(ranks[-1]) if ranks else None
