"""DeepSpeed's message that fp16 gradients overflowed and the step was skipped. It precedes the line of the step."""

from hpc_gpt.reader.pattern import Dialect, Pattern, line

DIALECT = Dialect(
    name="deepspeed_overflow",
    patterns=(
        # If every rank prints it, rank 0's line counts.
        Pattern("step", r"\bOVERFLOW! (?:Rank 0 )?Skipping step\.", facts={"skipped": 1}),
        line("step", "Overflow detected. Skipping step.", facts={"skipped": 1}),
    ),
)
