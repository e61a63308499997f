"""Follows a program that is not ours: its output, its steps and its heartbeat. Needs no torch.

The output is copied to the attempt's log, its lines of steps become metrics.jsonl, and its last lines are kept in case
it fails. The heartbeat counts the steps that the log reports.
"""

import collections
import contextlib
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from hpc_gpt.core.ends.end_policy import End
from hpc_gpt.core.ends.exit_status import ExitStatus, exit_code_text
from hpc_gpt.core.ends.program_end import PrintedEnd
from hpc_gpt.core.errors import RunFolderError, fault_words
from hpc_gpt.core.files import replace_whole, write_once
from hpc_gpt.core.runs.full_disk import KeptLines
from hpc_gpt.core.runs.record import MIXTURE_FIGURES
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.reader.failures.live_lines import LiveLines
from hpc_gpt.reader.lines.fields import MEMORY_FIELDS
from hpc_gpt.trainer.program.signs_of_life import boot_s
from hpc_gpt.trainer.program.step_numbers import StepClock, StepNumbers, StepRow, rows_after
from hpc_gpt.trainer.supervision.ending import classify_exception, lost_peer
from hpc_gpt.trainer.supervision.heartbeat import Heartbeat

_KEPT_LINES = 200
_ERROR = re.compile(r"^(?:\d+: ?)?(?:\[\w+\]:? ?)?(?:\w+\.)*(\w*(?:Error|Exception|Interrupt))(?:: ?(.*))?$")
_USAGE = re.compile(r"^\S+\.py: error: (.*)")
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_NAN = re.compile(r"found nan|Unexpected result (nan|inf)", re.IGNORECASE)
# A line of torchrun's table of a worker that failed.
_WORKER = re.compile(r"(?:^|\s)(?P<key>rank|exitcode|host)\s+: (?P<value>\S+)(?: |$)")
_LOOK_S = 1.0
_ENDS_LINE = re.compile(rb"[\r\n]")
_LONGEST_LINE = 1 << 20
_LONGEST_READ = 4000  # characters of a line that readers get
_USUAL = 20  # stretches between steps that show how many lines are usual


def trained_s(run: RunFolder) -> float:
    """Seconds of training in all attempts together."""
    total = 0.0
    for attempt in run.attempts():
        with contextlib.suppress(OSError):
            began = (attempt.folder / ForeignLog.TRAINS).stat().st_mtime
            total += max(0.0, float(attempt.ended().get("time") or time.time()) - began)
    return total


def count_steps(step: int, heart: Heartbeat, came_boot_s: float | None = None) -> bool:
    """Gives the heartbeat the last step of metrics.jsonl; returns whether the step is new. A smaller number is also a
    new step: it belongs to a second stage, or to the next epoch. `came_boot_s`: when its line was read, in seconds
    since the boot."""
    before = heart.step
    if step in (0, before):
        return False
    moment = {} if came_boot_s is None else {"came_boot_s": came_boot_s}
    heart.stepped(step, max(1, step - before), **moment)
    return True


def said_by(lines: LiveLines, over: float | None = None) -> PrintedEnd:
    """The printed lines that explain how the program ended. `over`: when it ended, by time.monotonic()."""
    over = time.monotonic() if over is None else over
    late = lines.end_failures()
    sure = [live for live in late if live.how != "words"]
    if not lines.has_steps:  # a program's failure counts only if the script has printed nothing after it
        sure = [live for live in sure if live.how != "program" or live.failure.place.line > lines.spoke_at]
    first = next((live for live in sure if not live.failure.echo), sure[0] if sure else None)
    message = (first or late[0]).failure.message if late else ""
    if first is None:
        return PrintedEnd(lines.planned, lines.limit, note=message, over=lines.over, loaded=lines.loaded)
    failed_s = None if first.moment is None else max(0.0, over - first.moment)
    end = End(first.failure.ended, first.failure.message)
    is_program = first.how == "program"
    return PrintedEnd(lines.planned, lines.limit, end, is_program, failed_s, message, lines.over, loaded=lines.loaded)


