"""The figures of every optimizer step: kept on the device, fetched together, written as lines of metrics.jsonl.

Only `fetch` waits for the device: at a logging step, a save and the end. Between them `look_back` sees whether steps
were bad, from copies that have arrived meanwhile. A step's time is measured by the device's events, from the end of the
step before to its end; on a CPU, where a step ends when the call returns, by the clock. Evaluations and saves are
between two steps and belong to none.

`TargetLoss` sees from them whether a run has come down to train.until_loss.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_gpt.settings.experiment import Train
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.small_files import read_json_lines
from hpc_gpt.train.engines.protocol import StepResult
from hpc_gpt.train.full_disk import KeptLines, Refusal

_GIB = 2.0**30
# If nothing is evaluated, the mean over so many steps counts: a single batch may be an easy one.
WINDOW = 20
_TAIL_BYTES = 1 << 22
Moment = float | torch.cuda.Event


@dataclass
class _Step:
    """A step whose figures are still on the device."""

    step: int
    result: StepResult
    began: Moment
    ended: Moment
    time: float
    loss_eval: Tensor | None = None


class _Copy:
    """A copy of the figures of some steps from the device, which may still be on its way."""

    def __init__(self, steps: list[_Step], device: torch.device) -> None:
        self.steps = steps
        values: list[Tensor | float] = []
        for kept in steps:
            values += [kept.result.loss, kept.result.grad_norm, kept.result.skipped]
            values.append(math.nan if kept.loss_eval is None else kept.loss_eval)
        on_device = [value.detach().reshape(()).double() for value in values if isinstance(value, Tensor)]
        self._values = values
        self._numbers = torch.stack([value.to(device) for value in on_device]) if on_device else torch.empty(0)
        self._arrived: torch.cuda.Event | None = None
        if self._numbers.is_cuda:
            host = torch.empty(self._numbers.shape, dtype=torch.float64, pin_memory=True)
            self._numbers = host.copy_(self._numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def has_arrived(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def numbers(self) -> list[list[float]]:
        """Loss, norm, skipped and evaluation of each step; waits for the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
        fetched = iter(self._numbers.tolist())
        flat = [next(fetched) if isinstance(value, Tensor) else float(value) for value in self._values]
        return [flat[index : index + 4] for index in range(0, len(flat), 4)]


# The steps that compile, allocate and choose kernels, and some more.
FIRST_STEPS = 10


