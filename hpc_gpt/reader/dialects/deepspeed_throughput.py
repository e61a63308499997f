"""DeepSpeed's throughput timer since 2022: samples/s of the whole job, at the last step."""

from hpc_gpt.reader.pattern import Dialect, Pattern, later

DIALECT = Dialect(
    name="deepspeed_throughput",
    engine="deepspeed",
    patterns=(
        Pattern(
            "step",
            r"\bglobal_step=(?P<step>\d{1,12}),"
            + later(r"\bCurrSamplesPerSec=", "samples_per_s", "(?=,)")
            + later(r"\bMaxMemAllocated=", "memory_allocated_gib", "(?=GB)"),
            literal="CurrSamplesPerSec=",
        ),
    ),
    flags=(
        "DeepSpeed's throughput timer times the last step before its line, from forward to step, without the time "
        "between steps, such as for loading data",
    ),
)
