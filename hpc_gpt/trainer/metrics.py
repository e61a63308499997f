"""The figures of every optimizer step: kept on the device, fetched together, written as lines of metrics.jsonl.

Only `fetch` waits for the device: at a logging step, a save and the end. Between them `look_back` finds bad steps in
copies that have arrived meanwhile. A step's time runs from the end of the step before to its own end, measured by
events of the device, or on a CPU by the clock. Evaluations and saves are between two steps and count for neither.

`TargetLoss` decides from the losses whether a run has reached train.until_loss.
"""

import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_gpt.core.files import read_json_lines
from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.runs.full_disk import KeptLines, Refusal
from hpc_gpt.core.settings.data_source import evaluation_shares
from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.sinks import BY_SOURCE
from hpc_gpt.trainer.curves import Curves
from hpc_gpt.trainer.engines.protocol import BALANCE_FIGURES, StepResult

# Without evaluations the mean loss of this many steps counts: a single batch may be an easy one.
WINDOW = 20
_TAIL_BYTES = 1 << 22
_Moment = float | torch.cuda.Event


@dataclass
class _Step:
    """A step whose figures are still on the device."""

    step: int
    result: StepResult
    began: _Moment
    ended: _Moment
    time: float
    # {source of a mixture: loss, nats, bytes}; without a mixture the key is None.
    evaluations: dict[str | None, Tensor] = field(default_factory=dict)
    evaluated: _Moment | None = None  # the end of its evaluation


