"""IBM's fms-fsdp: one named figure per line, memory in bytes, the step time as the mean since the line before.

Every figure ends its line: nothing shows whether it was cut.
"""

from hpc_gpt.readers.pattern import END, LINE_START, NUMBER, Dialect, Kind, Pattern


def _line(name: str, group: str, kind: Kind = "more", number: str = NUMBER) -> Pattern:
    return Pattern(kind, f"{name}: ", LINE_START + rf"{name}: (?P<{group}>{number})" + END)


DIALECT = Dialect(
    name="fms_fsdp",
    dtype="bf16",
    engine="fsdp",
    patterns=(
        _line("step", "step", "step", r"\d{1,12}"),
        _line("loss", "loss"),
        _line("LR", "lr"),
        _line("tokens seen", "consumed_tokens"),
        _line("gradient norm", "grad_norm"),
        _line("current step time", "step_s"),
        _line("current token per gpu per sec", "tokens_per_s_gpu"),
        _line("reserved memory", "memory_reserved_bytes", "memory", r"\d{4,16}"),
        _line("allocated memory", "memory_allocated_bytes", "memory", r"\d{4,16}"),
        Pattern("fact", "--> model has ", rf"--> model has (?P<params_millions>{NUMBER}) Million params"),
    ),
)
