"""DeepSpeed's throughput timer since 2022: samples/s of the whole job, at the last step."""

from hpc_gpt.readers.pattern import Dialect, Pattern, later

DIALECT = Dialect(
    name="deepspeed_throughput",
    engine="deepspeed",
    patterns=(
        Pattern(
            "step",
            "CurrSamplesPerSec=",
            r"\bglobal_step=(?P<step>\d{1,12}),"
            + later(r"\bCurrSamplesPerSec=", "samples_per_s", "(?=,)")
            + later(r"\bMaxMemAllocated=", "memory_allocated_gib", "(?=GB)"),
        ),
    ),
    specimen="""\
[2023-07-25 21:03:17,269] [INFO] [timer.py:215:stop] epoch=0/micro_step=34/global_step=34, RunningAvgSamplesPerSec=7.864669709950182, CurrSamplesPerSec=8.00912418308922, MemAllocated=59.65GB, MaxMemAllocated=63.31GB
""",
    seen="DeepSpeed/issues/3742",
    flags=(
        "DeepSpeed's throughput timer gives the last step before its line, from forward to step: what lies between "
        "steps, as loading data, is not in it",
    ),
)
