"""tinygrad's examples: steps count from 0, the device of a line is that of all GPUs, and so are memory and GFLOPS.

The time of `ms run` is the whole step.
"""

from __future__ import annotations

from hpc_gpt.readers.pattern import NUMBER, START, Dialect, Pattern

DIALECT = Dialect(
    name="tinygrad",
    engine="tinygrad",
    patterns=(
        Pattern(
            "step",
            " ms run, ",
            START + rf"(?P<step>\d{{1,12}}) {{1,8}}(?P<step_ms>{NUMBER}) ms run, {{1,8}}[^|\n]{{0,160}}? ms python, "
            rf"[^|\n]{{0,160}}?(?P<loss>{NUMBER}) loss, (?:[^|\n]{{0,60}}?(?P<lr>{NUMBER}) LR, )?",
        ),
        Pattern(
            "fact",
            " ms run, ",
            rf" ms python, [^|\n]{{0,80}}?{NUMBER} ms \w{{1,12}} \* (?P<gpus>\d{{1,6}}), ",
        ),
        Pattern(
            "fact",
            " for one epoch with ",
            START + r"training with batch size (?P<global_batch>\d{1,9}) for one epoch with (?P<steps_planned>\d{1,12})"
            r" steps",
        ),
    ),
    specimen="""\
training with batch size 1024 for one epoch with 3222 steps
    3 4158.77 ms run,   77.01 ms python,   0.43 ms fetch data, 4081.33 ms AMD * 8,  0.69 loss, 0.000571 LR, 1038.57 GB used, 328033.10 GFLOPS
 3211 2269.50 ms run,   52.72 ms python,   9.12 ms fetch data, 2207.66 ms AMD * 8,  1.36 loss, 0.000003 LR, 1085.78 GB used, 511371.64 GFLOPS
""",
    seen="tinygrad/tinygrad examples/mlperf/model_train.py, pull requests 9648 and 9706",
)
