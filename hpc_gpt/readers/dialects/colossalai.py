"""ColossalAI's examples: rich's console, which wraps long lines; a step's time is on a line of its own, without a number."""

from hpc_gpt.readers.pattern import END, NUMBER, Dialect, Pattern

DIALECT = Dialect(
    name="colossalai",
    engine="colossalai",
    patterns=(
        Pattern("step", "Step time: ", rf"\bcolossalai - INFO: Step time: (?P<step_s>{NUMBER})" + END),
        Pattern("fact", "colossalai - INFO: ", r"\bcolossalai - colossalai - INFO: ", facts={"engine": "colossalai"}),
        Pattern(
            "memory", "Max CUDA memory usage: ", rf"\bMax CUDA memory usage: (?P<memory_allocated_mib>{NUMBER}) MB\b"
        ),
    ),
)