class LastLines:
    """The last lines of a program, which show why it failed."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._kept: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)

    def add(self, line: str) -> None:
        self._kept.append(line)

    def find(self, regex: re.Pattern[str]) -> re.Match[str] | None:
        """The match in the last line that matches; None if no line does."""
        return next((match for line in reversed(self._kept) if (match := regex.search(line))), None)

    def killed_worker(self) -> ExitStatus | None:
        """The worker that torchrun's table names as the first to fail, if a signal ended it; None without one.

        SIGTERM does not count: torchrun itself sends it to the other workers.
        """
        row_values: dict[str, str] = {}
        for line in self._kept:
            if "Root Cause (first observed failure)" in line:
                row_values = {}
            elif (row := _WORKER.search(line)) and row["key"] not in row_values:
                row_values[row["key"]] = row["value"]
        code = int(row_values["exitcode"]) if re.fullmatch(r"-\d+", row_values.get("exitcode", "")) else 0
        if code >= 0 or code == -signal.SIGTERM or not row_values.get("rank", "").isdigit():
            return None
        host = row_values.get("host", "localhost")
        return ExitStatus(row_values["rank"], platform.node() if host == "localhost" else host, code)

    def stacks(self) -> str:
        """The last dump of the program's own faulthandler; empty if it wrote none."""
        lines = list(self._kept)
        begins = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error")]
        return "\n".join(lines[begins[-1] :]) + "\n" if begins else ""

    def failure(self, code: int) -> tuple[str, str, bool]:
        """Returns (class of the end, cause, whether another rank failed) for the program's exit code."""
        for line in reversed(self._kept):
            if usage := _USAGE.match(line):
                return "user_error", usage[1], False
            if error := _ERROR.match(line):
                name, text = error[1], (error[2] or "").strip()
                cause = f"{name}: {text}" if text else name
                if _FULL.search(line):
                    return "disk_full", cause, False
                if _NAN.search(line):
                    return "nan", cause, False
                # `classify_exception` takes an exception; a foreign program leaves only its name and text.
                fault = type(name, (RuntimeError,), {})(text)
                return classify_exception(fault)[0], cause, lost_peer(fault)
        return "error", self.end(code), True

    def end(self, code: int) -> str:
        """Says how the program ended, by its exit code; if a signal ended it, also on which node."""
        end = ExitStatus("0", os.environ.get("SLURMD_NODENAME") or platform.node(), code, self._program)
        if end.is_kill or (code < 0 and end.signal):  # a shell exits with 137 if its command was killed
            return str(end).partition(": ")[2]
        return f"{self._program} ended with {exit_code_text(code)}"