class Metrics:
    """Rank 0's figures of all steps. `first_steps_s`: the seconds of the attempt's first FIRST_STEPS, after they are
    fetched, without evaluations and saves between them."""

    def __init__(self, path: Path, resolved: Resolved, device: torch.device) -> None:
        self.bad_in_row = 0
        self.poisoned = False
        self.target = TargetLoss(resolved.train)
        self.memory: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        self.first_steps_s: float | None = None
        self._first: list[float] = []
        self._path = path
        self._steps = resolved.train.steps
        self._tokens = resolved.batch.global_batch * resolved.model.seq
        self._device = device
        self._kept: list[_Step] = []
        self._coming: _Copy | None = None
        self._lines: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}
        self._save_s: float | None = None
        self._file = KeptLines(path)
        # Why lines are not yet in the file.
        self.refusal = Refusal()
        self._began: Moment | None = None

    def recall(self, step: int) -> None:
        """Reads the lines of the attempts before this one, up to `step`, from which this one continues."""
        self.target.recall(self._path, step)

    def begin_clock(self) -> None:
        """The next step begins now: at the start, and after an evaluation or a save."""
        self._began = self._now()

    def add(self, step: int, result: StepResult) -> None:
        """Keeps the figures of a step that was just run; `step` counts from 1."""
        now = self._now()
        assert self._began is not None
        self._kept.append(_Step(step, result, self._began, now, time.time()))
        self._began = now

    def add_evaluation(self, loss: Tensor) -> None:
        """The evaluation after the step that was added last."""
        self._kept[-1].loss_eval = loss

    def add_save(self, save_s: float) -> None:
        """The seconds of a save that is over, for the last line; if that is already written, for the next."""
        if self._lines:
            self._lines[-1]["save_s"] = round(save_s, 4)
        else:
            self._save_s = round(save_s, 4)

    def fetch(self) -> None:
        """Copies the figures kept since the last time from the device at once, and waits for them.

        After it `bad_in_row` is the number of last steps without a sound update, and `poisoned` says that the weights
        are not worth saving: the last loss, or the gradient of the last update, is not finite.
        """
        self._begin_copy()
        self._take_in()

    def look_back(self, begin: bool) -> None:
        """Takes in what has arrived; with `begin` starts the copy of what was kept since. Waits for nothing."""
        if begin and self._coming is None:
            self._begin_copy()
        if self._coming is not None and self._coming.has_arrived():
            self._take_in()

    def _begin_copy(self) -> None:
        self._take_in()
        if self._kept:
            self._coming = _Copy(self._kept, self._device)
            self._kept = []

    def _take_in(self) -> None:
        """Makes lines of what was copied."""
        if self._coming is None:
            return
        for kept, (loss, grad_norm, skipped, loss_eval) in zip(self._coming.steps, self._coming.numbers(), strict=True):
            self._judge(loss, grad_norm, bool(skipped))
            self.target.add(kept.step, loss, None if kept.loss_eval is None else loss_eval)
            step_s = _seconds(kept.began, kept.ended)
            if self.first_steps_s is None:
                self._first.append(step_s)
                self.first_steps_s = sum(self._first) if len(self._first) == FIRST_STEPS else None
            self._last = {
                "step": kept.step,
                "loss": loss,
                "loss_eval": None if kept.loss_eval is None else loss_eval,
                "grad_norm": grad_norm,
                "lr": kept.result.lr,
                "step_s": round(step_s, 6),
                "tokens_per_s": round(self._tokens / step_s, 1) if step_s else None,
                "tokens": self._tokens,
                "skipped": bool(skipped),
                "memory_allocated_gib": _gib(self.memory[0]),
                "memory_reserved_gib": _gib(self.memory[1]),
                "save_s": self._save_s,
                "time": round(kept.time, 3),
            }
            self._save_s = None
            self._lines.append(self._last)
        self._coming = None

    def forget(self) -> None:
        """Drops the figures kept, on ranks that write none."""
        self._kept.clear()

    def has_lines(self) -> bool:
        return bool(self._lines)

    def write(self, hold_last: bool = False) -> None:
        """Appends the fetched lines to metrics.jsonl in one write; `hold_last` keeps the last one for a save's time.

        On a full disk they wait for the next time, and `refusal` says so. Raises RunFolderError if the disk refuses for
        another reason.
        """
        ready = self._lines[:-1] if hold_last else self._lines
        self._lines = self._lines[len(ready) :]
        before, self.refusal = self.refusal, self._file.append([json.dumps(line) + "\n" for line in ready])
        if self.refusal and not before:
            print(f"{self._path.name} waits for room on the disk: {self.refusal.words}", flush=True)
        elif before and not self.refusal:
            lost = f", but for the {self._file.lost} oldest lines" if self._file.lost else ""
            print(f"{self._path.name} is written again{lost}", flush=True)

    def log_line(self) -> str:
        """One line of the log on the last fetched step."""
        line = self._last
        words = [f"step {line['step']}/{self._steps}", f"loss {line['loss']:.4f}"]
        if line["loss_eval"] is not None:
            words.append(f"loss_eval {line['loss_eval']:.4f}")
        words += [
            f"grad_norm {line['grad_norm']:.3f}",
            f"lr {line['lr']:.3g}",
            f"step_s {line['step_s']:.4f}",
            f"tokens_per_s {line['tokens_per_s']:.0f}",
        ]
        if line["memory_allocated_gib"]:
            words.append(f"memory_gib {max(line['memory_allocated_gib']):.2f}")
        if line["skipped"]:
            words.append("skipped")
        return " | ".join(words)

    def _judge(self, loss: float, grad_norm: float, skipped: bool) -> None:
        """A step is bad if it was skipped, or its loss or gradient is not finite. A skipped one changed no weights."""
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        self.bad_in_row = 0 if finite and not skipped else self.bad_in_row + 1
        self.poisoned = not math.isfinite(loss) or not (finite or skipped)

    def _now(self) -> Moment:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _gib(memory_bytes: tuple[int, ...]) -> list[float] | None:
    """Peak memory, one figure for each stage; null on a CPU."""
    return [round(value / _GIB, 3) for value in memory_bytes] if any(memory_bytes) else None


def _seconds(began: Moment, ended: Moment) -> float:
    if isinstance(began, float) or isinstance(ended, float):
        assert isinstance(began, float)
        assert isinstance(ended, float)
        return ended - began
    return float(began.elapsed_time(ended)) / 1000


class TargetLoss:
    """Whether a run has come down to train.until_loss, from the losses as rank 0 fetches them.

    `words` says how the target was reached, and is None before.
    """

    def __init__(self, train: Train) -> None:
        self.words: str | None = None
        self._until = train.until_loss
        self._evaluates = train.eval_every > 0
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def recall(self, metrics: Path, step: int) -> None:
        """Takes in what the attempts before that of `metrics` have written of the steps up to `step`, so that the mean
        after a resume is that of an unbroken run."""
        if self._until is None or self._evaluates or not step:
            return
        losses: dict[int, float] = {}
        for path in _earlier(metrics):
            for line in read_json_lines(path, last_bytes=_TAIL_BYTES):
                number, loss = line.get("step"), line.get("loss")
                if isinstance(number, int) and step - WINDOW < number <= step and isinstance(loss, float):
                    losses[number] = loss
        for number in sorted(losses):
            self.add(number, losses[number], None)

    def add(self, step: int, loss: float, loss_eval: float | None) -> None:
        """The losses of the next step. What is no number reaches nothing."""
        if self._until is None or self.words is not None:
            return
        self._recent.append(loss)
        if self._evaluates:
            found, what = loss_eval, "evaluation loss"
        else:
            found = sum(self._recent) / WINDOW if len(self._recent) == WINDOW else None
            what = f"mean loss of {WINDOW} steps"
        if found is not None and found <= self._until:
            self.words = f"{what} {found:.4f} after step {step}, train.until_loss = {self._until:g}"


def _earlier(metrics: Path) -> list[Path]:
    """The metrics of the attempts before, first to last."""
    beside = {int(path.name): path / metrics.name for path in metrics.parents[1].glob("[0-9]*") if path.name.isdigit()}
    own = next((number for number, path in beside.items() if path == metrics), 0)
    return [beside[number] for number in sorted(beside) if number < own]
