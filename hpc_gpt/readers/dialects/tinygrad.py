"""tinygrad's examples: steps count from 0, the device of a line is that of all GPUs, and so are memory and GFLOPS.

The time of `ms run` is the whole step.
"""

from hpc_gpt.readers.pattern import NUMBER, START, Dialect, Pattern, line

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
            "step",
            " s run, ",
            START
            + rf"(?P<step>\d{{1,12}}) {{1,8}}(?P<step_s>{NUMBER}) s run, {{1,8}}(?P<loss>{NUMBER}) loss, (?P<lr>{NUMBER}) LR, ",
        ),
        Pattern(
            "step",
            " GB used, ",
            START
            + rf"(?P<loss>{NUMBER}) loss, (?P<lr>{NUMBER}) LR, {NUMBER} GB used, {{1,8}}(?P<step_s>{NUMBER}) s(?=\s*$)",
        ),
        Pattern(
            "fact",
            " examples/mlperf/model_train.py",
            START + r"(?:BS=(?P<global_batch>\d{1,7})|(?:DP|GPUS)=(?P<gpus_said>\d{1,5})|SEQLEN=(?P<seq>\d{1,7}))(?=\s)"
            r"(?=[^\n]{0,600} examples/mlperf/model_train\.py)",
        ),
        Pattern("fact", " ms run, ", rf" ms python, [^|\n]{{0,80}}?{NUMBER} ms \w{{1,12}} \* (?P<gpus>\d{{1,6}}), "),
        line("fact", "training with batch size {global_batch} for one epoch with {steps_planned} steps", START),
    ),
)
