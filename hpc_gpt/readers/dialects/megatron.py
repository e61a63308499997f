"""Megatron-LM's iteration lines, from 2020 to now, and those of its kin that print the same."""

from __future__ import annotations

from hpc_gpt.readers.pattern import Dialect, Pattern

_KEYS = {
    "consumed samples": "consumed_samples",
    "consumed tokens": "consumed_tokens",
    "elapsed time per iteration (ms)": "step_ms",
    "elapsed time per iteration (s)": "step_s",
    "learning rate": "lr",
    "global batch size": "global_batch",
    "lm loss": "loss",
    "lm-loss": "loss",
    "lm_loss": "loss",
    "loss scale": "loss_scale",
    "grad norm": "grad_norm",
    "number of skipped iterations": "skipped",
    "number of nan iterations": "nan",
    "samples per second": "samples_per_s",
    "TFLOPs": "tflops",
    "throughput per GPU (TFLOP/s/GPU)": "tflops",
}

DIALECT = Dialect(
    name="megatron",
    engine="megatron-lm",
    patterns=(
        Pattern(
            "step", "elapsed time per iteration", r"\biteration +(?P<step>\d+)/ *(?P<steps_planned>\d+) *\|", keys=_KEYS
        ),
    ),
    specimen="""\
 iteration       30/    1000 | consumed samples:          120 | elapsed time per iteration (ms): 2767.3 | learning rate: 1.500E-04 | global batch size:     4 | lm loss: 3.282511E+01 | loss scale: 16384.0 | grad norm: 9.804 | number of skipped iterations:   1 | number of nan iterations:   0 |
""",
    seen="bigscience-workshop/bigscience experiments/gpt2-meg",
)