class _Copy:
    """A copy of the figures of some steps from the device, which may not be complete yet."""

    def __init__(self, steps: list[_Step], device: torch.device) -> None:
        self.steps = steps
        values: list[Tensor | float] = []
        for step in steps:
            values += [step.result.loss, step.result.grad_norm, step.result.skipped]
            values += [figure for one in step.evaluations.values() for figure in one.unbind()]
            values += [] if step.result.balance is None else step.result.balance.unbind()
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
        """[loss, norm, skipped, evaluations …, figures of a mixture …] of each step; waits for the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
        fetched = iter(self._numbers.tolist())
        flat = iter([next(fetched) if isinstance(value, Tensor) else float(value) for value in self._values])
        figures = (0 if step.result.balance is None else len(BALANCE_FIGURES) for step in self.steps)
        return [
            list(islice(flat, 3 + 3 * len(step.evaluations) + count))
            for step, count in zip(self.steps, figures, strict=True)
        ]


# Includes the steps that compile, allocate and choose kernels.
FIRST_STEPS = 10


class Metrics:
    """The figures of all steps, on rank 0. `curves` gets each line, too.

    `first_steps_s`: seconds of the attempt's first FIRST_STEPS without evaluations and saves; None until fetched.
    """

    def __init__(self, path: Path, resolved: Resolved, device: torch.device, curves: Curves | None = None) -> None:
        self.bad_in_row = 0
        self.unsound = False
        self.target = TargetLoss(resolved.train)
        self.memory: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        self.first_steps_s: float | None = None
        self._first: list[float] = []
        self._path = path
        self._curves = curves
        self._steps = resolved.train.steps
        self._tokens = resolved.batch.global_batch * resolved.model.seq
        self._evaluation_shares = evaluation_shares(resolved.data.mix, resolved.data.phases)
        self._device = device
        self._on_device: list[_Step] = []
        self._coming: _Copy | None = None
        self._lines: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}
        self._save_s: float | None = None
        self._file = KeptLines(path)
        # The reason if lines still wait for the disk.
        self.refusal = Refusal()
        self._began: _Moment | None = None

    def recall(self, step: int) -> None:
        """Reads the lines of earlier attempts up to `step`, after which this attempt continues."""
        self.target.recall(self._path, step)

    def begin_clock(self) -> None:
        """Starts the clock of the next step. To be called at the start and after a save."""
        self._began = self._now()

    def add(self, step: int, result: StepResult) -> None:
        """Keeps the figures of the step that was just done; `step` counts from 1."""
        now = self._now()
        assert self._began is not None
        self._on_device.append(_Step(step, result, self._began, now, time.time()))
        self._began = now

    def add_evaluation(self, by_source: Mapping[str | None, Tensor]) -> None:
        """Keeps an evaluation after the step that was added last, and begins the next step's clock. It is {source of a
        mixture, else None: what `TrainingEngine.measure` returned}."""
        self.begin_clock()
        self._on_device[-1].evaluations, self._on_device[-1].evaluated = dict(by_source), self._began

    def add_save(self, save_s: float) -> None:
        """Adds the seconds of a completed save to the last line, or to the next one if the last is already written."""
        if self._lines:
            self._lines[-1]["save_s"] = round(save_s, 4)
        else:
            self._save_s = round(save_s, 4)

    def fetch(self) -> None:
        """Copies the figures since the last copy from the device, and waits for them.

        Afterwards `bad_in_row` is the number of steps since the last sound update. `unsound` is true if the last loss,
        or the gradient of the last update, is not finite; then the weights must not be saved.
        """
        self._begin_copy()
        self._take_in()

    def look_back(self, begin: bool) -> None:
        """Reads a copy that has arrived; with `begin` first starts a copy of the figures since. Waits for nothing."""
        if begin and self._coming is None:
            self._begin_copy()
        if self._coming is not None and self._coming.has_arrived():
            self._take_in()

    def _begin_copy(self) -> None:
        self._take_in()
        if self._on_device:
            self._coming = _Copy(self._on_device, self._device)
            self._on_device = []

    def _take_in(self) -> None:
        """Makes lines from the copied figures."""
        if self._coming is None:
            return
        for step, numbers in zip(self._coming.steps, self._coming.numbers(), strict=True):
            loss, grad_norm, skipped, *more = numbers
            evaluations = {name: more[3 * at : 3 * at + 3] for at, name in enumerate(step.evaluations)}
            evaluation = self._evaluation(evaluations)
            balance: dict[str, float] = dict(zip(BALANCE_FIGURES, more[3 * len(evaluations) :], strict=False))
            if balance:
                balance["experts_dead"] = int(balance["experts_dead"])
            self._judge(loss, grad_norm, bool(skipped))
            self.target.add(step.step, loss, evaluation["loss_eval"])
            step_s = _seconds(step.began, step.ended)
            if self.first_steps_s is None:
                self._first.append(step_s)
                self.first_steps_s = sum(self._first) if len(self._first) == FIRST_STEPS else None
            self._last = {
                "step": step.step,
                "loss": loss,
                **evaluation,
                "grad_norm": grad_norm,
                "lr": step.result.lr,
                **balance,
                "step_s": round(step_s, 6),
                "tokens_per_s": round(self._tokens / step_s, 1) if step_s else None,
                "tokens": self._tokens,
                "skipped": bool(skipped),
                "memory_allocated_gib": _gib(self.memory[0]),
                "memory_reserved_gib": _gib(self.memory[1]),
                "save_s": self._save_s,
                "eval_s": None if step.evaluated is None else round(_seconds(step.ended, step.evaluated), 4),
                "time": round(step.time, 3),
            }
            self._save_s = None
            self._lines.append(self._last)
        self._coming = None

    def _evaluation(self, evaluations: Mapping[str | None, list[float]]) -> dict[str, Any]:
        """A line's figures of an evaluation: of the means by the first phase's weights, and of a mixture's sources."""
        shares = self._evaluation_shares
        if not evaluations:
            return dict.fromkeys(("loss_eval", "bpb", *(BY_SOURCE if shares else ())))
        # A source of weight 0 may have a loss that is not finite.
        weights: Mapping[Any, Any] = shares or {None: 1.0}
        means = [math.fsum(w * evaluations[name][at] for name, w in weights.items() if w) for at in range(3)]
        figures: dict[str, Any] = {"loss_eval": means[0], "bpb": (bpb := _bpb(means))}
        if shares:
            figures["loss_eval_by"] = {name: one[0] for name, one in evaluations.items()}
            figures["bpb_by"] = None if bpb is None else {name: _bpb(one) for name, one in evaluations.items()}
        return figures

    def forget(self) -> None:
        """Drops the figures; for ranks that write none."""
        self._on_device.clear()

    def has_lines(self) -> bool:
        return bool(self._lines)

    def write(self, hold_last: bool = False) -> None:
        """Appends the fetched lines to metrics.jsonl in one write; `hold_last` holds back the last one for a save's
        time.

        On a full disk they wait for the next call, and `refusal` is set. Raises RunFolderError if the disk refuses for
        another reason.
        """
        ready = self._lines[:-1] if hold_last else self._lines
        self._lines = self._lines[len(ready) :]
        if self._curves is not None:
            self._curves.add(ready)
        before, self.refusal = self.refusal, self._file.append([json.dumps(line) + "\n" for line in ready])
        if self.refusal and not before:
            print(f"{self._path.name} waits for space on the disk: {self.refusal.text}", flush=True)
        elif before and not self.refusal:
            lost = f", without the {self._file.lost} oldest lines" if self._file.lost else ""
            print(f"{self._path.name} is written again{lost}", flush=True)

    def log_line(self) -> str:
        """The log's line on the last fetched step."""
        line = self._last
        losses = (f"{key} {line[key]:.4f}" for key in ("loss", "loss_eval", "bpb") if line[key] is not None)
        parts = [
            f"step {line['step']}/{self._steps}",
            *losses,
            f"grad_norm {line['grad_norm']:.3f}",
            f"lr {line['lr']:.3g}",
            f"step_s {line['step_s']:.4f}",
            f"tokens_per_s {line['tokens_per_s']:.0f}",
        ]
        if line["memory_allocated_gib"]:
            parts.append(f"memory_gib {max(line['memory_allocated_gib']):.2f}")
        if line["skipped"]:
            parts.append("skipped")
        return " | ".join(parts)

    def _judge(self, loss: float, grad_norm: float, skipped: bool) -> None:
        """Counts bad steps. A step is bad if it was skipped, or its loss or gradient is not finite. A skipped one
        changed no weights."""
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        self.bad_in_row = 0 if finite and not skipped else self.bad_in_row + 1
        self.unsound = not math.isfinite(loss) or not (finite or skipped)

    def _now(self) -> _Moment:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _gib(memory_bytes: tuple[int, ...]) -> list[float] | None:
    """Peak memory, one figure per stage; None on a CPU."""
    return [round(value / GIB, 3) for value in memory_bytes] if any(memory_bytes) else None


