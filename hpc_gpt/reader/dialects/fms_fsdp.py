"""IBM's fms-fsdp: one named figure per line, memory in bytes, the step time as the mean since the line before.

Every figure ends its line: nothing shows whether it was cut.
"""

from hpc_gpt.reader.pattern import LINE_START, Dialect, line, settings

_FIGURES = {
    "loss": "loss", "LR": "lr", "tokens seen": "consumed_tokens", "gradient norm": "grad_norm",
    "current step time": "step_s", "current token per gpu per sec": "tokens_per_s_gpu",
}  # fmt: skip
_MEMORY = {"reserved memory": "memory_reserved_bytes", "allocated memory": "memory_allocated_bytes"}

DIALECT = Dialect(
    name="fms_fsdp",
    dtype="bf16",
    engine="fsdp",
    patterns=(
        line("step", "step: {step}", LINE_START),
        *settings("NAME: FIELD", _FIGURES, LINE_START, "more"),
        *settings("NAME: FIELD", _MEMORY, LINE_START, "memory"),
        line("fact", "--> model has {params_millions} Million params"),
    ),
)
