"""ColossalAI's examples: rich's console, which wraps long lines; a step's time is on a line of its own, without a number."""

from hpc_gpt.reader.pattern import NUMBER, Dialect, Pattern, line

DIALECT = Dialect(
    name="colossalai",
    engine="colossalai",
    patterns=(
        line("step", "colossalai - INFO: Step time: {step_s}"),
        line("fact", "colossalai - colossalai - INFO: ", facts={"engine": "colossalai"}),
        Pattern("memory", rf"\bMax CUDA memory usage: (?P<memory_allocated_mib>{NUMBER}) MB\b"),
    ),
)
