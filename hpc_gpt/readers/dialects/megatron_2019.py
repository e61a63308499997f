"""Iteration lines of Megatron-LM's first year, which DeepSpeed's examples kept longer: no colon after a name."""

from __future__ import annotations

from hpc_gpt.readers.pattern import Dialect, Pattern

DIALECT = Dialect(
    name="megatron_2019",
    engine="megatron-lm",
    patterns=(
        Pattern(
            "step",
            "elapsed time per iteration",
            r"\biteration {1,20}(?P<step>\d{1,12})/ {0,20}(?P<steps_planned>\d{1,12}) {0,4}\|"
            r" elapsed time per iteration \(ms\): (?P<step_ms>\d{1,12}\.\d{1,6}) \|"
            r" learning rate (?P<lr>[^| :]{1,24}) \| lm loss (?P<loss>[^| :]{1,24}) \|"
            r"(?: loss scale (?P<loss_scale>[^| :]{1,24}) \|)?",
        ),
        Pattern(
            "eval",
            "validation loss at iteration",
            r"\bvalidation loss at iteration {1,20}(?P<step>\d{1,12}) \| LM loss: (?P<loss_eval>[^| ]{1,24}) \|",
        ),
    ),
    specimen="""\
 iteration      100/  320000 | elapsed time per iteration (ms): 512.3 | learning rate 1.500E-05 | lm loss 9.312345E+00 | loss scale 65536.0 |
 validation loss at iteration 1000 | LM loss: 6.213412E+00 | LM PPL: 4.994120E+02
""",
    seen="made from NVIDIA/Megatron-LM pretrain_gpt2.py of 2019",
)
