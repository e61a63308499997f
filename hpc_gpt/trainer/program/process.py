"""Follows a program that is not ours: its output, its steps and its heartbeat. Needs no torch.

The output is copied to the attempt's log, its lines of steps become metrics.jsonl, and its last lines are kept in case
it fails. The heartbeat counts the steps that the log reports.
"""

import collections
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from hpc_gpt.core.ends.end_policy import End
from hpc_gpt.core.ends.exit_status import ExitStatus
from hpc_gpt.core.ends.program_end import AT_ONCE_S, Said
from hpc_gpt.core.errors import RunFolderError, fault_words
from hpc_gpt.core.files import replace_whole, write_once
from hpc_gpt.core.runs.full_disk import KeptLines
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.reader.readers.live_lines import LiveLines
from hpc_gpt.reader.readers.pattern import MEMORY_FIELDS
from hpc_gpt.trainer.supervision.ending import classify_exception, lost_peer
from hpc_gpt.trainer.supervision.heartbeat import LEAVING, Heartbeat

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


# The figures of a line of steps by the fields of readers/pattern.py, `step` among them. They are of all steps since the
# line before: their mean time and loss, and how many of them were skipped.
StepRow = Mapping[str, float]


def trained_s(run: RunFolder) -> float:
    """Seconds of training in all attempts together."""
    total = 0.0
    for attempt in run.attempts():
        with contextlib.suppress(OSError):
            began = (attempt.folder / ForeignLog.TRAINS).stat().st_mtime
            total += max(0.0, float(attempt.ended().get("time") or time.time()) - began)
    return total


def count_steps(step: int, heart: Heartbeat) -> bool:
    """Gives the heartbeat the last step of metrics.jsonl; returns whether it is a new one."""
    before = heart.step
    if step > before:
        heart.stepped(step, step - before)
    return step > before


def said_by(lines: LiveLines, over: float | None = None) -> Said:
    """What a program that has ended at `over`, by time.monotonic(), printed that decides how it ended."""
    over = time.monotonic() if over is None else over
    late = lines.end_failures()
    sure = [each for each in late if each.how != "words"]
    if not lines.has_steps:  # only a program that failed right before the end
        programs = [each for each in sure if each.how == "program"]
        last = [each for each in programs if each.moment is None or over - each.moment <= AT_ONCE_S]
        sure = last or programs[-1:] or sure
    first = next((each for each in sure if not each.failure.echo), sure[0] if sure else None)
    words = (first or late[0]).failure.message if late else ""
    if first is None:
        return Said(lines.planned, lines.limit, note=words)
    failed_s = None if first.moment is None else max(0.0, over - first.moment)
    end = End(first.failure.ended, first.failure.message)
    return Said(lines.planned, lines.limit, end, first.how == "program", failed_s, words)


class LastLines:
    """The last lines of a program, which say why it failed."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._kept: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)

    def add(self, line: str) -> None:
        self._kept.append(line)

    def find(self, regex: re.Pattern[str]) -> re.Match[str] | None:
        """The match in the last line that has one."""
        return next((found for line in reversed(self._kept) if (found := regex.search(line))), None)

    def killed_worker(self) -> ExitStatus | None:
        """The worker that torchrun's table names as the first to fail, if a signal ended it; None without one.

        SIGTERM is what torchrun itself sends to the others.
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
        """What the program's own faulthandler wrote last; empty if it wrote nothing."""
        kept = list(self._kept)
        begins = [number for number, line in enumerate(kept) if line.startswith("Fatal Python error")]
        return "\n".join(kept[begins[-1] :]) + "\n" if begins else ""

    def failure(self, code: int) -> tuple[str, str, bool]:
        """(class of the end, cause, whether another rank failed) for the program's exit code."""
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
        """How the program ended, by its exit code; of one that was ended by a signal also where."""
        end = ExitStatus("0", os.environ.get("SLURMD_NODENAME") or platform.node(), code, self._program)
        if end.is_kill or (code < 0 and end.signal):  # a shell exits with 137 if its command was killed
            return str(end).partition(": ")[2]
        return f"{self._program} ended with {exit_code_text(code)}"


