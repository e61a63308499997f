"""tinygrad's examples: steps count from 0, the device of a line is that of all GPUs, and so are memory and GFLOPS.

The time of `ms run` is the whole step.
"""

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
        Pattern(
            "fact",
            " for one epoch with ",
            START + r"training with batch size (?P<global_batch>\d{1,9}) for one epoch with (?P<steps_planned>\d{1,12})"
            r" steps",
        ),
    ),
    specimen="""\
training with batch size 1024 for one epoch with 3222 steps
    3 4969.20 ms run,   77.45 ms python,   0.76 ms fetch data, 4726.11 ms AMD * 8,  0.93 loss, 0.000571 LR, 1692.00 GB used, 302565.66 GFLOPS
    3 7.11 s run, 11.9803 loss, 0.000000000002 LR, 1278.69 GB used, 279085.10 GFLOPS
10.1579 loss, 0.000025033951 LR, 145.30 GB used, 12.05 s
BS=8 DP=8 SEQLEN=1024 MODEL=llama3 python3 examples/mlperf/model_train.py
 3211 2074.17 ms run,   52.90 ms python,   9.39 ms fetch data, 2540.23 ms AMD * 8,  1.63 loss, 0.000003 LR, 1429.05 GB used, 578189.81 GFLOPS
""",
    seen="tinygrad/tinygrad examples/mlperf/model_train.py, pull requests 9648, 9706, 11467 and 13803",
)