def _bpb(evaluation: Sequence[float]) -> float | None:
    """Bits per byte of (loss, nats, bytes); None if the bytes are not known, or none."""
    _, nats, text_bytes = evaluation
    return nats / math.log(2) / text_bytes if text_bytes > 0 else None


def _seconds(began: _Moment, ended: _Moment) -> float:
    if isinstance(began, float) or isinstance(ended, float):
        assert isinstance(began, float)
        assert isinstance(ended, float)
        return ended - began
    return float(began.elapsed_time(ended)) / 1000


class TargetLoss:
    """Decides whether a run has reached train.until_loss, from the losses that rank 0 fetches.

    `reached`: the text that says how the target was reached; None before.
    """

    def __init__(self, train: Train) -> None:
        self.reached: str | None = None
        self._until = train.until_loss
        self._evaluates = train.eval_every > 0
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def recall(self, metrics: Path, step: int) -> None:
        """Reads the losses up to `step` that the attempts before the one of `metrics` wrote.

        So the mean after a resume equals the mean of an uninterrupted run.
        """
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
        """Takes the losses of the next step. NaN does not reach the target."""
        if self._until is None or self.reached is not None:
            return
        self._recent.append(loss)
        if self._evaluates:
            reached, what = loss_eval, "evaluation loss"
        else:
            reached = sum(self._recent) / WINDOW if len(self._recent) == WINDOW else None
            what = f"mean loss of {WINDOW} steps"
        if reached is not None and reached <= self._until:
            self.reached = f"{what} {reached:.4f} after step {step}, train.until_loss = {self._until:g}"


def _earlier(metrics: Path) -> list[Path]:
    """The metrics of the earlier attempts, first to last."""
    folders = (path for path in metrics.parents[1].glob("[0-9]*") if path.name.isdigit())
    files = {int(folder.name): folder / metrics.name for folder in folders}
    this_attempt = next((number for number, path in files.items() if path == metrics), 0)
    return [files[number] for number in sorted(files) if number < this_attempt]
