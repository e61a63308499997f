"""Whether a run has come down to train.until_loss. Rank 0's to know, from the figures that it has fetched."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from hpc_gpt.settings.experiment import Train
from hpc_gpt.small_files import read_json_lines

# Where nothing is evaluated, the mean over so many steps counts: a single batch may be an easy one.
WINDOW = 20
_TAIL_BYTES = 1 << 22


class TargetLoss:
    """Takes the losses in as they come. `words` says how the target was reached, and is None before."""

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
