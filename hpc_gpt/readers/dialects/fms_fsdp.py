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
    specimen="""\
step: 100
loss: 8.966378341489128
LR: 0.00015
tokens seen: 830414272
gradient norm: 0.5172997
reserved memory: 60564068473
allocated memory: 49736248138
current step time: 2.0401
current token per gpu per sec: 3393
--> model has 6811.277349 Million params
""",
    seen="foundation-model-stack/fms-fsdp fms_fsdp/utils/train_utils.py",
)