class ForeignLog:
    """The output of one task's program.

    The task whose program prints the steps writes the metrics: the first such task, if there are several. `read` gives
    the step of a line, if it has one; `saw` gets every line. Steps up to `resumed` are not counted again, nor are lines
    up to the last ones with the numbers `written`, which are in metrics.jsonl already. `loss` gives the last loss, for
    a program that prints no steps; `planned` the number of planned steps, 0 if the program does not say; `last_bar`
    at the end the last step by the program's bar. Once the lines are `interleaved`, those of several trainings at once,
    the attempt has a mark, and only the numbers of steps are written, which show progress. `clock`
    measures the steps of a program that prints no times. A fault of `read`, `saw`, `loss` or the disk does not harm the
    program: the first fault is printed, and its output is read on.
    """

    TRAINS = "trains"  # a file in the attempt's folder: the program has begun to train
    _PRINTS = "prints"  # another file there: the number of the task that prints the steps

    def __init__(
        self,
        attempt: Attempt,
        resolved: Resolved,
        task: int,
        read: Callable[[str], StepRow | None],
        saw: Callable[[str], object] = lambda line: None,
        resumed: int | None = None,
        loss: Callable[[], float | None] = lambda: None,
        planned: Callable[[], int] = lambda: 0,
        last_bar: Callable[[], StepRow | None] = lambda: None,
        interleaved: Callable[[], bool] = lambda: False,
        clock: StepClock | None = None,
        written: Sequence[int] = (),
    ) -> None:
        self._attempt = attempt
        self._task = task
        self._writes = True if resolved.tasks == 1 else None  # whether this task writes; None until one has a step
        self._sample_tokens, self._gpus = resolved.model.seq, resolved.gpus
        self._global_batch = resolved.batch.global_batch
        self._read_step, self._saw, self._loss, self._planned = read, saw, loss, planned
        self._last_bar, self._interleaved = last_bar, interleaved
        self._kept_loss: float | None = None
        self._kept_at = -_LOOK_S
        self._rows = KeptLines(attempt.metrics)
        self._last, self._trains = written[-1] if written else resumed, False
        self._numbers, self._written = StepNumbers(resumed), [*written]
        # Lines since the last step, and between earlier steps; None before the first step.
        self._since = 0
        self._between: collections.deque[int] | None = None
        self._lock = threading.Lock()
        self.has_steps, self.stepped_boot_s = False, 0.0  # when the line of the last step was read, since the boot
        self._clock, self._prints_times = clock or StepClock(), False
        self._at_fault = False
        self.moves = 0  # chunks of output that came, and lines of them that were taken
        self._thread: threading.Thread | None = None

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Reads the output on a thread, so that the program never waits for this process."""
        self._thread = threading.Thread(target=self._read, args=(process,), name="output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits for the last line, but not for a process that the program left behind and that holds the pipe open."""
        assert self._thread is not None
        read = -1
        while self._thread.is_alive() and read != self.moves:
            read = self.moves
            self._thread.join(timeout=5)
        self.close()

    def close(self) -> None:
        """Writes what the last lines show: steps that wait for another line, the last bar, a loss without a step."""
        self.flush_steps(math.inf)
        with self._lock, self._guard():
            if self.has_steps and (row := self._last_bar()) is not None and int(row["step"]) > self.last_step:
                self._write([row], time.monotonic())
        self.keep_loss(0.0)

    def keep_loss(self, pause_s: float = _LOOK_S) -> None:
        """Writes loss.json, at most every `pause_s`, until a line has the number of a step; on a full disk it waits."""
        with self._guard():
            loss, now = self._loss(), time.monotonic()
            if (
                self._interleaved()
                or self._trains
                or self._task
                or loss in (None, self._kept_loss)
                or now < self._kept_at + pause_s
            ):
                return
            self._kept_loss, self._kept_at = loss, now
            text = json.dumps({"loss": loss, "time": round(time.time(), 3)})
            with contextlib.suppress(RunFolderError):
                replace_whole(self._attempt.folder / "loss.json", text)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Prints the first fault of the block and continues: if the thread ended, the program would wait at a full
        pipe."""
        try:
            yield
        except Exception as fault:
            if not self._at_fault:
                self._at_fault = True
                with contextlib.suppress(OSError):
                    message = f"hpc-gpt could not follow a line of the program: {fault_words(fault)}"
                    print(f"note: {message}; it runs on, and steps may be missing", file=sys.stderr, flush=True)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        left = b""
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            self.moves += 1
            left += chunk
            whole = max(left.rfind(b"\n"), left.rfind(b"\r")) + 1
            if not whole and len(left) < _LONGEST_LINE:
                self.note_output()
                continue
            whole = whole or len(left)
            self._copy(left[:whole])
            left = left[whole:]
        self._copy(left)

    def _copy(self, lines: bytes) -> None:
        """Takes whole lines, and copies them to the log: so the lines of several tasks do not mix."""
        self.take(*(line.decode(errors="replace") for line in _ENDS_LINE.split(lines) if line))
        # Copied last: on a full disk the output waits for space, and the program's message about that must be known.
        with self._guard():
            sys.stdout.buffer.write(lines)
            sys.stdout.buffer.flush()

    def take(self, *lines: str) -> None:
        """Takes the lines of the program that came since the last call; there may be none."""
        with self._lock:
            self._take(lines)

    def _take(self, lines: Sequence[str]) -> None:
        now = time.monotonic()
        rows: list[StepRow] = []
        for line in lines:
            self.moves += 1
            with self._guard():
                self._saw(line[:_LONGEST_READ])
            self._since += 1
            with self._guard():
                row = self._read_step(line[:_LONGEST_READ])
                if row is not None and (made := self._numbers.take(row, now)):
                    rows += made
                    self._prints_times |= "step_s" in row
                    self.pass_step()
        self._write(rows or self._numbers.flush_steps(now), now)

    def flush_steps(self, now: float | None = None) -> None:
        """Counts a smaller number as the first step of another stage, if no line has contradicted it for seconds."""
        if self._lock.acquire(blocking=False):  # else another thread takes lines, which settles it, too
            try:
                now = time.monotonic() if now is None else now
                if rows := self._numbers.flush_steps(now):
                    self._write(rows, time.monotonic())
            finally:
                self._lock.release()

    def note_output(self) -> None:
        """Notes output that is not a whole line yet."""
        self._since += 1

    def pass_step(self) -> None:
        """Notes that a step was made, by a line of this task's program or of another task's."""
        if self._between is None:
            self._between = collections.deque(maxlen=_USUAL)
        else:
            self._between.append(self._since)
        self._since = 0

    @property
    def last_step(self) -> int:
        """The last step that was made, by the lines so far; 0 without one."""
        return self._last if self.has_steps and self._last is not None else 0

    @property
    def is_more(self) -> bool:
        """Whether more lines came since the last step than usually come between two."""
        return self._since > (statistics.median(self._between) - 1 if self._between else 0)

    def _write(self, rows: list[StepRow], now: float) -> None:
        """Writes the metrics of the steps that came at this moment."""
        if self._written and rows:
            rows, self._written = rows_after(self._written, rows), []
        step_s = self._clock.pass_moment(now, int(rows[-1]["step"]) if rows else None)
        self.keep_loss()
        if rows:
            self._trains = self.has_steps = True
            self.stepped_boot_s = boot_s()
            if self._interleaved() and not self._attempt.at_once.exists():
                with self._guard():
                    self._attempt.at_once.touch()
            with self._guard():
                texts = [self._metrics(row, None if self._prints_times else step_s) for row in rows]
                if self._claim_metrics():
                    self._rows.append(texts)  # waits for space on a full disk

    def _claim_metrics(self) -> bool:
        """Returns whether this task writes the metrics: the first task that claims them by writing its number does."""
        if self._writes is None:
            path = self._attempt.folder / self._PRINTS
            with contextlib.suppress(RunFolderError, OSError, ValueError):
                if not path.exists():
                    write_once(path, f"{self._task}\n")
                self._writes = int(path.read_text(encoding="utf-8")) == self._task
        return bool(self._writes)

    def _metrics(self, row: StepRow, came_s: float | None) -> str:
        """The line of metrics.jsonl for a step. `came_s`: the measured seconds per step, if its line has none."""
        step, rate = int(row["step"]), row.get("tokens_per_s")
        begins = self._last is None or step <= self._last
        count = 1 if begins else step - (self._last or 0)
        self._last = step
        if self._interleaved():
            return json.dumps({"step": step, "time": round(time.time(), 3)}) + "\n"
        step_s = row.get("step_s", came_s)
        if rate is None and "tokens_per_s_gpu" in row:
            rate = row["tokens_per_s_gpu"] * self._gpus
        tokens = int(row.get("global_batch") or self._global_batch) * self._sample_tokens
        if tokens and step_s:
            rate = tokens / step_s
        skipped = int(row.get("skipped") or 0)
        line = {
            "step": step,
            **{name: row.get(name) for name in ("loss", "loss_eval", "grad_norm", "lr")},
            **{name: row[name] for name in MIXTURE_FIGURES if name in row},
            "step_s": None if step_s is None else round(step_s, 6),
            "tokens_per_s": round(rate, 1) if rate else None,
            "tokens": count * tokens if tokens else round(count * rate * step_s) if rate and step_s else None,
            "skipped": bool(skipped) if count == 1 else skipped,
            **({"nan": int(row["nan"])} if row.get("nan", 0.0) > 0 else {}),
            **{name: row.get(name) for name in MEMORY_FIELDS},
            **({"steps_planned": planned} if (planned := self._planned()) else {}),
            "save_s": None,
            "time": round(time.time(), 3),
        }
        return json.dumps(line) + "\n"
