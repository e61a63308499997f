"""The line that Megatron-LM prints of its iterations, in every dress it has worn since 2020."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass

HEAD = r"\biteration {1,20}(?P<step>\d{1,12}) ?/ {0,20}(?P<steps_planned>\d{1,12}) {0,4}\|"
# What follows the head, `key: value` between bars, by what it gives (readers/fields.py). `lm loss` is missing where
# every iteration since the line before was skipped. `(s)` is BigScience's fork; the throughputs a GPU of others stand
# beside NVIDIA's. `TFLOPs` is of one GPU too.
KEYS = {
    "consumed samples": "consumed_samples",
    "consumed tokens": "consumed_tokens",
    "elapsed time per iteration (ms)": "step_ms",
    "elapsed time per iteration (s)": "step_s",
    "elapsed time per iteration (sec)": "step_s",
    "learning rate": "lr",
    "global batch size": "global_batch",
    "lm loss": "loss",
    "lm-loss": "loss",
    "lm_loss": "loss",
    "loss": "loss",
    "loss scale": "loss_scale",
    "grad norm": "grad_norm",
    "number of skipped iterations": "skipped",
    "number of nan iterations": "nan",
    "samples per second": "samples_per_s",
    "samples/sec": "samples_per_s",
    "tokens per second": "tokens_per_s",
    "tokens per gpu per second (tgs)": "tokens_per_s_gpu",
    "tokens per GPU per second": "tokens_per_s_gpu",
    "tokens per GPU (tokens/s/GPU)": "tokens_per_s_gpu",
    "tokens/s/GPU": "tokens_per_s_gpu",
    "tokens/sec/gpu": "tokens_per_s_gpu",
    "tokens-per-second-per-gpu": "tokens_per_s_gpu",
    "tokens/s/GPU inst/harmonic mean": "tokens_per_s_gpu",
    "TFLOPs": "tflops",
    "TFLOPS": "tflops",
    "throughput per GPU (TFLOP/s/GPU)": "tflops",
    "compute per GPU (TFLOP/s/GPU)": "tflops",
    "throughput (TFLOP/s/GPU)": "tflops",
    "model TFLOP/s/GPU": "tflops",
    "MFU": "mfu_percent",
    "mfu": "mfu_percent",
}
_HEAD = re.compile(HEAD)


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
    found: dict[str, float] = {}
    # What no bar closes may be cut off.
    for piece in line[head.end() :].split("|")[:-1]:
        key, _, text = piece.partition(":")
        name = KEYS.get(key.strip())
        if name is not None:
            with contextlib.suppress(ValueError):
                found.setdefault(name, float(text))
    step_s = found.get("step_s", found["step_ms"] / 1000 if "step_ms" in found else None)
    if step_s is None:
        return None

    def count(name: str) -> int | None:
        value = found.get(name)
        return int(value) if value is not None and math.isfinite(value) else None

    return IterationLine(
        iteration=int(head["step"]),
        iterations=int(head["steps_planned"]),
        step_s=step_s,
        lr=found.get("lr"),
        loss=found.get("loss"),
        grad_norm=found.get("grad_norm"),
        global_batch=count("global_batch"),
        consumed_samples=count("consumed_samples"),
        skipped=count("skipped") or 0,
        nan=count("nan") or 0,
    )
