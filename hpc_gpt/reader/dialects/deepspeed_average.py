"""DeepSpeed's throughput timer of 2020 and 2021: a running mean of samples/s of the whole job."""

from hpc_gpt.reader.pattern import Dialect, Pattern

DIALECT = Dialect(
    name="deepspeed_average",
    engine="deepspeed",
    patterns=(
        Pattern(
            "step",
            r"(?<![\w/])\d{1,6}/(?P<step>\d{1,12}), SamplesPerSec=(?P<samples_per_s>[^,\s]{1,32})"
            r"(?:, MemAllocated=[\d.]{1,12}GB, MaxMemAllocated=(?P<memory_allocated_gib>[\d.]{1,12})GB)?",
        ),
    ),
    flags=(
        "DeepSpeed's SamplesPerSec of 2020 and 2021 is the mean since its third micro-batch, and its steps count "
        "micro-batches",
    ),
)
