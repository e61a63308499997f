"""Megatron-Bridge's lines in addition to Megatron's: its own throughput, memory in 10^9 bytes."""

from hpc_gpt.reader.pattern import Dialect, Pattern

DIALECT = Dialect(
    name="megatron_bridge",
    engine="megatron-lm",
    patterns=(
        # Precedes the iteration line of the same step and has no step number.
        Pattern(
            "step", r"\bStep Time : \d{1,9}\.\d{1,4}s GPU utilization: (?P<tflops>\d{1,6}\.\d{1,4})MODEL_TFLOP/s/GPU"
        ),
        Pattern(
            "memory",
            r"(?:\[Rank (?P<rank>\d{1,7})\] )?\(after \d{1,12} iterations\) memory \(GB\) \|",
            keys={
                "mem-max-allocated-gigabytes": "memory_allocated_gb",
                "mem-max-reserved-gigabytes": "memory_reserved_gb",
            },
        ),
    ),
)
