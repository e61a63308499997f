"""The line that Megatron-LM prints of its iterations, in every dress it has worn since 2020."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEAD = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\s*\|")
_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_FIELDS = {
    "elapsed": re.compile(rf"\belapsed time per iteration \((ms|s)\):\s*{_NUMBER}\s*\|"),
    "lr": re.compile(rf"\blearning rate:\s*{_NUMBER}\s*\|"),
    "loss": re.compile(rf"\blm[ _-]loss:\s*{_NUMBER}\s*\|", re.IGNORECASE),
    "grad_norm": re.compile(rf"\bgrad norm:\s*{_NUMBER}\s*\|"),
    "global_batch": re.compile(r"\bglobal batch size:\s*(\d+)\s*\|"),
    "consumed_samples": re.compile(r"\bconsumed samples:\s*(\d+)\s*\|"),
    "skipped": re.compile(r"\bnumber of skipped iterations:\s*(\d+)\s*\|"),
    "nan": re.compile(r"\bnumber of nan iterations:\s*(\d+)\s*\|"),
}


@dataclass(frozen=True)
class IterationLine:
    """What one line says. Time and loss are means, `skipped` and `nan` counts, over the iterations since the line
    before. None where the line says nothing: no loss where every iteration was skipped, no batch in v1.1.5."""

    iteration: int
    iterations: int
    step_s: float
    lr: float | None
    loss: float | None
    grad_norm: float | None
    global_batch: int | None
    consumed_samples: int | None
    skipped: int
    nan: int


def read_iteration(line: str) -> IterationLine | None:
    """The figures of an iteration line, whatever stands before it; None for any other line, or one cut off.

    >>> read_iteration(" iteration 30/ 1000 | elapsed time per iteration (ms): 2767.3 | lm loss: 3.2E+00 |").step_s
    2.7673
    >>> read_iteration(" iteration 30/ 1000 | elapsed time per iter") is None
    True
    """
    head = _HEAD.search(line)
    if head is None:
        return None
    found = {name: field.search(line, head.end()) for name, field in _FIELDS.items()}
    elapsed = found["elapsed"]
    if elapsed is None:
        return None

    def number(name: str) -> float | None:
        match = found[name]
        return None if match is None else float(match[1])

    def count(name: str) -> int | None:
        match = found[name]
        return None if match is None else int(match[1])

    return IterationLine(
        iteration=int(head[1]),
        iterations=int(head[2]),
        step_s=float(elapsed[2]) / (1000 if elapsed[1] == "ms" else 1),
        lr=number("lr"),
        loss=number("loss"),
        grad_norm=number("grad_norm"),
        global_batch=count("global_batch"),
        consumed_samples=count("consumed_samples"),
        skipped=count("skipped") or 0,
        nan=count("nan") or 0,
    )
