"""Iteration lines of AMD's Megatron trainer: after each figure a slash and a running mean."""

from __future__ import annotations

from hpc_gpt.readers.dialects.megatron import DIALECT as MEGATRON
from hpc_gpt.readers.pattern import Dialect, Pattern

DIALECT = Dialect(
    name="megatron_primus",
    engine="megatron-lm",
    patterns=(
        Pattern(
            "step",
            "elapsed time per iteration",
            r"\biteration {1,20}(?P<step>\d{1,12}) ?/ {0,20}(?P<steps_planned>\d{1,12}) {0,4}\|"
            r"(?: consumed samples: {0,20}(?P<consumed_samples>\d{1,15}) {0,4}\|)?"
            r" elapsed time per iteration \(ms\): (?P<step_ms>\d{1,12}\.\d{1,6})/\d{1,12}\.\d{1,6} {0,4}\|",
            keys=MEGATRON.patterns[0].keys,
            closed=True,
        ),
    ),
    specimen="""\
 iteration       12/      50 | consumed samples:         1536 | elapsed time per iteration (ms): 2767.3/2800.1 | hip mem usage/free/total/usage_ratio: 117.96GB/138.04GB/255.98GB/46.08% | throughput per GPU (TFLOP/s/GPU): 243.6/243.0 | tokens per GPU (tokens/s/GPU): 11839.7/11701.0 | learning rate: 1.000000E-05 | global batch size:   128 | lm loss: 9.512340E+00 | loss scale: 1.0 | grad norm: 2.218 | number of skipped iterations:   0 | number of nan iterations:   0 |
""",
    seen="made from AMD-AGI/Primus print_rank_last_patches.py of 2026",
    flags=(
        "of two figures with a slash between them the first was taken, the step's own; the second is a running mean",
    ),
)
