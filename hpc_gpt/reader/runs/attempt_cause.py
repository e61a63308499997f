"""The first cause in the logs of an attempt, for `attempts.decisions`, and in the output of a job without attempts."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_gpt.core.ends.end_policy import End
from hpc_gpt.core.ends.exit_status import ExitStatus
from hpc_gpt.core.ends.failures import UNSPECIFIC
from hpc_gpt.core.ends.state import NAN_SINCE
from hpc_gpt.core.files import open_regular
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.runs.stored import NODE
from hpc_gpt.core.slurm.directives import asks_for_gpus

if TYPE_CHECKING:
    from hpc_gpt.reader.failures.causes import Cause

# srun's message if Slurm is busy or restarts: not a fault of the run.
_BUSY = re.compile(r"srun: error: Unable to (?:create step|allocate resources|confirm allocation)")
# The message that `failures.causes` makes from torchrun's table of workers; torchrun itself sends SIGTERM to others.
_KILLED_WORKER = re.compile(r"rank (\d{1,7}) was ended by signal (?!15\b)(\d{1,2})\b")
_KILLED_CHILD = re.compile(r"CalledProcessError: .* died with <Signals\.(?!SIGTERM)")  # accelerate's, and others'
# An exception that another failure causes, which its program reports itself.
_CONSEQUENCE = re.compile(r"^(?!\w*ChildFailedError)[\w.]{1,80}(?:Error|Exception)\b")
_SENTENCE = re.compile(r"[^\W\d_]{2,}\S{0,80}\s+\S")
_STEPS = ("step", "more", "progress", "eval")  # kinds of patterns whose lines are no sentence
_LAST_BYTES = 8 << 10
# Only the end of a longer log is read.
_MOST_BYTES = 32 << 20
_JOB_ID = re.compile(r"\d{1,12}(?:_\d{1,7})?")


def nan_since(attempt: Attempt) -> str:
    """The note on the step since which another program's attempt had only NaN steps; empty if its last step was
    finite."""
    from hpc_gpt.reader.runs.attempts import read_metrics
    from hpc_gpt.reader.runs.log_steps import log_interval

    steps = read_metrics(attempt.metrics, attempt.number).steps
    steps.mark_nan(log_interval(steps))
    since = steps.nan_since(attempt.number)
    return "" if since is None else f"{NAN_SINCE}{steps['step'][since]:.0f}"


def read_cause(attempt: Attempt, exit_text: str = "") -> End:
    """The first cause in the attempt's logs, if they show a failure that Slurm did not cause; else `unknown`. NaN steps
    up to the end of the attempt win over a failure of class error. `exit_text`: the script's exit code, if nothing else
    is known: then the cause of an `unknown` is a consequence, such as a closed connection, or the last sentence.

    slurm-<job>.out is not read: it is about an earlier start of the job.
    """
    # Imported here: the reader loads slowly, and at its time limit a job has only seconds.
    from hpc_gpt.reader.failures.causes import first_cause
    from hpc_gpt.reader.lines.read_log import read_log
    from hpc_gpt.reader.runs.grouping import one_if_interleaved

    try:
        script = RunFolder(attempt.folder.parents[1]).job_script
        with contextlib.ExitStack() as stack:
            paths = [stack.enter_context(_end_of(path)) for path in attempt.logs]
            parts = [part for path in paths for part in one_if_interleaved(read_log(path).parts)]
        cause = first_cause(parts, False, asks_for_gpus(script))
        since = nan_since(attempt) if cause.ended in (*UNSPECIFIC, "done") else ""
    except Exception:  # a bug of the reader must not leave the attempt unjudged
        return End("unknown")
    if since:
        return End("nan", since)
    if exit_text and cause.failure is None and (sentence := last_sentence(attempt)):
        return End("unknown", f"{exit_text}: {sentence}")
    if cause.failure is None or _BUSY.search(cause.text):
        return End("unknown")
    if cause.failure.echo:
        if exit_text and _CONSEQUENCE.search(cause.failure.message):
            return End("unknown", cause.text)
        killed = _KILLED_WORKER.match(cause.failure.message)
        signal_text = str(ExitStatus(killed[1], cause.node, -int(killed[2]))) if killed else None
        return End("unknown", cause.text if _KILLED_CHILD.search(cause.text) else signal_text)
    node = cause.failed_node
    return End(cause.ended, cause.text, node if node and NODE.fullmatch(node) else None)


def last_sentence(attempt: Attempt) -> str:
    """The last line of an attempt's newest log, if it is a sentence and not a line of a step or of `set -x`."""
    from hpc_gpt.reader.failures.causes import one_line
    from hpc_gpt.reader.lines.matches import find

    written = [path for path in attempt.logs if path.stat().st_size]
    if not written:
        return ""
    with open_regular(max(written, key=lambda path: path.stat().st_mtime_ns)) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        lines = file.read(_LAST_BYTES).decode(errors="replace").split("\n")
    last = next((one_line(line) for line in reversed(lines) if line.strip()), "")
    is_step = any(rule.pattern.kind in _STEPS for _, rule in find(last))
    return "" if is_step or last.startswith("+") or not _SENTENCE.search(last) else last


@contextlib.contextmanager
def _end_of(log: Path) -> Iterator[Path]:
    """Yields the log, or a copy of the end of a long one, as the reader begins with the first line of a file."""
    if log.stat().st_size <= _MOST_BYTES:
        yield log
        return
    with tempfile.NamedTemporaryFile(prefix="hpc-gpt-") as copy, open_regular(log) as file:
        file.seek(-_MOST_BYTES, os.SEEK_END)
        file.readline(_MOST_BYTES)  # the first line was cut
        shutil.copyfileobj(file, copy)
        copy.flush()
        yield Path(copy.name)


def cause_before_attempts(run: RunFolder, job_id: object) -> "Cause | None":
    """The cause of the end of a job without attempts, by Slurm's own output of it; None if that does not say it."""
    outputs = job_output(run, job_id) if not run.attempts() else []
    if not outputs:
        return None  # without loading the reader
    from hpc_gpt.reader.failures.causes import first_cause
    from hpc_gpt.reader.lines.read_log import read_log

    cause = first_cause([part for path in outputs for part in read_log(path).parts], False)
    return cause if cause.ended != "unknown" else None


def job_output(run: RunFolder, job_id: object) -> list[Path]:
    """Slurm's own output of a job, if there is one."""
    is_job_id = isinstance(job_id, str) and _JOB_ID.fullmatch(job_id)
    return [path] if is_job_id and (path := run.path / f"slurm-{job_id}.out").is_file() else []
