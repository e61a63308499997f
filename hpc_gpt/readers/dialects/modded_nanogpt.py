"""modded-nanogpt. Its times are sums: `train_time` since training began, without warm-up and validation.

`step_avg` is the mean since the start, so the step time is taken from differences of `train_time`, exact to 1 ms. Older
logs print whole milliseconds, and `nan` for the mean of the first ten steps.
"""

from __future__ import annotations

from hpc_gpt.readers.pattern import NUMBER, START, Dialect, Pattern

_STEP = r"\bstep:(?P<step>\d{1,12})/(?P<steps_planned>\d{1,12}) "
_TIME = rf"train_time:(?:(?P<elapsed_ms>{NUMBER})ms|(?P<elapsed_s>{NUMBER})s) step_avg:{NUMBER}ms"

DIALECT = Dialect(
    name="modded_nanogpt",
    engine="modded-nanogpt",
    patterns=(
        Pattern("step", " step_avg:", rf"{_STEP}(?:train_loss:(?P<loss>{NUMBER}) )?{_TIME}"),
        Pattern(
            "fact",
            "Running PyTorch ",
            START + r"Running PyTorch \S{1,60} compiled for CUDA \S{1,20} on (?P<device>[^\n]{3,60}?) with world_size "
            r"(?P<gpus>\d{1,5})(?=\s*$)",
        ),
        Pattern(
            "memory",
            "peak memory ",
            START + r"peak memory (?:consumption|allocated): (?P<memory_allocated_mib>\d{1,9}) MiB"
            r"(?: reserved: (?P<memory_reserved_mib>\d{1,9}) MiB)?",
            weak=True,
        ),
    ),
    specimen="""\
step:4874/4875 train_time:739.484s step_avg:151.72ms
step:11/5100 train_loss:9.4012 train_time:1523ms step_avg:nanms
Running PyTorch 2.11.0+cu128 compiled for CUDA 12.8 on NVIDIA H100 80GB HBM3 with world_size 8
peak memory allocated: 39147 MiB reserved: 41056 MiB
""",
    seen="KellerJordan/modded-nanogpt records/track_3 logs, train_gpt2.py",
)