def exit_code_text(code: int) -> str:
    """An exit code as text, of subprocess's kind."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class StepClock:
    """Seconds of a step of a program whose lines do not say it, by the moments at which lines were looked for.

    Lines that came together have one time. Each figure is of a stretch of `least` moments or more, as many as `most` if
    there were so many: from the last step of its first moment to that of its last one.
    """

    def __init__(self, least: int = 1, most: int = 1) -> None:
        self._least, self._most, self._count = least, most, 0
        self._began: collections.deque[tuple[int, float, int]] = collections.deque()  # (moment, time, its last step)

    def pass_moment(self, now: float, step: int | None) -> float | None:
        """Seconds of a step up to `step`, the last one that came at this moment; None if no line with a step did, or
        before the first whole stretch."""
        self._count += 1
        if step is None:
            return None
        began = self._began
        while len(began) > 1 and began[0][0] < self._count - self._most and began[1][0] <= self._count - self._least:
            began.popleft()
        is_whole = bool(began) and began[0][0] <= self._count - self._least
        began.append((self._count, now, step))
        return (now - began[0][1]) / (step - began[0][2]) if is_whole else None


class ForeignLog:
    """The output of one task's program.

    The task whose program prints the steps writes the metrics: the first of them, if several do. `read` gives the step
    of a line, if it has one; `saw` gets every line. Steps up to `resumed` are not counted again. `loss` gives the last
    loss, for a program that prints no steps; `planned` how many it is to make, 0 if it does not say. `clock`: for one
    that prints no times. What `read`, `saw`, `loss` or the disk raise costs the program nothing: the first fault is
    printed, and its output is read on.
    """

    TRAINS = "trains"  # a file in the attempt's folder: the program has begun to train
    _PRINTS = "prints"  # another: the number of the task that prints the steps

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
        clock: StepClock | None = None,
    ) -> None:
        self._attempt = attempt
        self._task = task
        self._writes = True if resolved.tasks == 1 else None  # None until a task has printed a step
        self._sample_tokens, self._gpus = resolved.model.seq, resolved.gpus
        self._global_batch = resolved.batch.global_batch
        self._read_step, self._saw, self._loss, self._planned = read, saw, loss, planned
        self._kept_loss: float | None = None
        self._kept_at = -_LOOK_S
        self._rows = KeptLines(attempt.metrics)
        self._last, self._trains = resumed, False
        self._clock, self._prints_times = clock or StepClock(), False
        self._at_fault = False
        self.chunks = 0  # of output that came so far
        self._thread: threading.Thread | None = None

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Reads the output on a thread, so that the program never waits for this process."""
        self._thread = threading.Thread(target=self._read, args=(process,), name="output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits for the last line, but not for a process that the program left and that holds the pipe open."""
        assert self._thread is not None
        self._thread.join(timeout=5)
        self.keep_loss(0.0)

    def keep_loss(self, pause_s: float = _LOOK_S) -> None:
        """Writes loss.json until a line has the number of a step, at most every `pause_s`; on a full disk it waits."""
        with self._guard():
            loss, now = self._loss(), time.monotonic()
            if self._trains or self._task or loss in (None, self._kept_loss) or now < self._kept_at + pause_s:
                return
            self._kept_loss, self._kept_at = loss, now
            text = json.dumps({"loss": loss, "time": round(time.time(), 3)})
            with contextlib.suppress(RunFolderError):
                replace_whole(self._attempt.folder / "loss.json", text)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Prints the first fault and goes on: a thread that ended would leave the program waiting at a full pipe."""
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
            self.chunks += 1
            left += chunk
            whole = max(left.rfind(b"\n"), left.rfind(b"\r")) + 1
            if not whole and len(left) < _LONGEST_LINE:
                continue
            whole = whole or len(left)
            self._copy(left[:whole])
            left = left[whole:]
        self._copy(left)

    def _copy(self, lines: bytes) -> None:
        """Copies whole lines to the log, so that those of several tasks do not mix, and takes each."""
        self.take(*(line.decode(errors="replace") for line in _ENDS_LINE.split(lines) if line))
        # Last: on a full disk the output waits for space, and what the program says of that must be known.
        with self._guard():
            sys.stdout.buffer.write(lines)
            sys.stdout.buffer.flush()

    def take(self, *lines: str) -> None:
        """Takes the lines of the program that came since the last call, of which there may be none."""
        now = time.monotonic()
        rows: list[StepRow] = []
        for line in lines:
            with self._guard():
                self._saw(line[:_LONGEST_READ])
            with self._guard():
                row = self._read_step(line[:_LONGEST_READ])
                last = rows[-1]["step"] if rows else self._last
                if row is not None and (last is None or row["step"] > last):
                    rows.append(row)
                    self._prints_times |= "step_s" in row
        step_s = self._clock.pass_moment(now, int(rows[-1]["step"]) if rows else None)
        self.keep_loss()
        if rows:
            self._trains = True
            with self._guard():
                texts = [self._metrics(row, None if self._prints_times else step_s) for row in rows]
                if self._may_write():
                    self._rows.append(texts)  # which waits for space on a full disk

    def _may_write(self) -> bool:
        """Whether this task is the one that writes the metrics; asked until some task is."""
        if self._writes is None:
            path = self._attempt.folder / self._PRINTS
            with contextlib.suppress(RunFolderError, OSError, ValueError):
                if not path.exists():
                    write_once(path, f"{self._task}\n")
                self._writes = int(path.read_text(encoding="utf-8")) == self._task
        return bool(self._writes)

    def _metrics(self, row: StepRow, came_s: float | None) -> str:
        """The line of metrics.jsonl of a step, of which the lines came every `came_s`."""
        step, rate = int(row["step"]), row.get("tokens_per_s")
        count = 1 if self._last is None else step - self._last
        self._last = step
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


class ForeignHeartbeat(Heartbeat):
    """The heartbeat of a program that reports its steps, or does not.

    Its steps have the limits of ours. Until it has reported some, `silent_s` without output is a hang; None for never:
    how long such a program may be silent is not known.
    """

    def __init__(self, multiple: float, floor_s: float, silent_s: float | None) -> None:
        super().__init__(multiple, floor_s)
        self._silent_s = silent_s

    def heard(self) -> None:
        """Records output of a program that has reported no steps."""
        if not self._seconds:
            self.moves += 1

    def limit_s(self) -> float:
        if self.phase == LEAVING:
            return 0.0  # the supervisor ends it in time
        return super().limit_s() if self._seconds else self._silent_s or 0.0
